// Package process owns vmm processes, each with its VM. It starts them in a jail,
// speaks with them, hands them descriptors, and kills any that misbehave.
package process

import (
	"context"
	"errors"
	"fmt"
	"os"
	"sync"
	"sync/atomic"
	"time"

	"agentrun.dev/internal/engine"
	"agentrun.dev/internal/host/jail"
	"agentrun.dev/internal/vmm/vmmctl"
	"agentrun.dev/internal/vmm/vmstate"
)

// Process is a running vmm process with its VM.
type Process struct {
	handle Handle
	conn   *vmmctl.Conn
	cell   *jail.Cell
	limits jail.Limits // the limits that it was started with; zero if another process has started it

	ready    chan struct{} // closed when the guest's agent listens
	done     chan struct{} // closed when the process has ended
	exit     vmstate.Exit  // set before done is closed
	lastTail []byte        // the console's tail at the end; set before done is closed

	paused atomic.Bool   // as far as this parent knows
	parked atomic.Bool   // a message on a stream wakes the guest
	kept   atomic.Uint64 // bytes of charged files that were closed here and that the vmm still maps
	lent   atomic.Int64  // disk files that captures have handed out and that are still open

	protocol int                    // the version of vmmctl, known once Made or Attach has returned
	memory   uint64                 // of the guest, in bytes
	patience atomic.Int64           // how long an answer may take; set by Expect
	left     atomic.Bool            // Detach has closed the socket here, and the process goes on
	accused  atomic.Pointer[string] // why the process was killed; nil unless this parent accused it

	mu      sync.Mutex // protects all following fields
	nextID  uint64
	waiting map[uint64]pending // nil once the process has ended
}

// newProcess makes a Process whose messages are not read yet.
func newProcess(h Handle, conn *vmmctl.Conn, cell *jail.Cell, memory uint64) *Process {
	p := &Process{
		handle: h, conn: conn, cell: cell, memory: memory, nextID: 1,
		ready: make(chan struct{}), done: make(chan struct{}), waiting: map[uint64]pending{},
	}
	p.Expect(memory)
	return p
}

// Hold makes a Process of a running vmm process, whoever has started it, and reads
// its messages. memory is the size of its guest's memory.
func Hold(h Handle, conn *vmmctl.Conn, cell *jail.Cell, memory uint64) *Process {
	p := newProcess(h, conn, cell, memory)
	go p.receive()
	return p
}

// finish reaps the process, records how it ended, and wakes all waiters.
func (p *Process) finish(last *vmmctl.Exit) {
	words := p.handle.Wait()
	if why := p.accused.Load(); why != nil {
		p.exit = vmstate.Exit{Reason: vmstate.Killed, Detail: "the vmm process was killed: " + *why + "; " + words.Text}
	} else if last != nil {
		p.exit = vmstate.Exit{Reason: vmstate.Reason(last.Reason), Detail: last.Detail}
		p.lastTail = last.Console
	} else {
		p.exit = vmstate.Exit{Reason: vmstate.Killed, Detail: words.Text}
	}
	if words.OutOfMemory {
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

// Wait blocks until the VM has ended. It returns the reason and the tail of its
// console.
func (p *Process) Wait() (vmstate.Exit, []byte) {
	<-p.done
	return p.exit, p.lastTail
}

// Protocol is the version of vmmctl that the process speaks.
func (p *Process) Protocol() int { return p.protocol }

// Pid is the process id of the vmm.
func (p *Process) Pid() int { return p.handle.PID() }

// Cell is the process's place in the jail.
func (p *Process) Cell() *jail.Cell { return p.cell }

// Limits are the limits that the process was started with; zero if another process
// has started it.
func (p *Process) Limits() jail.Limits { return p.limits }

// Limit changes the limits of the process.
func (p *Process) Limit(limits jail.Limits) error {
	if limits == p.limits {
		return nil
	}
	if err := p.cell.Limit(limits); err != nil {
		return err
	}
	p.limits = limits
	return nil
}

// Paused reports whether the guest is paused, as far as this parent knows.
func (p *Process) Paused() bool { return p.paused.Load() }

// Unpark reports whether the guest is parked. If it is, the caller is about to send
// it a message, which wakes it.
func (p *Process) Unpark() bool {
	parked := p.parked.Swap(false)
	if parked {
		p.paused.Store(false)
	}
	return parked
}

// Charged returns how much of the host's memory the VM occupies, and its limit. The
// usage contains every cost of the VM except cached pages of files. Both are 0 for a
// VM without limits.
func (p *Process) Charged() (usage, limit uint64, err error) { return p.cell.Memory() }

// Kill ends process and VM at once, and waits until both are gone.
func (p *Process) Kill() {
	p.handle.Kill()
	// The wait for the process's last message is bounded, whatever the process has
	// done with its end of the socket.
	defer time.AfterFunc(closingTime, func() {
		p.accuse(errors.New("its control socket stayed open when it had ended"))
		_ = p.conn.Close()
	}).Stop()
	<-p.done
}

// Stopped is ErrEnded if the process has ended.
func (p *Process) Stopped() error {
	select {
	case <-p.done:
		return p.Ended()
	default:
		return nil
	}
}

// Ended is ErrEnded with the way in which the process ended. The process must have
// ended.
func (p *Process) Ended() error { return fmt.Errorf("%w: %v", engine.ErrEnded, p.exit) }

// Detach releases the process and lets it run. A process that has ended is no error.
func (p *Process) Detach() error {
	p.cell.Leave()
	p.left.Store(true)
	if err := p.conn.Close(); !errors.Is(err, os.ErrClosed) {
		return err
	}
	return nil
}
