package node

import (
	"context"
	"errors"
	"fmt"
	"time"

	"agentrun.dev/internal/engine"
	"agentrun.dev/internal/sandbox"
)

// Cost returns the cost of a sandbox, without waking it.
func (m *Manager) Cost(ctx context.Context, k sandbox.Key) (sandbox.Cost, error) {
	s, err := m.Sandbox(ctx, k)
	if err != nil {
		return sandbox.Cost{}, err
	}
	return m.cost(ctx, s, m.networkUse(ctx, k.Namespace))
}

// networkUse returns the network use of all machines of a namespace.
func (m *Manager) networkUse(ctx context.Context, n sandbox.Namespace) map[sandbox.ID]sandbox.NetworkUse {
	if m.cfg.Network == nil {
		return nil
	}
	return m.cfg.Network.Use(ctx, n)
}

// Costs returns the costs of sandboxes, by name.
func (m *Manager) Costs(ctx context.Context, n sandbox.Namespace, p sandbox.Page) ([]sandbox.Cost, error) {
	list, err := m.Sandboxes(ctx, sandbox.SandboxesRequest{Namespace: n, Page: p, Ended: false})
	if err != nil {
		return nil, err
	}
	use := m.networkUse(ctx, n)
	out := make([]sandbox.Cost, 0, len(list))
	for _, s := range list {
		c, err := m.cost(ctx, s, use)
		if err != nil {
			return nil, err
		}
		out = append(out, c)
	}
	return out, nil
}

func (m *Manager) cost(ctx context.Context, s sandbox.Sandbox, use map[sandbox.ID]sandbox.NetworkUse) (sandbox.Cost, error) {
	c := sandbox.Cost{Sandbox: s, At: time.Now().UTC()}
	m.mu.Lock()
	b := m.roster.byID[s.ID]
	m.mu.Unlock()
	if b == nil {
		return c, nil // it has ended in the meantime
	}
	b.mu.Lock()
	machine := b.machine
	c.Sandbox = *b.record
	b.mu.Unlock()
	if machine == nil {
		return c, nil
	}
	c.Network = use[c.Machine]
	c.Reserved = c.Memory
	for _, h := range c.Holds() {
		c.Reserved += h.Bytes
	}
	stats, err := machine.Stats(ctx)
	c.Stats = fromStats(stats)
	if errors.Is(err, engine.ErrEnded) {
		return c, nil // its end will be noticed soon
	}
	if err != nil {
		err = fmt.Errorf("look at what sandbox %s costs: %w", s.Name, err)
	}
	return c, err
}
