package stack

import (
	"slices"
	"time"

	"gvisor.dev/gvisor/pkg/tcpip"
)

const (
	// maxEnded bounds the ended connections that a Mark remembers.
	maxEnded = 1 << 16
	// maxReset and resetAge are for resets that a sandbox may not have seen yet,
	// because the RST may still be on the wire. So Collect counts the last maxReset
	// connections that were reset within resetAge as open, unless the wire has come
	// to rest since.
	maxReset = 1 << 10
	resetAge = 5 * time.Second
)

// Mark is an instant from which on a wire remembers the connections that end. A
// capture of the sandbox happens at an instant that the wire does not know. With Mark
// before the capture and Collect after it, the wire finds all connections that the
// capture may contain.
type Mark struct {
	w     *Wire
	ended map[Tuple]struct{}
}

// lineage is a wire's data for copies of its sandbox. Wire.mu protects it.
type lineage struct {
	marks map[*Mark]struct{}
	reset []resetTuple
}

type resetTuple struct {
	tuple Tuple
	at    tcpip.MonotonicTime
}

// Mark begins to remember ended connections. The caller ends each Mark with Collect.
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

// ended records the end of a connection. The caller holds w.mu.
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

// forgetResets drops old resets. The caller holds w.mu.
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
// that it has inherited. For each connection it gets an unexpected ACK. Its kernel
// answers with the sequence number that it expects, and the wire answers that with a
// RST that fits. So even a program inside that only reads sees ECONNRESET.
// Connections that the sandbox has opened itself are not touched.
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
