package netds

import (
	"context"
	"encoding/json"
	"errors"
	"io"
	"log/slog"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"runtime"
	"sync/atomic"
	"testing"
	"time"

	"agentrun.dev/internal/engine"
	"agentrun.dev/internal/host/jail"
	"agentrun.dev/internal/host/jail/jailtest"
	"agentrun.dev/internal/host/procid"
	"agentrun.dev/internal/network/netproc"
	"agentrun.dev/internal/network/networktest"
	"agentrun.dev/internal/network/policy"
	"agentrun.dev/internal/node"
	"agentrun.dev/internal/sandbox"
	"golang.org/x/sys/unix"
)

// server is an address of the tests' own network, which is open if a rule says so.
var server = netip.MustParseAddr("198.51.100.7")

func TestMain(m *testing.M) { networktest.Main(m, server) }

// machine is a sandbox of which only the wire is used.
type machine struct {
	engine.Sandbox
	guest *networktest.Guest
	asked *atomic.Int32 // how often for the wire
}

func (m machine) Wire() (*os.File, error) {
	m.asked.Add(1)
	if m.guest == nil {
		return nil, engine.ErrNoWire
	}
	fd, err := unix.FcntlInt(m.guest.Wire().Fd(), unix.F_DUPFD_CLOEXEC, 0)
	if err != nil {
		return nil, err
	}
	return os.NewFile(uintptr(fd), "wire"), nil
}

// hosts are netds of one state folder, for one daemon after the other.
type hosts struct {
	cfg  Config
	jail jail.Config
}

func newHosts(t *testing.T) *hosts {
	t.Helper()
	jc := jail.Config{Folder: t.TempDir(), Cgroup: jailtest.Cgroup(t)}
	j, err := netproc.NewJail(jc)
	if err != nil {
		t.Fatal(err)
	}
	settings, err := OpenSettings("", "")
	if err != nil {
		t.Fatal(err)
	}
	h := &hosts{jail: jc, cfg: Config{
		Dir: t.TempDir(), Jail: j, Settings: settings, Log: slog.New(slog.NewTextHandler(io.Discard, nil)),
	}}
	t.Cleanup(func() {
		n := New(h.cfg)
		if err := errors.Join(n.Keep(context.Background()), n.Close(), j.Close()); err != nil {
			t.Error(err)
		}
		if left, err := os.ReadDir(jc.Folder); err != nil || len(left) > 0 {
			t.Errorf("user ids are left: %v, %v", left, err)
		}
	})
	return h
}

// process is the netd of a namespace, as its folder says.
func (h *hosts) process(t *testing.T, name string) (id procid.ID, found bool) {
	t.Helper()
	b, err := os.ReadFile(filepath.Join(h.cfg.Dir, name, "process.json"))
	if errors.Is(err, os.ErrNotExist) {
		return id, false
	}
	if err != nil {
		t.Fatal(err)
	}
	var r struct{ Process procid.ID }
	if err := json.Unmarshal(b, &r); err != nil {
		t.Fatal(err)
	}
	return r.Process, true
}

// echo answers all that connects to it, and returns where.
func echo(t *testing.T) string {
	t.Helper()
	l, err := net.Listen("tcp", netip.AddrPortFrom(server, 0).String())
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = l.Close() })
	go func() {
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			go func() {
				_, _ = io.Copy(c, c)
				_ = c.Close()
			}()
		}
	}()
	return l.Addr().String()
}

func joint(t *testing.T, id string, g *networktest.Guest, allow ...string) node.Joint {
	t.Helper()
	p, err := policy.Parse("deny", allow, nil)
	if err != nil {
		t.Fatal(err)
	}
	return node.Joint{Namespace: "default", Machine: sandbox.ID(id), Wire: machine{guest: g, asked: new(atomic.Int32)}, Policies: policy.Set{p}}
}

// speaks reports whether a guest reaches the server, on a new connection.
func speaks(t *testing.T, g *networktest.Guest, to string) error {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	c, err := g.Dial(ctx, "tcp", to)
	if err != nil {
		return err
	}
	defer func() { _ = c.Close() }()
	return talk(c)
}

func talk(c net.Conn) error {
	if err := c.SetDeadline(time.Now().Add(time.Minute)); err != nil {
		return err
	}
	if _, err := io.WriteString(c, "hello"); err != nil {
		return err
	}
	_, err := io.ReadFull(c, make([]byte, 5))
	return err
}

