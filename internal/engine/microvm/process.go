// Package microvm runs sandboxes as microVMs: one vmm process per VM, started
// and spoken to here.
package microvm

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"sync"
	"sync/atomic"
	"time"

	"agentrun.dev/internal/engine"
	"agentrun.dev/internal/host/jail"
	"agentrun.dev/internal/vmm/vmmctl"
	"agentrun.dev/internal/vmm/vmstate"
	"golang.org/x/sys/unix"
)

// Process is a running vmm process with its VM.
type Process struct {
	handle handle
	conn   *vmmctl.Conn
	cell   *jail.Cell
	limits jail.Limits // what it was given; zero if somebody else did

	ready    chan struct{} // closed when the guest's agent listens
	done     chan struct{} // closed when the process has ended
	exit     vmstate.Exit  // set before done is closed
	lastTail []byte        // the console's tail at the end, likewise

	paused atomic.Bool   // as far as this parent knows
	parked atomic.Bool   // it goes on when it is sent something
	kept   atomic.Uint64 // bytes of charged files that were closed here, and that the process still has
	lent   atomic.Int64  // files on disk that captures have handed out and that are not gone

	memory   uint64                 // the guest's, in bytes
	patience atomic.Int64           // how long it may take for an answer; expect sets it
	left     atomic.Bool            // the socket is closed here, and the process goes on
	accused  atomic.Pointer[string] // of what; nil unless it was killed for it

	mu      sync.Mutex // protects all following fields
	nextID  uint64
	waiting map[uint64]pending // nil once the process has ended
}

// stderrLimit bounds what a dying vmm can say: a Go stack trace.
const stderrLimit = 64 << 10

// begin starts a vmm process and returns when its first message was answered.
func begin(j *jail.Jail, limits jail.Limits, first *message) (*Process, error) {
	p, made, err := open(j, limits, first)
	if err != nil {
		return nil, err
	}
	if _, err := p.await(context.Background(), made); err != nil {
		p.Kill()
		return nil, fmt.Errorf("start microVM: %w", err)
	}
	return p, nil
}

// open starts a vmm process with its first message, Boot or Shell, whose reply
// comes later.
func open(j *jail.Jail, limits jail.Limits, first *message) (*Process, <-chan *vmmctl.Reply, error) {
	p, err := spawn(j, limits)
	if err != nil {
		return nil, nil, err
	}
	switch m := first.Message.(type) {
	case *vmmctl.Boot:
		p.memory = m.Memory
	case *vmmctl.Shell:
		p.memory = m.Memory.Size
	}
	p.expect(p.memory)
	reply := p.enlist(0, first.Message) // the first message is answered with id 0
	err = p.conn.Send(first.Message, first.files...)
	go p.receive()
	if err != nil {
		p.Kill()
		return nil, nil, fmt.Errorf("start microVM: %w", errors.Join(err, p.ended()))
	}
	return p, reply, nil
}

// spawn starts the process with its control socket.
func spawn(j *jail.Jail, limits jail.Limits) (*Process, error) {
	parent, child, err := vmmctl.Pair()
	if err != nil {
		return nil, err
	}
	defer func() { _ = child.Close() }() // the process has its own copy
	stderr, err := sealedMemfd("vmm stderr", stderrLimit)
	if err != nil {
		return nil, errors.Join(err, parent.Close())
	}
	conn, err := vmmctl.NewConn(parent)
	if err != nil {
		return nil, errors.Join(err, parent.Close(), stderr.Close())
	}
	started, err := j.Start(limits, child, stderr)
	if err != nil {
		return nil, errors.Join(err, conn.Close(), stderr.Close())
	}
	p := newProcess(&ownChild{started, stderr}, conn)
	p.cell, p.limits = started.Cell, limits
	return p, nil
}

func newProcess(h handle, conn *vmmctl.Conn) *Process {
	p := &Process{
		handle: h, conn: conn, nextID: 1,
		ready: make(chan struct{}), done: make(chan struct{}), waiting: map[uint64]pending{},
	}
	p.expect(0)
	return p
}

// sealedMemfd is a file in memory that cannot grow beyond size.
func sealedMemfd(name string, size int64) (*os.File, error) {
	fd, err := unix.MemfdCreate(name, unix.MFD_CLOEXEC|unix.MFD_ALLOW_SEALING)
	if err != nil {
		return nil, fmt.Errorf("make memfd: %w", err)
	}
	f := os.NewFile(uintptr(fd), name)
	err = f.Truncate(size)
	if err == nil {
		_, err = unix.FcntlInt(f.Fd(), unix.F_ADD_SEALS, unix.F_SEAL_GROW|unix.F_SEAL_SHRINK)
	}
	if err != nil {
		return nil, errors.Join(fmt.Errorf("seal memfd: %w", err), f.Close())
	}
	return f, nil
}

