package enginetest

import (
	"context"
	"errors"
	"sync"
	"testing"

	"agentrun.dev/internal/engine"
)

// turns hands out one turn at a time, and counts them.
type turns struct {
	one chan struct{}

	mu          sync.Mutex // protects all following fields
	given, held int
	most        int // the maximum of held
}

func (u *turns) take(ctx context.Context) (func(), error) {
	select {
	case u.one <- struct{}{}:
	case <-ctx.Done():
		return nil, ctx.Err()
	}
	u.mu.Lock()
	defer u.mu.Unlock()
	u.given++
	u.held++
	u.most = max(u.most, u.held)
	return func() {
		u.mu.Lock()
		u.held--
		u.mu.Unlock()
		<-u.one
	}, nil
}

// testTurns: a fork, and each child of a running sandbox, starts when it has its turn
// and gives the turn back. If it is refused a turn, it fails alone.
func (s *suite) testTurns(t *testing.T) {
	u := &turns{one: make(chan struct{}, 1)}
	refused := errors.New("no turn")
	no := func(context.Context) (func(), error) { return nil, refused }
	source := s.fork(t, s.warm, engine.ForkOptions{Turn: u.take})
	if _, err := s.Engine.Fork(t.Context(), s.warm, engine.ForkOptions{Turn: no}); !errors.Is(err, refused) {
		t.Errorf("a fork without a turn: %v", err)
	}
	f, err := source.Fork(t.Context(), []engine.ForkOptions{{Turn: u.take}, {Turn: no}, {Turn: u.take}, {Turn: u.take}})
	if err != nil {
		t.Fatal(err)
	}
	for i, child := range f.Forks {
		if i == 1 {
			if !errors.Is(f.Errs[i], refused) || child != nil {
				t.Errorf("a child without a turn: %v, %v", child, f.Errs[i])
			}
			continue
		}
		if f.Errs[i] != nil {
			t.Fatalf("child %d: %v", i, f.Errs[i])
		}
		defer func() { _ = child.Close() }()
		if got := sh(t, child, "cat /warm"); got != "warmed up" {
			t.Errorf("child %d has %q", i, got)
		}
	}
	if u.given != 4 || u.held != 0 || u.most != 1 {
		t.Errorf("%d turns were given, want 4; %d at once; %d are held still", u.given, u.most, u.held)
	}
}
