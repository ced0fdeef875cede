package pack

import (
	"errors"

	"agentrun.dev/internal/snapshot"
)

// ErrPrivate says that a snapshot must stay where it is.
var ErrPrivate = errors.New("the snapshot is private: a holder of secrets is never packed")

// PrivateLabel marks a snapshot that must not leave its machine, whatever its
// value.
const PrivateLabel = "agentrun.dev/private"

// Packable refuses a snapshot that must not travel. It is the one place that
// decides so: Write and Push ask before they read any content, Read and Pull
// before they take any.
func Packable(m snapshot.Manifest) error {
	if _, private := m.Labels[PrivateLabel]; private {
		return ErrPrivate
	}
	return nil
}
