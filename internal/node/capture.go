package node

import (
	"fmt"
	"strings"

	"agentrun.dev/internal/sandbox"
)

// beginCapture reserves memory for a live fork of the sandbox: at most the
// sandbox's entire memory. The reservation is in the journal before the engine
// begins, so that the next daemon counts it too after a crash. The caller has
// the turn.
func (b *member) beginCapture() (sandbox.Held, error) {
	m, s := b.manager, b.now()
	capture := sandbox.Held{ID: "capture-" + string(sandbox.NewID()), Bytes: s.Memory}
	if err := m.reserve(s.Namespace, 0, capture); err != nil {
		return capture, fmt.Errorf("a fork of %s is made of a copy of its memory: %w", s.Name, err)
	}
	err := b.change(func(s *sandbox.Sandbox) { s.Live = append(s.Live[:len(s.Live):len(s.Live)], capture) })
	if err != nil {
		m.capacity.release(s.Namespace, 0, capture)
	}
	return capture, err
}

// endCapture sets the memory that the sandbox holds for its live forks from now on, in a
// transaction with further writes. The children hold theirs already.
func (b *member) endCapture(held []sandbox.Held, also record[sandbox.Sandbox]) error {
	m, last := b.manager, b.now()
	m.capacity.take(last.Namespace, 0, held...)
	if err := b.changeAnd(func(s *sandbox.Sandbox) { s.Live = held }, also); err != nil {
		m.capacity.release(last.Namespace, 0, held...)
		return err
	}
	m.capacity.release(last.Namespace, 0, last.Live...)
	m.refill()
	return nil
}

// heldFor returns the layers that a fork holds: those of its source, except
// that a fork has its own copy of the layers that each machine copies.
func heldFor(layers []sandbox.Held, owner string) []sandbox.Held {
	out := make([]sandbox.Held, len(layers))
	for i, h := range layers {
		if digest, _, own := strings.Cut(h.ID, "@"); own {
			h.ID = digest + "@" + owner
		}
		out[i] = h
	}
	return out
}
