// Package peer moves snapshots of templates between nodes, in parts of layers with digests of
// their own. A node serves parts to others, and fetches the parts that it lacks from several
// of them. The callers provide the transport. docs/design/peer.md describes the design.
package peer

import (
	"errors"

	"agentrun.dev/internal/storage/snapshot"
)

// ErrSealed says that a snapshot must stay on its node.
var ErrSealed = errors.New("the snapshot holds secrets: it is sealed for its node, and never travels")

// Travels refuses a snapshot that must not leave its node. Both the node that serves a
// snapshot and the one that fetches it call this.
func Travels(m snapshot.Manifest) error {
	if m.Private {
		return ErrSealed
	}
	return nil
}
