package process

import (
	"errors"
	"fmt"
	"io"
	"slices"
	"time"

	"agentrun.dev/internal/engine/trust"
	"agentrun.dev/internal/vmm/vmmctl"
	"agentrun.dev/internal/vmm/vmstate"
)

// A guest may have taken over its vmm process. A process is killed if it sends a
// message that no vmm sends, closes its control socket or does not answer: its later
// messages could not be trusted.

// closingTime is how long a process that has closed its control socket may take to
// end by itself. An honest process ends then.
const closingTime = 5 * time.Second

// Expect sets how long each later answer of the process may take, given that the
// process may have to copy this many bytes.
func (p *Process) Expect(bytes uint64) { p.patience.Store(int64(trust.Patience(bytes))) }

// pending is a request without an answer so far.
type pending struct {
	reply chan *vmmctl.Reply
	timer *time.Timer // nil if the guest decides when the answer comes
}

// overdue kills a vmm that has not answered in time.
func (p *Process) overdue(message vmmctl.Message, after time.Duration) {
	if p.left.Load() {
		return // nobody reads its answers any more
	}
	p.accuse(fmt.Errorf("it has not answered %s within %v", nameOf(message), after))
}

// nameOf names a message for error messages.
func nameOf(m vmmctl.Message) string {
	if s, ok := m.(*vmmctl.Simple); ok {
		return fmt.Sprintf("a request of kind %d", s.Kind)
	}
	return fmt.Sprintf("%T", m)[len("*vmmctl."):]
}

// accuse kills the process and records the reason, which the process's exit will
// state. The first reason counts.
func (p *Process) accuse(why error) {
	text := why.Error()
	p.accused.CompareAndSwap(nil, &text)
	p.handle.Kill()
}

// Condemn accuses a process of an invalid answer. It returns once the process has
// ended, with how it ended.
func (p *Process) Condemn(why error) error {
	p.accuse(why)
	p.Kill()
	return p.Ended()
}

// saidByVMM are the reasons that a vmm may give for the end of its VM. The parent
// determines the other reasons by itself.
var saidByVMM = []vmstate.Reason{
	vmstate.PowerOff, vmstate.Reset, vmstate.Panic, vmstate.TripleFault, vmstate.InternalError, vmstate.Stopped,
}

// listen reads the process's messages until its end of the socket closes. It returns
// the Exit message, if there was one. The error is io.EOF, or names a message that
// the process should not have sent.
func (p *Process) listen() (last *vmmctl.Exit, err error) {
	ready := false
	for {
		m, files, err := p.conn.Receive()
		if errors.Is(err, io.EOF) {
			return last, err
		}
		if err != nil {
			return last, fmt.Errorf("it has sent what cannot be read: %w", err)
		}
		for _, f := range files {
			_ = f.Close() // the parent never asks for files
		}
		if len(files) > 0 {
			return last, fmt.Errorf("it has sent %d descriptors", len(files))
		}
		switch m := m.(type) {
		case *vmmctl.Reply:
			p.mu.Lock()
			r, asked := p.waiting[m.ID]
			delete(p.waiting, m.ID)
			p.mu.Unlock()
			if !asked {
				return last, fmt.Errorf("it has answered request %d, which nobody has made", m.ID)
			}
			r.end(m)
		case *vmmctl.Ready:
			if ready {
				return last, errors.New("it has said twice that the guest's agent listens")
			}
			ready = true
			close(p.ready)
		case *vmmctl.Exit:
			if last != nil || !slices.Contains(saidByVMM, vmstate.Reason(m.Reason)) {
				return last, fmt.Errorf("it has said that its VM ended with %q", m.Reason)
			}
			last = m
		default:
			return last, fmt.Errorf("it has sent a %T, which is for a parent to send", m)
		}
	}
}

// end hands over the answer.
func (r pending) end(m *vmmctl.Reply) {
	if r.timer != nil {
		r.timer.Stop()
	}
	r.reply <- m
}

// receive reads the process's messages until the end, and reaps the process.
func (p *Process) receive() {
	last, err := p.listen()
	_ = p.conn.Close() // a vmm stops when its control socket closes
	switch {
	case p.left.Load(): // Detach was called: it goes on without this parent
	case errors.Is(err, io.EOF):
		defer time.AfterFunc(closingTime, func() {
			p.accuse(errors.New("it has closed its control socket and goes on"))
		}).Stop()
	default:
		p.accuse(err)
	}
	p.finish(last)
}
