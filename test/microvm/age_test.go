package microvm

import (
	"bytes"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	"agentrun.dev/internal/engine"
	"agentrun.dev/internal/guest/guestrpc"
	"agentrun.dev/internal/storage/snapshot"
	"agentrun.dev/test/soak"
)

// complaint matches messages of a kernel that has lost time.
var complaint = regexp.MustCompile(`(?i)lockup|rcu.*stall|hung task|blocked for more than|clocksource|watchdog|time.*backward|BUG|WARNING`)

// quiet fails the test if the guest's kernel complained.
func quiet(t *testing.T, sb engine.Sandbox) {
	t.Helper()
	console, err := sb.Console(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	if m := complaint.Find(console); m != nil {
		t.Errorf("the guest's console says %q:\n%s", m, console)
	}
}

// command runs a shell command in a sandbox.
func command(t *testing.T, sb engine.Sandbox, script string) string {
	t.Helper()
	var stdout, stderr bytes.Buffer
	st, err := sb.Agent().Run(t.Context(), guestrpc.ExecRequest{Argv: []string{"sh", "-c", script}}, nil, &stdout, &stderr)
	if err != nil || st.Code != 0 {
		t.Fatalf("%s: %+v, %v\n%s%s", script, st, err, stdout.Bytes(), stderr.Bytes())
	}
	return strings.TrimSpace(stdout.String())
}

// TestAge: a guest notices neither a long pause nor that its snapshot is old.
// Its timers continue, its kernel does not complain, and it answers as fast as
// a fresh one.
func TestAge(t *testing.T) {
	soakEachSMP(t, func(t *testing.T, vcpus int) {
		e := newEngine(t)
		sb, err := e.Boot(t.Context(), engine.Spec{Root: openRoot(t), Memory: 128 * mib, VCPUs: vcpus})
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { _ = sb.Close() })
		// This sleep runs while the machine is paused.
		command(t, sb, `(sleep 5; echo slept > /slept) >/dev/null 2>&1 &`)
		snap, err := sb.Snapshot(t.Context(), filepath.Join(t.TempDir(), "snapshot"))
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { _ = snap.Close() })
		if err := sb.Pause(t.Context()); err != nil {
			t.Fatal(err)
		}
		// The test needs real time to pass.
		time.Sleep(time.Duration(soak.Count(600, 6)) * time.Second)
		if err := sb.Resume(t.Context()); err != nil {
			t.Fatal(err)
		}
		old := fork(t, e, snap)
		for what, sb := range map[string]engine.Sandbox{"resumed": sb, "forked": old} {
			t.Run(what, func(t *testing.T) {
				command(t, sb, `while ! [ -f /slept ]; do usleep 100000; done; sleep 1`)
				quiet(t, sb)
			})
		}
		fresh, err := sb.Snapshot(t.Context(), filepath.Join(t.TempDir(), "fresh"))
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { _ = fresh.Close() })
		oldest, newest := forkTimes(t, e, snap, fresh, soak.Count(10, 3))
		t.Logf("first answers of forks, median: %v from the old snapshot, %v from a fresh one", oldest, newest)
		// Measurements are noisy. An effect of age, such as clocks that catch
		// up with the passed time, would take many times longer.
		if oldest > 3*newest {
			t.Errorf("a fork of an old snapshot takes %v to its first answer, of a fresh one %v", oldest, newest)
		}
	})
}

func fork(t *testing.T, e engine.Engine, snap *snapshot.Snapshot) engine.Sandbox {
	t.Helper()
	sb, err := e.Fork(t.Context(), snap, engine.ForkOptions{})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = sb.Close() })
	return sb
}

// forkTimes forks two snapshots in turn, n times each, and returns their median
// times to the first answer.
func forkTimes(t *testing.T, e engine.Engine, a, b *snapshot.Snapshot, n int) (time.Duration, time.Duration) {
	t.Helper()
	var times [2][]time.Duration
	for range n {
		for i, snap := range []*snapshot.Snapshot{a, b} {
			begin := time.Now()
			sb := fork(t, e, snap)
			times[i] = append(times[i], time.Since(begin))
			if err := sb.Close(); err != nil {
				t.Error(err)
			}
		}
	}
	for _, times := range times {
		slices.Sort(times)
	}
	return times[0][n/2], times[1][n/2]
}
