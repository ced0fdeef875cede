// Command escapee is the program that the tests of package jail start in a jail. It
// looks around, or it locks itself down as a vmm or a netd does and then tries to
// get out. It reads its order from the control socket and answers there.
package main

import (
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"os"
	"runtime"
	"slices"
	"sort"
	"sync"
	"syscall"

	"agentrun.dev/internal/vmm/kvm"
	"agentrun.dev/internal/vmm/lockdown"
	"golang.org/x/sys/unix"
)

// controlFD and lockFD are the descriptors at which package jail leaves the
// control socket and the file whose lock keeps the user id taken.
const (
	controlFD = 3
	lockFD    = 4
)

func main() {
	if err := run(); err != nil {
		fmt.Fprintln(os.Stderr, "escapee:", err)
		os.Exit(1)
	}
}

// order tells the escapee what to do.
type order struct {
	// Do is an attempt, "look", or "hold": wait to be killed.
	Do string
	// Netd makes it lock itself down as a netd does.
	Netd bool
	// Victim is another jailed process.
	Victim int
	// Bytes is how much memory to fill.
	Bytes int
	// Limit is the maximum size of its files; 0 is unlimited.
	Limit uint64
	// Name is an abstract address of the host.
	Name string

	files []int // files that came with the order
}

func run() error {
	o, err := read()
	if err != nil {
		return fmt.Errorf("read an order: %w", err)
	}
	if o.Do == "look" {
		return answer(look(o))
	}
	if o.Netd {
		_, err = lockdown.EnterNetwork()
	} else {
		err = lockdown.Enter(slices.Concat(kvm.Requests(), lockdown.Userfaultfd))
	}
	if err != nil {
		return err
	}
	if o.Limit > 0 {
		if err := lockdown.LimitFileSize(o.Limit); err != nil {
			return err
		}
	}
	for _, all := range []map[string]func(order) any{attempts, networkAttempts} {
		if try, ok := all[o.Do]; ok {
			return answer(fmt.Sprint(try(o)))
		}
	}
	return fmt.Errorf("unknown order %q", o.Do)
}

// read waits for the order, and the files that come with it.
func read() (o order, err error) {
	buf, oob := make([]byte, 4096), make([]byte, 256)
	n, oobn, _, _, err := unix.Recvmsg(controlFD, buf, oob, 0)
	for errors.Is(err, unix.EAGAIN) {
		poll := []unix.PollFd{{Fd: controlFD, Events: unix.POLLIN}}
		if _, err = unix.Poll(poll, -1); err == nil {
			n, oobn, _, _, err = unix.Recvmsg(controlFD, buf, oob, 0)
		}
	}
	if err == nil {
		err = json.Unmarshal(buf[:n], &o)
	}
	if err != nil {
		return o, err
	}
	messages, err := unix.ParseSocketControlMessage(oob[:oobn])
	for i := range messages {
		var fds []int
		if fds, err = unix.ParseUnixRights(&messages[i]); err != nil {
			break
		}
		o.files = append(o.files, fds...)
	}
	return o, err
}

func answer(v any) error {
	b, err := json.Marshal(v)
	if err != nil {
		return err
	}
	_, err = syscall.Write(controlFD, b)
	return err
}

// view is the escapee's view of the system, restricted by the jail but not by
// the filter.
type view struct {
	UID, GID   int
	Groups     []int
	Root       []string
	Interfaces []string
	// Errors holds the error of each attempt that must fail, by the name of the
	// attempt.
	Errors map[string]string
}

