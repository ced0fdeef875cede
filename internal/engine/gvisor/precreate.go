package gvisor

import (
	"context"
	"errors"
	"sync"

	"agentrun.dev/internal/engine"
	"agentrun.dev/internal/engine/gvisorctl"
	"agentrun.dev/internal/storage/layer"
	"agentrun.dev/internal/storage/snapshot"
)

// waiting holds sandboxes that were made ahead for the snapshot that was forked last.
// Their kernels run, have their wires and have read the checkpoint.
type waiting struct {
	want int

	mu     sync.Mutex // protects all following fields
	of     snapshot.ID
	build  layer.Digest // of its helper
	limits engine.Limits
	shape  shape
	files  checkpoint // of the snapshot
	ready  []*process
	making int
	made   chan struct{} // closed and replaced when making decreases; may be nil
	closed bool
	busy   sync.WaitGroup // goroutines that make or end sandboxes; none starts after closed
}

// take returns a sandbox that waits for forks of a snapshot, or nil.
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

// refill starts to make sandboxes for the next forks of a snapshot. It is called once
// a fork has answered, since making sandboxes earlier would slow the fork down. files
// are the snapshot's files; they are empty if the fork did not need them.
func (w *waiting) refill(s *sandbox, snap *snapshot.Snapshot, limits engine.Limits, files checkpoint) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.want == 0 || w.closed {
		return
	}
	if snap.ID() != w.of || limits != w.limits {
		own, err := files.copy()
		if err != nil || own.state == nil {
			return // another snapshot was forked meanwhile, or the next fork will report the error
		}
		old := w.ready
		w.busy.Go(func() { kill(old) })
		w.files.close()
		w.of, w.build, w.limits, w.ready, w.files = snap.ID(), s.build, limits, nil, own
		w.shape = s.shape()
		w.shape.hostname = "sandbox" // each fork gets its own when it is restored
	}
	for len(w.ready)+w.making < w.want {
		load, err := w.files.copy()
		if err != nil {
			return
		}
		w.making++
		of, build, sh, root, network := w.of, w.build, w.shape, s.root.use(), s.network
		w.busy.Go(func() { w.add(s.engine, of, build, sh, limits, root, load, network) })
	}
}

// add makes a sandbox and lets it load a checkpoint. If that fails, the next fork
// makes a sandbox itself and reports the error.
func (w *waiting) add(e *Engine, of snapshot.ID, build layer.Digest, sh shape, limits engine.Limits, root *shared, load checkpoint, network *engine.Network) {
	p, err := e.createOf(context.Background(), build, sh, limits, root.file)
	_ = root.release() // the sandbox has its own copy
	if err == nil {
		if err = p.load(context.Background(), load, network); err != nil {
			p.kill()
		}
	}
	load.close() // the sandbox has its own copies
	w.mu.Lock()
	wanted := !w.closed && w.of == of && w.limits == limits
	if err == nil && wanted {
		w.ready = append(w.ready, p)
	}
	w.making--
	if w.made != nil {
		close(w.made)
		w.made = nil
	}
	w.mu.Unlock()
	if err == nil && !wanted {
		p.kill()
	}
}

// load starts to load a checkpoint into a waiting sandbox. The load continues after
// load has returned.
func (p *process) load(ctx context.Context, c checkpoint, network *engine.Network) error {
	m, files := &gvisorctl.Message{Op: gvisorctl.OpLoad}, c.list()
	if network != nil {
		w, err := newWired(network, p.sentry)
		if err != nil {
			return err
		}
		defer func() { _ = w.guest.Close() }() // the helper has its own copy
		m.Network, p.host = w.network, w.host
		files = append(files, w.guest, w.host)
	}
	_, err := p.request(ctx, m, files...)
	p.loaded = err == nil
	return err
}

func kill(list []*process) {
	for _, p := range list {
		p.kill()
	}
}

// Precreated waits until all wanted sandboxes wait, or until ctx ends.
func (e *Engine) Precreated(ctx context.Context) error {
	w := &e.waiting
	for {
		w.mu.Lock()
		if w.made == nil {
			w.made = make(chan struct{})
		}
		ready, making, made := len(w.ready), w.making, w.made
		w.mu.Unlock()
		switch {
		case ready >= w.want:
			return nil
		case making == 0:
			return errors.New("sandboxes could not be made ahead: a fork says why")
		}
		select {
		case <-made:
		case <-ctx.Done():
			return ctx.Err()
		}
	}
}

// close ends the waiting sandboxes.
func (w *waiting) close() error {
	w.mu.Lock()
	w.closed = true
	list := w.ready
	w.ready = nil
	w.files.close()
	w.files = checkpoint{}
	w.mu.Unlock()
	w.busy.Wait()
	kill(list)
	return nil
}
