package microvm

import (
	"path/filepath"
	"testing"

	"agentrun.dev/bench"
	"agentrun.dev/internal/engine"
	"agentrun.dev/internal/engine/microvm"
)

// Limits for a fork that has answered once: its own pages of guest memory, and
// these together with the private memory of its process.
const (
	mostGuestPages = 512 << 10
	mostPrivate    = 1700 << 10
)

// TestIdleForkIsSmall: a fork owns little more than the pages that it writes for its
// answer. On a busy machine the guest has time for other work, so the smallest of
// several forks counts. If the snapshot was taken during such work, another snapshot
// may give smaller forks.
func TestIdleForkIsSmall(t *testing.T) {
	e := newEngine(t)
	least := bench.Memory{}
	for range 3 {
		least = smallestFork(t, e)
		t.Logf("guest pages %d KiB, process %d KiB", least.Guest>>10, least.Process>>10)
		if least.Guest <= mostGuestPages && least.Guest+least.Process <= mostPrivate {
			return
		}
	}
	t.Errorf("an idle fork has %d bytes of guest pages, at most %d expected, and %d with its process, at most %d expected",
		least.Guest, mostGuestPages, least.Guest+least.Process, mostPrivate)
}

// smallestFork takes a snapshot in the same way as for a template, and makes
// several forks of it.
func smallestFork(t *testing.T, e engine.Engine) (least bench.Memory) {
	t.Helper()
	const memory = 256 * mib
	ctx := t.Context()
	source, err := e.Boot(ctx, engine.Spec{Root: openRoot(t), Memory: memory, VCPUs: 1})
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = source.Close() }()
	inShell(t, source, "true")
	if err := source.Settle(ctx); err != nil {
		t.Fatal(err)
	}
	if err := source.Agent().Close(); err != nil {
		t.Fatal(err)
	}
	snap, err := source.Snapshot(ctx, filepath.Join(t.TempDir(), "snapshot"))
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = snap.Close() }()
	for i := range 6 {
		sb, err := e.Fork(ctx, snap, engine.ForkOptions{})
		if err != nil {
			t.Fatal(err)
		}
		defer func() { _ = sb.Close() }()
		id, err := microvm.Identify(sb)
		if err != nil {
			t.Fatal(err)
		}
		m, err := bench.ReadMemory(id.PID, memory)
		if err != nil {
			t.Fatal(err)
		}
		if i == 0 || m.Guest < least.Guest {
			least = m
		}
	}
	return least
}
