package image

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"agentrun.dev/internal/durable"
	"golang.org/x/sys/unix"
)

// Store keeps images in a folder. Any number of processes may use it at once.
type Store struct{ dir string }

// Names of a store's files.
const (
	lockName   = "lock"
	namesName  = "names.json" // published names
	rootsName  = "roots"
	heldName   = "held"
	makingName = "making"
	workName   = "work"

	metadataName = "image.json"
	rootName     = "root.erofs"
	plainName    = "plain.erofs"
)

// ErrNotFound says that the store has no image of a name or digest.
var ErrNotFound = errors.New("no such image here")

// OpenStore opens a folder of images, and makes it if it is missing. Images
// contain set-user-id programs and devices, so only the folder's owner may
// enter it.
func OpenStore(dir string) (*Store, error) {
	for _, d := range []string{"", rootsName, heldName, makingName, workName} {
		if err := os.MkdirAll(filepath.Join(dir, d), 0o700); err != nil {
			return nil, fmt.Errorf("open the folder of images: %w", err)
		}
	}
	s := &Store{dir: dir}
	if err := s.beginRights(); err != nil {
		return nil, fmt.Errorf("open the folder of images: %w", err)
	}
	return s, nil
}

func (s *Store) path(parts ...string) string {
	return filepath.Join(append([]string{s.dir}, parts...)...)
}

func (s *Store) rootDir(d Digest) string { return s.path(rootsName, d.hex()) }

// locked calls do while names and images cannot be changed elsewhere. do must
// not take long.
func (s *Store) locked(ctx context.Context, do func() error) (err error) {
	lock, err := lockFile(ctx, s.path(lockName), unix.LOCK_EX)
	if err != nil {
		return fmt.Errorf("image store: %w", err)
	}
	defer func() { err = errors.Join(err, lock.Close()) }()
	return do()
}

// names is the content of names.json: the digest of each published name.
type names struct {
	Schema int               `json:"schema"`
	Names  map[string]Digest `json:"names"`
}

func (s *Store) readNames() (names, error) {
	n := names{Schema: 1, Names: map[string]Digest{}}
	b, err := os.ReadFile(s.path(namesName))
	if errors.Is(err, fs.ErrNotExist) {
		return n, nil
	}
	if err == nil {
		err = json.Unmarshal(b, &n)
	}
	if err == nil && n.Schema != 1 {
		err = fmt.Errorf("it has schema %d, this AgentRun knows 1", n.Schema)
	}
	for _, d := range n.Names {
		if _, bad := ParseDigest(string(d)); err == nil && bad != nil {
			err = bad
		}
	}
	if err != nil {
		return n, fmt.Errorf("read the names of images in %s: %w", s.path(namesName), err)
	}
	if n.Names == nil {
		n.Names = map[string]Digest{}
	}
	return n, nil
}

// changeNames replaces names.json. The store is locked.
func (s *Store) changeNames(change func(map[string]Digest)) error {
	n, err := s.readNames()
	if err != nil {
		return err
	}
	change(n.Names)
	b, err := json.MarshalIndent(n, "", "  ")
	if err != nil {
		return err
	}
	if err := durable.WriteFile(s.path(namesName), append(b, '\n'), 0o600); err != nil {
		return fmt.Errorf("write the names of images: %w", err)
	}
	return nil
}

// Tag gives an image of the store a published name, which another image may
// have had.
func (s *Store) Tag(ctx context.Context, name Reference, d Digest) error {
	return s.locked(ctx, func() error {
		if _, err := s.load(d); err != nil {
			return err
		}
		return s.name(d, naming{names: []Reference{name}})
	})
}

// load reads the description of an image.
func (s *Store) load(d Digest) (*Image, error) {
	path := filepath.Join(s.rootDir(d), metadataName)
	b, err := os.ReadFile(path)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, fmt.Errorf("image %s: %w", d.Short(), ErrNotFound)
	}
	if err != nil {
		return nil, fmt.Errorf("image %s: %w", d.Short(), err)
	}
	img, err := decodeImage(b, d)
	if err != nil {
		return nil, fmt.Errorf("image %s: %s is damaged: %w", d.Short(), path, err)
	}
	return img, nil
}

