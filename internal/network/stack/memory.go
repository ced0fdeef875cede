package stack

// What all wires of a poller take together is bounded, too: a process that its kernel
// kills for want of memory cuts off every sandbox it serves.
const (
	// maxMemory is for all connections. A netd may have 1 GiB (package netproc), a part of
	// which are the buffers of its sockets, which nobody counts here.
	maxMemory = 640 << 20
	// connMemory is what a connection takes besides its reserved buffers, if neither side
	// reads: the smallest buffers, what is being copied, goroutines.
	connMemory = 192 << 10
)

// charge takes the memory of a connection, if there is some; the caller holds w.mu. A wire
// gets no more than three quarters of what others leave, so that there is always some.
func (w *Wire) charge() bool {
	own := len(w.conns)*connMemory + w.buffers
	p := w.poller
	p.mu.Lock()
	defer p.mu.Unlock()
	if own+connMemory > (p.maxMemory-(p.memory-own))/4*3 {
		return false
	}
	p.memory += connMemory
	return true
}

// chargeBuffers takes the memory of a connection's two buffers of size bytes each, or of
// smaller ones; the caller holds w.mu. All buffers have half of the memory: the rest is for
// more connections. It returns their size, or 0 if only the smallest
// are possible, which charge has counted.
func (w *Wire) chargeBuffers(size int) int {
	p := w.poller
	p.mu.Lock()
	defer p.mu.Unlock()
	size = min(size, (p.maxMemory/2-p.buffers)/bufferShare/2)
	if size <= minBuffer {
		return 0
	}
	p.memory += 2 * size
	p.buffers += 2 * size
	return size
}

// release gives back what a connection has taken; the caller holds w.mu.
func (w *Wire) release(buffers int) {
	w.poller.mu.Lock()
	defer w.poller.mu.Unlock()
	w.poller.memory -= connMemory + buffers
	w.poller.buffers -= buffers
}
