// Package programs keeps programs in a folder, by their digests, for as long as their
// output is needed. Only the build that has written a checkpoint of gVisor's can read
// it, and AgentRun may have been updated since.
//
//	NAME-DIGEST   a program, with the SHA-256 of its content
//
// Several processes may use one folder. A process that runs a program holds a shared
// lock on its file. A process that deletes a program holds an exclusive lock while it
// finds out that nothing needs the program.
package programs

import (
	"crypto/sha256"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"time"

	"agentrun.dev/internal/durable"
	"agentrun.dev/internal/storage/layer"
	"golang.org/x/sys/unix"
)

// ErrNotKept says that a program is not in the folder.
var ErrNotKept = errors.New("the program is not kept")

// ErrDamaged says that the content of a kept file does not match the digest in its
// name.
var ErrDamaged = errors.New("the kept program is damaged")

const (
	// maxSize bounds the size of a program. Larger files are not read.
	maxSize = 1 << 30
	// mode lets any user execute a program, because some programs run as users
	// without a name.
	mode = 0o555
	// abandoned is the age of a half-written file from which its writer counts as
	// gone.
	abandoned = time.Hour
)

// Store is an open folder. Its methods are safe for concurrent use.
type Store struct {
	dir, name string

	keeping sync.Mutex // held while a program is stored

	mu   sync.Mutex // protects all following fields, and the users of each Program
	open map[layer.Digest]*Program
}

// Open opens a folder for builds of one program, and makes the folder if it is
// missing.
func Open(dir, name string) (*Store, error) {
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return nil, fmt.Errorf("open the folder of kept programs: %w", err)
	}
	return &Store{dir: dir, name: name, open: map[layer.Digest]*Program{}}, nil
}

// Program is a program in use. It is not deleted before Release.
type Program struct {
	Digest layer.Digest
	Path   string

	store *Store   // nil for a program outside of any store
	file  *os.File // holds the lock
	users int
}

// Outside returns a program that is in no store and is not kept.
func Outside(path string) (*Program, error) {
	f, err := os.Open(path)
	if err != nil {
		return nil, err
	}
	defer func() { _ = f.Close() }() // only read
	d, err := digestOf(f)
	if err != nil {
		return nil, err
	}
	return &Program{Digest: d, Path: path}, nil
}

// Again returns the program with one more use, which is released separately.
func (p *Program) Again() *Program {
	if p != nil && p.store != nil {
		p.store.mu.Lock()
		defer p.store.mu.Unlock()
		p.users++
	}
	return p
}

// Release ends one use of the program. A nil Program is allowed.
func (p *Program) Release() {
	if p == nil || p.store == nil {
		return
	}
	p.store.mu.Lock()
	defer p.store.mu.Unlock()
	if p.users--; p.users == 0 {
		delete(p.store.open, p.Digest)
		_ = p.file.Close() // only read; closing it frees the lock
	}
}

// path is the path of a program. The file name begins with the store's name, which
// therefore appears as the name of its processes.
func (s *Store) path(d layer.Digest) string {
	return filepath.Join(s.dir, s.name+"-"+d.String())
}

// Has reports whether a program is kept. Use verifies the content later.
func (s *Store) Has(d layer.Digest) bool {
	_, err := os.Lstat(s.path(d))
	return err == nil
}

// Use finds a program and verifies its content. Other calls do not wait for the
// verification.
func (s *Store) Use(d layer.Digest) (*Program, error) {
	if p := s.again(d); p != nil {
		return p, nil
	}
	p, err := s.verify(d)
	if err != nil {
		return nil, err
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if first := s.open[d]; first != nil {
		first.users++
		_ = p.file.Close() // only read
		return first, nil
	}
	s.open[d] = p
	return p, nil
}

// again adds a use to a program that is already in use. It returns nil if the program
// is not in use.
func (s *Store) again(d layer.Digest) *Program {
	s.mu.Lock()
	defer s.mu.Unlock()
	p := s.open[d]
	if p != nil {
		p.users++
	}
	return p
}

// verify locks a program and verifies its content.
func (s *Store) verify(d layer.Digest) (_ *Program, err error) {
	f, err := os.OpenFile(s.path(d), os.O_RDONLY|unix.O_NOFOLLOW, 0)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, fmt.Errorf("%w: %s", ErrNotKept, s.path(d))
	}
	if err != nil {
		return nil, fmt.Errorf("use a kept program: %w", err)
	}
	defer func() {
		if err != nil {
			_ = f.Close() // only read
		}
	}()
	if err := lock(f, unix.LOCK_SH); err != nil {
		return nil, fmt.Errorf("use %s: %w", f.Name(), err)
	}
	if !linked(f) { // it was deleted while we waited for the lock
		return nil, fmt.Errorf("%w: %s", ErrNotKept, f.Name())
	}
	got, err := digestOf(f)
	if err != nil {
		return nil, fmt.Errorf("use a kept program: %w", err)
	}
	if got != d {
		return nil, fmt.Errorf("%w: the content of %s has the digest %s. Put the program of that AgentRun there, or remove the file and what was made with it", ErrDamaged, f.Name(), got)
	}
	return &Program{Digest: d, Path: f.Name(), store: s, file: f, users: 1}, nil
}

// Keep copies a program into the folder, unless it is there already, and uses it.
func (s *Store) Keep(path string) (*Program, error) {
	f, err := os.Open(path)
	if err != nil {
		return nil, fmt.Errorf("keep a program: %w", err)
	}
	defer func() { _ = f.Close() }() // only read
	d, err := digestOf(f)
	if err != nil {
		return nil, fmt.Errorf("keep a program: %w", err)
	}
	return s.keep(d, f)
}

