package microvm

import (
	"fmt"
	"os"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"agentrun.dev/internal/engine"
	"agentrun.dev/internal/engine/microvm"
	"agentrun.dev/test/soak"
)

// counters starts one program per vCPU that counts in step in memory and on
// disk (guest/rootfs/counter.c).
func counters(t *testing.T, sb engine.Sandbox, n int) {
	t.Helper()
	command(t, sb, "mkdir -p /run/count")
	for i := range n {
		command(t, sb, fmt.Sprintf("counter /dev/vdb %d /run/count/%d </dev/null >/dev/null 2>&1 & "+
			"until [ -s /run/count/%d ]; do usleep 1000; done", 8*i, i, i))
	}
}

// goesOn waits until all counters of a sandbox have checked several more
// rounds, and returns the rounds before that. It fails if a counter has found
// its memory and its disk at different instants.
func goesOn(t *testing.T, sb engine.Sandbox) (rounds []int) {
	t.Helper()
	for i, line := range strings.Split(command(t, sb, "for c in /run/count/*; do counter $c 3; done"), "\n") {
		fields := strings.Fields(line)
		if len(fields) != 2 {
			t.Fatalf("a counter says %q", line)
		}
		n, err := strconv.Atoi(fields[0])
		if err != nil || fields[1] != "0000" {
			t.Fatalf("in round %s memory and disk do not agree (%s)", fields[0], fields[1])
		}
		if i%2 == 0 { // the first of two lines
			rounds = append(rounds, n)
		}
	}
	return rounds
}

// resources counts the mappings and descriptors of a sandbox's vmm process.
func resources(t *testing.T, sb engine.Sandbox) (mappings, descriptors int) {
	t.Helper()
	id, err := microvm.Identify(sb)
	if err != nil {
		t.Fatal(err)
	}
	maps, err := os.ReadFile(fmt.Sprintf("/proc/%d/maps", id.PID))
	if err != nil {
		t.Fatal(err)
	}
	fds, err := os.ReadDir(fmt.Sprintf("/proc/%d/fd", id.PID))
	if err != nil {
		t.Fatal(err)
	}
	return strings.Count(string(maps), "\n"), len(fds)
}

// TestLiveForks forks a source repeatedly while it counts in step in memory and
// on disk. Both agree in every child, the source loses nothing, and the last
// forks cost as much as the first.
func TestLiveForks(t *testing.T) {
	soakEachSMP(t, func(t *testing.T, vcpus int) {
		e := newEngine(t)
		source, err := e.Boot(t.Context(), engine.Spec{Root: openRoot(t), Memory: 128 * mib, VCPUs: vcpus, Scratch: 64 * mib})
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { _ = source.Close() })
		counters(t, source, vcpus)
		forks := soak.Count(1000, 6)
		var most [2]struct{ mappings, descriptors int }
		var latency latencies
		for i := range forks {
			start := time.Now()
			before := goesOn(t, source)
			yardstick := time.Since(start)
			start = time.Now()
			f, err := source.Fork(t.Context(), []engine.ForkOptions{{}})
			if err != nil || f.Errs[0] != nil {
				t.Fatal(i, err, f)
			}
			latency = append(latency, float64(time.Since(start))/float64(yardstick))
			if f.Stats.WhyCopiedInPause != "" {
				t.Fatalf("memory was copied in the pause: %s", f.Stats.WhyCopiedInPause)
			}
			child := f.Forks[0]
			at := goesOn(t, child)
			if len(at) != vcpus {
				t.Fatalf("fork %d: %d counters", i, len(at))
			}
			for k := range at {
				if at[k] < before[k] {
					t.Fatalf("fork %d: counter %d stands at %d, the source was at %d before", i, k, at[k], before[k])
				}
			}
			if err := child.Close(); err != nil {
				t.Fatal(err)
			}
			half := 2 * i / forks
			m, d := resources(t, source)
			most[half].mappings, most[half].descriptors = max(most[half].mappings, m), max(most[half].descriptors, d)
			if i%50 == 0 || i == forks-1 || !soak.On() {
				t.Logf("fork %d: %d mappings, %d descriptors, %+v", i, m, d, f.Stats)
			}
		}
		goesOn(t, source)
		quiet(t, source)
		// The numbers vary as layers are added and folded, but do not grow.
		if most[1].mappings > most[0].mappings+64 || most[1].descriptors > most[0].descriptors+8 {
			t.Errorf("at most %+v in the first half, %+v in the second", most[0], most[1])
		}
		latency.check(t)
	})
}

// latencies are the durations of forks, as multiples of the time that the
// source needed for some work just before, because the machine's load varies.
type latencies []float64

// slowestGrowth bounds how much slower the last forks may be than the first.
const slowestGrowth = 2.5

// check compares the medians of the first and the last forks. A short run is
// not checked.
func (l latencies) check(t *testing.T) {
	t.Helper()
	const window = 50
	if len(l) < 2*window {
		return
	}
	first, last := median(l[:window]), median(l[len(l)-window:])
	t.Logf("a fork takes %.2f times as long as the source's rounds at first, %.2f times at last", first, last)
	if last > slowestGrowth*first {
		t.Errorf("the last %d forks took %.1f times as long as the first", window, last/first)
	}
}

func median(sample []float64) float64 {
	s := slices.Sorted(slices.Values(sample))
	return s[len(s)/2]
}

// TestLiveForksAtOnce: forks are requested while the copy for another fork is
// in progress, with several children of one instant.
func TestLiveForksAtOnce(t *testing.T) {
	e := newEngine(t)
	source, err := e.Boot(t.Context(), engine.Spec{Root: openRoot(t), Memory: 128 * mib, VCPUs: 1, Scratch: 64 * mib})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = source.Close() })
	counters(t, source, 1)
	var wg sync.WaitGroup
	for range soak.Count(8, 3) { // each child keeps a processor busy
		wg.Go(func() {
			f, err := source.Fork(t.Context(), make([]engine.ForkOptions, 2))
			if err != nil {
				t.Error(err)
				return
			}
			for i, child := range f.Forks {
				if f.Errs[i] != nil {
					t.Error(f.Errs[i])
					continue
				}
				goesOn(t, child)
				if err := child.Close(); err != nil {
					t.Error(err)
				}
			}
		})
	}
	wg.Wait()
	goesOn(t, source)
}

// TestLiveForkOfKilled: if a source is killed during a fork, the fork fails and
// no child of it is used.
func TestLiveForkOfKilled(t *testing.T) {
	e := newEngine(t)
	for range soak.Count(20, 3) {
		source, err := e.Boot(t.Context(), engine.Spec{Root: openRoot(t), Memory: 128 * mib, VCPUs: 1, Scratch: 64 * mib})
		if err != nil {
			t.Fatal(err)
		}
		id, err := microvm.Identify(source)
		if err != nil {
			t.Fatal(err)
		}
		forked := make(chan error, 1)
		go func() {
			for { // until the kill hits a fork
				f, err := source.Fork(t.Context(), []engine.ForkOptions{{}})
				if err != nil {
					forked <- err
					return
				}
				if f.Errs[0] != nil {
					t.Error(f.Errs[0])
					continue
				}
				if err := f.Forks[0].Agent().Ping(t.Context()); err != nil {
					t.Errorf("a child that was given out does not answer: %v", err)
				}
				_ = f.Forks[0].Close()
			}
		}()
		if err := id.Kill(t.Context()); err != nil {
			t.Fatal(err)
		}
		if err := <-forked; err == nil {
			t.Error("a killed sandbox was forked")
		}
		_ = source.Close()
	}
}
