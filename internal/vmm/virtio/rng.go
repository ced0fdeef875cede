package virtio

import (
	"crypto/rand"
	"fmt"
	"time"
)

const (
	rngQueueSize = 64
	// rngMaxRequest bounds the work of one request. A device may return less
	// than was asked (§5.4.6), and the driver asks again for the rest.
	rngMaxRequest = 64 << 10
	rngChunk      = 4 << 10
)

// RNG is the entropy device, virtio 1.2 §5.4. Requests run inline.
type RNG struct {
	core
	chunk [rngChunk]byte // random bytes on their way; cleared after use
	bytes uint64

	// The time of the guest's last request, and the time between it and the one
	// before.
	asked time.Time
	after time.Duration
	// notices receives one notice per request, once Asked was called.
	notices chan struct{}
}

// NewRNG makes an entropy device that draws from the host's generator.
func NewRNG() *RNG { return &RNG{} }

func (r *RNG) Type() uint32                  { return TypeRNG }
func (r *RNG) Features() uint64              { return 0 }
func (r *RNG) QueueSizes() []uint16          { return []uint16{rngQueueSize} }
func (r *RNG) ReadConfig(_ uint64, p []byte) { clear(p) }
func (r *RNG) WriteConfig(uint64, []byte)    {}

func (r *RNG) Activate(ctx DriverContext) error {
	r.activate(ctx)
	r.Notify(0)
	return nil
}

func (r *RNG) Notify(q int) {
	r.mu.Lock()
	defer r.mu.Unlock()
	before := r.bytes
	r.serve(q, r.fill)
	if r.bytes == before {
		return
	}
	now := time.Now()
	if !r.asked.IsZero() {
		r.after = now.Sub(r.asked)
	}
	r.asked = now
	select {
	case r.notices <- struct{}{}:
	default: // the channel is nil or full
	}
}

// Asked receives a notice after each request from now on.
func (r *RNG) Asked() <-chan struct{} {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.notices == nil {
		r.notices = make(chan struct{}, 1)
	}
	return r.notices
}

// leastFeeding is the shortest interval at which a kernel reseeds its generator.
const leastFeeding = 500 * time.Millisecond

// Due reports whether the guest will probably ask within a time: Linux reseeds
// its generator from this device at intervals, of a second at first.
func (r *RNG) Due(within time.Duration) bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	in := time.Until(r.asked.Add(r.after))
	return r.after >= leastFeeding && in < within && in > -r.after
}

func (r *RNG) Reset() { r.deactivate() }

func (r *RNG) Resume() {
	r.unpause()
	r.Notify(0)
}

// Bytes is how many random bytes the guest has received.
func (r *RNG) Bytes() uint64 {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.bytes
}

// fill answers one request. A chain without writable bytes gets no data.
func (r *RNG) fill(c Chain) (uint32, error) {
	defer clear(r.chunk[:])
	var done uint32
	dst := c.Writable
	for want := min(size(dst), rngMaxRequest); want > 0; {
		p := r.chunk[:min(want, rngChunk)]
		_, _ = rand.Read(p) // it never fails: if the kernel cannot deliver, it ends the process
		if _, err := scatter(r.ctx.Mem, dst, p); err != nil {
			return 0, fmt.Errorf("rng: %w", err)
		}
		dst = skip(dst, uint64(len(p)))
		want -= uint64(len(p))
		done += uint32(len(p))
	}
	r.bytes += uint64(done)
	return done, nil
}
