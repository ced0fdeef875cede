package netd_test

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"math/rand/v2"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"testing"
	"time"

	"agentrun.dev/internal/network/netctl"
	"agentrun.dev/internal/network/netd"
	"agentrun.dev/internal/network/networktest"
	"golang.org/x/sys/unix"
)

// nobody owns no address.
type nobody struct{}

func (nobody) Owns(netip.Addr) (bool, string, error) { return false, "", nil }

// here runs a server in the test's own process. It returns the path of its socket,
// and a channel for the result of Serve.
func here(t *testing.T, patience time.Duration) (path string, served <-chan error) {
	t.Helper()
	dir := t.TempDir()
	path = filepath.Join(dir, "control")
	file, err := netctl.Listen(path)
	if err != nil {
		t.Fatal(err)
	}
	l, err := net.FileListener(file)
	if err := errors.Join(err, file.Close()); err != nil {
		t.Fatal(err)
	}
	s, err := netd.New(netd.Config{Host: nobody{}, Version: "test", Patience: patience, Log: slog.New(slog.DiscardHandler)})
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	done, told := make(chan struct{}), make(chan error, 1)
	go func() {
		told <- s.Serve(ctx, l.(*net.UnixListener))
		close(done)
	}()
	t.Cleanup(func() {
		cancel()
		<-done
	})
	return path, told
}

func dial(t *testing.T, path string) *netctl.Client {
	t.Helper()
	c, err := netctl.Dial(t.Context(), path)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = c.Close() })
	return c
}

// hereWith runs a server, and returns it with a parent. A server with little patience
// may end before its parent comes; then hereWith starts another one with more.
func hereWith(t *testing.T, patience time.Duration) (path string, served <-chan error, c *netctl.Client, patient time.Duration) {
	t.Helper()
	for ; ; patience *= 2 {
		path, served = here(t, patience)
		c, err := netctl.Dial(t.Context(), path)
		if err == nil {
			t.Cleanup(func() { _ = c.Close() })
			return path, served, c, patience
		}
		if err := errors.Join(err, <-served); patience > time.Minute {
			t.Fatal(err)
		}
	}
}

// TestAlone: a server without wires and parents ends by itself. A server with a wire
// does not.
func TestAlone(t *testing.T) {
	_, served := here(t, time.Millisecond)
	if err := <-served; err != nil {
		t.Errorf("a server to which nobody has come: %v", err)
	}
	path, served, c, patience := hereWith(t, 50*time.Millisecond)
	_, far := networktest.NewWire(t)
	if err := c.Attach(t.Context(), wireOf("w", rules()), far); err != nil {
		t.Fatal(err)
	}
	if err := c.Close(); err != nil {
		t.Fatal(err)
	}
	select {
	case err := <-served:
		t.Fatalf("it ended although it has a wire: %v", err)
	case <-time.After(4 * patience): // longer than its patience without a wire
	}
	c = dial(t, path)
	if err := c.Detach(t.Context(), "w"); err != nil {
		t.Fatal(err)
	}
	if err := c.Close(); err != nil {
		t.Fatal(err)
	}
	if err := <-served; err != nil {
		t.Error(err)
	}
}

// TestOrphan: a server without a parent drops the wires of sandboxes that have ended.
// Then it has no wires either, and ends.
func TestOrphan(t *testing.T) {
	path, served, c, _ := hereWith(t, 10*time.Millisecond)
	near, far := networktest.NewWire(t)
	gone, wire := networktest.NewWire(t)
	for id, end := range map[netctl.ID]*os.File{"lives": far, "ended": wire} {
		if err := c.Attach(t.Context(), wireOf(id, rules()), end); err != nil {
			t.Fatal(err)
		}
	}
	if err := errors.Join(gone.Close(), c.Close()); err != nil {
		t.Fatal(err)
	}
	// The server's check sends a frame to a living sandbox.
	if err := near.SetReadDeadline(time.Now().Add(time.Minute)); err != nil {
		t.Fatal(err)
	}
	if _, err := near.Read(make([]byte, 1500)); err != nil {
		t.Fatal(err)
	}
	c = dial(t, path)
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	for {
		all, err := c.List(ctx)
		if err != nil {
			t.Fatal(err)
		}
		if len(all) == 1 && all[0].ID == "lives" {
			break
		}
	}
	if err := errors.Join(near.Close(), c.Close()); err != nil {
		t.Fatal(err)
	}
	if err := <-served; err != nil {
		t.Error(err)
	}
}

