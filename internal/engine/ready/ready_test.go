package ready

import (
	"context"
	"errors"
	"net"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"agentrun.dev/internal/engine"
	"agentrun.dev/internal/engine/stock"
	"agentrun.dev/internal/guest/agent"
	"agentrun.dev/internal/guest/guestrpc"
	"agentrun.dev/internal/storage/snapshot"
)

// fakeEngine makes sandboxes without a machine: their agents are real, their
// lives are told. The real ones are in test/microvm.
type fakeEngine struct {
	engine.Engine
	t     *testing.T
	alive atomic.Int32

	mu   sync.Mutex // protects all following fields
	fail error      // of Fork
	all  []*fakeSandbox
}

type fakeSandbox struct {
	engine.Sandbox
	from    *fakeEngine
	agent   *guestrpc.Client
	done    chan struct{}
	end     sync.Once
	paused  atomic.Bool
	claimed atomic.Int32
	refuse  atomic.Bool // to be claimed
}

func (e *fakeEngine) Fork(ctx context.Context, _ *snapshot.Snapshot, _ engine.ForkOptions) (engine.Sandbox, error) {
	e.mu.Lock()
	defer e.mu.Unlock()
	if e.fail != nil {
		return nil, e.fail
	}
	ours, theirs := net.Pipe()
	go func() { _ = guestrpc.Serve(context.Background(), theirs, &agent.Server{}) }()
	agent, err := guestrpc.NewClient(ctx, ours)
	if err != nil {
		return nil, err
	}
	sb := &fakeSandbox{from: e, agent: agent, done: make(chan struct{})}
	e.alive.Add(1)
	e.all = append(e.all, sb)
	return sb, nil
}

func (s *fakeSandbox) Agent() *guestrpc.Client { return s.agent }
func (s *fakeSandbox) Done() <-chan struct{}   { return s.done }
func (s *fakeSandbox) Wait() error             { <-s.done; return engine.ErrEnded }

func (s *fakeSandbox) Park(context.Context) error {
	s.paused.Store(true)
	return nil
}

func (s *fakeSandbox) Claim(context.Context, string) error {
	if s.refuse.Load() {
		return errors.New("the guest does not answer")
	}
	if !s.paused.Swap(false) {
		s.from.t.Error("a sandbox that was not paused was claimed")
	}
	if s.claimed.Add(1) > rehearsals+1 {
		s.from.t.Error("a sandbox was claimed twice")
	}
	return nil
}

func (s *fakeSandbox) Close() error {
	s.end.Do(func() {
		s.from.alive.Add(-1)
		close(s.done)
	})
	return s.agent.Close()
}

func newPool(t *testing.T, n int) (*Pool, *fakeEngine) {
	t.Helper()
	e := &fakeEngine{t: t}
	p, err := New(Config{Engine: e, Count: n})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := p.Close(); err != nil {
			t.Error(err)
		}
	})
	return p, e
}

func full(t *testing.T, p *Pool) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	if err := p.WaitFull(ctx); err != nil {
		t.Fatal(err)
	}
}

// TestBurst: many claims at once all get a sandbox, nobody the same, the first
// from the pool and the others by forks; then the pool is full again.
func TestBurst(t *testing.T) {
	p, e := newPool(t, 5)
	full(t, p)
	var claims sync.WaitGroup
	var mu sync.Mutex
	got := map[engine.Sandbox]bool{}
	for range 50 {
		claims.Go(func() {
			sb, err := p.Claim(t.Context(), "")
			if err != nil {
				t.Error(err)
				return
			}
			mu.Lock()
			defer mu.Unlock()
			got[sb] = true
		})
	}
	claims.Wait()
	full(t, p)
	s := p.Stats()
	if len(got) != 50 || s.Claimed+s.Forked != 50 || s.Claimed < 5 || s.Ready != 5 {
		t.Errorf("%d sandboxes, %+v", len(got), s)
	}
	if err := p.Close(); err != nil {
		t.Error(err)
	}
	if n := e.alive.Load(); n != 50 {
		t.Errorf("%d sandboxes live after the pool, 50 were claimed", n)
	}
}

