package bench

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"time"

	"agentrun.dev/internal/guest/guestrpc"
)

// tickScript is what peers/driver.py runs in microsandbox, too.
const tickScript = "while :; do echo; usleep 2000; done"

// Ticks to hear before and after a fork.
const ticksBefore, ticksAfter = 20, 5

// Silence is the longest time without a word of a source that talks all the
// time, as seen from outside, while it is forked: its own clock does not count
// a pause.
func Silence(ctx context.Context, agent *guestrpc.Client, fork func() error) (_ time.Duration, err error) {
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

// QuietSilence is the same while nobody forks the source, for some time: what
// the source's own work and the rest of the machine cost.
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
