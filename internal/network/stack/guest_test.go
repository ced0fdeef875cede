package stack

import (
	"context"
	"net"
	"os"
	"testing"

	"golang.org/x/sys/unix"

	"agentrun.dev/internal/network/networktest"
)

// config is the configuration of every sandbox.
var config = Config{
	MAC:        networktest.MAC,
	GatewayMAC: networktest.GatewayMAC,
	Address:    networktest.Address,
	Gateway:    networktest.Gateway,
	Address6:   networktest.Address6,
	Gateway6:   networktest.Gateway6,
	MTU:        networktest.MTU,
}

// guest is a Linux kernel at the sandbox's end of a wire.
type guest struct{ *networktest.Guest }

// newGuest makes a namespace and a wire.
func newGuest(t testing.TB) guest {
	t.Helper()
	if os.Getuid() != 0 {
		t.Skip("not root: network namespaces and taps cannot be made")
	}
	if _, err := os.Stat("/dev/net/tun"); err != nil {
		t.Skipf("no taps on this host: %v", err)
	}
	return guest{networktest.New(t)}
}

// dial connects from inside the guest.
func (g guest) dial(network, address string) (net.Conn, error) {
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	return g.Dial(ctx, network, address)
}

func (g guest) mustDial(t testing.TB, network, address string) net.Conn {
	t.Helper()
	c, err := g.dial(network, address)
	if err != nil {
		t.Fatal(err)
	}
	return c
}

// attach serves the guest's wire.
func attach(t testing.TB, p *Poller, g guest, o Outside, change ...func(*Config)) *Wire {
	t.Helper()
	return attachEnd(t, p, g.Wire(), o, change...)
}

// attachEnd serves a wire through a copy of its end. The test keeps the end, as an
// engine does.
func attachEnd(t testing.TB, p *Poller, end *os.File, o Outside, change ...func(*Config)) *Wire {
	t.Helper()
	c := config
	for _, f := range change {
		f(&c)
	}
	w, err := p.Attach(dup(t, end), c, o)
	if err != nil {
		t.Fatal(err)
	}
	return w
}

// dup returns a descriptor that belongs to the caller.
func dup(t testing.TB, f *os.File) int {
	t.Helper()
	fd, err := unix.FcntlInt(f.Fd(), unix.F_DUPFD_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	return fd
}
