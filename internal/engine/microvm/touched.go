package microvm

import (
	"context"
	"sync"

	"agentrun.dev/internal/engine/microvm/process"
	"agentrun.dev/internal/storage/extent"
	"agentrun.dev/internal/storage/snapshot"
	"agentrun.dev/internal/vmm/vmmctl"
)

// All forks of a snapshot touch nearly the same pages before their first answer, and
// in their rehearsal. So the engine asks the first forks which pages they have
// touched, and maps the pages that these have in common in later forks before they
// run. One fork would not be enough: on a busy host its kernel has had time for other
// work, and all later forks would own the pages of that work.

// ForksAsked is how many forks of a snapshot are asked. These forks are given no
// pages: pages that they were given would look touched, whether needed or not.
const ForksAsked = 2

// maxTouched is the maximum number of written pages to learn. A guest that writes
// more is not typical for others.
const maxTouched = 1024

// maxRead is the maximum number of pages to map ahead that are only read. All later
// forks of the snapshot get these pages, and page tables for them.
const maxRead = 32 * maxTouched

// touched remembers the pages of the last few subjects.
type touched struct {
	mu      sync.Mutex // protects all following fields
	lessons map[subject]*lesson
	order   []subject
}

// subject is one question about the forks of a snapshot: which pages they touch until
// their first answer, or until the end of their rehearsal.
type subject struct {
	snapshot  snapshot.ID
	rehearsed bool
}

// lesson is the knowledge about one subject.
type lesson struct {
	asked, told int            // forks that were or are being asked, and forks that have answered
	pages       vmmctl.Touched // pages that all answers have in common
}

// known returns the pages, once enough forks have answered and the answers have
// written pages in common.
func (l *lesson) known() (pages vmmctl.Touched, ok bool) {
	if l == nil || l.told < ForksAsked || len(l.pages.Written) == 0 {
		return vmmctl.Touched{}, false
	}
	return l.pages, true
}

const maxSubjects = 64

// of returns the pages that a fork is given. learn says that too few forks have been
// asked so far, and that the caller's fork is to be asked.
func (t *touched) of(s subject) (pages vmmctl.Touched, learn bool) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if pages, ok := t.lessons[subject{s.snapshot, true}].known(); ok {
		return pages, false // these include the pages touched until the first answer
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

// known returns the pages that a fork of a snapshot is given, empty while they are
// unknown.
func (t *touched) known(id snapshot.ID) vmmctl.Touched {
	t.mu.Lock()
	defer t.mu.Unlock()
	return t.best(id)
}

// best returns the largest known set of pages. The caller holds t.mu.
func (t *touched) best(id snapshot.ID) vmmctl.Touched {
	pages, ok := t.lessons[subject{id, true}].known()
	if !ok {
		pages, _ = t.lessons[subject{id, false}].known()
	}
	return pages
}

// add begins a lesson. The caller holds t.mu.
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

// forget lets another fork be asked in place of one that failed.
func (t *touched) forget(s subject) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if l := t.lessons[s]; l != nil {
		l.asked--
	}
}

// learn asks a fork that has just answered or finished its rehearsal. It reports
// whether the pages are now known.
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
		return false // many other subjects have displaced it meanwhile
	}
	if l.told++; l.told > 1 {
		pages.Written, pages.Read = extent.Intersect(l.pages.Written, pages.Written), extent.Intersect(l.pages.Read, pages.Read)
	}
	l.pages = pages
	_, ok := l.known()
	return ok
}

// bounded drops the lists of pages that are too long.
func bounded(pages vmmctl.Touched) vmmctl.Touched {
	if extent.Total(pages.Written) > maxTouched*extent.PageSize {
		return vmmctl.Touched{}
	}
	if extent.Total(pages.Read) > maxRead*extent.PageSize {
		pages.Read = nil
	}
	return pages
}
