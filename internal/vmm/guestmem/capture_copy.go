package guestmem

import (
	"errors"
	"fmt"
	"slices"
	"time"

	"agentrun.dev/internal/storage/extent"
	"golang.org/x/sys/unix"
)

// listChunk is how many page map entries are read at once, a multiple of
// blockPages.
const listChunk = 4096

// List lists the pages that the layer of this capture must hold: those that
// were the process's own, and those of include, which is sorted. Pages of zeros
// are listed separately, and only where the stack has data.
func (c *Capture) List(include []extent.Run) (data, zeros []extent.Run, err error) {
	l := lister{
		Capture: c, included: extent.Unite(include, c.orphan), mapped: c.mapped, discarded: c.discarded, entry: make([]uint64, listChunk),
	}
	start := uint64(0)
	for i := range c.m.regions {
		r := c.m.regions[i].bytes
		for off := 0; off < len(r); off += listChunk * PageSize {
			if err := l.chunk(r[off:min(len(r), off+listChunk*PageSize)], start+uint64(off)); err != nil {
				return nil, nil, fmt.Errorf("list changed pages: %w", err)
			}
		}
		start += uint64(len(r))
	}
	return l.data, l.zeros, nil
}

// lister is a walk through all pages.
type lister struct {
	*Capture
	included, mapped, discarded runCursor

	entry       []uint64
	data, zeros []extent.Run
}

func (l *lister) chunk(b []byte, start uint64) error {
	if err := l.entries(b, l.entry); err != nil {
		return err
	}
	for off := 0; off < len(b); off += blockSize {
		part := b[off:min(len(b), off+blockSize)]
		if err := l.block(part, start+uint64(off), l.entry[off/PageSize:]); err != nil {
			return err
		}
	}
	return nil
}

func (l *lister) block(b []byte, start uint64, entry []uint64) error {
	var s *block // nil without userfaultfd
	if l.uffd >= 0 {
		s = &l.blocks[start/blockSize]
	}
	var own, zero, included uint16
	if s == nil || !s.released.Load() {
		var err error
		if own, err = l.ownOf(s, b, entry[:len(b)/PageSize]); err != nil {
			return err
		}
	}
	for k := range len(b) / PageSize {
		bit := uint16(1) << k
		if l.included.has(start + uint64(k)*PageSize) {
			included |= bit
		}
		if (own|included)&bit != 0 && isZero(b[k*PageSize:(k+1)*PageSize]) {
			zero |= bit
		}
	}
	if s != nil {
		// The content that was read is that of the instant only if the block is
		// still unreleased.
		if s.released.Load() {
			s.mu.Lock()
			own, zero = s.own, ^uint16(s.saved.Load())
			s.mu.Unlock()
		}
	}
	for k := range len(b) / PageSize {
		bit, at := uint16(1)<<k, start+uint64(k)*PageSize
		stored := (own|included)&bit != 0
		hidden, has := l.discarded.has(at), l.mapped.has(at)
		switch {
		case stored && zero&bit == 0:
			l.data = extent.Append(l.data, at, at+PageSize)
		case (stored || hidden) && has:
			l.zeros = extent.Append(l.zeros, at, at+PageSize)
		}
	}
	return nil
}

// write stores the pages in mask of a block that begins at start.
func (c *Capture) write(bytes []byte, start uint64, mask uint16) error {
	return eachRun(mask, func(first, n int) error {
		return c.writeAt(bytes[first*PageSize:(first+n)*PageSize], start+uint64(first)*PageSize)
	})
}

func (c *Capture) writeAt(p []byte, offset uint64) error {
	n, err := c.file.WriteAt(p, int64(offset))
	c.copied.Add(uint64(n))
	if err != nil {
		return fmt.Errorf("store captured memory: %w", err)
	}
	return nil
}

func runMask(first, n int) uint16 { return uint16((uint32(1)<<n - 1) << first) }

// eachRun calls do for each run of set bits.
func eachRun(mask uint16, do func(first, n int) error) error {
	for first := 0; first < blockPages; first++ {
		n := 0
		for first+n < blockPages && mask>>(first+n)&1 != 0 {
			n++
		}
		if n == 0 {
			continue
		}
		if err := do(first, n); err != nil {
			return err
		}
		first += n
	}
	return nil
}

// Copy stores the runs, which are sorted, do not overlap and contain all data
// that List listed. The guest can write to all other blocks at once.
func (c *Capture) Copy(runs []extent.Run) error {
	if err := c.copy(runs); err != nil {
		c.fail(err)
	}
	return c.Err()
}

func (c *Capture) copy(runs []extent.Run) error {
	c.runs = runs
	if err := c.file.Truncate(int64(c.m.size)); err != nil {
		return fmt.Errorf("store captured memory: %w", err)
	}
	if c.uffd < 0 {
		return c.copyStill()
	}
	c.plan()
	if err := c.releaseUnplanned(); err != nil {
		return err
	}
	return c.complete()
}

// releaseUnplanned releases the blocks of which the layer will hold no page.
func (c *Capture) releaseUnplanned() error {
	next := uint64(0)
	for _, s := range c.runs {
		first, end := s.Start/blockSize, (s.End()+blockSize-1)/blockSize
		if next < first {
			if err := c.releaseUnwanted(next, first); err != nil {
				return err
			}
		}
		next = end
	}
	return c.releaseUnwanted(next, uint64(len(c.blocks)))
}