// KeepAs is Keep for a file that must have the digest d. The file is not trusted: it
// may be the program of a process that another process has started.
func (s *Store) KeepAs(d layer.Digest, path string) (*Program, error) {
	if p, err := s.Use(d); !errors.Is(err, ErrNotKept) {
		return p, err
	}
	f, err := os.Open(path)
	if err != nil {
		return nil, fmt.Errorf("keep a program: %w", err)
	}
	defer func() { _ = f.Close() }() // only read
	if got, err := digestOf(f); err != nil || got != d {
		return nil, errors.Join(err, fmt.Errorf("keep a program: %s is not the one with the digest %s", path, d))
	}
	return s.keep(d, f)
}

// keep stores the content of a file with the digest d, and uses it.
func (s *Store) keep(d layer.Digest, f *os.File) (*Program, error) {
	s.keeping.Lock()
	defer s.keeping.Unlock()
	for {
		p, err := s.Use(d)
		switch {
		case errors.Is(err, ErrNotKept):
			err = durable.Create(s.path(d), mode, func(to *os.File) error { return copyTo(to, f, d) })
		case errors.Is(err, ErrDamaged): // f is a good copy
			err = durable.Replace(s.path(d), mode, func(to *os.File) error { return copyTo(to, f, d) })
		default:
			return p, err
		}
		if err != nil && !errors.Is(err, fs.ErrExist) { // another process was faster
			return nil, fmt.Errorf("keep the program %s: %w", f.Name(), err)
		}
	}
}

// copyTo copies a file and verifies that its content still has the digest.
func copyTo(to, from *os.File, d layer.Digest) error {
	h := sha256.New()
	if _, err := io.Copy(io.MultiWriter(to, h), wholeOf(from)); err != nil {
		return err
	}
	if layer.Digest(h.Sum(nil)) != d {
		return fmt.Errorf("%s has changed while it was copied", from.Name())
	}
	return nil
}

// Collect deletes the programs that are not in use and that needed does not name.
// Collect calls needed while no process can begin to use any program that may be
// deleted.
func (s *Store) Collect(needed func() (map[layer.Digest]bool, error)) (err error) {
	entries, err := os.ReadDir(s.dir)
	if err != nil {
		return fmt.Errorf("collect kept programs: %w", err)
	}
	idle := map[layer.Digest]*os.File{} // idle programs, each locked
	defer func() {
		for _, f := range idle {
			_ = f.Close() // only read; closing it frees the lock
		}
	}()
	for _, e := range entries {
		path := filepath.Join(s.dir, e.Name())
		digest, _ := strings.CutPrefix(e.Name(), s.name+"-")
		d, parseErr := layer.ParseDigest(digest)
		if parseErr != nil {
			err = errors.Join(err, removeAbandoned(e, path))
			continue
		}
		f, openErr := os.OpenFile(path, os.O_RDONLY|unix.O_NOFOLLOW, 0)
		if openErr != nil {
			if !errors.Is(openErr, fs.ErrNotExist) { // another process is collecting, too
				err = errors.Join(err, openErr)
			}
			continue
		}
		if lock(f, unix.LOCK_EX|unix.LOCK_NB) != nil {
			_ = f.Close() // it is in use
			continue
		}
		idle[d] = f
	}
	if len(idle) == 0 {
		return err
	}
	keep, neededErr := needed()
	if neededErr != nil {
		return errors.Join(err, neededErr)
	}
	for d, f := range idle {
		if !keep[d] && linked(f) {
			err = errors.Join(err, os.Remove(f.Name()))
		}
	}
	if err != nil {
		return fmt.Errorf("collect kept programs: %w", err)
	}
	return nil
}

// removeAbandoned removes a file whose writer was killed while it wrote.
func removeAbandoned(e fs.DirEntry, path string) error {
	if !strings.HasPrefix(e.Name(), durable.TempPrefix) {
		return nil // not a file of this package
	}
	info, err := e.Info()
	switch {
	case errors.Is(err, fs.ErrNotExist):
		return nil
	case err != nil:
		return err
	case time.Since(info.ModTime()) < abandoned:
		return nil // it may still be written
	}
	if err := os.Remove(path); !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	return nil
}

// linked reports whether a file still has its name.
func linked(f *os.File) bool {
	have, err := f.Stat()
	if err != nil {
		return false
	}
	named, err := os.Lstat(f.Name())
	return err == nil && os.SameFile(have, named)
}

// lock takes a lock. It waits for the lock unless how has LOCK_NB.
func lock(f *os.File, how int) error {
	for {
		if err := unix.Flock(int(f.Fd()), how); !errors.Is(err, unix.EINTR) {
			return err
		}
	}
}

func digestOf(f *os.File) (layer.Digest, error) {
	info, err := f.Stat()
	if err != nil {
		return layer.Digest{}, err
	}
	if !info.Mode().IsRegular() || info.Size() > maxSize {
		return layer.Digest{}, fmt.Errorf("%s is no program: it is %s with %d bytes", f.Name(), info.Mode().Type(), info.Size())
	}
	h := sha256.New()
	if _, err := io.Copy(h, wholeOf(f)); err != nil {
		return layer.Digest{}, fmt.Errorf("hash %s: %w", f.Name(), err)
	}
	return layer.Digest(h.Sum(nil)), nil
}

// wholeOf reads a file from its beginning, and leaves the file's offset alone.
func wholeOf(f *os.File) io.Reader { return io.NewSectionReader(f, 0, maxSize) }
