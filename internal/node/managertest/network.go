package managertest

import (
	"context"
	"sync"

	"agentrun.dev/internal/network/policy"
	"agentrun.dev/internal/node"
	"agentrun.dev/internal/sandbox"
)

// Network connects no machine. It only keeps the policies and the logs of
// machines.
type Network struct {
	mu       sync.Mutex // protects all following fields
	machines map[sandbox.ID]*machine
}

type machine struct {
	policies policy.Set
	entries  []sandbox.Traffic
	open     []sandbox.Traffic
	changed  chan struct{} // closed at the next entry
}

var _ node.Network = (*Network)(nil)

func newNetwork() *Network { return &Network{machines: map[sandbox.ID]*machine{}} }

// Log adds an entry to the log of a machine, and counts it.
func (n *Network) Log(id sandbox.ID, e sandbox.Traffic) {
	n.mu.Lock()
	defer n.mu.Unlock()
	m := n.machines[id]
	if e.Outcome == "open" {
		m.open = append(m.open, e)
		return
	}
	e.Seq = uint64(len(m.entries)) + 1
	m.entries = append(m.entries, e)
	close(m.changed)
	m.changed = make(chan struct{})
}

// Policies returns the policies in force for a machine.
func (n *Network) Policies(id sandbox.ID) policy.Set {
	n.mu.Lock()
	defer n.mu.Unlock()
	return n.machines[id].policies
}

// Join implements node.Network.
func (n *Network) Join(_ context.Context, at node.Joint) error {
	n.mu.Lock()
	defer n.mu.Unlock()
	n.machines[at.Machine] = &machine{policies: at.Policies, changed: make(chan struct{})}
	return nil
}

// SetPolicies implements node.Network.
func (n *Network) SetPolicies(_ context.Context, at node.Joint) error {
	n.mu.Lock()
	defer n.mu.Unlock()
	n.machines[at.Machine].policies = at.Policies
	return nil
}

// Leave implements node.Network.
func (n *Network) Leave(at node.Joint) {
	n.mu.Lock()
	defer n.mu.Unlock()
	delete(n.machines, at.Machine)
}

// Pause implements node.Network.
func (n *Network) Pause(context.Context, node.Joint) {}

// Resume implements node.Network.
func (n *Network) Resume(context.Context, node.Joint) {}

// Capture implements node.Network.
func (n *Network) Capture(context.Context, node.Joint) func(context.Context) *sandbox.Lineage {
	return func(context.Context) *sandbox.Lineage { return nil }
}

// Traffic implements node.Network. It waits as long as its caller does.
func (n *Network) Traffic(ctx context.Context, at node.Joint, r sandbox.TrafficRequest) (sandbox.TrafficPage, error) {
	from := max(r.From, 1)
	for {
		n.mu.Lock()
		m := *n.machines[at.Machine]
		n.mu.Unlock()
		page := sandbox.TrafficPage{Next: from}
		if from <= uint64(len(m.entries)) {
			page.Entries = m.entries[from-1:]
			page.Entries = page.Entries[:min(len(page.Entries), r.Max)]
			page.Next = from + uint64(len(page.Entries))
		}
		if r.Open {
			page.Open = m.open
		}
		if len(page.Entries) > 0 || r.Wait == 0 {
			return page, nil
		}
		select {
		case <-m.changed:
		case <-ctx.Done():
			return page, ctx.Err()
		}
	}
}

// Use implements node.Network, with the use in its logs.
func (n *Network) Use(context.Context, sandbox.Namespace) map[sandbox.ID]sandbox.NetworkUse {
	n.mu.Lock()
	defer n.mu.Unlock()
	out := map[sandbox.ID]sandbox.NetworkUse{}
	for id, m := range n.machines {
		use := sandbox.NetworkUse{Connections: uint64(len(m.open))}
		for _, e := range m.entries {
			use.Sent, use.Received = use.Sent+e.Sent, use.Received+e.Received
			if e.Outcome == "refused" {
				use.Refused += 1 + e.Repeated
			}
		}
		out[id] = use
	}
	return out
}

// Keep implements node.Network.
func (n *Network) Keep(context.Context) error { return nil }

// BuildPolicy implements node.Network.
func (n *Network) BuildPolicy() policy.Policy { return policy.Policy{} }
