package networktest

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"os/exec"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// World is a network behind the host's network: a namespace with an address that is
// not one of the host's. It needs Main.
type World struct{ ns *os.File }

// NewWorld makes a world with one address, to which the host has a route. The world
// ends with the test. Only one can exist at a time.
func NewWorld(t testing.TB, address netip.Addr) *World {
	t.Helper()
	if os.Getenv(inside) == "" {
		t.Fatal("the test is in the host's own network: TestMain must call networktest.Main")
	}
	w := &World{}
	err := onThread(func() (err error) {
		if err := unix.Unshare(unix.CLONE_NEWNET); err != nil {
			return fmt.Errorf("unshare: %w", err)
		}
		w.ns, err = os.Open("/proc/thread-self/ns/net")
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	path := fmt.Sprintf("/proc/%d/fd/%d", os.Getpid(), w.ns.Fd())
	t.Cleanup(func() { _ = w.ns.Close() })
	const host, far = "169.254.77.1/30", "169.254.77.2"
	const hostMAC, farMAC = "02:00:00:00:77:01", "02:00:00:00:77:02"
	ip(t, "link add world address "+hostMAC+" type veth peer name eth0 address "+farMAC)
	// The namespace lives as long as its sockets, and the next world needs the same
	// names.
	t.Cleanup(func() { ip(t, "link del world") })
	ip(t, "link set eth0 netns "+path)
	ip(t, "addr add "+host+" dev world")
	ip(t, "link set world up")
	ip(t, "neigh add "+far+" lladdr "+farMAC+" dev world nud permanent") // see Guest.KnowGateway
	if err := w.Run(func() error {
		ip(t, "addr add "+far+"/30 dev eth0")
		ip(t, fmt.Sprintf("addr add %v/32 dev eth0", address))
		ip(t, "link set eth0 up")
		ip(t, "neigh add 169.254.77.1 lladdr "+hostMAC+" dev eth0 nud permanent")
		return nil
	}); err != nil {
		t.Fatal(err)
	}
	ip(t, fmt.Sprintf("route add %v/32 via %s", address, far))
	if err := await(address); err != nil {
		t.Fatalf("reach the world: %v", err)
	}
	return w
}

// patience is enough for a busy machine to bring interfaces up.
const patience = 2 * time.Minute

// await returns once the host can reach an address. No program listens there, so the
// address refuses. The kernel brings interfaces up in the background.
func await(address netip.Addr) error {
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	c, err := new(net.Dialer).DialContext(ctx, "tcp", netip.AddrPortFrom(address, discard).String())
	switch {
	case err == nil:
		return c.Close()
	case errors.Is(err, unix.ECONNREFUSED):
		return nil
	}
	return err
}

// discard is a port on which no test listens.
const discard = 9

// ip runs ip(8) in the network of the calling thread.
func ip(t testing.TB, args string) {
	t.Helper()
	if out, err := exec.CommandContext(context.Background(), "ip", strings.Fields(args)...).CombinedOutput(); err != nil {
		t.Errorf("ip %s: %v: %s", args, err, out)
	}
}

// Run runs f on a thread in the world. Sockets made by f belong to the world.
func (w *World) Run(f func() error) error {
	return onThread(func() error {
		if err := unix.Setns(int(w.ns.Fd()), unix.CLONE_NEWNET); err != nil {
			return fmt.Errorf("enter the world: %w", err)
		}
		return f()
	})
}

// Listen listens in the world. The listener is closed with the test.
func (w *World) Listen(t testing.TB, address string) net.Listener {
	t.Helper()
	var l net.Listener
	if err := w.Run(func() (err error) {
		l, err = net.Listen("tcp", address)
		return err
	}); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = l.Close() })
	return l
}

// ListenPacket is Listen for UDP.
func (w *World) ListenPacket(t testing.TB, address string) net.PacketConn {
	t.Helper()
	var c net.PacketConn
	if err := w.Run(func() (err error) {
		c, err = net.ListenPacket("udp", address)
		return err
	}); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = c.Close() })
	return c
}