// Resolve finds an image of the store, for root: by a published name, in its short or
// long form, by its digest, or by the first 12 digits or more of that. By their digests
// it finds images of namespaces as well.
func (s *Store) Resolve(text string) (*Image, error) {
	n, err := s.readNames()
	if err != nil {
		return nil, err
	}
	d, err := s.resolve(n, text, anyDigest)
	if err != nil {
		return nil, err
	}
	return s.loadNamed(n, d)
}

func (s *Store) loadNamed(n names, d Digest) (*Image, error) {
	img, err := s.load(d)
	if err != nil {
		return nil, err
	}
	img.Names = nil
	for name, digest := range n.Names {
		if digest == d {
			img.Names = append(img.Names, name)
		}
	}
	slices.Sort(img.Names)
	return img, nil
}

// resolve finds an image by a published name, or by its digest if may allows that
// digest.
func (s *Store) resolve(n names, text string, may func(Digest) bool) (Digest, error) {
	ref, refErr := ParseReference(text)
	if refErr == nil {
		if d, ok := n.Names[ref.String()]; ok {
			return d, nil
		}
	}
	digits := strings.TrimPrefix(text, "sha256:")
	if len(digits) < shortDigest || strings.Trim(digits, "0123456789abcdef") != "" {
		if refErr != nil {
			return "", refErr
		}
		return "", fmt.Errorf("image %s: %w", text, ErrNotFound)
	}
	all, err := s.digests()
	if err != nil {
		return "", err
	}
	var found []Digest
	for _, d := range all {
		if strings.HasPrefix(d.hex(), digits) && may(d) {
			found = append(found, d)
		}
	}
	switch len(found) {
	case 0:
		return "", fmt.Errorf("image %s: %w", text, ErrNotFound)
	case 1:
		return found[0], nil
	}
	return "", fmt.Errorf("image %s: %d images start with that, write more digits", text, len(found))
}

// Digests returns the digests of all images in the store, sorted.
func (s *Store) Digests() ([]Digest, error) { return s.digests() }

func (s *Store) digests() ([]Digest, error) {
	entries, err := os.ReadDir(s.path(rootsName))
	if err != nil {
		return nil, fmt.Errorf("list images: %w", err)
	}
	var out []Digest
	for _, e := range entries {
		if d, err := ParseDigest("sha256:" + e.Name()); err == nil {
			out = append(out, d)
		}
	}
	return out, nil
}

// Entry is an image in a listing.
type Entry struct {
	*Image
	// Holders are the objects that use the image across restarts.
	Holders []Holder `json:"holders,omitempty"`
	// Published says that all namespaces may use it.
	Published bool `json:"published"`
	// Namespaces have names of their own for the image, and may use it.
	Namespaces map[string][]string `json:"namespaces,omitempty"`
	// Damaged describes the damage, if there is any.
	Damaged string `json:"damaged,omitempty"`
}

// List lists all images, the newest first.
func (s *Store) List() ([]Entry, error) {
	c, err := s.readCatalog()
	if err != nil {
		return nil, err
	}
	all, err := s.digests()
	if err != nil {
		return nil, err
	}
	var out []Entry
	known := c.byDigest()
	for _, d := range all {
		img, err := s.load(d)
		if errors.Is(err, ErrNotFound) {
			continue // removed meanwhile
		}
		e := Entry{Image: img}
		if err != nil {
			e = Entry{Image: &Image{Digest: d}, Damaged: err.Error()}
		} else {
			e.Names = known[d].names
		}
		e.Published, e.Namespaces = c.rights.Images[d].Published || len(known[d].names) > 0, known[d].namespaces
		if e.Holders, err = s.Holders(d); err != nil {
			return nil, err
		}
		out = append(out, e)
	}
	slices.SortStableFunc(out, func(a, b Entry) int { return b.Stored.Compare(a.Stored) })
	return out, nil
}

