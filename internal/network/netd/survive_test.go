package netd_test

import (
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"path/filepath"
	"runtime"
	"testing"
	"time"

	"agentrun.dev/internal/network/netctl"
	"agentrun.dev/internal/network/netproc"
	"agentrun.dev/internal/network/networktest"
	"golang.org/x/sys/unix"
)

// TestDaemonDies: connections go on while no daemon controls their netd. The next
// daemon finds the netd, lists its wires, and goes on.
func TestDaemonDies(t *testing.T) {
	cfg, jc := config(t)
	first, err := netproc.Start(t.Context(), cfg)
	if err != nil {
		t.Fatal(err)
	}
	c, err := first.Dial(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	server := serve(t, echo)
	g := networktest.New(t)
	running{first, c}.attach(t, g, wireOf("w", rules(server)))
	conn, err := g.Dial(t.Context(), "tcp", server)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = conn.Close() }()
	if err := speak(conn, "before"); err != nil {
		t.Fatal(err)
	}
	if err := errors.Join(c.Close(), first.Leave()); err != nil {
		t.Fatal(err)
	}
	if err := speak(conn, "meanwhile"); err != nil {
		t.Errorf("a connection without a daemon: %v", err)
	}
	if err := cfg.Jail.Sweep(); err != nil { // each daemon does this when it starts
		t.Fatal(err)
	}
	if _, err := netproc.Start(t.Context(), cfg); err == nil {
		t.Error("a second netd was started in a folder that has one")
	}
	found, err := netproc.Find(cfg)
	if err != nil {
		t.Fatal(err)
	}
	next := connected(t, found)
	all, err := next.List(t.Context())
	if err != nil || len(all) != 1 || all[0].ID != "w" || all[0].Counters.Connections != 1 {
		t.Fatalf("the next daemon finds %+v, %v", all, err)
	}
	if err := next.Attach(t.Context(), wireOf("w", rules(server)), g.Wire()); !errors.Is(err, netctl.ErrExists) {
		t.Errorf("a wire that is attached: %v", err)
	}
	if err := speak(conn, "after"); err != nil {
		t.Errorf("a connection of the earlier daemon: %v", err)
	}
	if err := next.Detach(t.Context(), "w"); err != nil {
		t.Fatal(err)
	}
	if err := next.Shutdown(t.Context()); err != nil {
		t.Fatal(err)
	}
	<-found.Done()
	if left := leftovers(t, jc); len(left) > 0 {
		t.Errorf("left: %q", left)
	}
	if _, err := netproc.Find(cfg); !errors.Is(err, netproc.ErrNone) {
		t.Errorf("one that has ended is found: %v", err)
	}
	if err := netproc.Remove(t.Context(), cfg); err != nil {
		t.Error(err)
	}
	if _, err := os.Stat(cfg.Folder); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("the folder is still there: %v", err)
	}
}

// kills is how often TestKilled kills.
const kills = 20

// TestKilled: a netd is killed in the middle of transfers, repeatedly. Each time
// another netd serves the same wires, and the dead one leaves nothing behind.
func TestKilled(t *testing.T) {
	cfg, jc := config(t)
	server := serve(t, echo)
	guests := []*networktest.Guest{networktest.New(t), networktest.New(t)}
	descriptors, goroutines := 0, 0
	var slowest time.Duration
	for round := range kills {
		begin := time.Now()
		p, err := netproc.Start(t.Context(), cfg)
		if err != nil {
			t.Fatal(err)
		}
		c, err := p.Dial(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		for i, g := range guests {
			running{p, c}.attach(t, g, wireOf(wireID(i), rules(server)))
			if err := reach(t.Context(), g, server, "hello"); err != nil {
				t.Fatalf("round %d: %v", round, err)
			}
		}
		slowest = max(slowest, time.Since(begin))
		flowing, broken := transfers(t, guests, server)
		<-flowing
		if err := unix.Kill(p.PID(), unix.SIGKILL); err != nil {
			t.Fatal(err)
		}
		<-p.Done()
		<-c.Done()
		if _, err := c.List(t.Context()); !errors.Is(err, netctl.ErrBroken) {
			t.Errorf("a netd that was killed: %v", err)
		}
		if left := leftovers(t, jc); len(left) > 0 {
			t.Fatalf("round %d has left %q", round, left)
		}
		broken()
		// The first rounds open the files that are opened once.
		if round == 1 {
			descriptors, goroutines = open(t), runtime.NumGoroutine()
		}
	}
	t.Logf("after a kill, a new netd served both wires within %v at most", slowest)
	settle(t, "descriptors", descriptors, func() int { return open(t) })
	settle(t, "goroutines", goroutines, runtime.NumGoroutine)
}

// settle checks that a count does not exceed its earlier value. Some of the counted
// things end a moment later.
func settle(t *testing.T, what string, before int, count func() int) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	for count() > before {
		if ctx.Err() != nil {
			t.Errorf("%d %s, %d before", count(), what, before)
			return
		}
		runtime.Gosched()
	}
}

