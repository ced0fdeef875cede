package microvm

import (
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"testing"

	"agentrun.dev/internal/storage/layer"
	"agentrun.dev/internal/vmm/vmmctl"
)

// TestBlank: a new file system is small and always the same, and its layer is valid.
func TestBlank(t *testing.T) {
	for _, size := range []uint64{16 * mib, 48*mib + layer.PageSize, 2 << 30, 1 << 40} {
		a, err := newBlank(t.Context(), size)
		if err != nil {
			t.Fatal(err)
		}
		b, err := newBlank(t.Context(), size)
		if err != nil {
			t.Fatal(err)
		}
		ref := a.stack.Layers[0]
		if ref != b.stack.Layers[0] {
			t.Errorf("%d bytes: two layers, %v and %v", size, ref, b.stack.Layers[0])
		}
		if ref.Size > size/100 || ref.Size > 4*mib || len(a.stack.Extents) > 8 {
			t.Errorf("%d bytes: a layer of %d bytes in %d parts", size, ref.Size, len(a.stack.Extents))
		}
		if got, err := fileRef(a.file); err != nil || got != ref {
			t.Errorf("%d bytes: the file is %v, not %v (%v)", size, got, ref, err)
		}
		if _, err := a.file.WriteAt([]byte{1}, 0); err == nil {
			t.Error("what all sandboxes share was written to")
		}
		checkExt4(t, a, size)
		if err := a.file.Close(); err != nil {
			t.Error(err)
		}
		if err := b.file.Close(); err != nil {
			t.Error(err)
		}
	}
}

// checkExt4 restores the file system from the layer and checks it with e2fsprogs.
func checkExt4(t *testing.T, b *blank, size uint64) {
	t.Helper()
	path := filepath.Join(t.TempDir(), "disk")
	f, err := os.Create(path)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = f.Close() }()
	if err := f.Truncate(int64(size)); err != nil {
		t.Fatal(err)
	}
	for _, e := range b.stack.Extents {
		if _, err := io.Copy(io.NewOffsetWriter(f, int64(e.Start)), io.NewSectionReader(b.file, int64(e.Offset), int64(e.Length))); err != nil {
			t.Fatal(err)
		}
	}
	tool := func(name string, args ...string) string {
		out, err := exec.CommandContext(t.Context(), "/usr/sbin/"+name, append(args, path)...).CombinedOutput()
		if err != nil {
			t.Fatalf("%s of %d bytes: %v\n%s", name, size, err, out)
		}
		return string(out)
	}
	if size < 1<<40 { // the check reads all tables
		tool("e2fsck", "-f", "-n")
	}
	about := tool("dumpe2fs", "-h")
	if want := "Block count:              " + strconv.FormatUint(size/4096, 10); !strings.Contains(about, want) || strings.Contains(about, "has_journal") {
		t.Errorf("%d bytes:\n%s", size, about)
	}
}

// TestBlanks: a blank is made once for each size, and again after a failure.
func TestBlanks(t *testing.T) {
	var b blanks
	a, err := b.get(t.Context(), 16*mib)
	if err != nil {
		t.Fatal(err)
	}
	if again, err := b.get(t.Context(), 16*mib); err != nil || again != a {
		t.Errorf("%p, then %p (%v)", a, again, err)
	}
	if other, err := b.get(t.Context(), 32*mib); err != nil || other == a || other.stack.Size != 32*mib {
		t.Errorf("%+v, %v", other, err)
	}
	if _, err := b.get(t.Context(), 4096); err == nil || !strings.Contains(err.Error(), "4096 bytes") {
		t.Errorf("a file system in a page: %v", err)
	}
	if err := b.close(); err != nil {
		t.Error(err)
	}
	if _, err := a.file.Stat(); err == nil {
		t.Error("the file is still open")
	}
}

// TestOverlayCmdline: the guest is told which disk it writes to.
func TestOverlayCmdline(t *testing.T) {
	b := newBoot(0, 0, nil)
	for _, want := range []string{"a", "b", "c"} {
		b.addDisk(vmmctl.Disk{}, nil)
		if got := b.overlay(); got != "agentrun.overlay=/dev/vd"+want {
			t.Errorf("%q is not of /dev/vd%s", got, want)
		}
	}
}

// TestDiskReserve: a disk costs memory only where the folder for disks is memory.
func TestDiskReserve(t *testing.T) {
	for parent, counts := range map[string]uint64{"/dev/shm": 1, t.TempDir(): 0} {
		dir, err := os.MkdirTemp(parent, "agentrun-test-")
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { _ = os.RemoveAll(dir) })
		scratch, err := os.Open(dir)
		if err != nil {
			t.Fatal(err)
		}
		defer func() { _ = scratch.Close() }()
		e := &Engine{scratch: scratch}
		memory, err := onMemory(scratch)
		if err != nil {
			t.Fatal(err)
		}
		if parent != "/dev/shm" && memory { // the folder for temporary files is in memory here
			counts = 1
		}
		if got, want := e.Reserve(64*mib, 32*mib), MemoryLimit(64*mib)+counts*32*mib; got != want {
			t.Errorf("in %s: %d, not %d", parent, got, want)
		}
		if n, err := e.MaxDisk(); err != nil || n == 0 || n > layer.MaxSize {
			t.Errorf("in %s: at most %d (%v)", parent, n, err)
		}
	}
}
