package microvm

import (
	"context"
	"errors"
	"fmt"
	"path/filepath"
	"strings"
	"sync"
	"testing"

	"agentrun.dev/internal/engine"
	"agentrun.dev/internal/engine/microvm"
	"agentrun.dev/internal/guest/guestrpc"
	"agentrun.dev/internal/storage/snapshot"
	"agentrun.dev/test/soak"
)

// bootSnapshot boots a guest, warms it up with a shell command and takes a
// snapshot.
func bootSnapshot(t *testing.T, e *microvm.Engine, vcpus int, warmUp string) *snapshot.Snapshot {
	t.Helper()
	ctx := t.Context()
	sb, err := e.Boot(ctx, engine.Spec{Root: openRoot(t), Memory: 128 * mib, VCPUs: vcpus, Hostname: "template"})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = sb.Close() })
	inShell(t, sb, warmUp)
	snap, err := sb.Snapshot(ctx, filepath.Join(t.TempDir(), "snapshot"))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = snap.Close() })
	return snap
}

// inShell runs a shell command that must succeed and returns what it printed.
func inShell(t testing.TB, sb engine.Sandbox, script string) string {
	t.Helper()
	var stdout, stderr strings.Builder
	st, err := sb.Agent().Run(context.Background(), guestrpc.ExecRequest{Argv: []string{"sh", "-c", script}}, nil, &stdout, &stderr)
	if err != nil || st.Code != 0 {
		t.Fatalf("%s: exit code %d, %v: %s", script, st.Code, err, stderr.String())
	}
	return strings.TrimSpace(stdout.String())
}

const whoAmI = "hostname; cat /etc/machine-id /run/agentrun/generation; head -c 16 /dev/urandom | od -An -tx1; uptime >/dev/null; cat /warm"

// TestReady: waiting sandboxes are claimed, each with its own identity. Claims
// beyond the waiting sandboxes get forks. A claim can choose the host name.
func TestReady(t *testing.T) {
	soakEachSMP(t, func(t *testing.T, vcpus int) {
		e := newEngine(t)
		snap := bootSnapshot(t, e, vcpus, "echo warmed up > /warm")
		spares, err := engine.KeepSpares(e, snap, 1)
		if err != nil {
			t.Fatal(err)
		}
		p := engine.KeepForksReady(e, snap, 2)
		t.Cleanup(func() {
			if err := errors.Join(p.Close(), spares.Close()); err != nil {
				t.Error(err)
			}
		})
		if err := p.WaitFull(t.Context()); err != nil {
			t.Fatal(err)
		}
		n := soak.Count(100, 5)
		seen := map[string]string{}
		var mu sync.Mutex
		var claims sync.WaitGroup
		for range n {
			claims.Go(func() {
				sb, err := p.Get(t.Context(), "")
				if err != nil {
					t.Error(err)
					return
				}
				defer func() { _ = sb.Close() }()
				said := inShell(t, sb, whoAmI)
				lines := strings.Split(said, "\n")
				if len(lines) != 5 || lines[4] != "warmed up" {
					t.Errorf("a claimed sandbox says %q", said)
					return
				}
				mu.Lock()
				defer mu.Unlock()
				for i, what := range []string{"host name", "machine id", "", "random bytes"} {
					key := what + " " + lines[i]
					if what != "" && seen[key] != "" {
						t.Errorf("two sandboxes have the %s", key)
					}
					seen[key] = said
				}
			})
		}
		claims.Wait()
		if s := p.Stats(); s.Taken+s.MadeNow != uint64(n) || s.Taken < 2 {
			t.Errorf("%+v", s)
		}
		if err := p.WaitFull(t.Context()); err != nil {
			t.Fatal(err)
		}
		sb, err := p.Get(t.Context(), "mine")
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { _ = sb.Close() })
		st, err := sb.Stats(t.Context())
		if err != nil || st.Generation < 2 {
			t.Errorf("%+v, %v", st, err)
		}
		want := fmt.Sprintf("mine\nmine\n1\n%d", st.Generation)
		if got := inShell(t, sb, "hostname; cat /etc/hostname; grep -c mine /etc/hosts; cat /run/agentrun/generation"); got != want {
			t.Errorf("the claimed sandbox says %q, want %q", got, want)
		}
		if err := p.WaitFull(t.Context()); err != nil {
			t.Fatal(err)
		}
	})
}
