package enginetest

import (
	"fmt"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"testing"

	"agentrun.dev/internal/engine"
)

// testPrivate: many forks write to the same places and read them all back, and each
// draws random numbers of its own.
func (s *suite) testPrivate(t *testing.T) {
	// This source runs no counter: in a hundred forks it would leave no processor
	// time for anything else.
	source := s.fork(t, s.warm, engine.ForkOptions{})
	sh(t, source, "kill $(cat /run/test/pid)")
	quiet, err := source.Snapshot(t.Context(), filepath.Join(s.dir, "quiet"))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = quiet.Close() })
	forks := make([]engine.Sandbox, s.Forks)
	for i := range forks {
		forks[i] = s.fork(t, quiet, engine.ForkOptions{Hostname: fmt.Sprintf("fork-%d", i)})
	}
	device := s.ScratchDevice
	var wg sync.WaitGroup
	limit := make(chan struct{}, 8)
	each := func(script func(i int) string, check func(i int, got string)) {
		for i, sb := range forks {
			wg.Go(func() {
				limit <- struct{}{}
				defer func() { <-limit }()
				check(i, sh(t, sb, script(i)))
			})
		}
		wg.Wait()
	}
	each(func(i int) string {
		script := fmt.Sprintf("echo %d > /run/test/mine; echo %d > /mine; ", i, i)
		if device != "" {
			script += fmt.Sprintf("echo disk %d | dd of=%s bs=512 seek=8 conv=fsync 2>/dev/null; ", i, device)
		}
		return script + "echo ok"
	}, func(i int, got string) {
		if got != "ok" {
			t.Errorf("fork %d: %q", i, got)
		}
	})
	var drawn sync.Map // random number → the fork that drew it
	each(func(int) string {
		script := "head -c 16 /dev/urandom | od -An -tx1; hostname; cat /run/test/mine /mine; "
		if device != "" {
			script += fmt.Sprintf("dd if=%s bs=512 skip=8 count=1 2>/dev/null | head -n1", device)
		}
		return script
	}, func(i int, got string) {
		random, got, _ := strings.Cut(got, "\n")
		if other, twice := drawn.LoadOrStore(random, i); twice {
			t.Errorf("forks %d and %d drew the same random numbers, %s", other, i, random)
		}
		want := fmt.Sprintf("fork-%d\n%d\n%d", i, i, i)
		if device != "" {
			want += fmt.Sprintf("\ndisk %d", i)
		}
		if got != want {
			t.Errorf("fork %d sees %q, not %q", i, got, want)
		}
	})
	if got := sh(t, s.fork(t, quiet, engine.ForkOptions{}), "ls /mine /run/test/mine 2>/dev/null; echo none"); got != "none" {
		t.Errorf("a new fork sees what others wrote: %q", got)
	}
}

// testForkOfFork makes a fork of a fork, five deep.
func (s *suite) testForkOfFork(t *testing.T) {
	from := s.warm
	for depth := 1; depth <= 5; depth++ {
		sb := s.fork(t, from, engine.ForkOptions{})
		if got := sh(t, sb, "cat /run/agentrun/generation"); got != strconv.Itoa(depth) {
			t.Errorf("generation %s at depth %d", got, depth)
		}
		for d := 1; d < depth; d++ {
			if got := sh(t, sb, fmt.Sprintf("cat /depth-%d", d)); got != strconv.Itoa(d) {
				t.Errorf("depth %d lost what %d wrote: %q", depth, d, got)
			}
		}
		sh(t, sb, fmt.Sprintf("echo %d > /depth-%d", depth, depth))
		next, err := sb.Snapshot(t.Context(), filepath.Join(s.dir, fmt.Sprintf("depth-%d", depth)))
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { _ = next.Close() })
		from = next
	}
}
