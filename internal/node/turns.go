package node

import (
	"context"
	"fmt"
	"slices"
	"sync"
	"time"

	"agentrun.dev/internal/sandbox"
)

// turns bounds how much of one kind of work is done at once. Starting a machine is
// mostly the work of a processor: more starts than processors finish no sooner, and all
// of them finish late. Builds and captures have turns of their own, which may be held
// for long: so one namespace never holds all of them, and no start waits for one.
//
// A user waits for the machine of a claim, of a restore, of a sandbox that wakes up
// and of a child of a fork. These machines go first: in order of arrival within a
// namespace, and one of each namespace in turn. A namespace that starts a hundred
// machines so delays the single machine of another by one start. Pools are filled
// while no user waits.
type turns struct {
	most int    // how many turns there are
	each int    // how many of them one namespace may hold; 0 is all
	to   string // what a turn is for
	// longest is for how long a turn is held at most; 0 is for ever. Then the next one has
	// it, and whoever had it is late: he goes on without. A namespace of which mostLate are
	// late gets no turn: starts are bounded also where all of them take long.
	longest time.Duration

	mu      sync.Mutex // protects all following fields
	free    int
	filling int                       // turns that pools hold
	holds   map[sandbox.Namespace]int // turns that users hold; none is 0
	late    map[sandbox.Namespace]int // users that are late, likewise
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

	late, ended bool // of the turn; the mutex of turns protects both
}

// longestStart is for how long the start of a machine has a turn. One that takes longer
// does not work, it waits: for the disk, or for a machine that never answers.
const longestStart = 2 * time.Second

// mostLate is how many starts of a namespace may be late.
const mostLate = 8

func newTurns(most int) *turns {
	return &turns{
		most: most, free: most, to: "start a machine", longest: longestStart,
		holds: map[sandbox.Namespace]int{}, late: map[sandbox.Namespace]int{}, users: map[sandbox.Namespace][]*waiter{},
	}
}

// newLongTurns are those of work that takes long, of which one namespace holds at most
// half.
func newLongTurns(most int, to string) *turns {
	t := newTurns(most)
	t.each, t.to, t.longest = max(1, most/2), to, 0
	return t
}

// TurnsOverview is who has, and who waits for, the turns of one kind of work.
type TurnsOverview struct {
	// Most is how many there are, Each how many of them one namespace has at most.
	Most, Each int
	// Held are those that somebody has, Waiting are users who wait for one, and Filling
	// are the steps of pools that do.
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

// take waits for a turn for something that a user of a namespace waits for.
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
			return nil, fmt.Errorf("wait for a turn to %s: %w", t.to, ctx.Err())
		}
		// It was served in the same moment: whoever has the turn finds out about the
		// context.
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

// waiting is how many wait for a turn that users wait for.
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

// expire gives a turn that is held for too long to the next.
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

// end is called when whoever got a turn needs it no longer.
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

// giveBack makes a turn free. The caller holds t.mu.
func (t *turns) giveBack(w *waiter) {
	t.free++
	if w.refill {
		t.filling--
	} else if t.holds[w.namespace]--; t.holds[w.namespace] == 0 {
		delete(t.holds, w.namespace)
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
