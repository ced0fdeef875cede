// Package procid identifies processes so that a later process can find them
// again, and keeps references to them.
package procid

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"
)

// ID identifies a process for as long as the host is up. The kernel reuses
// process ids, but not the same id with the same start time.
type ID struct {
	PID   int    `json:"pid"`
	Start uint64 `json:"start"` // clock ticks since the host's boot
}

// Of returns the ID of a running process.
func Of(pid int) (ID, error) {
	fields, err := stat(pid)
	if err != nil {
		return ID{}, fmt.Errorf("identify process %d: %w", pid, err)
	}
	return ID{pid, fields[statStart]}, nil
}

// BootID identifies the host's boot, within which an ID is valid.
func BootID() (string, error) {
	b, err := os.ReadFile("/proc/sys/kernel/random/boot_id")
	if err != nil {
		return "", fmt.Errorf("read this machine's boot id: %w", err)
	}
	return strings.TrimSpace(string(b)), nil
}

// Fields of /proc/PID/stat, as proc(5) numbers them.
const (
	statUser     = 14
	statChildren = 17 // the last of the four times: that of children that were waited for
	statStart    = 22
)

// stat reads the numbers of a process, up to its start time.
func stat(pid int) (fields [statStart + 1]uint64, err error) {
	b, err := os.ReadFile("/proc/" + strconv.Itoa(pid) + "/stat")
	if err != nil {
		return fields, err
	}
	// The name is in parentheses and may contain any bytes. The rest has no
	// parentheses and begins with field 3, which is a letter.
	_, rest, _ := strings.Cut(string(b[bytes.LastIndexByte(b, ')')+1:]), " ")
	words := strings.Fields(rest)
	if len(words) < statStart-2 {
		return fields, errors.New("its stat file is too short")
	}
	for i := statUser; i <= statStart; i++ {
		n, err := strconv.ParseInt(words[i-3], 10, 64)
		if err != nil {
			return fields, err
		}
		fields[i] = uint64(n) // the nice value may be negative
	}
	return fields, nil
}

// tick is the unit of times in /proc: USER_HZ is 100 on all of Linux's ABIs.
const tick = 10 * time.Millisecond

// CPUTime is the processor time that a process has used, including its children
// that have ended and were waited for.
func CPUTime(pid int) (time.Duration, error) {
	fields, err := stat(pid)
	if err != nil {
		return 0, fmt.Errorf("read the processor time of process %d: %w", pid, err)
	}
	var ticks uint64
	for i := statUser; i <= statChildren; i++ {
		ticks += fields[i]
	}
	return time.Duration(ticks) * tick, nil
}

// Alive reports whether the process still runs.
func (id ID) Alive() bool {
	h, err := Adopt(id)
	if err != nil {
		return false
	}
	defer func() { _ = h.Close() }()
	ended := true
	raw, err := h.pidfd.SyscallConn()
	if err == nil {
		err = raw.Control(func(fd uintptr) { ended = hasEnded(fd) })
	}
	return err == nil && !ended
}

// Kill ends the process and waits until it is gone.
func (id ID) Kill(ctx context.Context) error {
	h, err := Adopt(id)
	if errors.Is(err, unix.ESRCH) {
		return nil
	}
	if err != nil {
		return err
	}
	h.Kill()
	gone := make(chan error, 1)
	go func() { gone <- errors.Join(h.Wait(), h.Close()) }()
	select {
	case err := <-gone:
		return err
	case <-ctx.Done():
		return fmt.Errorf("kill process %d: %w", id.PID, ctx.Err())
	}
}

// Handle is a reference to a process that another process has started.
type Handle struct {
	id    ID
	pidfd *os.File
}

// Adopt returns a Handle of a process. The error is unix.ESRCH if the process
// does not exist, or if its number belongs to another process now.
func Adopt(id ID) (*Handle, error) {
	fd, err := unix.PidfdOpen(id.PID, unix.PIDFD_NONBLOCK)
	if err != nil {
		return nil, fmt.Errorf("find process %d: %w", id.PID, err)
	}
	h := &Handle{id: id, pidfd: os.NewFile(uintptr(fd), "pidfd")}
	// Compare only now: while the pidfd is open the kernel cannot reuse the
	// number.
	now, err := Of(id.PID)
	if err == nil && now != id {
		err = fmt.Errorf("process %d is another one now: %w", id.PID, unix.ESRCH)
	}
	if err != nil {
		return nil, errors.Join(err, h.pidfd.Close())
	}
	return h, nil
}

// PID is the number of the process.
func (h *Handle) PID() int { return h.id.PID }

// Kill ends the process. If it has already ended, Kill does nothing.
func (h *Handle) Kill() {
	raw, err := h.pidfd.SyscallConn()
	if err != nil {
		return // the handle is closed: the process has ended
	}
	_ = raw.Control(func(fd uintptr) { _ = unix.PidfdSendSignal(int(fd), unix.SIGKILL, nil, 0) })
}

// Wait waits until the process has ended.
func (h *Handle) Wait() error {
	raw, err := h.pidfd.SyscallConn()
	if err != nil {
		return err
	}
	return raw.Read(hasEnded)
}

// Close closes the handle; the process continues.
func (h *Handle) Close() error { return h.pidfd.Close() }

// hasEnded reports whether the process of a pidfd has ended.
func hasEnded(fd uintptr) bool {
	poll := []unix.PollFd{{Fd: int32(fd), Events: unix.POLLIN}}
	n, err := unix.Poll(poll, 0)
	return n > 0 || err != nil && !errors.Is(err, unix.EINTR)
}
