package journal

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
)

// fill takes all room that a disk has left, and returns the file that has it.
func fill(t *testing.T, dir string) (filler string) {
	t.Helper()
	filler = filepath.Join(dir, "filler")
	f, err := os.Create(filler)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = f.Close() }()
	for block := make([]byte, 64<<10); ; {
		switch _, err := f.Write(block); {
		case errors.Is(err, syscall.ENOSPC) && len(block) > 1:
			block = block[:len(block)/2]
		case errors.Is(err, syscall.ENOSPC):
			return filler
		case err != nil:
			t.Fatal(err)
		}
	}
}

// TestSetAside: on a full disk a journal can be written until half of the room is used
// that was set aside for it, says so then, and has the other half for those who delete;
// also one that is opened then. It is as before when the disk has room.
func TestSetAside(t *testing.T) {
	disk := t.TempDir()
	if err := syscall.Mount("tmpfs", disk, "tmpfs", 0, "size=16m"); err != nil {
		t.Skipf("a small disk needs a mount: %v", err)
	}
	t.Cleanup(func() { _ = syscall.Unmount(disk, syscall.MNT_DETACH) })
	path := filepath.Join(disk, "journal")
	db, err := Open(path)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = db.Close() }()
	filler := fill(t, disk)
	put := func(i int) error {
		return db.Update(func(tx *Tx) error {
			return notes.Put(tx, fmt.Sprintf("%06d", i), note{strings.Repeat("x", 16<<10)})
		})
	}
	n := 0
	for ; !db.Short(); n++ {
		if err := put(n); err != nil {
			t.Fatalf("the %d. write: %v", n, err)
		}
	}
	if n < 16 || n > 40 { // of 16 KiB each, in a half of 1 MiB
		t.Errorf("%d were written", n)
	}
	if err := db.Close(); err != nil {
		t.Fatal(err)
	}
	if db, err = Open(path); err != nil {
		t.Fatal(err)
	}
	if !db.Short() {
		t.Error("a daemon that came later has room")
	}
	// Endless changes and deletions fit, because they reuse the pages that they
	// free.
	for round := range 200 {
		if err := db.Update(func(tx *Tx) error {
			return errors.Join(notes.Delete(tx, "000001"), notes.Put(tx, "000002", note{fmt.Sprint(round)}))
		}); err != nil {
			t.Fatalf("the %d. change: %v", round, err)
		}
	}
	for i := range n {
		if err := db.Update(func(tx *Tx) error { return notes.Delete(tx, fmt.Sprintf("%06d", i)) }); err != nil {
			t.Fatalf("the %d. was not deleted: %v", i, err)
		}
	}
	if err := os.Remove(filler); err != nil {
		t.Fatal(err)
	}
	for i := range 4 * n {
		if err := put(i); err != nil || db.Short() {
			t.Fatalf("there is room again: short %v, %v", db.Short(), err)
		}
	}
}