// finish reaps the process and tells everybody who waits.
func (p *Process) finish(last *vmmctl.Exit) {
	words := p.handle.wait()
	if why := p.accused.Load(); why != nil {
		p.exit = vmstate.Exit{Reason: vmstate.Killed, Detail: "the vmm process was killed: " + *why + "; " + words.text}
	} else if last != nil {
		p.exit = vmstate.Exit{Reason: vmstate.Reason(last.Reason), Detail: last.Detail}
		p.lastTail = last.Console
	} else {
		p.exit = vmstate.Exit{Reason: vmstate.Killed, Detail: words.text}
	}
	if words.outOfMemory {
		p.exit.Reason = vmstate.OutOfMemory
	}
	p.mu.Lock()
	for _, r := range p.waiting {
		if r.timer != nil {
			r.timer.Stop()
		}
	}
	p.waiting = nil
	p.mu.Unlock()
	close(p.done)
}

// WaitReady waits until the guest's agent listens.
func (p *Process) WaitReady(ctx context.Context) error {
	select {
	case <-p.ready:
		return nil
	case <-p.done:
		return fmt.Errorf("the guest ended before its agent was ready: %v", p.exit)
	case <-ctx.Done():
		return fmt.Errorf("wait for the guest's agent: %w", ctx.Err())
	}
}

// Done is closed when the VM and its process have ended.
func (p *Process) Done() <-chan struct{} { return p.done }

// Wait returns how the VM ended and the tail of its console.
func (p *Process) Wait() (vmstate.Exit, []byte) {
	<-p.done
	return p.exit, p.lastTail
}

// Pid is the process id of the vmm.
func (p *Process) Pid() int { return p.handle.pid() }

// Charged is how much memory of the machine the VM occupies, all that it costs
// included but for cached pages of files, and the limit of it; both are 0 for a
// VM without limits.
func (p *Process) Charged() (usage, limit uint64, err error) { return p.cell.Memory() }

// Kill ends process and VM at once and waits until they are gone.
func (p *Process) Kill() {
	p.handle.kill()
	// Whatever the process has done with its end of the socket, nobody waits for
	// its last word for long.
	defer time.AfterFunc(closingTime, func() {
		p.accuse(errors.New("its control socket stayed open when it had ended"))
		_ = p.conn.Close()
	}).Stop()
	<-p.done
}

// Dial opens a stream to a vsock port of the guest.
func (p *Process) Dial(ctx context.Context, port uint32) (net.Conn, error) {
	return p.dial(ctx, port, false)
}

func (p *Process) dial(ctx context.Context, port uint32, standby bool) (net.Conn, error) {
	ours, theirs, err := streamPair()
	if err != nil {
		return nil, fmt.Errorf("dial guest port %d: %w", port, err)
	}
	// The guest decides when it answers: a vmm is not to blame if it never does.
	ctx, cancel := context.WithTimeout(ctx, time.Duration(p.patience.Load()))
	defer cancel()
	_, err = p.request(ctx, func(id uint64) vmmctl.Message {
		return &vmmctl.Connect{ID: id, Port: port, Standby: standby}
	}, theirs)
	if err = errors.Join(err, theirs.Close()); err != nil {
		return nil, errors.Join(fmt.Errorf("dial guest port %d: %w", port, err), ours.Close())
	}
	return ours, nil
}

// streamPair makes the two ends of a stream to a guest: ours, and that of the
// vmm.
func streamPair() (ours net.Conn, theirs *os.File, err error) {
	fds, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC|unix.SOCK_NONBLOCK, 0)
	if err != nil {
		return nil, nil, fmt.Errorf("make a stream: %w", err)
	}
	f, theirs := os.NewFile(uintptr(fds[0]), "guest stream"), os.NewFile(uintptr(fds[1]), "guest stream")
	ours, err = net.FileConn(f)
	if err = errors.Join(err, f.Close()); err != nil {
		return nil, nil, errors.Join(fmt.Errorf("make a stream: %w", err), theirs.Close())
	}
	return ours, theirs, nil
}

// Pause stops the guest's processors and devices.
func (p *Process) Pause(ctx context.Context) error {
	p.paused.Store(true)
	p.parked.Store(false)
	return p.simple(ctx, vmmctl.KindPause)
}

// Park is Pause until something is sent on one of the guest's streams.
func (p *Process) Park(ctx context.Context) error {
	p.paused.Store(true)
	err := p.simple(ctx, vmmctl.KindPark)
	p.parked.Store(err == nil)
	return err
}

// Resume lets a paused guest go on. Its wall clock is late by the pause.
func (p *Process) Resume(ctx context.Context) error {
	_, err := p.resume(ctx)
	return err
}

// resume is Resume, and says whether the guest stood still. The vmm process of
// an older AgentRun does not tell: it may have.
func (p *Process) resume(ctx context.Context) (stood bool, err error) {
	wait, err := p.postResume()
	if err != nil {
		return false, err
	}
	return wait(ctx)
}