// as runs f on a thread with another user id. The thread ends with f.
func as(uid int, f func() error) error {
	result := make(chan error)
	go func() {
		runtime.LockOSThread()
		// The raw call changes only the thread: the process keeps its user id.
		if _, _, errno := unix.RawSyscall(unix.SYS_SETRESUID, ^uintptr(0), uintptr(uid), ^uintptr(0)); errno != 0 {
			result <- errno
			return
		}
		result <- f()
	}()
	return <-result
}

// TestStrangers: a user who is neither root nor the owner is turned away.
func TestStrangers(t *testing.T) {
	path, _ := here(t, time.Hour)
	for dir := path; dir != "/"; dir = filepath.Dir(dir) {
		if strings.HasPrefix(dir, os.TempDir()+"/") {
			if err := os.Chmod(dir, 0o777); err != nil {
				t.Fatal(err)
			}
		}
	}
	err := as(65534, func() error {
		c, err := netctl.Dial(t.Context(), path)
		if err == nil {
			_ = c.Close()
		}
		return err
	})
	if !errors.Is(err, netctl.ErrRefused) || !strings.Contains(err.Error(), "user 65534") {
		t.Errorf("another user: %v", err)
	}
	dial(t, path)
}

// TestHostileParents: the server closes the connection of a parent that sends a
// message that no daemon sends, and serves others. The test runs against a real
// process in its jail, and counts its descriptors.
func TestHostileParents(t *testing.T) {
	cfg, _ := config(t)
	p := start(t, cfg)
	before := opened(t, p.PID())
	frame := func(m netctl.Message) []byte {
		b := netctl.Marshal(m)
		return append(binary.LittleEndian.AppendUint32(nil, uint32(len(b))), b...)
	}
	hello := frame(&netctl.Hello{Protocol: netctl.Protocol})
	rng := rand.New(rand.NewPCG(1, 2))
	noise := make([]byte, 1<<16)
	for i := range noise {
		noise[i] = byte(rng.Uint32())
	}
	for name, said := range map[string][]byte{
		"nothing":             nil,
		"half a size":         {1},
		"a huge size":         {0xff, 0xff, 0xff, 0xff},
		"an empty message":    {0, 0, 0, 0},
		"noise":               noise,
		"HTTP":                []byte("GET / HTTP/1.1\r\nHost: x\r\n\r\n"),
		"no Hello":            frame(&netctl.Simple{Kind: netctl.KindList, ID: 1}),
		"another protocol":    frame(&netctl.Hello{Protocol: 99}),
		"noise after Hello":   append(hello[:len(hello):len(hello)], noise...),
		"two Hellos":          append(hello[:len(hello):len(hello)], hello...),
		"a reply":             append(hello[:len(hello):len(hello)], frame(&netctl.Reply{ID: 1})...),
		"Attach, no wire":     append(hello[:len(hello):len(hello)], frame(&netctl.Attach{ID: 1, Wire: wireOf("w", rules())})...),
		"an unfinished frame": append(hello[:len(hello):len(hello)], 0, 0, 1, 0, byte(netctl.KindAttach), 1),
		"unknown fields":      append(hello[:len(hello):len(hello)], append([]byte{5, 0, 0, 0}, byte(netctl.KindList), 1, 1, 7, 7)...),
	} {
		t.Run(name, func(t *testing.T) {
			c, err := net.Dial("unix", filepath.Join(cfg.Folder, "control"))
			if err != nil {
				t.Fatal(err)
			}
			defer func() { _ = c.Close() }()
			_, _ = c.Write(said) // the server may close the connection before the end
			_ = c.(*net.UnixConn).CloseWrite()
			if err := c.SetReadDeadline(time.Now().Add(time.Minute)); err != nil {
				t.Fatal(err)
			}
			if _, err := io.Copy(io.Discard, c); err != nil && !errors.Is(err, unix.ECONNRESET) {
				t.Errorf("it has not hung up: %v", err)
			}
		})
	}
	t.Run("many who say nothing", func(t *testing.T) {
		for range 100 {
			c, err := net.Dial("unix", filepath.Join(cfg.Folder, "control"))
			if err != nil {
				t.Fatal(err)
			}
			defer func() { _ = c.Close() }()
		}
	})
	if _, err := p.List(t.Context()); err != nil {
		t.Errorf("another parent: %v", err)
	}
	settle(t, "descriptors of netd", before, func() int { return opened(t, p.PID()) })
}

