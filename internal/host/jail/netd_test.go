package jail

import (
	"errors"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// echo serves TCP and UDP at one address of the host's loopback.
func echo(t *testing.T) string {
	t.Helper()
	var listener net.Listener
	var packets net.PacketConn
	for range 20 { // a port that is free for TCP may be taken for UDP
		var err error
		if listener, err = net.Listen("tcp", "127.0.0.1:0"); err != nil {
			t.Fatal(err)
		}
		if packets, err = net.ListenPacket("udp", listener.Addr().String()); err == nil {
			break
		}
		_ = listener.Close()
	}
	if packets == nil {
		t.Fatal("no port is free for both TCP and UDP")
	}
	t.Cleanup(func() { _, _ = listener.Close(), packets.Close() })
	go func() {
		b := make([]byte, 100)
		for {
			c, err := listener.Accept()
			if err != nil {
				return
			}
			if n, err := c.Read(b); err == nil {
				_, _ = c.Write(b[:n])
			}
			_ = c.Close()
		}
	}()
	go func() {
		b := make([]byte, 100)
		for {
			n, from, err := packets.ReadFrom(b)
			if err != nil {
				return
			}
			_, _ = packets.WriteTo(b[:n], from)
		}
	}()
	return listener.Addr().String()
}

// controlSockets makes the sockets that a netd has in the host's network: a
// listening unix socket, and a connection that was accepted from it.
func controlSockets(t *testing.T) (listener, accepted *os.File) {
	t.Helper()
	path := filepath.Join(t.TempDir(), "control")
	l, err := net.Listen("unix", path)
	if err != nil {
		t.Fatal(err)
	}
	c, err := net.Dial("unix", path)
	if err != nil {
		t.Fatal(err)
	}
	a, err := l.Accept()
	if err != nil {
		t.Fatal(err)
	}
	if listener, err = l.(*net.UnixListener).File(); err != nil {
		t.Fatal(err)
	}
	if accepted, err = a.(*net.UnixConn).File(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _, _, _, _, _ = l.Close(), c.Close(), a.Close(), listener.Close(), accepted.Close() })
	return listener, accepted
}

// netds makes a jail of netds with the ids and groups of another jail.
func netds(t *testing.T, cfg Config) *Jail {
	cfg.Kind = Netd
	return open(t, cfg)
}

// TestNetdEscapes: each attempt of a locked down netd beyond TCP, UDP and its
// descriptors ends it or is refused.
func TestNetdEscapes(t *testing.T) {
	cfg := config(t)
	vmms, j := open(t, cfg), netds(t, cfg)
	victim := start(t, vmms, roomy)
	victim.order(t, "hold", 0, 0)
	wire, service := wireAndService(t, vmms)
	streams, err := net.Listen("unix", service.name+"-stream")
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = streams.Close() }()
	listener, accepted := controlSockets(t)
	fd, err := unix.Socket(unix.AF_NETLINK, unix.SOCK_RAW|unix.SOCK_CLOEXEC|unix.SOCK_NONBLOCK, unix.NETLINK_ROUTE)
	if err != nil {
		t.Fatal(err)
	}
	routes := os.NewFile(uintptr(fd), "routes")
	defer func() { _ = routes.Close() }()
	try := func(t *testing.T, attempt, name string) (*inmate, string) {
		t.Helper()
		p := start(t, j, roomy)
		p.orderWith(t, map[string]any{"Do": attempt, "Netd": true, "Victim": victim.Pid, "Name": name}, wire, listener, accepted, routes)
		return p, p.answer(t)
	}
	for _, attempt := range append([]string{
		"raw socket", "ping socket", "packet socket", "unix stream", "unix datagram", "unix pair", "vsock",
		"firewall", "routes", "sockets of others", "crypto socket", "listen", "attach a filter", "protocol of a socket",
		"list interfaces", "take a descriptor", "open a process",
	}, fatal...) {
		t.Run(attempt, func(t *testing.T) {
			p, said := try(t, attempt, service.name)
			p.wasKilled(t, said)
			service.gotNothing(t)
		})
	}
	for attempt, want := range map[string]error{
		"clone3": unix.ENOSYS,
		"openat": unix.ENOENT,
		"stat":   unix.ENOENT,
		"bind":   unix.EACCES,

		"send to the host by the wire":           unix.ECONNREFUSED,
		"connect the wire to the host":           unix.ECONNREFUSED,
		"connect the listener to the host":       unix.EINVAL,
		"connect the control socket to the host": unix.EISCONN,
		"send to the host by the control socket": unix.EISCONN,
		"add an address":                         unix.EPERM,
	} {
		t.Run(attempt, func(t *testing.T) {
			p, said := try(t, attempt, service.name)
			p.wasRefused(t, said, want)
			service.gotNothing(t)
		})
	}
	if err := streams.(*net.UnixListener).SetDeadline(time.Now()); err != nil {
		t.Fatal(err)
	}
	if c, err := streams.Accept(); !errors.Is(err, os.ErrDeadlineExceeded) {
		t.Errorf("a service of the machine got a connection from the jail: %v, %v", c, err)
	}
	t.Run("what is allowed", func(t *testing.T) {
		for attempt, name := range map[string]string{"dial": echo(t), "threads": ""} {
			p, said := try(t, attempt, name)
			if said != `"ok"` {
				t.Errorf("%s: %s, stderr %q", attempt, said, p.said(t))
			}
			p.end(t, false)
		}
	})
	victim.wasUnharmed(t)
}

