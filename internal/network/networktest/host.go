package networktest

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"os/exec"
	"runtime"
	"syscall"
	"testing"
	"unsafe"

	"golang.org/x/sys/unix"
)

// inside is an environment variable that is set in a test that runs in a network of
// its own.
const inside = "AGENTRUN_TEST_NETWORK"

// Main is for TestMain. It runs the tests in a network namespace that has only a
// loopback, with these addresses besides its own. The tests treat that namespace as
// the host's network, and all processes that they start are in it.
func Main(m *testing.M, addresses ...netip.Addr) {
	if os.Getenv(inside) == "" {
		os.Exit(again())
	}
	if err := bringUp(addresses); err != nil {
		fmt.Fprintln(os.Stderr, "make a network for tests:", err)
		os.Exit(1)
	}
	os.Exit(m.Run())
}

// again runs this program in a new network namespace.
func again() int {
	runtime.LockOSThread()                                             // the tests would end with this thread
	cmd := exec.CommandContext(context.Background(), "/proc/self/exe") // with the same arguments
	cmd.Args = os.Args
	cmd.Stdin, cmd.Stdout, cmd.Stderr = os.Stdin, os.Stdout, os.Stderr
	cmd.Env = append(os.Environ(), inside+"=1")
	cmd.SysProcAttr = &syscall.SysProcAttr{Cloneflags: syscall.CLONE_NEWNET, Pdeathsig: syscall.SIGKILL}
	err := cmd.Run()
	var exit *exec.ExitError
	if errors.As(err, &exit) {
		return exit.ExitCode()
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, "run the tests in a network of their own (as root):", err)
		return 1
	}
	return 0
}

// bringUp starts the loopback, and gives it IPv4 addresses.
func bringUp(addresses []netip.Addr) error {
	s, err := unix.Socket(unix.AF_INET, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return err
	}
	defer func() { _ = unix.Close(s) }() // only for ioctls
	up, err := unix.NewIfreq("lo")
	if err != nil {
		return err
	}
	up.SetUint16(unix.IFF_UP | unix.IFF_RUNNING)
	if err := unix.IoctlIfreq(s, unix.SIOCSIFFLAGS, up); err != nil {
		return fmt.Errorf("start the loopback: %w", err)
	}
	for i, a := range addresses {
		// An alias of the interface has its own address (netdevice(7)).
		r := [40]byte{}
		copy(r[:], fmt.Sprintf("lo:%d", i+1))
		r[16] = unix.AF_INET
		copy(r[20:], a.AsSlice())
		if err := ioctl(s, unix.SIOCSIFADDR, unsafe.Pointer(&r)); err != nil {
			return fmt.Errorf("give the loopback %v: %w", a, err)
		}
	}
	return nil
}
