package microvm

import (
	"context"
	"sync"

	"agentrun.dev/internal/engine/microvm/process"
	"agentrun.dev/internal/storage/extent"
	"agentrun.dev/internal/storage/snapshot"
	"agentrun.dev/internal/vmm/vmmctl"
)

// What a fork touches before its first answer, and in its rehearsal, is nearly the
// same in each fork of a snapshot: the first ones are asked, and the others get
// what these have in common before they run. One alone would not do: on a busy
// host its kernel has had time for other things, and all would own the pages of
// these.

// ForksAsked is how many forks of a snapshot are asked. They themselves are
// given nothing: what they were given would be theirs, needed or not.
const ForksAsked = 2

// maxTouched is how many pages are worth it: a guest that had more to do is not
// a measure for others.
const maxTouched = 1024

// maxRead is how many pages are mapped ahead that are only read. All later forks
// of the snapshot get them, and page tables for them.
const maxRead = 32 * maxTouched

// touched remembers the pages by subject, the last few.
type touched struct {
	mu      sync.Mutex // protects all following fields
	lessons map[subject]*lesson
	order   []subject
}

// subject is what a fork is asked about: what it has touched until its first
// answer, or until the end of its rehearsal.
type subject struct {
	snapshot  snapshot.ID
	rehearsed bool
}

// lesson is what is known of a subject.
type lesson struct {
	asked, told int            // forks that were or are being asked, and have answered
	pages       vmmctl.Touched // what all that have answered have in common
}

// known returns the pages, once enough forks have told of some.
func (l *lesson) known() (pages vmmctl.Touched, ok bool) {
	if l == nil || l.told < ForksAsked || len(l.pages.Written) == 0 {
		return vmmctl.Touched{}, false
	}
	return l.pages, true
}

const maxSubjects = 64

// of returns the pages that a fork is given; learn says that not enough forks have
// been asked so far, and that the caller's is to be.
func (t *touched) of(s subject) (pages vmmctl.Touched, learn bool) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if pages, ok := t.lessons[subject{s.snapshot, true}].known(); ok {
		return pages, false // more than that until the first answer
	}
	l := t.lessons[s]
	if l == nil {
		l = t.add(s)
	}
	if l.asked < ForksAsked {
		l.asked++
		return vmmctl.Touched{}, true
	}
	return t.best(s.snapshot), false
}

// known returns the pages that a fork is given, as far as that is known.
func (t *touched) known(id snapshot.ID) vmmctl.Touched {
	t.mu.Lock()
	defer t.mu.Unlock()
	return t.best(id)
}

// best returns the most that is known. The lock must be held.
func (t *touched) best(id snapshot.ID) vmmctl.Touched {
	pages, ok := t.lessons[subject{id, true}].known()
	if !ok {
		pages, _ = t.lessons[subject{id, false}].known()
	}
	return pages
}

// add begins a lesson. The lock must be held.
func (t *touched) add(s subject) *lesson {
	if t.lessons == nil {
		t.lessons = map[subject]*lesson{}
	}
	l := &lesson{}
	t.lessons[s] = l
	t.order = append(t.order, s)
	if len(t.order) > maxSubjects {
		delete(t.lessons, t.order[0])
		t.order = t.order[1:]
	}
	return l
}

// forget lets another fork be asked for one that could not be.
func (t *touched) forget(s subject) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if l := t.lessons[s]; l != nil {
		l.asked--
	}
}

// learn asks a fork that has just answered or rehearsed. It reports whether the
// pages are known with that.
func (t *touched) learn(ctx context.Context, s subject, p *process.Process) bool {
	pages, err := p.Touched(ctx)
	if err != nil {
		t.forget(s) // the fork has ended
		return false
	}
	pages = bounded(pages)
	t.mu.Lock()
	defer t.mu.Unlock()
	l := t.lessons[s]
	if l == nil {
		return false // there were many others meanwhile
	}
	if l.told++; l.told > 1 {
		pages.Written, pages.Read = extent.Intersect(l.pages.Written, pages.Written), extent.Intersect(l.pages.Read, pages.Read)
	}
	l.pages = pages
	_, ok := l.known()
	return ok
}

// bounded leaves out what is not worth it.
func bounded(pages vmmctl.Touched) vmmctl.Touched {
	if extent.Total(pages.Written) > maxTouched*extent.PageSize {
		return vmmctl.Touched{}
	}
	if extent.Total(pages.Read) > maxRead*extent.PageSize {
		pages.Read = nil
	}
	return pages
}
