package netd

import (
	"cmp"
	"context"
	"fmt"
	"slices"
	"time"

	"agentrun.dev/internal/network/egress"
	"agentrun.dev/internal/network/netctl"
	"agentrun.dev/internal/network/stack"
)

// list describes the attached wires.
func (s *Server) list() netctl.Result {
	r := &netctl.Wires{}
	for _, w := range s.all() {
		w.mu.Lock()
		paused := w.paused
		w.mu.Unlock()
		st := w.stack.Stats()
		info := netctl.WireInfo{ID: w.id, Attached: w.attached, Paused: paused, Counters: netctl.Counters{
			FramesIn: st.FramesIn, BytesIn: st.BytesIn, FramesOut: st.FramesOut, BytesOut: st.BytesOut,
			Connections: uint64(st.Connections), Flows: uint64(st.Flows),
		}}
		for _, n := range st.Dropped {
			info.Counters.Dropped += n
		}
		for _, n := range w.sandbox.Counters() {
			info.Counters.Opened += n.Connections
			info.Counters.Refused += n.Refusals
		}
		r.All = append(r.All, info)
	}
	return r
}

// stats returns the sums over all wires.
func (s *Server) stats() netctl.Result {
	wires := s.all()
	r := &netctl.Stats{Wires: len(wires), Queries: s.gateway.Queries(), Injected: s.gateway.Injected()}
	for kind, n := range s.gateway.Counters() {
		r.Kinds = append(r.Kinds, netctl.KindCount{
			Kind: string(kind), Connections: n.Connections, Refusals: n.Refusals, Sent: n.Sent, Received: n.Received,
		})
	}
	slices.SortFunc(r.Kinds, func(a, b netctl.KindCount) int { return cmp.Compare(a.Kind, b.Kind) })
	dropped := map[stack.Drop]uint64{}
	s.mu.Lock()
	for why, n := range s.dropped {
		dropped[why] = n
	}
	s.mu.Unlock()
	for _, w := range wires {
		for why, n := range w.stack.Stats().Dropped {
			dropped[why] += n
		}
	}
	for why, n := range dropped {
		r.Dropped = append(r.Dropped, netctl.DropCount{Reason: why.String(), Count: n})
	}
	slices.SortFunc(r.Dropped, func(a, b netctl.DropCount) int { return cmp.Compare(a.Reason, b.Reason) })
	return r
}

// log reads a page of a wire's log. If the request allows it, log waits for the first
// entry.
func (s *Server) log(ctx context.Context, r *netctl.Log) (netctl.Result, error) {
	w, err := s.find(r.Wire)
	if err != nil {
		return nil, err
	}
	most := netctl.MaxEntries
	if r.Max > 0 {
		most = min(most, r.Max)
	}
	from := max(r.From, 1)
	late := time.NewTimer(min(r.Wait, netctl.MaxWait))
	defer late.Stop()
	for {
		logged := w.sandbox.LogChanged() // called before reading, so that no entry is missed
		entries := w.sandbox.Log(from-1, most)
		if len(entries) == 0 && r.Wait > 0 {
			select {
			case <-logged:
				continue
			case <-w.gone:
				return nil, fmt.Errorf("%w: %s was detached", netctl.ErrNotFound, r.Wire)
			case <-late.C:
			case <-ctx.Done(): // the parent has hung up
			}
		}
		return page(w, r, from, entries), nil
	}
}

func page(w *wire, r *netctl.Log, from uint64, entries []egress.Entry) *netctl.LogPage {
	p := &netctl.LogPage{Next: from}
	for _, e := range entries {
		p.Entries = append(p.Entries, entry(e))
	}
	if len(entries) > 0 {
		p.Lost = entries[0].Seq - min(from, entries[0].Seq) // a restarted log has lower numbers than from
		p.Next = entries[len(entries)-1].Seq + 1
	}
	if r.Open {
		open := w.sandbox.Connections()
		for _, e := range open[:min(len(open), netctl.MaxEntries)] {
			p.Open = append(p.Open, entry(e))
		}
	}
	return p
}

func entry(e egress.Entry) netctl.Entry {
	out := netctl.Entry{
		Seq: e.Seq, Time: e.Time, Ended: e.Ended, Protocol: e.Protocol, Name: e.Name, Address: e.Address, Remote: e.Remote,
		Sent: e.Sent, Received: e.Received, Rule: e.Rule, Kind: string(e.Kind), Reason: e.Reason, Outcome: string(e.Outcome), Repeated: e.Repeated,
	}
	out.Clip()
	return out
}
