package microvm

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"agentrun.dev/internal/engine"
	"agentrun.dev/internal/engine/microvm"
)

// TestSpares: forks into waiting spares are like other forks: each has its own
// identity and memory, and limits if requested. They outlive the spares. A fork
// with a folder can be adopted after its parent has detached.
func TestSpares(t *testing.T) {
	soakEachSMP(t, func(t *testing.T, vcpus int) {
		ctx := t.Context()
		e := newEngine(t)
		snap := bootSnapshot(t, e, vcpus, "echo warmed up > /warm")
		for range 2 { // the engine learns from these which pages forks touch; they are made without spares
			sb, err := e.Fork(ctx, snap, engine.ForkOptions{})
			if err != nil {
				t.Fatal(err)
			}
			if err := sb.Close(); err != nil {
				t.Fatal(err)
			}
		}
		kept, err := e.KeepSpares(snap, 2)
		if err != nil {
			t.Fatal(err)
		}
		folder := filepath.Join(t.TempDir(), "machine")
		if err := os.Mkdir(folder, 0o700); err != nil {
			t.Fatal(err)
		}
		seen := map[string]bool{}
		var forks []engine.Sandbox
		for i, opts := range []engine.ForkOptions{
			{}, {}, {Limits: engine.Limits{MilliCPUs: 900}}, {Hostname: "named", Folder: folder},
		} {
			if err := kept.WaitFull(ctx); err != nil {
				t.Fatal(err)
			}
			sb, err := e.Fork(ctx, snap, opts)
			if err != nil {
				t.Fatal(err)
			}
			t.Cleanup(func() { _ = sb.Close() })
			if !microvm.FromSpare(sb) {
				t.Errorf("fork %d was made cold", i)
			}
			lines := strings.Split(inShell(t, sb, whoAmI), "\n")
			if len(lines) != 5 || lines[4] != "warmed up" || opts.Hostname != "" && lines[0] != opts.Hostname {
				t.Errorf("fork %d says %q", i, lines)
				continue
			}
			for _, own := range []string{lines[0], lines[1], lines[3]} {
				if seen[own] {
					t.Errorf("fork %d has %s as another", i, own)
				}
				seen[own] = true
			}
			inShell(t, sb, "test ! -e /mine; echo me > /mine")
			forks = append(forks, sb)
		}
		if st := kept.Stats(); st.Taken != uint64(len(forks)) || st.Lost != 0 || st.Failed != 0 {
			t.Errorf("%+v", st)
		}
		if err := kept.Close(); err != nil {
			t.Fatal(err)
		}
		cold, err := e.Fork(ctx, snap, engine.ForkOptions{})
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { _ = cold.Close() })
		if microvm.FromSpare(cold) {
			t.Error("a spare was there after Close")
		}
		for _, sb := range forks {
			inShell(t, sb, "cat /mine")
		}
		if err := forks[len(forks)-1].Detach(); err != nil {
			t.Fatal(err)
		}
		again, err := e.Adopt(ctx, folder)
		if err != nil {
			t.Fatal(err)
		}
		if err := again.Resume(ctx); err != nil {
			t.Fatal(err)
		}
		if got := inShell(t, again, "hostname"); got != "named" {
			t.Errorf("it is called %q", got)
		}
		if err := again.Close(); err != nil {
			t.Error(err)
		}
	})
}
