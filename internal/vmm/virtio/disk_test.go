package virtio

import (
	"bytes"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"

	"agentrun.dev/internal/vmm/guestmem"
	"golang.org/x/sys/unix"
)

// fakeDisk is a disk in memory that records its calls.
type fakeDisk struct {
	mu       sync.Mutex // protects all following fields
	data     []byte
	readOnly bool
	calls    []string
	err      error
	short    bool
	entered  chan struct{} // if set, a read sends here
	proceed  chan struct{} // and then waits for this channel
}

func (d *fakeDisk) Size() int64    { return int64(len(d.data)) }
func (d *fakeDisk) ReadOnly() bool { return d.readOnly }

// note records a call; the caller holds the lock.
func (d *fakeDisk) note(call string) error {
	d.calls = append(d.calls, call)
	return d.err
}

// behave changes the disk. The lock also orders the change for the race
// detector, which does not see that the used ring orders it.
func (d *fakeDisk) behave(err error, short bool) {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.err, d.short = err, short
}

func (d *fakeDisk) bytes(from, to int) []byte {
	d.mu.Lock()
	defer d.mu.Unlock()
	return bytes.Clone(d.data[from:to])
}

func (d *fakeDisk) ReadAt(mem *guestmem.Memory, ranges []guestmem.Range, off int64) (int64, error) {
	if d.entered != nil {
		d.entered <- struct{}{}
		<-d.proceed
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	if err := d.note("read"); err != nil {
		return 0, err
	}
	n, err := scatter(mem, ranges, d.data[off:off+int64(size(ranges))])
	if d.short {
		n--
	}
	return int64(n), err
}

func (d *fakeDisk) WriteAt(mem *guestmem.Memory, ranges []guestmem.Range, off int64) (int64, error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if err := d.note("write"); err != nil {
		return 0, err
	}
	n, err := gather(mem, ranges, d.data[off:off+int64(size(ranges))])
	return int64(n), err
}

func (d *fakeDisk) Flush() error {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.note("flush")
}

func (d *fakeDisk) Discard(off, n int64) error {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.note("discard")
}

func (d *fakeDisk) WriteZeroes(off, n int64, unmap bool) error {
	d.mu.Lock()
	defer d.mu.Unlock()
	clear(d.data[off : off+n])
	if unmap {
		return d.note("zero+unmap")
	}
	return d.note("zero")
}

func (d *fakeDisk) log() string {
	d.mu.Lock()
	defer d.mu.Unlock()
	return strings.Join(d.calls, " ")
}

func openDisk(t testing.TB, sectors int64, readOnly bool) (*os.File, *FileDisk) {
	t.Helper()
	f, err := os.Create(filepath.Join(t.TempDir(), "disk"))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { f.Close() })
	if err := f.Truncate(sectors*SectorSize + 100); err != nil {
		t.Fatal(err)
	}
	d, err := OpenFileDisk(f, readOnly)
	if err != nil {
		t.Fatal(err)
	}
	return f, d
}

func blocks(t testing.TB, f *os.File) int64 {
	t.Helper()
	var st unix.Stat_t
	if err := unix.Fstat(int(f.Fd()), &st); err != nil {
		t.Fatal(err)
	}
	return st.Blocks
}

func TestFileDisk(t *testing.T) {
	f, d := openDisk(t, 2048, false)
	if d.Size() != 2048*SectorSize {
		t.Fatalf("size %d", d.Size())
	}
	b := NewBlock(BlockConfig{Disk: d})
	g := startGuest(t, b)
	data := bytes.Repeat([]byte{7}, 1<<20)
	if s, _ := g.request(g.out(append(blkHeader(blkOut, 0), data...)), g.in(1)); s != blkOK {
		t.Fatalf("write: %d", s)
	}
	if s, _ := g.request(g.out(blkHeader(blkFlushRequest, 0)), g.in(1)); s != blkOK {
		t.Fatalf("flush: %d", s)
	}
	in := g.in(4096)
	read := func(sector uint64) []byte {
		t.Helper()
		if s, n := g.request(g.out(blkHeader(blkIn, sector)), in, g.in(1)); s != blkOK || n != 4097 {
			t.Fatalf("read: %d, %d", s, n)
		}
		return g.get(in.gpa, 4096)
	}
	if !bytes.Equal(read(8), data[:4096]) {
		t.Fatal("read something else")
	}
	full := blocks(t, f)
	if s, _ := g.request(g.out(append(blkHeader(blkDiscardReq, 0), blkSegment(0, 1024, 0)...)), g.in(1)); s != blkOK {
		t.Fatalf("discard: %d", s)
	}
	if now := blocks(t, f); now > full/2+64 {
		t.Fatalf("discard punched no hole: %d of %d blocks left", now, full)
	}
	for _, flags := range []uint32{0, segmentUnmap} {
		if s, _ := g.request(g.out(append(blkHeader(blkWriteZeroesRq, 0), blkSegment(1024, 8, flags)...)), g.in(1)); s != blkOK {
			t.Fatalf("write zeroes: %d", s)
		}
		if !bytes.Equal(read(1024), make([]byte, 4096)) {
			t.Fatal("not zero")
		}
	}
	if !bytes.Equal(read(1032), data[:4096]) {
		t.Fatal("zeroed too much")
	}
	if err := d.writeZeroes(1032*SectorSize, 100<<10); err != nil { // the fallback without fallocate
		t.Fatal(err)
	}
	if !bytes.Equal(read(1032), make([]byte, 4096)) {
		t.Fatal("not zero")
	}
	// Truncated behind our back.
	if err := f.Truncate(SectorSize); err != nil {
		t.Fatal(err)
	}
	if s, n := g.request(g.out(blkHeader(blkIn, 0)), in, g.in(1)); s != blkIOError || n != SectorSize {
		t.Fatalf("short read: %d, %d", s, n)
	}
}

func TestFileDiskErrors(t *testing.T) {
	f, d := openDisk(t, 8, true)
	if !d.ReadOnly() {
		t.Fatal("not read-only")
	}
	r, w, err := os.Pipe()
	if err != nil {
		t.Fatal(err)
	}
	defer r.Close()
	defer w.Close()
	if _, err := OpenFileDisk(r, true); err == nil {
		t.Fatal("a pipe is no disk")
	}
	ro, err := os.Open(f.Name())
	if err != nil {
		t.Fatal(err)
	}
	defer ro.Close()
	d, err = OpenFileDisk(ro, false) // the caller lied
	if err != nil {
		t.Fatal(err)
	}
	if d.Discard(0, 512) == nil || d.WriteZeroes(0, 512, true) == nil || d.writeZeroes(0, 512) == nil {
		t.Fatal("wrote to a file that is open for reading")
	}
}
