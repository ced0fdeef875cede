package process

import (
	"context"
	"errors"
	"strings"
	"sync"
	"testing"
	"time"

	"agentrun.dev/internal/engine"
	"agentrun.dev/internal/host/jail"
	"agentrun.dev/internal/vmm/vmmctl"
	"agentrun.dev/internal/vmm/vmstate"
)

// played is a vmm process that the test program plays.
type played struct {
	end  func()
	done chan struct{}
}

func (*played) PID() int          { return 1 }
func (p *played) Kill()           { p.end() }
func (p *played) Wait() LastWords { <-p.done; return LastWords{Text: "it was played"} }

// play plays a vmm that hands each message to answer. With nil it reads no messages.
func play(t *testing.T, answer func(*vmmctl.Conn, vmmctl.Message) error) *Process {
	t.Helper()
	ours, theirs, err := vmmctl.Pair()
	if err != nil {
		t.Fatal(err)
	}
	near, err := vmmctl.NewConn(ours)
	if err != nil {
		t.Fatal(err)
	}
	far, err := vmmctl.NewConn(theirs)
	if err != nil {
		t.Fatal(err)
	}
	h := &played{done: make(chan struct{})}
	h.end = sync.OnceFunc(func() { _ = far.Close(); close(h.done) })
	p := Hold(h, near, &jail.Cell{}, 1<<20)
	t.Cleanup(p.Kill)
	if answer != nil {
		go func() {
			for {
				m, _, err := far.Receive()
				if err != nil || answer(far, m) != nil {
					return
				}
			}
		}()
	}
	return p
}

// honest answers the messages whose answers carry no data.
func honest(c *vmmctl.Conn, m vmmctl.Message) error {
	if m, ok := m.(*vmmctl.Simple); ok {
		return c.Send(&vmmctl.Reply{ID: m.ID})
	}
	return nil
}

// killedFor fails unless the process was killed for this reason.
func killedFor(t *testing.T, p *Process, why string) {
	t.Helper()
	select {
	case <-p.Done():
	case <-time.After(time.Minute):
		t.Fatal("it lives on")
	}
	if exit, _ := p.Wait(); exit.Reason != vmstate.Killed || !strings.Contains(exit.Detail, "the vmm process was killed: "+why) {
		t.Errorf("it ended with %v", exit)
	}
}

// TestDeadline: a vmm that does not answer is killed, whatever the request was, and
// even if the caller still waits.
func TestDeadline(t *testing.T) {
	p := play(t, honest)
	p.patience.Store(int64(10 * time.Millisecond))
	if _, err := p.Request(t.Context(), func(id uint64) vmmctl.Message { return &vmmctl.Load{ID: id} }); !errors.Is(err, engine.ErrEnded) {
		t.Error(err)
	}
	killedFor(t, p, "it has not answered Load within 10ms")
}

// TestSaveDeadline: Save has a deadline as well, and the caller's context does not
// shorten it.
func TestSaveDeadline(t *testing.T) {
	p := play(t, func(c *vmmctl.Conn, _ vmmctl.Message) error { return c.Send(&vmmctl.Ready{}) })
	go func() {
		<-p.ready // Save has arrived
		p.mu.Lock()
		defer p.mu.Unlock()
		for _, r := range p.waiting {
			r.timer.Reset(0) // as if the time had passed
		}
	}()
	if _, err := p.Request(t.Context(), func(id uint64) vmmctl.Message { return &vmmctl.Save{ID: id} }); !errors.Is(err, engine.ErrEnded) {
		t.Error(err)
	}
	killedFor(t, p, "it has not answered Save within 5m0s")
}

// TestAnswersAreNotOverdue: a process that has answered, or was detached, lives on.
func TestAnswersAreNotOverdue(t *testing.T) {
	p := play(t, honest)
	for range 3 {
		if err := p.Pause(t.Context()); err != nil {
			t.Fatal(err)
		}
	}
	if n := len(p.waiting); n != 0 {
		t.Errorf("%d requests wait", n)
	}
	p.left.Store(true)
	p.overdue(&vmmctl.Save{}, 0)
	p.left.Store(false)
	if err := p.Pause(t.Context()); err != nil {
		t.Error(err)
	}
}

// TestReadsNothing: a dial of a guest does not wait long for a process that reads
// nothing, however many dials came before.
func TestReadsNothing(t *testing.T) {
	p := play(t, nil)
	p.patience.Store(int64(100 * time.Millisecond))
	ctx, cancel := context.WithTimeout(t.Context(), time.Millisecond)
	defer cancel()
	for { // at some point the socket is full
		if _, err := p.Dial(ctx, 5); err == nil {
			t.Fatal("it has answered")
		} else if !errors.Is(err, context.DeadlineExceeded) {
			break
		}
	}
	killedFor(t, p, "it has not answered Connect within")
}

// TestKeptIsBounded: a vmm that maps all its old layers forever cannot raise its
// limit forever.
func TestKeptIsBounded(t *testing.T) {
	const memory = 1 << 20
	p := play(t, honest)
	var backs []func() error
	for range maxKept + 1 {
		c, err := p.NewCharged(memory)
		if err != nil {
			t.Fatal(err)
		}
		backs = append(backs, p.keep(c.size, c.back))
		if err := c.File.Close(); err != nil {
			t.Fatal(err)
		}
	}
	if c, err := p.NewCharged(memory); err == nil {
		t.Errorf("it may keep any number of layers, %v", c)
	}
	if err := backs[0](); err != nil {
		t.Error(err)
	}
	c, err := p.NewCharged(memory)
	if err != nil {
		t.Fatal(err)
	}
	if err := c.Close(); err != nil {
		t.Error(err)
	}
}
