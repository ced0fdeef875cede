package local

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"time"

	"agentrun.dev/internal/engine"
	"agentrun.dev/internal/engine/folder"
	"agentrun.dev/internal/engine/pick"
	"agentrun.dev/internal/storage/snapshot"
)

// Entry is a snapshot or a sandbox in a listing.
type Entry struct {
	Name Name   `json:"name"`
	Kind string `json:"kind"` // KindSnapshot or KindSandbox
	// Engine is the engine that it runs on.
	Engine pick.Kind `json:"engine,omitempty"`
	// Status is one of the Status constants, or a description of the problem.
	Status  string    `json:"status"`
	Created time.Time `json:"created,omitzero"`
	// Snapshot is the id of the snapshot, or of the one the sandbox came from.
	Snapshot string `json:"snapshot,omitempty"`
	VCPUs    int    `json:"vcpus,omitempty"`
	Memory   uint64 `json:"memory,omitempty"`
	// Stored is the size of a snapshot's layers, Layers their number. Snapshots
	// of one family share most of them.
	Stored uint64 `json:"stored,omitempty"`
	Layers int    `json:"layers,omitempty"`
	// Unshared is the disk space that only this entry uses. Removing the
	// snapshot or sandbox frees it.
	Unshared uint64 `json:"unshared,omitempty"`
	// Own is the memory that only this running sandbox uses.
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
				continue // temporary folders of unfinished snapshots
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

// unshared returns the disk space that only this folder uses, as far as it can
// be read.
func unshared(dir string) uint64 {
	size, _ := new(snapshot.Usage).Add(dir) // the folder may be disappearing
	return size.Unshared
}

func (s *Store) describeSandbox(n Name) Entry {
	r, err := s.record(n)
	if err != nil {
		return Entry{Status: err.Error(), Created: r.Created}
	}
	if r.Hibernated {
		e := describe(s.asleepDir(n, r.Life))
		e.Created = r.Created
		if e.Status == StatusReady {
			e.Status = StatusAsleep
		}
		return e
	}
	machine := s.machineDir(n, r.Life)
	e := describe(folder.Folder(machine).From())
	e.Created, e.Unshared = r.Created, unshared(machine)
	if e.Status != StatusReady {
		return e
	}
	runs, err := s.engine(r.Engine)
	if err != nil {
		e.Status = err.Error()
		return e
	}
	pid, st, err := runs.Inspect(machine)
	switch {
	case errors.Is(err, engine.ErrEnded):
		e.Status = StatusEnded
		return e
	case err != nil:
		e.Status = err.Error()
		return e
	case r.Paused:
		e.Status = StatusPaused
	default:
		e.Status = StatusRunning
	}
	e.PID, e.Own = pid, st.Own
	return e
}

// removeMachine ends the machine in a folder. The snapshot that the machine comes
// from names its engine.
func (s *Store) removeMachine(ctx context.Context, dir string) error {
	snap, err := snapshot.Open(folder.Folder(dir).From())
	if err != nil { // the machine was not started yet
		return os.RemoveAll(dir)
	}
	e, err := s.engineOf(snap)
	if err = errors.Join(err, snap.Close()); err != nil {
		return err
	}
	return e.Remove(ctx, dir)
}

// Remove ends a sandbox and removes it, or deletes a snapshot.
func (s *Store) Remove(ctx context.Context, name Name) error {
	if exists(s.sandboxDir(name)) {
		return s.Kill(ctx, name)
	}
	if dir := s.snapshotDir(name); exists(dir) {
		if err := snapshot.Remove(dir); err != nil {
			return fmt.Errorf("remove snapshot %s: %w", name, err)
		}
		return s.tidy()
	}
	return fmt.Errorf("remove %s: %w", name, ErrNotFound)
}

// Kill ends a sandbox and removes it.
func (s *Store) Kill(ctx context.Context, name Name) error {
	if dir := s.sandboxDir(name); exists(dir) {
		// Without its record the sandbox counts as half made, even if this
		// removal is interrupted. A half made sandbox may have a machine.
		if err := os.Remove(filepath.Join(dir, recordName)); err != nil && !errors.Is(err, fs.ErrNotExist) {
			return fmt.Errorf("remove sandbox %s: %w", name, err)
		}
		machines, err := filepath.Glob(filepath.Join(dir, "machine-*"))
		for _, m := range machines {
			err = errors.Join(err, s.removeMachine(ctx, m))
		}
		if err != nil {
			return fmt.Errorf("remove sandbox %s: %w", name, err)
		}
		if err := os.RemoveAll(dir); err != nil {
			return fmt.Errorf("remove sandbox %s: %w", name, err)
		}
		return s.tidy()
	}
	if exists(s.snapshotDir(name)) {
		return fmt.Errorf("kill %s: it is a snapshot, which does not run; `agentrun rm %s` deletes it", name, name)
	}
	return fmt.Errorf("kill %s: %w", name, ErrNotFound)
}

// tidy frees the memory layers that no snapshot and no sandbox uses, and
// deletes the leftovers of dead builders.
func (s *Store) tidy() error {
	var folders, snapshots []string
	for pattern, list := range map[string]*[]string{
		"snapshots/*": &snapshots, "sandboxes/*/machine-*": &folders, // a hibernated sandbox has nothing in memory
	} {
		dirs, err := filepath.Glob(filepath.Join(s.dir, pattern))
		if err != nil {
			return err
		}
		*list = append(*list, dirs...)
	}
	errs := []error{snapshot.CleanTemp(filepath.Join(s.dir, "snapshots"))}
	for _, kind := range pick.Kinds {
		if e, err := s.engine(kind); err == nil { // an engine that cannot be opened has left nothing behind
			errs = append(errs, e.Keep(folders, snapshots), engine.KeepPrograms(e, s.everySnapshot))
		}
	}
	return errors.Join(errs...)
}

// everySnapshot lists the snapshots that sandboxes come from or may come from.
func (s *Store) everySnapshot() (all []string, err error) {
	for _, pattern := range []string{"snapshots/*", "sandboxes/*/machine-*/from", "sandboxes/*/image-*"} {
		found, err := filepath.Glob(filepath.Join(s.dir, pattern))
		if err != nil {
			return nil, err
		}
		all = append(all, found...)
	}
	return all, nil
}