func look(o order) view {
	victim := o.Victim
	v := view{UID: os.Getuid(), GID: os.Getgid(), Errors: map[string]string{}}
	v.Groups, _ = os.Getgroups()
	entries, err := os.ReadDir("/")
	if err != nil {
		v.Errors["list the root"] = err.Error()
	}
	for _, e := range entries {
		v.Root = append(v.Root, e.Name())
	}
	sort.Strings(v.Root)
	interfaces, err := net.Interfaces()
	if err != nil {
		v.Errors["list interfaces"] = err.Error()
	}
	for _, i := range interfaces {
		v.Interfaces = append(v.Interfaces, fmt.Sprint(i.Name, " ", i.Flags&net.FlagUp != 0))
	}
	try := func(what string, err error) {
		if err == nil {
			err = errors.New("succeeded")
		}
		v.Errors[what] = err.Error()
	}
	_, err = os.Open("/dev/kvm")
	try("open a device", err)
	_, err = os.Open("/proc/self/status")
	try("open a file of /proc", err)
	try("write to the root", os.WriteFile("/new", nil, 0o600))
	program := "/vmm"
	if os.Args[0] == "netd" {
		program = "/netd"
	}
	try("write to the program", os.WriteFile(program, nil, 0o600))
	try("kill a sibling", syscall.Kill(victim, syscall.SIGKILL))
	try("trace a sibling", syscall.PtraceAttach(victim))
	try("become root", syscall.Setuid(0))
	try("mount", syscall.Mount("none", "/", "tmpfs", 0, ""))
	if len(o.files) > 0 {
		try("send to a socket of the machine", sendTo(o.files[0], o.Name))
	}
	return v
}

