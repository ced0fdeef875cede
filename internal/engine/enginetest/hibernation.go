package enginetest

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"agentrun.dev/internal/engine"
	"agentrun.dev/internal/storage/layer"
	"agentrun.dev/internal/storage/seal"
	"agentrun.dev/internal/storage/snapshot"
	"agentrun.dev/test/soak"
	"golang.org/x/sys/unix"
)

// filledMiB is how much memory the test of hibernation fills in a sandbox. besideMiB,
// less than a fourth of that, is how much memory there is beside the sandbox while it
// is written.
const (
	filledMiB = 96
	besideMiB = 20
)

// Hibernation tests that a sandbox which stands still is written to disk without a
// copy of its memory anywhere, and that the sandbox goes on if writing fails. open
// opens an engine with a folder for resident layers. spec has at least 256 MiB of
// memory.
func Hibernation(t *testing.T, open func(t *testing.T, resident string, key *seal.Key) engine.Engine, spec engine.Spec) {
	if os.Geteuid() != 0 {
		t.Fatal("a file system of a given size needs root")
	}
	key, err := seal.Generate()
	if err != nil {
		t.Fatal(err)
	}
	for _, c := range []struct {
		name string
		opts []snapshot.Option
	}{{"plain", nil}, {"sealed", []snapshot.Option{snapshot.Sealed(key)}}} {
		t.Run(c.name, func(t *testing.T) {
			resident := tmpfs(t, 1024)
			h := &hibernation{engine: open(t, resident, key), resident: resident, opts: c.opts}
			h.run(t, spec)
		})
	}
}

type hibernation struct {
	engine   engine.Engine
	resident string
	opts     []snapshot.Option
}

// tmpfs mounts an empty file system in memory.
func tmpfs(t *testing.T, mib int) string {
	t.Helper()
	dir := t.TempDir()
	if err := unix.Mount("tmpfs", dir, "tmpfs", 0, fmt.Sprintf("size=%dm,mode=700", mib)); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := unix.Unmount(dir, unix.MNT_DETACH); err != nil {
			t.Error(err)
		}
	})
	return dir
}

// resize changes the size of a file system in memory.
func resize(t *testing.T, dir string, mib int) {
	t.Helper()
	if err := unix.Mount("", dir, "", unix.MS_REMOUNT, fmt.Sprintf("size=%dm", mib)); err != nil {
		t.Fatal(err)
	}
}

func usedBytes(t *testing.T, dir string) uint64 {
	t.Helper()
	var st unix.Statfs_t
	if err := unix.Statfs(dir, &st); err != nil {
		t.Fatal(err)
	}
	return (st.Blocks - st.Bfree) * uint64(st.Bsize)
}

// memoryFiles is how many bytes of memfds this process has open.
func memoryFiles() (bytes uint64) {
	fds, _ := filepath.Glob("/proc/self/fd/*") // the pattern is valid
	for _, fd := range fds {
		name, err := os.Readlink(fd)
		if err != nil || !strings.HasPrefix(name, "/memfd:") {
			continue
		}
		var st unix.Stat_t
		if unix.Stat(fd, &st) == nil {
			bytes += uint64(st.Blocks) * 512
		}
	}
	return bytes
}

// watchMemoryFiles measures the bytes in memfds until stop, which returns the
// maximum.
func watchMemoryFiles() (stop func() uint64) {
	end, most := make(chan struct{}), make(chan uint64)
	go func() {
		highest := uint64(0)
		// A loop without pauses would take half of a machine with one processor.
		look := time.NewTicker(5 * time.Millisecond)
		defer look.Stop()
		for {
			select {
			case <-end:
				most <- max(highest, memoryFiles())
				return
			case <-look.C:
				highest = max(highest, memoryFiles())
			}
		}
	}()
	return func() uint64 { close(end); return <-most }
}

