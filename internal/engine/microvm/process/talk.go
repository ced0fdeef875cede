package process

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"time"

	"agentrun.dev/internal/host/jail"
	"agentrun.dev/internal/vmm/vmmctl"
	"golang.org/x/sys/unix"
)

// Dial opens a stream to a vsock port of the guest.
func (p *Process) Dial(ctx context.Context, port uint32) (net.Conn, error) {
	return p.dial(ctx, port, false)
}

// DialStandby opens the stream that copies of the guest will continue.
func (p *Process) DialStandby(ctx context.Context, port uint32) (net.Conn, error) {
	return p.dial(ctx, port, true)
}

func (p *Process) dial(ctx context.Context, port uint32, standby bool) (net.Conn, error) {
	ours, theirs, err := StreamPair()
	if err != nil {
		return nil, fmt.Errorf("dial guest port %d: %w", port, err)
	}
	// The guest decides when it answers, so a vmm is not blamed if its guest never
	// does.
	ctx, cancel := context.WithTimeout(ctx, time.Duration(p.patience.Load()))
	defer cancel()
	_, err = p.Request(ctx, func(id uint64) vmmctl.Message {
		return &vmmctl.Connect{ID: id, Port: port, Standby: standby}
	}, theirs)
	if err = errors.Join(err, theirs.Close()); err != nil {
		return nil, errors.Join(fmt.Errorf("dial guest port %d: %w", port, err), ours.Close())
	}
	return ours, nil
}

// StreamPair makes the two ends of a stream to a guest: ours and the vmm's.
func StreamPair() (ours net.Conn, theirs *os.File, err error) {
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

// Resume lets a paused guest go on. Its wall clock is behind by the length of the
// pause.
func (p *Process) Resume(ctx context.Context) error {
	wait, err := p.PostResume()
	if err == nil {
		_, err = wait(ctx)
	}
	return err
}

// PostResume sends the request to resume. wait waits for the reply, which says
// whether the guest stood still. The vmm process of an older AgentRun does not say
// it; the guest then counts as having stood still.
func (p *Process) PostResume() (wait func(context.Context) (stood bool, err error), err error) {
	p.paused.Store(false)
	p.parked.Store(false)
	resumed, err := p.Post(func(id uint64) vmmctl.Message { return &vmmctl.Simple{Kind: vmmctl.KindResume, ID: id} })
	if err != nil {
		return nil, err
	}
	return func(ctx context.Context) (bool, error) {
		r, err := p.Await(ctx, resumed)
		return err == nil && (len(r.Data) != 1 || r.Data[0] != 0), err
	}, nil
}

// RenewGenerationID gives the guest a new generation id and tells its kernel,
// which reseeds its random number generator.
func (p *Process) RenewGenerationID(ctx context.Context) error {
	return p.simple(ctx, vmmctl.KindGenerationID)
}

// Settle waits until the guest has returned the memory that it does not use.
func (p *Process) Settle(ctx context.Context) error { return p.simple(ctx, vmmctl.KindSettle) }

// Stop cuts the guest's power.
func (p *Process) Stop(ctx context.Context) error { return p.simple(ctx, vmmctl.KindStop) }

// Console returns the tail of the guest's console.
func (p *Process) Console(ctx context.Context) ([]byte, error) {
	r, err := p.Request(ctx, func(id uint64) vmmctl.Message {
		return &vmmctl.Simple{Kind: vmmctl.KindConsole, ID: id}
	})
	if err != nil {
		return nil, fmt.Errorf("read console: %w", err)
	}
	return r.Data, nil
}

// SetBalloon asks the guest to return this much of its memory.
func (p *Process) SetBalloon(ctx context.Context, bytes uint64) error {
	_, err := p.Request(ctx, func(id uint64) vmmctl.Message { return &vmmctl.Balloon{ID: id, Bytes: bytes} })
	return err
}

func (p *Process) simple(ctx context.Context, kind vmmctl.Kind) error {
	_, err := p.Request(ctx, func(id uint64) vmmctl.Message { return &vmmctl.Simple{Kind: kind, ID: id} })
	return err
}

// Request sends a message and waits for its reply.
func (p *Process) Request(ctx context.Context, message func(id uint64) vmmctl.Message, files ...*os.File) (*vmmctl.Reply, error) {
	reply, err := p.Post(message, files...)
	if err != nil {
		return nil, err
	}
	return p.Await(ctx, reply)
}

// Post sends a message and returns the channel of its reply, for Await. A vmm that
// does not answer in time is killed.
func (p *Process) Post(message func(id uint64) vmmctl.Message, files ...*os.File) (<-chan *vmmctl.Reply, error) {
	p.mu.Lock()
	if p.waiting == nil {
		p.mu.Unlock()
		return nil, p.Ended()
	}
	id := p.nextID
	p.nextID++
	m := message(id)
	reply := p.enlist(id, m)
	p.mu.Unlock()
	// A vmm must read its messages even while its guest does not answer.
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

// enlist records a request that is about to be sent. The caller holds p.mu, or is the
// only user of the process.
func (p *Process) enlist(id uint64, m vmmctl.Message) <-chan *vmmctl.Reply {
	r := pending{reply: make(chan *vmmctl.Reply, 1)}
	if _, guests := m.(*vmmctl.Connect); !guests {
		after := time.Duration(p.patience.Load())
		r.timer = time.AfterFunc(after, func() { p.overdue(m, after) })
	}
	p.waiting[id] = r
	return r.reply
}

// Refusal is a vmm's reason for refusing a request.
type Refusal string

func (r Refusal) Error() string { return string(r) }

// Await waits for the reply to a Post.
func (p *Process) Await(ctx context.Context, reply <-chan *vmmctl.Reply) (*vmmctl.Reply, error) {
	select {
	case r := <-reply:
		if r.Error != "" {
			return nil, Refusal(r.Error)
		}
		return r, nil
	case <-p.done:
		return nil, p.Ended()
	case <-ctx.Done():
		return nil, ctx.Err()
	}
}

// Touched lists the pages of memory that the guest has touched.
func (p *Process) Touched(ctx context.Context) (vmmctl.Touched, error) {
	pagemap, err := jail.OpenPagemap(p.Pid())
	if err != nil {
		return vmmctl.Touched{}, err
	}
	defer func() { _ = pagemap.Close() }() // the vmm has its own copy
	r, err := p.Request(ctx, func(id uint64) vmmctl.Message {
		return &vmmctl.Simple{Kind: vmmctl.KindTouched, ID: id}
	}, pagemap)
	if err != nil {
		return vmmctl.Touched{}, err
	}
	pages, err := vmmctl.UnmarshalTouched(r.Data)
	if err == nil {
		err = pages.Check(p.memory)
	}
	if err != nil {
		return vmmctl.Touched{}, p.Condemn(fmt.Errorf("it has touched what cannot be: %w", err))
	}
	return pages, nil
}