// TestNetdWalls: the view of a netd that runs without the filter.
func TestNetdWalls(t *testing.T) {
	cfg := config(t)
	vmms, j := open(t, cfg), netds(t, cfg)
	victim, p := start(t, vmms, roomy), start(t, j, roomy)
	defer victim.end(t, true)
	defer p.end(t, true)
	v := p.look(t, map[string]any{"Victim": victim.Pid})
	if v.UID != p.Cell.UID() || v.GID != v.UID || v.UID == victim.Cell.UID() || len(v.Groups) != 0 {
		t.Errorf("it is user %d, group %d, %v; its cell is %d, a sibling's %d", v.UID, v.GID, v.Groups, p.Cell.UID(), victim.Cell.UID())
	}
	if !slices.Equal(v.Root, []string{"netd"}) {
		t.Errorf("its root has %q", v.Root)
	}
	interfaces, err := net.Interfaces()
	if err != nil || len(v.Interfaces) != len(interfaces) {
		t.Errorf("its network has %q, the machine's %v, %v", v.Interfaces, interfaces, err)
	}
	v.wasRefused(t, nil)
}

// TestNetdKind: a netd leads a session, has no capabilities and shares only the
// intended namespaces with the host. Its jail refuses to make wires.
func TestNetdKind(t *testing.T) {
	j := netds(t, config(t))
	p := start(t, j, roomy)
	defer p.end(t, true)
	p.orderWith(t, map[string]any{"Do": "report and hold", "Netd": true})
	if said := p.answer(t); said == "" {
		t.Fatal(p.said(t))
	}
	for space, shared := range map[string]bool{"net": true, "mnt": false, "ipc": false, "uts": false} {
		its, err := os.Readlink(fmt.Sprintf("/proc/%d/ns/%s", p.Pid, space))
		ours, ownErr := os.Readlink("/proc/self/ns/" + space)
		if err := errors.Join(err, ownErr); err != nil {
			t.Fatal(err)
		}
		if (its == ours) != shared {
			t.Errorf("namespace %s: %s, ours is %s", space, its, ours)
		}
	}
	if sid, err := unix.Getsid(p.Pid); err != nil || sid != p.Pid {
		t.Errorf("its session is %d, it is %d, %v", sid, p.Pid, err)
	}
	status, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", p.Pid))
	if err != nil {
		t.Fatal(err)
	}
	for _, line := range []string{"CapPrm:\t0000000000000000", "CapBnd:\t0000000000000000", "NoNewPrivs:\t1", "Seccomp:\t2"} {
		if !strings.Contains(string(status), line+"\n") {
			t.Errorf("no %q in:\n%s", line, status)
		}
	}
	environ, err := os.ReadFile(fmt.Sprintf("/proc/%d/environ", p.Pid))
	if err != nil || !strings.Contains(string(environ), "GOMEMLIMIT="+strconv.Itoa(192*mib)) || !strings.Contains(string(environ), "GOMAXPROCS=") {
		t.Errorf("its environment is %q, %v", environ, err)
	}
	if _, _, err := j.Wire(); err == nil || !strings.Contains(err.Error(), "the machine's network") {
		t.Errorf("a wire in the machine's network: %v", err)
	}
}
