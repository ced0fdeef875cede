package engine

import "agentrun.dev/internal/storage/snapshot"

// Held is host memory that a sandbox uses beside its own: a layer that it maps, or
// that it was restored from.
type Held struct {
	// ID is the same for all sandboxes that share this memory. The memory exists
	// once, until the last of them has ended.
	ID    string `json:"id"`
	Bytes uint64 `json:"bytes"`
}

// HeldBy lists the memory that a fork of a snapshot holds. Memory that is the fork's
// alone is named after owner.
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

// HeldBytes is the sum of a list.
func HeldBytes(list []Held) (bytes uint64) {
	for _, h := range list {
		bytes += h.Bytes
	}
	return bytes
}
