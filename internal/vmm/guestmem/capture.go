package guestmem

import (
	"errors"
	"fmt"
	"os"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"agentrun.dev/internal/storage/extent"
	"agentrun.dev/internal/vmm/livefork"
	"golang.org/x/sys/unix"
)

const (
	// blockSize is the unit in which pages are saved and released.
	blockSize  = 64 << 10
	blockPages = blockSize / PageSize
	// hugeBlocks, a power of two, is the number of blocks in a huge page.
	// Releasing only a part of a huge page would split it: then each of its small
	// pages costs the guest a fault.
	hugeBlocks = hugeSize / blockSize
	// stepBlocks, a multiple of hugeBlocks, is how many blocks are released or
	// mapped at once when no page has to be saved.
	stepBlocks = 2 * hugeBlocks
	// maxMappings bounds the mappings that captures make of RAM.
	maxMappings = 1024
)

// DefaultPatience is the longest delay of a fork that we accept so that its
// source is not disturbed.
const DefaultPatience = 250 * time.Millisecond

// CaptureConfig configures a capture of a memory.
type CaptureConfig struct {
	// Userfaultfd is an open /dev/userfaultfd. If it is nil or cannot protect
	// this memory, the guest must stand still until Copy has returned.
	Userfaultfd *os.File
	// Pagemap is this process's /proc/self/pagemap.
	Pagemap *os.File
	// File gets the pages, each at its offset in RAM.
	File *os.File
	// Patience is the time from the start of Copy during which it yields to
	// other threads before each block. After that it takes its share of the
	// processors.
	Patience time.Duration
}

// Capture is the content of a memory at one instant, the call of Begin. One
// goroutine calls its methods in this order: Announce, Arm and Expect (if Early),
// Begin, List, Copy, Rebase, Share, Close.
type Capture struct {
	m       *Memory
	pagemap *os.File
	file    *os.File
	uffd    userfaultfd // -1: the guest stands still
	reason  error       // why uffd is -1
	markers bool        // anonymous pages that are not present can be protected, too

	// writers is held for reading while pages are released and written. Arm and Begin
	// hold it for writing while they protect, and Close while it closes uffd. begun
	// says that the instant has come. closed says that uffd is closed; writers
	// protects it.
	writers sync.RWMutex
	begun   atomic.Bool
	closed  bool

	// As of the instant: where the stack has data, and where the guest has
	// discarded that data. Pages that earlier captures failed to share count as
	// changed.
	mapped, discarded, orphan []extent.Run

	blocks []block     // nil without uffd
	empty  emptyPieces // nil: all pieces were protected
	// lookLeft is how much longer Begin may look at blocks before it protects them.
	// cannotScan says that the kernel has no PAGEMAP_SCAN. The others are buffers for
	// the results of a look.
	lookLeft    time.Duration
	cannotScan  bool
	lookRegions []pageRegion
	lookEntries []uint64
	runs        []extent.Run // the runs that Copy was called with
	planned     atomic.Bool
	// completed says that no page has to be saved any more, rebased that the
	// layer is part of the stack.
	completed, rebased atomic.Bool

	buffers  *buffers // nil without uffd
	patience time.Duration

	stop    int // an eventfd that ends serve
	served  chan struct{}
	failure atomic.Pointer[error]
	waits   Waits
	copied  atomic.Uint64
	shared  uint64
}

// block is blockSize bytes of RAM.
type block struct {
	mu sync.Mutex // protects own, direct, absent, before and known, and is held while released changes
	// released says that its pages may have changed since the instant.
	released atomic.Bool
	// Bits for the pages. saved: those in the file, or pending to be stored.
	// own: those that were the process's own (known once the block is released).
	// direct: those that were stored before the plan was known. want: those that
	// the layer is to have (constant once planned is set). absent: those of want
	// that were neither present nor protected (known once the block was copied).
	saved                     atomic.Uint32
	own, direct, want, absent uint16
	// before holds the pages that were own when the block was looked at, before it
	// was protected. known says that no other page became own in between. Both are
	// constant after Begin.
	before uint16
	known  bool
}

// CaptureStats says how much a capture cost.
type CaptureStats struct {
	livefork.Stats // Pause and Captured are zero: they include more than the memory
	// Shared is how many bytes this memory has mapped from the layer since.
	Shared uint64
}

// NewCapture prepares a capture while the guest still runs.
func (m *Memory) NewCapture(cfg CaptureConfig) *Capture { return m.newCapture(cfg, newUserfaultfd) }

// newCapture is NewCapture with the userfaultfd that open makes.
func (m *Memory) newCapture(cfg CaptureConfig, open openFunc) *Capture {
	c := &Capture{
		m: m, pagemap: cfg.Pagemap, file: cfg.File, patience: cfg.Patience,
		uffd: -1, reason: errors.New("no userfaultfd was given"), lookLeft: lookTime,
	}
	m.unwatch()
	if cfg.Userfaultfd == nil {
		return c
	}
	if err := c.prepare(cfg.Userfaultfd, open); err != nil {
		c.reason = err
		return c
	}
	c.reason = nil
	c.blocks = make([]block, (m.size+blockSize-1)/blockSize)
	for i := range c.blocks {
		c.blocks[i].released.Store(true) // no block is protected yet
	}
	c.served = make(chan struct{})
	go c.serve()
	return c
}

