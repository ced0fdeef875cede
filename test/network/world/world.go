// Package world makes a small internet for tests: two network namespaces, connected
// by a pair of interfaces. The tested program runs in one of them, as if it were the
// host. The other has servers with public addresses, and a name server that knows
// them. No packet leaves the machine, and the machine's own network is not touched.
package world

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"os/exec"
	"runtime"
	"testing"
	"time"

	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netns"
	"golang.org/x/sys/unix"
)

// Addresses of the world. They are public, because sandboxes cannot reach the addresses
// reserved for documentation. They are used only inside the world's namespaces.
var (
	// Host4 and Host6 belong to the namespace of the tested program.
	Host4 = netip.MustParseAddr("25.1.100.2")
	Host6 = netip.MustParseAddr("2600:db8:1::2")
	// Servers4 and Servers6 lead to the namespace of the servers.
	Servers4 = netip.MustParsePrefix("25.1.113.0/24")
	Servers6 = netip.MustParsePrefix("2600:db8:5::/64")
	// Private4 leads there, too. A policy must keep these addresses closed.
	Private4 = netip.MustParsePrefix("10.77.0.0/24")
	// NameServer answers for the names that Name has defined.
	NameServer = netip.MustParseAddrPort("25.1.113.53:53")
)

// patience is how long a busy machine may take to switch interfaces on.
const patience = 2 * time.Minute

const (
	router4 = "25.1.100.1"
	router6 = "2600:db8:1::1"
)

// World is two network namespaces, and the servers in one of them.
type World struct {
	host, servers netns.NsHandle
	names         *names
	authority     *authority
}

// New makes a world, which ends with the test. It needs root.
func New(t testing.TB) *World {
	t.Helper()
	w := &World{names: newNames()}
	t.Cleanup(func() {
		for _, h := range []*netns.NsHandle{&w.host, &w.servers} {
			if *h != 0 {
				if err := h.Close(); err != nil {
					t.Errorf("close a network namespace: %v", err)
				}
			}
		}
	})
	var err error
	if w.authority, err = newAuthority(); err != nil {
		t.Fatal(err)
	}
	if err := w.makeNamespaces(); err != nil {
		t.Fatalf("make network namespaces (this needs root): %v", err)
	}
	if err := w.join(); err != nil {
		t.Fatalf("join network namespaces: %v", err)
	}
	w.serveNames(t)
	if err := w.awaitServers(); err != nil {
		t.Fatalf("reach the servers of the world: %v", err)
	}
	return w
}

// awaitServers waits until the host reaches the servers, because the kernel switches
// interfaces on in the background.
func (w *World) awaitServers() error {
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	return w.OnHost(func() error {
		c, err := new(net.Dialer).DialContext(ctx, "tcp", NameServer.String())
		if err != nil {
			return err
		}
		return c.Close()
	})
}

// makeNamespaces makes both namespaces, on a thread that then returns to its
// own.
func (w *World) makeNamespaces() error {
	return elsewhere(func() (err error) {
		if w.host, err = netns.New(); err != nil {
			return err
		}
		w.servers, err = netns.New()
		return err
	})
}

// elsewhere runs do on a thread that may change its network namespace. If the
// thread cannot return to its own namespace, it ends with its goroutine.
func elsewhere(do func() error) error {
	done := make(chan error)
	go func() {
		runtime.LockOSThread()
		before, err := netns.Get()
		if err != nil {
			done <- err
			return
		}
		err = do()
		if back := netns.Set(before); back != nil {
			done <- errors.Join(err, back)
			return
		}
		done <- errors.Join(err, before.Close())
		runtime.UnlockOSThread()
	}()
	return <-done
}

func within(h netns.NsHandle, do func() error) error {
	return elsewhere(func() error {
		if err := netns.Set(h); err != nil {
			return err
		}
		return do()
	})
}

// join connects the namespaces and gives them their addresses.
func (w *World) join() error {
	host, err := netlink.NewHandleAt(w.host, unix.NETLINK_ROUTE)
	if err != nil {
		return err
	}
	defer host.Close()
	servers, err := netlink.NewHandleAt(w.servers, unix.NETLINK_ROUTE)
	if err != nil {
		return err
	}
	defer servers.Close()
	attrs := netlink.NewLinkAttrs()
	attrs.Name = "up0"
	pair := &netlink.Veth{LinkAttrs: attrs, PeerName: "down0", PeerNamespace: netlink.NsFd(w.servers)}
	if err := host.LinkAdd(pair); err != nil {
		return fmt.Errorf("make a veth pair: %w", err)
	}
	up, err := raise(host, "up0", Host4.String()+"/24", Host6.String()+"/64")
	if err != nil {
		return err
	}
	down, err := raise(servers, "down0", router4+"/24", router6+"/64")
	if err != nil {
		return err
	}
	if err := errors.Join(know(host, up, down, router4, router6), know(servers, down, up, Host4.String(), Host6.String())); err != nil {
		return err
	}
	for _, gateway := range []string{router4, router6} {
		if err := host.RouteAdd(&netlink.Route{LinkIndex: up.Attrs().Index, Gw: net.ParseIP(gateway)}); err != nil {
			return fmt.Errorf("route to %s: %w", gateway, err)
		}
	}
	if err := own(servers, Servers4, Servers6, Private4); err != nil {
		return err
	}
	// Unlike IPv4, IPv6 lets programs bind only to addresses of an interface.
	return within(w.servers, func() error {
		return os.WriteFile("/proc/sys/net/ipv6/ip_nonlocal_bind", []byte("1"), 0)
	})
}

