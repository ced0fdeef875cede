package stock

import (
	"context"
	"errors"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"
)

// maker makes items and counts those that live.
type maker struct {
	alive, made atomic.Int32

	mu   sync.Mutex // protects all following fields
	fail error
	all  []*item
}

type item struct {
	from *maker
	done chan struct{}
	end  sync.Once
}

func (m *maker) make(context.Context) (*item, error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.fail != nil {
		return nil, m.fail
	}
	i := &item{from: m, done: make(chan struct{})}
	m.alive.Add(1)
	m.made.Add(1)
	m.all = append(m.all, i)
	return i, nil
}

func (m *maker) refuse(err error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.fail = err
}

func (i *item) Done() <-chan struct{} { return i.done }
func (i *item) Wait() error           { <-i.done; return errors.New("it fell over") }
func (i *item) Close() error {
	i.end.Do(func() { i.from.alive.Add(-1); close(i.done) })
	return nil
}

func newStock(t *testing.T, n int) (*Stock[*item], *maker) {
	t.Helper()
	m := &maker{}
	s := New(Config[*item]{What: "items", Count: n, Make: m.make})
	t.Cleanup(func() { _ = s.Close() }) // most tests do
	return s, m
}

func full(t *testing.T, s *Stock[*item]) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	if err := s.WaitFull(ctx); err != nil {
		t.Fatal(err)
	}
}

// TestTake: nobody gets what another has, what is taken is replaced when that is
// asked for, and Close ends only what waits.
func TestTake(t *testing.T) {
	s, m := newStock(t, 3)
	full(t, s)
	got := map[*item]bool{}
	for i, ok := s.Take(); ok; i, ok = s.Take() {
		got[i] = true
	}
	if len(got) != 3 || m.made.Load() != 3 {
		t.Fatalf("%d were taken, %d made", len(got), m.made.Load())
	}
	s.Refill()
	full(t, s)
	if st := s.Stats(); st.Waiting != 3 || st.Lost != 0 || m.alive.Load() != 6 {
		t.Errorf("%+v, %d alive", st, m.alive.Load())
	}
	if err := s.Close(); err != nil || m.alive.Load() != 3 {
		t.Errorf("%v, %d alive", err, m.alive.Load())
	}
	if _, ok := s.Take(); ok {
		t.Error("taken from a closed stock")
	}
}

// TestLost: what ends while it waits is replaced, and counted.
func TestLost(t *testing.T) {
	s, m := newStock(t, 2)
	full(t, s)
	m.mu.Lock()
	first := m.all[0]
	m.mu.Unlock()
	_ = first.Close()
	if err := s.WaitUntil(t.Context(), func(st Stats) bool { return st.Lost == 1 }); err != nil {
		t.Fatal(err)
	}
	full(t, s)
	for i, ok := s.Take(); ok; i, ok = s.Take() {
		if i == first {
			t.Error("one that had ended was taken")
		}
	}
	if st := s.Stats(); !strings.Contains(st.LastError, "fell over") {
		t.Errorf("%+v", st)
	}
}

// TestRenew: all that wait are replaced, and there is one to take at any time.
func TestRenew(t *testing.T) {
	s, m := newStock(t, 3)
	full(t, s)
	m.refuse(errors.New("not now"))
	s.Renew()
	if err := s.WaitUntil(t.Context(), func(st Stats) bool { return st.Failed > 0 }); err != nil {
		t.Fatal(err)
	}
	if st := s.Stats(); st.Waiting != 3 {
		t.Errorf("%+v while none can be made", st)
	}
	m.mu.Lock()
	old := append([]*item(nil), m.all...)
	m.fail = nil
	m.mu.Unlock()
	full(t, s)
	for _, i := range old {
		<-i.Done()
	}
	if st := s.Stats(); st.Waiting != 3 || st.Lost != 0 || m.made.Load() != 6 {
		t.Errorf("%+v, %d made", st, m.made.Load())
	}
}

