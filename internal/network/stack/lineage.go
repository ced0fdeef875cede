package stack

import (
	"slices"
	"time"

	"gvisor.dev/gvisor/pkg/tcpip"
)

const (
	// maxEnded bounds the ended connections that a Mark remembers.
	maxEnded = 1 << 16
	// A sandbox may not have seen yet that a connection was reset: the RST may still
	// be on the wire. So the last maxReset that were reset within resetAge count as
	// open for those who collect, unless the wire has come to rest since.
	maxReset = 1 << 10
	resetAge = 5 * time.Second
)

// Mark is an instant from which on a wire remembers the connections that end. A
// capture of the sandbox happens at an instant that the wire does not know; Mark
// before it and Collect after it find all connections that can be in it.
type Mark struct {
	w     *Wire
	ended map[Tuple]struct{}
}

// lineage is what a wire knows for the copies of its sandbox; Wire.mu protects it.
type lineage struct {
	marks map[*Mark]struct{}
	reset []resetTuple
}

type resetTuple struct {
	tuple Tuple
	at    tcpip.MonotonicTime
}

// Mark begins to remember. Each Mark is collected, or forgotten by Collect.
func (w *Wire) Mark() *Mark {
	m := &Mark{w: w, ended: map[Tuple]struct{}{}}
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.marks == nil {
		w.marks = map[*Mark]struct{}{}
	}
	w.marks[m] = struct{}{}
	w.forgetResets()
	for _, r := range w.reset {
		m.ended[r.tuple] = struct{}{}
	}
	return m
}

// Collect returns every TCP connection that was open at some time since m, in a
// stable order, and ends m.
func (m *Mark) Collect() []Tuple {
	m.w.mu.Lock()
	defer m.w.mu.Unlock()
	delete(m.w.marks, m)
	for t := range m.w.conns {
		m.ended[t] = struct{}{}
	}
	all := make([]Tuple, 0, len(m.ended))
	for t := range m.ended {
		all = append(all, t)
	}
	slices.SortFunc(all, func(a, b Tuple) int {
		if c := a.Inside.Compare(b.Inside); c != 0 {
			return c
		}
		return a.Outside.Compare(b.Outside)
	})
	m.ended = nil
	return all
}

// ended notes that a connection is over; the caller holds w.mu.
func (w *Wire) ended(t Tuple, reset bool) {
	for m := range w.marks {
		if len(m.ended) < maxEnded {
			m.ended[t] = struct{}{}
		}
	}
	if !reset {
		return
	}
	w.forgetResets()
	if len(w.reset) == maxReset {
		w.reset = slices.Delete(w.reset, 0, 1)
	}
	w.reset = append(w.reset, resetTuple{t, w.clock.NowMonotonic()})
}

// forgetResets drops resets that are old; the caller holds w.mu.
func (w *Wire) forgetResets() {
	now := w.clock.NowMonotonic()
	young := slices.IndexFunc(w.reset, func(r resetTuple) bool { return now.Sub(r.at) < resetAge })
	if young < 0 {
		w.reset = nil
		return
	}
	w.reset = slices.Delete(w.reset, 0, young)
}

// ResetInherited makes the sandbox, a copy of another one, give up the connections
// that it has from there. For each it gets an ACK out of the blue. Its kernel answers
// with what it expects, which draws a RST that fits: a program inside that only reads
// sees ECONNRESET, too. Connections that the sandbox has opened itself are left alone.
func (w *Wire) ResetInherited(tuples []Tuple) {
	w.mu.Lock()
	own := make([]Tuple, 0, len(tuples))
	for _, t := range tuples {
		inside, outside := t.Inside.Addr(), t.Outside.Addr()
		if t.Protocol == TCP && w.conns[t] == nil && w.isInside(inside) && inside.BitLen() == outside.BitLen() && len(own) < maxEnded {
			own = append(own, t)
		}
	}
	w.mu.Unlock()

	w.tx.mu.Lock()
	defer w.tx.mu.Unlock()
	w.tx.inherited = append(w.tx.inherited, own...)
	w.flush()
}
