package journal

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"sync"
	"testing"

	"agentrun.dev/internal/durable"
)

var wasted = Collection[note]("wasted")

// waste writes more than a journal may have free, and deletes it.
func waste(db *DB) {
	blob := note{strings.Repeat("x", compactFrom/16)}
	for _, do := range []func(tx *Tx, key string) error{
		func(tx *Tx, key string) error { return wasted.Put(tx, key, blob) }, wasted.Delete,
	} {
		if err := db.Update(func(tx *Tx) (err error) {
			for i := range 20 {
				err = errors.Join(err, do(tx, fmt.Sprint(i)))
			}
			return err
		}); err != nil {
			panic(err)
		}
	}
}

func put(t *testing.T, db *DB, key, text string) {
	t.Helper()
	if err := db.Update(func(tx *Tx) error { return notes.Put(tx, key, note{text}) }); err != nil {
		t.Fatal(err)
	}
}

func size(t *testing.T, path string) int64 {
	t.Helper()
	info, err := os.Stat(path)
	if err != nil {
		t.Fatal(err)
	}
	return info.Size()
}

// TestShrinks: a journal that was large is small again, while others read and write, and
// has all that they wrote.
func TestShrinks(t *testing.T) {
	path := filepath.Join(t.TempDir(), "journal")
	db := openTest(t, path)
	done := make(chan Compaction, 8)
	db.ObserveCompactions(func(c Compaction) { done <- c })
	stop, total := make(chan struct{}), make([]int, 4)
	var writers sync.WaitGroup
	for w := range total {
		writers.Go(func() {
			for i := 0; ; i++ {
				select {
				case <-stop:
					total[w] = i
					return
				default:
				}
				key := fmt.Sprintf("%d/%d", w, i)
				if err := db.Update(func(tx *Tx) error {
					err := notes.Put(tx, key, note{key})
					if i%3 == 2 {
						err = errors.Join(err, notes.Delete(tx, fmt.Sprintf("%d/%d", w, i-1)))
					}
					return err
				}); err != nil {
					t.Error(err)
				}
				if err := db.View(func(tx *Tx) error {
					if _, found, err := notes.Get(tx, key); !found || err != nil {
						t.Errorf("%s is not there: %v", key, err)
					}
					return nil
				}); err != nil {
					t.Error(err)
				}
			}
		})
	}
	waste(db)
	c := <-done
	close(stop)
	writers.Wait()
	if c.Err != nil || c.Before < compactFrom || c.After > compactFrom/2 {
		t.Errorf("%+v", c)
	}
	if n := size(t, path); n > compactFrom {
		t.Errorf("the file has %d bytes", n)
	}
	check := func() {
		want := 0
		for w, n := range total {
			want += n - n/3
			for i := range n {
				_ = db.View(func(tx *Tx) error {
					if _, found, err := notes.Get(tx, fmt.Sprintf("%d/%d", w, i)); err != nil || found != (i%3 != 1 || i == n-1) {
						t.Errorf("%d/%d of %d: %v, %v", w, i, n, found, err)
					}
					return nil
				})
			}
		}
		if got := len(contents(t, db)); got != want {
			t.Errorf("%d are there, want %d", got, want)
		}
	}
	check()
	if err := db.Close(); err != nil {
		t.Fatal(err)
	}
	db = openTest(t, path)
	check()
}

// TestShrinksAtStart: so is one that a daemon has left large.
func TestShrinksAtStart(t *testing.T) {
	path := filepath.Join(t.TempDir(), "journal")
	db := openTest(t, path)
	put(t, db, "kept", "1")
	db.closed = true // none is begun
	waste(db)
	if err := db.Close(); err != nil {
		t.Fatal(err)
	}
	if n := size(t, path); n < compactFrom {
		t.Fatalf("the file has %d bytes", n)
	}
	if err := os.WriteFile(path+compactSuffix, []byte("left by one that was killed"), 0o600); err != nil {
		t.Fatal(err)
	}
	db = openTest(t, path)
	db.work.Wait()
	done := make(chan Compaction, 1)
	db.ObserveCompactions(func(c Compaction) { done <- c })
	if c := <-done; c.Err != nil || size(t, path) > compactFrom/4 {
		t.Errorf("%+v, %d bytes", c, size(t, path))
	}
	if got := contents(t, db); len(got) != 1 {
		t.Errorf("%q", got)
	}
}

