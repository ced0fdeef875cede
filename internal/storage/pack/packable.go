package pack

import (
	"errors"

	"agentrun.dev/internal/storage/snapshot"
)

// ErrPrivate says that a snapshot must stay where it is.
var ErrPrivate = errors.New("the snapshot holds secrets: it is private to its machine and never packed")

// Packable refuses a snapshot that must not travel. It is the one place that
// decides so: Write and Push ask before they read any content, Read and Pull
// before they take any.
func Packable(m snapshot.Manifest) error {
	if m.Private {
		return ErrPrivate
	}
	return nil
}
