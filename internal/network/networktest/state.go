package networktest

import (
	"errors"
	"fmt"
	"os"
	"strings"

	"golang.org/x/sys/unix"
)

// State says where the guest's frames are, for the message of a test in which some
// did not arrive. It shows how much of either end's socket buffer is taken by unread
// frames; the guest's TCP sockets, with their queues and timers (Linux,
// proc_net_tcp.rst); its IPv4 neighbours; and the packet counters of its interface.
func (g *Guest) State() string {
	var b strings.Builder
	fmt.Fprintf(&b, "on the wire: %s to the host, %s to the guest\n", unread(g.near), unread(g.far))
	err := g.Run(func() error {
		for _, name := range []string{"tcp", "arp", "dev"} {
			// /proc/net is the namespace of the process's first thread.
			text, err := os.ReadFile("/proc/thread-self/net/" + name)
			if err != nil {
				return err
			}
			fmt.Fprintf(&b, "%s:\n%s\n", name, text[:min(len(text), maxTable)])
		}
		return nil
	})
	if err != nil {
		fmt.Fprintln(&b, err)
	}
	return b.String()
}

// maxTable bounds each of the kernel's tables in a guest's State.
const maxTable = 2 << 10

// unread is how much memory the unread frames that were sent through f take.
func unread(f *os.File) string {
	raw, err := f.SyscallConn()
	if err != nil {
		return err.Error()
	}
	var n int
	var ioctlErr error
	err = raw.Control(func(fd uintptr) { n, ioctlErr = unix.IoctlGetInt(int(fd), unix.SIOCOUTQ) })
	if err := errors.Join(err, ioctlErr); err != nil {
		return err.Error()
	}
	return fmt.Sprintf("%d bytes", n)
}
