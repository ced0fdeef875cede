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

// TestHugePagesAreLetGoWhole: a guest that writes to memory of which nothing has to
// be saved, not yet or no longer, waits once for each huge page, and keeps it. A
// device does not even wait.
func TestHugePagesAreLetGoWhole(t *testing.T) {
	const pages = 4
	arm := func(t *testing.T, c *Capture) {
		if !c.Early() {
			t.Fatal("this kernel is older than 6.4, since which memory that is not there can be protected")
		}
		if err := errors.Join(c.Announce(), c.Arm()); err != nil {
			t.Fatal(err)
		}
	}
	complete := func(t *testing.T, c *Capture) {
		if err := c.Begin(); err != nil {
			t.Fatal(err)
		}
		data, _, err := c.List(nil)
		if err = errors.Join(err, c.Copy(data), c.Adopt()); err != nil {
			t.Fatal(err)
		}
	}
	type writer func(t *testing.T, m *Memory, scratch *os.File, at uint64, b []byte)
	device := func(t *testing.T, m *Memory, _ *os.File, at uint64, b []byte) {
		if err := m.Write(at, b); err != nil {
			t.Fatal(err)
		}
	}
	for _, c := range []struct {
		name  string
		until func(*testing.T, *Capture)
		write writer
		waits uint64
	}{
		{"guest before the instant", arm, guestWrite, pages},
		{"guest after the copy", complete, guestWrite, pages},
		{"device before the instant", arm, device, 0},
		{"device after the copy", complete, device, 0},
	} {
		t.Run(c.name, func(t *testing.T) {
			pagemap, uffd := openFile(t, "/proc/self/pagemap", os.O_RDONLY), openFile(t, "/dev/userfaultfd", os.O_RDWR)
			m, scratch := newMemory(t, pages*hugeSize), newMemfd(t, nil)
			// Where the kernel has none, what is left to see is the number of waits.
			_ = unix.Madvise(m.regions[0].bytes, unix.MADV_HUGEPAGE)
			one := []byte{1}
			for at := uint64(0); at < m.size; at += PageSize {
				guestWrite(t, m, scratch, at, one)
			}
			huge := hugeBytes(t, m)
			capture := m.NewCapture(CaptureConfig{Userfaultfd: uffd, Pagemap: pagemap, File: newMemfd(t, nil)})
			if ok, why := capture.Beside(); !ok {
				t.Fatal(why)
			}
			c.until(t, capture)
			for at := uint64(0); at < m.size; at += blockSize {
				c.write(t, m, scratch, at, one)
			}
			if now := hugeBytes(t, m); now != huge {
				t.Errorf("of %d bytes in huge pages %d are left", huge, now)
			}
			// Who waited may go on before that is counted.
			if err := capture.Close(); err != nil {
				t.Fatal(err)
			}
			if n := capture.Stats().Faults; n != c.waits {
				t.Errorf("a pass over %d huge pages waited %d times", pages, n)
			}
		})
	}
}
