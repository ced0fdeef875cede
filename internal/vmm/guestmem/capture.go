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
	// blockSize is what is saved and released at once.
	blockSize  = 64 << 10
	blockPages = blockSize / PageSize
	// hugeBlocks, a power of two, is how many make a huge page. To let go of less
	// would split it: then each of its pages costs the guest a fault.
	hugeBlocks = hugeSize / blockSize
	// stepBlocks, a multiple of that, is how many blocks are released at once, or
	// mapped, when nothing has to be saved.
	stepBlocks = 2 * hugeBlocks
	// maxMappings bounds the mappings that captures make of RAM.
	maxMappings = 1024
)

// DefaultPatience is how much later a fork may be complete so that its source is
// not disturbed.
const DefaultPatience = 250 * time.Millisecond

// CaptureConfig says how a memory is captured.
type CaptureConfig struct {
	// Userfaultfd is an open /dev/userfaultfd. Without it, or where it cannot
	// protect this memory, the guest must stand still until Copy has returned.
	Userfaultfd *os.File
	// Pagemap is this process's /proc/self/pagemap.
	Pagemap *os.File
	// File gets the pages, each at its offset in RAM.
	File *os.File
	// Patience is for how long Copy lets others run before each block. After
	// that it takes its share of the processors.
	Patience time.Duration
}

// Capture is a memory as it was at one instant, the call of Begin. Its methods
// are called by one goroutine, in this order: Announce, Arm and Expect (if Early),
// Begin, List, Copy, Rebase, Share, Close.
type Capture struct {
	m       *Memory
	pagemap *os.File
	file    *os.File
	uffd    userfaultfd // -1: the guest stands still
	reason  error       // why uffd is -1
	markers bool        // anonymous pages that are not there can be protected, too

	// writers is held for reading by whoever releases and writes, and for writing
	// while Arm or Begin protects, and Close closes uffd. begun says that the instant
	// has come. closed, which writers protects, says that uffd is closed.
	writers sync.RWMutex
	begun   atomic.Bool
	closed  bool

	// Of the instant: where the stack has data, and where that was discarded.
	// What earlier captures failed to hand over counts as changed.
	mapped, discarded, orphan []extent.Run

	blocks []block     // nil without uffd
	empty  emptyPieces // nil: everything was protected
	// lookLeft is how much longer Begin may look at what it protects. cannotScan says
	// that the kernel has no PAGEMAP_SCAN; the others are room for what a look finds.
	lookLeft    time.Duration
	cannotScan  bool
	lookRegions []pageRegion
	lookEntries []uint64
	runs        []extent.Run // what Copy was asked for
	planned     atomic.Bool
	// completed says that nothing has to be saved any more, rebased that the
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

// block is a piece of RAM of blockSize.
type block struct {
	mu sync.Mutex // protects own, direct, absent, before and known, and is held while released changes
	// released says that its pages may have changed since the instant.
	released atomic.Bool
	// Bits for the pages: those in the file, or pending to be; those that were
	// the process's own (known when it is released); those that were stored
	// before it was known whether the layer is to have them; those that it is to
	// have (constant once planned is set); those of them that were neither there
	// nor protected (known when the block was copied).
	saved                     atomic.Uint32
	own, direct, want, absent uint16
	// before has the pages that were own when the block was looked at, before it was
	// protected; known says that no other page became own in between. Both are
	// constant after Begin.
	before uint16
	known  bool
}

// CaptureStats says what a capture cost.
type CaptureStats struct {
	livefork.Stats // of Pause and Captured, which are not of the memory alone, it has none
	// Shared is the bytes that this memory has from the layer since.
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
		c.blocks[i].released.Store(true) // nothing is protected yet
	}
	c.served = make(chan struct{})
	go c.serve()
	return c
}

type openFunc func(device *os.File) (u userfaultfd, markers bool, err error)

// prepare sets uffd, or leaves nothing behind.
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

