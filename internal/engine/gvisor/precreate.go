package gvisor

import (
	"context"
	"errors"
	"sync"

	"agentrun.dev/internal/engine"
	"agentrun.dev/internal/snapshot"
)

// waiting holds sandboxes that were made ahead for the snapshot that was forked
// last: their kernels run and wait for a checkpoint.
type waiting struct {
	want int

	mu     sync.Mutex // protects all following fields
	of     snapshot.ID
	limits engine.Limits
	shape  shape
	ready  []*process
	making int
	closed bool
	idle   sync.Cond // making has become less
}

// take gives a sandbox that waits for forks of a snapshot, or nil.
func (w *waiting) take(snap *snapshot.Snapshot, limits engine.Limits) *process {
	w.mu.Lock()
	defer w.mu.Unlock()
	for snap.ID() == w.of && limits == w.limits && len(w.ready) > 0 {
		p := w.ready[0]
		w.ready = w.ready[1:]
		select {
		case <-p.done: // it has ended while it waited
		default:
			return p
		}
	}
	return nil
}

// refill has sandboxes made for the next forks of a snapshot. It is called when a
// fork has answered: to make them meanwhile would slow it down.
func (w *waiting) refill(s *sandbox, snap *snapshot.Snapshot, limits engine.Limits) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.want == 0 || w.closed {
		return
	}
	if snap.ID() != w.of || limits != w.limits {
		go kill(w.ready)
		w.of, w.limits, w.ready = snap.ID(), limits, nil
		w.shape = s.shape()
		w.shape.hostname = "sandbox" // each gets its own when it is restored
	}
	for len(w.ready)+w.making < w.want {
		w.making++
		go w.add(s.engine, w.of, w.shape, limits, s.root.use())
	}
}

// add makes one.
func (w *waiting) add(e *Engine, of snapshot.ID, sh shape, limits engine.Limits, root *shared) {
	p, err := e.create(context.Background(), sh, limits, root.file)
	_ = root.release() // the sandbox has its own
	w.mu.Lock()
	defer w.mu.Unlock()
	w.making--
	if w.idle.L != nil {
		w.idle.Broadcast()
	}
	if err != nil {
		return // the next fork makes its own, and says why it cannot
	}
	if w.closed || w.of != of || w.limits != limits {
		go p.kill()
		return
	}
	w.ready = append(w.ready, p)
}

func kill(list []*process) {
	for _, p := range list {
		p.kill()
	}
}

// Precreated waits until as many sandboxes wait as are wanted, or the context
// ends.
func (e *Engine) Precreated(ctx context.Context) error {
	w := &e.waiting
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.idle.L == nil {
		w.idle.L = &w.mu
	}
	stop := context.AfterFunc(ctx, func() {
		w.mu.Lock()
		defer w.mu.Unlock()
		w.idle.Broadcast()
	})
	defer stop()
	for w.making > 0 && ctx.Err() == nil {
		w.idle.Wait()
	}
	if err := ctx.Err(); err != nil {
		return err
	}
	if len(w.ready) < w.want {
		return errors.New("sandboxes could not be made ahead: a fork says why")
	}
	return nil
}

// close ends the sandboxes that wait.
func (w *waiting) close() error {
	w.mu.Lock()
	if w.idle.L == nil {
		w.idle.L = &w.mu
	}
	w.closed = true
	for w.making > 0 {
		w.idle.Wait()
	}
	list := w.ready
	w.ready = nil
	w.mu.Unlock()
	kill(list)
	return nil
}
