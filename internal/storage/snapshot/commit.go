package snapshot

import (
	"crypto/sha256"
	"errors"
	"fmt"

	"agentrun.dev/internal/durable"
	"agentrun.dev/internal/storage/layer"
)

// Commit finishes the snapshot and opens it. It drops layers that m does not
// use. After an error there is no snapshot at its place, unless the error says
// so; Abort then deletes the rest.
func (b *Builder) Commit(m Manifest, state []byte) (*Snapshot, error) {
	if b.temp == "" {
		return nil, errors.New("commit snapshot: it is committed or aborted")
	}
	steps, err := b.plan(m, state)
	if err != nil {
		return nil, fmt.Errorf("commit snapshot: %w", err)
	}
	for _, s := range steps {
		if err := s.do(); err != nil {
			return nil, fmt.Errorf("commit snapshot: %s: %w", s.name, err)
		}
	}
	root, err := b.parent.OpenRoot(b.name)
	b.close()
	if err != nil {
		return nil, fmt.Errorf("open committed snapshot: %w", err)
	}
	return open(root, b.options)
}

// step is a part of a commit. The process may die between any two steps.
type step struct {
	name string
	do   func() error
}

// plan checks everything and lists the steps. The move into place comes when
// everything else is durable.
func (b *Builder) plan(m Manifest, state []byte) ([]step, error) {
	if m.Format == 0 {
		m.Format = Format
	}
	if b.Private() {
		m.Private, m.Format = true, FormatPrivate
	} else if m.Private {
		return nil, ErrPrivate
	}
	if m.Engine == "" {
		m.Engine = Engine
	}
	m.State = Blob{sha256.Sum256(state), uint64(len(state))}
	manifest, err := encode(m)
	if err != nil {
		return nil, err
	}
	if state, err = b.sealState(state); err != nil {
		return nil, err
	}
	used := map[layer.Digest]bool{}
	for _, ref := range m.Layers() {
		used[ref.Digest] = true
		if have, ok := b.added[ref.Digest]; !ok || have.size != ref.Size {
			return nil, fmt.Errorf("layer %s of %d bytes was not added", ref.Digest, ref.Size)
		}
	}
	return []step{
		{"drop unused layers", func() error { return b.drop(used) }},
		{"write state", func() error { return durable.WriteNew(b.root, stateName, state) }},
		{"write manifest", func() error { return durable.WriteNew(b.root, manifestName, manifest) }},
		{"sync layers", func() error { return durable.SyncRoot(b.layers) }},
		{"sync folder", func() error { return durable.SyncRoot(b.root) }},
		{"move into place", b.move},
		{"the snapshot is in place but not yet durable: sync parent", func() error { return durable.SyncRoot(b.parent) }},
	}, nil
}

func (b *Builder) drop(used map[layer.Digest]bool) error {
	for d, have := range b.added {
		if used[d] {
			continue
		}
		if err := b.layers.Remove(layerName(d, have.sealed)); err != nil {
			return err
		}
		delete(b.added, d)
	}
	return nil
}

func (b *Builder) move() error {
	if err := durable.Place(b.parent, b.temp, b.name); err != nil {
		return err
	}
	b.temp = "" // nothing to abort any more
	return nil
}
