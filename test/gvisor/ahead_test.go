package gvisor

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"agentrun.dev/internal/engine"
	"agentrun.dev/internal/engine/enginetest"
	"agentrun.dev/internal/engine/gvisor"
	"agentrun.dev/internal/network/wire"
	"agentrun.dev/internal/storage/snapshot"
	"golang.org/x/sys/unix"
)

// aheadEnv names the snapshot for which a process makes a sandbox ahead.
const aheadEnv = "AGENTRUN_TEST_AHEAD"

// makeAhead does nothing unless aheadEnv is set. Then it makes this process the
// parent of a fork and of a sandbox made ahead, and waits to be killed.
func makeAhead() {
	path := os.Getenv(aheadEnv)
	if path == "" {
		return
	}
	cfg := config(os.Getenv(dirEnv))
	cfg.Precreate = 1
	e, err := gvisor.New(cfg)
	var snap *snapshot.Snapshot
	if err == nil {
		snap, err = snapshot.Open(path)
	}
	if err == nil {
		_, err = e.Fork(context.Background(), snap, engine.ForkOptions{})
	}
	if err == nil {
		err = e.Precreated(context.Background())
	}
	fmt.Println(err)
	select {}
}

// helpersOf lists the helpers that a process has started.
func helpersOf(t *testing.T, parent int) (list []int) {
	t.Helper()
	tasks, err := filepath.Glob("/proc/" + itoa(parent) + "/task/*/children")
	if err != nil || len(tasks) == 0 {
		t.Fatal(tasks, err)
	}
	for _, path := range tasks {
		b, _ := os.ReadFile(path) // a thread may have ended
		for _, word := range strings.Fields(string(b)) {
			name, _ := os.ReadFile("/proc/" + word + "/comm")
			if pid, err := strconv.Atoi(word); err == nil && strings.HasPrefix(string(name), "gvisor-helper") {
				list = append(list, pid)
			}
		}
	}
	return list
}

func pidOf(t *testing.T, sb engine.Sandbox) int {
	t.Helper()
	id, err := gvisor.Identify(sb)
	if err != nil {
		t.Fatal(err)
	}
	return id.PID
}

// TestMadeAhead: a sandbox made ahead has started to read the checkpoint, but no
// program of it has run. The next fork gets that sandbox, with or without a network
// interface.
func TestMadeAhead(t *testing.T) {
	t.Run("loopback", func(t *testing.T) { testMadeAhead(t, nil) })
	t.Run("interface", func(t *testing.T) {
		testMadeAhead(t, &engine.Network{MAC: [6]byte{2, 0, 0, 0, 0, 1}, MTU: 1500, Address: netip.MustParsePrefix("10.0.2.15/24")})
	})
}

func testMadeAhead(t *testing.T, network *engine.Network) {
	dir := enginetest.TempDir(t)
	cfg := config(dir)
	cfg.Precreate = 1
	e := newEngine(t, cfg)
	s := spec(t)
	s.Network = network
	source, err := e.Boot(t.Context(), s)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = source.Close() })
	sh(t, source, "echo the source > /tmp/mine")
	snap := freeze(t, source)
	fork := func() engine.Sandbox {
		sb, err := e.Fork(t.Context(), snap, engine.ForkOptions{})
		if err == nil {
			t.Cleanup(func() { _ = sb.Close() })
			err = e.Precreated(t.Context())
		}
		if err != nil {
			t.Fatal(err)
		}
		return sb
	}
	known := []engine.Sandbox{source, fork()}
	for range 3 {
		last := known[len(known)-1]
		waits := slices.DeleteFunc(helpersOf(t, os.Getpid()), func(pid int) bool {
			return slices.ContainsFunc(known, func(sb engine.Sandbox) bool { return pidOf(t, sb) == pid })
		})
		if len(waits) != 1 {
			t.Fatalf("%d sandboxes wait", len(waits))
		}
		// A sandbox that has started to read has this folder for the
		// checkpoint's files.
		if begun, err := filepath.Glob(filepath.Join(dir, "run", "*", "restore")); err != nil || len(begun) != len(known) {
			t.Errorf("%d of %d sandboxes have begun to read: %v", len(begun), len(known), err)
		}
		waiting, err := gvisor.ReadParts(waits[0])
		if err != nil {
			t.Fatal(err)
		}
		running, err := gvisor.ReadParts(pidOf(t, last))
		if err != nil {
			t.Fatal(err)
		}
		if waiting.Programs > mib || running.Programs < 2*mib {
			t.Errorf("programs have %d bytes in a sandbox that waits, %d in one that runs", waiting.Programs, running.Programs)
		}
		sb := fork()
		if got := pidOf(t, sb); got != waits[0] {
			t.Errorf("the fork is process %d, not %d, which waited", got, waits[0])
		}
		if got := sh(t, sb, "cat /tmp/mine"); got != "the source" {
			t.Errorf("it has %q", got)
		}
		if a, b := sh(t, last, "hostname"), sh(t, sb, "hostname"); a == b {
			t.Errorf("two forks are called %q", a)
		}
		sh(t, sb, "echo the fork > /tmp/mine")
		known = append(known, sb)
	}
}

