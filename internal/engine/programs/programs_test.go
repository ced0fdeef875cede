package programs

import (
	"crypto/sha256"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"agentrun.dev/internal/durable"
	"agentrun.dev/internal/storage/layer"
)

// program writes a script that prints says, in place of an installed program.
func program(t *testing.T, says string) (path string, d layer.Digest) {
	t.Helper()
	path = filepath.Join(t.TempDir(), "helper")
	text := "#!/bin/sh\necho " + says + "\n"
	if err := os.WriteFile(path, []byte(text), 0o700); err != nil {
		t.Fatal(err)
	}
	return path, sha256.Sum256([]byte(text))
}

func open(t *testing.T, dir string) *Store {
	t.Helper()
	s, err := Open(dir, "helper")
	if err != nil {
		t.Fatal(err)
	}
	return s
}

// names lists the folder.
func names(t *testing.T, s *Store) (list []string) {
	t.Helper()
	entries, err := os.ReadDir(s.dir)
	if err != nil {
		t.Fatal(err)
	}
	for _, e := range entries {
		list = append(list, e.Name())
	}
	return list
}

// needs returns a set for Collect.
func needs(list ...layer.Digest) func() (map[layer.Digest]bool, error) {
	return func() (map[layer.Digest]bool, error) {
		set := map[layer.Digest]bool{}
		for _, d := range list {
			set[d] = true
		}
		return set, nil
	}
}

// TestKeep: a kept program runs although another one is installed now, for any user,
// and under its own name.
func TestKeep(t *testing.T) {
	path, d := program(t, "old")
	s := open(t, filepath.Join(t.TempDir(), "helpers"))
	for range 2 {
		p, err := s.Keep(path)
		if err != nil || p.Digest != d {
			t.Fatalf("%+v, %v", p, err)
		}
		defer p.Release()
	}
	if err := os.WriteFile(path, []byte("another one"), 0o700); err != nil {
		t.Fatal(err)
	}
	p, err := s.Use(d)
	if err != nil {
		t.Fatal(err)
	}
	defer p.Release()
	if out, err := exec.Command(p.Path).CombinedOutput(); err != nil || string(out) != "old\n" {
		t.Errorf("%q, %v", out, err)
	}
	if info, err := os.Stat(p.Path); err != nil || info.Mode() != 0o555 || !strings.HasPrefix(info.Name(), "helper-") {
		t.Errorf("%v, %v", info, err)
	}
	if s.Has(layer.Digest{1}) || !s.Has(d) {
		t.Error("it has what it has not")
	}
	if _, err := s.Use(layer.Digest{1}); !errors.Is(err, ErrNotKept) {
		t.Error(err)
	}
	if len(names(t, s)) != 1 {
		t.Error(names(t, s))
	}
}

// TestDamaged: a file whose content does not match its name is not used. Keeping the
// program again repairs the file.
func TestDamaged(t *testing.T) {
	path, d := program(t, "old")
	dir := t.TempDir()
	p, err := open(t, dir).Keep(path)
	if err != nil {
		t.Fatal(err)
	}
	for what, damage := range map[string]func() error{
		"another content": func() error { return os.WriteFile(p.Path, []byte("#!/bin/sh\necho bad\n"), 0o555) },
		"nothing":         func() error { return os.WriteFile(p.Path, nil, 0o555) },
	} {
		if err := errors.Join(os.Remove(p.Path), damage()); err != nil {
			t.Fatal(err)
		}
		s := open(t, dir)
		if _, err := s.Use(d); !errors.Is(err, ErrDamaged) || !strings.Contains(err.Error(), p.Path) {
			t.Errorf("%s: %v", what, err)
		}
		again, err := s.Keep(path)
		if err != nil {
			t.Fatalf("%s: %v", what, err)
		}
		if b, err := os.ReadFile(again.Path); err != nil || sha256.Sum256(b) != d {
			t.Errorf("%s is not mended: %q, %v", what, b, err)
		}
	}
	for what, make := range map[string]func() error{
		"a link":   func() error { return os.Symlink(path, p.Path) },
		"a folder": func() error { return os.Mkdir(p.Path, 0o700) },
	} {
		if err := errors.Join(os.Remove(p.Path), make()); err != nil {
			t.Fatal(err)
		}
		if _, err := open(t, dir).Use(d); err == nil {
			t.Errorf("%s is used", what)
		}
	}
}