func (h *hibernation) run(t *testing.T, spec engine.Spec) {
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	booted, err := h.engine.Boot(ctx, spec)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = booted.Close() }()
	sh(t, booted, warmUp)
	home := t.TempDir()
	template, err := booted.Snapshot(ctx, filepath.Join(home, "template"))
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = template.Close() }()
	sb, err := h.engine.Fork(ctx, template, engine.ForkOptions{})
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = sb.Close() }()
	// Random numbers and digests of this much memory would take minutes in an
	// emulated machine. Each copy of the piece begins at a different offset in its
	// page.
	sh(t, sb, fmt.Sprintf("dd if=/dev/urandom of=/run/piece bs=1M count=1 2>/dev/null; "+
		"i=0; while [ $i -lt %d ]; do echo $i; cat /run/piece; i=$((i+1)); done > /dev/shm/fill", filledMiB))
	sum := fmt.Sprintf("wc -c < /dev/shm/fill; "+
		"i=0; while [ $i -lt %d ]; do dd if=/dev/shm/fill bs=4096 skip=$i count=1 2>/dev/null; i=$((i+251)); done | sha256sum", filledMiB<<20/4096)
	before := sh(t, sb, sum)

	template0 := usedBytes(t, h.resident)
	resize(t, h.resident, int(template0>>20)+besideMiB)
	if err := sb.Pause(ctx); err != nil {
		t.Fatal(err)
	}
	// The disk is too small: the snapshot fails and the sandbox goes on as before.
	small := tmpfs(t, filledMiB/2)
	if snap, err := sb.Snapshot(ctx, filepath.Join(small, "image"), h.opts...); err == nil {
		t.Errorf("%d MiB were written to a disk of %d MiB: %v", filledMiB, filledMiB/2, snap.ID())
	}
	if n := usedBytes(t, small); n > 1<<20 {
		t.Errorf("what failed has left %d bytes on the disk", n)
	}
	if err := sb.Resume(ctx); err != nil {
		t.Fatal(err)
	}
	if got := sh(t, sb, sum+"; "+askCounter+" >/dev/null"); got != before {
		t.Errorf("after it could not be written it holds %q, not %q", got, before)
	}

	if err := sb.Pause(ctx); err != nil {
		t.Fatal(err)
	}
	memfds := memoryFiles()
	stop := watchMemoryFiles()
	asleep, err := sb.Snapshot(ctx, filepath.Join(home, "asleep"), h.opts...)
	most := stop()
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = asleep.Close() }()
	if most > memfds+besideMiB<<20 {
		t.Errorf("%d MiB were in memory files while it was written", (most-memfds)>>20)
	}
	if n := usedBytes(t, h.resident); n > template0+1<<20 {
		t.Errorf("%d MiB are in memory after it was written", (n-template0)>>20)
	}
	if err := sb.Close(); err != nil {
		t.Fatal(err)
	}
	resize(t, h.resident, 1024)
	awake, err := h.engine.Fork(ctx, asleep, engine.ForkOptions{KeepIdentity: true})
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = awake.Close() }()
	if got := sh(t, awake, sum+"; "+askCounter+" >/dev/null"); got != before {
		t.Errorf("it woke with %q, not %q", got, before)
	}
	h.again(ctx, t, awake, home, before, sum)
}

// again hibernates and wakes the sandbox more often than a stack may have layers.
func (h *hibernation) again(ctx context.Context, t *testing.T, sb engine.Sandbox, home, before, sum string) {
	rounds := 1
	// A stack has a layer for each time that the sandbox ran. Sealing and opening all
	// of them takes minutes in an emulated machine.
	if h.engine.Capabilities().SharesMemory && (len(h.opts) == 0 || soak.On()) {
		rounds = layer.MaxLayers + 1
	}
	for i := range rounds {
		if err := sb.Pause(ctx); err != nil {
			t.Fatal(err)
		}
		asleep, err := sb.Snapshot(ctx, filepath.Join(home, fmt.Sprint("asleep-", i)), h.opts...)
		if err != nil {
			t.Fatal(err)
		}
		next, err := h.engine.Fork(ctx, asleep, engine.ForkOptions{KeepIdentity: true})
		if err != nil {
			t.Fatal(err)
		}
		if err := sb.Close(); err != nil {
			t.Fatal(err)
		}
		sb = next
		defer func() { _, _ = sb.Close(), asleep.Close() }()
		sh(t, sb, fmt.Sprintf("echo %d > /run/round", i))
		if err := h.engine.Keep(nil, []string{filepath.Join(home, fmt.Sprint("asleep-", i))}); err != nil {
			t.Fatal(err)
		}
	}
	if got := sh(t, sb, sum); got != before {
		t.Errorf("after many rounds it holds %q, not %q", got, before)
	}
	if got := sh(t, sb, "cat /run/round"); got != fmt.Sprint(rounds-1) {
		t.Errorf("round %q", got)
	}
}
