package gvisor

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"agentrun.dev/internal/engine"
	"agentrun.dev/internal/engine/enginetest"
	"agentrun.dev/internal/engine/gvisor"
	"agentrun.dev/internal/engine/microvm"
	"agentrun.dev/internal/guest/guestrpc"
	"agentrun.dev/internal/host/assets"
	"agentrun.dev/internal/storage/seal"
	"agentrun.dev/internal/storage/snapshot"
)

// patience is the time after which a test counts as stuck.
const patience = 3 * time.Minute

// sh runs a shell command that must succeed.
func sh(t *testing.T, sb engine.Sandbox, script string) string {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	var out bytes.Buffer
	st, err := sb.Agent().Run(ctx, guestrpc.ExecRequest{Argv: []string{"sh", "-c", script}}, nil, &out, &out)
	if err != nil || st.Code != 0 {
		t.Fatalf("%s: %+v, %v\n%s", script, st, err, out.Bytes())
	}
	return strings.TrimSpace(out.String())
}

func boot(t *testing.T, e *gvisor.Engine) engine.Sandbox {
	t.Helper()
	sb, err := e.Boot(t.Context(), spec(t))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = sb.Close() })
	return sb
}

func freeze(t *testing.T, sb engine.Sandbox) *snapshot.Snapshot {
	t.Helper()
	snap, err := sb.Snapshot(t.Context(), filepath.Join(t.TempDir(), "snapshot"))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = snap.Close() })
	return snap
}

// TestMismatch: another engine, and an engine with another build of the helper,
// refuse a snapshot and say why.
func TestMismatch(t *testing.T) {
	snap := freeze(t, boot(t, newEngine(t, config(enginetest.TempDir(t)))))
	dir := enginetest.TempDir(t)
	other, err := microvm.New(microvm.Config{Resident: filepath.Join(dir, "resident"), Scratch: filepath.Join(dir, "scratch")})
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = other.Close() }()
	if _, err := other.Fork(t.Context(), snap, engine.ForkOptions{}); !errors.Is(err, engine.ErrMismatch) || !strings.Contains(err.Error(), gvisor.Name) {
		t.Errorf("a microVM from it: %v", err)
	}
	// The same program with bytes after its end counts as another build.
	build := t.TempDir()
	for _, a := range []assets.Asset{assets.GVisorHelper, assets.GuestAgent} {
		path, err := assets.Path(a)
		if err != nil {
			t.Fatal(err)
		}
		b, err := os.ReadFile(path)
		if err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(filepath.Join(build, string(a)), append(b, 0), 0o700); err != nil {
			t.Fatal(err)
		}
	}
	t.Setenv(assets.EnvFolder, build)
	another := newEngine(t, config(enginetest.TempDir(t)))
	if _, err := another.Fork(t.Context(), snap, engine.ForkOptions{}); !errors.Is(err, engine.ErrMismatch) || !strings.Contains(err.Error(), "another build of gvisor-helper") {
		t.Errorf("another helper: %v", err)
	}
}

// TestDamaged: pages that do not match the manifest are refused when they are
// loaded.
func TestDamaged(t *testing.T) {
	snap := freeze(t, boot(t, newEngine(t, config(enginetest.TempDir(t)))))
	if err := snap.Verify(t.Context()); err != nil {
		t.Fatal(err)
	}
	f, err := snap.OpenLayer(layerOf(snap))
	if err != nil {
		t.Fatal(err)
	}
	path, err := os.Readlink("/proc/self/fd/" + itoa(int(f.Fd())))
	if err := errors.Join(err, f.Close(), os.Chmod(path, 0o600)); err != nil {
		t.Fatal(err)
	}
	g, err := os.OpenFile(path, os.O_WRONLY, 0)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := g.WriteAt([]byte("damaged"), 4096); err != nil {
		t.Fatal(err)
	}
	if err := g.Close(); err != nil {
		t.Fatal(err)
	}
	fresh := newEngine(t, config(enginetest.TempDir(t))) // it has not loaded the pages yet
	if sb, err := fresh.Fork(t.Context(), snap, engine.ForkOptions{}); err == nil {
		t.Error("a damaged snapshot was forked")
		_ = sb.Close()
	}
	if err := snap.Verify(t.Context()); err == nil {
		t.Error("it was verified")
	}
}

