package microvm

import (
	"context"
	"sync"

	"agentrun.dev/internal/jail"
	"agentrun.dev/internal/layer"
	"agentrun.dev/internal/snapshot"
	"agentrun.dev/internal/vmmctl"
)

// What a fork writes to before its first answer is nearly the same in each fork
// of a snapshot: the first ones are asked, and the others get what these have in
// common before they run. One alone would not do: on a busy host its kernel has
// had time for other things, and all would own the pages of these.

// forksAsked is how many forks of a snapshot are asked. They themselves are
// given nothing: what they were given would be theirs, needed or not.
const forksAsked = 2

// maxTouched is how many pages are worth it: a guest that had more to do is not
// a measure for others.
const maxTouched = 1024

// touched remembers the pages by snapshot, the last few.
type touched struct {
	mu      sync.Mutex // protects all following fields
	lessons map[snapshot.ID]*lesson
	order   []snapshot.ID
}

// lesson is what is known of a snapshot's forks.
type lesson struct {
	asked, told int         // forks that were or are being asked, and have answered
	runs        []layer.Run // what all that have answered have in common
}

// known returns the pages to populate, once enough forks have told.
func (l *lesson) known() []layer.Run {
	if l == nil || l.told < forksAsked {
		return nil
	}
	return l.runs
}

const maxTouchedSnapshots = 64

// of returns the pages to populate; learn says that not enough forks have been
// asked so far, and that the caller's is to be.
func (t *touched) of(id snapshot.ID) (runs []layer.Run, learn bool) {
	t.mu.Lock()
	defer t.mu.Unlock()
	l := t.lessons[id]
	if l == nil {
		l = t.add(id)
	}
	if l.asked < forksAsked {
		l.asked++
		return nil, true
	}
	return l.known(), false
}

// known returns the pages to populate, as far as that is known.
func (t *touched) known(id snapshot.ID) []layer.Run {
	t.mu.Lock()
	defer t.mu.Unlock()
	return t.lessons[id].known()
}

// add begins a lesson. The lock must be held.
func (t *touched) add(id snapshot.ID) *lesson {
	if t.lessons == nil {
		t.lessons = map[snapshot.ID]*lesson{}
	}
	l := &lesson{}
	t.lessons[id] = l
	t.order = append(t.order, id)
	if len(t.order) > maxTouchedSnapshots {
		delete(t.lessons, t.order[0])
		t.order = t.order[1:]
	}
	return l
}

// forget lets another fork be asked for one that could not be.
func (t *touched) forget(id snapshot.ID) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if l := t.lessons[id]; l != nil {
		l.asked--
	}
}

// learn asks a fork that has just answered. It reports whether the pages to
// populate are known with that.
func (t *touched) learn(ctx context.Context, id snapshot.ID, p *Process) bool {
	runs, err := p.touched(ctx)
	if err != nil {
		t.forget(id) // the fork has ended
		return false
	}
	if pagesOf(runs) > maxTouched {
		runs = nil
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	l := t.lessons[id]
	if l == nil {
		return false // there were many other snapshots meanwhile
	}
	if l.told++; l.told == 1 {
		l.runs = runs
	} else {
		l.runs = common(l.runs, runs)
	}
	return len(l.known()) > 0
}

// common returns what is in both of two sorted lists.
func common(a, b []layer.Run) (out []layer.Run) {
	for len(a) > 0 && len(b) > 0 {
		endA, endB := a[0].Start+a[0].Length, b[0].Start+b[0].Length
		if start, end := max(a[0].Start, b[0].Start), min(endA, endB); start < end {
			out = append(out, layer.Run{Start: start, Length: end - start})
		}
		if endA <= endB {
			a = a[1:]
		} else {
			b = b[1:]
		}
	}
	return out
}

func pagesOf(runs []layer.Run) (pages uint64) {
	for _, r := range runs {
		pages += r.Length / layer.PageSize
	}
	return pages
}

// touched lists the pages of memory that are the guest's own.
func (p *Process) touched(ctx context.Context) ([]layer.Run, error) {
	pagemap, err := jail.OpenPagemap(p.Pid())
	if err != nil {
		return nil, err
	}
	defer func() { _ = pagemap.Close() }() // the vmm has its own copy
	r, err := p.request(ctx, func(id uint64) vmmctl.Message {
		return &vmmctl.Simple{Kind: vmmctl.KindTouched, ID: id}
	}, pagemap)
	if err != nil {
		return nil, err
	}
	return vmmctl.UnmarshalRuns(r.Data)
}
