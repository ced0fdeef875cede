package process

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"

	"agentrun.dev/internal/engine/trust"
	"agentrun.dev/internal/host/jail"
	"agentrun.dev/internal/host/procid"
	"agentrun.dev/internal/vmm/vmmctl"
)

// Handle controls a vmm process.
type Handle interface {
	PID() int
	// Kill ends the process. A process that has ended already is no error.
	Kill()
	// Wait blocks until the process has ended, and returns its last words. It is
	// called once, and frees the handle.
	Wait() LastWords
}

// LastWords is everything known about the end of a process.
type LastWords struct {
	Text        string
	OutOfMemory bool // its cgroup's limit was reached
}

// ownChild is a process that this process has started.
type ownChild struct {
	process *jail.Process
	stderr  *os.File // a sealed memfd with the output of a crash
}

func (c *ownChild) PID() int { return c.process.Pid }

func (c *ownChild) Kill() { _ = c.process.Kill() }

func (c *ownChild) Wait() LastWords {
	state, err := c.process.Wait()
	defer func() { _ = c.stderr.Close() }()
	said := make([]byte, stderrLimit)
	n, _ := c.stderr.ReadAt(said, 0) // no output is fine
	said = bytes.TrimSpace(bytes.TrimRight(said[:n], "\x00"))
	how := "vmm process exited without a word"
	switch {
	case err != nil:
		how = "vmm process: " + err.Error()
	case !state.Success():
		how = "vmm process: " + state.String()
	}
	if len(said) > 0 {
		how += ": " + string(said)
	}
	return release(c.process.Cell, how)
}

// release frees the cell of a process that has ended. It puts the kernel's reasons
// for the end before how.
func release(c *jail.Cell, how string) LastWords {
	var words string
	oomKills, err := c.Release()
	if oomKills > 0 {
		words = fmt.Sprintf("the kernel killed %d in the cgroup, whose limit was reached; ", oomKills)
	}
	if err != nil {
		words += err.Error() + "; "
	}
	return LastWords{words + how, oomKills > 0}
}

// StopListening tells a vmm that listens at a socket to stop, and waits until it has
// stopped.
func StopListening(ctx context.Context, socket string) error {
	conn, err := vmmctl.Dial(socket)
	if trust.Nobody(err) {
		return nil
	}
	if err != nil {
		return err
	}
	return trust.Stop[vmmctl.Message](ctx, conn, &vmmctl.Simple{Kind: vmmctl.KindStop, ID: 1})
}

// adopted is a process that another process has started.
type adopted struct {
	process *procid.Handle
	cell    *jail.Cell
}

// NewAdopted makes the handle of a process that another process has started.
func NewAdopted(h *procid.Handle, cell *jail.Cell) Handle { return &adopted{h, cell} }

func (a *adopted) PID() int { return a.process.PID() }

func (a *adopted) Kill() { a.process.Kill() }

func (a *adopted) Wait() LastWords {
	defer func() { _ = a.process.Close() }()
	if err := a.process.Wait(); err != nil {
		return LastWords{Text: "vmm process: " + err.Error()}
	}
	return release(a.cell, "vmm process ended without a word")
}

// Attach connects to a vmm that listens at a socket. memory is the size of its
// guest's memory, and protocol is the version of vmmctl that it speaks.
func Attach(j *jail.Jail, socket string, id procid.ID, memory uint64, protocol int) (*Process, error) {
	h, err := procid.Adopt(id)
	if err != nil {
		return nil, err
	}
	cell, err := j.Find(id.PID)
	if err != nil {
		return nil, errors.Join(err, h.Close())
	}
	conn, err := vmmctl.Dial(socket)
	if err != nil {
		return nil, errors.Join(err, h.Close())
	}
	p := Hold(NewAdopted(h, cell), conn, cell, memory)
	p.protocol = protocol
	p.paused.Store(true) // it may be paused
	return p, nil
}