// TestTakeRatherFresh: a stale one is taken when there is no other.
func TestTakeRatherFresh(t *testing.T) {
	s, m := newStock(t, 2)
	full(t, s)
	m.refuse(errors.New("not now"))
	s.mu.Lock()
	s.waiting[0].stale = true
	fresh := s.waiting[1].item
	s.mu.Unlock()
	if i, ok := s.Take(); !ok || i != fresh {
		t.Error("the stale one was taken first")
	}
	if _, ok := s.Take(); !ok {
		t.Error("the stale one was not taken")
	}
}

// TestFailure: a stock that cannot be filled says why, and recovers.
func TestFailure(t *testing.T) {
	s, m := newStock(t, 0)
	_ = s.Close()
	m.refuse(errors.New("no memory"))
	s = New(Config[*item]{What: "items", Count: 1, Make: m.make})
	t.Cleanup(func() { _ = s.Close() })
	if err := s.WaitUntil(t.Context(), func(st Stats) bool { return st.Failed > 0 }); err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if err := s.WaitFull(ctx); err == nil || !strings.Contains(err.Error(), "wait for items") || !strings.Contains(err.Error(), "no memory") {
		t.Errorf("%v", err)
	}
	if _, ok := s.Take(); ok {
		t.Error("taken")
	}
	m.refuse(nil)
	full(t, s)
}

// TestCloseWhileMaking: what is made too late is ended.
func TestCloseWhileMaking(t *testing.T) {
	m := &maker{}
	making, goOn := make(chan struct{}), make(chan struct{})
	s := New(Config[*item]{What: "items", Count: 1, Make: func(ctx context.Context) (*item, error) {
		close(making)
		<-goOn
		return m.make(ctx)
	}})
	<-making
	closed := make(chan error)
	go func() { closed <- s.Close() }()
	if err := s.WaitUntil(t.Context(), func(Stats) bool {
		s.mu.Lock()
		defer s.mu.Unlock()
		return s.closed
	}); err != nil {
		t.Fatal(err)
	}
	close(goOn)
	if err := <-closed; err != nil || m.alive.Load() != 0 {
		t.Errorf("%v, %d alive", err, m.alive.Load())
	}
}

// TestResize: a stock grows and shrinks while it is used, and what is too many
// ends.
func TestResize(t *testing.T) {
	s, m := newStock(t, 1)
	full(t, s)
	s.Resize(4)
	full(t, s)
	if n := s.Stats().Waiting; n != 4 {
		t.Errorf("%d wait, not 4", n)
	}
	first := m.all[0]
	s.Resize(1)
	if n := s.Stats().Waiting; n != 1 {
		t.Errorf("%d wait, not 1", n)
	}
	if got, ok := s.Take(); !ok || got != first {
		t.Error("the oldest one did not stay")
	}
	s.Resize(0)
	s.Refill()
	if err := s.Close(); err != nil {
		t.Error(err)
	}
	if n := m.alive.Load(); n != 1 {
		t.Errorf("%d are alive, not the one that was taken", n)
	}
}

// TestResizeWhileMaking: an item that is made when it is not wanted any more ends.
func TestResizeWhileMaking(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		m := &maker{}
		goOn := make(chan struct{})
		s := New(Config[*item]{What: "items", Count: 1, Make: func(ctx context.Context) (*item, error) {
			<-goOn
			return m.make(ctx)
		}})
		synctest.Wait()
		s.Resize(0)
		close(goOn)
		synctest.Wait()
		if n := s.Stats().Waiting; n != 0 || m.alive.Load() != 0 || m.made.Load() != 1 {
			t.Errorf("%d wait, %d of %d are alive", n, m.alive.Load(), m.made.Load())
		}
		if err := s.Close(); err != nil {
			t.Error(err)
		}
	})
}

// TestHold: while it is held a stock makes nothing, and afterwards what is
// missing.
func TestHold(t *testing.T) {
	s, m := newStock(t, 2)
	full(t, s)
	release := s.Hold()
	if _, ok := s.Take(); !ok {
		t.Fatal("nothing waits")
	}
	s.Refill()
	s.Hold()() // another one does not end the first
	if n := m.made.Load(); n != 2 {
		t.Errorf("%d were made", n)
	}
	release()
	release()
	full(t, s)
	if n := m.made.Load(); n != 3 {
		t.Errorf("%d were made, not 3", n)
	}
}
