package jail

import (
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"

	"golang.org/x/sys/unix"
)

// fileLimit is the maximum size of the escapee's files.
const fileLimit = 1 << 20

// service is a program of the host that listens at an abstract address.
type service struct {
	fd   int
	name string
}

// wireAndService makes the wire of a jailed process and a service that the
// process must not reach.
func wireAndService(t *testing.T, j *Jail) (*os.File, service) {
	t.Helper()
	host, guest, err := j.Wire()
	if err != nil {
		t.Fatal(err)
	}
	s := service{name: "@agentrun-test-" + strconv.Itoa(os.Getpid()) + "-" + t.Name()}
	if s.fd, err = unix.Socket(unix.AF_UNIX, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _, _, _ = host.Close(), guest.Close(), unix.Close(s.fd) })
	if err := unix.Bind(s.fd, &unix.SockaddrUnix{Name: s.name}); err != nil {
		t.Fatal(err)
	}
	return guest, s
}

// gotNothing checks that the service has received no message.
func (s service) gotNothing(t *testing.T) {
	t.Helper()
	b, oob := make([]byte, 100), make([]byte, 100)
	n, oobn, _, _, err := unix.Recvmsg(s.fd, b, oob, unix.MSG_DONTWAIT)
	if !errors.Is(err, unix.EAGAIN) {
		t.Errorf("a service of the machine got %q and %d bytes of descriptors from the jail, %v", b[:n], oobn, err)
	}
}

// emptyFile makes an empty file on the disk.
func emptyFile(t *testing.T) *os.File {
	t.Helper()
	f, err := os.Create(filepath.Join(t.TempDir(), "file"))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = f.Close() })
	return f
}

// allocated returns how many bytes a file takes on the disk.
func allocated(t *testing.T, f *os.File) int64 {
	t.Helper()
	var st unix.Stat_t
	if err := unix.Fstat(int(f.Fd()), &st); err != nil {
		t.Fatal(err)
	}
	return st.Blocks * 512
}

// fatal lists attempts that end any locked down process.
var fatal = []string{
	"open", "openat2", "open by handle", "socket", "unix socket",
	"trace a sibling", "read a sibling", "kill a sibling", "kill its thread", "limit a sibling",
	"fork", "vfork", "clone a process", "clone a namespace", "exec", "execveat",
	"terminal ioctl", "another KVM ioctl", "map code", "protect code", "remap",
	"map huge pages", "map locked memory", "merge memory", "wake another process", "requeue", "inherit priority",
	"setuid", "capset", "mount", "chroot", "unshare", "setns", "another filter", "prctl",
	"lock a file", "unlock its uid", "bpf", "perf", "io_uring", "keys", "x32", "no such call",
	"limit its open files",
}

// wasKilled checks that a process, whose answer is said, was killed for its
// attempt.
func (i *inmate) wasKilled(t *testing.T, said string) {
	t.Helper()
	status, _ := i.end(t, false)
	if said != "" || !status.Signaled() || status.Signal() != unix.SIGSYS {
		t.Errorf("it was not killed for it: answer %q, status %#x, stderr %q", said, status, i.said(t))
	}
	if status.CoreDump() {
		t.Error("it left a core")
	}
}

// wasRefused checks that a process, whose answer is said, got an error for its
// attempt and survived it.
func (i *inmate) wasRefused(t *testing.T, said string, want error) {
	t.Helper()
	if said != strconv.Quote(want.Error()) {
		t.Errorf("it got %s, not %q, stderr %q", said, want, i.said(t))
	}
	if status, _ := i.end(t, false); !status.Exited() || status.ExitStatus() != 0 {
		t.Errorf("it ended with %#x: %s", status, i.said(t))
	}
}

// wasUnharmed checks that a process survived the attacks of others, and ends it.
func (i *inmate) wasUnharmed(t *testing.T) {
	t.Helper()
	if status, _ := i.end(t, true); !status.Signaled() || status.Signal() != unix.SIGKILL {
		t.Errorf("the victim ended with %#x", status)
	}
}

