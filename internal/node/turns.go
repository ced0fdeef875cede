package node

import (
	"context"
	"fmt"
	"slices"
	"sync"
	"time"

	"agentrun.dev/internal/sandbox"
)

// turns bounds how much work of one kind is done at once. Starting a machine mostly
// keeps a processor busy: if more machines start than there are processors, all of them
// become ready late. Builds and captures have turns of their own, which may be held for
// long. So a namespace never holds all of their turns, and no start waits for a build
// or a capture.
//
// A user waits for the machine of a claim, of a restore, of a sandbox that wakes up and
// of a child of a fork. These machines go first: in order of arrival within a
// namespace, and one of each namespace in turn. So a namespace that starts a hundred
// machines delays the single machine of another by one start. Pools are filled while no
// user waits.
type turns struct {
	most int    // how many turns exist
	each int    // how many of them one namespace may hold; 0 sets no limit
	to   string // what a turn is for
	// longest is how long a turn is held at most; 0 sets no limit. After that time the turn
	// passes to the next waiter, and its former holder is late: it continues without a
	// turn. A namespace with mostLate late holders gets no turn, so starts stay bounded
	// even if all of them take long.
	longest time.Duration

	mu      sync.Mutex // protects all following fields
	free    int
	filling int                       // turns that pools hold
	holds   map[sandbox.Namespace]int // turns that users hold; no entry is 0
	late    map[sandbox.Namespace]int // late users; no entry is 0
	closed  bool
	users   map[sandbox.Namespace][]*waiter // in order of arrival; no list is empty
	next    []sandbox.Namespace             // the keys of users; the first is served next
	refills []*waiter                       // in order of arrival
}

// waiter waits for a turn.
type waiter struct {
	namespace sandbox.Namespace // of the user
	refill    bool              // the waiter fills a pool
	served    chan struct{}
	err       error // why it got no turn; set before served is closed

	late, ended bool // of its turn; the mutex of turns protects both
}

// longestStart is how long the start of a machine may hold a turn. A longer start does
// not use a processor: it waits for the disk, or for a machine that never answers.
const longestStart = 2 * time.Second

// mostLate is how many starts of a namespace may be late.
const mostLate = 8

func newTurns(most int) *turns {
	return &turns{
		most: most, free: most, to: "start a machine", longest: longestStart,
		holds: map[sandbox.Namespace]int{}, late: map[sandbox.Namespace]int{}, users: map[sandbox.Namespace][]*waiter{},
	}
}

// newLongTurns makes turns for work that takes long. One namespace holds at most half
// of them.
func newLongTurns(most int, to string) *turns {
	t := newTurns(most)
	t.each, t.to, t.longest = max(1, most/2), to, 0
	return t
}

// TurnsOverview counts the holders of turns of one kind of work, and those who
// wait.
type TurnsOverview struct {
	// Most is how many turns there are, Each how many of them one namespace may
	// hold.
	Most, Each int
	// Held counts turns that are taken, Waiting the users who wait for a turn, and
	// Filling the steps of pools that wait.
	Held, Waiting, Filling int
}

func (t *turns) overview() TurnsOverview {
	t.mu.Lock()
	defer t.mu.Unlock()
	o := TurnsOverview{Most: t.most, Each: t.each, Held: t.most - t.free, Filling: len(t.refills)}
	if o.Each == 0 {
		o.Each = t.most
	}
	for _, all := range t.users {
		o.Waiting += len(all)
	}
	return o
}

// take waits for a turn for work that a user of a namespace waits for. release
// gives the turn back; further calls have no effect.
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
			return nil, fmt.Errorf("wait for a turn to %s: %w", t.to, ctx.Err())
		}
		// The turn came in the same moment. The caller notices that the context has
		// ended.
	}
	if w.err != nil {
		return nil, w.err
	}
	if t.longest == 0 {
		return sync.OnceFunc(func() { t.end(w) }), nil
	}
	over := time.AfterFunc(t.longest, func() { t.expire(w) })
	return sync.OnceFunc(func() {
		over.Stop()
		t.end(w)
	}), nil
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

// leave removes w from its queue. It reports false if w was already served.
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

// serve gives the free turns to waiters. The caller holds t.mu.
func (t *turns) serve() {
	for t.free > 0 {
		i := slices.IndexFunc(t.next, t.mayHold)
		if i < 0 {
			break
		}
		n := t.next[i]
		w := t.users[n][0]
		t.next = slices.Delete(t.next, i, i+1)
		if rest := t.users[n][1:]; len(rest) > 0 {
			t.users[n], t.next = rest, append(t.next, n)
		} else {
			delete(t.users, n)
		}
		t.free--
		t.holds[n]++
		close(w.served)
	}
	// If there are several turns, pools leave one of them to users, who would
	// otherwise wait until a pool has finished its step.
	for t.free > 0 && len(t.refills) > 0 && t.filling < max(1, t.most-1) {
		w := t.refills[0]
		t.refills = t.refills[1:]
		t.free--
		t.filling++
		close(w.served)
	}
}

// waiting counts the users who wait for a turn.
func (t *turns) waiting() (n int) {
	t.mu.Lock()
	defer t.mu.Unlock()
	for _, all := range t.users {
		n += len(all)
	}
	return n
}

// mayHold reports whether a namespace may have one more turn. The caller holds t.mu.
func (t *turns) mayHold(n sandbox.Namespace) bool {
	return (t.each == 0 || t.holds[n] < t.each) && t.late[n] < mostLate
}

// expire passes on a turn that was held for too long.
func (t *turns) expire(w *waiter) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if w.ended {
		return
	}
	w.late = true
	if !w.refill {
		t.late[w.namespace]++
	}
	t.giveBack(w)
}

// end is called when the holder of a turn no longer needs it.
func (t *turns) end(w *waiter) {
	t.mu.Lock()
	defer t.mu.Unlock()
	w.ended = true
	switch {
	case !w.late:
		t.giveBack(w)
	case !w.refill:
		if t.late[w.namespace]--; t.late[w.namespace] == 0 {
			delete(t.late, w.namespace)
		}
		t.serve()
	}
}

// giveBack frees a turn. The caller holds t.mu.
func (t *turns) giveBack(w *waiter) {
	t.free++
	if w.refill {
		t.filling--
	} else if t.holds[w.namespace]--; t.holds[w.namespace] == 0 {
		delete(t.holds, w.namespace)
	}
	t.serve()
}

// close refuses a turn to all present and future waiters.
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
