package snapshot

import (
	"os"
	"path/filepath"
	"testing"
)

// TestUsage: a file that two folders link to counts as stored in both, as
// unshared in neither, and once in the total.
func TestUsage(t *testing.T) {
	dir := t.TempDir()
	write := func(folder, name string, bytes int) {
		t.Helper()
		if err := os.MkdirAll(filepath.Join(dir, folder), 0o700); err != nil {
			t.Fatal(err)
		}
		content := make([]byte, bytes)
		for i := range content {
			content[i] = byte(i) | 1 // no holes
		}
		if err := os.WriteFile(filepath.Join(dir, folder, name), content, 0o600); err != nil {
			t.Fatal(err)
		}
	}
	write("a", "shared", 1<<20)
	write("a", "own", 64<<10)
	write("b", "own", 128<<10)
	for _, to := range []string{"b/shared", "b/again"} {
		if err := os.Link(filepath.Join(dir, "a/shared"), filepath.Join(dir, to)); err != nil {
			t.Fatal(err)
		}
	}
	var u Usage
	a, errA := u.Add(filepath.Join(dir, "a"))
	b, errB := u.Add(filepath.Join(dir, "b"))
	if errA != nil || errB != nil {
		t.Fatal(errA, errB)
	}
	if a.Unshared < 64<<10 || b.Unshared < 128<<10 || a.Stored-a.Unshared < 1<<20 || b.Stored-b.Unshared != a.Stored-a.Unshared {
		t.Errorf("a %+v, b %+v", a, b)
	}
	if want := a.Unshared + b.Stored; u.Bytes != want {
		t.Errorf("together %d bytes, not %d", u.Bytes, want)
	}
	// A folder that is added anew counts once, and one that is removed no more.
	if again, err := u.Add(filepath.Join(dir, "b")); err != nil || again != b || u.Bytes != a.Unshared+b.Stored {
		t.Errorf("added again %+v, together %d bytes, %v", again, u.Bytes, err)
	}
	u.Remove(filepath.Join(dir, "b"))
	if u.Bytes != a.Stored {
		t.Errorf("without b %d bytes, not %d", u.Bytes, a.Stored)
	}
	u.Remove(filepath.Join(dir, "b"))
	u.Remove(filepath.Join(dir, "a"))
	if u.Bytes != 0 || len(u.seen) != 0 || len(u.folders) != 0 {
		t.Errorf("without any %d bytes, %d files", u.Bytes, len(u.seen))
	}
	if err := os.RemoveAll(filepath.Join(dir, "b")); err != nil {
		t.Fatal(err)
	}
	if alone, err := new(Usage).Add(filepath.Join(dir, "a")); err != nil || alone.Unshared != a.Stored {
		t.Errorf("alone %+v, %v", alone, err)
	}
	if gone, err := u.Add(filepath.Join(dir, "b")); err != nil || gone != (Size{}) {
		t.Errorf("what is gone has %+v, %v", gone, err)
	}
}