// TestMadeAheadHasLinks: a sandbox that waits for a fork has made its network links,
// which read from the wire, so that the fork need not make them.
func TestMadeAheadHasLinks(t *testing.T) {
	cfg := config(enginetest.TempDir(t))
	cfg.Precreate = 1
	e := newEngine(t, cfg)
	s := spec(t)
	s.Network = &engine.Network{MAC: [6]byte{2, 0, 0, 0, 0, 1}, MTU: 1500, Address: netip.MustParsePrefix("10.0.2.15/24")}
	source, err := e.Boot(t.Context(), s)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = source.Close() })
	snap := freeze(t, source)
	first, err := e.Fork(t.Context(), snap, engine.ForkOptions{})
	if err == nil {
		t.Cleanup(func() { _ = first.Close() })
		err = e.Precreated(t.Context())
	}
	if err != nil {
		t.Fatal(err)
	}
	waits := slices.DeleteFunc(helpersOf(t, os.Getpid()), func(pid int) bool {
		return pid == pidOf(t, source) || pid == pidOf(t, first)
	})
	if len(waits) != 1 {
		t.Fatalf("%d sandboxes wait", len(waits))
	}
	// Both ends are filled. One of them becomes writable again, because the links read from it.
	var ends []unix.PollFd
	frame := make([]byte, wire.HeaderLen+1500)
	for _, end := range wireOf(t, waits[0]) {
		for range 2000 {
			if err = unix.Send(end, frame, unix.MSG_DONTWAIT); err != nil {
				break
			}
		}
		if err != nil && !errors.Is(err, unix.EAGAIN) {
			t.Fatal(err)
		}
		ends = append(ends, unix.PollFd{Fd: int32(end), Events: unix.POLLOUT})
	}
	if n, err := unix.Poll(ends, 20_000); n != 1 || err != nil {
		t.Fatalf("%d ends of the wire of a sandbox that waits are read, of %d: %v", n, len(ends), err)
	}
	for _, end := range ends { // else the fork's own frames would wait behind these
		for err = nil; err == nil; {
			_, _, err = unix.Recvfrom(int(end.Fd), frame, unix.MSG_DONTWAIT)
		}
	}
	sb, err := e.Fork(t.Context(), snap, engine.ForkOptions{})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = sb.Close() })
	if got := sh(t, sb, "grep -c eth0: /proc/net/dev"); got != "1" {
		t.Errorf("the fork has %s interfaces", got)
	}
}

// wireOf returns copies of a helper's descriptors for the ends of a wire: its
// datagram sockets.
func wireOf(t *testing.T, helper int) (ends []int) {
	t.Helper()
	pid, err := unix.PidfdOpen(helper, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = unix.Close(pid) }()
	fds, err := os.ReadDir("/proc/" + itoa(helper) + "/fd")
	if err != nil {
		t.Fatal(err)
	}
	for _, entry := range fds {
		number, err := strconv.Atoi(entry.Name())
		if err != nil {
			t.Fatal(err)
		}
		fd, err := unix.PidfdGetfd(pid, number, 0)
		if err != nil {
			continue // closed meanwhile
		}
		if kind, err := unix.GetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_TYPE); err != nil || kind != unix.SOCK_DGRAM {
			_ = unix.Close(fd) // a copy of the control socket would keep the helper alive
			continue
		}
		t.Cleanup(func() { _ = unix.Close(fd) })
		ends = append(ends, fd)
	}
	return ends
}

// TestMadeAheadForAnother: sandboxes are made ahead for the snapshot that was
// forked last. A fork of another snapshot still continues from its own.
func TestMadeAheadForAnother(t *testing.T) {
	cfg := config(enginetest.TempDir(t))
	cfg.Precreate = 1
	e := newEngine(t, cfg)
	source := boot(t, e)
	var snaps []*snapshot.Snapshot
	for i := range 2 {
		sh(t, source, "echo "+itoa(i)+" > /tmp/mine")
		snaps = append(snaps, freeze(t, source))
	}
	for _, i := range []int{0, 0, 1, 1, 0} {
		sb, err := e.Fork(t.Context(), snaps[i], engine.ForkOptions{})
		if err != nil {
			t.Fatal(err)
		}
		if got := sh(t, sb, "cat /tmp/mine"); got != itoa(i) {
			t.Errorf("a fork of snapshot %d has %q", i, got)
		}
		if err := errors.Join(e.Precreated(t.Context()), sb.Close()); err != nil {
			t.Fatal(err)
		}
	}
}

// TestMadeAheadEnds: sandboxes made ahead end with their parent, even while they
// read the checkpoint.
func TestMadeAheadEnds(t *testing.T) {
	dir := enginetest.TempDir(t)
	path := filepath.Join(t.TempDir(), "snapshot")
	snap, err := boot(t, newEngine(t, config(dir))).Snapshot(t.Context(), path)
	if err == nil {
		err = snap.Close()
	}
	if err != nil {
		t.Fatal(err)
	}
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	cmd := exec.Command(self)
	cmd.Env = append(os.Environ(), dirEnv+"="+dir, aheadEnv+"="+path)
	out, err := cmd.StdoutPipe()
	if err == nil {
		err = cmd.Start()
	}
	if err != nil {
		t.Fatal(err)
	}
	if line, err := bufio.NewReader(out).ReadString('\n'); line != "<nil>\n" {
		t.Errorf("%s%v", line, err)
	}
	held := enginetest.Hold(t, helpersOf(t, cmd.Process.Pid))
	if len(held) != 2 {
		t.Errorf("it has %d helpers: a fork and one that waits", len(held))
	}
	if err := cmd.Process.Kill(); err != nil {
		t.Fatal(err)
	}
	_ = cmd.Wait() // it was killed
	ended := make(chan error, 1)
	go func() {
		var err error
		for _, h := range held {
			err = errors.Join(err, h.Wait(), h.Close())
		}
		ended <- err
	}()
	select {
	case err := <-ended:
		if err != nil {
			t.Error(err)
		}
	case <-time.After(patience):
		for _, h := range held {
			h.Kill()
		}
		t.Fatal("its helpers live on")
	}
}
