package netds

import (
	"context"
	"maps"
	"slices"
	"sync"
	"time"

	"agentrun.dev/internal/network/netctl"
	"agentrun.dev/internal/node"
	"agentrun.dev/internal/sandbox"
)

// statsPatience is how long a netd may take to answer. Scrapes of metrics, and requests
// for the costs of sandboxes, wait for it.
const statsPatience = time.Second

// Stats returns the numbers of all namespaces whose netd answers.
func (n *Netds) Stats(ctx context.Context) map[sandbox.Namespace]node.NetworkStats {
	ctx, cancel := context.WithTimeout(ctx, statsPatience)
	defer cancel()
	n.mu.Lock()
	all := slices.Collect(maps.Values(n.namespaces))
	n.mu.Unlock()
	out := map[sandbox.Namespace]node.NetworkStats{}
	var mu sync.Mutex // protects out
	var asked sync.WaitGroup
	for _, ns := range all {
		c := ns.connected()
		if c == nil {
			continue
		}
		asked.Go(func() {
			stats, err := c.Stats(ctx)
			if err != nil {
				return // the netd has ended, or is too busy to answer
			}
			wires, err := c.List(ctx)
			if err != nil {
				return
			}
			mu.Lock()
			defer mu.Unlock()
			out[ns.name] = fromStats(stats, wires)
		})
	}
	asked.Wait()
	return out
}

func fromStats(s netctl.Stats, wires []netctl.WireInfo) node.NetworkStats {
	out := node.NetworkStats{Interfaces: s.Wires, Queries: s.Queries, Injected: s.Injected}
	for _, w := range wires {
		out.Open += w.Counters.Connections + w.Counters.Flows
	}
	for _, k := range s.Kinds {
		out.Kinds = append(out.Kinds, node.NetworkKind{Kind: k.Kind, Opened: k.Connections, Refused: k.Refusals, Sent: k.Sent, Received: k.Received})
	}
	for _, d := range s.Dropped {
		out.Dropped += d.Count
	}
	return out
}

// Use returns the network use of the machines of a namespace, if its netd
// answers.
func (n *Netds) Use(ctx context.Context, name sandbox.Namespace) map[sandbox.ID]sandbox.NetworkUse {
	n.mu.Lock()
	ns := n.namespaces[name]
	n.mu.Unlock()
	if ns == nil {
		return nil
	}
	c := ns.connected()
	if c == nil {
		return nil
	}
	ctx, cancel := context.WithTimeout(ctx, statsPatience)
	defer cancel()
	wires, err := c.List(ctx)
	if err != nil {
		return nil
	}
	out := make(map[sandbox.ID]sandbox.NetworkUse, len(wires))
	for _, w := range wires {
		out[sandbox.ID(w.ID)] = sandbox.NetworkUse{
			Sent: w.Counters.BytesIn, Received: w.Counters.BytesOut, Connections: w.Counters.Connections + w.Counters.Flows, Refused: w.Counters.Refused,
		}
	}
	return out
}
