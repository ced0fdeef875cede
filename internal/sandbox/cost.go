package sandbox

import (
	"context"
	"errors"
	"fmt"
	"time"

	"agentrun.dev/internal/engine"
	"agentrun.dev/internal/node/journal"
)

// Cost is what a sandbox costs at an instant. One that is on disk costs nothing
// here.
type Cost struct {
	Sandbox
	At time.Time
	// Reserved is the memory that was set aside for it, with the layers that it maps.
	// What it shares with others is part of each of them here, and set aside once.
	Reserved uint64
	engine.Stats
}

// Cost looks at what a sandbox costs, and does not wake it.
func (m *Manager) Cost(ctx context.Context, k Key) (Cost, error) {
	s, err := m.Sandbox(k)
	if err != nil {
		return Cost{}, err
	}
	return m.cost(ctx, s)
}

// Costs looks at what sandboxes cost, by name.
func (m *Manager) Costs(ctx context.Context, n Namespace, p Page) ([]Cost, error) {
	list, err := m.Sandboxes(n, p, false)
	if err != nil {
		return nil, err
	}
	out := make([]Cost, 0, len(list))
	for _, s := range list {
		c, err := m.cost(ctx, s)
		if err != nil {
			return nil, err
		}
		out = append(out, c)
	}
	return out, nil
}

func (m *Manager) cost(ctx context.Context, s Sandbox) (Cost, error) {
	c := Cost{Sandbox: s, At: time.Now().UTC()}
	m.mu.Lock()
	b := m.sandboxes[s.ID]
	m.mu.Unlock()
	if b == nil {
		return c, nil // it has ended meanwhile
	}
	b.mu.Lock()
	machine := b.machine
	c.Sandbox = b.record
	b.mu.Unlock()
	if machine == nil {
		return c, nil
	}
	var err error
	c.Reserved = c.Memory + engine.HeldBytes(c.held())
	c.Stats, err = machine.Stats(ctx)
	if errors.Is(err, engine.ErrEnded) {
		return c, nil // that it has is about to be noticed
	}
	if err != nil {
		err = fmt.Errorf("look at what sandbox %s costs: %w", s.Name, err)
	}
	return c, err
}

// NodeStatus is what a node has, and what of it is taken.
type NodeStatus struct {
	Engine string
	// Capacity is the memory that machines may reserve together, Reserved what
	// they have.
	Capacity, Reserved uint64
	// Sandboxes have not ended; Hibernated are those of them that are on disk.
	Sandboxes, Hibernated int
	Checkpoints           int
	// CheckpointBytes is what checkpoints take on disk together.
	CheckpointBytes uint64
}

// Node looks at the node.
func (m *Manager) Node() (NodeStatus, error) {
	n := NodeStatus{Engine: m.cfg.Engine.Name(), Capacity: m.capacity.capacity, Reserved: m.capacity.reserved()}
	err := m.db.View(func(tx *journal.Tx) error {
		return errors.Join(
			sandboxes.Each(tx, "", func(_ string, s Sandbox) error {
				switch s.State {
				case Starting, Ended:
					return nil
				case Hibernated:
					n.Hibernated++
				}
				n.Sandboxes++
				return nil
			}),
			checkpoints.Each(tx, "", func(_ string, c Checkpoint) error {
				if c.ready() {
					n.Checkpoints++
				}
				return nil
			}))
	})
	if err == nil {
		n.CheckpointBytes, err = m.CheckpointBytes()
	}
	return n, err
}