// complete stores all pages that the layer is to have.
func (c *Capture) complete() error {
	if err := c.copyBlocks(); err != nil {
		return err
	}
	c.completed.Store(true)
	// A thread may just be about to save a block once more. It does so before the
	// file is given away.
	c.writers.Lock()
	defer c.writers.Unlock()
	return nil
}

// plan notes for each block which of its pages the layer is to have.
func (c *Capture) plan() {
	for _, s := range c.runs {
		for at := s.Start; at < s.End(); {
			i := at / blockSize
			end := min(s.End(), (i+1)*blockSize)
			c.blocks[i].want |= runMask(int(at%blockSize/PageSize), int((end-at)/PageSize))
			at = end
		}
	}
	c.planned.Store(true)
}

func (c *Capture) allocate(mode uint32, s extent.Run) error {
	for {
		err := unix.Fallocate(int(c.file.Fd()), mode, int64(s.Start), int64(s.Length))
		if errors.Is(err, unix.EINTR) {
			continue
		}
		if err != nil {
			return fmt.Errorf("store captured memory: %w", err)
		}
		return nil
	}
}

// copyStill copies while the guest stands still.
func (c *Capture) copyStill() error {
	for _, s := range c.runs {
		at := s.Start
		err := c.m.each(s, func(b []byte) error {
			defer func() { at += uint64(len(b)) }()
			return c.writeAt(b, at)
		})
		if err != nil {
			return err
		}
	}
	return nil
}

// Rebase makes the layer part of this memory's stack: the copied pages count as
// unchanged from now on.
func (c *Capture) Rebase() error {
	if err := c.Err(); err != nil {
		return err
	}
	c.m.mu.Lock()
	defer c.m.mu.Unlock()
	c.m.mapped, c.m.orphan = extent.Unite(c.m.mapped, c.runs), nil // the orphans were among the runs
	c.rebased.Store(true)
	return nil
}

// Share maps the file of a layer that Rebase has accepted in the place of
// private copies, except where the guest has written since.
func (c *Capture) Share() error {
	if err := c.Err(); err != nil || c.uffd < 0 {
		return err // without userfaultfd it is not known which pages were written since
	}
	c.m.mu.Lock()
	c.m.shares++
	source := c.m.restored + c.m.shares
	c.m.mu.Unlock()
	for _, s := range c.runs {
		for at := s.Start; at < s.End(); {
			next, err := c.shareStep(at, s.End(), source)
			if err != nil {
				c.disown()
				return err
			}
			at = next
			rest()
		}
	}
	return nil
}

// shareRest is the time between two steps of Share. Each step invalidates
// mappings of KVM's, and a page fault of the guest restarts if that happens
// meanwhile. Without rest the guest could wait for all steps.
const shareRest = 100 * time.Microsecond

// rest yields the processor for a moment, but does not sleep: on a busy host
// that would take milliseconds, and the next fork may be waiting.
func rest() {
	for began := time.Now(); time.Since(began) < shareRest; {
		giveWay()
	}
}

// shareStep maps one piece from at on, and returns where to continue.
func (c *Capture) shareStep(at, end uint64, source int) (next uint64, err error) {
	first := at / blockSize
	n := c.lockShareable(first, min((end+blockSize-1)/blockSize, first+stepBlocks))
	if n == 0 {
		return (first + 1) * blockSize, nil
	}
	whole := c.runOf(first, n)
	piece := extent.Run{Start: at, Length: min(end, whole.End()) - at}
	if piece.Length < blockSize && !c.overCapture(piece) || !c.place(piece, source) {
		for i := first; i < first+n; i++ {
			c.blocks[i].mu.Unlock()
		}
		return piece.End(), nil
	}
	defer c.unlockReleased(first, n)
	err = c.m.each(piece, func(b []byte) error {
		if err := mapFixed(b, int(c.file.Fd()), int64(at), 0); err != nil {
			return fmt.Errorf("map the new layer: %w", err)
		}
		at += uint64(len(b))
		// A thread that waited for a page that is now unmapped tries the new
		// page.
		return c.uffd.wake(b)
	})
	if err == nil && whole.Start < piece.Start {
		err = c.unprotect(extent.Run{Start: whole.Start, Length: piece.Start - whole.Start})
	}
	if err == nil && piece.End() < whole.End() {
		err = c.unprotect(extent.Run{Start: piece.End(), Length: whole.End() - piece.End()})
	}
	c.shared += piece.Length
	return piece.End(), err
}

// overCapture reports whether a file of an earlier capture is mapped anywhere
// in a piece. As long as it is, all of that file stays in memory.
func (c *Capture) overCapture(s extent.Run) bool {
	return slices.ContainsFunc(c.layout(s), func(p mapping) bool { return p.source > c.m.restored })
}

// place records a mapping that is about to be made, unless there are too many.
func (c *Capture) place(s extent.Run, source int) bool {
	c.m.mu.Lock()
	defer c.m.mu.Unlock()
	if len(c.m.layout)+2 > maxMappings {
		return false
	}
	c.m.layout.place(s, source)
	return true
}