// TestKilledNetd: a netd that is killed is followed by one that serves the same wires,
// with the policies of the moment.
func TestKilledNetd(t *testing.T) {
	h, to := newHosts(t), echo(t)
	n := New(h.cfg)
	defer func() { _ = n.Close() }()
	a, b := networktest.New(t), networktest.New(t)
	for id, g := range map[string]*networktest.Guest{"a": a, "b": b} {
		if err := n.Join(t.Context(), joint(t, id, g, to)); err != nil {
			t.Fatal(err)
		}
	}
	if err := errors.Join(speaks(t, a, to), speaks(t, b, to)); err != nil {
		t.Fatal(err)
	}
	if err := n.SetPolicies(t.Context(), joint(t, "b", b)); err != nil {
		t.Fatal(err)
	}
	first, _ := h.process(t, "default")
	client := n.of("default").connected()
	if err := unix.Kill(first.PID, unix.SIGKILL); err != nil {
		t.Fatal(err)
	}
	<-client.Done()
	if _, err := n.of("default").await(t.Context()); err != nil {
		t.Fatal(err)
	}
	if err := speaks(t, a, to); err != nil {
		t.Errorf("after a kill: %v", err)
	}
	if err := speaks(t, b, to); !errors.Is(err, unix.ECONNREFUSED) {
		t.Errorf("what was not allowed any more, after a kill: %v", err)
	}
	if second, _ := h.process(t, "default"); second == first {
		t.Error("the same process")
	}
}

// TestNothingIsLeftOfKilledNetds: the daemon keeps no goroutine and no descriptor of netds that are
// killed in the middle of transfers.
func TestNothingIsLeftOfKilledNetds(t *testing.T) {
	h, from := newHosts(t), flood(t)
	n := New(h.cfg)
	defer func() { _ = n.Close() }()
	g := networktest.New(t)
	if err := n.Join(t.Context(), joint(t, "a", g, from)); err != nil {
		t.Fatal(err)
	}
	descriptors := func() int {
		all, err := os.ReadDir("/proc/self/fd")
		if err != nil {
			t.Fatal(err)
		}
		return len(all)
	}
	kill := func() {
		c, err := g.Dial(t.Context(), "tcp", from)
		if err != nil {
			t.Fatal(err)
		}
		if _, err := io.ReadFull(c, make([]byte, 100<<10)); err != nil {
			t.Fatal(err)
		}
		p, _ := h.process(t, "default")
		client := n.of("default").connected()
		if err := unix.Kill(p.PID, unix.SIGKILL); err != nil {
			t.Fatal(err)
		}
		for next := client; next == client; { // the daemon may not have noticed
			if next, err = n.of("default").await(t.Context()); err != nil {
				t.Fatal(err)
			}
		}
		if err := c.Close(); err != nil {
			t.Fatal(err)
		}
	}
	kill()
	// The end of the test's own connection may be counted, too: one, not one for each kill.
	goroutines, open := runtime.NumGoroutine(), descriptors()
	for range 5 {
		kill()
	}
	for deadline := time.Now().Add(time.Minute); runtime.NumGoroutine() > goroutines || descriptors() > open; {
		if time.Now().After(deadline) {
			t.Fatalf("%d goroutines and %d descriptors; after the first kill there were %d and %d", runtime.NumGoroutine(), descriptors(), goroutines, open)
		}
		time.Sleep(10 * time.Millisecond) // nothing tells of them
	}
}

// TestNextDaemon: connections outlive the daemon. The next one changes policies, and
// lets go of machines that have ended in the meantime.
func TestNextDaemon(t *testing.T) {
	h, to := newHosts(t), echo(t)
	n := New(h.cfg)
	a, b := networktest.New(t), networktest.New(t)
	for id, g := range map[string]*networktest.Guest{"a": a, "b": b} {
		if err := n.Join(t.Context(), joint(t, id, g, to)); err != nil {
			t.Fatal(err)
		}
	}
	conn, err := a.Dial(t.Context(), "tcp", to)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = conn.Close() }()
	before, _ := h.process(t, "default")
	if err := errors.Join(talk(conn), n.Close(), talk(conn)); err != nil {
		t.Fatal(err)
	}
	n = New(h.cfg)
	defer func() { _ = n.Close() }()
	adopted, lost := joint(t, "a", a, to), joint(t, "lost", networktest.New(t), to)
	adopted.Adopted, lost.Adopted = true, true
	if err := errors.Join(n.Join(t.Context(), adopted), n.Join(t.Context(), lost)); err != nil {
		t.Fatal(err)
	}
	if asked := adopted.Wire.(machine).asked.Load(); asked != 0 {
		t.Error("a wire that is there is asked for, which cuts a microVM's")
	}
	if asked := lost.Wire.(machine).asked.Load(); asked != 1 {
		t.Errorf("a wire that is not there is asked for %d times", asked)
	}
	n.Leave(lost)
	if err := errors.Join(n.Keep(t.Context()), talk(conn)); err != nil {
		t.Fatal(err)
	}
	if after, _ := h.process(t, "default"); after != before {
		t.Error("another process")
	}
	list, err := n.of("default").connected().List(t.Context())
	if err != nil || len(list) != 1 || list[0].ID != "a" {
		t.Errorf("wires after Keep: %+v, %v", list, err)
	}
	if err := n.SetPolicies(t.Context(), joint(t, "a", a)); err != nil {
		t.Fatal(err)
	}
	if err := talk(conn); err == nil {
		t.Error("a connection that is not allowed any more goes on")
	}
	// The connection is written down after its ends have gone.
	page, err := n.Traffic(t.Context(), joint(t, "a", a), sandbox.TrafficRequest{Wait: time.Minute})
	if err != nil || len(page.Entries) == 0 {
		t.Errorf("the log: %+v, %v", page, err)
	}
}

