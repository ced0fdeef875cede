package microvm

import (
	"errors"
	"net/netip"
	"os"
	"path/filepath"
	"testing"

	"agentrun.dev/internal/engine"
	"agentrun.dev/internal/guest/guestrpc"
	"agentrun.dev/internal/host/assets"
)

// TestOlderVMM: a vmm without the newest message of its protocol says so. The engine
// refuses that operation by name. The sandbox continues, can be forked, and wakes under the
// installed vmm.
func TestOlderVMM(t *testing.T) {
	folder, err := assets.Folder()
	if err != nil {
		t.Fatal(err)
	}
	older := t.TempDir()
	for _, name := range []assets.Asset{assets.Kernel, assets.GuestAgent} {
		if err := os.Symlink(filepath.Join(folder, string(name)), filepath.Join(older, string(name))); err != nil {
			t.Fatal(err)
		}
	}
	if err := os.Symlink(filepath.Join(folder, "updates", "older", string(assets.VMM)), filepath.Join(older, string(assets.VMM))); err != nil {
		t.Fatal(err)
	}
	t.Setenv(assets.EnvFolder, older)
	old := newEngine(t)
	booted, err := old.Boot(t.Context(), engine.Spec{
		Root: openRoot(t), Memory: 128 * mib, VCPUs: 1,
		Network: &engine.Network{MAC: [6]byte{2, 0, 0, 0, 0, 1}, MTU: 1500, Address: netip.MustParsePrefix("10.0.2.15/24")},
	})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = booted.Close() })
	snap, err := booted.Snapshot(t.Context(), filepath.Join(t.TempDir(), "snapshot"))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = snap.Close() })
	dir := t.TempDir()
	sb, err := old.Fork(t.Context(), snap, engine.ForkOptions{Folder: dir})
	if err == nil {
		err = sb.Detach()
	}
	if err != nil {
		t.Fatal(err)
	}

	t.Setenv(assets.EnvFolder, folder)
	e := newEngine(t)
	if sb, err = e.Adopt(t.Context(), dir); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = sb.Close() })
	if err := sb.Resume(t.Context()); err != nil {
		t.Fatal(err)
	}
	if wire, err := sb.Wire(); !errors.Is(err, engine.ErrOldWire) {
		t.Errorf("its wire is %v, %v", wire, err)
	}
	children, err := sb.Fork(t.Context(), []engine.ForkOptions{{}})
	if err = errors.Join(err, children.Errs[0]); err != nil {
		t.Fatal(err)
	}
	answersWired(t, "a live fork", children.Forks[0])
	if err := sb.Pause(t.Context()); err != nil {
		t.Fatal(err)
	}
	asleep, err := sb.Snapshot(t.Context(), filepath.Join(t.TempDir(), "asleep"))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = asleep.Close() })
	awake, err := e.Fork(t.Context(), asleep, engine.ForkOptions{KeepIdentity: true})
	if err != nil {
		t.Fatal(err)
	}
	answersWired(t, "what was hibernated", awake)
}

// answersWired fails the test unless a sandbox answers and has a wire. It ends
// the sandbox.
func answersWired(t *testing.T, what string, sb engine.Sandbox) {
	t.Helper()
	if st, err := sb.Agent().Run(t.Context(), guestrpc.ExecRequest{Argv: []string{"true"}}, nil, nil, nil); err != nil || st.Code != 0 {
		t.Errorf("%s: %+v, %v", what, st, err)
	}
	wire, err := sb.Wire()
	if err != nil {
		t.Errorf("%s has no wire: %v", what, err)
	}
	_ = wire.Close() // nil is refused
	if err := sb.Close(); err != nil {
		t.Error(err)
	}
}
