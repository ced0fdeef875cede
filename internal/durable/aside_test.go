package durable

import (
	"errors"
	"os"
	"path/filepath"
	"testing"

	"golang.org/x/sys/unix"
)

// smallDisk mounts a file system of mib MiB.
func smallDisk(t *testing.T, mib string) string {
	t.Helper()
	dir := t.TempDir()
	if err := unix.Mount("tmpfs", dir, "tmpfs", 0, "size="+mib+"m"); err != nil {
		t.Skipf("a small disk needs a mount: %v", err)
	}
	t.Cleanup(func() { _ = unix.Unmount(dir, unix.MNT_DETACH) })
	return dir
}

// fill uses all room that is left on a disk.
func fill(t *testing.T, dir string) (filler string) {
	t.Helper()
	filler = filepath.Join(dir, "filler")
	f, err := os.Create(filler)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = f.Close() }()
	for block := make([]byte, 64<<10); ; {
		if _, err := f.Write(block); errors.Is(err, unix.ENOSPC) && len(block) > 1 {
			block = block[:len(block)/2]
		} else if errors.Is(err, unix.ENOSPC) {
			return filler
		} else if err != nil {
			t.Fatal(err)
		}
	}
}

// TestAside: the reserved room can be written although the disk is full, and no more. Once
// the disk has room again, Aside reserves more.
func TestAside(t *testing.T) {
	dir := smallDisk(t, "8")
	f, err := os.Create(filepath.Join(dir, "file"))
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = f.Close() }()
	most, err := ShareOf(f, 8, 64<<20)
	if err != nil || most != 1<<20 {
		t.Fatalf("an eighth of 8 MiB is %d: %v", most, err)
	}
	a, end := Aside{Most: most}, int64(0)
	step := func(wantShort bool) {
		t.Helper()
		if short, err := a.Keep(f, end); err != nil || short != wantShort {
			t.Fatalf("with %d bytes written: short %v, %v", end, short, err)
		}
	}
	write := func(n int) (err error) {
		n, err = f.Write(make([]byte, n))
		end += int64(n)
		return err
	}
	step(false)
	if info, err := f.Stat(); err != nil || info.Size() != 0 {
		t.Fatalf("the file has grown: %v, %v", info.Size(), err)
	}
	filler := fill(t, dir)
	step(false)
	for i := range 4 {
		if err := write(256 << 10); err != nil {
			t.Fatalf("there was room aside: %v", err)
		}
		a = Aside{Most: most} // as in a process that starts later
		step(i >= 2)
	}
	if err := write(1); !errors.Is(err, unix.ENOSPC) {
		t.Fatalf("beyond what was set aside: %v", err)
	}
	if err := os.Remove(filler); err != nil {
		t.Fatal(err)
	}
	step(false)
	fill(t, dir)
	if err := write(1 << 20); err != nil {
		t.Fatal(err)
	}
}
