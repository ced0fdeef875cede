package engine

import "agentrun.dev/internal/storage/snapshot"

// Held is something in the host's memory beside a sandbox's own: a layer that it
// maps, or was restored from.
type Held struct {
	// ID is the same for all sandboxes that have it in common: it is there once,
	// until the last of them has ended.
	ID    string `json:"id"`
	Bytes uint64 `json:"bytes"`
}

// HeldBy lists what a fork of a snapshot holds. What it has for itself alone is
// named after owner.
func HeldBy(snap *snapshot.Snapshot, owner string) ([]Held, error) {
	var list []Held
	for _, ref := range snap.Manifest().MemoryLayers() {
		list = append(list, Held{ref.Digest.String(), ref.Size})
	}
	unsealed, err := snap.UnsealedLayers()
	for _, ref := range unsealed {
		list = append(list, Held{ref.Digest.String() + "@" + owner, ref.Size})
	}
	return list, err
}

// HeldBytes is what a list comes to.
func HeldBytes(list []Held) (bytes uint64) {
	for _, h := range list {
		bytes += h.Bytes
	}
	return bytes
}
