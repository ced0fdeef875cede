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

// A vmm process may be in the hands of its guest. A process that says what no vmm
// says, closes its control socket or does not answer is killed: nothing that it
// says later could be relied on.

// closingTime is how long a process that has closed its control socket may take
// to end by itself, which is what an honest one does.
const closingTime = 5 * time.Second

// Expect sets how long the process may take for each answer from now on, if it
// may have to copy so many bytes.
func (p *Process) Expect(bytes uint64) { p.patience.Store(int64(trust.Patience(bytes))) }

// pending is a request that was not answered yet.
type pending struct {
	reply chan *vmmctl.Reply
	timer *time.Timer // nil where the guest decides when there is an answer
}

// overdue kills a vmm that has not answered in time.
func (p *Process) overdue(message vmmctl.Message, after time.Duration) {
	if p.left.Load() {
		return // whatever it answers, nobody reads it
	}
	p.accuse(fmt.Errorf("it has not answered %s within %v", nameOf(message), after))
}

// nameOf is for people.
func nameOf(m vmmctl.Message) string {
	if s, ok := m.(*vmmctl.Simple); ok {
		return fmt.Sprintf("a request of kind %d", s.Kind)
	}
	return fmt.Sprintf("%T", m)[len("*vmmctl."):]
}

// accuse kills the process and says why in how it ended. The first reason counts.
func (p *Process) accuse(why error) {
	text := why.Error()
	p.accused.CompareAndSwap(nil, &text)
	p.handle.Kill()
}

// Condemn is accuse for whoever asked and got nonsense. It returns when the
// process has gone, with how it ended.
func (p *Process) Condemn(why error) error {
	p.accuse(why)
	p.Kill()
	return p.Ended()
}

// saidByVMM are the reasons that a vmm can give for the end of its VM. The others
// are for the parent to find.
var saidByVMM = []vmstate.Reason{
	vmstate.PowerOff, vmstate.Reset, vmstate.Panic, vmstate.TripleFault, vmstate.InternalError, vmstate.Stopped,
}

// listen takes what the process says until its end of the socket closes, and
// returns its last word, if there was one. The error is io.EOF, or says what the
// process should not have said.
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
			_ = f.Close() // nobody asked for it
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

// end hands the answer over.
func (r pending) end(m *vmmctl.Reply) {
	if r.timer != nil {
		r.timer.Stop()
	}
	r.reply <- m
}

// receive listens to the process, and reaps it.
func (p *Process) receive() {
	last, err := p.listen()
	_ = p.conn.Close() // makes a confused process stop
	switch {
	case p.left.Load(): // it goes on without this parent
	case errors.Is(err, io.EOF):
		defer time.AfterFunc(closingTime, func() {
			p.accuse(errors.New("it has closed its control socket and goes on"))
		}).Stop()
	default:
		p.accuse(err)
	}
	p.finish(last)
}
