package microvm

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"strconv"
	"strings"

	"agentrun.dev/internal/jail"
	"agentrun.dev/internal/vmmctl"
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

// ProcessID names a process for as long as the machine is up: numbers are
// used again, a number together with its start time is not.
type ProcessID struct {
	PID   int    `json:"pid"`
	Start uint64 `json:"start"` // clock ticks since the machine's boot
}

// identify names a running process.
func identify(pid int) (ProcessID, error) {
	b, err := os.ReadFile("/proc/" + strconv.Itoa(pid) + "/stat")
	if err != nil {
		return ProcessID{}, fmt.Errorf("identify process %d: %w", pid, err)
	}
	// The name is in parentheses and may hold anything; what follows has no
	// parentheses. The start time is field 22, the 20th after it.
	_, rest, _ := strings.Cut(string(b[bytes.LastIndexByte(b, ')'):]), " ")
	fields := strings.Fields(rest)
	if len(fields) < 20 {
		return ProcessID{}, fmt.Errorf("identify process %d: its stat file is too short", pid)
	}
	start, err := strconv.ParseUint(fields[19], 10, 64)
	if err != nil {
		return ProcessID{}, fmt.Errorf("identify process %d: %w", pid, err)
	}
	return ProcessID{pid, start}, nil
}

// Alive reports whether the process still runs.
func (id ProcessID) Alive() bool {
	a, err := adopt(id)
	if err != nil {
		return false
	}
	defer func() { _ = a.pidfd.Close() }()
	ended := true
	raw, err := a.pidfd.SyscallConn()
	if err == nil {
		err = raw.Control(func(fd uintptr) { ended = pidfdEnded(fd) })
	}
	return err == nil && !ended
}

// Kill ends the process and waits until it is gone.
func (id ProcessID) Kill(ctx context.Context) error {
	a, err := adopt(id)
	if errors.Is(err, unix.ESRCH) {
		return nil
	}
	if err != nil {
		return err
	}
	a.kill()
	gone := make(chan struct{})
	go func() { a.wait(); close(gone) }()
	select {
	case <-gone:
		return nil
	case <-ctx.Done():
		return fmt.Errorf("kill process %d: %w", id.PID, ctx.Err())
	}
}

// StopListening ends a vmm of which only its socket is known. Nobody there is
// fine.
func StopListening(ctx context.Context, socket string) error {
	conn, err := vmmctl.Dial(socket)
	if errors.Is(err, unix.ECONNREFUSED) || errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err != nil {
		return err
	}
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
	id    ProcessID
	pidfd *os.File
	cell  *jail.Cell // nil: somebody else cares for that
}

// adopt gets hold of a process, and fails if it is not the one that was meant.
func adopt(id ProcessID) (*adopted, error) {
	fd, err := unix.PidfdOpen(id.PID, unix.PIDFD_NONBLOCK)
	if err != nil {
		return nil, fmt.Errorf("find process %d: %w", id.PID, err)
	}
	a := &adopted{id: id, pidfd: os.NewFile(uintptr(fd), "pidfd")}
	// Only now, when the number cannot be used again.
	now, err := identify(id.PID)
	if err == nil && now != id {
		err = fmt.Errorf("process %d is another one now: %w", id.PID, unix.ESRCH)
	}
	if err != nil {
		return nil, errors.Join(err, a.pidfd.Close())
	}
	return a, nil
}

func (a *adopted) pid() int { return a.id.PID }

func (a *adopted) kill() {
	raw, err := a.pidfd.SyscallConn()
	if err != nil {
		return // closed: it has ended
	}
	_ = raw.Control(func(fd uintptr) { _ = unix.PidfdSendSignal(int(fd), unix.SIGKILL, nil, 0) })
}

func (a *adopted) wait() lastWords {
	defer func() { _ = a.pidfd.Close() }()
	raw, err := a.pidfd.SyscallConn()
	if err == nil {
		err = raw.Read(pidfdEnded)
	}
	if err != nil {
		return lastWords{text: "vmm process: " + err.Error()}
	}
	const how = "vmm process ended without a word"
	if a.cell != nil {
		return release(a.cell, how)
	}
	return lastWords{text: how}
}

// pidfdEnded reports whether the process of a pidfd has ended.
func pidfdEnded(fd uintptr) bool {
	poll := []unix.PollFd{{Fd: int32(fd), Events: unix.POLLIN}}
	n, err := unix.Poll(poll, 0)
	return n > 0 || err != nil && !errors.Is(err, unix.EINTR)
}

// attach connects to a vmm that listens at a socket.
func attach(j *jail.Jail, socket string, id ProcessID) (*Process, error) {
	h, err := adopt(id)
	if err != nil {
		return nil, err
	}
	if h.cell, err = j.Find(id.PID); err != nil {
		return nil, errors.Join(err, h.pidfd.Close())
	}
	conn, err := vmmctl.Dial(socket)
	if err != nil {
		return nil, errors.Join(err, h.pidfd.Close())
	}
	p := newProcess(h, conn)
	p.cell = h.cell
	go p.receive()
	return p, nil
}
