package guestmem

import (
	"bufio"
	"errors"
	"fmt"
	"os"
	"slices"
	"strings"
	"testing"

	"golang.org/x/sys/unix"
)

// TestAligned: KVM maps huge pages only if host and guest addresses agree.
func TestAligned(t *testing.T) {
	for range 4 { // one may be aligned by chance
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

// hugeBytes returns how much of a memory is in huge pages.
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

// TestHugePagesAreLetGoWhole: before the instant and after the copy a guest waits
// only once for each huge page that it writes to, and keeps the huge page. A device
// does not wait at all.
func TestHugePagesAreLetGoWhole(t *testing.T) {
	const pages = 4
	arm := func(t *testing.T, c *Capture) {
		if !c.Early() {
			return // without userfaultfd no page is protected
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
		if err = errors.Join(err, c.Copy(data), c.Rebase()); err != nil {
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
			// Without huge pages the test only checks the number of waits.
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
			// The vCPU may continue before its wait is counted.
			if err := capture.Close(); err != nil {
				t.Fatal(err)
			}
			if n := capture.Stats().Waits; n != c.waits && (n != 0 || capture.Early()) {
				t.Errorf("a pass over %d huge pages waited %d times", pages, n)
			}
		})
	}
}

// TestEmptyStaysEmpty: memory that is empty when it is captured still gets huge
// pages afterwards. Pages that are touched before the instant are captured.
func TestEmptyStaysEmpty(t *testing.T) {
	const pages = 8
	pagemap, uffd := openFile(t, "/proc/self/pagemap", os.O_RDONLY), openFile(t, "/dev/userfaultfd", os.O_RDWR)
	m, scratch, file := newMemory(t, pages*hugeSize), newMemfd(t, nil), newMemfd(t, nil)
	_ = unix.Madvise(m.regions[0].bytes, unix.MADV_HUGEPAGE)
	at := func(page uint64) uint64 { return page*hugeSize + 5*PageSize }
	guestWrite(t, m, scratch, at(0), []byte{1})
	one := hugeBytes(t, m) // 0 if the kernel has no huge pages
	c := m.NewCapture(CaptureConfig{Userfaultfd: uffd, Pagemap: pagemap, File: file})
	if c.Early() {
		if err := errors.Join(c.Announce(), c.Arm()); err != nil {
			t.Fatal(err)
		}
	}
	guestWrite(t, m, scratch, at(3), []byte{2})
	if err := c.Begin(); err != nil {
		t.Fatal(err)
	}
	for _, page := range []uint64{0, 3, 5} {
		guestWrite(t, m, scratch, at(page), []byte{9})
	}
	data, _, err := c.List(nil)
	if err != nil {
		t.Fatal(err)
	}
	if len(data) != 2 || data[0].Start/hugeSize != 0 || data[1].Start/hugeSize != 3 {
		t.Errorf("%v is captured", data)
	}
	if err := errors.Join(c.Copy(data), c.Rebase(), c.Share(), c.Close()); err != nil {
		t.Fatal(err)
	}
	got := make([]byte, 1)
	for page, want := range map[uint64]byte{0: 1, 3: 2} {
		if _, err := file.ReadAt(got, int64(at(page))); err != nil || got[0] != want {
			t.Errorf("huge page %d was captured with %d, not %d (%v)", page, got[0], want, err)
		}
	}
	for page := range uint64(pages) {
		want := byte(0)
		if slices.Contains([]uint64{0, 3, 5}, page) {
			want = 9
		}
		if err := m.Read(at(page), got); err != nil || got[0] != want {
			t.Errorf("huge page %d has %d, not %d (%v)", page, got[0], want, err)
		}
	}
	// Huge pages that were written during the copy are split, the others are
	// not.
	before := hugeBytes(t, m)
	for _, page := range []uint64{1, 2, 4, 6, 7} {
		guestWrite(t, m, scratch, at(page), []byte{9})
	}
	if grown := hugeBytes(t, m) - before; grown != 5*one && canScan(t, pagemap) {
		t.Errorf("%d bytes in huge pages have come, not %d", grown, 5*one)
	}
}

// canScan reports whether the kernel can find empty memory. If it cannot (Linux 6.4
// to 6.6), all memory is protected.
func canScan(t *testing.T, pagemap *os.File) bool {
	t.Helper()
	b := make([]byte, PageSize)
	_, err := firstPage(pagemap, b)
	return err == nil
}