// prepared is a journal of which all was copied, and something changed since.
func prepared(t *testing.T) (db *DB, c *compacting, want string) {
	t.Helper()
	db = openTest(t, filepath.Join(t.TempDir(), "journal"))
	for _, key := range []string{"same", "changed", "deleted"} {
		put(t, db, key, "1")
	}
	c = &compacting{changed: map[place]bool{}}
	db.compacting = c
	var err error
	if c.to, c.file, err = openFile(db.path+compactSuffix, Cost{NoSync: true}); err != nil {
		t.Fatal(err)
	}
	if err := c.copyAll(db); err != nil {
		t.Fatal(err)
	}
	put(t, db, "changed", "2")
	put(t, db, "new", "1")
	failed := errors.New("failed")
	if err := db.Update(func(tx *Tx) error { return notes.Delete(tx, "deleted") }); err != nil {
		t.Fatal(err)
	}
	if err := db.Update(func(tx *Tx) error { return errors.Join(notes.Put(tx, "undone", note{"1"}), failed) }); !errors.Is(err, failed) {
		t.Fatal(err)
	}
	return db, c, "[changed=2 new=1 same=1]"
}

// TestCutOff: whoever is killed before or after the new file has its name finds all.
func TestCutOff(t *testing.T) {
	db, c, want := prepared(t)
	copies := map[string]string{"before": t.TempDir(), "after": t.TempDir()}
	keep := func(when string) {
		if err := os.CopyFS(copies[when], os.DirFS(filepath.Dir(db.path))); err != nil {
			t.Fatal(err)
		}
	}
	db.rename = func(from, to string) error {
		keep("before")
		err := durable.Rename(from, to)
		keep("after")
		return err
	}
	old, _, err := db.replace(c, db.path+compactSuffix)
	if err != nil {
		t.Fatal(err)
	}
	if err := old.Close(); err != nil {
		t.Fatal(err)
	}
	for when, dir := range copies {
		again := openTest(t, filepath.Join(dir, "journal"))
		if got := fmt.Sprint(contents(t, again)); got != want {
			t.Errorf("%s: %s, want %s", when, got, want)
		}
		if _, err := os.Stat(again.path + compactSuffix); err == nil {
			t.Errorf("%s: the other file is left", when)
		}
	}
	if got := fmt.Sprint(contents(t, db)); got != want {
		t.Errorf("%s, want %s", got, want)
	}
	put(t, db, "later", "1")
}

// TestRenameFails: the journal goes on in the old file. If it is unknown which of the
// two files a power cut brings back, it can only be read, until it is opened again.
func TestRenameFails(t *testing.T) {
	failed := errors.New("failed")
	db, c, _ := prepared(t)
	db.rename = func(string, string) error { return failed }
	if old, _, err := db.replace(c, db.path+compactSuffix); old != nil || !errors.Is(err, failed) {
		t.Fatal(err)
	}
	put(t, db, "later", "1")
	_ = c.to.Close()

	db, c, want := prepared(t)
	db.rename = func(from, to string) error { return errors.Join(durable.Rename(from, to), failed) }
	if old, _, err := db.replace(c, db.path+compactSuffix); old == nil || !errors.Is(err, failed) {
		t.Fatal(err)
	}
	if err := db.Update(func(tx *Tx) error { return notes.Put(tx, "later", note{"1"}) }); !errors.Is(err, failed) {
		t.Errorf("a write: %v", err)
	}
	if got := fmt.Sprint(contents(t, db)); got != want {
		t.Errorf("%s, want %s", got, want)
	}
	if err := db.Close(); err != nil {
		t.Fatal(err)
	}
	put(t, openTest(t, db.path), "later", "1")
}

// TestNobodyGetsTheOldFile: whoever waits for the journal while it is replaced does not
// get the file that it was.
func TestNobodyGetsTheOldFile(t *testing.T) {
	t.Parallel()
	db, c, _ := prepared(t)
	opened := make(chan error, 1)
	go func() {
		other, err := Open(db.path)
		if err == nil {
			err = other.Close()
		}
		opened <- err
	}()
	db.rename = func(from, to string) error {
		for descriptors(t, to) < 2 { // until the other one has opened it
			runtime.Gosched()
		}
		return durable.Rename(from, to)
	}
	old, _, err := db.replace(c, db.path+compactSuffix)
	if err != nil {
		t.Fatal(err)
	}
	if err := old.Close(); err != nil {
		t.Fatal(err)
	}
	if err := <-opened; !errors.Is(err, ErrInUse) {
		t.Errorf("another daemon: %v", err)
	}
}

// descriptors counts how often this process has a file open.
func descriptors(t *testing.T, path string) (n int) {
	t.Helper()
	links, err := filepath.Glob("/proc/self/fd/*")
	if err != nil {
		t.Fatal(err)
	}
	for _, l := range links {
		if to, _ := os.Readlink(l); to == path {
			n++
		}
	}
	return n
}
