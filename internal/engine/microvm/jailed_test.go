package microvm

import (
	"testing"

	"agentrun.dev/internal/assets"
	"agentrun.dev/internal/vmm"
)

const mib = 1 << 20

// bareMachine is the test guest, which runs on any KVM.
func bareMachine(t testing.TB) Machine {
	t.Helper()
	f, err := assets.Open(assets.TestGuest)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = f.Close() })
	return Machine{Kernel: f, Memory: 64 * mib, VCPUs: 1}
}

func TestJailedGuest(t *testing.T) {
	j, err := NewJail(JailPolicy{})
	if err != nil {
		t.Fatal(err)
	}
	defer j.Close()
	p, err := Start(j, bareMachine(t))
	if err != nil {
		t.Fatal(err)
	}
	t.Log(p.Pid(), p.cell.UID())
	console, err := p.Console(t.Context())
	t.Logf("%q %v", console, err)
	if err := p.Stop(t.Context()); err != nil {
		t.Fatal(err)
	}
	exit, _ := p.Wait()
	if exit.Reason != vmm.ReasonStopped {
		t.Error(exit)
	}
}