func open(t *testing.T) int {
	t.Helper()
	all, err := os.ReadDir("/proc/self/fd")
	if err != nil {
		t.Fatal(err)
	}
	return len(all)
}

// transfers starts an endless transfer in each guest. flowing is closed once bytes
// have come back in all of them. stop ends the transfers from inside, because a dead
// netd sends no RST.
func transfers(t *testing.T, guests []*networktest.Guest, server string) (flowing <-chan struct{}, stop func()) {
	t.Helper()
	all := make(chan struct{}, len(guests))
	var conns []net.Conn
	done := make(chan struct{}, 2*len(guests))
	for _, g := range guests {
		c, err := g.Dial(t.Context(), "tcp", server)
		if err != nil {
			t.Fatal(err)
		}
		conns = append(conns, c)
		go func() {
			b := make([]byte, 64<<10)
			for {
				if _, err := c.Write(b); err != nil {
					done <- struct{}{}
					return
				}
			}
		}()
		go func() {
			if _, err := io.CopyN(io.Discard, c, 1<<20); err == nil {
				all <- struct{}{}
			}
			_, _ = io.Copy(io.Discard, c)
			done <- struct{}{}
		}()
	}
	come := make(chan struct{})
	go func() {
		for range guests {
			<-all
		}
		close(come)
	}()
	return come, func() {
		for _, c := range conns {
			_ = c.Close() // its reader and writer return
		}
		for range cap(done) {
			<-done
		}
	}
}

// TestWires: many wires with the same address on one netd are all connected at once,
// and no byte goes to the wrong one.
func TestWires(t *testing.T) {
	wires := 500
	if testing.Short() {
		wires = 50
	}
	cfg, _ := config(t)
	p := start(t, cfg)
	server := serve(t, echo)
	guests := make([]*networktest.Guest, wires)
	idle := memory(t, p.PID())
	for i := range guests {
		guests[i] = networktest.New(t)
		guests[i].KnowGateway(t)
		p.attach(t, guests[i], wireOf(wireID(i), rules(server)))
	}
	attached := memory(t, p.PID())
	conns := make([]net.Conn, wires)
	defer func() {
		for _, c := range conns {
			if c != nil {
				_ = c.Close()
			}
		}
	}()
	for i, g := range guests {
		// All connections use the same port, too, so only the wire distinguishes
		// them.
		err := g.Run(func() (err error) {
			conns[i], err = (&net.Dialer{LocalAddr: &net.TCPAddr{Port: 40000}}).DialContext(t.Context(), "tcp", server)
			return err
		})
		if err != nil {
			t.Fatalf("wire %d: %v\n%s%s", i, err, p.state(t, wireID(i)), g.State())
		}
	}
	for i, c := range conns {
		if err := speak(c, fmt.Sprintf("%x", sha256.Sum256([]byte(fmt.Sprint(i))))); err != nil {
			why := ""
			if !t.Failed() { // one message is enough
				why = p.state(t, wireID(i)) + guests[i].State()
			}
			t.Errorf("wire %d: %v\n%s", i, err, why)
		}
	}
	all, err := p.List(t.Context())
	if err != nil || len(all) != wires {
		t.Fatalf("%d wires, %v", len(all), err)
	}
	for _, w := range all {
		if w.Counters.Connections != 1 {
			t.Errorf("%s has %d connections", w.ID, w.Counters.Connections)
		}
	}
	connected := memory(t, p.PID())
	t.Logf("%d wires: %d KiB of memory before, %.1f KiB more for each attached, %.1f KiB more for each connected",
		wires, idle>>10, per(attached-idle, wires), per(connected-attached, wires))
}

func wireID(i int) netctl.ID { return netctl.ID(fmt.Sprint("wire-", i)) }

// state describes a wire as netd knows it, for the message of a test in which bytes
// did not arrive.
func (r running) state(t *testing.T, id netctl.ID) string {
	t.Helper()
	all, err := r.List(t.Context())
	if err != nil {
		return err.Error() + "\n"
	}
	page, err := r.Log(t.Context(), netctl.Log{Wire: id, Open: true})
	if err != nil {
		return err.Error() + "\n"
	}
	for _, w := range all {
		if w.ID == id {
			return fmt.Sprintf("netd: %+v\nopen: %+v\nlog: %+v\n", w.Counters, page.Open, page.Entries)
		}
	}
	return fmt.Sprintf("netd has no %s\n", id)
}

func per(bytes, wires int) float64 { return float64(bytes) / 1024 / float64(wires) }

// memory is the resident memory of a process, without shared pages, in bytes.
func memory(t *testing.T, pid int) int {
	t.Helper()
	b, err := os.ReadFile(filepath.Join("/proc", fmt.Sprint(pid), "statm"))
	if err != nil {
		t.Fatal(err)
	}
	var size, resident, shared int
	if _, err := fmt.Sscan(string(b), &size, &resident, &shared); err != nil {
		t.Fatal(err)
	}
	return (resident - shared) * os.Getpagesize()
}