// TestStreamsOpen: the data of an open stream continues byte for byte while the
// sandbox is captured and forked, and the exec exists in the forks, too.
func TestStreamsOpen(t *testing.T) {
	e := newEngine(t, config(enginetest.TempDir(t)))
	sb := boot(t, e)
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	in, feed := io.Pipe()
	out, echoed := io.Pipe()
	ended := make(chan error, 1)
	go func() {
		st, err := sb.Agent().Run(ctx, guestrpc.ExecRequest{ID: "cat", Argv: []string{"cat"}}, in, echoed, nil)
		if err == nil && st.Code != 0 {
			err = errors.New("cat failed")
		}
		ended <- errors.Join(err, echoed.Close())
	}()
	const lines = 30000
	line := strings.Repeat("x", 200) + "\n"
	forked := make(chan struct{})
	go func() {
		for i := range lines {
			if i == lines-1 { // the exec must still run when the test looks for it in the forks
				<-forked
			}
			if _, err := io.WriteString(feed, line); err != nil {
				return
			}
		}
		_ = feed.Close()
	}()
	first := make([]byte, len(line))
	if _, err := io.ReadFull(out, first); err != nil {
		t.Fatal(err)
	}
	for range 2 {
		forks, err := sb.Fork(ctx, make([]engine.ForkOptions, 1))
		if err != nil || forks.Errs[0] != nil {
			t.Fatal(err, forks)
		}
		child := forks.Forks[0]
		execs, err := child.Agent().ListExecs(ctx)
		if err != nil || len(execs) != 1 || execs[0].ID != "cat" || !execs[0].Running {
			t.Errorf("execs of the fork: %+v, %v", execs, err)
		}
		if got := sh(t, child, "echo still; cat /run/agentrun/generation"); got != "still\n1" {
			t.Errorf("the fork says %q", got)
		}
		if err := child.Close(); err != nil {
			t.Error(err)
		}
	}
	close(forked)
	rest, err := io.ReadAll(out)
	if err := errors.Join(err, <-ended); err != nil || len(rest) != (lines-1)*len(line) || strings.Trim(string(rest), "x\n") != "" {
		t.Errorf("%d bytes came back, not %d, %v", len(rest), (lines-1)*len(line), err)
	}
}

// TestChannelIsPrivate: programs in the sandbox reach neither the agent's
// channel nor the host.
func TestChannelIsPrivate(t *testing.T) {
	sb := boot(t, newEngine(t, config(enginetest.TempDir(t))))
	// gVisor shows the host's descriptors as host:[N]. The agent's channel is
	// its descriptor 3. Programs have no such descriptor and cannot open the
	// agent's.
	if got := sh(t, sb, "for f in /proc/$$/fd/*; do readlink $f; done | grep -c host:; readlink /proc/1/fd/3 | cut -d: -f1"); got != "0\nhost" {
		t.Errorf("descriptors of the host in a program, and the agent's third: %q", got)
	}
	if got := sh(t, sb, "(: > /proc/1/fd/3) 2>/dev/null && echo reached || echo refused; (: < /proc/1/fd/3) 2>/dev/null && echo reached || echo refused"); got != "refused\nrefused" {
		t.Errorf("opening the channel: %q", got)
	}
	if got := sh(t, sb, "grep : /proc/net/dev | cut -d: -f1"); got != "lo" {
		t.Errorf("network devices: %q", got)
	}
	// Ports of the host's loopback are not reachable.
	if got := sh(t, sb, "nc -w 2 127.0.0.1 22 </dev/null >/dev/null 2>&1 && echo reached || echo nothing"); got != "nothing" {
		t.Errorf("the host's port 22: %s", got)
	}
	if got := sh(t, sb, "cat /proc/1/comm"); got != "init" {
		t.Errorf("PID 1 is called %q", got)
	}
}

// TestHelperIsLockedDown: all threads of the process beside a sandbox have a
// system call filter, and only the capability to end the sandbox.
func TestHelperIsLockedDown(t *testing.T) {
	e := newEngine(t, config(enginetest.TempDir(t)))
	sb := boot(t, e)
	fork, err := e.Fork(t.Context(), freeze(t, sb), engine.ForkOptions{})
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = fork.Close() }()
	for _, sb := range []engine.Sandbox{sb, fork} {
		id, err := gvisor.Identify(sb)
		if err != nil {
			t.Fatal(err)
		}
		threads, err := filepath.Glob("/proc/" + itoa(id.PID) + "/task/*/status")
		if err != nil || len(threads) == 0 {
			t.Fatal(threads, err)
		}
		for _, path := range threads {
			b, _ := os.ReadFile(path) // a thread may have ended
			for _, want := range []string{"Seccomp:\t2", "NoNewPrivs:\t1", "CapEff:\t0000000000000020"} {
				if len(b) > 0 && !strings.Contains(string(b), want) {
					t.Errorf("%s lacks %q:\n%s", path, want, b)
				}
			}
		}
	}
}

