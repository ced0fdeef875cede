package agent

import (
	"syscall"
	"unsafe"

	"golang.org/x/sys/unix"
)

// reaper waits for SIGCHLD, which the kernel merges: one signal may stand for
// any number of ended children.
func (ps *Processes) reaper() {
	defer close(ps.gone)
	for {
		select {
		case <-ps.chld:
			ps.reapAll()
		case <-ps.close:
			return
		}
	}
}

func (ps *Processes) reapAll() {
	ps.birth.Lock()
	var ended []*Process
	none := false
	if ps.cfg.Orphans {
		ended, none = ps.reapChildren()
	} else {
		ended = ps.reapOwn()
	}
	ps.birth.Unlock()
	for _, p := range ended {
		p.finish()
		ps.remember(p)
	}
	if none {
		ps.mu.Lock()
		for _, c := range ps.childless {
			close(c)
		}
		ps.childless = nil
		ps.mu.Unlock()
	}
}

// reapChildren takes every ended child, including orphans. It first finds an ended
// child and leaves it a zombie (WNOWAIT). Then it takes the status under that exec's
// mutex, so that a pid that was just freed cannot be signalled.
func (ps *Processes) reapChildren() (ended []*Process, none bool) {
	for {
		pid, err := endedChild()
		if err == syscall.ECHILD {
			return ended, true
		}
		if err != nil || pid == 0 {
			return ended, false
		}
		ps.mu.Lock()
		p := ps.byPID[pid]
		delete(ps.byPID, pid)
		ps.mu.Unlock()
		if p == nil {
			_, _ = wait4(pid, nil, nil) // nobody needs the status of an orphan
		} else if p.reap() {
			ended = append(ended, p)
		}
	}
}

// reapOwn takes only the execs started here.
func (ps *Processes) reapOwn() (ended []*Process) {
	for _, p := range ps.running() {
		if p.reap() {
			ps.mu.Lock()
			delete(ps.byPID, p.pid)
			ps.mu.Unlock()
			ended = append(ended, p)
		}
	}
	return ended
}

// remember keeps an ended exec findable and forgets the oldest beyond KeepEnded.
func (ps *Processes) remember(p *Process) {
	ps.mu.Lock()
	defer ps.mu.Unlock()
	if ps.byID[p.id] != p {
		return // Forget was called between its end and now
	}
	ps.ended = append(ps.ended, p.id)
	for len(ps.ended) > max(ps.cfg.KeepEnded, 0) {
		delete(ps.byID, ps.ended[0])
		ps.ended = ps.ended[1:]
	}
}

// awaitChildless returns a channel that closes when this OS process has no child
// left. For PID 1 that is when every other process has ended, since a process that
// loses its parent becomes its child. It needs Config.Orphans.
func (ps *Processes) awaitChildless() <-chan struct{} {
	c := make(chan struct{})
	ps.mu.Lock()
	ps.childless = append(ps.childless, c)
	ps.mu.Unlock()
	// There may be no children already, and then no SIGCHLD comes either.
	select {
	case ps.chld <- syscall.SIGCHLD:
	default:
	}
	return c
}

// childInfo is siginfo_t as waitid(2) fills it, on 64-bit Linux: three ints,
// padding to 8 bytes, then si_pid, si_uid, si_status; 128 bytes in all.
type childInfo struct {
	signo, errno, code, _ int32
	pid                   int32
	uid                   uint32
	status                int32
	_                     [100]byte
}

// endedChild returns the pid of some ended child without reaping it, or 0.
func endedChild() (int, error) {
	var info childInfo
	for {
		// The kernel writes at most sizeof(siginfo_t) = 128 bytes to info.
		_, _, errno := syscall.Syscall6(unix.SYS_WAITID, unix.P_ALL, 0, uintptr(unsafe.Pointer(&info)),
			unix.WEXITED|unix.WNOHANG|unix.WNOWAIT, 0, 0)
		switch errno {
		case 0:
			return int(info.pid), nil
		case syscall.EINTR:
		default:
			return 0, errno
		}
	}
}

func wait4(pid int, ws *syscall.WaitStatus, ru *syscall.Rusage) (int, error) {
	for {
		got, err := syscall.Wait4(pid, ws, syscall.WNOHANG, ru)
		if err != syscall.EINTR {
			return got, err
		}
	}
}