// TestEscapes: each attempt of a locked down process ends it or is refused.
func TestEscapes(t *testing.T) {
	j := open(t, config(t))
	victim := start(t, j, roomy)
	victim.order(t, "hold", 0, 0)
	wire, service := wireAndService(t, j)
	try := func(t *testing.T, attempt string, file *os.File) (*inmate, string) {
		t.Helper()
		p := start(t, j, roomy)
		p.orderWith(t, map[string]any{"Do": attempt, "Victim": victim.Pid, "Limit": fileLimit, "Name": service.name}, file)
		return p, p.answer(t)
	}
	for _, attempt := range append([]string{
		"openat", "stat", "connect", "bind", "sendto", "sendmsg", "sendmmsg", "setsockopt",
		"limit a sibling's files", "allocate beyond the size", "zero beyond the size",
		"send to a socket of the machine",
	}, fatal...) {
		t.Run(attempt, func(t *testing.T) {
			file := emptyFile(t)
			if attempt == "send to a socket of the machine" {
				file = wire
			}
			p, said := try(t, attempt, file)
			p.wasKilled(t, said)
			service.gotNothing(t)
			if file != wire && allocated(t, file) > fileLimit {
				t.Errorf("%d bytes of the disk are taken by a file with a limit of %d", allocated(t, file), fileLimit)
			}
		})
	}
	for attempt, want := range map[string]error{
		"clone3":               unix.ENOSYS,
		"write a long file":    unix.EFBIG,
		"fill a long file":     unix.EFBIG,
		"allocate a long file": unix.EFBIG,
		"extend a file":        unix.EFBIG,
		"raise its own limit":  unix.EPERM,
		"open many files":      unix.EMFILE,
	} {
		t.Run(attempt, func(t *testing.T) {
			file := emptyFile(t)
			p, said := try(t, attempt, file)
			p.wasRefused(t, said, want)
			if info, err := file.Stat(); err != nil || info.Size() > fileLimit || allocated(t, file) > fileLimit {
				t.Errorf("the file has %d bytes and takes %d of the disk, %v", info.Size(), allocated(t, file), err)
			}
		})
	}
	victim.wasUnharmed(t)
}

// TestWithinLimits: actions within the limits continue to work.
func TestWithinLimits(t *testing.T) {
	j := open(t, config(t))
	for attempt, want := range map[string]string{"write a file": "ok", "punch a hole": "succeeded"} {
		p := start(t, j, roomy)
		p.orderWith(t, map[string]any{"Do": attempt, "Limit": fileLimit}, emptyFile(t))
		if said := p.answer(t); said != strconv.Quote(want) {
			t.Errorf("%s: %s, stderr %q", attempt, said, p.said(t))
		}
		p.end(t, false)
	}
}

// view is a process's view of the system without the filter, and the results of
// its attempts.
type view struct {
	UID, GID         int
	Groups           []int
	Root, Interfaces []string
	Errors           map[string]string
}

// look has the process look around.
func (i *inmate) look(t *testing.T, order map[string]any, files ...*os.File) (v view) {
	t.Helper()
	order["Do"] = "look"
	i.orderWith(t, order, files...)
	said := i.answer(t)
	if err := json.Unmarshal([]byte(said), &v); err != nil {
		t.Fatalf("%q: %v, stderr %q", said, err, i.said(t))
	}
	return v
}

// wasRefused checks that the process got exactly these errors and those that any
// process gets.
func (v view) wasRefused(t *testing.T, more map[string]error) {
	t.Helper()
	all := map[string]error{
		"open a device":        unix.ENOENT,
		"open a file of /proc": unix.ENOENT,
		"write to the root":    unix.EROFS,
		"write to the program": unix.EROFS,
		"kill a sibling":       unix.EPERM,
		"trace a sibling":      unix.EPERM,
		"become root":          unix.EPERM,
		"mount":                unix.EPERM,
	}
	maps.Copy(all, more)
	for what, want := range all {
		if got := v.Errors[what]; !strings.Contains(got, want.Error()) {
			t.Errorf("%s: %q, not %q", what, got, want)
		}
		delete(v.Errors, what)
	}
	for what, err := range v.Errors {
		t.Errorf("%s: %s", what, err)
	}
}

