// Package peer moves snapshots of templates between nodes, in parts of layers with digests
// of their own: what a node serves to others, and how it fetches what it lacks from several of
// them. How the bytes travel is its users' affair. docs/design/peer.md has the whole.
package peer

import (
	"errors"

	"agentrun.dev/internal/storage/snapshot"
)

// ErrSealed says that a snapshot must stay where it is.
var ErrSealed = errors.New("the snapshot holds secrets: it is sealed for its node, and never travels")

// Travels refuses a snapshot that must not leave its node. Whoever serves one asks, and
// whoever fetches one.
func Travels(m snapshot.Manifest) error {
	if m.Private {
		return ErrSealed
	}
	return nil
}
