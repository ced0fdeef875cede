package pool

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

// maker makes items and counts the living ones.
type maker struct {
	alive, made atomic.Int32

	mu   sync.Mutex // protects all following fields
	fail error
	all  []*item
}

type item struct {
	from   *maker
	done   chan struct{}
	end    sync.Once
	name   atomic.Pointer[string] // of the request that has the item; nil while it waits
	refuse atomic.Bool            // whether the item refuses to be claimed
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

func (m *maker) claim(_ context.Context, i *item, name string) error {
	if i.refuse.Load() {
		return errors.New("it does not answer")
	}
	if !i.name.CompareAndSwap(nil, &name) {
		return errors.New("it was claimed twice")
	}
	return nil
}

func (m *maker) now(ctx context.Context, name string) (*item, error) {
	i, err := m.make(ctx)
	if err != nil {
		return nil, err
	}
	return i, m.claim(ctx, i, name)
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

func newPool(t *testing.T, n int) (*Pool[*item, string], *maker) {
	t.Helper()
	m := &maker{}
	p := New(Config[*item, string]{What: "items", Count: n, Make: m.make, Claim: m.claim, Now: m.now})
	t.Cleanup(func() { _ = p.Close() }) // most tests close it themselves
	return p, m
}

func full(t *testing.T, p *Pool[*item, string]) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	if err := p.WaitFull(ctx); err != nil {
		t.Fatal(err)
	}
}

// TestTake: no two callers get the same item. Taken items are replaced on request.
// Close ends only the waiting items.
func TestTake(t *testing.T) {
	p, m := newPool(t, 3)
	full(t, p)
	got := map[*item]bool{}
	for i, ok := p.Take(); ok; i, ok = p.Take() {
		got[i] = true
	}
	if len(got) != 3 || m.made.Load() != 3 {
		t.Fatalf("%d were taken, %d made", len(got), m.made.Load())
	}
	p.Refill()
	full(t, p)
	if st := p.Stats(); st.Waiting != 3 || st.Taken != 3 || st.Lost != 0 || m.alive.Load() != 6 {
		t.Errorf("%+v, %d alive", st, m.alive.Load())
	}
	if err := p.Close(); err != nil || m.alive.Load() != 3 {
		t.Errorf("%v, %d alive", err, m.alive.Load())
	}
	if _, ok := p.Take(); ok {
		t.Error("taken from a closed pool")
	}
}

// TestLost: an item that ends while it waits is replaced, and counted.
func TestLost(t *testing.T) {
	p, m := newPool(t, 2)
	full(t, p)
	m.mu.Lock()
	first := m.all[0]
	m.mu.Unlock()
	_ = first.Close()
	if err := p.WaitUntil(t.Context(), func(st Stats) bool { return st.Lost == 1 }); err != nil {
		t.Fatal(err)
	}
	full(t, p)
	for i, ok := p.Take(); ok; i, ok = p.Take() {
		if i == first {
			t.Error("one that had ended was taken")
		}
	}
	if st := p.Stats(); !strings.Contains(st.LastError, "fell over") {
		t.Errorf("%+v", st)
	}
}

// TestRenew: all waiting items are replaced, and an item can be taken at any time.
func TestRenew(t *testing.T) {
	p, m := newPool(t, 3)
	full(t, p)
	m.refuse(errors.New("not now"))
	p.Renew()
	if err := p.WaitUntil(t.Context(), func(st Stats) bool { return st.Failed > 0 }); err != nil {
		t.Fatal(err)
	}
	if st := p.Stats(); st.Waiting != 3 {
		t.Errorf("%+v while none can be made", st)
	}
	m.mu.Lock()
	old := append([]*item(nil), m.all...)
	m.fail = nil
	m.mu.Unlock()
	full(t, p)
	for _, i := range old {
		<-i.Done()
	}
	if st := p.Stats(); st.Waiting != 3 || st.Lost != 0 || m.made.Load() != 6 {
		t.Errorf("%+v, %d made", st, m.made.Load())
	}
}

// TestTakeRatherFresh: a stale item is taken only if there is no fresh one.
func TestTakeRatherFresh(t *testing.T) {
	p, m := newPool(t, 2)
	full(t, p)
	m.refuse(errors.New("not now"))
	p.mu.Lock()
	p.waiting[0].stale = true
	fresh := p.waiting[1].item
	p.mu.Unlock()
	if i, ok := p.Take(); !ok || i != fresh {
		t.Error("the stale one was taken first")
	}
	if _, ok := p.Take(); !ok {
		t.Error("the stale one was not taken")
	}
}

// TestFailure: a pool that cannot be filled says why, and recovers.
func TestFailure(t *testing.T) {
	p, m := newPool(t, 0)
	_ = p.Close()
	m.refuse(errors.New("no memory"))
	p = New(Config[*item, string]{What: "items", Count: 1, Make: m.make, Now: m.now})
	t.Cleanup(func() { _ = p.Close() })
	if err := p.WaitUntil(t.Context(), func(st Stats) bool { return st.Failed > 0 }); err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if err := p.WaitFull(ctx); err == nil || !strings.Contains(err.Error(), "wait for items") || !strings.Contains(err.Error(), "no memory") {
		t.Errorf("%v", err)
	}
	if _, ok := p.Take(); ok {
		t.Error("taken")
	}
	if _, err := p.Get(t.Context(), "mine"); err == nil {
		t.Error("got one")
	}
	m.refuse(nil)
	full(t, p)
}

// TestCloseWhileMaking: an item that is completed after Close is closed.
func TestCloseWhileMaking(t *testing.T) {
	m := &maker{}
	making, goOn := make(chan struct{}), make(chan struct{})
	p := New(Config[*item, string]{What: "items", Count: 1, Make: func(ctx context.Context) (*item, error) {
		close(making)
		<-goOn
		return m.make(ctx)
	}})
	<-making
	closed := make(chan error)
	go func() { closed <- p.Close() }()
	if err := p.WaitUntil(t.Context(), func(Stats) bool {
		p.mu.Lock()
		defer p.mu.Unlock()
		return p.closed
	}); err != nil {
		t.Fatal(err)
	}
	close(goOn)
	if err := <-closed; err != nil || m.alive.Load() != 0 {
		t.Errorf("%v, %d alive", err, m.alive.Load())
	}
}

// TestResize: a pool grows and shrinks while it is used, and surplus items are
// closed.
func TestResize(t *testing.T) {
	p, m := newPool(t, 1)
	full(t, p)
	p.Resize(4)
	full(t, p)
	if n := p.Stats().Waiting; n != 4 {
		t.Errorf("%d wait, not 4", n)
	}
	first := m.all[0]
	p.Resize(1)
	if n := p.Stats().Waiting; n != 1 {
		t.Errorf("%d wait, not 1", n)
	}
	if got, ok := p.Take(); !ok || got != first {
		t.Error("the oldest one did not stay")
	}
	p.Resize(0)
	p.Refill()
	if err := p.Close(); err != nil {
		t.Error(err)
	}
	if n := m.alive.Load(); n != 1 {
		t.Errorf("%d are alive, not the one that was taken", n)
	}
}

// TestResizeWhileMaking: an item that is completed after the count was lowered is
// closed.
func TestResizeWhileMaking(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		m := &maker{}
		goOn := make(chan struct{})
		p := New(Config[*item, string]{What: "items", Count: 1, Make: func(ctx context.Context) (*item, error) {
			<-goOn
			return m.make(ctx)
		}})
		synctest.Wait()
		p.Resize(0)
		close(goOn)
		synctest.Wait()
		if n := p.Stats().Waiting; n != 0 || m.alive.Load() != 0 || m.made.Load() != 1 {
			t.Errorf("%d wait, %d of %d are alive", n, m.alive.Load(), m.made.Load())
		}
		if err := p.Close(); err != nil {
			t.Error(err)
		}
	})
}

// TestHold: a held pool makes no items. Afterwards it makes the missing items.
func TestHold(t *testing.T) {
	p, m := newPool(t, 2)
	full(t, p)
	release := p.Hold()
	if _, ok := p.Take(); !ok {
		t.Fatal("nothing waits")
	}
	p.Refill()
	if _, err := p.Get(t.Context(), "mine"); err != nil {
		t.Fatal(err)
	}
	p.Hold()() // another Hold does not end the first
	if st := p.Stats(); st.Waiting != 0 || st.Taken != 2 || m.made.Load() != 2 {
		t.Errorf("%+v, %d were made", st, m.made.Load())
	}
	release()
	release()
	full(t, p)
	if n := m.made.Load(); n != 4 {
		t.Errorf("%d were made, not 4", n)
	}
}