// TestWalls: the view of a process that runs without the filter.
func TestWalls(t *testing.T) {
	j := open(t, config(t))
	victim, p := start(t, j, roomy), start(t, j, roomy)
	wire, service := wireAndService(t, j)
	v := p.look(t, map[string]any{"Victim": victim.Pid, "Name": service.name}, wire)
	if v.UID != p.Cell.UID() || v.GID != v.UID || v.UID < defaultFirstUID || len(v.Groups) != 0 {
		t.Errorf("it is user %d, group %d, %v; its cell is %d", v.UID, v.GID, v.Groups, p.Cell.UID())
	}
	if victim.Cell.UID() == v.UID {
		t.Error("two processes have the same user id")
	}
	if !slices.Equal(v.Root, []string{"vmm"}) {
		t.Errorf("its root has %q", v.Root)
	}
	if !slices.Equal(v.Interfaces, []string{"lo false"}) {
		t.Errorf("its network has %q", v.Interfaces)
	}
	v.wasRefused(t, map[string]error{"send to a socket of the machine": unix.ECONNREFUSED})
	service.gotNothing(t)
	status, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", victim.Pid))
	if err != nil {
		t.Fatal(err)
	}
	for _, set := range []string{"CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb"} {
		if !strings.Contains(string(status), set+":\t0000000000000000\n") {
			t.Errorf("%s is not empty:\n%s", set, status)
		}
	}
	p.end(t, true)
	victim.end(t, true)
}

// networkOf identifies the namespace in which a socket was made.
func networkOf(t *testing.T, f *os.File) os.FileInfo {
	t.Helper()
	const siocgskns = 0x894c // SIOCGSKNS of linux/sockios.h
	fd, _, errno := unix.Syscall(unix.SYS_IOCTL, f.Fd(), siocgskns, 0)
	if errno != 0 {
		t.Fatal(errno)
	}
	ns := os.NewFile(fd, "network namespace")
	defer func() { _ = ns.Close() }()
	info, err := ns.Stat()
	if err != nil {
		t.Fatal(err)
	}
	return info
}

// notWires makes descriptors that an attacker in control of a helper could
// send.
func notWires(t *testing.T) map[string]*os.File {
	t.Helper()
	out := map[string]*os.File{"standard input": os.Stdin}
	for name, kind := range map[string]int{"a pair of the machine's network": unix.SOCK_DGRAM, "a stream": unix.SOCK_STREAM} {
		fds, err := unix.Socketpair(unix.AF_UNIX, kind|unix.SOCK_CLOEXEC, 0)
		if err != nil {
			t.Fatal(err)
		}
		a, b := os.NewFile(uintptr(fds[0]), "a"), os.NewFile(uintptr(fds[1]), "b")
		t.Cleanup(func() { _, _ = a.Close(), b.Close() })
		out[name] = a
	}
	return out
}

// TestWire: both ends of a wire are in the jail's network namespace, and the wire
// carries many frames.
func TestWire(t *testing.T) {
	j := open(t, config(t))
	p := start(t, j, roomy)
	defer p.end(t, true)
	its, err := os.Stat(fmt.Sprintf("/proc/%d/ns/net", p.Pid))
	if err != nil {
		t.Fatal(err)
	}
	for name, pair := range map[string]func() (host, guest *os.File, err error){
		"of a jail": j.Wire, "of a process": func() (host, guest *os.File, err error) { return WireOf(p.Pid) },
	} {
		host, guest, err := pair()
		if err != nil {
			t.Fatal(name, err)
		}
		defer func() { _, _ = host.Close(), guest.Close() }()
		for _, end := range []*os.File{host, guest} {
			if !os.SameFile(networkOf(t, end), its) {
				t.Errorf("%s: an end is in another network namespace", name)
			}
		}
		for size, frames := range map[int]int{5: 500, 1524: 500, 65559: 16} {
			for _, ends := range [][2]*os.File{{guest, host}, {host, guest}} {
				b := make([]byte, size)
				for range frames {
					if _, err := unix.Write(int(ends[0].Fd()), b); err != nil {
						t.Fatalf("%s: %v", name, err)
					}
				}
				for range frames {
					if n, err := unix.Read(int(ends[1].Fd()), b); err != nil || n != size {
						t.Fatalf("%s: %d bytes, %v", name, n, err)
					}
				}
			}
		}
		for _, end := range []*os.File{host, guest} {
			if err := CheckWire(end); err != nil {
				t.Errorf("%s: %v", name, err)
			}
		}
	}
	for name, f := range notWires(t) {
		if err := CheckWire(f); err == nil {
			t.Errorf("%s is a wire", name)
		}
	}
	if _, _, err := WireOf(os.Getpid()); err == nil || !strings.Contains(err.Error(), "no network namespace of its own") {
		t.Errorf("a wire in the machine's network: %v", err)
	}
	if _, _, err := WireOf(1 << 30); err == nil {
		t.Error("a wire in the network of nobody")
	}
}
