package microvm

import (
	"fmt"
	"path/filepath"
	"testing"

	"agentrun.dev/internal/engine"
)

// TestIOLimit: a guest that reads and writes its disk is held to the limit that
// its fork was given. What the same guest does without one is the measure, so
// that it does not matter how fast the machine is.
func TestIOLimit(t *testing.T) {
	e := newEngine(t)
	source, err := e.Boot(t.Context(), engine.Spec{Root: openRoot(t), Memory: 128 * mib, VCPUs: 1, Scratch: 64 * mib})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = source.Close() })
	snap, err := source.Snapshot(t.Context(), filepath.Join(t.TempDir(), "snapshot"))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = snap.Close() })
	fork := func(l engine.IOLimits) engine.Sandbox {
		t.Helper()
		sb, err := e.Fork(t.Context(), snap, engine.ForkOptions{Limits: engine.Limits{IO: l}})
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { _ = sb.Close() })
		return sb
	}
	// A limit lets a second's worth through at once, so that it must be much
	// less than what is transferred.
	const size, times = 8 * mib, 8
	free := fork(engine.IOLimits{})
	for _, tt := range []struct {
		name string
		dd   string
	}{
		{"write", "if=/dev/zero of=/dev/vdb conv=fsync"},
		{"read", "if=/dev/vdb of=/dev/null"},
	} {
		unlimited := transfer(t, free, tt.dd, size)
		rate := size / (times*unlimited + 1)
		limited := fork(engine.IOLimits{BytesPerSecond: uint64(rate)})
		took := transfer(t, limited, tt.dd, size)
		t.Logf("%s: %d MiB in %.2f s, with a limit of %.2f MiB/s in %.2f s", tt.name, size/mib, unlimited, rate/mib, took)
		if ratio := took / unlimited; ratio < times/2 {
			t.Errorf("%s: a limit of %.0f bytes per second makes it %.1f times as slow, not %d times", tt.name, rate, ratio, times)
		}
		// Whatever the machine did, more than the limit and a second's worth, and
		// the request that exceeds it, cannot have been transferred.
		if most := rate*(took+1) + mib; size > most {
			t.Errorf("%s: %d bytes in %.2f s under a limit of %.0f per second", tt.name, size, took, rate)
		}
		if err := limited.Close(); err != nil {
			t.Error(err)
		}
	}
}

// transfer has a guest copy so many bytes past its cache, and returns the
// seconds that it took by the guest's own clock.
func transfer(t *testing.T, sb engine.Sandbox, dd string, size int) float64 {
	t.Helper()
	out := command(t, sb, fmt.Sprintf("sync; echo 3 > /proc/sys/vm/drop_caches; cat /proc/uptime; dd %s bs=64k count=%d 2>/dev/null; cat /proc/uptime", dd, size/(64<<10)))
	var before, after, idle float64
	if _, err := fmt.Sscan(out, &before, &idle, &after); err != nil || after < before {
		t.Fatalf("the guest says %q: %v", out, err)
	}
	return max(after-before, 0.01) // its resolution
}
