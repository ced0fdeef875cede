package gvisor

import (
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"agentrun.dev/internal/engine"
	"agentrun.dev/internal/engine/enginetest"
	"agentrun.dev/internal/engine/gvisor"
	"agentrun.dev/internal/network/wire"
)

// TestNoHostNetwork: gVisor's kernel is in an empty network namespace. Packets
// that programs send to the host's own addresses arrive at the wire, as all
// others do.
func TestNoHostNetwork(t *testing.T) {
	s := spec(t)
	s.Network = &engine.Network{MAC: [6]byte{2, 0, 0, 0, 0, 1}, MTU: 1500, Address: netip.MustParsePrefix("10.0.2.15/24"), Gateway: netip.MustParseAddr("10.0.2.2")}
	sb, err := newEngine(t, config(enginetest.TempDir(t))).Boot(t.Context(), s)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = sb.Close() })
	end, err := sb.Wire()
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = end.Close() }()
	listener, err := net.Listen("tcp", "0.0.0.0:0")
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = listener.Close() }()
	taken := make(chan struct{})
	go func() {
		if _, err := listener.Accept(); err == nil {
			close(taken)
		}
	}()
	port := listener.Addr().(*net.TCPAddr).Port
	addrs, err := net.InterfaceAddrs()
	if err != nil {
		t.Fatal(err)
	}
	// The last address belongs to no host; its connection must cause a frame on
	// the wire.
	for _, a := range append(addrs, &net.IPNet{IP: net.IPv4(192, 0, 2, 1)}) {
		if ip := a.(*net.IPNet).IP; ip.To4() != nil {
			sh(t, sb, fmt.Sprintf("! nc -w 1 %s %d </dev/null", ip, port))
		}
	}
	select {
	case <-taken:
		t.Error("the host was reached")
	default:
	}
	// The programs' packets go to the wire: an ARP request for the gateway's
	// address arrives there.
	message := make([]byte, wire.MaxMessage)
	for {
		n, err := end.Read(message)
		if err != nil {
			t.Fatal(err)
		}
		_, frame, err := wire.Parse(message[:n])
		if err != nil {
			t.Fatal(err)
		}
		if len(frame) >= 42 && frame[12] == 8 && frame[13] == 6 && string(frame[38:42]) == "\x0a\x00\x02\x02" {
			break
		}
	}
	own, err := os.Readlink("/proc/self/ns/net")
	if err != nil {
		t.Fatal(err)
	}
	for _, pid := range sentries(t, sb) {
		ns, err := os.Readlink("/proc/" + pid + "/ns/net")
		if err != nil {
			t.Fatal(err)
		}
		devices, err := os.ReadFile("/proc/" + pid + "/net/dev")
		if err != nil {
			t.Fatal(err)
		}
		if lines := strings.Count(strings.TrimSpace(string(devices)), "\n"); ns == own || lines > 2 || !strings.Contains(string(devices), "lo:") {
			t.Errorf("gVisor's kernel is in namespace %s, ours is %s, with these devices:\n%s", ns, own, devices)
		}
	}
}

// sentries lists the processes that a sandbox's helper has started.
func sentries(t *testing.T, sb engine.Sandbox) []string {
	t.Helper()
	id, err := gvisor.Identify(sb)
	if err != nil {
		t.Fatal(err)
	}
	threads, err := filepath.Glob(fmt.Sprintf("/proc/%d/task/*/children", id.PID))
	if err != nil {
		t.Fatal(err)
	}
	var list []string
	for _, path := range threads {
		b, _ := os.ReadFile(path) // a thread may have ended
		list = append(list, strings.Fields(string(b))...)
	}
	if len(list) > 0 {
		return list
	}
	t.Fatal("the helper has started nobody")
	return nil
}

// TestWireEnds: the process at the other end of the wire may end at any time, may
// send anything, and may be replaced. The sandbox continues in each case, even if
// the other end stays closed.
func TestWireEnds(t *testing.T) {
	s := spec(t)
	s.Network = &engine.Network{MAC: [6]byte{2, 0, 0, 0, 0, 1}, MTU: 1500, Address: netip.MustParsePrefix("10.0.2.15/24")}
	e := newEngine(t, config(enginetest.TempDir(t)))
	sb, err := e.Boot(t.Context(), s)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = sb.Close() })
	end, err := sb.Wire()
	if err != nil {
		t.Fatal(err)
	}
	empty := string(make([]byte, wire.HeaderLen))
	header := empty + "\x02\x00\x00\x00\x00\x01\x02\x00\x00\x00\x00\x02"
	for _, frame := range []string{
		"", "x", empty, empty + "x", "\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff" + header, header, header + "\x08\x00", header + "\x08\x00\x45", header + "\x08\x06\x00", header + "\x86\xdd\x60",
		header + "\x08\x00" + strings.Repeat("\xff", 60000), strings.Repeat("\xff", 1514),
		header + "\x08\x00\x45\x00\xff\xff" + strings.Repeat("\x00", 40),
	} {
		if _, err := end.Write([]byte(frame)); err != nil {
			t.Fatal(err)
		}
	}
	sh(t, sb, "(while :; do ping -c 1 -W 1 10.0.2.9; done) </dev/null >/dev/null 2>&1 & echo begun")
	if _, err := end.Read(make([]byte, 2048)); err != nil { // the pings have begun
		t.Fatal(err)
	}
	if err := end.Close(); err != nil {
		t.Fatal(err)
	}
	if end, err = sb.Wire(); err != nil { // a new wire
		t.Fatal(err)
	}
	if _, err := end.Read(make([]byte, 2048)); err != nil {
		t.Fatal(err)
	}
	// As if the process that made the sandbox had died.
	if err := errors.Join(end.Close(), sb.(interface{ CloseWire() error }).CloseWire()); err != nil {
		t.Fatal(err)
	}
	if got := sh(t, sb, "ip addr show dev eth0 | grep -c 10.0.2.15/24"); got != "1" {
		t.Errorf("the interface: %q", got)
	}
	child, err := e.Fork(t.Context(), freeze(t, sb), engine.ForkOptions{})
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = child.Close() }()
	if got := sh(t, child, "echo goes on"); got != "goes on" {
		t.Errorf("a fork says %q", got)
	}
}
