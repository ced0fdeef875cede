package snapshot

import (
	"crypto/rand"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"

	"agentrun.dev/internal/durable"
	"golang.org/x/sys/unix"
)

// tempPrefix begins the names of folders that are being made or deleted. The
// process that works on one holds a flock(2) on it.
const tempPrefix = ".tmp-snapshot-"

// place is the place of a snapshot: a name in an open folder, so that nothing
// depends on paths while the snapshot is made.
type place struct {
	parent *os.Root
	name   string
}

func openPlace(dir string) (place, error) {
	dir = filepath.Clean(dir)
	name := filepath.Base(dir)
	if name == "." || name == ".." || name == "/" || strings.HasPrefix(name, tempPrefix) {
		return place{}, fmt.Errorf("%q is no name for a snapshot's folder", dir)
	}
	parent, err := os.OpenRoot(filepath.Dir(dir))
	if err != nil {
		return place{}, err
	}
	return place{parent, name}, nil
}

func tempName() string { return tempPrefix + rand.Text() }

// lockTemp makes a new temporary folder and locks it. Until it is locked,
// CleanTemp may delete it as a leftover; then lockTemp makes another one.
func lockTemp(parent *os.Root) (name string, lock *os.File, err error) {
	for {
		name = tempName()
		if err := parent.Mkdir(name, 0o700); err != nil {
			return "", nil, err
		}
		lock, err = lockFolder(parent, name, 0)
		if !errors.Is(err, fs.ErrNotExist) {
			return name, lock, err
		}
	}
}

// lockFolder locks a folder. It returns fs.ErrNotExist if the folder was
// removed or renamed meanwhile.
func lockFolder(parent *os.Root, name string, flags int) (*os.File, error) {
	f, err := parent.Open(name)
	if err != nil {
		return nil, err
	}
	for {
		if err = unix.Flock(int(f.Fd()), unix.LOCK_EX|flags); !errors.Is(err, unix.EINTR) {
			break
		}
	}
	if err != nil {
		return nil, errors.Join(fmt.Errorf("lock %s: %w", name, err), f.Close())
	}
	mine, err := f.Stat()
	if err != nil {
		return nil, errors.Join(err, f.Close())
	}
	named, err := parent.Lstat(name)
	if err == nil && !os.SameFile(mine, named) {
		err = fs.ErrNotExist
	}
	if err != nil {
		return nil, errors.Join(err, f.Close())
	}
	return f, nil
}

// CleanTemp deletes the leftovers of killed processes in a folder of snapshots.
// It skips folders that are in use.
func CleanTemp(parent string) error {
	root, err := os.OpenRoot(parent)
	if err != nil {
		return fmt.Errorf("clean up snapshots: %w", err)
	}
	defer root.Close()
	entries, err := fs.ReadDir(root.FS(), ".")
	if err != nil {
		return fmt.Errorf("clean up snapshots: %w", err)
	}
	var errs []error
	for _, e := range entries {
		if !e.IsDir() || !strings.HasPrefix(e.Name(), tempPrefix) {
			continue
		}
		lock, err := lockFolder(root, e.Name(), unix.LOCK_NB)
		if errors.Is(err, unix.EWOULDBLOCK) || errors.Is(err, fs.ErrNotExist) {
			continue
		}
		if err != nil {
			errs = append(errs, fmt.Errorf("clean up snapshots: %w", err))
			continue
		}
		if err := root.RemoveAll(e.Name()); err != nil {
			errs = append(errs, fmt.Errorf("clean up snapshots: %w", err))
		}
		_ = lock.Close() // only a lock
	}
	return errors.Join(errs...)
}

// Remove deletes a snapshot's folder. It renames the folder first, so that an
// interrupted deletion never leaves a partial snapshot under its name. Layers
// that other snapshots link to stay there.
func Remove(dir string) error {
	p, err := openPlace(dir)
	if err != nil {
		return fmt.Errorf("remove snapshot: %w", err)
	}
	defer p.parent.Close()
	if err := p.remove(); err != nil {
		return fmt.Errorf("remove snapshot %s: %w", dir, err)
	}
	return nil
}

func (p place) remove() error {
	info, err := p.parent.Lstat(p.name)
	if err != nil {
		return err
	}
	if !info.IsDir() {
		return fmt.Errorf("it is not a folder (%s)", info.Mode())
	}
	if _, err := p.parent.Lstat(filepath.Join(p.name, manifestName)); err != nil {
		return fmt.Errorf("it does not look like a snapshot: %w", err)
	}
	lock, err := lockFolder(p.parent, p.name, 0)
	if err != nil {
		return err
	}
	defer lock.Close()
	away := tempName()
	if err := durable.Place(p.parent, p.name, away); err != nil {
		return err
	}
	if err := durable.SyncRoot(p.parent); err != nil {
		return err
	}
	return p.parent.RemoveAll(away)
}
