package snapshot

import (
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"strconv"

	"agentrun.dev/internal/durable"
	"agentrun.dev/internal/storage/layer"
	"golang.org/x/sys/unix"
)

// Builder makes a snapshot in a temporary folder beside its final place. Only
// one goroutine may use it.
type Builder struct {
	place
	temp   string   // name in place.parent; empty after the end
	lock   *os.File // of the temporary folder
	root   *os.Root // the temporary folder
	layers *os.Root
	added  map[layer.Digest]stored
	options
}

// NewBuilder starts a snapshot that Commit will place at dir. The caller must
// call Abort at the end, which does nothing after Commit.
func NewBuilder(dir string, opts ...Option) (*Builder, error) {
	p, err := openPlace(dir)
	if err != nil {
		return nil, fmt.Errorf("make snapshot: %w", err)
	}
	b := &Builder{place: p, added: map[layer.Digest]stored{}, options: optionsOf(opts)}
	if err := b.begin(); err != nil {
		return nil, errors.Join(fmt.Errorf("make snapshot %s: %w", dir, err), b.Abort())
	}
	return b, nil
}

func (b *Builder) begin() error {
	// The move at the end would refuse as well, but after all the work.
	_, err := b.parent.Lstat(b.name)
	if err == nil {
		return errors.New("something is there already: choose another name, or remove it")
	}
	if !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	if b.temp, b.lock, err = lockTemp(b.parent); err != nil {
		return err
	}
	if b.root, err = b.parent.OpenRoot(b.temp); err != nil {
		return err
	}
	if err := b.root.Mkdir(layersName, 0o700); err != nil {
		return err
	}
	b.layers, err = b.root.OpenRoot(layersName)
	return err
}

// Abort deletes the temporary folder, unless the snapshot was committed.
func (b *Builder) Abort() error {
	var err error
	if b.temp != "" {
		err = b.parent.RemoveAll(b.temp)
	}
	b.close()
	if err != nil {
		return fmt.Errorf("abort snapshot: %w", err)
	}
	return nil
}

// close closes all folders and the lock. Errors do not matter: nothing was
// written to them.
func (b *Builder) close() {
	b.temp = ""
	for _, r := range []*os.Root{b.layers, b.root, b.parent} {
		if r != nil {
			_ = r.Close()
		}
	}
	if b.lock != nil {
		_ = b.lock.Close()
	}
}

// AddLayer copies a layer from the beginning of src. It fails if the data does
// not match ref.
func (b *Builder) AddLayer(ref layer.Ref, src io.Reader) error {
	if done, err := b.has(ref); done || err != nil {
		return err
	}
	name := layerName(ref.Digest, b.Private())
	f, err := b.layers.OpenFile(name, os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o400)
	if err != nil {
		return fmt.Errorf("add layer: %w", err)
	}
	err = b.writeLayer(f, ref, src)
	if err == nil {
		err = durable.Sync(f)
	}
	if err = errors.Join(err, f.Close()); err != nil {
		return errors.Join(fmt.Errorf("add layer %s: %w", ref.Digest, err), b.layers.Remove(name))
	}
	b.added[ref.Digest] = stored{ref.Size, b.Private()}
	return nil
}

// has reports whether a layer was added before.
func (b *Builder) has(ref layer.Ref) (bool, error) {
	if b.temp == "" {
		return false, errors.New("add layer: the snapshot is committed or aborted")
	}
	have, ok := b.added[ref.Digest]
	if ok && have.size != ref.Size {
		return false, fmt.Errorf("add layer %s: it has %d bytes, not %d", ref.Digest, have.size, ref.Size)
	}
	return ok, nil
}

// LinkLayer shares a layer with another snapshot: by a hard link if possible,
// else by a copy that is verified. A sealed layer can be shared only with a
// private snapshot.
func (b *Builder) LinkLayer(ref layer.Ref, from *Snapshot) error {
	if done, err := b.has(ref); done || err != nil {
		return err
	}
	f, sealed, err := from.openFile(ref)
	if err != nil {
		return fmt.Errorf("link layer: %w", err)
	}
	defer f.Close()
	if sealed && !b.Private() {
		return fmt.Errorf("link layer %s: %w", ref.Digest, ErrPrivate)
	}
	if b.link(ref, f, sealed) {
		return b.linked(ref, f, sealed)
	}
	src, err := from.ReadLayer(ref)
	if err != nil {
		return fmt.Errorf("link layer: %w", err)
	}
	return errors.Join(b.AddLayer(ref, src), src.Close())
}

// LinkFile makes a layer of an image file, after comparing its digest. A file
// without write permissions is linked, any other is copied, because a later
// change of the file must not change the snapshot.
func (b *Builder) LinkFile(ref layer.Ref, path string) error {
	if done, err := b.has(ref); done || err != nil {
		return err
	}
	// Without O_NONBLOCK a FIFO would wait for a writer.
	f, err := os.OpenFile(path, os.O_RDONLY|unix.O_NONBLOCK, 0)
	if err != nil {
		return fmt.Errorf("link file: %w", err)
	}
	defer f.Close()
	info, err := f.Stat()
	if err != nil {
		return fmt.Errorf("link file: %w", err)
	}
	if !info.Mode().IsRegular() {
		return fmt.Errorf("link file: %s is not a regular file (%s)", path, info.Mode())
	}
	if info.Mode().Perm()&0o222 != 0 {
		return b.AddLayer(ref, f)
	}
	if err := layer.Copy(context.Background(), io.Discard, f, ref); err != nil {
		return fmt.Errorf("link file %s: %w", path, err)
	}
	if b.link(ref, f, false) {
		return b.linked(ref, f, false)
	}
	return b.AddLayer(ref, f)
}

// link links the file that was opened and checked, not its path. It fails if the
// file is on another file system, has too many links or belongs to another user.
func (b *Builder) link(ref layer.Ref, f *os.File, sealed bool) bool {
	dir, err := b.layers.Open(".")
	if err != nil {
		return false
	}
	defer dir.Close()
	from := "/proc/self/fd/" + strconv.Itoa(int(f.Fd()))
	return unix.Linkat(unix.AT_FDCWD, from, int(dir.Fd()), layerName(ref.Digest, sealed), unix.AT_SYMLINK_FOLLOW) == nil
}

// linked records a layer that was linked. It syncs the file, whose content may
// come from a plain copy.
func (b *Builder) linked(ref layer.Ref, f *os.File, sealed bool) error {
	if err := durable.Sync(f); err != nil {
		return fmt.Errorf("link layer %s: %w", ref.Digest, err)
	}
	b.added[ref.Digest] = stored{ref.Size, sealed}
	return nil
}

// Make calls fill, which makes a snapshot at dir and ends with Commit. After an
// error no files remain.
func Make(dir string, fill func(*Builder) (*Snapshot, error), opts ...Option) (*Snapshot, error) {
	b, err := NewBuilder(dir, opts...)
	if err != nil {
		return nil, err
	}
	s, err := fill(b)
	if err != nil {
		return nil, errors.Join(err, b.Abort())
	}
	return s, nil
}

// Clone makes another folder for a snapshot. It shares the files, and a clone of
// a private snapshot is private.
func (s *Snapshot) Clone(dir string) (*Snapshot, error) {
	var opts []Option
	if s.manifest.Private {
		opts = append(opts, Sealed(s.key))
	}
	return Make(dir, func(b *Builder) (*Snapshot, error) {
		for _, ref := range s.manifest.Layers() {
			if err := b.LinkLayer(ref, s); err != nil {
				return nil, err
			}
		}
		return b.Commit(s.manifest, s.state)
	}, opts...)
}