// register registers all RAM; what is registered already stays so.
func (c *Capture) register(u userfaultfd) error {
	for i := range c.m.regions {
		if err := u.register(c.m.regions[i].bytes); err != nil {
			return err
		}
	}
	return nil
}

// Early reports whether Announce and Arm can take most of the work out of
// Begin: everywhere since Linux 6.4, before that only where files are mapped.
func (c *Capture) Early() bool {
	return c.uffd >= 0 && (c.markers || c.leavesMarkers(extent.Run{Start: 0, Length: c.m.size}))
}

// Announce makes the host's writes heed the capture. It is called while the
// guest and its devices stand still for a moment, before Arm.
func (c *Capture) Announce() error {
	if !c.m.live.CompareAndSwap(nil, c) {
		return errors.New("capture memory: another capture goes on")
	}
	return nil
}

// Arm protects everything that is there while the guest runs. What is written
// meanwhile loses its protection again, and Begin has only that left to do.
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
	// What was written in that time is done once more, in a fraction of the time: Begin
	// is left with a fraction of it, too.
	c.strikeFilled()
	return c.armReleased()
}

// armReleased protects all blocks that are not protected, but for those in empty pieces.
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
// Those that come after Announce are registered by Discard itself.
func (c *Capture) registerAgain() error {
	c.writers.Lock()
	defer c.writers.Unlock()
	return c.register(c.uffd)
}

// armStep protects up to n blocks, and says how many.
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

// armable says how many of n blocks, from i on, can be protected before the instant.
// A page of anonymous memory that comes into being after it was protected must be
// noticed: else nobody could tell whether that was before the instant.
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

// Begin is the instant. The guest and its devices stand still.
func (c *Capture) Begin() error {
	c.remember()
	// An answer to a write of before may still be under way.
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
		// Until now nobody has registered the mappings that discards have made.
		if err := c.register(c.uffd); err != nil {
			return fmt.Errorf("capture memory: %w", err)
		}
	}
	if err := c.protectRest(); err != nil {
		return fmt.Errorf("capture memory: %w", err)
	}
	return nil
}

// protectRest protects what Arm has not, or what was written since.
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
			c.blocks[i].released.Store(false) // protected before, or in an empty piece: zeros until it is written to
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

// remember notes what the guest's discards may change.
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

// fail makes the capture useless, and the guest go on.
func (c *Capture) fail(err error) { c.failure.CompareAndSwap(nil, &err) }

// Cancel makes Copy give up. It may be called at any time.
func (c *Capture) Cancel(reason error) { c.fail(reason) }

// Err is why the capture failed, if it did.
func (c *Capture) Err() error {
	if p := c.failure.Load(); p != nil {
		return *p
	}
	return nil
}

// releaseUnwanted lets the guest write to blocks [from, to) of which nothing
// is to be saved any more.
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

// lockUnreleased locks the blocks from i on up to the first that is released.
// Who takes several locks takes them upwards.
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
// protected as they were not there: nobody notices who writes to those.
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

// Close takes all protection away. The layer is complete if Copy said so.
func (c *Capture) Close() error {
	if c.uffd < 0 {
		return nil
	}
	err := c.releaseUnwanted(0, uint64(len(c.blocks)))
	// From here on nothing is protected and host writes need no care.
	c.m.live.CompareAndSwap(c, nil)
	var one = [8]byte{1}
	_, stopErr := unix.Write(c.stop, one[:])
	<-c.served
	// A host write that began before may be about to use it.
	c.writers.Lock()
	c.closed = true
	err = errors.Join(err, stopErr, c.uffd.close(), unix.Close(c.stop), c.buffers.close())
	c.writers.Unlock()
	if err != nil && c.rebased.Load() {
		c.disown()
	}
	return err
}

// disown says that what this capture stored will not be used, whatever of it
// is mapped by now.
func (c *Capture) disown() {
	c.m.mu.Lock()
	defer c.m.mu.Unlock()
	c.m.orphan = extent.Unite(c.m.orphan, c.runs)
}
