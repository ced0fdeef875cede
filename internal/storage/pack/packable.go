package pack

import (
	"errors"

	"agentrun.dev/internal/storage/snapshot"
)

// ErrPrivate says that a snapshot must not leave its host.
var ErrPrivate = errors.New("the snapshot holds secrets: it is private to its machine and never packed")

// Packable refuses a snapshot that must not leave its host. This is the only
// place that decides it: Write and Push call it before they read content, Read
// and Pull before they accept content.
func Packable(m snapshot.Manifest) error {
	if m.Private {
		return ErrPrivate
	}
	return nil
}
