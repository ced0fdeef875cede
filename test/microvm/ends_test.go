package microvm

import (
	"context"
	"errors"
	"os"
	"strings"
	"testing"
	"time"

	"agentrun.dev/internal/engine"
	"agentrun.dev/internal/guest/guestrpc"
	"agentrun.dev/internal/vmm/vmstate"
	"golang.org/x/sys/unix"
)

// TestEnds: every way in which a Linux guest can end is noticed, with its
// reason. The bare test guest (internal/vmm) covers a triple fault and an
// internal error of KVM, because Linux cannot be made to cause them.
func TestEnds(t *testing.T) {
	trigger := func(script string) func(*testing.T, *testGuest) {
		return func(t *testing.T, g *testGuest) {
			// The guest may end before its answer arrives.
			_, _ = g.Agent().Run(t.Context(), shell(script), nil, nil, nil)
		}
	}
	for _, c := range []struct {
		name    string
		vcpus   int
		trigger func(*testing.T, *testGuest)
		want    vmstate.Reason
		console string
	}{
		{
			name: "power-off by the agent", vcpus: 2, want: vmstate.PowerOff,
			trigger: func(t *testing.T, g *testGuest) {
				if err := g.Shutdown(t.Context(), time.Second); err != nil {
					t.Error(err)
				}
			},
		},
		{name: "power-off by a program", vcpus: 1, want: vmstate.PowerOff, trigger: trigger("poweroff -f")},
		{name: "reset by a program", vcpus: 2, want: vmstate.Reset, trigger: trigger("reboot -f")},
		{
			name: "reset by the agent", vcpus: 1, want: vmstate.Reset,
			trigger: func(t *testing.T, g *testGuest) {
				if err := g.Agent().Shutdown(t.Context(), guestrpc.ShutdownRequest{Mode: guestrpc.Reboot}); err != nil {
					t.Error(err)
				}
			},
		},
		{
			name: "kernel panic", vcpus: 2, want: vmstate.Panic, console: "Kernel panic - not syncing",
			trigger: trigger("echo c > /proc/sysrq-trigger"),
		},
		{
			name: "killed vmm", vcpus: 1, want: vmstate.Killed,
			trigger: func(t *testing.T, g *testGuest) {
				if err := unix.Kill(g.process.Pid(), unix.SIGKILL); err != nil {
					t.Error(err)
				}
			},
		},
	} {
		t.Run(c.name, func(t *testing.T) {
			g := boot(t, c.vcpus)
			c.trigger(t, g)
			exit, console := g.process.Wait()
			if exit.Reason != c.want {
				t.Errorf("ended with %v, want %s", exit, c.want)
			}
			if !strings.Contains(string(console), c.console) {
				t.Errorf("the console's tail does not say %q:\n%s", c.console, console)
			}
			if _, err := g.Dial(t.Context(), guestrpc.AgentPort); !errors.Is(err, engine.ErrEnded) {
				t.Errorf("dial after the end: %v, want %v", err, engine.ErrEnded)
			}
		})
	}
}

// TestBootFailureIsExplained: the error of a guest that cannot boot says why.
func TestBootFailureIsExplained(t *testing.T) {
	for _, c := range []struct {
		name string
		edit func(*testing.T, *engine.Spec)
		want []string
	}{
		{
			name: "root is no filesystem", want: []string{"/dev/vda", "erofs"},
			edit: func(t *testing.T, s *engine.Spec) { s.Root, _ = disk(t, mib, nil) },
		},
		{
			name: "unknown word for the agent", want: []string{"agentrun.nonsense"},
			edit: func(_ *testing.T, s *engine.Spec) { s.Cmdline = "agentrun.nonsense=1" },
		},
		{
			name: "kernel is none", want: []string{"load kernel", "ELF"},
			edit: func(t *testing.T, s *engine.Spec) { s.Kernel, _ = disk(t, mib, nil) },
		},
		{
			name: "too little memory", want: []string{"32 MiB"},
			edit: func(_ *testing.T, s *engine.Spec) { s.Memory = 32 * mib },
		},
	} {
		t.Run(c.name, func(t *testing.T) {
			root, err := os.Open(rootImage)
			if err != nil {
				t.Fatal(err)
			}
			defer func() { _ = root.Close() }()
			spec := engine.Spec{Root: root, Memory: 256 * mib, VCPUs: 1}
			c.edit(t, &spec)
			ctx, cancel := context.WithTimeout(t.Context(), bootTimeout)
			defer cancel()
			sb, err := newEngine(t).Boot(ctx, spec)
			if err == nil {
				_ = sb.Close()
				t.Fatal("booted")
			}
			for _, w := range c.want {
				if !strings.Contains(err.Error(), w) {
					t.Errorf("error does not say %q:\n%v", w, err)
				}
			}
		})
	}
}
