package guestmem

import (
	"bufio"
	"errors"
	"fmt"
	"os"
	"strings"
	"testing"

	"golang.org/x/sys/unix"
)

// TestAligned: KVM maps huge pages as such only where host and guest addresses
// agree.
func TestAligned(t *testing.T) {
	for range 4 { // by chance one may be
		for _, size := range []uint64{PageSize, hugeSize + PageSize, bigSize} {
			m := newMemory(t, size)
			for _, r := range m.Regions() {
				if (uint64(r.HostAddr())-r.GPA)%hugeSize != 0 {
					t.Errorf("RAM of %#x bytes at %#x is mapped at %#x", size, r.GPA, r.HostAddr())
				}
			}
		}
	}
}

// hugeBytes is how much of a memory is in huge pages.
func hugeBytes(t *testing.T, m *Memory) (n uint64) {
	t.Helper()
	f := openFile(t, "/proc/self/smaps", os.O_RDONLY)
	r := m.regions[0]
	within := false
	for s := bufio.NewScanner(f); s.Scan(); {
		var from, to, kib uint64
		if k, _ := fmt.Sscanf(s.Text(), "%x-%x ", &from, &to); k == 2 {
			within = from < uint64(r.HostAddr())+r.Size() && to > uint64(r.HostAddr())
		}
		if k, _ := fmt.Sscanf(strings.TrimSpace(s.Text()), "AnonHugePages: %d kB", &kib); k == 1 && within {
			n += kib << 10
		}
	}
	return n
}

// TestHugePagesAreLetGoWhole: a guest that writes to memory whose copy is complete
// waits once for each huge page, and keeps it.
func TestHugePagesAreLetGoWhole(t *testing.T) {
	const pages = 4
	pagemap, uffd := openFile(t, "/proc/self/pagemap", os.O_RDONLY), openFile(t, "/dev/userfaultfd", os.O_RDWR)
	m, scratch := newMemory(t, pages*hugeSize), newMemfd(t, nil)
	// Where the kernel has none, what is left to see is the number of waits.
	_ = unix.Madvise(m.regions[0].bytes, unix.MADV_HUGEPAGE)
	one := []byte{1}
	for at := uint64(0); at < m.size; at += PageSize {
		guestWrite(t, m, scratch, at, one)
	}
	huge := hugeBytes(t, m)
	c := m.NewCapture(CaptureConfig{Userfaultfd: uffd, Pagemap: pagemap, File: newMemfd(t, nil)})
	if ok, why := c.Beside(); !ok {
		t.Fatal(why)
	}
	if err := c.Begin(); err != nil {
		t.Fatal(err)
	}
	data, _, err := c.List(nil)
	if err != nil {
		t.Fatal(err)
	}
	if err := errors.Join(c.Copy(data), c.Adopt()); err != nil {
		t.Fatal(err)
	}
	for at := uint64(0); at < m.size; at += blockSize {
		guestWrite(t, m, scratch, at, one)
	}
	if now := hugeBytes(t, m); now != huge {
		t.Errorf("of %d bytes in huge pages %d are left", huge, now)
	}
	// Who waited may go on before that is counted.
	if err := c.Close(); err != nil {
		t.Fatal(err)
	}
	if n := c.Stats().Faults; n != pages {
		t.Errorf("a pass over %d huge pages waited %d times", pages, n)
	}
}