type openFunc func(device *os.File) (u userfaultfd, markers bool, err error)

// prepare sets uffd. If it fails, it leaves no descriptors open.
func (c *Capture) prepare(device *os.File, open openFunc) error {
	u, markers, err := open(device)
	if err != nil {
		return err
	}
	if err := c.register(u); err != nil {
		return errors.Join(err, u.close())
	}
	buffers, err := newBuffers()
	if err != nil {
		return errors.Join(err, u.close())
	}
	if c.stop, err = unix.Eventfd(0, unix.EFD_CLOEXEC); err != nil {
		return errors.Join(fmt.Errorf("make an eventfd: %w", err), u.close(), buffers.close())
	}
	c.uffd, c.markers, c.buffers = u, markers, buffers
	return nil
}

// register registers all RAM. RAM that is already registered stays registered.
func (c *Capture) register(u userfaultfd) error {
	for i := range c.m.regions {
		if err := u.register(c.m.regions[i].bytes); err != nil {
			return err
		}
	}
	return nil
}

// Early reports whether Announce and Arm can take most of the work out of
// Begin: for all RAM since Linux 6.4, before that only where files are mapped.
func (c *Capture) Early() bool {
	return c.uffd >= 0 && (c.markers || c.leavesMarkers(extent.Run{Start: 0, Length: c.m.size}))
}

// Announce makes host writes observe the capture. It is called before Arm,
// while the guest and its devices stand still for a moment.
func (c *Capture) Announce() error {
	if !c.m.live.CompareAndSwap(nil, c) {
		return errors.New("capture memory: another capture goes on")
	}
	return nil
}

// Arm protects all present pages while the guest runs. A write meanwhile
// removes the protection of its block, and Begin protects only those blocks
// again.
func (c *Capture) Arm() error {
	if err := c.arm(); err != nil {
		return fmt.Errorf("capture memory: %w", err)
	}
	return nil
}

func (c *Capture) arm() error {
	if err := c.registerAgain(); err != nil {
		return err
	}
	c.empty = c.findEmpty()
	if err := c.armReleased(); err != nil {
		return err
	}
	// Blocks that were written meanwhile are protected once more. This second pass
	// takes a fraction of the time, so fewer blocks are left for Begin.
	c.strikeFilled()
	return c.armReleased()
}

// armReleased protects all unprotected blocks, except those in empty pieces.
func (c *Capture) armReleased() error {
	var armed []extent.Run // of blocks
	for i, end := uint64(0), uint64(len(c.blocks)); i < end; {
		n := uint64(0)
		for n < stepBlocks && i+n < end && !c.empty.has(i+n) && c.blocks[i+n].released.Load() {
			n++
		}
		done, err := c.armStep(i, n)
		if err != nil {
			return err
		}
		if done > 0 {
			armed = append(armed, extent.Run{Start: i, Length: done})
		}
		i += max(done, 1)
	}
	return c.lookAgain(armed)
}

// registerAgain registers the mappings that discards have made since NewCapture.
// Discard itself registers those that it makes after Announce.
func (c *Capture) registerAgain() error {
	c.writers.Lock()
	defer c.writers.Unlock()
	return c.register(c.uffd)
}

// armStep protects up to n blocks, and returns how many.
func (c *Capture) armStep(i, n uint64) (done uint64, err error) {
	if n == 0 {
		return 0, nil
	}
	c.writers.Lock()
	defer c.writers.Unlock()
	armable := c.armable(i, n)
	if armable == 0 {
		return 0, nil
	}
	for k := i; k < i+armable; k++ {
		c.blocks[k].mu.Lock()
		defer c.blocks[k].mu.Unlock()
		c.blocks[k].released.Store(false)
	}
	if err := c.lookBefore(i, armable); err != nil {
		return 0, err
	}
	return armable, c.protect(c.runOf(i, armable))
}

// armable returns how many of n blocks, from i on, can be protected before the
// instant. If an anonymous page is first touched after its block was protected, the
// capture must notice: otherwise it could not tell whether that was before the
// instant.
func (c *Capture) armable(i, n uint64) uint64 {
	if c.markers {
		return n
	}
	for k := range n {
		if slices.ContainsFunc(c.layout(c.runOf(i+k, 1)), func(p mapping) bool { return p.source == 0 }) {
			return k
		}
	}
	return n
}

// protect write-protects a run, mapping by mapping.
func (c *Capture) protect(s extent.Run) error {
	for _, p := range c.layout(s) {
		if err := c.m.each(p.Run, func(b []byte) error { return c.uffd.protect(b, true) }); err != nil {
			return err
		}
	}
	return nil
}

// Beside reports whether the guest may run as soon as Begin has returned; if
// not, why.
func (c *Capture) Beside() (bool, error) { return c.uffd >= 0, c.reason }

