package agent

import (
	"bytes"
	"os"
	"strconv"
	"strings"
	"syscall"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"
)

// A container is a sandbox whose kernel was not booted by AgentRun's VMM, such as
// gVisor's. Its filesystems are mounted already, it has no devices, and its random
// numbers and wall clock are the host's. The agent learns from its command line that
// it is in a container.

// ChannelFD is the descriptor of the channel to the host in a container.
const ChannelFD = 3

// EnterContainer copies the agent into the sandbox's memory and runs it again with
// args, because a process that maps a file of the host could not be saved. It returns
// only if that failed.
func EnterContainer(args ...string) error {
	const what = "enter the container"
	self, err := open(unix.AT_FDCWD, "/proc/self/exe", unix.O_RDONLY, 0)
	if err != nil {
		return failed(what, "/proc/self/exe", err)
	}
	fd, err := unix.MemfdCreate("guest-agent", unix.MFD_CLOEXEC)
	if err != nil {
		return failed(what, "memfd", err)
	}
	buf := make([]byte, 256<<10)
	for {
		n, err := unix.Read(self, buf)
		if err == nil && n > 0 {
			_, err = unix.Write(fd, buf[:n])
		}
		if err != nil {
			return failed(what, "copy", err)
		}
		if n == 0 {
			break
		}
	}
	argv := make([]*byte, 0, len(args)+2)
	for _, a := range append([]string{"init"}, args...) {
		p, err := syscall.BytePtrFromString(a)
		if err != nil {
			return failed(what, a, err)
		}
		argv = append(argv, p)
	}
	argv = append(argv, nil)
	env := []*byte{nil}
	empty := []byte{0}
	// The kernel reads the strings and the lists, all of which live on.
	_, _, errno := syscall.Syscall6(unix.SYS_EXECVEAT, uintptr(fd), uintptr(unsafe.Pointer(&empty[0])),
		uintptr(unsafe.Pointer(&argv[0])), uintptr(unsafe.Pointer(&env[0])), unix.AT_EMPTY_PATH, 0)
	return failed(what, "execveat", errno)
}

// ParseContainer reads the rest of the agent's command line in a container.
func ParseContainer(args []string) (dns []string, err error) {
	for _, a := range args {
		value, ok := strings.CutPrefix(a, "--dns=")
		ip, valid := parseServer(value)
		if !ok || !valid || len(dns) == maxDNS {
			return nil, fail(ErrInvalid, "parse", a, "want --dns=ADDRESS, three times at most")
		}
		dns = append(dns, ip)
	}
	return dns, nil
}

// BootContainer configures a container: limits, names, the generation, and DNS
// servers. The network is configured already.
func BootContainer(dns []string, log func(string)) error {
	unix.Umask(0o022)
	// A program that was executed by its descriptor has a number as its name.
	name := []byte("init\x00")
	if err := unix.Prctl(unix.PR_SET_NAME, uintptr(unsafe.Pointer(&name[0])), 0, 0, 0); err != nil {
		log(failed("name", "init", err).Error())
	}
	var uts unix.Utsname
	if err := unix.Uname(&uts); err != nil {
		return failed("read", "host name", err)
	}
	if !canWrite("/tmp") {
		if err := tmpMount.mount(true); err != nil {
			log(err.Error())
		}
	}
	if len(dns) > 0 {
		if err := writeResolvConf("/etc", dns); err != nil {
			return err
		}
	}
	return configure(&BootConfig{Hostname: unix.ByteSliceToString(uts.Nodename[:])}, log)
}

// ContainerChannel is the channel to the host. Programs that the agent starts
// do not inherit it.
func ContainerChannel() (*Conn, error) {
	unix.CloseOnExec(ChannelFD)
	return NewConn(ChannelFD)
}

// ShutdownContainer ends the container, and returns only if it could not. Every
// process gets SIGTERM and, after grace, SIGKILL. No filesystem has to be unmounted,
// because all of them are in memory.
func ShutdownContainer(ps *Processes, grace time.Duration) error {
	if os.Getpid() != 1 {
		return fail(ErrPermission, "shut down", "", "only PID 1 can")
	}
	ps.refuse()
	endAll(ps, max(grace, 0))
	os.Exit(0)
	return nil
}

// NewContainerRenewer returns a Renewer for a container.
func NewContainerRenewer() *Renewer {
	r := NewRenewer()
	r.hosts = true
	return r
}

// checkGenerator makes sure that the kernel's generator works. The generator is the
// host's, which is never copied. So it needs no entropy from the request, and forks
// draw different numbers (the suite of all engines compares them).
func checkGenerator([]byte) error {
	var drawn [64]byte
	if n, err := unix.Getrandom(drawn[:], 0); err != nil || n != len(drawn) {
		return failed("draw", "random numbers", err)
	}
	if bytes.Equal(drawn[:32], drawn[32:]) {
		return fail(ErrIO, "draw", "random numbers", "the kernel gave the same ones twice")
	}
	return nil
}

// clockTolerance is how far the wall clock may be from the host's when the
// request arrives: it may have been under way for a while.
const clockTolerance = 2 * time.Minute

// checkClock makes sure that the wall clock is the host's.
func checkClock(want time.Time) (time.Duration, error) {
	var now unix.Timespec
	if err := unix.ClockGettime(unix.CLOCK_REALTIME, &now); err != nil {
		return 0, failed("read", "wall clock", err)
	}
	off := time.Duration(now.Nano() - want.UnixNano())
	if off < -clockTolerance || off > clockTolerance {
		return 0, fail(ErrIO, "check", "wall clock", "it is "+strconv.Itoa(int(off/time.Second))+" s off the host's, and cannot be set here")
	}
	return 0, nil
}
