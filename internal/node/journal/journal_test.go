package journal

import (
	"errors"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"testing"
)

type note struct{ Text string }

var notes = Collection[note]("notes")

func openTest(t *testing.T, path string) *DB {
	t.Helper()
	db, err := Open(path)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = db.Close() })
	return db
}

func TestCollection(t *testing.T) {
	path := filepath.Join(t.TempDir(), "journal")
	db := openTest(t, path)
	failed := errors.New("failed")
	for _, step := range []struct {
		do   func(*Tx) error
		want error
	}{
		{func(tx *Tx) error { return notes.Put(tx, "b/1", note{"one"}) }, nil},
		{func(tx *Tx) error {
			return errors.Join(notes.Put(tx, "b/2", note{"two"}), notes.Put(tx, "c/1", note{"other"}))
		}, nil},
		{func(tx *Tx) error { return errors.Join(notes.Delete(tx, "b/1"), failed) }, failed},
		{func(tx *Tx) error { return notes.Delete(tx, "not there") }, nil},
	} {
		if err := db.Update(step.do); !errors.Is(err, step.want) {
			t.Fatalf("%v, want %v", err, step.want)
		}
	}
	if err := db.Close(); err != nil {
		t.Fatal(err)
	}
	db = openTest(t, path)
	var keys []string
	if err := db.View(func(tx *Tx) error {
		if n, found, err := notes.Get(tx, "b/1"); n.Text != "one" || !found || err != nil {
			t.Errorf("b/1 is %v, %v, %v", n, found, err)
		}
		if _, found, err := notes.Get(tx, "b/3"); found || err != nil {
			t.Errorf("b/3 is found: %v, %v", found, err)
		}
		if _, found, err := Collection[note]("empty").Get(tx, "x"); found || err != nil {
			t.Errorf("found in an empty collection: %v, %v", found, err)
		}
		for prefix, want := range map[string][2]string{"b/": {"b/1", "b/2"}, "c/": {"c/1", "c/1"}, "a/": {}, "d/": {}} {
			first, _, _, err := notes.First(tx, prefix)
			last, _, found, lastErr := notes.Last(tx, prefix)
			if got := [2]string{first, last}; got != want || found != (want[1] != "") || err != nil || lastErr != nil {
				t.Errorf("%s begins and ends with %q, want %q: %v, %v", prefix, got, want, err, lastErr)
			}
		}
		return notes.Each(tx, "b/", func(key string, n note) error {
			keys = append(keys, key+"="+n.Text)
			return nil
		})
	}); err != nil {
		t.Fatal(err)
	}
	if want := []string{"b/1=one", "b/2=two"}; !slices.Equal(keys, want) {
		t.Errorf("listed %q, want %q", keys, want)
	}
}

// TestSchema: an older journal is migrated step by step, once; a newer one is
// refused and stays as it was.
func TestSchema(t *testing.T) {
	path := filepath.Join(t.TempDir(), "journal")
	db, err := open(path, 1, nil, Cost{})
	if err != nil {
		t.Fatal(err)
	}
	_ = db.Close()
	step := func(n int) func(*Tx) error {
		return func(tx *Tx) error {
			have, _, err := notes.Get(tx, "steps")
			return errors.Join(err, notes.Put(tx, "steps", note{have.Text + strconv.Itoa(n)}))
		}
	}
	failed := errors.New("failed")
	if _, err := open(path, 3, []func(*Tx) error{step(1), func(*Tx) error { return failed }}, Cost{}); !errors.Is(err, failed) {
		t.Fatalf("a migration that fails gives %v", err)
	}
	for range 2 {
		db, err = open(path, 3, []func(*Tx) error{step(1), step(2)}, Cost{})
		if err != nil {
			t.Fatal(err)
		}
		var got note
		if err := db.View(func(tx *Tx) (err error) { got, _, err = notes.Get(tx, "steps"); return err }); err != nil {
			t.Fatal(err)
		}
		if got.Text != "12" {
			t.Errorf("migrations ran as %q, want 12", got.Text)
		}
		_ = db.Close()
	}
	if _, err := open(path, 2, []func(*Tx) error{step(1)}, Cost{}); !errors.Is(err, ErrNewer) {
		t.Errorf("a newer journal gives %v", err)
	}
	db, err = open(path, 3, []func(*Tx) error{step(1), step(2)}, Cost{})
	if err != nil {
		t.Fatal(err)
	}
	_ = db.Close()
}

