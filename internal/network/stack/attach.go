package stack

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"os"
	"sync"

	"golang.org/x/sys/unix"
	"gvisor.dev/gvisor/pkg/tcpip"
)

// Wire is the far end of one sandbox's wire.
type Wire struct {
	poller   *Poller
	fd       int
	cfg      Config
	out      Outside
	clock    *clock
	up, down bucket
	counters counters

	poll pollState
	tx   output

	// ctx ends when the wire is closed.
	ctx    context.Context
	cancel context.CancelFunc
	// running counts the goroutines that serve the wire. It grows under mu, while
	// the wire is not closed.
	running sync.WaitGroup
	once    sync.Once // of Close

	// mu protects all following fields.
	mu     sync.Mutex
	closed bool
	// conns are the TCP connections from their SYN until nothing of them is left.
	conns map[Tuple]*conn
	// opening is how many of conns are dialled or in their handshake.
	opening int
	flows   map[Tuple]*flow
	queries int
	// used is what conns and flows have taken of the poller's bounds.
	used usage
	// buffers are the bytes that connections have reserved of Limits.Buffers.
	buffers int
	// stack is nil while no connection needs one. idle is set while rest is to come.
	stack *netstack
	idle  tcpip.Timer
	lineage
}

// Attach serves the wire whose end fd is. The descriptor then belongs to the Wire, if
// there was no error. The socket need not be in non-blocking mode: others may share it.
// Its send buffer should hold many of the longest frames; whoever makes the wire sees
// to that. Close ends it: a datagram socket never says that its other end is gone.
func (p *Poller) Attach(fd int, cfg Config, out Outside) (*Wire, error) {
	if err := cfg.check(); err != nil {
		return nil, fmt.Errorf("attach a wire: %w", err)
	}
	kind, err := unix.GetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_TYPE)
	if err != nil || kind != unix.SOCK_DGRAM {
		return nil, fmt.Errorf("attach a wire: descriptor %d is no datagram socket: %w", fd, errors.Join(err, os.ErrInvalid))
	}
	cfg.Limits = cfg.Limits.orDefault()
	w := &Wire{poller: p, fd: fd, cfg: cfg, out: out, clock: newClock(cfg.Clock)}
	w.up.fill(cfg.Limits.Up, w.clock)
	w.down.fill(cfg.Limits.Down, w.clock)
	w.poll.idle.L = &w.poll.mu
	w.tx.room.L = &w.tx.mu
	w.ctx, w.cancel = context.WithCancel(context.Background())
	if err := p.add(w); err != nil {
		return nil, err
	}
	w.poll.mu.Lock()
	defer w.poll.mu.Unlock()
	if err := p.control(unix.EPOLL_CTL_ADD, fd, w.poll.id, unix.EPOLLIN|unix.EPOLLONESHOT); err != nil {
		p.remove(w)
		w.cancel()
		return nil, fmt.Errorf("attach a wire: %w", err)
	}
	return w, nil
}

// SetRates changes Limits.Up and Limits.Down of a wire that is served; 0 is DefaultLimits's.
// Frames that wait already go on as they were told.
func (w *Wire) SetRates(up, down int64) {
	up, down = ratesOrDefault(up, down)
	w.up.setRate(up)
	w.down.setRate(down)
}

// Close cuts all connections at once, without a word to the sandbox, and waits until
// nothing of the wire is left. It waits for the Outside's methods, which must not call
// it.
func (w *Wire) Close() { w.once.Do(w.close) }

func (w *Wire) close() {
	w.mu.Lock()
	w.closed = true
	conns, flows := maps.Clone(w.conns), maps.Clone(w.flows)
	stack, idle := w.stack, w.idle
	w.stack, w.idle = nil, nil
	w.mu.Unlock()
	w.cancel()
	w.tx.close()
	w.stopPolling()
	for _, c := range conns {
		c.cut()
	}
	for _, f := range flows {
		f.close()
	}
	if idle != nil {
		idle.Stop()
	}
	if stack != nil {
		stack.destroy()
	}
	w.clock.start() // timers that are parked would never end
	w.running.Wait()
	// Whoever sends holds tx.mu, and finds it closed from now on.
	w.tx.mu.Lock()
	defer w.tx.mu.Unlock()
	unix.Close(w.fd)
}

// spawn runs f in a goroutine that Close waits for, unless w is closed; the caller
// holds w.mu.
func (w *Wire) spawn(f func()) bool {
	if w.closed {
		return false
	}
	w.running.Add(1)
	go func() {
		defer w.running.Done()
		f()
	}()
	return true
}

// Pause stops the clock of all connections, for a sandbox that does not run. What
// comes from outside waits.
func (w *Wire) Pause() { w.clock.stop() }

// Resume lets the clock go on from where Pause has stopped it.
func (w *Wire) Resume() { w.clock.start() }

// Cut ends the connections and flows that match, with a RST in the case of TCP. It
// does not wait for their ends.
func (w *Wire) Cut(match func(Tuple) bool) {
	w.mu.Lock()
	defer w.mu.Unlock()
	for t, c := range w.conns {
		if match(t) {
			w.spawn(c.cut)
		}
	}
	for t, f := range w.flows {
		if match(t) {
			f.close()
		}
	}
}

// Tuples returns the connections and flows of this moment, in no order.
func (w *Wire) Tuples() []Tuple {
	w.mu.Lock()
	defer w.mu.Unlock()
	all := make([]Tuple, 0, len(w.conns)+len(w.flows))
	for t := range w.conns {
		all = append(all, t)
	}
	for t := range w.flows {
		all = append(all, t)
	}
	return all
}
