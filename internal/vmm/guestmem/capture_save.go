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

// buffers is memory for blocks that a write of the guest waits for. Storing a
// block in the file would cost a new page for each of its pages, and waiting
// for the goroutine that stores others. Copying it to memory that is already
// allocated takes microseconds.
type buffers struct {
	memory []byte
	// Each element is in one of these channels, or is being filled or stored.
	free, pending chan *held
}

// held is the content of a block, at the same offsets, for the pages in mask.
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
		memory[at] = 1 // allocate it now, not while the guest waits
	}
	b := &buffers{memory: memory, free: make(chan *held, bufferCount), pending: make(chan *held, bufferCount)}
	for at := 0; at < len(memory); at += blockSize {
		b.free <- &held{bytes: memory[at : at+blockSize]}
	}
	return b, nil
}

func (b *buffers) close() error { return unix.Munmap(b.memory) }

// save secures the content of a locked, unreleased block: all protected pages
// or, once the plan is known, those that the layer is to have.
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
		if !planned { // List will need it
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
			c.buffers.pending <- h // the channel has room for all buffers
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

// Expect announces that the host will write n bytes at gpa right after the
// instant, while the guest waits. It reads the pages that will be saved then, so
// that they are present. It skips anonymous memory: reading would only allocate
// pages.
func (c *Capture) Expect(gpa, n uint64) {
	first := ramOffset(gpa) / blockSize
	whole := c.runOf(first, (ramOffset(gpa)+n-1)/blockSize+1-first)
	for _, p := range c.layout(whole) {
		if p.source != 0 {
			_ = c.m.each(p.Run, func(b []byte) error { return unix.Madvise(b, unix.MADV_POPULATE_READ) }) // or later
		}
	}
}

// fill copies the pages in mask.
func (h *held) fill(block uint64, bytes []byte, mask uint16) {
	h.block, h.mask = block, mask
	_ = eachRun(mask, func(first, n int) error {
		copy(h.bytes[first*PageSize:(first+n)*PageSize], bytes[first*PageSize:])
		return nil // it never fails
	})
}

// copyBlocks stores all pages that the layer is to have. For a while it yields
// to all other threads of its cgroup before each block. A lower priority would
// not do: a copier that gets no processor would make others wait for its locks
// in the kernel.
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
	// A block released before the loop reached it is already pending.
	return k.storePending()
}

// giveWay yields to other threads that are ready to run.
func giveWay() {
	_, _, _ = unix.Syscall(unix.SYS_SCHED_YIELD, 0, 0, 0) // it never fails
}

// copier stores blocks.
type copier struct {
	*Capture
	buffer held
}

// storePending stores the pending blocks, which frees their buffers.
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

// block completes the layer's part of a block. It does not delay a thread that
// waits for the block.
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
	// Absent pages were zeros. They are allocated, because the first reader
	// would fill a hole.
	err := eachRun(absent, func(first, n int) error {
		return c.allocate(0, extent.Run{Start: start + uint64(first)*PageSize, Length: uint64(n) * PageSize})
	})
	if err != nil {
		return err
	}
	// These were stored before it was known that the layer does not need them.
	return eachRun(direct&^b.want, func(first, n int) error {
		const punch = unix.FALLOC_FL_PUNCH_HOLE | unix.FALLOC_FL_KEEP_SIZE
		return c.allocate(punch, extent.Run{Start: start + uint64(first)*PageSize, Length: uint64(n) * PageSize})
	})
}

// aside copies the wanted pages of a block. It stores the copy only if the
// block was not released meanwhile: then the copy has the content of the
// instant, whatever happens to the block later.
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
			return nil // the thread that released it has saved it
		}
		if err := c.write(c.buffer.bytes, s.Start, c.buffer.mask); err != nil {
			return err
		}
		b.saved.Or(uint32(c.buffer.mask))
		return nil
	})
}
