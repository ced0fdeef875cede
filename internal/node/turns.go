package node

import (
	"context"
	"fmt"
	"slices"
	"sync"

	"agentrun.dev/internal/sandbox"
)

// turns bounds how many machines are started at once. Starting a machine is mostly
// the work of a processor: more starts than processors finish no sooner, and all of
// them finish late.
//
// A user waits for the machine of a claim, of a restore, of a sandbox that wakes up
// and of a child of a fork. These machines go first: in order of arrival within a
// namespace, and one of each namespace in turn. A namespace that starts a hundred
// machines so delays the single machine of another by one start. Pools are filled
// while no user waits.
type turns struct {
	most int // how many turns there are

	mu      sync.Mutex // protects all following fields
	free    int
	filling int // turns that pools hold
	closed  bool
	users   map[sandbox.Namespace][]*waiter // in order of arrival; no list is empty
	next    []sandbox.Namespace             // the keys of users; the first is served next
	refills []*waiter                       // in order of arrival
}

// waiter waits for a turn.
type waiter struct {
	namespace sandbox.Namespace // of a user
	refill    bool              // it fills a pool
	served    chan struct{}
	err       error // why it got no turn; set before served is closed
}

func newTurns(most int) *turns {
	return &turns{most: most, free: most, users: map[sandbox.Namespace][]*waiter{}}
}

// take waits for a turn to start a machine that a user of a namespace waits for.
// release gives the turn back; a second call of it does nothing.
func (t *turns) take(ctx context.Context, n sandbox.Namespace) (release func(), err error) {
	return t.wait(ctx, &waiter{namespace: n, served: make(chan struct{})})
}

// takeIdle waits for a turn to fill a pool.
func (t *turns) takeIdle(ctx context.Context) (release func(), err error) {
	return t.wait(ctx, &waiter{refill: true, served: make(chan struct{})})
}

func (t *turns) wait(ctx context.Context, w *waiter) (release func(), err error) {
	t.mu.Lock()
	if t.closed {
		w.refuse()
	} else {
		t.enter(w)
		t.serve()
	}
	t.mu.Unlock()
	select {
	case <-w.served:
	case <-ctx.Done():
		if t.leave(w) {
			return nil, fmt.Errorf("wait for a turn to start a machine: %w", ctx.Err())
		}
		// It was served in the same moment: whoever has the turn finds out about the
		// context.
	}
	if w.err != nil {
		return nil, w.err
	}
	return sync.OnceFunc(func() { t.giveBack(w) }), nil
}

// enter queues w. The caller holds t.mu.
func (t *turns) enter(w *waiter) {
	if w.refill {
		t.refills = append(t.refills, w)
		return
	}
	if len(t.users[w.namespace]) == 0 {
		t.next = append(t.next, w.namespace)
	}
	t.users[w.namespace] = append(t.users[w.namespace], w)
}

// leave takes w out of its queue. It reports false if w was served already.
func (t *turns) leave(w *waiter) bool {
	t.mu.Lock()
	defer t.mu.Unlock()
	select {
	case <-w.served:
		return false
	default:
	}
	isIt := func(other *waiter) bool { return other == w }
	if w.refill {
		t.refills = slices.DeleteFunc(t.refills, isIt)
		return true
	}
	n := w.namespace
	if t.users[n] = slices.DeleteFunc(t.users[n], isIt); len(t.users[n]) == 0 {
		delete(t.users, n)
		t.next = slices.DeleteFunc(t.next, func(other sandbox.Namespace) bool { return other == n })
	}
	return true
}

// serve gives the turns that are free to those who wait. The caller holds t.mu.
func (t *turns) serve() {
	for t.free > 0 && len(t.next) > 0 {
		n := t.next[0]
		w := t.users[n][0]
		t.next = t.next[1:]
		if rest := t.users[n][1:]; len(rest) > 0 {
			t.users[n], t.next = rest, append(t.next, n)
		} else {
			delete(t.users, n)
		}
		t.free--
		close(w.served)
	}
	// Where there are several turns, pools leave one of them to users, who would
	// otherwise wait until a pool has done its step.
	for t.free > 0 && len(t.refills) > 0 && t.filling < max(1, t.most-1) {
		w := t.refills[0]
		t.refills = t.refills[1:]
		t.free--
		t.filling++
		close(w.served)
	}
}

func (t *turns) giveBack(w *waiter) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.free++
	if w.refill {
		t.filling--
	}
	t.serve()
}

// close refuses a turn to all who wait, and to all who come.
func (t *turns) close() {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.closed = true
	for _, all := range t.users {
		for _, w := range all {
			w.refuse()
		}
	}
	for _, w := range t.refills {
		w.refuse()
	}
	t.users, t.next, t.refills = map[sandbox.Namespace][]*waiter{}, nil, nil
}

func (w *waiter) refuse() {
	w.err = errClosing()
	close(w.served)
}