// TestKeepAs: a file is kept under a digest only if it has that digest.
func TestKeepAs(t *testing.T) {
	path, d := program(t, "old")
	s := open(t, t.TempDir())
	if p, err := s.KeepAs(layer.Digest{1}, path); err == nil {
		t.Errorf("%+v", p)
	}
	for _, from := range []string{"/dev/zero", t.TempDir(), filepath.Join(t.TempDir(), "nothing")} {
		if _, err := s.KeepAs(d, from); err == nil {
			t.Errorf("%s is taken for a program", from)
		}
	}
	if len(names(t, s)) != 0 {
		t.Error(names(t, s))
	}
	p, err := s.KeepAs(d, path)
	if err != nil || p.Digest != d {
		t.Fatal(err)
	}
	if _, err := s.KeepAs(d, "/nothing"); err != nil { // the program is kept already
		t.Error(err)
	}
}

// TestCollect: programs that are needed or in use stay, whoever uses them. All other
// programs are deleted, with the remains of writers that were killed.
func TestCollect(t *testing.T) {
	s := open(t, t.TempDir())
	needed, _ := program(t, "needed")
	ours, _ := program(t, "ours")
	theirs, _ := program(t, "theirs")
	nobodys, _ := program(t, "nobodys")
	var kept []*Program
	for _, path := range []string{needed, ours, theirs, nobodys} {
		p, err := s.Keep(path)
		if err != nil {
			t.Fatal(err)
		}
		kept = append(kept, p)
	}
	other := open(t, s.dir) // as in another process
	theirUse, err := other.Use(kept[2].Digest)
	if err != nil {
		t.Fatal(err)
	}
	again := kept[1].Again()
	for _, p := range kept {
		p.Release()
	}
	left, fresh := filepath.Join(s.dir, durable.TempPrefix+"1"), filepath.Join(s.dir, durable.TempPrefix+"2")
	long := time.Now().Add(-2 * abandoned)
	if err := errors.Join(os.WriteFile(left, nil, 0o600), os.Chtimes(left, long, long), os.WriteFile(fresh, nil, 0o600)); err != nil {
		t.Fatal(err)
	}
	if err := s.Collect(func() (map[layer.Digest]bool, error) { return nil, fs.ErrInvalid }); !errors.Is(err, fs.ErrInvalid) || len(names(t, s)) != 5 {
		t.Errorf("where nobody knows what is needed: %v, %v", names(t, s), err)
	}
	if err := s.Collect(needs(kept[0].Digest)); err != nil {
		t.Fatal(err)
	}
	for i, want := range []bool{true, true, true, false} {
		if s.Has(kept[i].Digest) != want {
			t.Errorf("program %d is kept: %v", i, !want)
		}
	}
	if _, err := os.Stat(fresh); err != nil {
		t.Error(err)
	}
	again.Release()
	theirUse.Release()
	if err := s.Collect(needs()); err != nil || len(names(t, s)) != 1 {
		t.Errorf("in the end there are %v, %v", names(t, s), err)
	}
	if _, err := s.Use(kept[0].Digest); !errors.Is(err, ErrNotKept) {
		t.Error(err)
	}
}

