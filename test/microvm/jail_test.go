package microvm

import (
	"strings"
	"testing"

	"agentrun.dev/internal/engine"
	"agentrun.dev/internal/guest/guestrpc"
)

// TestAllOfItsRAM: a guest can use all of its RAM. The limit leaves room for
// the other memory of its VM.
func TestAllOfItsRAM(t *testing.T) {
	soakEachSMP(t, func(t *testing.T, vcpus int) {
		const ram = 192 * mib
		g := boot(t, vcpus, func(s *engine.Spec) { s.Memory = ram })
		before, limit, err := g.process.Charged()
		if err != nil || limit <= ram {
			t.Fatalf("limit %d, %v", limit, err)
		}
		// The guest fills all of it except the part that the kernel keeps free;
		// beyond that, the kernel would kill processes.
		g.sh(t, `mkdir /run/fill && mount -t tmpfs -o size=100%% none /run/fill
			free=$(awk '/MemAvailable/ { print int($2 / 1024) - 6 }' /proc/meminfo)
			dd if=/dev/zero of=/run/fill/all bs=1M count=$free 2>/dev/null`)
		usage, _, err := g.process.Charged()
		if err != nil {
			t.Fatal(err)
		}
		t.Logf("RAM %d MiB: %.1f MiB charged at first, %.1f MiB when all is used, limit %.1f MiB",
			ram/mib, float64(before)/mib, float64(usage)/mib, float64(limit)/mib)
		if usage < ram*9/10 {
			t.Errorf("only %d of %d bytes of RAM were used: this tested nothing", usage, ram)
		}
		if usage > limit-4*mib {
			t.Errorf("%d bytes are charged, which leaves less than 4 MiB to the limit of %d", usage, limit)
		}
		// The guest still answers after reading all of it.
		if got := g.sh(t, "cat /run/fill/all >/dev/null && rm /run/fill/all && echo alive"); got != "alive" {
			t.Errorf("afterwards it said %q", got)
		}
	})
}

// TestCaptureOfFullGuest: the capture of a full guest nearly doubles the
// charged memory, and the guest survives it.
func TestCaptureOfFullGuest(t *testing.T) {
	sb, err := newEngine(t).Boot(t.Context(), engine.Spec{Root: openRoot(t), Memory: 128 * mib, VCPUs: 1})
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = sb.Close() }()
	shell := func(script string) guestrpc.ExecRequest {
		return guestrpc.ExecRequest{Argv: []string{"sh", "-c", script}}
	}
	status, err := sb.Agent().Run(t.Context(), shell(`mkdir /run/fill && mount -t tmpfs -o size=100% none /run/fill
		dd if=/dev/urandom of=/run/fill/all bs=1M count=70 2>/dev/null`), nil, nil, nil)
	if err != nil || status.Code != 0 {
		t.Fatalf("%+v, %v", status, err)
	}
	snap, err := sb.Snapshot(t.Context(), t.TempDir()+"/full")
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = snap.Close() }()
	var out strings.Builder
	status, err = sb.Agent().Run(t.Context(), shell("ls /run/fill"), nil, &out, nil)
	if err != nil || status.Code != 0 || strings.TrimSpace(out.String()) != "all" {
		t.Errorf("after the capture: %+v, %v, %q", status, err, out.String())
	}
}
