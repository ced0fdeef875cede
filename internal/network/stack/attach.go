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
	// running counts the goroutines that serve the wire. It grows only under mu, and
	// only while the wire is not closed.
	running sync.WaitGroup
	once    sync.Once // of Close

	// mu protects all following fields.
	mu     sync.Mutex
	closed bool
	// conns are the TCP connections, each from its SYN until it is completely gone.
	conns map[Tuple]*conn
	// opening is how many of conns are being dialled or in their handshake.
	opening int
	flows   map[Tuple]*flow
	queries int
	// used is the wire's share of the poller's bounds that its conns and flows take.
	used usage
	// buffers is how many bytes of Limits.Buffers connections have reserved.
	buffers int
	// stack is nil while no connection needs it. idle is set while a call of rest is
	// pending.
	stack *netstack
	idle  tcpip.Timer
	lineage
}

// Attach serves the wire whose end is fd. Without an error the descriptor then
// belongs to the Wire. The socket need not be in non-blocking mode, because other
// processes may share it. The maker of the wire gives the socket a send buffer for
// many of the longest frames. The wire ends only with Close: a datagram socket does
// not report that its other end is gone.
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
	w.up = bucket{rate: cfg.Limits.Up, clock: w.clock}
	w.down = bucket{rate: cfg.Limits.Down, clock: w.clock}
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

// SetRates changes Limits.Up and Limits.Down of a wire that is being served. 0 stands for
// the value of DefaultLimits. Frames that already wait keep their delay.
func (w *Wire) SetRates(up, down int64) {
	up, down = ratesOrDefault(up, down)
	w.up.setRate(up)
	w.down.setRate(down)
}

// Close cuts all connections at once, without informing the sandbox, and waits until
// the wire is completely gone. It waits for the Outside's methods, which must not
// call it.
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
	w.clock.start() // otherwise parked timers would never end
	w.running.Wait()
	// A goroutine that sends holds tx.mu, and finds tx closed from now on.
	w.tx.mu.Lock()
	defer w.tx.mu.Unlock()
	unix.Close(w.fd)
}

// spawn runs f in a goroutine that Close waits for, unless w is closed. The caller
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

// Pause stops the clock of all connections, for a sandbox that does not run. Data
// from outside waits.
func (w *Wire) Pause() { w.clock.stop() }

// Resume starts the clock again where Pause has stopped it.
func (w *Wire) Resume() { w.clock.start() }

// Cut ends the matching connections, with a RST, and the matching flows. It does not
// wait for their ends.
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

// Tuples returns the current connections and flows, in no order.
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