// attempts are made behind the filter. The result of an attempt that returns is
// sent as the answer.
var attempts = map[string]func(order) any{
	"open":           raw(unix.SYS_OPEN, path("/vmm"), unix.O_RDONLY),
	"openat":         raw(unix.SYS_OPENAT, at, path("/vmm"), unix.O_RDONLY),
	"openat2":        raw(unix.SYS_OPENAT2, at, path("/vmm")),
	"open by handle": raw(unix.SYS_OPEN_BY_HANDLE_AT, at),
	"stat":           raw(unix.SYS_NEWFSTATAT, at, path("/")),
	"socket":         raw(unix.SYS_SOCKET, unix.AF_INET, unix.SOCK_STREAM),
	"unix socket":    raw(unix.SYS_SOCKET, unix.AF_UNIX, unix.SOCK_STREAM),
	"connect":        raw(unix.SYS_CONNECT, controlFD),
	"bind":           raw(unix.SYS_BIND, controlFD),
	"sendto":         raw(unix.SYS_SENDTO, controlFD),
	"sendmmsg":       raw(unix.SYS_SENDMMSG, controlFD),
	"sendmsg":        raw(unix.SYS_SENDMSG, controlFD),
	"send to a socket of the machine": func(o order) any {
		if err := sendTo(o.files[0], o.Name); err != nil {
			return err
		}
		return "succeeded"
	},
	"setsockopt":        raw(unix.SYS_SETSOCKOPT, controlFD),
	"trace a sibling":   func(o order) any { return call(unix.SYS_PTRACE, unix.PTRACE_ATTACH, uintptr(o.Victim)) },
	"read a sibling":    func(o order) any { return call(unix.SYS_PROCESS_VM_READV, uintptr(o.Victim)) },
	"kill a sibling":    func(o order) any { return call(unix.SYS_KILL, uintptr(o.Victim), uintptr(unix.SIGKILL)) },
	"kill its thread":   func(o order) any { return call(unix.SYS_TGKILL, uintptr(o.Victim), uintptr(o.Victim), 9) },
	"limit a sibling":   func(o order) any { return call(unix.SYS_PRLIMIT64, uintptr(o.Victim)) },
	"fork":              raw(unix.SYS_FORK),
	"vfork":             raw(unix.SYS_VFORK),
	"clone a process":   raw(unix.SYS_CLONE, uintptr(unix.SIGCHLD)),
	"clone a namespace": raw(unix.SYS_CLONE, unix.CLONE_NEWUSER|uintptr(unix.SIGCHLD)),
	"clone3":            raw(unix.SYS_CLONE3),
	"exec":              raw(unix.SYS_EXECVE, path("/vmm")),
	"execveat":          raw(unix.SYS_EXECVEAT, at, path("/vmm")),
	"terminal ioctl":    raw(unix.SYS_IOCTL, 2, unix.TIOCSTI),
	"another KVM ioctl": raw(unix.SYS_IOCTL, 2, 0xae60), // KVM_CREATE_IRQCHIP
	"map code":          raw(unix.SYS_MMAP, 0, 4096, unix.PROT_READ|unix.PROT_EXEC, unix.MAP_PRIVATE|unix.MAP_ANONYMOUS),
	"protect code":      raw(unix.SYS_MPROTECT, 0, 4096, unix.PROT_EXEC),
	"remap":             raw(unix.SYS_MREMAP),
	"map huge pages":    raw(unix.SYS_MMAP, 0, 2<<20, unix.PROT_READ, unix.MAP_PRIVATE|unix.MAP_ANONYMOUS|unix.MAP_HUGETLB),
	"map locked memory": raw(unix.SYS_MMAP, 0, 4096, unix.PROT_READ, unix.MAP_PRIVATE|unix.MAP_ANONYMOUS|unix.MAP_LOCKED),
	"merge memory":      func(order) any { return call(unix.SYS_MADVISE, page(), 4096, unix.MADV_MERGEABLE) },
	"wake another process": func(order) any {
		return call(unix.SYS_FUTEX, page(), 1, 1) // FUTEX_WAKE, not private
	},
	"requeue": func(order) any {
		return call(unix.SYS_FUTEX, page(), 3|128, 1, 1, page()) // FUTEX_REQUEUE
	},
	"inherit priority": func(order) any {
		return call(unix.SYS_FUTEX, page(), 8|128) // FUTEX_TRYLOCK_PI
	},
	"setuid":                  raw(unix.SYS_SETUID),
	"capset":                  raw(unix.SYS_CAPSET),
	"mount":                   raw(unix.SYS_MOUNT),
	"chroot":                  raw(unix.SYS_CHROOT, path("/")),
	"unshare":                 raw(unix.SYS_UNSHARE, unix.CLONE_NEWUSER),
	"setns":                   raw(unix.SYS_SETNS, controlFD),
	"another filter":          raw(unix.SYS_SECCOMP, unix.SECCOMP_SET_MODE_FILTER),
	"prctl":                   raw(unix.SYS_PRCTL, unix.PR_SET_DUMPABLE, 1),
	"lock a file":             raw(unix.SYS_FCNTL, 4, unix.F_OFD_SETLK),
	"unlock its uid":          raw(unix.SYS_FLOCK, 4, unix.LOCK_UN),
	"bpf":                     raw(unix.SYS_BPF),
	"perf":                    raw(unix.SYS_PERF_EVENT_OPEN),
	"io_uring":                raw(unix.SYS_IO_URING_SETUP, 1),
	"keys":                    raw(unix.SYS_KEYCTL),
	"limit a sibling's files": func(o order) any { return call(unix.SYS_PRLIMIT64, uintptr(o.Victim), unix.RLIMIT_FSIZE) },
	"limit its open files":    raw(unix.SYS_PRLIMIT64, 0, unix.RLIMIT_NOFILE),
	// The first file is empty.
	"allocate beyond the size": func(o order) any {
		return call(unix.SYS_FALLOCATE, uintptr(o.files[0]), unix.FALLOC_FL_KEEP_SIZE, 0, uintptr(2*o.Limit))
	},
	"zero beyond the size": func(o order) any {
		return call(unix.SYS_FALLOCATE, uintptr(o.files[0]), unix.FALLOC_FL_ZERO_RANGE|unix.FALLOC_FL_KEEP_SIZE, 0, uintptr(2*o.Limit))
	},
	"x32":          raw(0x4000_0000 | unix.SYS_GETPID),
	"no such call": raw(1 << 20),

	// These attempts end in an error.
	"write a long file": func(o order) any { return call(unix.SYS_PWRITE64, uintptr(o.files[0]), page(), 4096, uintptr(o.Limit)) },
	"fill a long file":  func(o order) any { return fillFile(o.files[0], 2*o.Limit) },
	"allocate a long file": func(o order) any {
		return call(unix.SYS_FALLOCATE, uintptr(o.files[0]), 0, 0, uintptr(2*o.Limit))
	},
	"extend a file": func(o order) any { return call(unix.SYS_FTRUNCATE, uintptr(o.files[0]), uintptr(2*o.Limit)) },
	"raise its own limit": func(o order) any {
		return call(unix.SYS_PRLIMIT64, 0, unix.RLIMIT_FSIZE, limits(2*o.Limit))
	},
	"open many files": func(order) any { return openMany() },

	// These must continue to work.
	"write a file": func(o order) any { return fillFile(o.files[0], o.Limit) },
	"punch a hole": func(o order) any {
		return call(unix.SYS_FALLOCATE, uintptr(o.files[0]), unix.FALLOC_FL_PUNCH_HOLE|unix.FALLOC_FL_KEEP_SIZE, 0, 4096)
	},
	"let go of its user id and hold": func(order) any {
		if err := errors.Join(unix.Close(lockFD), answer("let go")); err != nil {
			return err
		}
		return hold()
	},
	"threads": func(order) any { return threads() },
	"panic":   func(order) any { panic("a word at the end") },
	"hold":    func(order) any { return hold() },
	"fill":    func(o order) any { return fill(o.Bytes) },
	"report and hold": func(order) any {
		if err := answer("locked down"); err != nil {
			return err
		}
		return hold()
	},
}