// TestTurn: each rehearsal has a turn, which it gives back; a sandbox that gets none
// ends.
func TestTurn(t *testing.T) {
	e := &fakeEngine{t: t}
	var taken, held atomic.Int32
	refused := errors.New("no turn")
	p, err := New(Config{Engine: e, Count: 1, Turn: func(context.Context) (func(), error) {
		if n := taken.Add(1); n == 2 {
			return nil, refused
		}
		if held.Add(1) != 1 {
			t.Error("a turn was not given back")
		}
		return func() { held.Add(-1) }, nil
	}})
	if err != nil {
		t.Fatal(err)
	}
	full(t, p)
	// One attempt ended with the second turn; the other one had all.
	if n := taken.Load(); n != 2+rehearsals || e.alive.Load() != 1 || held.Load() != 0 {
		t.Errorf("%d turns were asked for, %d sandboxes live, %d turns are held", n, e.alive.Load(), held.Load())
	}
	if s := p.Stats(); s.Failed != 1 || !strings.Contains(s.LastError, refused.Error()) {
		t.Errorf("%+v", s)
	}
	if err := p.Close(); err != nil {
		t.Error(err)
	}
}

// TestHold: while the pool is held nothing is made, whatever is claimed; then it
// is filled again.
func TestHold(t *testing.T) {
	p, e := newPool(t, 3)
	full(t, p)
	release, again := p.Hold(), p.Hold()
	for range 3 {
		if _, err := p.Claim(t.Context(), ""); err != nil {
			t.Fatal(err)
		}
	}
	again()
	again() // of no effect
	e.mu.Lock()
	made := len(e.all)
	e.mu.Unlock()
	if s := p.Stats(); s.Ready != 0 || s.Claimed != 3 || made != 3 {
		t.Errorf("%+v, %d were made", s, made)
	}
	release()
	full(t, p)
}

// TestDead: sandboxes that end while they wait are replaced, and one that
// cannot be claimed is not handed out.
func TestDead(t *testing.T) {
	p, e := newPool(t, 3)
	full(t, p)
	e.mu.Lock()
	waiting := append([]*fakeSandbox(nil), e.all...)
	e.mu.Unlock()
	for _, sb := range waiting {
		if err := sb.Close(); err != nil {
			t.Fatal(err)
		}
	}
	if err := p.stock.WaitUntil(t.Context(), func(s stock.Stats) bool { return s.Lost == 3 }); err != nil {
		t.Fatal(err)
	}
	full(t, p)
	e.mu.Lock()
	for _, sb := range e.all {
		sb.refuse.Store(true)
	}
	e.mu.Unlock()
	sb, err := p.Claim(t.Context(), "")
	if err != nil {
		t.Fatal(err)
	}
	if s := p.Stats(); s.Lost != 6 || s.Forked+s.Claimed != 1 || sb.(*fakeSandbox).refuse.Load() {
		t.Errorf("%+v", s)
	}
}

// TestFailure: a pool that cannot be filled says why, and recovers.
func TestFailure(t *testing.T) {
	e := &fakeEngine{t: t, fail: errors.New("no memory")}
	p, err := New(Config{Engine: e, Count: 1})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = p.Close() })
	ctx, cancel := context.WithCancel(t.Context())
	if err := p.stock.WaitUntil(ctx, func(s stock.Stats) bool { return s.Failed > 0 }); err != nil {
		t.Fatal(err)
	}
	cancel()
	if err := p.WaitFull(ctx); err == nil || p.Stats().LastError != "no memory" {
		t.Errorf("%v, %+v", err, p.Stats())
	}
	if _, err := p.Claim(t.Context(), ""); err == nil {
		t.Error("claimed")
	}
	e.mu.Lock()
	e.fail = nil
	e.mu.Unlock()
	full(t, p)
}

// aheadEngine says what shells were asked of it.
type aheadEngine struct {
	*fakeEngine
	asked, closed int
	fail          error
}

func (e *aheadEngine) KeepShells(_ *snapshot.Snapshot, n int) (engine.Shells, error) {
	e.asked += n
	return (*fakeShells)(e), e.fail
}

type fakeShells aheadEngine

func (*fakeShells) WaitFull(context.Context) error { return nil }
func (*fakeShells) Stats() engine.ShellStats       { return engine.ShellStats{} }
func (s *fakeShells) Close() error                 { s.closed++; return nil }

// TestShells: a pool has its engine keep shells for as long as it lives.
func TestShells(t *testing.T) {
	e := &aheadEngine{fakeEngine: &fakeEngine{t: t}}
	p, err := New(Config{Engine: e, Count: 1, Shells: 4})
	if err != nil {
		t.Fatal(err)
	}
	full(t, p)
	if e.asked != 4 || e.closed != 0 {
		t.Errorf("%d shells, %d closed", e.asked, e.closed)
	}
	if err := p.Close(); err != nil || e.closed != 1 {
		t.Errorf("%v, %d closed", err, e.closed)
	}
	e.fail = errors.New("no")
	if _, err := New(Config{Engine: e, Shells: 1}); !errors.Is(err, e.fail) {
		t.Errorf("%v", err)
	}
}
