package microvm

import (
	"bytes"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
	"time"

	"agentrun.dev/internal/engine"
	"agentrun.dev/internal/guestrpc"
)

// complaint is what a kernel prints that has lost time.
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

// TestAge: neither a long pause nor an old snapshot is noticed by a guest: its
// timers go on, its kernel does not complain.
func TestAge(t *testing.T) {
	forEachSMP(t, func(t *testing.T, vcpus int) {
		e := newEngine(t)
		sb, err := e.Boot(t.Context(), engine.Spec{Root: openRoot(t), Memory: 128 * mib, VCPUs: vcpus})
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { _ = sb.Close() })
		// A sleep that is under way when the machine stands still.
		command(t, sb, `(sleep 5; echo slept > /slept) >/dev/null 2>&1 &`)
		snap, err := sb.Snapshot(t.Context(), filepath.Join(t.TempDir(), "snapshot"))
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { _ = snap.Close() })
		if err := sb.Pause(t.Context()); err != nil {
			t.Fatal(err)
		}
		// Time itself is what is tested here.
		time.Sleep(time.Duration(count(600, 6)) * time.Second)
		if err := sb.Resume(t.Context()); err != nil {
			t.Fatal(err)
		}
		old, err := e.Fork(t.Context(), snap, engine.ForkOptions{})
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { _ = old.Close() })
		for what, sb := range map[string]engine.Sandbox{"resumed": sb, "forked": old} {
			t.Run(what, func(t *testing.T) {
				command(t, sb, `while ! [ -f /slept ]; do usleep 100000; done; sleep 1`)
				quiet(t, sb)
			})
		}
	})
}
