package peers

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"sync"
	"time"

	"agentrun.dev/bench"
	"agentrun.dev/internal/guestrpc"
)

// What is done inside guests that have our agent.

func runProgram(ctx context.Context, agent *guestrpc.Client, program ...string) error {
	var stderr bytes.Buffer
	status, err := agent.Run(ctx, guestrpc.ExecRequest{Argv: program}, nil, nil, &stderr)
	if err != nil {
		return err
	}
	if status.Code != 0 {
		return fmt.Errorf("%s returned %d: %s", program[0], status.Code, stderr.Bytes())
	}
	return nil
}

func runShell(ctx context.Context, agent *guestrpc.Client, script string) error {
	return runProgram(ctx, agent, "/bin/sh", "-c", script)
}

// use runs a program in a fork that has answered, with a look at the memory of
// its process before and after.
func (f forked) use(ctx context.Context, agent *guestrpc.Client, pid int, program string) (_ forked, err error) {
	if f.ownAfterAnswer, err = bench.Anonymous(pid); err != nil {
		return f, err
	}
	d, err := timed(time.Now(), func() error { return runProgram(ctx, agent, program) })
	if err != nil {
		return f, err
	}
	f.executed = f.renewed + d
	f.ownAfterExec, err = bench.Anonymous(pid)
	return f, err
}

// timed is how long after begin something was done.
func timed(begin time.Time, do func() error) (time.Duration, error) {
	err := do()
	return time.Since(begin), err
}

// dirtyScript writes fresh content to size bytes of the guest's memory, to the
// same place each time.
func dirtyScript(size uint64) string {
	const piece = 4 // MiB
	return fmt.Sprintf(`set -e
grep -q ' /dev/shm ' /proc/mounts || { mkdir -p /dev/shm; mount -t tmpfs none /dev/shm; }
mount -o remount,size=90%% /dev/shm
dd if=/dev/urandom of=/dev/shm/seed bs=1M count=%d 2>/dev/null
i=0; while [ $i -lt %d ]; do dd if=/dev/shm/seed of=/dev/shm/dirt bs=1M seek=$((i*%d)) conv=notrunc 2>/dev/null; i=$((i+1)); done`,
		piece, (size>>20)/piece, piece)
}

// tickScript is what the driver of microsandbox runs, too.
const tickScript = "while :; do echo; usleep 2000; done"

// Ticks to hear before and after a fork.
const ticksBefore, ticksAfter = 20, 5

// silence is the longest time without a word of a source that talks all the
// time, as seen from outside: its own clock does not count a pause.
func silence(ctx context.Context, agent *guestrpc.Client, fork func() error) (_ time.Duration, err error) {
	x, err := agent.Exec(ctx, guestrpc.ExecRequest{Argv: []string{"/bin/sh", "-c", tickScript}})
	if err != nil {
		return 0, err
	}
	ticks := newTicks()
	copied := make(chan struct{})
	go func() {
		defer close(copied)
		_, _ = x.Copy(nil, ticks, nil) // it ends by our signal
	}()
	defer func() {
		err = errors.Join(err, agent.Signal(ctx, guestrpc.SignalRequest{ID: x.ID(), Signal: 9}))
		<-copied
		err = errors.Join(err, x.Close())
	}()
	if err := ticks.hear(ctx, ticksBefore); err != nil {
		return 0, err
	}
	begin := ticks.count() - 1
	if err := fork(); err != nil {
		return 0, err
	}
	if err := ticks.hear(ctx, ticksAfter); err != nil {
		return 0, err
	}
	return ticks.longestGap(begin), nil
}

// ticks notes when something was written.
type ticks struct {
	mu   sync.Mutex // protects all following fields
	at   []time.Time
	more chan struct{} // closed and renewed at each tick
}

func newTicks() *ticks { return &ticks{more: make(chan struct{})} }

func (t *ticks) Write(p []byte) (int, error) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.at = append(t.at, time.Now())
	close(t.more)
	t.more = make(chan struct{})
	return len(p), nil
}

func (t *ticks) count() int {
	t.mu.Lock()
	defer t.mu.Unlock()
	return len(t.at)
}

// hear waits for n more ticks.
func (t *ticks) hear(ctx context.Context, n int) error {
	want := t.count() + n
	for {
		t.mu.Lock()
		more, have := t.more, len(t.at)
		t.mu.Unlock()
		if have >= want {
			return nil
		}
		select {
		case <-more:
		case <-ctx.Done():
			return fmt.Errorf("the source is silent: %w", ctx.Err())
		}
	}
}

// longestGap is between two ticks, from one of them on.
func (t *ticks) longestGap(from int) (longest time.Duration) {
	t.mu.Lock()
	defer t.mu.Unlock()
	for i := from + 1; i < len(t.at); i++ {
		longest = max(longest, t.at[i].Sub(t.at[i-1]))
	}
	return longest
}
