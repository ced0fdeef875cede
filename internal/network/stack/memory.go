package stack

import (
	"errors"
	"fmt"
)

// The resources that all wires of a poller use together are bounded, too. If the
// kernel kills the process for want of memory, every sandbox that it serves is cut
// off. Without descriptors the process can neither take a wire nor receive one with a
// request.
const (
	// maxMemory bounds the memory of all connections and flows. A netd may have 1 GiB
	// (package netproc). A part of that are the buffers of its sockets, which are not
	// counted here.
	maxMemory = 640 << 20
	// connMemory is the memory of a connection besides its reserved buffers, if
	// neither side reads: the smallest buffers, the bytes being copied, goroutines.
	connMemory = 192 << 10
	// flowMemory is the memory of a flow besides its datagrams: two goroutines, a
	// timer.
	flowMemory = 20 << 10
)

// ErrBusy says that the process has no room for a further wire.
var ErrBusy = errors.New("no room for a further wire")

// usage counts the resources of connections and flows.
type usage struct{ memory, descriptors int }

// fits says whether more still fits into one wire's share. The wire has own of all
// that is taken of most. Its share is three quarters of the amount that others leave,
// so that some is always left.
func fits(own, more, all, most int) bool {
	return more == 0 || own+more <= (most-(all-own))/4*3
}

// charge takes the resources of a connection or a flow, if enough are left. The
// caller holds w.mu. A quarter of the descriptors is reserved for wires, which take
// one each.
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

// release returns resources. The caller holds w.mu.
func (w *Wire) release(u usage) {
	w.poller.mu.Lock()
	defer w.poller.mu.Unlock()
	w.take(usage{-u.memory, -u.descriptors})
}

// take counts resources as taken. The caller holds w.mu and w.poller.mu.
func (w *Wire) take(u usage) {
	for _, of := range []*usage{&w.used, &w.poller.used} {
		of.memory += u.memory
		of.descriptors += u.descriptors
	}
}

// chargeWire checks that a descriptor is left for a wire. The caller holds p.mu.
func (p *Poller) chargeWire() error {
	if taken := p.used.descriptors + len(p.wires); taken >= p.maxDescriptors {
		return fmt.Errorf("%w: all %d descriptors of wires, connections and flows are taken", ErrBusy, taken)
	}
	return nil
}

// chargeBuffers takes the memory of a connection's two buffers of size bytes each, or
// of smaller ones. The caller holds w.mu. All buffers share half of the memory, and
// the other half is for more connections. It returns the size of a buffer. It returns
// 0 if only the smallest buffers are possible, which connMemory has counted already.
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

// releaseBuffers returns the memory that chargeBuffers has taken. The caller holds
// w.mu.
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
	given := false // protected by Wire.mu
	return func() {
		c.w.mu.Lock()
		defer c.w.mu.Unlock()
		if !given {
			given = true
			c.w.release(usage{memory: bytes})
		}
	}, true
}
