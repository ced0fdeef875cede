package stack

import (
	"errors"
	"fmt"
	"os"
	"runtime"
	"sync"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// Poller reads the wires of a process, with one epoll and a few goroutines that take
// turns. While nothing happens, no goroutine blocks in a system call, because Go's
// runtime watches the epoll's own descriptor.
type Poller struct {
	epoll *os.File
	raw   syscall.RawConn

	// mu protects all following fields.
	mu     sync.Mutex
	wires  map[int32]*Wire
	lastID int32
	closed bool
	// used counts the resources of the connections and flows of all wires. buffers is
	// the part of its memory that connections have reserved for buffers.
	used                               usage
	buffers, maxMemory, maxDescriptors int

	wg sync.WaitGroup
}

// maxWorkers bounds the goroutines of a poller. Each has 512 KiB for reading frames.
const maxWorkers = 4

// NewPoller starts a poller. Its wires, with their connections and flows, may use at
// most this many descriptors together. Close ends it.
func NewPoller(descriptors int) (*Poller, error) {
	fd, err := unix.EpollCreate1(unix.EPOLL_CLOEXEC)
	if err != nil {
		return nil, fmt.Errorf("make an epoll for wires: %w", err)
	}
	if err := unix.SetNonblock(fd, true); err != nil {
		unix.Close(fd)
		return nil, fmt.Errorf("make an epoll for wires: %w", err)
	}
	p := &Poller{epoll: os.NewFile(uintptr(fd), "wires"), wires: map[int32]*Wire{}, maxMemory: maxMemory, maxDescriptors: descriptors}
	if p.raw, err = p.epoll.SyscallConn(); err != nil {
		return nil, errors.Join(fmt.Errorf("make an epoll for wires: %w", err), p.epoll.Close())
	}
	for range min(maxWorkers, runtime.GOMAXPROCS(0)) {
		p.wg.Add(1)
		go p.work()
	}
	return p, nil
}

// Close closes all wires, and ends the poller.
func (p *Poller) Close() error {
	p.mu.Lock()
	p.closed = true
	wires := make([]*Wire, 0, len(p.wires))
	for _, w := range p.wires {
		wires = append(wires, w)
	}
	p.mu.Unlock()
	for _, w := range wires {
		w.Close()
	}
	err := p.epoll.Close()
	p.wg.Wait()
	return err
}

// work is the loop of one goroutine. The RawConn lets one goroutine wait at a time.
// The next takes its place as soon as that one has work.
func (p *Poller) work() {
	defer p.wg.Done()
	in := newInput()
	defer in.release()
	var events [16]unix.EpollEvent
	for {
		n := 0
		err := p.raw.Read(func(fd uintptr) bool {
			var err error
			n, err = unix.EpollWait(int(fd), events[:], 0)
			return err == nil && n > 0 || err != nil && !errors.Is(err, unix.EINTR)
		})
		if err != nil || n <= 0 {
			return // the epoll is closed: epoll_wait has no other errors
		}
		for _, e := range events[:n] {
			p.mu.Lock()
			w := p.wires[e.Fd]
			p.mu.Unlock()
			if w != nil {
				w.ready(e.Events, in)
			}
		}
	}
}

// add registers w. The wire is read once its poll state is armed.
func (p *Poller) add(w *Wire) error {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.closed {
		return errors.New("attach a wire: its poller is closed")
	}
	if err := p.chargeWire(); err != nil {
		return fmt.Errorf("attach a wire: %w", err)
	}
	for p.lastID++; p.lastID <= 0 || p.wires[p.lastID] != nil; p.lastID++ {
		if p.lastID < 0 {
			p.lastID = 0
		}
	}
	w.poll.id = p.lastID
	p.wires[w.poll.id] = w
	return nil
}

func (p *Poller) remove(w *Wire) {
	p.mu.Lock()
	defer p.mu.Unlock()
	delete(p.wires, w.poll.id)
}

// control calls epoll_ctl.
func (p *Poller) control(op, fd int, id int32, events uint32) error {
	var result error
	err := p.raw.Control(func(epoll uintptr) {
		// The kernel returns the wire's id, in the field that is named Fd.
		result = unix.EpollCtl(int(epoll), op, fd, &unix.EpollEvent{Events: events, Fd: id})
	})
	return errors.Join(err, result)
}

// pollState is a wire's entry in epoll. It is one-shot: after an event it is silent
// until it is armed again, so that only one goroutine at a time reads a wire.
type pollState struct {
	// id identifies the wire to the poller. It does not change.
	id int32

	// mu protects all following fields.
	mu sync.Mutex
	// idle is signalled when reading becomes false.
	idle sync.Cond
	// reading is set while a goroutine reads the wire. resting is set while the
	// sandbox has sent more than its rate allows.
	reading, resting bool
	// writers is set while a goroutine waits for room.
	writers bool
	// closed is set when no event matters any more. dead is set when every call on
	// the socket fails, since reading it again would fail in a loop.
	closed, dead bool
}

// arm asks epoll for the events that matter. The caller holds poll.mu.
func (w *Wire) arm() {
	events := uint32(unix.EPOLLONESHOT)
	if !w.poll.reading && !w.poll.resting {
		events |= unix.EPOLLIN
	}
	if w.poll.writers {
		events |= unix.EPOLLOUT
	}
	if w.poll.closed || w.poll.dead {
		return
	}
	// It fails only when the poller is closed, and then no event is awaited.
	_ = w.poller.control(unix.EPOLL_CTL_MOD, w.fd, w.poll.id, events)
}

// armWriters makes the poller call writable when the wire has room.
func (w *Wire) armWriters() {
	w.poll.mu.Lock()
	defer w.poll.mu.Unlock()
	if !w.poll.writers {
		w.poll.writers = true
		w.arm()
	}
}

// ready handles an event of epoll.
func (w *Wire) ready(events uint32, in *input) {
	w.poll.mu.Lock()
	if w.poll.closed {
		w.poll.mu.Unlock()
		return
	}
	writable := events&(unix.EPOLLOUT|unix.EPOLLERR) != 0 && w.poll.writers
	if writable {
		w.poll.writers = false
	}
	readable := events&(unix.EPOLLIN|unix.EPOLLERR|unix.EPOLLHUP) != 0 && !w.poll.reading && !w.poll.resting
	if readable {
		w.poll.reading = true
	} else {
		w.arm()
	}
	w.poll.mu.Unlock()

	if writable {
		w.writable()
	}
	if readable {
		w.read(in)
	}
}

// doneReading arms the wire again when its reader is done. If the sandbox has sent
// more than its rate allows, it arms the wire after a rest. A dead wire is not armed
// again.
func (w *Wire) doneReading(rest time.Duration, dead bool) {
	w.poll.mu.Lock()
	defer w.poll.mu.Unlock()
	w.poll.reading = false
	w.poll.dead = w.poll.dead || dead
	w.poll.idle.Broadcast()
	if rest > 0 {
		w.poll.resting = true
		w.clock.AfterFunc(rest, w.rested)
	}
	w.arm()
}

func (w *Wire) rested() {
	w.poll.mu.Lock()
	defer w.poll.mu.Unlock()
	w.poll.resting = false
	w.arm()
}

// stopPolling waits until no goroutine of the poller uses w any more.
func (w *Wire) stopPolling() {
	w.poll.mu.Lock()
	w.poll.closed = true
	for w.poll.reading {
		w.poll.idle.Wait()
	}
	w.poll.mu.Unlock()
	w.poller.remove(w)
	// It fails only when the poller is closed.
	_ = w.poller.control(unix.EPOLL_CTL_DEL, w.fd, w.poll.id, 0)
}
