package local

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"time"

	"agentrun.dev/internal/engine/pick"
	"agentrun.dev/internal/layer"
	"agentrun.dev/internal/snapshot"
	"golang.org/x/sys/unix"
)

// Entry is a snapshot or a sandbox in a listing.
type Entry struct {
	Name Name   `json:"name"`
	Kind string `json:"kind"` // KindSnapshot or KindSandbox
	// Engine is what it runs on.
	Engine pick.Kind `json:"engine,omitempty"`
	// Status is one of the Status constants, or what is wrong with it.
	Status  string    `json:"status"`
	Created time.Time `json:"created,omitzero"`
	// Snapshot is the id of the snapshot, or of the one the sandbox came from.
	Snapshot string `json:"snapshot,omitempty"`
	VCPUs    int    `json:"vcpus,omitempty"`
	Memory   uint64 `json:"memory,omitempty"`
	// Stored is the bytes of a snapshot's layers, Layers how many there are;
	// snapshots of one family share most of them.
	Stored uint64 `json:"stored,omitempty"`
	Layers int    `json:"layers,omitempty"`
	// Unshared is what of it nobody else has: the bytes on disk that removing
	// the snapshot or sandbox frees.
	Unshared uint64 `json:"unshared,omitempty"`
	// Own is the memory of a running sandbox alone.
	Own uint64 `json:"own,omitempty"`
	PID int    `json:"pid,omitempty"`
}

// Kinds of entries, and the statuses of healthy ones.
const (
	KindSnapshot = "snapshot"
	KindSandbox  = "sandbox"

	StatusReady   = "ready"
	StatusRunning = "running"
	StatusEnded   = "ended"
	StatusPaused  = "paused"
	StatusAsleep  = "hibernated"
)

// List lists all snapshots, then all sandboxes.
func (s *Store) List() ([]Entry, error) {
	var out []Entry
	for _, kind := range []struct {
		name, dir string
		describe  func(Name) Entry
	}{{KindSnapshot, "snapshots", s.describeSnapshot}, {KindSandbox, "sandboxes", s.describeSandbox}} {
		entries, err := os.ReadDir(filepath.Join(s.dir, kind.dir))
		if err != nil {
			return nil, fmt.Errorf("list: %w", err)
		}
		for _, d := range entries {
			n, err := ParseName(d.Name())
			if err != nil {
				continue // temporary folders of snapshots in the making
			}
			e := kind.describe(n)
			e.Name, e.Kind = n, kind.name
			out = append(out, e)
		}
	}
	return out, nil
}

func (s *Store) describeSnapshot(n Name) Entry {
	return describe(s.snapshotDir(n))
}

func describe(dir string) Entry {
	snap, err := snapshot.Open(dir)
	if err != nil {
		return Entry{Status: err.Error()}
	}
	defer func() { _ = snap.Close() }() // only read
	m := snap.Manifest()
	kind, err := pick.Of(m.Engine)
	if err != nil {
		return Entry{Status: err.Error()}
	}
	e := Entry{Status: StatusReady, Engine: kind, Created: m.Created, Snapshot: snap.ID().String(), VCPUs: m.VCPUs, Memory: m.Memory.Size}
	for _, ref := range m.Layers() {
		e.Stored += ref.Size
		e.Layers++
	}
	e.Unshared = unshared(dir)
	return e
}

// unshared adds up the files of a folder that have no other name.
func unshared(dir string) (bytes uint64) {
	_ = filepath.WalkDir(dir, func(path string, d fs.DirEntry, err error) error {
		var st unix.Stat_t
		if err == nil && d.Type().IsRegular() && unix.Lstat(path, &st) == nil && st.Nlink == 1 {
			bytes += uint64(st.Blocks) * statBlock
		}
		return nil // what vanishes meanwhile does not count
	})
	return bytes
}

// statBlock is the unit of stat(2)'s st_blocks.
const statBlock = 512

func (s *Store) describeSandbox(n Name) Entry {
	r, err := s.record(n)
	if err != nil {
		return Entry{Status: err.Error(), Created: r.Created, PID: r.Process.PID}
	}
	e := describe(filepath.Join(s.sandboxDir(n), r.From))
	e.Created = r.Created
	if !r.Hibernated {
		e.PID = r.Process.PID
	}
	switch {
	case e.Status != StatusReady:
	case r.Hibernated:
		e.Status = StatusAsleep
	case r.Process.Alive():
		e.Status = StatusRunning
		if r.Paused {
			e.Status = StatusPaused
		}
		if en, err := s.engine(r.engine()); err == nil {
			if st, err := en.ProcessStats(r.Process.PID); err == nil {
				e.Own = st.Own
			}
		}
	default:
		e.Status = StatusEnded
	}
	return e
}

// Remove ends a sandbox and forgets it, or deletes a snapshot.
func (s *Store) Remove(ctx context.Context, name Name) error {
	if dir := s.sandboxDir(name); exists(dir) {
		// A sandbox left half made has no record, but may have a process.
		if r, err := s.record(name); err == nil {
			if err := r.Process.Kill(ctx); err != nil {
				return fmt.Errorf("remove sandbox %s: %w", name, err)
			}
		} else if err := s.stopUnknown(ctx, dir); err != nil {
			return fmt.Errorf("remove sandbox %s: %w", name, err)
		}
		if err := os.RemoveAll(dir); err != nil {
			return fmt.Errorf("remove sandbox %s: %w", name, err)
		}
		return s.tidy()
	}
	if dir := s.snapshotDir(name); exists(dir) {
		if err := snapshot.Remove(dir); err != nil {
			return fmt.Errorf("remove snapshot %s: %w", name, err)
		}
		return s.tidy()
	}
	return fmt.Errorf("remove %s: %w", name, ErrNotFound)
}

// stopUnknown ends the process of a sandbox that was left half made: what it was
// made of says on which engine.
func (s *Store) stopUnknown(ctx context.Context, dir string) error {
	snap, err := snapshot.Open(filepath.Join(dir, fromName))
	if err != nil {
		return nil // there was none yet
	}
	defer func() { _ = snap.Close() }() // only read
	e, err := s.engineOf(snap)
	if err != nil {
		return err
	}
	return e.StopListening(ctx, filepath.Join(dir, controlName))
}

// tidy frees the memory layers that no snapshot and no sandbox uses, and what
// dead builders left. Running sandboxes keep what they have mapped.
func (s *Store) tidy() error {
	used := map[layer.Digest]bool{}
	for _, pattern := range []string{"snapshots/*", "sandboxes/*/from*"} {
		dirs, err := filepath.Glob(filepath.Join(s.dir, pattern))
		if err != nil {
			return err
		}
		for _, dir := range dirs {
			snap, err := snapshot.Open(dir)
			if err != nil {
				continue
			}
			for _, ref := range snap.Manifest().Layers() {
				used[ref.Digest] = true
			}
			_ = snap.Close() // only read
		}
	}
	errs := []error{snapshot.CleanTemp(filepath.Join(s.dir, "snapshots"))}
	for _, kind := range pick.Kinds {
		e, err := s.engine(kind)
		if err != nil {
			continue // it is not installed here, and has left nothing
		}
		_, err = e.KeepResident(func(d layer.Digest) bool { return used[d] })
		errs = append(errs, err, e.Sweep())
	}
	return errors.Join(errs...)
}