// know makes the addresses of a peer permanent neighbours of a link. All namespaces of a
// machine share one table of neighbours, which other tests may fill (networktest.KnowGateway).
func know(h *netlink.Handle, link, peer netlink.Link, addresses ...string) error {
	for _, text := range addresses {
		entry := &netlink.Neigh{
			LinkIndex: link.Attrs().Index, State: netlink.NUD_PERMANENT,
			IP: net.ParseIP(text), HardwareAddr: peer.Attrs().HardwareAddr,
		}
		if err := h.NeighSet(entry); err != nil {
			return fmt.Errorf("neighbour %s of %s: %w", text, link.Attrs().Name, err)
		}
	}
	return nil
}

// own makes every address of the prefixes an address of the namespace, by local
// routes.
func own(h *netlink.Handle, prefixes ...netip.Prefix) error {
	lo, err := h.LinkByName("lo")
	if err != nil {
		return err
	}
	for _, p := range prefixes {
		_, dst, err := net.ParseCIDR(p.String())
		if err != nil {
			return err
		}
		if err := h.RouteAdd(&netlink.Route{LinkIndex: lo.Attrs().Index, Dst: dst, Type: unix.RTN_LOCAL, Table: unix.RT_TABLE_LOCAL, Scope: unix.RT_SCOPE_HOST}); err != nil {
			return fmt.Errorf("own %v: %w", p, err)
		}
	}
	return nil
}

// Own makes further addresses lead to the namespace of the servers.
func (w *World) Own(t testing.TB, prefixes ...string) {
	t.Helper()
	h, err := netlink.NewHandleAt(w.servers, unix.NETLINK_ROUTE)
	if err != nil {
		t.Fatal(err)
	}
	defer h.Close()
	for _, p := range prefixes {
		if err := own(h, netip.MustParsePrefix(p)); err != nil {
			t.Fatal(err)
		}
	}
}

// raise gives a link its addresses, and switches the link and the loopback on.
func raise(h *netlink.Handle, name string, addresses ...string) (netlink.Link, error) {
	lo, err := h.LinkByName("lo")
	if err != nil {
		return nil, err
	}
	if err := h.LinkSetUp(lo); err != nil {
		return nil, err
	}
	link, err := h.LinkByName(name)
	if err != nil {
		return nil, err
	}
	for _, text := range addresses {
		a, err := netlink.ParseAddr(text)
		if err != nil {
			return nil, err
		}
		// There are no other hosts, so duplicate address detection is not
		// needed.
		a.Flags = unix.IFA_F_NODAD
		if err := h.AddrAdd(link, a); err != nil {
			return nil, fmt.Errorf("address %s of %s: %w", text, name, err)
		}
	}
	return link, h.LinkSetUp(link)
}

// Listen listens on a TCP address of the servers.
func (w *World) Listen(t testing.TB, address string) net.Listener {
	t.Helper()
	var l net.Listener
	err := within(w.servers, func() (err error) {
		l, err = new(net.ListenConfig).Listen(context.Background(), "tcp", address)
		return err
	})
	if err != nil {
		t.Fatalf("listen on %s: %v", address, err)
	}
	t.Cleanup(func() { _ = l.Close() }) // a server may have closed it
	return l
}

// ListenPacket listens on a UDP address of the servers.
func (w *World) ListenPacket(t testing.TB, address string) net.PacketConn {
	t.Helper()
	var c net.PacketConn
	err := within(w.servers, func() (err error) {
		c, err = new(net.ListenConfig).ListenPacket(context.Background(), "udp", address)
		return err
	})
	if err != nil {
		t.Fatalf("listen on %s: %v", address, err)
	}
	t.Cleanup(func() { _ = c.Close() }) // a server may have closed it
	return c
}

// OnHost runs do on a thread in the namespace of the tested program. Sockets that do
// opens stay in the namespace; goroutines that it starts are outside of it.
func (w *World) OnHost(do func() error) error { return within(w.host, do) }

// Start starts a command in the namespace of the tested program.
func (w *World) Start(cmd *exec.Cmd) error { return w.OnHost(cmd.Start) }
