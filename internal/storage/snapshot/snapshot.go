package snapshot

import (
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"io"
	"os"

	"agentrun.dev/internal/storage/layer"
)

const (
	manifestName = "manifest.json"
	stateName    = "state"
	layersName   = "layers"
)

// Snapshot is an open folder. It stays usable if the folder is moved.
type Snapshot struct {
	root     *os.Root
	id       ID
	manifest Manifest
	state    []byte
	options
}

// Open reads a folder. It checks the manifest and the state, and that each layer
// exists with its size. Layers are hashed when they are loaded, or by Verify. A
// private snapshot needs the key that it was sealed with: ErrPrivate.
func Open(dir string, opts ...Option) (*Snapshot, error) {
	root, err := os.OpenRoot(dir)
	if err != nil {
		return nil, fmt.Errorf("open snapshot: %w", err)
	}
	return open(root, optionsOf(opts))
}

func open(root *os.Root, o options) (*Snapshot, error) {
	s := &Snapshot{root: root, options: o}
	if err := s.read(); err != nil {
		return nil, errors.Join(fmt.Errorf("open snapshot %s: %w", root.Name(), err), root.Close())
	}
	return s, nil
}

func (s *Snapshot) readManifest() error {
	b, err := s.readFile(manifestName, MaxManifest)
	if err != nil {
		return err
	}
	s.id = sha256.Sum256(b)
	if s.manifest, err = decode(b); err != nil {
		return fmt.Errorf("%s: %w", manifestName, err)
	}
	return nil
}

func (s *Snapshot) read() (err error) {
	if err := s.readManifest(); err != nil {
		return err
	}
	if s.state, err = s.readState(); err != nil {
		return err
	}
	want := s.manifest.State
	if got := (Blob{sha256.Sum256(s.state), uint64(len(s.state))}); got != want {
		return fmt.Errorf("%s is damaged: it has %d bytes with digest %s, the manifest says %d with %s", stateName, got.Size, got.Digest, want.Size, want.Digest)
	}
	for _, ref := range s.manifest.Layers() {
		f, _, err := s.openFile(ref)
		if err != nil {
			return err
		}
		_ = f.Close() // only looked at
	}
	return nil
}

// readFile reads a whole file of at most limit bytes.
func (s *Snapshot) readFile(name string, limit int64) ([]byte, error) {
	f, info, err := openRegular(s.root, name)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	if info.Size() > limit {
		return nil, fmt.Errorf("%s has %d bytes, more than %d", name, info.Size(), limit)
	}
	b, err := io.ReadAll(io.LimitReader(f, info.Size()))
	if err != nil {
		return nil, fmt.Errorf("read %s: %w", name, err)
	}
	return b, nil
}

// openRegular opens a regular file, and never follows a symbolic link: os.Root
// would follow a link that stays inside the folder. Opening a FIFO would block.
func openRegular(root *os.Root, name string) (*os.File, os.FileInfo, error) {
	seen, err := root.Lstat(name)
	if err != nil {
		return nil, nil, err
	}
	if !seen.Mode().IsRegular() {
		return nil, nil, fmt.Errorf("%s is not a regular file (%s)", name, seen.Mode())
	}
	f, err := root.Open(name)
	if err != nil {
		return nil, nil, err
	}
	info, err := f.Stat()
	if err == nil && !os.SameFile(seen, info) {
		err = fmt.Errorf("%s was replaced while it was opened", name)
	}
	if err != nil {
		return nil, nil, errors.Join(err, f.Close())
	}
	return f, info, nil
}

// ID identifies the snapshot by its content.
func (s *Snapshot) ID() ID { return s.id }

// Manifest describes the machine. The caller must not change data that it
// points to.
func (s *Snapshot) Manifest() Manifest { return s.manifest }

// State is the state of vCPUs and devices. The caller must not change it.
func (s *Snapshot) State() []byte { return s.state }

// OpenLayer opens a layer for reading. Its size was checked, but not its
// content. A sealed layer becomes a file in memory, which is compared with its
// digest.
func (s *Snapshot) OpenLayer(ref layer.Ref) (*os.File, error) {
	f, sealed, err := s.openFile(ref)
	if err != nil || !sealed {
		return f, err
	}
	defer f.Close()
	return s.unsealed(ref, f)
}

// Verify hashes the layers. Open has hashed the rest.
func (s *Snapshot) Verify(ctx context.Context) error {
	for _, ref := range s.manifest.Layers() {
		f, err := s.ReadLayer(ref)
		if err != nil {
			return fmt.Errorf("verify snapshot %s: %w", s.id, err)
		}
		err = layer.Copy(ctx, io.Discard, f, ref)
		_ = f.Close() // only read from
		if err != nil {
			return fmt.Errorf("verify snapshot %s: layer %s: %w", s.id, ref.Digest, err)
		}
	}
	return nil
}

// Close closes the folder.
func (s *Snapshot) Close() error { return s.root.Close() }