const at = ^uintptr(99) // AT_FDCWD, -100

// path is the address of a path.
func path(s string) uintptr {
	p, err := syscall.BytePtrFromString(s)
	if err != nil {
		panic(err) // s is a constant without zero bytes
	}
	return pin(p)
}

func raw(number uintptr, args ...uintptr) func(order) any {
	return func(order) any { return call(number, args...) }
}

func call(number uintptr, args ...uintptr) any {
	var a [6]uintptr
	copy(a[:], args)
	r, _, errno := syscall.RawSyscall6(number, a[0], a[1], a[2], a[3], a[4], a[5])
	if errno != 0 {
		return errno
	}
	if (number == unix.SYS_FORK || number == unix.SYS_CLONE) && r == 0 {
		_, _, _ = syscall.RawSyscall(unix.SYS_EXIT_GROUP, 0, 0, 0) // a child that must not exist
	}
	return "succeeded"
}

// sendTo sends a message and a descriptor to an abstract address of the host.
func sendTo(fd int, name string) error {
	return unix.Sendmsg(fd, []byte("from the jail"), unix.UnixRights(controlFD), &unix.SockaddrUnix{Name: name}, 0)
}

// fillFile writes that many bytes, in pieces.
func fillFile(fd int, bytes uint64) any {
	for at := uint64(0); at < bytes; at += 4096 {
		if _, err := unix.Pwrite(fd, make([]byte, 4096), int64(at)); err != nil {
			return err
		}
	}
	return "ok"
}

// manyFiles is far more than a vmm ever opens.
const manyFiles = 4096

// openMany opens files until there are many.
func openMany() any {
	for range manyFiles {
		if _, err := unix.Eventfd(0, unix.EFD_CLOEXEC); err != nil {
			return err
		}
	}
	return "succeeded"
}

// threads makes the runtime start threads behind the filter.
func threads() any {
	const count = 20
	var begun, done sync.WaitGroup
	begun.Add(count)
	release := make(chan struct{})
	for range count {
		done.Go(func() {
			runtime.LockOSThread()
			begun.Done()
			<-release
		})
	}
	begun.Wait()
	runtime.GC()
	close(release)
	done.Wait()
	return "ok"
}

// hold waits until it is killed.
func hold() any {
	for {
		if _, err := unix.Poll(nil, -1); !errors.Is(err, unix.EINTR) {
			return err
		}
	}
}

// fill allocates memory and keeps it.
func fill(bytes int) any {
	m := make([]byte, bytes)
	for i := 0; i < len(m); i += 4096 {
		m[i] = 1
	}
	runtime.KeepAlive(m)
	return "ok"
}
