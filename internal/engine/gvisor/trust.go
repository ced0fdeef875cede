package gvisor

import (
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"os"
	"time"

	"agentrun.dev/internal/engine"
	"agentrun.dev/internal/engine/gvisorctl"
	"agentrun.dev/internal/engine/trust"
	"golang.org/x/sys/unix"
)

// A sandbox may have taken over gVisor's kernel, which writes the checkpoints, and
// then the helper, which speaks to that kernel. A helper is killed if it sends an
// invalid message, closes its control socket or does not answer: its later messages
// could not be trusted.

// closingTime is how long a helper that has closed its control socket may take to end
// by itself. An honest helper ends its sandbox before it closes the socket.
const closingTime = 10 * time.Second

// expect sets how long each later answer of the helper may take, given that the
// helper may have to copy this many bytes.
func (p *process) expect(bytes uint64) { p.patience.Store(int64(trust.Patience(bytes))) }

// pending is a request without an answer so far.
type pending struct {
	op    gvisorctl.Op
	reply chan *gvisorctl.Message
	timer *time.Timer // nil if the sandbox decides when the answer comes
}

func (r pending) stop() {
	if r.timer != nil {
		r.timer.Stop()
	}
}

// enlist records a request that is about to be sent. The caller holds p.mu.
func (p *process) enlist(m *gvisorctl.Message) <-chan *gvisorctl.Message {
	r := pending{op: m.Op, reply: make(chan *gvisorctl.Message, 1)}
	if m.Op != gvisorctl.OpDial {
		op, after := m.Op, time.Duration(p.patience.Load())
		r.timer = time.AfterFunc(after, func() { p.overdue(op, after) })
	}
	p.waiting[m.ID] = r
	return r.reply
}

// overdue kills a helper that has not answered in time.
func (p *process) overdue(op gvisorctl.Op, after time.Duration) {
	if !p.left.Load() { // after Detach nobody reads its answers
		p.accuse(fmt.Errorf("it has not answered %q within %v", op, after))
	}
}

// accuse kills the helper and records the reason, which the sandbox's end will state.
// The first reason counts.
func (p *process) accuse(why error) {
	text := why.Error()
	p.accused.CompareAndSwap(nil, &text)
	p.signal()
}

// condemn accuses the helper of an invalid answer. It returns once the sandbox has
// ended, with how it ended.
func (p *process) condemn(why error) error {
	p.accuse(why)
	p.kill()
	return p.ended()
}

// listen reads the helper's messages until its end of the socket closes. The error is
// io.EOF, or names a message that the helper should not have sent.
func (p *process) listen() error {
	for {
		m, files, err := p.conn.Receive()
		if errors.Is(err, io.EOF) {
			return err
		}
		if err != nil {
			return fmt.Errorf("it has sent what cannot be read: %w", err)
		}
		p.mu.Lock()
		r, asked := p.waiting[m.ID]
		if asked && m.Reply && r.op == gvisorctl.OpWire && len(files) == 1 {
			m.Wire, files = files[0], nil // the caller of the request checks the descriptor
		}
		for _, f := range files {
			_ = f.Close() // the parent did not ask for it
		}
		switch {
		case len(files) > 0:
			err = fmt.Errorf("it has sent %d descriptors", len(files))
		case m.Reply && !asked:
			err = fmt.Errorf("it has answered request %d, which nobody has made", m.ID)
		case m.Reply:
			delete(p.waiting, m.ID)
		case m.Exit == nil:
			err = fmt.Errorf("it has asked for %q", m.Op)
		case p.last != nil:
			err = errors.New("it has said twice how the sandbox ended")
		default:
			p.last = m.Exit
		}
		p.mu.Unlock()
		if err != nil {
			return err
		}
		if m.Reply {
			r.stop()
			r.reply <- m
		}
	}
}

// receive listens to the helper, and reaps it.
func (p *process) receive() {
	err := p.listen()
	_ = p.conn.Close() // a confused helper ends when its control socket closes
	switch {
	case p.left.Load(): // Detach was called: it goes on without this parent
	case errors.Is(err, io.EOF):
		defer time.AfterFunc(closingTime, func() {
			p.accuse(errors.New("it has closed its control socket and goes on"))
		}).Stop()
	default:
		p.accuse(err)
	}
	p.finish()
}

// kill ends helper and sandbox at once, and waits until both are gone.
func (p *process) kill() {
	p.signal()
	if p.host != nil { // the sandbox was never used
		_ = p.host.Close()
	}
	// The wait for the helper's last message is bounded, whatever the helper has done
	// with its end of the socket.
	defer time.AfterFunc(closingTime, func() {
		p.accuse(errors.New("its control socket stayed open when it had ended"))
		_ = p.conn.Close()
	}).Stop()
	<-p.done
}

func (p *process) signal() {
	if p.child != nil {
		_ = p.child.Process.Kill() // it has ended already
	} else {
		p.held.Kill()
	}
}

// checkID refuses invalid ids of sandboxes, since folders and groups are named after
// them.
func checkID(id string) error {
	if b, err := hex.DecodeString(id); err != nil || len(b) != idBytes || hex.EncodeToString(b) != id {
		return fmt.Errorf("%.40q is not the id of a sandbox", id)
	}
	return nil
}

// errLie says that a sandbox has written a checkpoint that is not valid.
var errLie = errors.New("what it has written cannot be")

// newCheckpoint makes the files of a checkpoint, in memory.
func newCheckpoint() (c checkpoint, err error) {
	for i, f := range []**os.File{&c.state, &c.meta, &c.pages} {
		name := gvisorctl.CheckpointFiles[i]
		fd, err := unix.MemfdCreate(name, unix.MFD_CLOEXEC|unix.MFD_ALLOW_SEALING)
		if err != nil {
			c.close()
			return checkpoint{}, fmt.Errorf("make memfd: %w", err)
		}
		*f = os.NewFile(uintptr(fd), name)
	}
	return c, nil
}

// seal makes a checkpoint from files that gVisor's kernel has written and may still
// have open. Afterwards the files cannot be written to, and they hold no more than
// most bytes. The error is errLie if the kernel is to blame. The files of the result
// have descriptors of their own, at offset 0.
func (c checkpoint) seal(most uint64) (own checkpoint, err error) {
	left := most
	for _, f := range c.list() {
		if err := trust.Seal(f); err != nil {
			return own, fmt.Errorf("%w: %w", errLie, err)
		}
		info, err := f.Stat()
		if err != nil {
			return own, fmt.Errorf("look at %s: %w", f.Name(), err)
		}
		if uint64(info.Size()) > left {
			return own, fmt.Errorf("%w: %s has %d bytes, and a checkpoint of this sandbox at most %d", errLie, f.Name(), info.Size(), most)
		}
		left -= uint64(info.Size())
	}
	return c.copy()
}

// most is the maximum size of a checkpoint of the sandbox: the memory that the
// sandbox may use, since its disk is in memory, too.
func (s *sandbox) most() uint64 { return s.shape().limits(engine.Limits{}).Memory }
