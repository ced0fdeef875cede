package journal

import (
	"errors"
	"fmt"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
)

// held opens a journal whose first commit waits for release.
func held(t *testing.T) (db *DB, commits *int, release func()) {
	t.Helper()
	gate := make(chan struct{})
	commits = new(int)
	db, err := OpenAt(filepath.Join(t.TempDir(), "journal"), Cost{Before: func() {
		if *commits++; *commits == 1 {
			<-gate
		}
	}})
	if err != nil {
		t.Fatal(err)
	}
	return db, commits, sync.OnceFunc(func() { close(gate) })
}

// contents are all notes, in order.
func contents(t *testing.T, db *DB) (out []string) {
	t.Helper()
	if err := db.View(func(tx *Tx) error {
		return notes.Each(tx, "", func(key string, n note) error { out = append(out, key+"="+n.Text); return nil })
	}); err != nil {
		t.Fatal(err)
	}
	return out
}

// TestTogether: writes that come during a commit are committed together, and each is
// answered only when it is in the file.
func TestTogether(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		db, commits, release := held(t)
		defer func() { _ = db.Close() }()
		var all sync.WaitGroup
		put := func(key string) {
			all.Go(func() {
				if err := db.Update(func(tx *Tx) error { return notes.Put(tx, key, note{key}) }); err != nil {
					t.Error(err)
				}
				if err := db.View(func(tx *Tx) error {
					_, found, err := notes.Get(tx, key)
					if !found {
						t.Errorf("%s was answered before it was there", key)
					}
					return err
				}); err != nil {
					t.Error(err)
				}
			})
		}
		put("first")
		synctest.Wait()
		for i := range 3 * maxGroup / 2 {
			put(fmt.Sprint(i))
		}
		synctest.Wait()
		if n := len(contents(t, db)); n != 0 {
			t.Errorf("%d are there before the first commit", n)
		}
		release()
		all.Wait()
		if n := len(contents(t, db)); n != 3*maxGroup/2+1 {
			t.Errorf("%d are there", n)
		}
		if *commits != 3 { // the first, a full group and the rest
			t.Errorf("%d commits", *commits)
		}
	})
}

// TestEachForItself: of functions that are committed together, the writes of one that
// fails or panics are undone, and those of the others stay.
func TestEachForItself(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		db, commits, release := held(t)
		defer func() { _ = db.Close() }()
		failed := errors.New("failed")
		var all sync.WaitGroup
		do := func(want error, f func(*Tx) error) {
			all.Go(func() {
				defer func() {
					if p := recover(); p != nil && p != want {
						panic(p)
					}
				}()
				if err := db.Update(f); !errors.Is(err, want) {
					t.Errorf("%v, want %v", err, want)
				}
			})
			synctest.Wait()
		}
		do(nil, func(tx *Tx) error {
			return errors.Join(notes.Put(tx, "a", note{"old"}), notes.Put(tx, "b", note{"old"}))
		})
		change := func(tx *Tx) error {
			return errors.Join(
				notes.Put(tx, "a", note{"1"}), notes.Delete(tx, "a"), notes.Put(tx, "a", note{"2"}),
				notes.Delete(tx, "b"), notes.Put(tx, "c", note{"new"}), notes.Delete(tx, "none"),
				Collection[note]("others").Put(tx, "x", note{"x"}))
		}
		do(nil, func(tx *Tx) error { return notes.Put(tx, "before", note{"1"}) })
		do(failed, func(tx *Tx) error { return errors.Join(change(tx), failed) })
		do(nil, func(tx *Tx) error {
			a, _, err := notes.Get(tx, "a")
			_, found, err2 := Collection[note]("others").Get(tx, "x")
			if a.Text != "old" || found {
				t.Errorf("one that failed is seen: %v, %v", a, found)
			}
			return errors.Join(err, err2, notes.Put(tx, "between", note{"1"}))
		})
		do(failed, func(tx *Tx) error { _ = change(tx); panic(failed) })
		do(nil, func(tx *Tx) error { return notes.Put(tx, "last", note{"1"}) })
		release()
		all.Wait()
		if want := []string{"a=old", "b=old", "before=1", "between=1", "last=1"}; !slices.Equal(contents(t, db), want) {
			t.Errorf("%q", contents(t, db))
		}
		if *commits != 2 {
			t.Errorf("%d commits", *commits)
		}
	})
}

// TestCommitFails: no caller of a group is told that its write succeeded, and the
// next commit works.
func TestCommitFails(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		db, _, release := held(t)
		defer func() { _ = db.Close() }()
		var all sync.WaitGroup
		update := func(key string, size int, works bool) {
			all.Go(func() {
				err := db.Update(func(tx *Tx) error { return notes.Put(tx, key, note{strings.Repeat("x", size)}) })
				if (err == nil) != works {
					t.Errorf("%s: told %v", key, err)
				}
			})
			synctest.Wait()
		}
		update("first", 1, true)
		update("a", 1<<20, false)
		update("b", 1, false)
		db.bolt.MaxSize = 1 << 20 // as a full disk
		release()
		all.Wait()
		db.bolt.MaxSize = 0
		update("later", 1<<20, true)
		all.Wait()
		if got := contents(t, db); len(got) != 2 {
			t.Errorf("%d are there", len(got))
		}
	})
}

// TestCloseWhileCommitting: a journal that is closed in the middle of commits has each of them
// either whole or refused.
func TestCloseWhileCommitting(t *testing.T) {
	for range 100 {
		path := filepath.Join(t.TempDir(), "journal")
		committing := make(chan struct{}, 1000)
		db, err := OpenAt(path, Cost{NoSync: true, Before: func() { committing <- struct{}{} }})
		if err != nil {
			t.Fatal(err)
		}
		var all sync.WaitGroup
		var written atomic.Int64
		c := Collection[int]("numbers")
		for i := range 4 {
			all.Go(func() {
				for n := 0; db.Update(func(tx *Tx) error { return c.Put(tx, fmt.Sprintf("%d-%d", i, n), n) }) == nil; n++ {
					written.Add(1)
				}
			})
		}
		<-committing
		if err := db.Close(); err != nil {
			t.Error(err)
		}
		all.Wait()
		if db, err = Open(path); err != nil {
			t.Fatal(err)
		}
		var found int64
		if err := db.View(func(tx *Tx) error { return c.Each(tx, "", func(string, int) error { found++; return nil }) }); err != nil || found != written.Load() {
			t.Errorf("%d of %d are there, %v", found, written.Load(), err)
		}
		if err := db.Close(); err != nil {
			t.Error(err)
		}
	}
}
