package netd_test

import (
	"fmt"
	"os"
	"strings"
	"testing"
	"time"

	"agentrun.dev/internal/network/netctl"
	"agentrun.dev/internal/network/networktest"
)

// TestIdleMemory: an idle wire takes at most 4 KiB of a netd's memory some time after
// it was attached, when the remains of the request were returned.
func TestIdleMemory(t *testing.T) {
	cfg, _ := config(t)
	p := start(t, cfg)
	attach := func(name string, wires int) {
		t.Helper()
		for i := range wires {
			_, far := networktest.NewWire(t)
			if err := p.Attach(t.Context(), wireOf(netctl.ID(fmt.Sprint(name, i)), rules("api.example.com:443", "*.example.org:443")), far); err != nil {
				t.Fatal(err)
			}
		}
	}
	const wires, limit = 500, 4 << 10
	attach("first-", 1)
	before := settled(t, p.PID())
	attach("wire-", wires)
	each := func() int { return (anonymous(t, p.PID()) - before) / wires }
	// There is no event when a process has returned memory, and a busy host delays
	// it.
	for deadline := time.Now().Add(time.Minute); each() > limit; time.Sleep(pause) {
		if time.Now().After(deadline) {
			t.Fatalf("an idle wire costs %d bytes, more than %d", each(), limit)
		}
	}
	t.Logf("%d bytes for each of %d idle wires", each(), wires)
}

// pause is the time between two looks at a process's memory.
const pause = 100 * time.Millisecond

// settled is the memory of a process once it has returned what it can: the memory has
// not changed for longer than returning takes. There is no event for that.
func settled(t *testing.T, pid int) int {
	t.Helper()
	now, since := anonymous(t, pid), time.Duration(0)
	for range 300 {
		time.Sleep(pause)
		next := anonymous(t, pid)
		if since += pause; next != now {
			now, since = next, 0
		}
		if since >= 3*time.Second {
			return now
		}
	}
	t.Fatal("the memory of an idle process changes all the time")
	return 0
}

// anonymous is the memory of a process that belongs to no file, in bytes. The kernel
// counts it exactly for this file. Its other counters are only accurate to some
// hundred pages.
func anonymous(t *testing.T, pid int) int {
	t.Helper()
	b, err := os.ReadFile(fmt.Sprintf("/proc/%d/smaps_rollup", pid))
	if err != nil {
		t.Fatal(err)
	}
	_, rest, _ := strings.Cut(string(b), "\nAnonymous:")
	var kib int
	if _, err := fmt.Sscanf(rest, "%d kB", &kib); err != nil {
		t.Fatalf("%v in:\n%s", err, b)
	}
	return kib << 10
}
