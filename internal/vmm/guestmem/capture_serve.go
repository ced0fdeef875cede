package guestmem

import (
	"runtime"
	"time"

	"agentrun.dev/internal/host/goruntime"
	"agentrun.dev/internal/storage/extent"
	"agentrun.dev/internal/vmm/livefork"
)

// Stats returns the current measurements. It may be called at any time.
func (c *Capture) Stats() CaptureStats {
	return CaptureStats{livefork.Stats{
		Waits: c.waits.Count(), MedianWait: c.waits.Quantile(0.5), P99Wait: c.waits.Quantile(0.99), LongestWait: c.waits.Longest(),
		Copied: c.copied.Load(),
	}, c.shared}
}

// serve answers the guest's writes to protected pages until Close.
func (c *Capture) serve() {
	defer close(c.served)
	// Never unlocked: this thread has special settings, and ends with the
	// goroutine.
	runtime.LockOSThread()
	goruntime.Prompt() // the copier competes with it for the processor
	var messages [uffdMessagesPerRead]uffdMessage
	for {
		got, err := c.uffd.wait(c.stop, &messages)
		if err != nil {
			// No write can be answered any more. Closing the descriptor removes
			// the protection and wakes all waiting threads.
			c.fail(err)
			return
		}
		if len(got) == 0 {
			return
		}
		began := time.Now()
		for _, m := range got {
			if m.event != uffdEventPagefault {
				continue
			}
			if offset, ok := c.m.offsetOf(uintptr(m.address)); ok {
				c.writers.RLock()
				err := c.answer(offset / blockSize)
				c.writers.RUnlock()
				if err != nil {
					c.fail(err)
				}
				c.waits.Add(time.Since(began)) // all of them were waiting when it began
			}
		}
	}
}

// answer lets a vCPU that waits for a block continue.
func (c *Capture) answer(i uint64) error {
	if c.saves() {
		return c.release(i, true)
	}
	if err := c.releaseAround(i); err != nil {
		return err
	}
	// The vCPU may have begun to wait while its block was being released.
	return c.m.each(c.runOf(i, 1), c.uffd.wake)
}

// saves reports whether a block may have to be saved before it is written. That
// is so from the instant until Rebase has accepted the layer.
func (c *Capture) saves() bool { return c.begun.Load() && !c.rebased.Load() }

// releaseAround releases the whole huge page of a block, of which no page has to be
// saved. So it remains a huge page, and a guest that writes here will soon write to
// the rest. Mostly it was released before.
func (c *Capture) releaseAround(i uint64) error {
	b := &c.blocks[i]
	b.mu.Lock() // waits until a release in progress is complete
	released := b.released.Load()
	b.mu.Unlock()
	if released {
		return nil
	}
	first := i &^ (hugeBlocks - 1)
	return c.releaseUnwanted(first, min(first+hugeBlocks, uint64(len(c.blocks))))
}

// offsetOf converts a host address to an offset in RAM.
func (m *Memory) offsetOf(address uintptr) (uint64, bool) {
	for i := range m.regions {
		r := &m.regions[i]
		if off := uint64(address - r.HostAddr()); address >= r.HostAddr() && off < r.Size() {
			return ramOffset(r.GPA) + off, true
		}
	}
	return 0, false
}

// releaseRun makes a run writable for the host.
func (c *Capture) releaseRun(offset, n uint64) error {
	if n == 0 {
		return nil
	}
	for i := offset / blockSize; i <= (offset+n-1)/blockSize; i++ {
		var err error
		if c.saves() {
			err = c.release(i, false)
		} else {
			err = c.releaseAround(i)
		}
		if err != nil {
			return err
		}
	}
	return nil
}

// release makes a block writable. Once the instant has come, it saves the block
// first. waiter says that a vCPU may be waiting for it.
func (c *Capture) release(i uint64, waiter bool) error {
	b := &c.blocks[i]
	run := c.runOf(i, 1)
	if c.planned.Load() && b.want == 0 {
		// No page of it is stored or shared. So it does no harm to remove its
		// protection without the lock, and without waiting for threads that
		// release large steps.
		if b.released.Load() && !waiter {
			return nil
		}
		return c.unprotect(run)
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.released.Load() {
		if waiter { // it began to wait while the block was being released
			return c.m.each(run, c.uffd.wake)
		}
		return nil
	}
	// When everything is copied, no page has to be saved. A capture that failed
	// is never completed.
	if !c.completed.Load() && c.Err() == nil {
		if err := c.save(i); err != nil {
			c.fail(err)
		}
	}
	b.released.Store(true)
	return c.unprotect(run)
}

// runOf returns the RAM of n blocks from i on.
func (c *Capture) runOf(i, n uint64) extent.Run {
	start := i * blockSize
	return extent.Run{Start: start, Length: min(start+n*blockSize, c.m.size) - start}
}

// unprotect makes a run writable; the caller has locked its blocks.
func (c *Capture) unprotect(s extent.Run) error {
	return c.m.each(s, func(b []byte) error { return c.uffd.protect(b, false) })
}
