package bench

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"time"

	"agentrun.dev/internal/guest/guestrpc"
)

// tickScript is also what peers/driver.py runs in microsandbox.
const tickScript = "while :; do echo; usleep 2000; done"

// Ticks to wait for before and after a fork.
const ticksBefore, ticksAfter = 20, 5

// Silence is the longest silence of a source that prints all the time, measured from
// outside while the source is forked. The source's own clock does not count a pause.
func Silence(ctx context.Context, agent *guestrpc.Client, fork func() error) (_ time.Duration, err error) {
	x, err := agent.Exec(ctx, guestrpc.ExecRequest{Argv: []string{"/bin/sh", "-c", tickScript}})
	if err != nil {
		return 0, err
	}
	ticks := newTicks()
	copied := make(chan struct{})
	go func() {
		defer close(copied)
		_, _ = x.Copy(nil, ticks, nil) // our signal ends it
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

// QuietSilence is the same for a while without a fork: the effect of the source's own
// work and of the rest of the machine.
func QuietSilence(ctx context.Context, agent *guestrpc.Client, d time.Duration) (time.Duration, error) {
	return Silence(ctx, agent, func() error {
		select {
		case <-time.After(d):
			return nil
		case <-ctx.Done():
			return ctx.Err()
		}
	})
}

// ticks records the times of writes.
type ticks struct {
	mu   sync.Mutex // protects all following fields
	at   []time.Time
	more chan struct{} // closed and replaced at each tick
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

// longestGap is the longest gap between two ticks, from a given tick on.
func (t *ticks) longestGap(from int) (longest time.Duration) {
	t.mu.Lock()
	defer t.mu.Unlock()
	for i := from + 1; i < len(t.at); i++ {
		longest = max(longest, t.at[i].Sub(t.at[i-1]))
	}
	return longest
}