// TestOutOfMemory: a sandbox whose kernel takes too much memory is ended, with
// the reason.
func TestOutOfMemory(t *testing.T) {
	e := newEngine(t, config(enginetest.TempDir(t)))
	s := spec(t)
	s.Memory, s.Scratch = 16*mib, 16*mib
	sb, err := e.Boot(t.Context(), s)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = sb.Close() })
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	// gVisor's kernel writes the data that a program reads. So it is the kernel
	// that exceeds the limit.
	go func() {
		_, _ = sb.Agent().Run(ctx, guestrpc.ExecRequest{Argv: []string{"dd", "if=/dev/zero", "of=/dev/null", "bs=250M", "count=1"}}, nil, nil, nil) // it is cut off
	}()
	select {
	case <-sb.Done():
	case <-ctx.Done():
		t.Fatal("the sandbox lives on")
	}
	if err := sb.Wait(); !errors.Is(err, engine.ErrEnded) || !errors.Is(err, engine.ErrOutOfMemory) {
		t.Errorf("it ended with: %v", err)
	}
}

// TestReady: sandboxes that have answered once wait paused, and are claimed
// with an identity of their own.
func TestReady(t *testing.T) {
	e := newEngine(t, config(enginetest.TempDir(t)))
	ready := engine.KeepForksReady(e, freeze(t, boot(t, e)), 2)
	defer func() { _ = ready.Close() }()
	if err := ready.WaitFull(t.Context()); err != nil {
		t.Fatal(err)
	}
	seen := map[string]bool{}
	for i, name := range []string{"left", "right"} {
		sb, err := ready.Get(t.Context(), name)
		if err != nil {
			t.Fatal(err)
		}
		st, err := sb.Stats(t.Context())
		if err != nil || st.Generation < 2 {
			t.Errorf("%+v, %v", st, err)
		}
		got := sh(t, sb, "hostname; cat /run/agentrun/generation; head -c 16 /dev/urandom | od -An -tx1")
		if !strings.HasPrefix(got, fmt.Sprintf("%s\n%d\n", name, st.Generation)) || seen[got[len(name):]] {
			t.Errorf("claim %d says %q", i, got)
		}
		seen[got[len(name):]] = true
		if err := sb.Close(); err != nil {
			t.Error(err)
		}
	}
}

// TestRefuses: settings that gVisor does not support are refused, not ignored.
func TestRefuses(t *testing.T) {
	e := newEngine(t, config(enginetest.TempDir(t)))
	for name, change := range map[string]func(*engine.Spec){
		"command line": func(s *engine.Spec) { s.Cmdline = "quiet" },
		"disks":        func(s *engine.Spec) { s.Limits.IO.OpsPerSecond = 1 },
	} {
		s := spec(t)
		change(&s)
		if sb, err := e.Boot(t.Context(), s); err == nil || !strings.Contains(err.Error(), "gVisor has no") {
			t.Errorf("%s: %v", name, err)
			if err == nil {
				_ = sb.Close()
			}
		}
	}
}

// TestNothingLeft: after sandboxes have ended, in any way, none of their
// processes, folders and cgroups is left.
func TestNothingLeft(t *testing.T) {
	dir := enginetest.TempDir(t)
	e := newEngine(t, config(dir))
	sb := boot(t, e)
	id, err := gvisor.Identify(sb)
	if err != nil {
		t.Fatal(err)
	}
	if err := id.Kill(t.Context()); err != nil { // as the kernel would
		t.Fatal(err)
	}
	if err := sb.Wait(); !errors.Is(err, engine.ErrEnded) {
		t.Error(err)
	}
	if err := errors.Join(sb.Close(), e.Sweep()); err != nil {
		t.Error(err)
	}
	entries, err := filepath.Glob(filepath.Join(dir, "run", "[0-9a-f]*"))
	if err != nil || len(entries) > 0 {
		t.Errorf("left: %v, %v", entries, err)
	}
	if out, err := exec.Command("pgrep", "-f", filepath.Join(dir, "run")).Output(); err == nil {
		t.Errorf("processes are left: %s", out)
	}
}

// TestHibernation: hibernation makes no copy of the sandbox in memory.
func TestHibernation(t *testing.T) {
	s := spec(t)
	s.Memory = 384 * mib
	enginetest.Hibernation(t, func(t *testing.T, resident string, key *seal.Key) engine.Engine {
		return newEngine(t, gvisor.Config{Resident: resident, RunDir: filepath.Join(enginetest.TempDir(t), "run"), Key: key})
	}, s)
}
