package vmm

import (
	"os"
	"testing"

	"agentrun.dev/internal/host/assets"
	"agentrun.dev/internal/vmm/kvm"
)

// Commands of the bare test guest (guest/testguest/testguest.c).
const (
	cmdPing        = 1
	cmdDirty       = 2
	cmdCheck       = 3
	cmdRead        = 4
	cmdTimed       = 5
	cmdSpin        = 6
	cmdPowerOff    = 7
	cmdTripleFault = 8
	cmdHalt        = 9
	cmdJump        = 10

	guestBooted = 0x41475254 // "AGRT"
)

// testGuest is the host's side of the bare guest. It sends commands and
// receives results, both in order.
type testGuest struct {
	*VM
	commands chan []uint32
	nudge    chan struct{} // makes a guest that waits for a command ask again
	results  chan uint32
	args     []uint32 // of the command the guest is reading; vCPU thread only
}

func newTestGuest() *testGuest {
	return &testGuest{commands: make(chan []uint32), nudge: make(chan struct{}), results: make(chan uint32, 16)}
}

func (g *testGuest) Out(v uint32) { g.results <- v }

// In blocks the vCPU until there is a command, so an idle guest uses no
// processor time.
func (g *testGuest) In(port uint16) uint32 {
	if port == MarkerCommand {
		select {
		case g.args = <-g.commands:
		case <-g.nudge:
			return 0
		case <-g.Done():
			return 0
		}
	}
	if len(g.args) == 0 {
		return 0
	}
	v := g.args[0]
	g.args = g.args[1:]
	return v
}

func openKVM(t testing.TB) *kvm.System {
	t.Helper()
	sys, err := kvm.Open()
	if err != nil {
		t.Fatalf("this test needs a /dev/kvm of any kind (make test runs it in the testbed where there is none): %v", err)
	}
	t.Cleanup(func() { _ = sys.Close() })
	return sys
}

func openTestGuest(t testing.TB) *os.File {
	t.Helper()
	f, err := assets.Open(assets.TestGuest)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = f.Close() })
	return f
}

// bootTestGuest boots the bare guest and waits for its first word.
func bootTestGuest(t testing.TB, memory uint64, vcpus int) *testGuest {
	t.Helper()
	g := newTestGuest()
	vm, err := Boot(Config{
		KVM: openKVM(t), Kernel: openTestGuest(t), Memory: memory, VCPUs: vcpus, Devices: Devices{Marker: g},
	})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if _, err := vm.Close(); err != nil {
			t.Error(err)
		}
	})
	g.VM = vm
	if err := vm.Start(); err != nil {
		t.Fatal(err)
	}
	if v := g.result(t); v != guestBooted {
		t.Fatalf("first word is %#x, not %#x", v, guestBooted)
	}
	return g
}

// Pause makes a vCPU that waits for a command leave In, then pauses.
func (g *testGuest) Pause() error {
	defer g.nudged()()
	return g.VM.Pause()
}

// nudged makes a guest ask for commands repeatedly until stop is called.
func (g *testGuest) nudged() (stop func()) {
	stopped := make(chan struct{})
	go func() {
		for {
			select {
			case g.nudge <- struct{}{}:
			case <-stopped:
				return
			}
		}
	}()
	return func() { close(stopped) }
}

// result returns the next word from the guest.
func (g *testGuest) result(t testing.TB) uint32 {
	t.Helper()
	select {
	case v := <-g.results:
		return v
	case <-g.Done():
		t.Fatalf("the guest ended: %v\n%s", g.Wait(), g.Console().Tail)
		return 0
	}
}

// do sends a command and waits for its first result.
func (g *testGuest) do(t testing.TB, command ...uint32) uint32 {
	t.Helper()
	g.send(t, command...)
	return g.result(t)
}

func (g *testGuest) send(t testing.TB, command ...uint32) {
	t.Helper()
	select {
	case g.commands <- command:
	case <-g.Done():
		t.Fatalf("the guest ended: %v", g.Wait())
	}
}