// Begin marks the instant. The guest and its devices stand still.
func (c *Capture) Begin() error {
	c.remember()
	// An answer to an earlier write may still be in progress.
	c.writers.Lock()
	defer c.writers.Unlock()
	c.begun.Store(true)
	if c.uffd < 0 {
		return nil
	}
	if c.m.live.Load() != c {
		if err := c.Announce(); err != nil {
			return err
		}
		// Mappings that discards have made until now are not registered yet.
		if err := c.register(c.uffd); err != nil {
			return fmt.Errorf("capture memory: %w", err)
		}
	}
	if err := c.protectRest(); err != nil {
		return fmt.Errorf("capture memory: %w", err)
	}
	return nil
}

// protectRest protects the blocks that Arm has not protected, and those written
// since.
func (c *Capture) protectRest() error {
	c.strikeFilled()
	blocks := uint64(len(c.blocks))
	for i := uint64(0); i < blocks; i++ {
		n := uint64(0)
		for i+n < blocks && !c.empty.has(i+n) && c.blocks[i+n].released.Load() {
			c.blocks[i+n].released.Store(false)
			n++
		}
		if n == 0 {
			c.blocks[i].released.Store(false) // protected before, or in an empty piece: zeros until it is written
			continue
		}
		if err := c.lookStill(i, n); err != nil {
			return err
		}
		if err := c.protect(c.runOf(i, n)); err != nil {
			return err
		}
		i += n - 1
	}
	return nil
}

// remember copies the state that later discards of the guest may change.
func (c *Capture) remember() {
	c.m.mu.Lock()
	defer c.m.mu.Unlock()
	c.mapped, c.discarded, c.orphan = c.m.mapped, c.m.layout.without(c.m.mapped), c.m.orphan
}

func (c *Capture) layout(s extent.Run) []mapping {
	c.m.mu.Lock()
	defer c.m.mu.Unlock()
	return c.m.layout.within(s)
}

// fail makes the capture useless, so that the guest does not wait for it any
// more.
func (c *Capture) fail(err error) { c.failure.CompareAndSwap(nil, &err) }

// Cancel makes Copy fail. It may be called at any time.
func (c *Capture) Cancel(reason error) { c.fail(reason) }

// Err returns the reason if the capture has failed.
func (c *Capture) Err() error {
	if p := c.failure.Load(); p != nil {
		return *p
	}
	return nil
}

// releaseUnwanted makes the blocks [from, to) writable again. No page of them
// has to be saved any more.
func (c *Capture) releaseUnwanted(from, to uint64) error {
	var errs []error
	for i := from; i < to; {
		n := c.lockUnreleased(i, min(to, (i/stepBlocks+1)*stepBlocks))
		if n == 0 {
			i++
			continue
		}
		errs = append(errs, c.unprotect(c.runOf(i, n)))
		c.unlockReleased(i, n)
		i += n
	}
	return errors.Join(errs...)
}

// lockUnreleased locks the blocks from i on, up to the first released block.
// Several locks are always taken in ascending order.
func (c *Capture) lockUnreleased(i, end uint64) (n uint64) {
	for ; i < end; i++ {
		c.blocks[i].mu.Lock()
		if c.blocks[i].released.Load() {
			c.blocks[i].mu.Unlock()
			break
		}
		n++
	}
	return n
}

// lockShareable is lockUnreleased up to the first block with pages that were not
// protected because they were absent: the capture does not notice writes to such
// pages.
func (c *Capture) lockShareable(i, end uint64) (n uint64) {
	unreleased := c.lockUnreleased(i, end)
	for n < unreleased && c.blocks[i+n].absent == 0 {
		n++
	}
	for k := i + n; k < i+unreleased; k++ {
		c.blocks[k].mu.Unlock()
	}
	return n
}

func (c *Capture) unlockReleased(i, n uint64) {
	for k := i; k < i+n; k++ {
		c.blocks[k].released.Store(true)
		c.blocks[k].mu.Unlock()
	}
}

// Close removes all protection. The layer is complete if Copy returned nil.
func (c *Capture) Close() error {
	if c.uffd < 0 {
		return nil
	}
	err := c.releaseUnwanted(0, uint64(len(c.blocks)))
	// From here on no page is protected, and host writes need no care.
	c.m.live.CompareAndSwap(c, nil)
	var one = [8]byte{1}
	_, stopErr := unix.Write(c.stop, one[:])
	<-c.served
	// A host write that began earlier may be about to use uffd.
	c.writers.Lock()
	c.closed = true
	err = errors.Join(err, stopErr, c.uffd.close(), unix.Close(c.stop), c.buffers.close())
	c.writers.Unlock()
	if err != nil && c.rebased.Load() {
		c.disown()
	}
	return err
}

// disown declares that the pages stored by this capture will not be used,
// whether they are mapped by now or not.
func (c *Capture) disown() {
	c.m.mu.Lock()
	defer c.m.mu.Unlock()
	c.m.orphan = extent.Unite(c.m.orphan, c.runs)
}