// TestCollectAndUse: a process that begins to use a program while another finds out
// whether it is needed waits for that.
func TestCollectAndUse(t *testing.T) {
	for _, stays := range []bool{true, false} {
		s := open(t, t.TempDir())
		path, d := program(t, "old")
		p, err := s.Keep(path)
		if err != nil {
			t.Fatal(err)
		}
		p.Release()
		used := make(chan error, 1)
		err = s.Collect(func() (map[layer.Digest]bool, error) {
			go func() {
				p, err := s.Use(d)
				p.Release()
				used <- err
			}()
			for !waitedFor(t, p.Path) {
				select {
				case err := <-used:
					t.Errorf("it was used meanwhile: %v", err)
					used <- err
					return nil, nil
				case <-time.After(time.Millisecond): // the kernel has no event for waiters of a lock
				}
			}
			return map[layer.Digest]bool{d: stays}, nil
		})
		if err != nil {
			t.Fatal(err)
		}
		if err := <-used; stays && err != nil || !stays && !errors.Is(err, ErrNotKept) {
			t.Errorf("it stays: %v, and using it gives %v", stays, err)
		}
	}
}

// TestUseWaitsForNobodyElse: while one program is locked or being verified, other
// programs can be used.
func TestUseWaitsForNobodyElse(t *testing.T) {
	dir := t.TempDir()
	s := open(t, dir)
	slow, slowDigest := program(t, "slow")
	quick, quickDigest := program(t, "quick")
	for _, path := range []string{slow, quick} {
		p, err := s.Keep(path)
		if err != nil {
			t.Fatal(err)
		}
		p.Release()
	}
	path := s.path(slowDigest)
	held, err := os.Open(path)
	if err != nil {
		t.Fatal(err)
	}
	if err := lock(held, syscall.LOCK_EX); err != nil {
		t.Fatal(err)
	}
	used := make(chan error, 1)
	go func() {
		p, err := s.Use(slowDigest)
		p.Release()
		used <- err
	}()
	for !waitedFor(t, path) {
		time.Sleep(time.Millisecond) // the kernel has no event for waiters of a lock
	}
	others := make(chan error, 1)
	go func() {
		p, err := s.Use(quickDigest)
		p.Again().Release()
		p.Release()
		others <- err
	}()
	select {
	case err := <-others:
		if err != nil {
			t.Error(err)
		}
	case <-time.After(time.Minute):
		t.Error("another program was not used meanwhile")
	}
	if err := held.Close(); err != nil {
		t.Fatal(err)
	}
	if err := <-used; err != nil {
		t.Error(err)
	}
}

// waitedFor reports whether a process waits for the lock of a file.
func waitedFor(t *testing.T, path string) bool {
	t.Helper()
	info, err := os.Stat(path)
	if err != nil {
		t.Fatal(err)
	}
	locks, err := os.ReadFile("/proc/locks")
	if err != nil {
		t.Fatal(err)
	}
	inode := fmt.Sprintf(":%d ", info.Sys().(*syscall.Stat_t).Ino)
	for line := range strings.Lines(string(locks)) {
		if strings.Contains(line, "->") && strings.Contains(line, inode) {
			return true
		}
	}
	return false
}

// TestTogether: several processes keep, use and collect programs at once.
func TestTogether(t *testing.T) {
	dir := t.TempDir()
	var paths []string
	for i := range 3 {
		path, _ := program(t, fmt.Sprint("program-", i))
		paths = append(paths, path)
	}
	var all sync.WaitGroup
	for worker := range 6 {
		s := open(t, dir)
		all.Go(func() {
			for i := range 30 {
				p, err := s.Keep(paths[(worker+i)%len(paths)])
				if err != nil {
					t.Error(err)
					return
				}
				if err := s.Collect(needs()); err != nil {
					t.Error(err)
				}
				if out, err := exec.Command("/bin/sh", p.Path).Output(); err != nil || !strings.HasPrefix(string(out), "program-") {
					t.Errorf("%q, %v", out, err)
				}
				p.Release()
			}
		})
	}
	all.Wait()
	if err := open(t, dir).Collect(needs()); err != nil || len(names(t, open(t, dir))) != 0 {
		t.Errorf("in the end there are %v, %v", names(t, open(t, dir)), err)
	}
}
