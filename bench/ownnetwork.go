package bench

import (
	"context"
	"fmt"
	"io"
	"os"
	"os/exec"
	"runtime"
	"syscall"

	"github.com/vishvananda/netlink"
)

// serverAddress is the address of the benchmark's server. It is reserved for
// documentation. Sandboxes can reach it only if a rule by address allows it. It
// exists only on the loopback of the network that InOwnNetwork makes.
const serverAddress = "198.51.100.7"

// InOwnNetwork runs this program with other arguments in an empty network namespace.
// There Network can be called, without meeting or changing the machine's own network.
// Processes that it starts are in that namespace as well.
func InOwnNetwork(ctx context.Context, args []string, stdout, stderr io.Writer) error {
	runtime.LockOSThread() // the child is killed when this thread ends
	defer runtime.UnlockOSThread()
	cmd := exec.CommandContext(ctx, "/proc/self/exe", args...)
	cmd.Stdout, cmd.Stderr = stdout, stderr
	cmd.Cancel = func() error { return cmd.Process.Signal(os.Interrupt) } // it has to clean up
	cmd.SysProcAttr = &syscall.SysProcAttr{Cloneflags: syscall.CLONE_NEWNET, Pdeathsig: syscall.SIGTERM}
	if err := cmd.Run(); err != nil {
		return fmt.Errorf("measure in a network of its own (as root): %w", err)
	}
	return nil
}

// bringUp starts the loopback of a new network namespace, and gives it the server's
// address.
func bringUp() error {
	lo, err := netlink.LinkByName("lo")
	if err == nil {
		err = netlink.LinkSetUp(lo)
	}
	if err != nil {
		return fmt.Errorf("start the loopback: %w", err)
	}
	address, err := netlink.ParseAddr(serverAddress + "/32")
	if err == nil {
		err = netlink.AddrAdd(lo, address)
	}
	if err != nil {
		return fmt.Errorf("give the loopback the address %s: %w", serverAddress, err)
	}
	return nil
}
