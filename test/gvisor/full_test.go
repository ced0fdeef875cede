package gvisor

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"time"

	"agentrun.dev/internal/engine"
	"agentrun.dev/internal/engine/enginetest"
	"agentrun.dev/internal/engine/gvisor"
)

// bootFull boots a sandbox and fills most of its memory and disk, so that a capture
// has more bytes than its limit leaves.
func bootFull(t *testing.T, e *gvisor.Engine) engine.Sandbox {
	t.Helper()
	s := spec(t)
	s.Memory, s.Disk, s.Scratch = 128*mib, 512*mib, 0
	sb, err := e.Boot(t.Context(), s)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = sb.Close() })
	sh(t, sb, "dd if=/dev/urandom of=/file1 bs=1M count=60 2>/dev/null; for i in 2 3 4 5 6 7 8; do cp /file1 /file$i; done; md5sum /file8")
	return sb
}

// limitFile returns the file with the memory limit of the cgroup of a sandbox's
// helper.
func limitFile(t *testing.T, sb engine.Sandbox) string {
	t.Helper()
	id, err := gvisor.Identify(sb)
	if err != nil {
		t.Fatal(err)
	}
	return enginetest.MemoryLimit(t, id.PID)
}

func memoryLimit(t *testing.T, sb engine.Sandbox) uint64 {
	t.Helper()
	b, err := os.ReadFile(limitFile(t, sb))
	if err != nil {
		t.Fatal(err)
	}
	limit, err := strconv.ParseUint(strings.TrimSpace(string(b)), 10, 64)
	if err != nil {
		t.Fatal(err)
	}
	return limit
}

// isLowered waits until the limit is back at want. The forks have closed the
// capture's files already, but there is no event for the engine noticing that.
func isLowered(t *testing.T, sb engine.Sandbox, want uint64) {
	t.Helper()
	for begin := time.Now(); ; time.Sleep(20 * time.Millisecond) { // there is no event for it
		limit := memoryLimit(t, sb)
		if limit == want {
			break
		}
		if time.Since(begin) > patience {
			t.Fatalf("the limit stays at %d MiB, it was %d", limit/mib, want/mib)
		}
	}
	sh(t, sb, "true") // the sandbox still answers
}

// TestForkOfFull: a running sandbox that uses nearly all of its memory and disk
// can be forked repeatedly. Its limit is back at its old value once the forks
// have read the capture.
func TestForkOfFull(t *testing.T) {
	e := newEngine(t, config(enginetest.TempDir(t)))
	sb := bootFull(t, e)
	want, sum := memoryLimit(t, sb), sh(t, sb, "md5sum /file8")
	for range 2 {
		f, err := sb.Fork(t.Context(), []engine.ForkOptions{{}, {}})
		if err != nil {
			t.Fatal(err)
		}
		if err := errors.Join(f.Errs...); err != nil {
			t.Fatal(err)
		}
		for _, fork := range f.Forks {
			defer func() { _ = fork.Close() }()
			if got := sh(t, fork, "md5sum /file8"); got != sum {
				t.Errorf("a fork has %q, not %q", got, sum)
			}
		}
		// The forks have read the whole capture and closed its files, which no longer
		// exist.
		isLowered(t, sb, want)
		for _, fork := range f.Forks {
			if err := fork.Close(); err != nil {
				t.Error(err)
			}
		}
	}
}

// TestSnapshotOfFull: a snapshot can be taken of a sandbox that uses nearly all
// of its memory and disk. Afterwards its limit is back at its old value.
func TestSnapshotOfFull(t *testing.T) {
	e := newEngine(t, config(enginetest.TempDir(t)))
	sb := bootFull(t, e)
	want := memoryLimit(t, sb)
	snap, err := sb.Snapshot(t.Context(), filepath.Join(enginetest.TempDir(t), "snapshot"))
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = snap.Close() }()
	isLowered(t, sb, want)
	fork, err := e.Fork(t.Context(), snap, engine.ForkOptions{})
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = fork.Close() }()
	if got, sum := sh(t, fork, "md5sum /file8"), sh(t, sb, "md5sum /file8"); got != sum {
		t.Errorf("the fork has %q, not %q", got, sum)
	}
}

// TestForkIsGivenUp: if a fork is cancelled while the capture is written, the
// sandbox lives on, and its limit is back at its old value.
func TestForkIsGivenUp(t *testing.T) {
	e := newEngine(t, config(enginetest.TempDir(t)))
	sb := bootFull(t, e)
	want := memoryLimit(t, sb)
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	ended := make(chan error, 1)
	go func() {
		_, err := sb.Fork(ctx, []engine.ForkOptions{{}})
		ended <- err
	}()
	// The limit is raised while the capture is written. The test polls it, because there
	// is no event.
	for raised := false; !raised; raised = memoryLimit(t, sb) > want {
		select {
		case err := <-ended:
			t.Fatalf("the fork has ended before it was seen to be written: %v", err)
		case <-time.After(time.Millisecond):
		}
	}
	cancel()
	if err := <-ended; !errors.Is(err, context.Canceled) {
		t.Errorf("a fork that was given up ended with %v", err)
	}
	isLowered(t, sb, want)
	if again, err := sb.Fork(t.Context(), []engine.ForkOptions{{}}); err != nil || again.Errs[0] != nil {
		t.Error(err, again)
	} else if err := again.Forks[0].Close(); err != nil {
		t.Error(err)
	}
}

// TestAdoptedLimit: if a parent was killed after it had raised a limit, the
// next parent sets the limit back to its old value.
func TestAdoptedLimit(t *testing.T) {
	e := newEngine(t, config(enginetest.TempDir(t)))
	dir := t.TempDir()
	sb, err := e.Fork(t.Context(), freeze(t, boot(t, e)), engine.ForkOptions{Folder: dir})
	if err != nil {
		t.Fatal(err)
	}
	want := memoryLimit(t, sb)
	if err := os.WriteFile(limitFile(t, sb), []byte(strconv.FormatUint(2*want, 10)), 0); err != nil {
		t.Fatal(err)
	}
	if err := sb.Detach(); err != nil {
		t.Fatal(err)
	}
	if sb, err = e.Adopt(t.Context(), dir); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = sb.Close() })
	if err := sb.Resume(t.Context()); err != nil {
		t.Fatal(err)
	}
	if limit := memoryLimit(t, sb); limit != want {
		t.Errorf("the limit is %d MiB, it was %d", limit/mib, want/mib)
	}
}
