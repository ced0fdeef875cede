package microvm

import (
	"sync"
	"testing"
	"time"
)

// TestParallel: two busy loops on two vCPUs take about as long as one, not
// twice as long. Wall-clock times are noisy here, so the test takes the best
// ratio of several tries.
func TestParallel(t *testing.T) {
	g := boot(t, 2)
	loop := func(cpu int) {
		g.sh(t, "taskset -c %d sh -c 'i=0; while [ $i -lt 300000 ]; do i=$((i+1)); done'", cpu)
	}
	both := func() {
		var wg sync.WaitGroup
		for cpu := range 2 {
			wg.Go(func() { loop(cpu) })
		}
		wg.Wait()
	}
	measure := func(f func()) time.Duration {
		start := time.Now()
		f()
		return time.Since(start)
	}
	best := 2.0
	for range 6 {
		one, two := measure(func() { loop(0) }), measure(both)
		best = min(best, float64(two)/float64(one))
		t.Logf("one loop %v, two loops %v", one, two)
		if best < 1.5 {
			return
		}
	}
	t.Errorf("two loops take %.2f times as long as one: the vCPUs do not run in parallel", best)
}
