package stack

import (
	"errors"
	"fmt"
)

// What all wires of a poller take together is bounded, too: a process that its kernel
// kills for want of memory cuts off every sandbox it serves, and one without descriptors
// can neither take a wire nor be told anything.
const (
	// maxMemory is for all connections and flows. A netd may have 1 GiB (package netproc), a
	// part of which are the buffers of its sockets, which nobody counts here.
	maxMemory = 640 << 20
	// connMemory is what a connection takes besides its reserved buffers, if neither side
	// reads: the smallest buffers, what is being copied, goroutines.
	connMemory = 192 << 10
	// flowMemory is what a flow takes besides its datagrams: two goroutines, a timer.
	flowMemory = 20 << 10
)

// ErrBusy says that the process has no room for a further wire.
var ErrBusy = errors.New("no room for a further wire")

// usage is what connections and flows have taken.
type usage struct{ memory, descriptors int }

// fits says whether something more fits into the share of somebody who has own of all
// that is taken of most: three quarters of what others leave, so that there is always some.
func fits(own, more, all, most int) bool {
	return more == 0 || own+more <= (most-(all-own))/4*3
}

// charge takes what a connection or a flow needs, if there is so much; the caller holds
// w.mu. A quarter of the descriptors is left to wires, which take one each.
func (w *Wire) charge(need usage) bool {
	p := w.poller
	p.mu.Lock()
	defer p.mu.Unlock()
	if !fits(w.used.memory, need.memory, p.used.memory, p.maxMemory) ||
		!fits(w.used.descriptors, need.descriptors, p.used.descriptors, p.maxDescriptors/4*3) ||
		need.descriptors > 0 && p.used.descriptors+len(p.wires)+need.descriptors > p.maxDescriptors {
		return false
	}
	w.take(need)
	return true
}

// release gives back what was taken; the caller holds w.mu.
func (w *Wire) release(u usage) {
	w.poller.mu.Lock()
	defer w.poller.mu.Unlock()
	w.take(usage{-u.memory, -u.descriptors})
}

// take counts what is taken; the caller holds w.mu and w.poller.mu.
func (w *Wire) take(u usage) {
	for _, of := range []*usage{&w.used, &w.poller.used} {
		of.memory += u.memory
		of.descriptors += u.descriptors
	}
}

// chargeWire finds out whether a wire has a descriptor; the caller holds p.mu.
func (p *Poller) chargeWire() error {
	if taken := p.used.descriptors + len(p.wires); taken >= p.maxDescriptors {
		return fmt.Errorf("%w: all %d descriptors of wires, connections and flows are taken", ErrBusy, taken)
	}
	return nil
}

// chargeBuffers takes the memory of a connection's two buffers of size bytes each, or of
// smaller ones; the caller holds w.mu. All buffers have half of the memory: the rest is for
// more connections. It returns their size, or 0 if only the smallest
// are possible, which connMemory has counted.
func (w *Wire) chargeBuffers(size int) int {
	p := w.poller
	p.mu.Lock()
	defer p.mu.Unlock()
	size = min(size, (p.maxMemory/2-p.buffers)/bufferShare/2)
	if size <= minBuffer {
		return 0
	}
	w.take(usage{memory: 2 * size})
	p.buffers += 2 * size
	return size
}

// releaseBuffers gives back what chargeBuffers has taken; the caller holds w.mu.
func (w *Wire) releaseBuffers(size int) {
	w.poller.mu.Lock()
	defer w.poller.mu.Unlock()
	w.take(usage{memory: -size})
	w.poller.buffers -= size
}

// Reserve implements Conn.
func (i *insideConn) Reserve(bytes int) (release func(), ok bool) {
	c := i.c
	c.w.mu.Lock()
	defer c.w.mu.Unlock()
	if bytes < 0 || !c.w.charge(usage{memory: bytes}) {
		return nil, false
	}
	given := false // Wire.mu protects it
	return func() {
		c.w.mu.Lock()
		defer c.w.mu.Unlock()
		if !given {
			given = true
			c.w.release(usage{memory: bytes})
		}
	}, true
}
