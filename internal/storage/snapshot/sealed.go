package snapshot

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path"

	"agentrun.dev/internal/storage/layer"
	"agentrun.dev/internal/storage/seal"
	"golang.org/x/sys/unix"
)

// sealedSuffix ends the names of sealed layers.
const sealedSuffix = ".sealed"

// ErrPrivate says that a snapshot holds secrets and the key to it is missing,
// or that it would get into a snapshot that is not private.
var ErrPrivate = errors.New("it holds secrets and is sealed: only the daemon that made it opens it, and it cannot be exported")

// Option is a setting of a snapshot that is made or opened.
type Option func(*options)

type options struct {
	key   *seal.Key
	still bool
}

// Still says that the machine may stay paused until its snapshot is on disk, so
// that its memory need not be copied first.
func Still() Option { return func(o *options) { o.still = true } }

// Still reports whether the machine may stay paused.
func (b *Builder) Still() bool { return b.still }

// Sealed makes a new snapshot private: its state and the layers written for it
// are sealed with key. Layers that it shares with other snapshots stay unchanged.
func Sealed(key *seal.Key) Option { return func(o *options) { o.key = key } }

// WithKey also opens private snapshots that were sealed with key.
func WithKey(key *seal.Key) Option { return func(o *options) { o.key = key } }

func optionsOf(list []Option) (o options) {
	for _, set := range list {
		set(&o)
	}
	return o
}

// Private reports whether the new snapshot is sealed. Temporary data for it
// must not be on a disk either.
func (b *Builder) Private() bool { return b.key != nil }

// Continues refuses to make a snapshot that is not private from a machine whose
// parent is private; parent may be nil.
func (b *Builder) Continues(parent *Snapshot) error {
	if parent != nil && parent.manifest.Private && !b.Private() {
		return ErrPrivate
	}
	return nil
}

// stored is a layer that was added.
type stored struct {
	size   uint64
	sealed bool
}

func layerName(d layer.Digest, sealed bool) string {
	if sealed {
		return d.String() + sealedSuffix
	}
	return d.String()
}

// writeLayer copies a layer into a new file, sealed if the snapshot is private.
func (b *Builder) writeLayer(f *os.File, ref layer.Ref, src io.Reader) error {
	if !b.Private() {
		return layer.Copy(context.Background(), f, src, ref)
	}
	w, err := b.key.Writer(f)
	if err != nil {
		return err
	}
	return errors.Join(layer.Copy(context.Background(), w, src, ref), w.Close())
}

// sealState returns the state in the form that is written.
func (b *Builder) sealState(state []byte) ([]byte, error) {
	if !b.Private() {
		return state, nil
	}
	return b.key.Seal(state)
}

// readState reads the state, and unseals it if the snapshot is private.
func (s *Snapshot) readState() ([]byte, error) {
	if !s.manifest.Private {
		return s.readFile(stateName, MaxState)
	}
	if s.key == nil {
		return nil, ErrPrivate
	}
	// Sealing adds less than a tenth.
	b, err := s.readFile(stateName, MaxState+MaxState/10)
	if err != nil {
		return nil, err
	}
	if b, err = s.key.Unseal(b); err != nil {
		return nil, fmt.Errorf("%s: %w", stateName, err)
	}
	return b, nil
}

// openFile opens the file of a layer, which may be sealed.
func (s *Snapshot) openFile(ref layer.Ref) (_ *os.File, sealed bool, err error) {
	if s.manifest.Private {
		f, _, err := openRegular(s.root, path.Join(layersName, layerName(ref.Digest, true)))
		if !errors.Is(err, os.ErrNotExist) {
			return f, true, err
		}
	}
	f, info, err := openRegular(s.root, path.Join(layersName, ref.Digest.String()))
	if err != nil {
		return nil, false, fmt.Errorf("layer: %w", err)
	}
	if uint64(info.Size()) != ref.Size {
		return nil, false, errors.Join(fmt.Errorf("layer %s is damaged: it has %d bytes, the manifest says %d", ref.Digest, info.Size(), ref.Size), f.Close())
	}
	return f, false, nil
}

// ReadLayer reads a layer from its beginning, and unseals a sealed one. The
// caller must compare the content with ref (layer.Copy).
func (s *Snapshot) ReadLayer(ref layer.Ref) (io.ReadCloser, error) {
	f, sealed, err := s.openFile(ref)
	if err != nil || !sealed {
		return f, err
	}
	r, err := s.key.Reader(f)
	if err != nil {
		return nil, errors.Join(fmt.Errorf("layer %s: %w", ref.Digest, err), f.Close())
	}
	return struct {
		io.Reader
		io.Closer
	}{r, f}, nil
}

// unsealed returns a file in memory with a sealed layer's content, after
// comparing its digest.
func (s *Snapshot) unsealed(ref layer.Ref, f *os.File) (_ *os.File, err error) {
	r, err := s.key.Reader(f)
	if err != nil {
		return nil, fmt.Errorf("layer %s: %w", ref.Digest, err)
	}
	fd, err := unix.MemfdCreate("layer", unix.MFD_CLOEXEC)
	if err != nil {
		return nil, fmt.Errorf("layer %s: make memfd: %w", ref.Digest, err)
	}
	out := os.NewFile(uintptr(fd), "layer")
	if err := layer.Copy(context.Background(), out, r, ref); err != nil {
		return nil, errors.Join(fmt.Errorf("layer %s: %w", ref.Digest, err), out.Close())
	}
	// The result is like a layer's file: read-only, positioned at its
	// beginning.
	again, err := os.Open(fmt.Sprintf("/proc/self/fd/%d", fd))
	return again, errors.Join(err, out.Close())
}

// ReadManifest reads only the manifest of a snapshot. That of a private snapshot
// needs no key.
func ReadManifest(dir string) (Manifest, error) {
	root, err := os.OpenRoot(dir)
	if err != nil {
		return Manifest{}, fmt.Errorf("read manifest: %w", err)
	}
	defer root.Close()
	s := &Snapshot{root: root}
	if err := s.readManifest(); err != nil {
		return Manifest{}, fmt.Errorf("read manifest of %s: %w", dir, err)
	}
	return s.manifest, nil
}
