package image

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"strings"

	"agentrun.dev/internal/durable"
	"golang.org/x/sys/unix"
)

// Handle is an image in use: it is not deleted until Close, or until the
// process ends.
type Handle struct {
	Image *Image
	store *Store
	lock  *os.File
}

// Open takes an image into use.
func (s *Store) Open(ctx context.Context, d Digest) (h *Handle, err error) {
	err = s.locked(ctx, func() error {
		img, err := s.load(d)
		if err != nil {
			return err
		}
		if err := img.checkSizes(s.rootDir(d)); err != nil {
			return fmt.Errorf("image %s: %w", d.Short(), err)
		}
		lock, err := os.Open(filepath.Join(s.rootDir(d), metadataName))
		if err != nil {
			return fmt.Errorf("image %s: %w", d.Short(), err)
		}
		h = &Handle{Image: img, store: s, lock: lock}
		return tryLock(lock, unix.LOCK_SH)
	})
	if err != nil {
		return nil, err
	}
	return h, nil
}

// Root opens the root filesystem, for engine.Spec. The caller closes the file,
// which stays readable even if the image is deleted.
func (h *Handle) Root() (*os.File, error) { return h.open(rootName) }

// PlainRoot opens the root filesystem without extended attributes, for engines
// that cannot read them. Image.Capabilities lists the programs that lose
// theirs.
func (h *Handle) PlainRoot() (*os.File, error) {
	if h.Image.Plain == nil {
		return h.Root()
	}
	return h.open(plainName)
}

func (h *Handle) open(name string) (*os.File, error) {
	f, err := os.Open(filepath.Join(h.store.rootDir(h.Image.Digest), name))
	if err != nil {
		return nil, fmt.Errorf("image %s: %w", h.Image.Digest.Short(), err)
	}
	return f, nil
}

// Close ends the use.
func (h *Handle) Close() error { return h.lock.Close() }

// files returns the image's EROFS files by their names.
func (i *Image) files() map[string]File {
	files := map[string]File{rootName: i.Root}
	if i.Plain != nil {
		files[plainName] = *i.Plain
	}
	return files
}

// Size is the size of the image on disk.
func (i *Image) Size() (bytes int64) {
	for _, f := range i.files() {
		bytes += f.Size
	}
	return bytes
}

func (i *Image) checkSizes(dir string) error {
	for name, want := range i.files() {
		info, err := os.Stat(filepath.Join(dir, name))
		if err != nil {
			return fmt.Errorf("it is damaged, remove it: %w", err)
		}
		if info.Size() != want.Size {
			return fmt.Errorf("it is damaged, remove it: %s has %d bytes, not %d", name, info.Size(), want.Size)
		}
	}
	return nil
}

// Verify reads an image's files and compares their digests.
func (s *Store) Verify(ctx context.Context, d Digest) (err error) {
	h, err := s.Open(ctx, d)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, h.Close()) }()
	for name, want := range h.Image.files() {
		got, err := describeFile(filepath.Join(s.rootDir(d), name))
		if err != nil {
			return fmt.Errorf("verify image %s: %w", d.Short(), err)
		}
		if got != want {
			return fmt.Errorf("image %s is damaged, remove it: %s has digest %s, not %s", d.Short(), name, got.SHA256, want.SHA256)
		}
	}
	return nil
}

// describeFile reads a file for its size and digest.
func describeFile(path string) (File, error) {
	f, err := os.Open(path)
	if err != nil {
		return File{}, err
	}
	defer f.Close()
	h := sha256.New()
	n, err := io.Copy(h, f)
	return File{Size: n, SHA256: hex.EncodeToString(h.Sum(nil))}, err
}

// Holder is an object that uses an image across restarts: a template, a
// snapshot, a sandbox.
type Holder struct {
	Kind string `json:"kind"`
	ID   string `json:"id"`
}

var holderPattern = regexp.MustCompile(`^[a-z]{1,32}@[A-Za-z0-9][A-Za-z0-9._-]{0,127}$`)

// ParseHolder checks a holder. Both parts become a file's name.
func ParseHolder(kind, id string) (Holder, error) {
	h := Holder{Kind: kind, ID: id}
	if !holderPattern.MatchString(h.file()) {
		return Holder{}, fmt.Errorf("holder %q of kind %q: use letters, digits, dots and hyphens", id, kind)
	}
	return h, nil
}

func (h Holder) file() string   { return h.Kind + "@" + h.ID }
func (h Holder) String() string { return h.Kind + " " + h.ID }

// Hold marks an image as used by a holder until Release. A second Hold by the
// same holder has no effect.
func (s *Store) Hold(ctx context.Context, d Digest, h Holder) error {
	return s.locked(ctx, func() error {
		if _, err := s.load(d); err != nil {
			return err
		}
		dir := s.path(heldName, d.hex())
		if err := os.MkdirAll(dir, 0o700); err != nil {
			return fmt.Errorf("hold image: %w", err)
		}
		f, err := os.OpenFile(filepath.Join(dir, h.file()), os.O_CREATE|os.O_WRONLY, 0o600)
		if err != nil {
			return fmt.Errorf("hold image: %w", err)
		}
		return errors.Join(f.Close(), durable.SyncFolder(dir), durable.SyncFolder(s.path(heldName)))
	})
}

// Release takes a holder's mark away.
func (s *Store) Release(ctx context.Context, d Digest, h Holder) error {
	return s.locked(ctx, func() error {
		err := os.Remove(s.path(heldName, d.hex(), h.file()))
		if err != nil && !errors.Is(err, fs.ErrNotExist) {
			return fmt.Errorf("release image: %w", err)
		}
		_ = os.Remove(s.path(heldName, d.hex())) // unless others hold it
		return nil
	})
}

// Holders lists the holders of an image.
func (s *Store) Holders(d Digest) ([]Holder, error) {
	entries, err := os.ReadDir(s.path(heldName, d.hex()))
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return nil, fmt.Errorf("list holders: %w", err)
	}
	var out []Holder
	for _, e := range entries {
		kind, id, ok := strings.Cut(e.Name(), "@")
		if ok {
			out = append(out, Holder{Kind: kind, ID: id})
		}
	}
	return out, nil
}
