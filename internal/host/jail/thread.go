package jail

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"runtime"
	"syscall"

	"agentrun.dev/internal/host/goruntime"
	"golang.org/x/sys/unix"
)

// thread is a thread of this process that lives in the jail's namespaces, starts
// processes there and makes their wires.
type thread struct {
	kind     Kind
	walls    bool // whether it is in namespaces
	requests chan *request
	source   string   // the program, as the host sees it
	program  string   // the same program, as the thread sees it
	null     *os.File // the processes' standard input and output
	ended    chan struct{}
}

// request is a function to run on the thread.
type request struct {
	do   func()
	done chan<- struct{}
}

// startThread makes the thread, in namespaces if walls are wanted.
func startThread(program string, kind Kind, walls bool) (*thread, error) {
	null, err := os.OpenFile(os.DevNull, os.O_RDWR, 0)
	if err != nil {
		return nil, err
	}
	t := &thread{
		kind: kind, walls: walls, source: program, program: program, null: null,
		requests: make(chan *request), ended: make(chan struct{}),
	}
	ready := make(chan error)
	onOwnThread(func() { t.run(ready) })
	if err := <-ready; err != nil {
		return nil, errors.Join(err, t.close())
	}
	return t, nil
}

// close ends the thread.
func (t *thread) close() error {
	close(t.requests)
	<-t.ended
	return t.null.Close()
}

// do runs a function on the thread and waits for it.
func (t *thread) do(what func()) {
	done := make(chan struct{})
	t.requests <- &request{what, done}
	<-done
}

// start has the thread start a process.
func (t *thread) start(attr *os.ProcAttr) (p *os.Process, err error) {
	t.do(func() { p, err = os.StartProcess(t.program, []string{t.kind.String()}, attr) })
	if errors.Is(err, fs.ErrPermission) {
		err = fmt.Errorf("%w (everybody must be allowed to read and execute %s)", err, t.source)
	}
	if err != nil {
		return nil, fmt.Errorf("start %s process: %w", t.kind, err)
	}
	return p, nil
}

// onOwnThread starts a goroutine on a thread that it never unlocks. So the
// runtime ends the thread with the goroutine and runs no other goroutine on it.
func onOwnThread(do func()) {
	go func() {
		runtime.LockOSThread()
		if unix.Gettid() != unix.Getpid() {
			do()
			return
		}
		// The runtime cannot end the first thread, and /proc/self shows it.
		// While this goroutine holds the first thread, another goroutine gets a
		// different one.
		moved := make(chan struct{})
		go func() {
			runtime.LockOSThread()
			close(moved)
			do()
		}()
		<-moved
		runtime.UnlockOSThread()
	}()
}

// run is the main function of the thread.
func (t *thread) run(ready chan<- error) {
	defer close(t.ended)
	var err error
	if t.walls {
		err = t.enter()
	}
	if err == nil {
		// The slack also applies to this thread itself, which only starts
		// processes.
		err = goruntime.SlowMonitorOfChildren(t.kind.monitorSlack())
	}
	ready <- err
	if err != nil {
		return
	}
	for r := range t.requests {
		r.do()
		close(r.done)
	}
}

// enter moves the thread from the host's namespaces into empty ones.
func (t *thread) enter() error {
	spaces := unix.CLONE_FS | unix.CLONE_NEWNS | unix.CLONE_NEWIPC | unix.CLONE_NEWUTS
	if t.kind == VMM {
		spaces |= unix.CLONE_NEWNET
	}
	if err := unix.Unshare(spaces); err != nil {
		return fmt.Errorf("make namespaces: %w", err)
	}
	inner := "/" + t.kind.String()
	if err := pivot(t.program, inner); err != nil {
		return fmt.Errorf("make an empty root: %w", err)
	}
	t.program = inner
	if err := reduceCapabilities(); err != nil {
		return fmt.Errorf("reduce capabilities: %w", err)
	}
	return nil
}

// pivot makes a root in memory that holds only the program, and takes all other
// files away. The program is bound as inner, not copied: all processes of all jails
// share its pages.
func pivot(program, inner string) error {
	const harmless = unix.MS_NOSUID | unix.MS_NODEV | unix.MS_RDONLY
	const here = "/proc" // a folder that every host has; the mount on it is visible only here
	for _, step := range []struct {
		what string
		do   func() error
	}{
		{"detach mounts from the machine's", func() error { return unix.Mount("", "/", "", unix.MS_REC|unix.MS_PRIVATE, "") }},
		{"mount tmpfs", func() error {
			return unix.Mount("agentrun", here, "tmpfs", unix.MS_NOSUID|unix.MS_NODEV|unix.MS_NOEXEC, "size=64k,nr_inodes=16,mode=755")
		}},
		{"make a file", func() error { return os.WriteFile(here+inner, nil, 0o600) }},
		{"bind " + program, func() error { return unix.Mount(program, here+inner, "", unix.MS_BIND, "") }},
		{"protect it", func() error {
			return unix.Mount("", here+inner, "", unix.MS_REMOUNT|unix.MS_BIND|harmless, "")
		}},
		{"go there", func() error { return unix.Chdir(here) }},
		// pivot_root(2): the old root ends up on top of the new one.
		{"pivot", func() error { return unix.PivotRoot(".", ".") }},
		{"unmount the machine's root", func() error { return unix.Unmount(".", unix.MNT_DETACH) }},
		{"go to the new root", func() error { return unix.Chdir("/") }},
		{"protect it", func() error {
			return unix.Mount("", "/", "", unix.MS_REMOUNT|unix.MS_BIND|harmless|unix.MS_NOEXEC, "")
		}},
	} {
		if err := step.do(); err != nil {
			return fmt.Errorf("%s: %w", step.what, err)
		}
	}
	return nil
}

// reduceCapabilities leaves the thread only the capabilities that starting a
// process needs. Its processes can never gain any.
func reduceCapabilities() error {
	for c := uintptr(0); ; c++ {
		err := unix.Prctl(unix.PR_CAPBSET_DROP, c, 0, 0, 0)
		if errors.Is(err, unix.EINVAL) {
			break // the kernel has no more capabilities
		}
		if err != nil {
			return fmt.Errorf("drop capability %d for good: %w", c, err)
		}
	}
	header := unix.CapUserHeader{Version: unix.LINUX_CAPABILITY_VERSION_3}
	const keep = 1<<unix.CAP_SETUID | 1<<unix.CAP_SETGID
	data := [2]unix.CapUserData{{Effective: keep, Permitted: keep}}
	return unix.Capset(&header, &data[0])
}

// attributes describes a process with these files. It leads a session of its
// own, so signals from a terminal do not reach it.
func attributes(files []*os.File, uid int) *os.ProcAttr {
	sys := &syscall.SysProcAttr{Setsid: true}
	if uid != 0 {
		sys.Credential = &syscall.Credential{Uid: uint32(uid), Gid: uint32(uid)}
	}
	return &os.ProcAttr{Files: files, Sys: sys}
}
