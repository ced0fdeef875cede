package netd_test

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"sync"
	"testing"
	"time"

	"agentrun.dev/internal/host/jail"
	"agentrun.dev/internal/host/jail/jailtest"
	"agentrun.dev/internal/network/netctl"
	"agentrun.dev/internal/network/netproc"
	"agentrun.dev/internal/network/networktest"
	"golang.org/x/sys/unix"
)

// world is the address of the tests' servers, on the loopback of a network that has
// no other interface.
var world = netip.MustParseAddr("198.51.100.7")

func TestMain(m *testing.M) { networktest.Main(m, world) }

// config is the configuration of a netd in a jail of its own, so that tests do not
// affect each other.
func config(t testing.TB) (netproc.Config, jail.Config) {
	t.Helper()
	jc := jail.Config{Folder: t.TempDir(), Cgroup: jailtest.Cgroup(t)}
	j, err := netproc.NewJail(jc)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := j.Close(); err != nil {
			t.Error(err)
		}
	})
	return netproc.Config{Folder: filepath.Join(t.TempDir(), "netd"), Jail: j}, jc
}

// leftovers lists the user ids and cgroups of processes.
func leftovers(t testing.TB, jc jail.Config) (left []string) {
	t.Helper()
	entries, err := os.ReadDir(jc.Folder)
	if err != nil {
		t.Fatal(err)
	}
	for _, e := range entries {
		left = append(left, "user id "+e.Name())
	}
	return append(left, jailtest.Groups(t, jc.Cgroup, "vm-*")...)
}

// running is a netd with a client.
type running struct {
	*netproc.Process
	*netctl.Client
}

func start(t testing.TB, cfg netproc.Config) running {
	t.Helper()
	p, err := netproc.Start(t.Context(), cfg)
	if err != nil {
		t.Fatal(err)
	}
	return connected(t, p)
}

func connected(t testing.TB, p *netproc.Process) running {
	t.Helper()
	c, err := p.Dial(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		_ = c.Close()
		ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
		defer cancel()
		if err := p.Kill(ctx); err != nil {
			t.Error(err)
		}
	})
	return running{p, c}
}

// rules allow only the given rules.
func rules(allow ...string) netctl.Rules {
	b, err := json.Marshal([]map[string]any{{"egress": "deny", "allow": allow}})
	if err != nil {
		panic(err) // strings
	}
	return netctl.Rules{Policies: string(b)}
}

func wireOf(id netctl.ID, r netctl.Rules) netctl.Wire {
	return netctl.Wire{
		ID: id, MAC: networktest.MAC, GatewayMAC: networktest.GatewayMAC, MTU: networktest.MTU, Rules: r,
		Address: networktest.Address, Gateway: networktest.Gateway, Address6: networktest.Address6, Gateway6: networktest.Gateway6,
	}
}

func (r running) attach(t testing.TB, g *networktest.Guest, w netctl.Wire) {
	t.Helper()
	if err := r.Attach(t.Context(), w, g.Wire()); err != nil {
		t.Fatal(err)
	}
}

// serve accepts connections at the world's address, and returns its address and port.
func serve(t testing.TB, each func(net.Conn)) string {
	t.Helper()
	l, err := net.Listen("tcp", netip.AddrPortFrom(world, 0).String())
	if err != nil {
		t.Fatal(err)
	}
	var all sync.WaitGroup
	var mu sync.Mutex // protects open
	open := map[net.Conn]bool{}
	all.Go(func() {
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			mu.Lock()
			open[c] = true
			mu.Unlock()
			all.Go(func() {
				each(c)
				_ = c.Close()
				mu.Lock()
				delete(open, c)
				mu.Unlock()
			})
		}
	})
	t.Cleanup(func() {
		_ = l.Close()
		mu.Lock()
		for c := range open {
			_ = c.Close()
		}
		mu.Unlock()
		all.Wait()
	})
	return l.Addr().String()
}

func echo(c net.Conn) { _, _ = io.Copy(c, c) }

// speak sends a text through a connection that echoes it.
func speak(c net.Conn, text string) error {
	if err := c.SetDeadline(time.Now().Add(time.Minute)); err != nil {
		return err
	}
	if _, err := io.WriteString(c, text); err != nil {
		return err
	}
	b := make([]byte, len(text))
	if _, err := io.ReadFull(c, b); err != nil {
		return err
	}
	if string(b) != text {
		return fmt.Errorf("%q came back as %q", text, b)
	}
	return nil
}

// reach connects from a guest, and echoes text.
func reach(ctx context.Context, g *networktest.Guest, address, text string) error {
	c, err := g.Dial(ctx, "tcp", address)
	if err != nil {
		return err
	}
	return errors.Join(speak(c, text), c.Close())
}

