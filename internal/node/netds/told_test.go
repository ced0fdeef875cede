package netds

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"agentrun.dev/internal/network/netctl"
	"agentrun.dev/internal/network/networktest"
	"agentrun.dev/internal/node"
	"golang.org/x/sys/unix"
)

// listener is a netd that notes what it is told, and answers what the test says.
type listener struct {
	conn *netctl.Conn
	told chan netctl.Request
}

// newListener makes the netd of a namespace with one machine.
func newListener(t *testing.T, n *Netds, at node.Joint, answer func(netctl.Request) *netctl.Reply) *listener {
	t.Helper()
	path := filepath.Join(t.TempDir(), "control")
	file, err := netctl.Listen(path)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = file.Close() }()
	l, err := net.FileListener(file)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = l.Close() }()
	out := &listener{told: make(chan netctl.Request, 100)}
	accepted := make(chan error, 1)
	go func() {
		socket, err := l.Accept()
		if err != nil {
			accepted <- err
			return
		}
		out.conn = netctl.NewConn(socket.(*net.UnixConn))
		_, _, err = out.conn.Receive(time.Time{})
		accepted <- errors.Join(err, out.conn.Send(time.Time{}, &netctl.Welcome{Protocol: netctl.Protocol}, nil))
		for {
			m, _, err := out.conn.Receive(time.Time{})
			if err != nil {
				return
			}
			r := m.(netctl.Request)
			if reply := answer(r); reply != nil {
				_ = out.conn.Send(time.Time{}, reply, nil) // a daemon may have hung up
			}
			out.told <- r
		}
	}()
	client, err := netctl.Dial(t.Context(), path)
	if err := errors.Join(err, <-accepted); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _, _ = client.Close(), out.conn.Close() })
	ns := n.of(at.Namespace)
	ns.mu.Lock()
	defer ns.mu.Unlock()
	ns.running, ns.client, ns.joints[at.Machine] = true, client, &at
	return out
}

func yes(r netctl.Request) *netctl.Reply { return &netctl.Reply{ID: r.RequestID()} }

