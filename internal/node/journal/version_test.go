package journal

import (
	"encoding/json"
	"errors"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"

	"go.etcd.io/bbolt"
)

// told is a note that knows its resource version.
type told struct {
	Text    string
	Version uint64 `json:"-"`
}

func (t *told) SetResourceVersion(version uint64) { t.Version = version }

var tolds = Collection[told]("tolds")

// version returns the resource version of a key, read in both ways; 0 if the key
// does not exist.
func version(t *testing.T, db *DB, key string) uint64 {
	t.Helper()
	var got told
	var cheap uint64
	if err := db.View(func(tx *Tx) (err error) {
		cheap, _ = tolds.Version(tx, key)
		got, _, err = tolds.Get(tx, key)
		return err
	}); err != nil {
		t.Fatal(err)
	}
	if cheap != got.Version {
		t.Errorf("%s has the version %d, and %d when it is read", key, cheap, got.Version)
	}
	return got.Version
}

// last is the last resource version that was given.
func last(t *testing.T, db *DB) (n uint64) {
	t.Helper()
	if err := db.View(func(tx *Tx) error { n = tx.Version(); return nil }); err != nil {
		t.Fatal(err)
	}
	return n
}

// TestVersions: each write has a number of its own, which only grows: over deletions,
// writes that fail, compactions and restarts.
func TestVersions(t *testing.T) {
	path := filepath.Join(t.TempDir(), "journal")
	db := openTest(t, path)
	if n := last(t, db); n != 0 {
		t.Errorf("a new journal is at %d", n)
	}
	before, id := uint64(0), db.ID()
	grows := func(what string) {
		t.Helper()
		now := last(t, db)
		if now <= before {
			t.Errorf("%s: %d comes after %d", what, now, before)
		}
		before = now
	}
	write := func(key, text string) {
		t.Helper()
		mine := told{Text: text}
		if err := db.Update(func(tx *Tx) error { return tolds.Write(tx, key, &mine) }); err != nil {
			t.Fatal(err)
		}
		if mine.Version != last(t, db) || version(t, db, key) != mine.Version {
			t.Errorf("%s was written as %d, is %d, the last is %d", key, mine.Version, version(t, db, key), last(t, db))
		}
		grows("a write of " + key)
	}
	write("a", "1")
	write("b", "1")
	first := version(t, db, "a")
	write("b", "2")
	if version(t, db, "a") != first {
		t.Error("another object's write has changed a's version")
	}
	failed := errors.New("failed")
	if err := db.Update(func(tx *Tx) error { return errors.Join(tolds.Put(tx, "a", told{Text: "no"}), failed) }); !errors.Is(err, failed) {
		t.Fatal(err)
	}
	if version(t, db, "a") != first || last(t, db) != before {
		t.Error("a write that failed is seen")
	}
	write("a", "2")
	if err := db.Update(func(tx *Tx) error { return tolds.Delete(tx, "b") }); err != nil {
		t.Fatal(err)
	}
	grows("a deletion")
	for range 2 {
		if err := db.Close(); err != nil {
			t.Fatal(err)
		}
		db = openTest(t, path)
		if now := last(t, db); now != before {
			t.Errorf("after a restart it is at %d, was at %d", now, before)
		}
		write("c", "1")
	}
	compactNow(t, db)
	if now := last(t, db); now != before {
		t.Errorf("after a compaction it is at %d, was at %d", now, before)
	}
	write("c", "2")
	if db.ID() != id || id == "" {
		t.Errorf("the journal was %q, is %q", id, db.ID())
	}
	if other := openTest(t, filepath.Join(t.TempDir(), "journal")); other.ID() == id {
		t.Error("two journals have the same id")
	}
}

// compactNow compacts the journal while it is written to.
func compactNow(t *testing.T, db *DB) {
	t.Helper()
	c := &compacting{changed: map[place]bool{}}
	db.mu.Lock()
	db.compacting = c
	db.mu.Unlock()
	_, _, err := db.compact(c)
	db.mu.Lock()
	db.compacting = nil
	db.mu.Unlock()
	if err != nil {
		t.Fatal(err)
	}
}