// TestServe: the work of a netd in its jail for one sandbox.
func TestServe(t *testing.T) {
	cfg, jc := config(t)
	p := start(t, cfg)
	server, other := serve(t, echo), serve(t, echo)
	g := networktest.New(t)
	p.attach(t, g, wireOf("w", rules(server)))
	c, err := g.Dial(t.Context(), "tcp", server)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = c.Close() }()
	if err := speak(c, "hello"); err != nil {
		t.Fatal(err)
	}
	if err := reach(t.Context(), g, other, "hello"); !errors.Is(err, unix.ECONNREFUSED) {
		t.Errorf("what no rule allows: %v", err)
	}
	// The next entry of the log is the refusal. The connection is open.
	page, err := p.Log(t.Context(), netctl.Log{Wire: "w", Wait: netctl.MaxWait, Open: true})
	if err != nil || len(page.Entries) != 1 || page.Entries[0].Outcome != "refused" || page.Entries[0].Address.String() != other || page.Next != 2 {
		t.Fatalf("the log has %+v, %v", page, err)
	}
	if len(page.Open) != 1 || page.Open[0].Address.String() != server || page.Open[0].Rule != server {
		t.Errorf("open are %+v", page.Open)
	}
	// Bytes count once they have been passed on.
	for deadline := time.Now().Add(time.Minute); len(page.Open) == 1 && page.Open[0].Received != 5; {
		if page, err = p.Log(t.Context(), netctl.Log{Wire: "w", Open: true}); err != nil || time.Now().After(deadline) {
			t.Fatalf("open are %+v, %v", page.Open, err)
		}
	}
	// A reader that follows the log learns of the connection's end, which a new
	// policy causes.
	followed := make(chan netctl.LogPage, 1)
	go func() {
		page, err := p.Log(t.Context(), netctl.Log{Wire: "w", From: page.Next, Wait: netctl.MaxWait})
		if err != nil {
			t.Error(err)
		}
		followed <- page
	}()
	if err := p.SetPolicy(t.Context(), "w", rules(other)); err != nil {
		t.Fatal(err)
	}
	if err := speak(c, "more"); !errors.Is(err, unix.ECONNRESET) && !errors.Is(err, unix.EPIPE) {
		t.Errorf("a connection that is not allowed any more: %v", err)
	}
	if page := <-followed; len(page.Entries) != 1 || page.Entries[0].Outcome != "cut" || page.Entries[0].Seq != 2 {
		t.Errorf("the log goes on with %+v", page)
	}
	if err := reach(t.Context(), g, other, "hello"); err != nil {
		t.Errorf("what the new policy allows: %v", err)
	}
	all, err := p.List(t.Context())
	if err != nil || len(all) != 1 || all[0].ID != "w" || all[0].Counters.Opened != 2 || all[0].Counters.Refused != 1 || all[0].Counters.FramesIn == 0 {
		t.Errorf("the list is %+v, %v", all, err)
	}
	stats, err := p.Stats(t.Context())
	if err != nil || stats.Wires != 1 || !counted(stats, "address", 2) {
		t.Errorf("the statistics are %+v, %v", stats, err)
	}
	if err := p.Detach(t.Context(), "w"); err != nil {
		t.Fatal(err)
	}
	if err := p.Detach(t.Context(), "w"); !errors.Is(err, netctl.ErrNotFound) {
		t.Errorf("a wire that is gone: %v", err)
	}
	if err := p.Shutdown(t.Context()); err != nil {
		t.Fatal(err)
	}
	<-p.Process.Done()
	if left := leftovers(t, jc); len(left) > 0 {
		t.Errorf("left: %q", left)
	}
	if words, err := os.ReadFile(filepath.Join(cfg.Folder, "stderr")); err != nil || len(words) > 0 {
		t.Errorf("it said %q, %v", words, err)
	}
}

func counted(s netctl.Stats, kind string, connections uint64) bool {
	for _, k := range s.Kinds {
		if k.Kind == kind {
			return k.Connections == connections
		}
	}
	return false
}

// TestRefusedRequests: impossible requests are refused with the reason, and leave
// nothing behind.
func TestRefusedRequests(t *testing.T) {
	cfg, _ := config(t)
	p := start(t, cfg)
	g := networktest.New(t)
	good := wireOf("w", rules())
	for name, change := range map[string]func(*netctl.Wire){
		"no id":             func(w *netctl.Wire) { w.ID = "" },
		"no policy":         func(w *netctl.Wire) { w.Rules.Policies = "" },
		"a policy of lies":  func(w *netctl.Wire) { w.Rules.Policies = `[{"egress":"maybe"}]` },
		"an unknown field":  func(w *netctl.Wire) { w.Rules.Policies = `[{"ingress":"deny"}]` },
		"a foreign address": func(w *netctl.Wire) { w.Address = netip.MustParseAddr("192.0.2.1") },
		"no address":        func(w *netctl.Wire) { w.Address = netip.Addr{} },
		"no MTU":            func(w *netctl.Wire) { w.MTU = 0 },
	} {
		w := good
		change(&w)
		if err := p.Attach(t.Context(), w, g.Wire()); !errors.Is(err, netctl.ErrInvalid) {
			t.Errorf("%s: %v", name, err)
		}
	}
	if err := p.Attach(t.Context(), good, os.Stdin); !errors.Is(err, netctl.ErrInvalid) {
		t.Errorf("a wire that is no socket: %v", err)
	}
	p.attach(t, g, good)
	if err := p.Attach(t.Context(), good, g.Wire()); !errors.Is(err, netctl.ErrExists) {
		t.Errorf("an id that is taken: %v", err)
	}
	if err := p.SetPolicy(t.Context(), "w", netctl.Rules{Policies: "{}"}); !errors.Is(err, netctl.ErrInvalid) {
		t.Errorf("a policy that is no list: %v", err)
	}
	if err := p.Configure(t.Context(), netctl.Settings{InternalDomains: []netctl.InternalDomain{{Domain: "corp."}}}); !errors.Is(err, netctl.ErrInvalid) {
		t.Errorf("an internal domain without an upstream: %v", err)
	}
	if _, err := p.Collect(t.Context(), "w", 7); !errors.Is(err, netctl.ErrInvalid) {
		t.Errorf("a mark that nobody has made: %v", err)
	}
	for what, err := range map[string]error{
		"pause": p.Pause(t.Context(), "none"), "resume": p.Resume(t.Context(), "none"),
		"policy": p.SetPolicy(t.Context(), "none", rules()),
	} {
		if !errors.Is(err, netctl.ErrNotFound) {
			t.Errorf("%s of a wire that is not there: %v", what, err)
		}
	}
	if all, err := p.List(t.Context()); err != nil || len(all) != 1 {
		t.Errorf("%d wires, %v", len(all), err)
	}
}
