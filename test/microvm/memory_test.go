package microvm

import (
	"path/filepath"
	"testing"

	"agentrun.dev/bench"
	"agentrun.dev/internal/engine"
	"agentrun.dev/internal/engine/microvm"
)

// What a fork that has answered may have of its own: pages of its guest, and these
// and the private memory of its process together.
const (
	mostGuestPages = 512 << 10
	mostPrivate    = 1700 << 10
)

// TestIdleForkIsSmall: a fork owns little more than what it writes to in order to
// answer. A busy machine gives its guest time for other things, so that the smallest
// of some forks counts, and where what is in the way was captured another snapshot
// may do better.
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

// smallestFork makes a snapshot as a template's is made, and some forks of it.
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