// postResume asks for Resume and returns how to wait for it.
func (p *Process) postResume() (wait func(context.Context) (stood bool, err error), err error) {
	p.paused.Store(false)
	p.parked.Store(false)
	resumed, err := p.post(func(id uint64) vmmctl.Message { return &vmmctl.Simple{Kind: vmmctl.KindResume, ID: id} })
	if err != nil {
		return nil, err
	}
	return func(ctx context.Context) (bool, error) {
		r, err := p.await(ctx, resumed)
		return err == nil && (len(r.Data) != 1 || r.Data[0] != 0), err
	}, nil
}

// RenewGeneration gives the guest a new generation id and tells its kernel,
// which reseeds its random number generator.
func (p *Process) RenewGeneration(ctx context.Context) error {
	return p.simple(ctx, vmmctl.KindGeneration)
}

// Settle waits until the guest has given back the memory that it does not use.
func (p *Process) Settle(ctx context.Context) error { return p.simple(ctx, vmmctl.KindSettle) }

// Stop cuts the guest's power.
func (p *Process) Stop(ctx context.Context) error { return p.simple(ctx, vmmctl.KindStop) }

// Console returns the tail of what the guest printed.
func (p *Process) Console(ctx context.Context) ([]byte, error) {
	r, err := p.request(ctx, func(id uint64) vmmctl.Message {
		return &vmmctl.Simple{Kind: vmmctl.KindConsole, ID: id}
	})
	if err != nil {
		return nil, fmt.Errorf("read console: %w", err)
	}
	return r.Data, nil
}

// SetBalloon asks the guest to give back this much of its memory.
func (p *Process) SetBalloon(ctx context.Context, bytes uint64) error {
	_, err := p.request(ctx, func(id uint64) vmmctl.Message { return &vmmctl.Balloon{ID: id, Bytes: bytes} })
	return err
}

func (p *Process) simple(ctx context.Context, kind vmmctl.Kind) error {
	_, err := p.request(ctx, func(id uint64) vmmctl.Message { return &vmmctl.Simple{Kind: kind, ID: id} })
	return err
}

// request sends a message and waits for its reply.
func (p *Process) request(ctx context.Context, message func(id uint64) vmmctl.Message, files ...*os.File) (*vmmctl.Reply, error) {
	reply, err := p.post(message, files...)
	if err != nil {
		return nil, err
	}
	return p.await(ctx, reply)
}

// post sends a message; its reply, for await, comes later. A vmm that does not
// answer in time is killed.
func (p *Process) post(message func(id uint64) vmmctl.Message, files ...*os.File) (<-chan *vmmctl.Reply, error) {
	p.mu.Lock()
	if p.waiting == nil {
		p.mu.Unlock()
		return nil, p.ended()
	}
	id := p.nextID
	p.nextID++
	m := message(id)
	reply := p.enlist(id, m)
	p.mu.Unlock()
	// Whether or not the guest answers, a vmm takes what it is sent.
	after := time.Duration(p.patience.Load())
	taken := time.AfterFunc(after, func() { p.overdue(m, after) })
	err := p.conn.Send(m, files...)
	taken.Stop()
	if err != nil && !errors.Is(err, io.ErrClosedPipe) {
		p.mu.Lock()
		if r := p.waiting[id]; r.timer != nil {
			r.timer.Stop()
		}
		delete(p.waiting, id)
		p.mu.Unlock()
		return nil, err
	}
	return reply, nil
}

// enlist notes a request that is about to be made. The caller holds p.mu, or is
// the only one who knows the process.
func (p *Process) enlist(id uint64, m vmmctl.Message) <-chan *vmmctl.Reply {
	r := pending{reply: make(chan *vmmctl.Reply, 1)}
	if _, guests := m.(*vmmctl.Connect); !guests {
		after := time.Duration(p.patience.Load())
		r.timer = time.AfterFunc(after, func() { p.overdue(m, after) })
	}
	p.waiting[id] = r
	return r.reply
}

// refusal is what a vmm says to a request that it does not fulfil.
type refusal string

func (r refusal) Error() string { return string(r) }

func (p *Process) await(ctx context.Context, reply <-chan *vmmctl.Reply) (*vmmctl.Reply, error) {
	select {
	case r := <-reply:
		if r.Error != "" {
			return nil, refusal(r.Error)
		}
		return r, nil
	case <-p.done:
		return nil, p.ended()
	case <-ctx.Done():
		return nil, ctx.Err()
	}
}

// stopped is ErrEnded if the process has ended.
func (p *Process) stopped() error {
	select {
	case <-p.done:
		return p.ended()
	default:
		return nil
	}
}

func (p *Process) ended() error { return fmt.Errorf("%w: %v", engine.ErrEnded, p.exit) }
