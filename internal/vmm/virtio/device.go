package virtio

import (
	"fmt"
	"sync"

	"agentrun.dev/internal/vmm/guestmem"
)

// Device types, virtio 1.2 §5.
const (
	TypeNet     = 1
	TypeBlock   = 2
	TypeRNG     = 4
	TypeBalloon = 5
	TypeVsock   = 19
)

// Feature bits that do not depend on the device, §6. The transport offers them
// for every device.
const (
	FeatureIndirectDesc = 1 << 28
	FeatureVersion1     = 1 << 32

	transportFeatures = FeatureIndirectDesc | FeatureVersion1
)

// MaxQueues is the largest number of queues that a device of this package has;
// it fixes the size of MMIOState.
const MaxQueues = 4

// Device is a device behind the transport. Its lifecycle is: Activate when the
// driver sets DRIVER_OK, Notify while it runs, Reset when the driver writes 0
// to the status. Pause and Resume may come at any time, also before Activate: a
// device that is activated while paused starts at Resume.
type Device interface {
	Type() uint32
	// Features are the device's own bits, without those of the transport.
	Features() uint64
	// QueueSizes lists the largest size of each queue.
	QueueSizes() []uint16
	// ReadConfig fills p with the configuration space from off on. Bytes beyond
	// its end read as zeros.
	ReadConfig(off uint64, p []byte)
	// WriteConfig ignores writes to read-only fields.
	WriteConfig(off uint64, p []byte)
	Activate(DriverContext) error
	// Notify says that queue q has new buffers. It may come at any time, also
	// after Reset or without new buffers.
	Notify(q int)
	// Reset returns when the device does not access guest memory or files any
	// more.
	Reset()
	Pause()
	// Resume scans every queue. The transport raises the interrupt.
	Resume()
}

// DriverContext is the environment of a device once its driver is ready. The
// functions take no lock and may be called with the device's lock held.
type DriverContext struct {
	Mem      *guestmem.Memory
	Queues   []*Queue
	Features uint64
	// Interrupt announces used buffers.
	Interrupt func()
	// ConfigChanged announces a new configuration; called with the device's
	// lock held, after the change.
	ConfigChanged func()
	// Fail sets DEVICE_NEEDS_RESET; the device must not process requests any
	// more.
	Fail func(error)
}

// core is the common part of all devices: the lock, and the driver's context.
type core struct {
	// mu protects all following fields, the queues in ctx, and the fields of
	// the device that embeds the core unless they say otherwise.
	mu     sync.Mutex
	ctx    DriverContext
	live   bool // from Activate to Reset or to the first broken ring
	paused bool
}

// running reports whether the device may touch guest memory.
func (c *core) running() bool { return c.live && !c.paused }

// activate takes over the driver's context.
func (c *core) activate(ctx DriverContext) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.ctx, c.live = ctx, true
}

// Pause waits for the request in flight; see Device.
func (c *core) Pause() {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.paused = true
}

// unpause lets the device run; the caller scans the queues.
func (c *core) unpause() {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.paused = false
}

// deactivate stops the device and forgets the driver.
func (c *core) deactivate() {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.live, c.ctx = false, DriverContext{}
}

// fail stops a device whose driver broke a rule that leaves no way to answer.
func (c *core) fail(err error) {
	if !c.live {
		return
	}
	c.live = false
	c.ctx.Fail(err)
}

// pop takes a buffer from queue q. It also returns false if the device does not
// run or if the ring turns out to be broken, which stops the device.
func (c *core) pop(q int) (Chain, bool) {
	if !c.running() || q >= len(c.ctx.Queues) {
		return Chain{}, false
	}
	chain, ok, err := c.ctx.Queues[q].Pop()
	if err != nil {
		c.fail(fmt.Errorf("queue %d: %w", q, err))
		return Chain{}, false
	}
	return chain, ok
}

// push returns a buffer to the driver without announcing it.
func (c *core) push(q int, head uint16, n uint32) {
	if err := c.ctx.Queues[q].Push(head, n); err != nil {
		c.fail(fmt.Errorf("queue %d: %w", q, err))
	}
}

// quiet asks the driver not to notify the device of buffers of queue q.
func (c *core) quiet(q int) {
	if _, err := c.ctx.Queues[q].notify(false); err != nil {
		c.fail(fmt.Errorf("queue %d: %w", q, err))
	}
}

// popOrListen is pop. If there is no buffer, it asks the driver to notify the
// device of the next one.
func (c *core) popOrListen(q int) (Chain, bool) {
	chain, ok := c.pop(q)
	if ok || !c.running() || q >= len(c.ctx.Queues) {
		return chain, ok
	}
	changed, err := c.ctx.Queues[q].notify(true)
	if err != nil {
		c.fail(fmt.Errorf("queue %d: %w", q, err))
		return Chain{}, false
	}
	if !changed {
		return Chain{}, false
	}
	return c.pop(q) // a buffer that came before the driver saw the request
}

// announce raises the interrupt for used buffers of queue q unless the driver
// masked it. With an edge-triggered line every announcement raises: an earlier
// edge may already have been consumed.
func (c *core) announce(q int) bool {
	if !c.live || !c.ctx.Queues[q].WantsInterrupt() {
		return false
	}
	c.ctx.Interrupt()
	return true
}

// serve calls handle for the buffers of queue q, at most as many as the ring
// holds. The guest sends its own notification for buffers that it adds
// meanwhile, so none is forgotten, and a guest that adds buffers as fast as we
// consume them cannot occupy this thread. handle returns the length for the
// used ring; an error stops the device.
func (c *core) serve(q int, handle func(Chain) (uint32, error)) {
	if !c.running() || q >= len(c.ctx.Queues) {
		return
	}
	done := false
	for range c.ctx.Queues[q].size {
		chain, ok := c.pop(q)
		if !ok {
			break
		}
		n, err := handle(chain)
		if err != nil {
			c.fail(fmt.Errorf("queue %d: %w", q, err))
			break
		}
		c.push(q, chain.Head, n)
		done = true
	}
	if done {
		c.announce(q)
	}
}

// configRead copies the part of a configuration space at [off, off+len(p)); the
// rest of p becomes zero.
func configRead(config []byte, off uint64, p []byte) {
	clear(p)
	if off < uint64(len(config)) {
		copy(p, config[off:])
	}
}

// worker runs steps in a goroutine that sleeps until it is woken.
type worker struct {
	kick chan struct{} // holds at most one wake-up
	quit chan struct{}
	done chan struct{}
}

func newWorker() worker { return worker{kick: make(chan struct{}, 1)} }

// wake makes the worker look again. It never blocks and takes no lock: vCPU
// threads call it while a request is in flight.
func (w *worker) wake() {
	select {
	case w.kick <- struct{}{}:
	default:
	}
}

// start calls step after each wake-up until it returns false.
func (w *worker) start(step func() bool) {
	quit, done := make(chan struct{}), make(chan struct{})
	w.quit, w.done = quit, done
	go func() {
		defer close(done)
		for {
			select {
			case <-quit:
				return
			case <-w.kick:
			}
			for step() {
			}
		}
	}()
}

// stop ends the goroutine and waits for it; step must have begun to return
// false. Only the transport calls start and stop, one at a time.
func (w *worker) stop() {
	if w.quit == nil {
		return
	}
	close(w.quit)
	<-w.done
	w.quit, w.done = nil, nil
}
