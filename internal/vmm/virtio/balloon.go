package virtio

import (
	"encoding/binary"
	"fmt"
	"slices"

	"agentrun.dev/internal/vmm/guestmem"
)

// Feature bits, virtio 1.2 §5.5.3. PAGE_POISON is not offered: a discarded page
// of a forked guest holds zeros, not poison.
const (
	balloonDeflateOnOOM = 1 << 2
	balloonReporting    = 1 << 5
)

// Queues, §5.5.2. Linux and QEMU number only the queues whose feature is
// offered, so that reporting follows deflate directly.
const (
	balloonInflate = iota
	balloonDeflate
	balloonReport
)

const (
	balloonQueueSize = 128
	// balloonMaxPFNs bounds the work of one chain. Linux sends 256 at a time;
	// pages beyond the bound are not discarded, which is safe.
	balloonMaxPFNs   = 4096
	balloonConfigLen = 8 // num_pages, actual
)

// Balloon is the memory balloon, virtio 1.2 §5.5, with free page reporting.
// Requests run inline.
type Balloon struct {
	core
	target    uint32 // pages the host wants
	actual    uint32 // pages that the guest says it has given
	discarded uint64 // bytes given back to the host
	refused   uint64 // ranges that were not guest memory
	pfns      []uint32
	raw       []byte
	reported  chan struct{} // holds at most one notice of a report
}

// NewBalloon makes an empty balloon.
func NewBalloon() *Balloon { return &Balloon{reported: make(chan struct{}, 1)} }

// Reported receives a notice after each report of free pages.
func (b *Balloon) Reported() <-chan struct{} { return b.reported }

func (b *Balloon) Type() uint32     { return TypeBalloon }
func (b *Balloon) Features() uint64 { return balloonDeflateOnOOM | balloonReporting }
func (b *Balloon) QueueSizes() []uint16 {
	return []uint16{balloonQueueSize, balloonQueueSize, balloonQueueSize}
}

// ReadConfig reads struct virtio_balloon_config, §5.5.4.
func (b *Balloon) ReadConfig(off uint64, p []byte) {
	b.mu.Lock()
	defer b.mu.Unlock()
	var config [balloonConfigLen]byte
	binary.LittleEndian.PutUint32(config[0:], b.target)
	binary.LittleEndian.PutUint32(config[4:], b.actual)
	configRead(config[:], off, p)
}

// WriteConfig stores the driver's report of its size; num_pages belongs to the
// host.
func (b *Balloon) WriteConfig(off uint64, p []byte) {
	if off != 4 || len(p) != 4 {
		return
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	b.actual = binary.LittleEndian.Uint32(p)
}

func (b *Balloon) Activate(ctx DriverContext) error {
	b.activate(ctx)
	b.scan()
	return nil
}

func (b *Balloon) Reset() {
	b.deactivate()
	b.mu.Lock()
	defer b.mu.Unlock()
	b.actual = 0 // the next driver has not given any pages
}

func (b *Balloon) Resume() {
	b.unpause()
	b.scan()
}

func (b *Balloon) scan() {
	for q := range b.QueueSizes() {
		b.Notify(q)
	}
}

func (b *Balloon) Notify(q int) {
	b.mu.Lock()
	defer b.mu.Unlock()
	switch q {
	case balloonInflate:
		b.serve(q, b.inflate)
	case balloonDeflate:
		// The guest uses the pages again; the host backs them when touched.
		b.serve(q, func(Chain) (uint32, error) { return 0, nil })
	case balloonReport:
		if b.ctx.Features&balloonReporting != 0 {
			b.serve(q, b.report)
		}
	}
}

// SetTarget asks the guest to bring the pages (of 4 KiB) that it has given to
// this number.
func (b *Balloon) SetTarget(pages uint32) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.target == pages {
		return
	}
	b.target = pages
	if b.live {
		b.ctx.ConfigChanged()
	}
}

// BalloonStats counts the work of a balloon.
type BalloonStats struct {
	TargetPages    uint32
	ActualPages    uint32 // as reported by the guest
	DiscardedBytes uint64
	RefusedRanges  uint64 // not guest memory
}

// Stats returns consistent counters.
func (b *Balloon) Stats() BalloonStats {
	b.mu.Lock()
	defer b.mu.Unlock()
	return BalloonStats{TargetPages: b.target, ActualPages: b.actual, DiscardedBytes: b.discarded, RefusedRanges: b.refused}
}

// inflate discards the pages of a list of page frame numbers (§5.5.6). Adjacent
// pages are discarded together, because each discard is a system call.
func (b *Balloon) inflate(c Chain) (uint32, error) {
	n := int(min(size(c.Readable)/4, balloonMaxPFNs))
	b.raw = slices.Grow(b.raw[:0], 4*n)[:4*n]
	if _, err := gather(b.ctx.Mem, c.Readable, b.raw); err != nil {
		return 0, fmt.Errorf("balloon: %w", err)
	}
	b.pfns = b.pfns[:0]
	for i := range n {
		b.pfns = append(b.pfns, binary.LittleEndian.Uint32(b.raw[4*i:]))
	}
	slices.Sort(b.pfns)
	b.pfns = slices.Compact(b.pfns)
	for i := 0; i < len(b.pfns); {
		run := 1
		for i+run < len(b.pfns) && b.pfns[i+run] == b.pfns[i]+uint32(run) {
			run++
		}
		b.discardPages(uint64(b.pfns[i]), uint64(run))
		i += run
	}
	return 0, nil
}

// discardPages discards a run at once or, if it crosses the end of a region,
// page by page.
func (b *Balloon) discardPages(pfn, n uint64) {
	if b.ctx.Mem.Contains(pfn*guestmem.PageSize, n*guestmem.PageSize) {
		b.discard(pfn*guestmem.PageSize, n*guestmem.PageSize)
		return
	}
	for i := range n {
		b.discard((pfn+i)*guestmem.PageSize, guestmem.PageSize)
	}
}

// report discards pages that are free in the guest (§5.5.6.7). The driver gets
// the buffer back before it uses the pages again.
func (b *Balloon) report(c Chain) (uint32, error) {
	for _, r := range c.Writable {
		b.discard(r.GPA, uint64(r.Len))
	}
	select {
	case b.reported <- struct{}{}:
	default:
	}
	return 0, nil
}

// discard gives memory back. A range outside of guest memory has no effect and
// is counted as refused.
func (b *Balloon) discard(gpa, n uint64) {
	if err := b.ctx.Mem.Discard(gpa, n); err != nil {
		b.refused++
		return
	}
	// Discard keeps the partial pages at the ends.
	first := (gpa + guestmem.PageSize - 1) &^ (guestmem.PageSize - 1)
	if end := (gpa + n) &^ (guestmem.PageSize - 1); end > first {
		b.discarded += end - first
	}
}
