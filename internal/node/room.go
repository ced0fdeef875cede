package node

import (
	"context"
	"fmt"
	"time"

	"agentrun.dev/internal/engine"
	"agentrun.dev/internal/sandbox"
	"golang.org/x/sys/unix"
)

// room keeps a part of the state folder's disk free of what tenants store, so that
// whatever ends or deletes something always can.
type room struct {
	dir     string
	reserve uint64 // bytes
}

// free is how much room the disk has.
func (r room) free() (uint64, error) {
	var st unix.Statfs_t
	if err := unix.Statfs(r.dir, &st); err != nil {
		return 0, fmt.Errorf("look at the disk of %s: %w", r.dir, err)
	}
	return st.Bavail * uint64(st.Bsize), nil
}

// admit refuses to store so many bytes more where they would take of the reserve. With none
// it says whether any would be refused.
func (r room) admit(bytes uint64) error {
	free, err := r.free()
	if err != nil {
		return err
	}
	if r.reserve > 0 && (free < r.reserve || bytes > free-r.reserve) {
		return r.refused(bytes, free)
	}
	return nil
}

func (r room) refused(bytes, free uint64) error {
	err := sandbox.Errorf(sandbox.CodeCapacity, "the disk of the node has no room for what is to be stored")
	if bytes > 0 {
		err = sandbox.Errorf(sandbox.CodeCapacity, "the disk of the node has no room for %s", sandbox.Mebibytes(bytes))
	}
	return err.Because("%s are free, of which %s are kept for the node itself", sandbox.Mebibytes(free), sandbox.Mebibytes(r.reserve)).
		Try("Delete checkpoints, templates or hibernated sandboxes, remove images (`agentrun image prune`), or make the disk larger")
}

// watchEvery is how often what is being stored is looked at. No event tells that a disk
// becomes full.
const watchEvery = 200 * time.Millisecond

// watch is a context for something that is stored of which nobody knows how large it
// becomes: it ends when more than half of the reserve is gone. The cause is the error that
// whoever asked is to be told.
func (r room) watch(ctx context.Context) (_ context.Context, stop func()) {
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
				cancel(r.refused(0, free))
				return
			}
		}
	}()
	return ctx, func() { cancel(nil) }
}

// whyNot is the error of what was stored with the context of watch: that there is no room,
// if it was ended for that.
func whyNot(ctx context.Context, err error) error {
	if cause := context.Cause(ctx); err != nil && sandbox.HasCode(cause, sandbox.CodeCapacity) {
		return cause
	}
	return err
}

// admitCapture sees to it that there is room on the disk for what a machine has.
func (m *Manager) admitCapture(ctx context.Context, machine engine.Sandbox) error {
	if m.room.reserve == 0 {
		return nil
	}
	if err := m.room.admit(0); err != nil {
		return err
	}
	stats, err := machine.Stats(ctx)
	if err != nil {
		return fmt.Errorf("find out how much there is to store: %w", err)
	}
	return m.room.admit(stats.Own + stats.Disk)
}

// beginMaking is begin for what makes something that the journal has to keep. While the disk
// is full, the room that is set aside for the journal is for what ends and deletes.
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
