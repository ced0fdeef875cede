package guestmem

import (
	"errors"
	"fmt"
	"time"

	"agentrun.dev/internal/storage/extent"
	"golang.org/x/sys/unix"
)

// bufferCount is how many blocks can wait to be stored.
const bufferCount = 32

// buffers is memory for blocks that a guest's write waits for. To store one in
// the file costs a new page for each of its pages, and a turn with whoever is
// storing others; to copy it to memory that is there takes microseconds.
type buffers struct {
	memory []byte
	// Each is in one of these, or with somebody who fills or stores it.
	free, pending chan *held
}

// held is a block's content, at the same offsets, as far as mask says.
type held struct {
	bytes []byte
	block uint64
	mask  uint16
}

func newBuffers() (*buffers, error) {
	memory, err := unix.Mmap(-1, 0, bufferCount*blockSize, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_PRIVATE|unix.MAP_ANONYMOUS)
	if err != nil {
		return nil, fmt.Errorf("make room for blocks that are waited for: %w", err)
	}
	for at := 0; at < len(memory); at += PageSize {
		memory[at] = 1 // now, not when somebody waits
	}
	b := &buffers{memory: memory, free: make(chan *held, bufferCount), pending: make(chan *held, bufferCount)}
	for at := 0; at < len(memory); at += blockSize {
		b.free <- &held{bytes: memory[at : at+blockSize]}
	}
	return b, nil
}

func (b *buffers) close() error { return unix.Munmap(b.memory) }

// save makes sure of a locked, unreleased block's content: of all that was
// there, or, once that is known, of what the layer is to have.
func (c *Capture) save(i uint64) error {
	b := &c.blocks[i]
	want := ^uint16(0)
	planned := c.planned.Load()
	if planned {
		want = b.want
	}
	s := c.runOf(i, 1)
	return c.m.each(s, func(bytes []byte) error {
		var room [blockPages]uint64
		entry := room[:len(bytes)/PageSize]
		if err := c.entries(bytes, entry); err != nil {
			return err
		}
		if !planned { // List will ask
			own, err := c.ownOf(b, bytes, entry)
			if err != nil {
				return err
			}
			b.own = own
		}
		need := want & c.protected(entry) &^ uint16(b.saved.Load())
		if need == 0 {
			return nil
		}
		select {
		case h := <-c.buffers.free:
			h.fill(i, bytes, need)
			c.buffers.pending <- h // it has room for all
		default:
			if err := c.write(bytes, s.Start, need); err != nil {
				return err
			}
			if !planned {
				b.direct = need
			}
		}
		b.saved.Or(uint32(need))
		return nil
	})
}

// Expect says that the host will write to n bytes at gpa right after the instant,
// while the guest waits: what is saved then is brought in now. Where no file is
// mapped there is nothing to bring in, and reading would only make pages.
func (c *Capture) Expect(gpa, n uint64) {
	first := ramOffset(gpa) / blockSize
	whole := c.runOf(first, (ramOffset(gpa)+n-1)/blockSize+1-first)
	for _, p := range c.layout(whole) {
		if p.source != 0 {
			_ = c.m.each(p.Run, func(b []byte) error { return unix.Madvise(b, unix.MADV_POPULATE_READ) }) // or later
		}
	}
}

// fill takes the pages of mask.
func (h *held) fill(block uint64, bytes []byte, mask uint16) {
	h.block, h.mask = block, mask
	_ = eachRun(mask, func(first, n int) error {
		copy(h.bytes[first*PageSize:(first+n)*PageSize], bytes[first*PageSize:])
		return nil // as always
	})
}

// copyBlocks stores all that the layer is to have. For a while it lets everybody
// else of its cgroup run before each block. Not by a lower priority: a copier
// that is not given a processor would have others wait for what it has locked in
// the kernel.
func (c *Capture) copyBlocks() error {
	k := copier{c, held{bytes: make([]byte, blockSize)}}
	began := time.Now()
	for i := range uint64(len(c.blocks)) {
		if c.blocks[i].want != 0 && time.Since(began) < c.patience {
			giveWay()
		}
		if err := errors.Join(k.storePending(), k.block(i), c.Err()); err != nil {
			return err
		}
	}
	// Whoever released a block that was not reached yet has made it wait before.
	return k.storePending()
}

// giveWay lets other threads run that are ready to.
func giveWay() {
	_, _, _ = unix.Syscall(unix.SYS_SCHED_YIELD, 0, 0, 0) // it never fails
}

// copier stores blocks.
type copier struct {
	*Capture
	buffer held
}

// storePending stores what waits, which makes room for more.
func (c *copier) storePending() error {
	for {
		select {
		case h := <-c.buffers.pending:
			err := c.write(h.bytes, h.block*blockSize, h.mask&c.blocks[h.block].want)
			c.buffers.free <- h
			if err != nil {
				return err
			}
		default:
			return nil
		}
	}
}

// block completes what the layer has of a block. Nobody who waits for the
// block waits for this.
func (c *copier) block(i uint64) error {
	b := &c.blocks[i]
	if err := c.aside(i); err != nil {
		return err
	}
	b.mu.Lock()
	direct, absent := b.direct, b.want&^uint16(b.saved.Load())
	b.absent = absent
	b.mu.Unlock()
	start := i * blockSize
	// Pages that were not there are zeros: holes would be filled by the first
	// who reads them.
	err := eachRun(absent, func(first, n int) error {
		return c.allocate(0, extent.Run{Start: start + uint64(first)*PageSize, Length: uint64(n) * PageSize})
	})
	if err != nil {
		return err
	}
	// What was stored before it was known that nobody needs it.
	return eachRun(direct&^b.want, func(first, n int) error {
		const punch = unix.FALLOC_FL_PUNCH_HOLE | unix.FALLOC_FL_KEEP_SIZE
		return c.allocate(punch, extent.Run{Start: start + uint64(first)*PageSize, Length: uint64(n) * PageSize})
	})
}

// aside copies what the layer is to have of a block and, if the block was not
// released meanwhile, stores it: whatever happens to the block then, the copy
// is of the instant.
func (c *copier) aside(i uint64) error {
	b := &c.blocks[i]
	if b.released.Load() || b.want&^uint16(b.saved.Load()) == 0 {
		return nil
	}
	s := c.runOf(i, 1)
	return c.m.each(s, func(bytes []byte) error {
		var room [blockPages]uint64
		entry := room[:len(bytes)/PageSize]
		if err := c.entries(bytes, entry); err != nil {
			return err
		}
		c.buffer.fill(i, bytes, b.want&c.protected(entry))
		if b.released.Load() {
			return nil // who did that has saved it
		}
		if err := c.write(c.buffer.bytes, s.Start, c.buffer.mask); err != nil {
			return err
		}
		b.saved.Or(uint32(c.buffer.mask))
		return nil
	})
}
