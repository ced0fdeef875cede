package node

import (
	"fmt"
	"strings"

	"agentrun.dev/internal/sandbox"
)

// beginCapture reserves memory for what a live fork of the sandbox captures: at
// most all that it has. It is in the journal before the engine begins, so that a
// daemon which comes after a crash counts it too. The caller has the turn.
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

// endCapture says what the sandbox holds of its live forks from now on, in a transaction
// with what else belongs there. The children hold theirs already.
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

// heldFor is what a fork holds of the layers of its source: the same, but for
// those of which each machine has a copy of its own.
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
