package node

import (
	"context"
	"fmt"
	"sync"
	"time"

	"agentrun.dev/internal/engine"
	"agentrun.dev/internal/sandbox"
	"golang.org/x/sys/unix"
)

// room keeps a part of the state folder's disk free of data that tenants store, so
// that operations that end or delete objects always work.
type room struct {
	dir     string
	reserve uint64 // bytes

	mu sync.Mutex // protects pledged
	// pledged is how many bytes were admitted and are still being stored.
	pledged uint64
}

// free returns the free space of the disk.
func (r *room) free() (uint64, error) {
	var st unix.Statfs_t
	if err := unix.Statfs(r.dir, &st); err != nil {
		return 0, fmt.Errorf("look at the disk of %s: %w", r.dir, err)
	}
	return st.Bavail * uint64(st.Bsize), nil
}

// admit refuses all further storage if the reserve is already touched.
func (r *room) admit() error {
	_, err := r.pledge(0)
	return err
}

// pledge refuses to store so many bytes if they would reduce the reserve. Until stored is
// called, the bytes count against other callers.
func (r *room) pledge(bytes uint64) (stored func(), err error) {
	if r.reserve == 0 {
		return func() {}, nil
	}
	free, err := r.free()
	if err != nil {
		return nil, err
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	if taken := r.reserve + r.pledged; free < taken || bytes > free-taken {
		return nil, r.refused(bytes, free, r.pledged)
	}
	r.pledged += bytes
	return func() {
		r.mu.Lock()
		defer r.mu.Unlock()
		r.pledged -= bytes
	}, nil
}

func (r *room) refused(bytes, free, pledged uint64) error {
	err := sandbox.Errorf(sandbox.CodeCapacity, "the disk of the node has no room for what is to be stored")
	if bytes > 0 {
		err = sandbox.Errorf(sandbox.CodeCapacity, "the disk of the node has no room for %s", sandbox.Mebibytes(bytes))
	}
	kept := sandbox.Mebibytes(r.reserve) + " are kept for the node itself"
	if pledged > 0 {
		kept += " and " + sandbox.Mebibytes(pledged) + " for what is being stored"
	}
	return err.Because("%s are free, of which %s", sandbox.Mebibytes(free), kept).
		Try("Delete checkpoints, templates or hibernated sandboxes, remove images (`agentrun image prune`), or make the disk larger")
}

// watchEvery is how often watch checks the disk while data is being stored. No event
// tells that a disk becomes full.
const watchEvery = 200 * time.Millisecond

// watch returns a context for storing data of unknown size. It ends when more than half of
// the reserve is used. Its cause is the error for the caller's user.
func (r *room) watch(ctx context.Context) (_ context.Context, stop func()) {
	ctx, cancel := context.WithCancelCause(ctx)
	if r.reserve == 0 {
		return ctx, func() { cancel(nil) }
	}
	go func() {
		ticker := time.NewTicker(watchEvery)
		defer ticker.Stop()
		for {
			select {
			case <-ticker.C:
			case <-ctx.Done():
				return
			}
			if free, err := r.free(); err == nil && free < r.reserve/2 {
				cancel(r.refused(0, free, 0))
				return
			}
		}
	}()
	return ctx, func() { cancel(nil) }
}

// whyNot returns the error of a store with the context of watch. If watch has ended that
// context, it is the error that there is no room.
func whyNot(ctx context.Context, err error) error {
	if cause := context.Cause(ctx); err != nil && sandbox.HasCode(cause, sandbox.CodeCapacity) {
		return cause
	}
	return err
}

// admitCapture makes sure that the disk has room for a machine's memory and disk, besides
// the data that others are storing. The caller calls stored when the capture is on disk, or
// has failed.
func (m *Manager) admitCapture(ctx context.Context, machine engine.Sandbox) (stored func(), err error) {
	if m.room.reserve == 0 {
		return func() {}, nil
	}
	if err := m.room.admit(); err != nil {
		return nil, err
	}
	stats, err := machine.Stats(ctx)
	if err != nil {
		return nil, fmt.Errorf("find out how much there is to store: %w", err)
	}
	return m.room.pledge(stats.Own + stats.Disk)
}

// beginMaking is begin for operations that add objects to the journal. While the disk is
// full, the room that is set aside for the journal is kept for operations that end or delete
// objects.
func (m *Manager) beginMaking() error {
	if err := m.begin(); err != nil {
		return err
	}
	if m.db.Short() {
		return sandbox.Errorf(sandbox.CodeCapacity, "the disk of the node is full, so nothing new is made").
			Because("the journal has only the room that is set aside for it").
			Try("Make room on the disk of the daemon's state folder: delete checkpoints, templates or hibernated sandboxes, or what else is on it")
	}
	return nil
}
