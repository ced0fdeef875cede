package audit

import (
	"errors"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"
)

// smallDisk mounts a file system of 8 MiB, of which the log has a quarter of a MiB set aside.
func smallDisk(t *testing.T) string {
	t.Helper()
	dir := t.TempDir()
	if err := syscall.Mount("tmpfs", dir, "tmpfs", 0, "size=8m"); err != nil {
		t.Skipf("a small disk needs a mount: %v", err)
	}
	t.Cleanup(func() { _ = syscall.Unmount(dir, syscall.MNT_DETACH) })
	return dir
}

// fill takes all free room of a disk, and returns the file that takes it.
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

// TestSetAside: on a full disk the log has room for all events, then for those of
// administrators alone, and then for no event. The same holds for a log that is opened
// then. When the disk has room again, all events are written.
func TestSetAside(t *testing.T) {
	disk := smallDisk(t)
	cfg := Config{Dir: filepath.Join(disk, "audit")}
	l := open(t, cfg)
	filler := fill(t, disk)
	write := func(essential bool) error {
		return l.Write(Event{Stage: End, Request: strings.Repeat("x", 1000), Remote: "unix", Essential: essential})
	}
	until := func(essential bool, want error) (n int) {
		t.Helper()
		for ; ; n++ {
			if err := write(essential); err != nil {
				if !errors.Is(err, want) {
					t.Fatal(err)
				}
				return n
			}
		}
	}
	if n := until(false, ErrFull); n < 100 || n > 140 {
		t.Errorf("tenants have written %d KiB", n)
	}
	if err := l.Close(); err != nil {
		t.Fatal(err)
	}
	l = open(t, cfg)
	if err := write(false); !errors.Is(err, ErrFull) {
		t.Errorf("a daemon that came later: %v", err)
	}
	if n := until(true, syscall.ENOSPC); n < 100 || n > 140 {
		t.Errorf("administrators have written %d KiB", n)
	}
	if err := os.Remove(filler); err != nil {
		t.Fatal(err)
	}
	if err := errors.Join(write(false), write(true)); err != nil {
		t.Errorf("there is room again: %v", err)
	}
	lines := requests(t, filepath.Join(cfg.Dir, fileName))
	torn := slices.DeleteFunc(lines, func(s string) bool { return len(s) == 1000 })
	if len(torn) > 1 { // the last line on a disk that was full
		t.Errorf("%d events are broken", len(torn))
	}
}

// TestRotationNeedsRoom: a full log goes on in its file while the disk is full, and in the
// next one once there is room. The room that was set aside and not used is given back.
func TestRotationNeedsRoom(t *testing.T) {
	disk := smallDisk(t)
	cfg := Config{Dir: filepath.Join(disk, "audit"), MaxBytes: 16 << 10}
	l := open(t, cfg)
	filler := fill(t, disk)
	write := func(n int) {
		t.Helper()
		for range n {
			if err := l.Write(Event{Stage: End, Request: strings.Repeat("x", 1000), Remote: "unix"}); err != nil {
				t.Fatal(err)
			}
		}
	}
	files := func(want ...string) {
		t.Helper()
		var got []string
		entries, err := os.ReadDir(cfg.Dir)
		if err != nil {
			t.Fatal(err)
		}
		for _, e := range entries {
			got = append(got, e.Name())
		}
		if !slices.Equal(got, want) {
			t.Errorf("the folder has %q, not %q", got, want)
		}
	}
	write(40)
	files(fileName, nextName)
	if err := os.Remove(filler); err != nil {
		t.Fatal(err)
	}
	write(1)
	files(fileName, fileName+".1")
	if got := requests(t, filepath.Join(cfg.Dir, fileName+".1")); len(got) != 40 {
		t.Errorf("%d events are in the first file", len(got))
	}
	var st syscall.Stat_t
	if err := syscall.Stat(filepath.Join(cfg.Dir, fileName+".1"), &st); err != nil || st.Blocks*512 > st.Size+4096 {
		t.Errorf("the full file takes %d bytes for %d (%v)", st.Blocks*512, st.Size, err)
	}
	fill(t, disk)
	write(100) // of a quarter of a MiB
}
