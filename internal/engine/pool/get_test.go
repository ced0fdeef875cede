package pool

import (
	"context"
	"strconv"
	"strings"
	"sync"
	"testing"
)

// TestGet: each of many simultaneous requests gets an item of its own. The first
// requests get waiting items, the others get items made now. Then the pool is full
// again.
func TestGet(t *testing.T) {
	p, m := newPool(t, 5)
	full(t, p)
	var requests sync.WaitGroup
	var mu sync.Mutex
	got := map[*item]bool{}
	for n := range 50 {
		requests.Go(func() {
			name := strconv.Itoa(n)
			i, err := p.Get(t.Context(), name)
			if err != nil {
				t.Error(err)
				return
			}
			if has := *i.name.Load(); has != name {
				t.Errorf("request %s got the item of %s", name, has)
			}
			mu.Lock()
			defer mu.Unlock()
			got[i] = true
		})
	}
	requests.Wait()
	full(t, p)
	if st := p.Stats(); len(got) != 50 || st.Taken+st.MadeNow != 50 || st.Taken < 5 || st.Waiting != 5 {
		t.Errorf("%d items, %+v", len(got), st)
	}
	if err := p.Close(); err != nil {
		t.Error(err)
	}
	if n := m.alive.Load(); n != 50 {
		t.Errorf("%d items live after the pool, 50 were handed out", n)
	}
}

// refuseAll makes all items so far refuse to be claimed.
func (m *maker) refuseAll() {
	m.mu.Lock()
	defer m.mu.Unlock()
	for _, i := range m.all {
		i.refuse.Store(true)
	}
}

// TestGetRefused: items that cannot be claimed are closed, counted and not handed
// out.
func TestGetRefused(t *testing.T) {
	p, m := newPool(t, 3)
	full(t, p)
	m.refuseAll()
	i, err := p.Get(t.Context(), "mine")
	if err != nil {
		t.Fatal(err)
	}
	if st := p.Stats(); st.Lost != 3 || st.Taken+st.MadeNow != 1 || !strings.Contains(st.LastError, "does not answer") || i.refuse.Load() {
		t.Errorf("%+v", st)
	}
	full(t, p)
	if n := m.alive.Load(); n != 4 {
		t.Errorf("%d items live, not 3 that wait and one that was handed out", n)
	}
}

// TestGetCancelled: a request that ends while it claims an item gets no other item.
// The item is closed but does not count as lost, since it might have served another
// request.
func TestGetCancelled(t *testing.T) {
	p, m := newPool(t, 1)
	full(t, p)
	m.refuseAll()
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	_, err := p.Get(ctx, "mine")
	if err == nil || !strings.Contains(err.Error(), "claim one of the items") {
		t.Errorf("%v", err)
	}
	full(t, p)
	if st := p.Stats(); st.Lost != 0 || st.Taken+st.MadeNow != 0 || m.alive.Load() != 1 {
		t.Errorf("%+v, %d alive", st, m.alive.Load())
	}
}
