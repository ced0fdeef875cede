package netds

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"time"

	"agentrun.dev/internal/network/netctl"
	"agentrun.dev/internal/node"
	"agentrun.dev/internal/sandbox"
)

// wireOf describes the interface of a machine.
func wireOf(at node.Joint, rules netctl.Rules) netctl.Wire {
	face := node.Interface()
	w := netctl.Wire{
		ID: netctl.ID(at.Machine), MAC: face.MAC, GatewayMAC: node.GatewayMAC, MTU: face.MTU,
		Address: face.Address.Addr(), Gateway: face.Gateway,
		Address6: face.Address6.Addr(), Gateway6: face.Gateway6,
		Rules: rules, Paused: at.Paused,
	}
	if at.Lineage == nil {
		return w
	}
	for _, c := range at.Lineage.Connections {
		w.Lineage.Tuples = append(w.Lineage.Tuples, netctl.Tuple(c))
	}
	for _, p := range at.Lineage.Pins {
		w.Lineage.Pins = append(w.Lineage.Pins, netctl.Pin(p))
	}
	for _, u := range at.Lineage.Wildcards {
		w.Lineage.Wildcards = append(w.Lineage.Wildcards, netctl.Wildcard(u))
	}
	return w
}

func fromLineage(l netctl.Lineage) *sandbox.Lineage {
	if len(l.Tuples)+len(l.Pins)+len(l.Wildcards) == 0 {
		return nil
	}
	out := &sandbox.Lineage{}
	for _, t := range l.Tuples {
		out.Connections = append(out.Connections, sandbox.Connection(t))
	}
	for _, p := range l.Pins {
		out.Pins = append(out.Pins, sandbox.Pin(p))
	}
	for _, u := range l.Wildcards {
		out.Wildcards = append(out.Wildcards, sandbox.Wildcard(u))
	}
	return out
}

// capture has the netd record the connections of a machine from now on, until
// collect.
func (ns *namespace) capture(ctx context.Context, machine sandbox.ID) (collect func(context.Context) *sandbox.Lineage) {
	unknown := func(err error) *sandbox.Lineage {
		// Without a netd there are no connections to inherit.
		if !errors.Is(err, netctl.ErrBroken) {
			ns.netds.cfg.Log.Error("note the connections of a sandbox that is captured", "machine", machine, "error", err)
		}
		return nil
	}
	nothing := func(context.Context) *sandbox.Lineage { return nil }
	c := ns.connected()
	if c == nil {
		return nothing
	}
	mark, err := c.Mark(ctx, netctl.ID(machine))
	if err != nil {
		unknown(err)
		return nothing
	}
	return func(ctx context.Context) *sandbox.Lineage {
		l, err := c.Collect(ctx, netctl.ID(machine), mark)
		if err != nil {
			return unknown(err)
		}
		return fromLineage(l)
	}
}

// rememberEvery bounds the age of the daemon's knowledge of a netd that is
// killed.
const rememberEvery = 5 * time.Second

// remember asks a netd for the lineages of its machines. If this netd is killed, the next one
// continues from them. It skips machines that have sent nothing since the last time, according
// to seen.
func (ns *namespace) remember(ctx context.Context, c *netctl.Client, seen map[netctl.ID]uint64) {
	list, err := c.List(ctx)
	if err != nil {
		return // the netd has ended, or is asked again later
	}
	maps.DeleteFunc(seen, func(id netctl.ID, _ uint64) bool {
		return !slices.ContainsFunc(list, func(w netctl.WireInfo) bool { return w.ID == id })
	})
	for _, w := range list {
		if frames, ok := seen[w.ID]; ok && frames == w.Counters.FramesIn {
			continue
		}
		l, err := ask(ctx, c, w.ID)
		if errors.Is(err, context.DeadlineExceeded) || errors.Is(err, netctl.ErrBroken) {
			return // the netd does not answer; waiting for each of its wires would delay the namespace
		}
		if err != nil {
			continue // the machine has left, or is asked about again later
		}
		seen[w.ID] = w.Counters.FramesIn
		ns.turn.Lock()
		ns.mu.Lock()
		j := ns.joints[sandbox.ID(w.ID)]
		current := ns.client == c
		ns.mu.Unlock()
		if j != nil && current {
			j.Lineage = fromLineage(l)
		}
		ns.turn.Unlock()
	}
}

// rememberPatience bounds the time for one machine.
const rememberPatience = 2 * time.Second

// ask asks a netd for the lineage of a machine.
func ask(ctx context.Context, c *netctl.Client, wire netctl.ID) (netctl.Lineage, error) {
	ctx, cancel := context.WithTimeout(ctx, rememberPatience)
	defer cancel()
	mark, err := c.Mark(ctx, wire)
	if err != nil {
		return netctl.Lineage{}, err
	}
	return c.Collect(ctx, wire, mark)
}

// traffic returns a part of a machine's log.
func (ns *namespace) traffic(ctx context.Context, machine sandbox.ID, r sandbox.TrafficRequest) (sandbox.TrafficPage, error) {
	c, err := ns.await(ctx)
	if err != nil {
		return sandbox.TrafficPage{}, err
	}
	page, err := c.Log(ctx, netctl.Log{Wire: netctl.ID(machine), From: max(r.From, 1), Max: r.Max, Wait: r.Wait, Open: r.Open})
	if err != nil {
		return sandbox.TrafficPage{}, fmt.Errorf("read the network log: %w", err)
	}
	out := sandbox.TrafficPage{Next: page.Next, Lost: page.Lost}
	for _, e := range page.Entries {
		out.Entries = append(out.Entries, sandbox.Traffic(e))
	}
	for _, e := range page.Open {
		out.Open = append(out.Open, sandbox.Traffic(e))
	}
	return out, nil
}