// TestKeepStarted: a netd that this daemon has started is not taken for an earlier one's,
// though its first sandbox turned out to have no interface.
func TestKeepStarted(t *testing.T) {
	h, to := newHosts(t), echo(t)
	n := New(h.cfg)
	defer func() { _ = n.Close() }()
	if err := n.Join(t.Context(), joint(t, "none", nil)); !errors.Is(err, engine.ErrNoWire) {
		t.Fatal(err)
	}
	before, _ := h.process(t, "default")
	if err := n.Keep(t.Context()); err != nil {
		t.Fatal(err)
	}
	a := networktest.New(t)
	if err := errors.Join(n.Join(t.Context(), joint(t, "a", a, to)), speaks(t, a, to)); err != nil {
		t.Fatal(err)
	}
	if after, found := h.process(t, "default"); !found || after != before {
		t.Errorf("process %+v, was %+v", after, before)
	}
}

// TestUnneeded: a netd ends when its last sandbox has, and another is there for the
// next; namespaces have netds of their own.
func TestUnneeded(t *testing.T) {
	h, to := newHosts(t), echo(t)
	h.cfg.Idle = time.Millisecond
	n := New(h.cfg)
	defer func() { _ = n.Close() }()
	g, other := networktest.New(t), networktest.New(t)
	at, apart := joint(t, "a", g, to), joint(t, "a", other, to)
	apart.Namespace = "other"
	if err := errors.Join(n.Join(t.Context(), at), n.Join(t.Context(), apart)); err != nil {
		t.Fatal(err)
	}
	mine, _ := h.process(t, "default")
	theirs, _ := h.process(t, "other")
	if mine == theirs {
		t.Error("two namespaces have one netd")
	}
	ns := n.of("default")
	n.Leave(at)
	for {
		ns.mu.Lock()
		running, changed := ns.running, ns.changed
		ns.mu.Unlock()
		if !running {
			break
		}
		<-changed
	}
	if err := n.Join(t.Context(), at); err != nil {
		t.Fatal(err)
	}
	if again, _ := h.process(t, "default"); again == mine {
		t.Error("a netd that nobody needs goes on")
	}
	if err := errors.Join(speaks(t, g, to), speaks(t, other, to)); err != nil {
		t.Error(err)
	}
	if err := n.Join(t.Context(), joint(t, "none", nil)); !errors.Is(err, engine.ErrNoWire) {
		t.Errorf("a sandbox without an interface: %v", err)
	}
	n.Leave(joint(t, "none", nil))
}

// TestCaptureIsInherited: whoever continues from a machine gets its connections reset.
func TestCaptureIsInherited(t *testing.T) {
	h, to := newHosts(t), echo(t)
	n := New(h.cfg)
	defer func() { _ = n.Close() }()
	g := networktest.New(t)
	at := joint(t, "a", g, to)
	if err := n.Join(t.Context(), at); err != nil {
		t.Fatal(err)
	}
	c, err := g.Dial(t.Context(), "tcp", to)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = c.Close() }()
	if err := talk(c); err != nil {
		t.Fatal(err)
	}
	collect := n.Capture(t.Context(), at)
	lineage := collect(t.Context())
	if lineage == nil || len(lineage.Connections) != 1 || lineage.Connections[0].Outside.String() != to {
		t.Fatalf("%+v", lineage)
	}
	// The same guest, as if it were a copy: its network knows nothing of the connection.
	n.Leave(at)
	at.Machine, at.Lineage = "copy", lineage
	if err := n.Join(t.Context(), at); err != nil {
		t.Fatal(err)
	}
	if err := c.SetReadDeadline(time.Now().Add(time.Minute)); err != nil {
		t.Fatal(err)
	}
	if _, err := c.Read(make([]byte, 1)); !errors.Is(err, unix.ECONNRESET) {
		t.Errorf("a reader of an inherited connection: %v", err)
	}
}