// TestMigrations: each schema that there ever was is opened by this build, and no
// longer by the one that wrote it.
func TestMigrations(t *testing.T) {
	if len(migrations) != Schema-1 {
		t.Fatalf("%d migrations lead to schema %d", len(migrations), Schema)
	}
	for from := uint32(1); from < Schema; from++ {
		path := filepath.Join(t.TempDir(), "journal")
		db, err := open(path, from, migrations, Cost{})
		if err != nil {
			t.Fatal(err)
		}
		if err := errors.Join(db.Update(func(tx *Tx) error { return notes.Put(tx, "k", note{"kept"}) }), db.Close()); err != nil {
			t.Fatal(err)
		}
		if db, err = Open(path); err != nil {
			t.Fatal(err)
		}
		var got note
		if err := db.View(func(tx *Tx) (err error) { got, _, err = notes.Get(tx, "k"); return err }); err != nil || got.Text != "kept" {
			t.Errorf("schema %d: %q, %v", from, got.Text, err)
		}
		_ = db.Close()
		if _, err := open(path, from, migrations, Cost{}); !errors.Is(err, ErrNewer) {
			t.Errorf("schema %d opens it again: %v", from, err)
		}
	}
}

func TestInUse(t *testing.T) {
	path := filepath.Join(t.TempDir(), "journal")
	openTest(t, path)
	if _, err := Open(path); !errors.Is(err, ErrInUse) {
		t.Errorf("a second opener gets %v", err)
	}
}

// TestDamaged: a file that is not a journal, or only a part of one, is refused
// and does not bring the process down.
func TestDamaged(t *testing.T) {
	whole := filepath.Join(t.TempDir(), "journal")
	db := openTest(t, whole)
	if err := db.Update(func(tx *Tx) error { return notes.Put(tx, "a", note{"x"}) }); err != nil {
		t.Fatal(err)
	}
	_ = db.Close()
	b, err := os.ReadFile(whole)
	if err != nil {
		t.Fatal(err)
	}
	for name, content := range map[string][]byte{
		"garbage":   slices.Repeat([]byte("garbage "), 4096),
		"truncated": b[:5000],
		"no pages":  slices.Concat(make([]byte, 8192), b[8192:]),
	} {
		path := filepath.Join(t.TempDir(), name)
		if err := os.WriteFile(path, content, 0o600); err != nil {
			t.Fatal(err)
		}
		if db, err := Open(path); err == nil {
			_ = db.Close()
			t.Errorf("%s: opened", name)
		}
	}
}

// TestKilled: writes that a process was told are durable survive a kill in the
// middle of further writes and of compactions.
func TestKilled(t *testing.T) {
	if path := os.Getenv("JOURNAL_TO_WRITE"); path != "" {
		writeForever(path)
	}
	path := filepath.Join(t.TempDir(), "journal")
	for round := range 5 {
		cmd := exec.CommandContext(t.Context(), os.Args[0], "-test.run=^TestKilled$")
		cmd.Env = append(os.Environ(), "JOURNAL_TO_WRITE="+path)
		out, err := cmd.StdoutPipe()
		if err != nil {
			t.Fatal(err)
		}
		if err := cmd.Start(); err != nil {
			t.Fatal(err)
		}
		said := make([]byte, 16) // each byte is a number that is durable
		n, err := io.ReadAtLeast(out, said, 1+3*round)
		if err != nil {
			t.Fatal(err)
		}
		_ = cmd.Process.Kill()
		_ = cmd.Wait()
		last := -1
		db := openTest(t, path)
		if err := db.View(func(tx *Tx) error {
			a, _, err := notes.Get(tx, "a")
			b, _, err2 := notes.Get(tx, "b")
			if a != b {
				t.Errorf("half of a transaction is there: %v and %v", a, b)
			}
			last, _ = strconv.Atoi(a.Text)
			return errors.Join(err, err2)
		}); err != nil {
			t.Fatal(err)
		}
		if told := int(said[n-1]); last < told {
			t.Errorf("%d was said to be durable, %d is there", told, last)
		}
		_ = db.Close()
	}
}

func writeForever(path string) {
	db, err := Open(path)
	if err != nil {
		panic(err)
	}
	for i := 0; ; i++ {
		if i%8 == 4 {
			waste(db)
		}
		n := note{strconv.Itoa(i)}
		if err := db.Update(func(tx *Tx) error { return errors.Join(notes.Put(tx, "a", n), notes.Put(tx, "b", n)) }); err != nil {
			panic(err)
		}
		if i < 100 {
			_, _ = os.Stdout.Write([]byte{byte(i)})
		}
	}
}
