package image

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"agentrun.dev/internal/durable"
	"golang.org/x/sys/unix"
)

// ErrInUse says that an image was not removed because it is in use.
var ErrInUse = errors.New("the image is in use")

// Removed says which name or image Remove has removed.
type Removed struct {
	Digest Digest
	// Untagged is the name that was removed, if any.
	Untagged string
	// Deleted says that the image is gone: it had no other name.
	Deleted bool
}

// Remove takes a published name away from an image. It deletes the image if that was its
// last name, namespaces' names included. With a digest it deletes the image with all
// names. An image in use stays unchanged: ErrInUse.
func (s *Store) Remove(ctx context.Context, text string) (r Removed, err error) {
	var trash string
	err = s.locked(ctx, func() error {
		c, err := s.readCatalog()
		if err != nil {
			return err
		}
		if r.Digest, err = s.resolve(c.names, text, anyDigest); err != nil {
			return err
		}
		var all []string
		for name, d := range c.names.Names {
			if d == r.Digest {
				all = append(all, name)
			}
		}
		others := len(c.rights.named(r.Digest)) > 0
		if ref, err := ParseReference(text); err == nil && slices.Contains(all, ref.String()) {
			r.Untagged = ref.String()
			if len(all) > 1 || others {
				return s.unname(c, r.Digest, text)
			}
		}
		if trash, err = s.discard(r.Digest); err != nil {
			return err
		}
		r.Deleted = true
		return s.changeNames(func(n map[string]Digest) {
			for _, name := range all {
				delete(n, name)
			}
		})
	})
	return r, errors.Join(err, emptyTrash(trash))
}

// discard moves an image that is not in use to the folder work. The store is
// locked. The caller may empty the trash later, without the lock.
func (s *Store) discard(d Digest) (trash string, err error) {
	if err := s.unused(d); err != nil {
		return "", err
	}
	// Before the image goes: rights to it must not apply to an image that comes later with
	// this digest.
	if err := s.changeRights(func(r rights) { r.forget(map[Digest]bool{d: true}) }); err != nil {
		return "", err
	}
	return s.move(d)
}

// unused refuses an image that is in use. The store is locked: until it is unlocked no use
// begins.
func (s *Store) unused(d Digest) error {
	holders, err := s.Holders(d)
	if err != nil {
		return err
	}
	if len(holders) > 0 {
		var by []string
		for _, h := range holders {
			by = append(by, h.String())
		}
		return fmt.Errorf("remove image %s: %w by %s", d.Short(), ErrInUse, strings.Join(by, ", "))
	}
	f, err := os.Open(filepath.Join(s.rootDir(d), metadataName))
	if err == nil {
		defer f.Close()
		if tryLock(f, unix.LOCK_EX) != nil {
			return fmt.Errorf("remove image %s: %w by a running process", d.Short(), ErrInUse)
		}
	}
	return nil
}

// move moves an image whose rights were forgotten to the folder work.
func (s *Store) move(d Digest) (trash string, err error) {
	trash, err = os.MkdirTemp(s.path(workName), "trash-")
	if err != nil {
		return "", fmt.Errorf("remove image: %w", err)
	}
	if err := durable.Rename(s.rootDir(d), filepath.Join(trash, d.hex())); err != nil {
		return "", errors.Join(fmt.Errorf("remove image %s: %w", d.Short(), err), os.Remove(trash))
	}
	return trash, nil
}

func emptyTrash(trash string) error {
	if trash == "" {
		return nil
	}
	return os.RemoveAll(trash)
}

// Pruned lists the images that Prune removed.
type Pruned struct {
	Images []Digest `json:"images"`
	// Freed is the size of their files.
	Freed int64 `json:"freed"`
}

// Prune deletes images that are not in use and have no name, not even in a namespace. It also
// removes the files left by killed processes. With all it deletes images with names, too. It
// leaves pulls and builds in progress alone.
func (s *Store) Prune(ctx context.Context, all bool) (p Pruned, err error) {
	var trash []string
	err = s.locked(ctx, func() error {
		if err := errors.Join(s.sweep(), s.sweepLocks()); err != nil {
			return err
		}
		c, err := s.readCatalog()
		if err != nil {
			return err
		}
		digests, err := s.digests()
		if err != nil {
			return err
		}
		// The rights are written once for all images, not once for each.
		known, gone := c.byDigest(), map[Digest]bool{}
		for _, d := range digests {
			_, loadErr := s.load(d)
			if loadErr == nil && (len(known[d].names) > 0 || len(known[d].namespaces) > 0) && !all {
				continue
			}
			if err := s.unused(d); errors.Is(err, ErrInUse) {
				continue
			} else if err != nil {
				return err
			}
			gone[d] = true
		}
		if len(gone) == 0 {
			return nil
		}
		// Before the images go: rights to them must not apply to images that come later with
		// these digests.
		err = errors.Join(s.changeRights(func(r rights) { r.forget(gone) }), s.changeNames(func(n map[string]Digest) {
			maps.DeleteFunc(n, func(_ string, d Digest) bool { return gone[d] })
		}))
		if err != nil {
			return err
		}
		for _, d := range digests {
			if !gone[d] {
				continue
			}
			img, loadErr := s.load(d)
			t, err := s.move(d)
			if err != nil {
				return err
			}
			trash = append(trash, t)
			p.Images = append(p.Images, d)
			if loadErr == nil {
				p.Freed += img.Size()
			}
		}
		return nil
	})
	for _, t := range trash {
		err = errors.Join(err, emptyTrash(t))
	}
	return p, err
}

// sweepLocks removes the lock files of images that are not being made. The
// store is locked. A process that waits for such a lock notices that its file
// is gone.
func (s *Store) sweepLocks() error {
	entries, err := os.ReadDir(s.path(makingName))
	if err != nil {
		return err
	}
	for _, e := range entries {
		path := s.path(makingName, e.Name())
		f, err := os.Open(path)
		if err != nil {
			continue // removed meanwhile
		}
		if tryLock(f, unix.LOCK_EX) == nil {
			err = os.Remove(path)
		}
		if err = errors.Join(err, f.Close()); err != nil {
			return err
		}
	}
	return nil
}
