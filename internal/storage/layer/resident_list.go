package layer

import (
	"errors"
	"fmt"
	"io/fs"
)

// Remove deletes the resident copy if it exists. Processes that have it open or
// mapped keep it.
func (r *Resident) Remove(d Digest) error {
	if err := r.root.Remove(d.String()); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return fmt.Errorf("remove resident layer: %w", err)
	}
	return nil
}

// Drop deletes resident copies by name. It ignores names that are not digests.
func (r *Resident) Drop(names []string) error {
	var errs []error
	for _, name := range names {
		if d, err := ParseDigest(name); err == nil {
			errs = append(errs, r.Remove(d))
		}
	}
	return errors.Join(errs...)
}

// Stats counts the layers and their bytes.
func (r *Resident) Stats() (files int, bytes uint64, err error) {
	err = r.each(func(_ Digest, size int64) error {
		files++
		bytes += uint64(size)
		return nil
	})
	return files, bytes, err
}

// Keep deletes the layers for which used is false.
func (r *Resident) Keep(used func(Digest) bool) (removed int, err error) {
	err = r.each(func(d Digest, _ int64) error {
		if used(d) {
			return nil
		}
		removed++
		return r.Remove(d)
	})
	return removed, err
}

// each calls do for every resident layer.
func (r *Resident) each(do func(d Digest, size int64) error) error {
	entries, err := fs.ReadDir(r.root.FS(), ".")
	if err != nil {
		return fmt.Errorf("list resident layers: %w", err)
	}
	for _, e := range entries {
		d, err := ParseDigest(e.Name())
		if err != nil {
			continue // the lock, or a file that is not ours
		}
		info, err := e.Info()
		if errors.Is(err, fs.ErrNotExist) {
			continue // removed meanwhile
		}
		if err != nil {
			return fmt.Errorf("look at resident layer %s: %w", d, err)
		}
		if err := do(d, info.Size()); err != nil {
			return err
		}
	}
	return nil
}