// TestVersionOverCompaction: the number of an object that is deleted during a
// compaction is not given again by the new file.
func TestVersionOverCompaction(t *testing.T) {
	path := filepath.Join(t.TempDir(), "journal")
	db := openTest(t, path)
	put := func() error { return db.Update(func(tx *Tx) error { return tolds.Put(tx, "a", told{Text: "1"}) }) }
	c := &compacting{changed: map[place]bool{}}
	db.mu.Lock()
	db.compacting = c
	db.mu.Unlock()
	if err := put(); err != nil {
		t.Fatal(err)
	}
	var err error
	if c.to, c.file, err = openFile(path+compactSuffix, Cost{NoSync: true}); err != nil {
		t.Fatal(err)
	}
	if err := c.copyAll(db); err != nil {
		t.Fatal(err)
	}
	if err := db.Update(func(tx *Tx) error { return tolds.Delete(tx, "a") }); err != nil {
		t.Fatal(err)
	}
	before := last(t, db)
	old, _, err := db.replace(c, path+compactSuffix)
	if err != nil {
		t.Fatal(err)
	}
	if err := old.Close(); err != nil {
		t.Fatal(err)
	}
	if now := last(t, db); now != before {
		t.Errorf("the new file is at %d, the old one was at %d", now, before)
	}
}

// TestCommits: the observer is told of each successful write once, in order, and
// before its writer is answered.
func TestCommits(t *testing.T) {
	db := openTest(t, filepath.Join(t.TempDir(), "journal"))
	var got []Commit
	db.ObserveCommits(func(c Commit) { got = append(got, c) })
	must := func(f func(*Tx) error) {
		t.Helper()
		if err := db.Update(f); err != nil {
			t.Fatal(err)
		}
	}
	must(func(tx *Tx) error {
		return errors.Join(tolds.Put(tx, "a", told{Text: "1"}), notes.Put(tx, "n", note{"1"}))
	})
	must(func(tx *Tx) error { return errors.Join(tolds.Delete(tx, "a"), tolds.Delete(tx, "never there")) })
	must(func(*Tx) error { return nil })
	_ = db.Update(func(tx *Tx) error { return errors.Join(tolds.Put(tx, "a", told{}), errors.New("failed")) })
	if len(got) != 2 || len(got[0].Changes) != 2 || len(got[1].Changes) != 1 {
		t.Fatalf("%+v", got)
	}
	a, n, gone := got[0].Changes[0], got[0].Changes[1], got[1].Changes[0]
	if a.Collection != "tolds" || a.Key != "a" || a.Object.(told).Text != "1" || a.Object.(told).Version != a.Version || a.Size == 0 {
		t.Errorf("%+v", a)
	}
	if n.Collection != "notes" || n.Version <= a.Version || got[0].Version != n.Version {
		t.Errorf("%+v after %+v", n, a)
	}
	before, err := tolds.Decode("a", gone.Before)
	if err != nil || gone.Object != nil || before.Text != "1" || gone.Version <= n.Version || got[1].Failed {
		t.Errorf("%+v, before %+v, %v", gone, before, err)
	}
	db.bolt.MaxSize = 1 << 15 // as a full disk
	if err := db.Update(func(tx *Tx) error { return tolds.Put(tx, "big", told{Text: string(make([]byte, 1<<20))}) }); err == nil {
		t.Fatal("it was written")
	}
	if len(got) != 2 {
		t.Errorf("of what is not in the file: %+v", got[2:])
	}
	db.bolt.MaxSize = 0
	must(func(tx *Tx) error { return tolds.Put(tx, "b", told{Text: "2"}) })
	if len(got) != 3 || got[2].Failed || got[2].Version != last(t, db) {
		t.Errorf("%+v", got[2:])
	}
}