// work is a folder in which an image is made.
type work struct {
	dir  string
	lock *os.File
}

// newWork makes a folder to work in, and removes those of makers that are gone.
func (s *Store) newWork(ctx context.Context) (w *work, err error) {
	err = s.locked(ctx, func() error {
		if err := s.sweep(); err != nil {
			return err
		}
		// Making and locking it must be one step for sweep.
		dir, err := os.MkdirTemp(s.path(workName), "image-")
		if err != nil {
			return err
		}
		lock, err := os.Open(dir)
		if err != nil {
			return err
		}
		w = &work{dir: dir, lock: lock}
		return tryLock(lock, unix.LOCK_EX)
	})
	if err != nil {
		return nil, fmt.Errorf("make a folder to work in: %w", err)
	}
	return w, nil
}

func (w *work) close() error { return errors.Join(os.RemoveAll(w.dir), w.lock.Close()) }

// sweep removes the folders that killed makers have left. The store is locked.
func (s *Store) sweep() error {
	entries, err := os.ReadDir(s.path(workName))
	if err != nil {
		return err
	}
	for _, e := range entries {
		dir := s.path(workName, e.Name())
		f, err := os.Open(dir)
		if errors.Is(err, fs.ErrNotExist) {
			continue // its maker has just finished
		}
		if err != nil {
			return err
		}
		if tryLock(f, unix.LOCK_EX) == nil {
			err = os.RemoveAll(dir)
		}
		if err = errors.Join(err, f.Close()); err != nil {
			return fmt.Errorf("remove what a killed process has left: %w", err)
		}
	}
	return nil
}

// commit moves an image that was made in w/image to the folder roots, and names
// it. If another maker was faster, its image stays.
func (s *Store) commit(ctx context.Context, w *work, img *Image, as naming) error {
	img.Schema, img.Stored = imageSchema, time.Now().UTC().Truncate(time.Second)
	var b bytes.Buffer
	e := json.NewEncoder(&b)
	e.SetIndent("", "  ")
	if err := e.Encode(img); err != nil {
		return err
	}
	made := filepath.Join(w.dir, "image")
	if err := durable.WriteFile(filepath.Join(made, metadataName), b.Bytes(), 0o600); err != nil {
		return fmt.Errorf("store image: %w", err)
	}
	return s.locked(ctx, func() error {
		there, err := s.load(img.Digest)
		if err == nil {
			err = there.checkSizes(s.rootDir(img.Digest))
		}
		if err != nil {
			if errors.Is(err, ErrNotFound) {
				// The rights to an image that was removed by hand, and not by a Store, do
				// not apply to this one.
				if err := s.changeRights(func(r rights) { delete(r.Images, img.Digest) }); err != nil {
					return err
				}
			}
			// A damaged image is replaced.
			if err := os.RemoveAll(s.rootDir(img.Digest)); err != nil {
				return fmt.Errorf("store image: %w", err)
			}
			if err := durable.Rename(made, s.rootDir(img.Digest)); err != nil {
				return fmt.Errorf("store image: %w", err)
			}
		}
		return s.name(img.Digest, as)
	})
}

// found names an image if it is here and intact. errUnproven says that it is here,
// and that the right to it is not proven.
func (s *Store) found(ctx context.Context, d Digest, as naming) (img *Image, err error) {
	err = s.locked(ctx, func() error {
		if img, err = s.load(d); err != nil {
			return err
		}
		if err := img.checkSizes(s.rootDir(d)); err != nil {
			return err
		}
		if err := s.prove(d, as); err != nil {
			return err
		}
		if !as.proven {
			as.repository = "" // it has sent a manifest, which does not prove that it has the layers
		}
		return s.name(d, as)
	})
	return img, err
}