// withSettings are netds whose settings are in a file.
func withSettings(t *testing.T, cfg Config, text string) (*Netds, func(string)) {
	t.Helper()
	file := filepath.Join(t.TempDir(), "network.yaml")
	write := func(text string) {
		if err := os.WriteFile(file, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	write(text)
	var err error
	if cfg.Settings, err = OpenSettings(file, ""); err != nil {
		t.Fatal(err)
	}
	n := New(cfg)
	t.Cleanup(func() { _ = n.Close() })
	return n, func(text string) {
		write(text)
		v, err := cfg.Settings.read()
		if err != nil {
			t.Fatal(err)
		}
		cfg.Settings.now.Store(v)
		n.reconfigure(t.Context())
	}
}

// TestECHIsTakenBack: settings of the node that are part of the rules of wires change there,
// too.
func TestECHIsTakenBack(t *testing.T) {
	n, change := withSettings(t, Config{Dir: t.TempDir(), Log: silent()}, "ech: true")
	l := newListener(t, n, joint(t, "a", nil), yes)
	change("ech: false")
	for {
		select {
		case r := <-l.told:
			if set, ok := r.(*netctl.SetPolicy); ok {
				if set.Rules.ECH {
					t.Error("it is told that ECH is allowed")
				}
				return
			}
		case <-time.After(time.Minute):
			t.Fatal("wires are told nothing")
		}
	}
}

// TestPolicyOfSomebodyWhoHasGone: a policy that was promised is set, even if its caller no
// longer waits.
func TestPolicyOfSomebodyWhoHasGone(t *testing.T) {
	n, _ := withSettings(t, Config{Dir: t.TempDir(), Log: silent()}, "")
	l := newListener(t, n, joint(t, "a", nil), yes)
	ctx, cancel := context.WithDeadline(t.Context(), time.Now().Add(-time.Second))
	defer cancel()
	if err := n.SetPolicies(ctx, joint(t, "a", nil, "192.0.2.1")); err != nil {
		t.Fatal(err)
	}
	if set, ok := (<-l.told).(*netctl.SetPolicy); !ok || !strings.Contains(set.Rules.Policies, "192.0.2.1") {
		t.Errorf("%+v", set)
	}
}

// TestPolicyThatIsNotTaken: a netd that does not take a policy loses the wire, and one that
// does not let go of the wire is hung up on, after which it is killed.
func TestPolicyThatIsNotTaken(t *testing.T) {
	n, _ := withSettings(t, Config{Dir: t.TempDir(), Log: silent()}, "")
	lets := true
	l := newListener(t, n, joint(t, "a", nil), func(r netctl.Request) *netctl.Reply {
		if of, ok := r.(*netctl.OfWire); ok && of.Kind == netctl.KindDetach && lets {
			return yes(r)
		}
		return netctl.Fail(r.RequestID(), errors.New("no"))
	})
	client := n.of("default").connected()
	if err := n.SetPolicies(t.Context(), joint(t, "a", nil)); err == nil {
		t.Error("a policy that was not set is reported as set")
	}
	<-l.told
	if of, ok := (<-l.told).(*netctl.OfWire); !ok || of.Kind != netctl.KindDetach {
		t.Errorf("it is told %+v", of)
	}
	lets = false
	if err := n.SetPolicies(t.Context(), joint(t, "a", nil)); err == nil {
		t.Error("a policy that was not set is reported as set")
	}
	select {
	case <-client.Done():
	case <-time.After(time.Minute):
		t.Error("a netd that goes on with the old policy is kept")
	}
}

// TestSettingsThatNoNetdTakes: the settings of a node are refused where they are read, not
// by each netd in turn.
func TestSettingsThatNoNetdTakes(t *testing.T) {
	for _, list := range []string{"upstreams", "closedRanges"} {
		var all []string
		for i := range 4097 {
			all = append(all, fmt.Sprintf("%d.%d.1.1", 1+i/250, 1+i%250))
		}
		file := filepath.Join(t.TempDir(), "network.yaml")
		text := func(n int) []byte { return []byte(list + ": [" + strings.Join(all[:n], ", ") + "]") }
		for _, n := range []int{1, 17, 1025, 4096, 4097} {
			if err := os.WriteFile(file, text(n), 0o600); err != nil {
				t.Fatal(err)
			}
			s, err := OpenSettings(file, "")
			if err != nil {
				continue
			}
			if _, err := netctl.Unmarshal(netctl.Marshal(&netctl.Configure{Settings: s.Now().forNetd()})); err != nil {
				t.Errorf("%d %s: %v", n, list, err)
			}
		}
	}
}

// TestSettingsWhileANetdBegins: settings that change while a netd is given its wires hold in
// it, although it was told the old ones before.
func TestSettingsWhileANetdBegins(t *testing.T) {
	h := newHosts(t)
	n, change := withSettings(t, h.cfg, "")
	g := networktest.New(t)
	at := joint(t, "a", g, "x:443")
	slow := &slowMachine{machine: at.Wire.(machine)}
	at.Wire = slow
	if err := n.Join(t.Context(), at); err != nil {
		t.Fatal(err)
	}
	asked := make(chan struct{})
	slow.ask, slow.goOn = sync.OnceFunc(func() { close(asked) }), make(chan struct{})
	first, _ := h.process(t, "default")
	client := n.of("default").connected()
	if err := unix.Kill(first.PID, unix.SIGKILL); err != nil {
		t.Fatal(err)
	}
	<-client.Done()
	<-asked // the next one is configured, and is about to get its wires
	upstream, err := net.ListenPacket("udp", netip.AddrPortFrom(server, 0).String())
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = upstream.Close() }()
	changed := make(chan struct{})
	go func() {
		defer close(changed)
		change("upstreams: [\"" + upstream.LocalAddr().String() + "\"]")
	}()
	select {
	case <-changed: // it has not waited for the netd that begins
	case <-time.After(100 * time.Millisecond):
	}
	close(slow.goOn)
	<-changed
	if _, err := n.of("default").await(t.Context()); err != nil {
		t.Fatal(err)
	}
	resolver, err := g.Dial(t.Context(), "udp", "10.255.255.1:53")
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = resolver.Close() }()
	question := []byte{0, 7, 1, 0, 0, 1, 0, 0, 0, 0, 0, 0, 1, 'x', 0, 0, 1, 0, 1}
	if _, err := resolver.Write(question); err != nil {
		t.Fatal(err)
	}
	if err := upstream.SetReadDeadline(time.Now().Add(time.Minute)); err != nil {
		t.Fatal(err)
	}
	if _, _, err := upstream.ReadFrom(make([]byte, 1000)); err != nil {
		t.Errorf("the DNS server that was named meanwhile is not asked: %v", err)
	}
}

// slowMachine is a machine whose wire is given out when the test wants it.
type slowMachine struct {
	machine
	ask  func()
	goOn chan struct{}
}

func (m *slowMachine) Wire() (*os.File, error) {
	if m.ask != nil {
		m.ask()
		<-m.goOn
	}
	return m.machine.Wire()
}

func silent() *slog.Logger { return slog.New(slog.NewTextHandler(io.Discard, nil)) }