func opened(t *testing.T, pid int) int {
	t.Helper()
	all, err := os.ReadDir(fmt.Sprintf("/proc/%d/fd", pid))
	if err != nil {
		t.Fatal(err)
	}
	return len(all)
}

// TestLineage: a copy of a sandbox learns that the connections of its source are
// gone. The source's connections go on.
func TestLineage(t *testing.T) {
	cfg, _ := config(t)
	p := start(t, cfg)
	server := serve(t, echo)
	g := networktest.New(t)
	p.attach(t, g, wireOf("source", rules(server)))
	kept, err := g.Dial(t.Context(), "tcp", server)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = kept.Close() }()
	mark, err := p.Mark(t.Context(), "source")
	if err != nil {
		t.Fatal(err)
	}
	// A connection that begins and ends during the capture may be in the copy, too.
	if err := reach(t.Context(), g, server, "short"); err != nil {
		t.Fatal(err)
	}
	l, err := p.Collect(t.Context(), "source", mark)
	if err != nil || len(l.Tuples) != 2 {
		t.Fatalf("%+v, %v", l, err)
	}
	if _, err := p.Collect(t.Context(), "source", mark); !errors.Is(err, netctl.ErrInvalid) {
		t.Errorf("a mark that was collected: %v", err)
	}
	if err := speak(kept, "goes on"); err != nil {
		t.Errorf("the source: %v", err)
	}
	// From here on g plays the copy: its kernel has the connection, and it gets
	// another wire.
	if err := p.Detach(t.Context(), "source"); err != nil {
		t.Fatal(err)
	}
	w := wireOf("copy", rules(server))
	w.Lineage = l
	p.attach(t, g, w)
	if err := kept.SetReadDeadline(time.Now().Add(time.Minute)); err != nil {
		t.Fatal(err)
	}
	if _, err := kept.Read(make([]byte, 1)); !errors.Is(err, unix.ECONNRESET) {
		t.Errorf("who only reads from an inherited connection: %v", err)
	}
	if err := reach(t.Context(), g, server, "new"); err != nil {
		t.Errorf("a new connection of the copy: %v", err)
	}
}

// TestPaused: data for a paused sandbox waits, even if the sandbox was attached as
// paused.
func TestPaused(t *testing.T) {
	cfg, _ := config(t)
	p := start(t, cfg)
	server := serve(t, echo)
	g := networktest.New(t)
	w := wireOf("w", rules(server))
	w.Paused = true
	p.attach(t, g, w)
	if all, err := p.List(t.Context()); err != nil || !all[0].Paused {
		t.Errorf("%+v, %v", all, err)
	}
	if err := p.Resume(t.Context(), "w"); err != nil {
		t.Fatal(err)
	}
	c, err := g.Dial(t.Context(), "tcp", server)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = c.Close() }()
	if err := p.Pause(t.Context(), "w"); err != nil {
		t.Fatal(err)
	}
	if all, err := p.List(t.Context()); err != nil || !all[0].Paused {
		t.Errorf("%+v, %v", all, err)
	}
	if err := p.Resume(t.Context(), "w"); err != nil {
		t.Fatal(err)
	}
	if err := speak(c, "after the pause"); err != nil {
		t.Error(err)
	}
}

// TestIdleWire: an idle wire takes at most 4 KiB of a netd's memory.
func TestIdleWire(t *testing.T) {
	path, _ := here(t, time.Hour)
	c := dial(t, path)
	const wires = 500
	ends := make([]*os.File, wires)
	for i := range ends {
		_, ends[i] = networktest.NewWire(t)
	}
	heap := func() uint64 {
		var m runtime.MemStats
		runtime.GC()
		runtime.GC() // collects the memory that finalizers had kept
		runtime.ReadMemStats(&m)
		return m.HeapAlloc + m.StackInuse
	}
	before := heap()
	for i, far := range ends {
		if err := c.Attach(t.Context(), wireOf(netctl.ID(fmt.Sprint("wire-", i)), rules("api.example.com:443", "*.example.org:443")), far); err != nil {
			t.Fatal(err)
		}
	}
	each := (float64(heap()) - float64(before)) / 1024 / wires
	t.Logf("%.2f KiB for each of %d idle wires", each, wires)
	if each > 4 {
		t.Errorf("%.2f KiB for each idle wire", each)
	}
}
