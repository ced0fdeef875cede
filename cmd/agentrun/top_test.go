package main

import (
	"bytes"
	"strings"
	"testing"
	"time"

	"agentrun.dev/api/rest"
)

// TestTop: percentages are of the time between two looks at the same machine.
// The sandbox with the highest cost comes first.
func TestTop(t *testing.T) {
	at := time.Unix(1000, 0)
	stats := func(name string, cpu time.Duration, own int64, at time.Time) rest.SandboxStats {
		return rest.SandboxStats{Name: name, Id: "id-" + name, State: rest.SandboxStateRunning, Cpu: int64(cpu), Own: own, Time: at}
	}
	before := look{Sandboxes: []costLine{
		{SandboxStats: stats("a", time.Second, 1<<20, at)}, {SandboxStats: stats("b", 0, 3<<20, at)}, {SandboxStats: stats("c", time.Hour, 2<<20, at)},
	}}
	now := look{Node: rest.Node{Engine: "e", Sandboxes: 4}}
	for _, s := range []rest.SandboxStats{
		stats("a", 2*time.Second, 1<<20, at.Add(4*time.Second)), stats("b", 6*time.Second, 3<<20, at.Add(4*time.Second)),
		stats("c", time.Second, 2<<20, at.Add(4*time.Second)), // woken: another machine
		stats("d", time.Second, 9<<20, at.Add(4*time.Second)), // new
	} {
		if s.Name == "a" {
			s.NetworkSent, s.NetworkReceived, s.NetworkConnections = 4<<10, 12<<20, 3
		}
		now.Sandboxes = append(now.Sandboxes, compareCost(before, s))
	}
	for by, want := range map[string]string{sortCPU: "b a c d", sortMemory: "d b c a", sortNetwork: "a b c d", sortName: "a b c d"} {
		var got []string
		for _, l := range now.sorted(by) {
			got = append(got, l.Name)
		}
		if strings.Join(got, " ") != want {
			t.Errorf("by %s: %v, not %s", by, got, want)
		}
	}
	var out bytes.Buffer
	o := topOptions{sort: sortCPU, once: true}
	if err := o.show(&out, now, false); err != nil {
		t.Fatal(err)
	}
	lines := strings.Split(out.String(), "\n")
	if len(lines) != 8 || !strings.HasPrefix(lines[0], "e: 4 sandboxes") || strings.Join(strings.Fields(lines[2]), " ") != "NAME STATUS CPU% CPU TIME OWN SHARED RESERVED SENT/S RECV/S CONNS" ||
		strings.Join(strings.Fields(lines[3]), " ") != "b Ready 150.0 6s 3.0 MiB 0.0 MiB 0.0 MiB 0 B 0 B 0" ||
		strings.Join(strings.Fields(lines[4])[9:], " ") != "MiB 1.0 KiB 3.0 MiB 3" || strings.Fields(lines[6])[2] != "-" {
		t.Errorf("%s", out.String())
	}
}