// TestUnknownCommit: if the disk fails after a commit got into the file, the journal
// refuses all further writes, because callers that were told of a failure cannot know the
// content of the file.
func TestUnknownCommit(t *testing.T) {
	path := filepath.Join(t.TempDir(), "journal")
	db := openTest(t, path)
	var got []Commit
	db.ObserveCommits(func(c Commit) { got = append(got, c) })
	put := func(db *DB) error {
		return db.Update(func(tx *Tx) error { return tolds.Put(tx, "a", told{Text: "1"}) })
	}
	if err := put(db); err != nil {
		t.Fatal(err)
	}
	if err := db.failed(syscall.EIO); !errors.Is(err, syscall.EIO) || len(got) != 2 || !got[1].Failed {
		t.Errorf("%v, %+v", err, got)
	}
	if err := put(db); !errors.Is(err, syscall.EIO) || !strings.Contains(err.Error(), "started again") || len(got) != 2 {
		t.Errorf("it was written: %v, %+v", err, got)
	}
	if version(t, db, "a") == 0 {
		t.Error("it cannot be read")
	}
	if err := db.Close(); err != nil {
		t.Fatal(err)
	}
	if err := put(openTest(t, path)); err != nil {
		t.Error(err)
	}
}

// TestVersionsOfOldObjects: objects of a journal without resource versions get the first
// one, and are otherwise unchanged.
func TestVersionsOfOldObjects(t *testing.T) {
	path := filepath.Join(t.TempDir(), "journal")
	db, err := open(path, versioned-1, migrations, Cost{})
	if err != nil {
		t.Fatal(err)
	}
	if err := errors.Join(db.Update(func(tx *Tx) error {
		return errors.Join(tolds.Put(tx, "a", told{Text: "1"}), tolds.Put(tx, "b", told{Text: "2"}), notes.Put(tx, "n", note{"n"}))
	}), db.bolt.View(func(tx *bbolt.Tx) error {
		if v := tx.Bucket([]byte(tolds)).Get([]byte("a")); !json.Valid(v) {
			t.Errorf("the old schema has %q", v)
		}
		return nil
	}), db.Close()); err != nil {
		t.Fatal(err)
	}
	db = openTest(t, path)
	if a, b, now := version(t, db, "a"), version(t, db, "b"), last(t, db); a == 0 || a != b || a > now {
		t.Errorf("%d and %d at %d", a, b, now)
	}
	if got := contents(t, db); !slices.Equal(got, []string{"n=n"}) {
		t.Errorf("%q", got)
	}
	before := last(t, db)
	if err := db.Update(func(tx *Tx) error { return tolds.Put(tx, "a", told{Text: "2"}) }); err != nil {
		t.Fatal(err)
	}
	if got := version(t, db, "a"); got <= before {
		t.Errorf("%d is written after %d", got, before)
	}
}

// TestDamagedVersion: reading a value that is too short is an error.
func TestDamagedVersion(t *testing.T) {
	db := openTest(t, filepath.Join(t.TempDir(), "journal"))
	if err := db.bolt.Update(func(tx *bbolt.Tx) error {
		b, err := tx.CreateBucket([]byte(tolds))
		return errors.Join(err, b.Put([]byte("a"), []byte("{}")))
	}); err != nil {
		t.Fatal(err)
	}
	if err := db.View(func(tx *Tx) error {
		_, _, err := tolds.Get(tx, "a")
		return err
	}); err == nil {
		t.Error("a damaged value was read")
	}
	if err := db.Update(func(tx *Tx) error { return tolds.Delete(tx, "a") }); err != nil {
		t.Errorf("a damaged value is not deleted: %v", err)
	}
}

// BenchmarkUpdate measures many concurrent writers.
func BenchmarkUpdate(b *testing.B) {
	db, err := OpenAt(filepath.Join(b.TempDir(), "journal"), Cost{NoSync: true})
	if err != nil {
		b.Fatal(err)
	}
	defer func() { _ = db.Close() }()
	text := string(make([]byte, 700)) // as long as a sandbox is
	b.SetParallelism(32)
	b.RunParallel(func(pb *testing.PB) {
		for n := 0; pb.Next(); n++ {
			if err := db.Update(func(tx *Tx) error { return notes.Put(tx, string(rune('a'+n%26)), note{text}) }); err != nil {
				b.Error(err)
			}
		}
	})
}
