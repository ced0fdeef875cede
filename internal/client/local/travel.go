package local

import (
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"

	"agentrun.dev/internal/storage/image"
	"agentrun.dev/internal/storage/layer"
	"agentrun.dev/internal/storage/pack"
	"agentrun.dev/internal/storage/snapshot"
	v1 "github.com/google/go-containerregistry/pkg/v1"
)

// Pack writes a snapshot into one file, for other machines.
func (s *Store) Pack(ctx context.Context, name Name, w io.Writer, o pack.PackOptions) (v1.Hash, error) {
	return s.packed(name, func(snap *snapshot.Snapshot) (v1.Hash, error) { return pack.Write(ctx, w, snap, o) })
}

// Push packs a snapshot into a registry, for other machines.
func (s *Store) Push(ctx context.Context, name Name, ref image.Reference, at image.Registries, o pack.PackOptions) (v1.Hash, error) {
	return s.packed(name, func(snap *snapshot.Snapshot) (v1.Hash, error) { return pack.Push(ctx, snap, ref, at, o) })
}

func (s *Store) packed(name Name, do func(*snapshot.Snapshot) (v1.Hash, error)) (_ v1.Hash, err error) {
	snap, err := snapshot.Open(s.snapshotDir(name))
	if errors.Is(err, fs.ErrNotExist) && !exists(s.snapshotDir(name)) {
		if exists(s.sandboxDir(name)) {
			return v1.Hash{}, fmt.Errorf("%s is a sandbox, and only snapshots are packed: agentrun snapshot NAME --from %s makes one of it", name, name)
		}
		return v1.Hash{}, fmt.Errorf("snapshot %s: %w", name, ErrNotFound)
	}
	if err != nil {
		return v1.Hash{}, err
	}
	defer func() { err = errors.Join(err, snap.Close()) }()
	return do(snap)
}

// Unpack makes a snapshot from the output of Pack. It refuses a snapshot that
// this host cannot fork, unless o.Accept decides otherwise.
func (s *Store) Unpack(ctx context.Context, r io.ReaderAt, size int64, name Name, o pack.UnpackOptions) error {
	return s.unpacked(name, o, func(o pack.UnpackOptions) (*snapshot.Snapshot, error) {
		return pack.Read(ctx, r, size, s.snapshotDir(name), o)
	})
}

// Pull makes a snapshot from a pack that Push has put into a registry, with the
// same check.
func (s *Store) Pull(ctx context.Context, ref image.Reference, name Name, at image.Registries, o pack.UnpackOptions) error {
	return s.unpacked(name, o, func(o pack.UnpackOptions) (*snapshot.Snapshot, error) {
		return pack.Pull(ctx, ref, s.snapshotDir(name), at, o)
	})
}

func (s *Store) unpacked(name Name, o pack.UnpackOptions, do func(pack.UnpackOptions) (*snapshot.Snapshot, error)) error {
	if err := s.free(name); err != nil {
		return err
	}
	if err := snapshot.CleanTemp(filepath.Join(s.dir, "snapshots")); err != nil { // leftovers of killed processes
		return err
	}
	if o.Accept == nil {
		o.Accept = s.fits
	}
	o.Lend = s.lend
	snap, err := do(o)
	if err != nil {
		return err
	}
	return snap.Close()
}

// fits refuses a snapshot that this host cannot fork.
func (s *Store) fits(m snapshot.Manifest) error {
	e, err := s.engineFor(m.Engine)
	if err == nil {
		err = e.Fits(m)
	}
	if err != nil {
		return fmt.Errorf("this host cannot fork it: %w (--any-host keeps it nevertheless)", err)
	}
	return nil
}

// lend finds a snapshot that has a layer.
func (s *Store) lend(ref layer.Ref) *snapshot.Snapshot {
	entries, err := os.ReadDir(filepath.Join(s.dir, "snapshots"))
	if err != nil {
		return nil
	}
	for _, d := range entries {
		n, err := ParseName(d.Name())
		if err != nil {
			continue
		}
		if !exists(filepath.Join(s.snapshotDir(n), "layers", ref.Digest.String())) {
			continue
		}
		snap, err := snapshot.Open(s.snapshotDir(n))
		if err != nil {
			continue
		}
		if f, err := snap.OpenLayer(ref); err == nil {
			_ = f.Close() // only its existence matters
			return snap
		}
		_ = snap.Close() // not used further
	}
	return nil
}
