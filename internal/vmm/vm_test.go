package vmm

import (
	"fmt"
	"strings"
	"testing"

	"agentrun.dev/internal/vmm/guestmem"
	"agentrun.dev/internal/vmm/vmstate"
)

const mib = 1 << 20

func TestBareGuest(t *testing.T) {
	for _, memory := range []uint64{64 * mib, 512 * mib, 4096 * mib} {
		t.Run(fmt.Sprintf("%dMiB", memory/mib), func(t *testing.T) {
			g := bootTestGuest(t, memory, 1)
			for i := range uint32(1000) {
				if v := g.do(t, cmdPing, i); v != i {
					t.Fatalf("ping %d was answered with %d", i, v)
				}
			}
			const start, count, stride, value = 0x2000, 1000, 3, 42
			if n := g.do(t, cmdDirty, start, count, stride, value); n != count {
				t.Fatalf("%d pages dirtied, not %d", n, count)
			}
			if n := g.do(t, cmdCheck, start, count, stride, value); n != count {
				t.Fatalf("%d of %d pages hold what was written", n, count)
			}
			if n := g.do(t, cmdCheck, start, count, stride, value+1); n != 0 {
				t.Fatalf("%d pages hold what was never written", n)
			}
		})
	}
}

// TestDiscard: discarded pages read as zeros.
func TestDiscard(t *testing.T) {
	g := bootTestGuest(t, 64*mib, 1)
	const start, count, value = 0x2000, 256, 7
	g.do(t, cmdDirty, start, count, 1, value)
	if err := g.mem.Discard(start*guestmem.PageSize, count/2*guestmem.PageSize); err != nil {
		t.Fatal(err)
	}
	if n := g.do(t, cmdCheck, start, count, 1, value); n != count/2 {
		t.Fatalf("%d pages survived the discard, want %d", n, count/2)
	}
}

func TestEnds(t *testing.T) {
	// No device answers in the middle of the device windows, so an instruction
	// fetched from there cannot be emulated.
	const unbacked = 0xd800_0000
	for _, c := range []struct {
		name    string
		command []uint32
		want    vmstate.Reason
	}{
		{"power-off", []uint32{cmdPowerOff}, vmstate.PowerOff},
		{"triple fault", []uint32{cmdTripleFault}, vmstate.TripleFault},
		{"internal error", []uint32{cmdJump, unbacked}, vmstate.InternalError},
	} {
		t.Run(c.name, func(t *testing.T) {
			g := bootTestGuest(t, 64*mib, 2)
			g.send(t, c.command...)
			if exit := g.Wait(); exit.Reason != c.want {
				t.Fatalf("the guest ended with %v, want %s", exit, c.want)
			}
		})
	}
	t.Run("stop while halted", func(t *testing.T) {
		g := bootTestGuest(t, 64*mib, 2)
		g.send(t, cmdHalt)
		g.Stop()
		if exit, err := g.Close(); err != nil || exit.Reason != vmstate.Stopped {
			t.Fatalf("the guest ended with %v, %v; want %s", exit, err, vmstate.Stopped)
		}
	})
}

// TestPause: a paused guest makes no progress, and then continues normally, no
// matter where it was stopped.
func TestPause(t *testing.T) {
	g := bootTestGuest(t, 64*mib, 1)
	const start, count = 0x1800, 4096
	for round := range uint32(20) {
		g.send(t, cmdDirty, start, count, 1, round)
		for range 5 {
			if err := g.Pause(); err != nil {
				t.Fatal(err)
			}
			before := g.mustRead(t, start, count)
			after := g.mustRead(t, start, count)
			if before != after {
				t.Fatal("memory changed while the guest was paused")
			}
			if err := g.Resume(); err != nil {
				t.Fatal(err)
			}
		}
		if n := g.result(t); n != count {
			t.Fatalf("%d pages dirtied, not %d", n, count)
		}
		if n := g.do(t, cmdCheck, start, count, 1, round); n != count {
			t.Fatalf("round %d: %d of %d pages are right", round, n, count)
		}
	}
}

// mustRead folds the first words of pages into one number.
func (g *testGuest) mustRead(t *testing.T, page, count uint64) uint64 {
	t.Helper()
	var sum uint64
	var b [8]byte
	for i := range count {
		if err := g.mem.Read((page+i)*guestmem.PageSize, b[:]); err != nil {
			t.Fatal(err)
		}
		for _, c := range b {
			sum = sum*31 + uint64(c)
		}
	}
	return sum
}

func TestBootRefuses(t *testing.T) {
	sys, kernel := openKVM(t), openTestGuest(t)
	good := Config{KVM: sys, Kernel: kernel, Memory: 64 * mib, VCPUs: 1}
	for _, c := range []struct {
		name string
		edit func(*Config)
		want string
	}{
		{"no kernel", func(c *Config) { c.Kernel = nil }, "no kernel"},
		{"no KVM", func(c *Config) { c.KVM = nil }, "no KVM"},
		{"zero vCPUs", func(c *Config) { c.VCPUs = 0 }, "0 vCPUs"},
		{"nine vCPUs", func(c *Config) { c.VCPUs = 9 }, "9 vCPUs"},
		{"too little memory", func(c *Config) { c.Memory = 32 * mib }, "32 MiB"},
		{"odd memory", func(c *Config) { c.Memory = 64*mib + 1 }, "multiple of"},
		{"unknown profile", func(c *Config) { c.Profile = "pentium" }, "pentium"},
		{"long command line", func(c *Config) { c.Cmdline = strings.Repeat("x", cmdlineMax) }, "command line"},
	} {
		t.Run(c.name, func(t *testing.T) {
			cfg := good
			c.edit(&cfg)
			vm, err := Boot(cfg)
			if err == nil {
				_, _ = vm.Close()
				t.Fatal("booted")
			}
			if !strings.Contains(err.Error(), c.want) {
				t.Fatalf("error %q does not say %q", err, c.want)
			}
		})
	}
}
