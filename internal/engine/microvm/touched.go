package microvm

import (
	"context"
	"slices"
	"sync"

	"agentrun.dev/internal/jail"
	"agentrun.dev/internal/layer"
	"agentrun.dev/internal/snapshot"
	"agentrun.dev/internal/vmmctl"
)

// What a fork writes to before its first answer is nearly the same in each fork
// of a snapshot: the first one is asked, and the others get these pages before
// they run.

// maxTouched is how many pages are worth it: a guest that had more to do is not
// a measure for others.
const maxTouched = 1024

// touched remembers the pages by snapshot, the last few.
type touched struct {
	mu    sync.Mutex // protects all following fields
	runs  map[snapshot.ID][]layer.Run
	order []snapshot.ID
}

const maxTouchedSnapshots = 64

// of returns the pages to populate; learn says that nobody has been asked yet,
// and that the caller's fork is to be.
func (t *touched) of(id snapshot.ID) (runs []layer.Run, learn bool) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if runs, ok := t.runs[id]; ok {
		return runs, false
	}
	t.set(id, nil)
	return nil, true
}

// known returns the pages to populate, as far as that is known.
func (t *touched) known(id snapshot.ID) []layer.Run {
	t.mu.Lock()
	defer t.mu.Unlock()
	return t.runs[id]
}

// set records what was learnt. The lock must be held.
func (t *touched) set(id snapshot.ID, runs []layer.Run) {
	if t.runs == nil {
		t.runs = map[snapshot.ID][]layer.Run{}
	}
	if _, ok := t.runs[id]; !ok {
		t.order = append(t.order, id)
	}
	t.runs[id] = runs
	if len(t.order) > maxTouchedSnapshots {
		delete(t.runs, t.order[0])
		t.order = t.order[1:]
	}
}

// forget lets the next fork be asked.
func (t *touched) forget(id snapshot.ID) {
	t.mu.Lock()
	defer t.mu.Unlock()
	delete(t.runs, id)
	t.order = slices.DeleteFunc(t.order, func(other snapshot.ID) bool { return other == id })
}

// learn asks a fork that has just answered. It reports whether that helped.
func (t *touched) learn(ctx context.Context, id snapshot.ID, p *Process) bool {
	runs, err := p.touched(ctx)
	if err != nil {
		t.forget(id) // the fork has ended
		return false
	}
	if pagesOf(runs) > maxTouched {
		return false
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	t.set(id, runs)
	return true
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
