package microvm

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"

	"agentrun.dev/internal/host/jail"
	"agentrun.dev/internal/host/procid"
	"agentrun.dev/internal/vmm/vmmctl"
	"golang.org/x/sys/unix"
)

// handle is a hold on a vmm process.
type handle interface {
	pid() int
	// kill ends the process; one that has ended already is fine.
	kill()
	// wait returns when the process has ended, with its last words. It is
	// called once, and frees the handle.
	wait() lastWords
}

// lastWords is what is known of a process that has ended.
type lastWords struct {
	text        string
	outOfMemory bool // its cgroup's limit was reached
}

// ownChild is a process that we have started.
type ownChild struct {
	process *jail.Process
	stderr  *os.File // a sealed memfd: what the process said when it crashed
}

func (c *ownChild) pid() int { return c.process.Pid }

func (c *ownChild) kill() { _ = c.process.Kill() }

func (c *ownChild) wait() lastWords {
	state, err := c.process.Wait()
	defer func() { _ = c.stderr.Close() }()
	said := make([]byte, stderrLimit)
	n, _ := c.stderr.ReadAt(said, 0) // nothing said is fine
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

// release frees the cell of a process that has ended, and says what is to be
// known of it before all else.
func release(c *jail.Cell, how string) lastWords {
	var words string
	oomKills, err := c.Release()
	if oomKills > 0 {
		words = fmt.Sprintf("the kernel killed %d in the cgroup, whose limit was reached; ", oomKills)
	}
	if err != nil {
		words += err.Error() + "; "
	}
	return lastWords{words + how, oomKills > 0}
}

// stopListening tells a vmm at a socket to stop, and waits until it has.
func stopListening(ctx context.Context, socket string) error {
	conn, err := vmmctl.Dial(socket)
	if errors.Is(err, unix.ECONNREFUSED) || errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err != nil {
		return err
	}
	ctx, cancel := context.WithTimeout(ctx, answerTime)
	defer cancel()
	stop := context.AfterFunc(ctx, func() { _ = conn.Close() })
	defer stop()
	if err := conn.Send(&vmmctl.Simple{Kind: vmmctl.KindStop, ID: 1}); err != nil {
		return errors.Join(err, conn.Close())
	}
	for {
		_, files, err := conn.Receive()
		for _, f := range files {
			_ = f.Close() // a vmm sends none
		}
		if err != nil {
			return errors.Join(ctx.Err(), conn.Close()) // it has gone
		}
	}
}

// adopted is a process that somebody else has started.
type adopted struct {
	process *procid.Handle
	cell    *jail.Cell
}

func (a *adopted) pid() int { return a.process.PID() }

func (a *adopted) kill() { a.process.Kill() }

func (a *adopted) wait() lastWords {
	defer func() { _ = a.process.Close() }()
	if err := a.process.Wait(); err != nil {
		return lastWords{text: "vmm process: " + err.Error()}
	}
	return release(a.cell, "vmm process ended without a word")
}

// attach connects to a vmm that listens at a socket.
func attach(j *jail.Jail, socket string, id procid.ID) (*Process, error) {
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
	p := newProcess(&adopted{h, cell}, conn)
	p.cell = cell
	go p.receive()
	return p, nil
}
