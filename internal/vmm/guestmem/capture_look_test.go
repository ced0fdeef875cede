package guestmem

import (
	"errors"
	"fmt"
	"os"
	"testing"

	"agentrun.dev/internal/storage/extent"
)

// lookGuest is 8 MiB of a layer, with a capture of it that is not armed yet.
func lookGuest(t *testing.T) (*Memory, *Capture) {
	t.Helper()
	content := make([]byte, 8<<20)
	for i := range content {
		content[i] = 1
	}
	m, err := NewLayered(8<<20, []Mapping{{extent.Run{Start: 0, Length: 8 << 20}, newMemfd(t, content), 0}})
	if err != nil {
		t.Fatal(err)
	}
	c := m.NewCapture(CaptureConfig{
		Userfaultfd: openFile(t, "/dev/userfaultfd", os.O_RDWR), Pagemap: openFile(t, "/proc/self/pagemap", os.O_RDONLY), File: newMemfd(t, nil),
	})
	t.Cleanup(func() {
		if err := errors.Join(c.Close(), m.Close()); err != nil {
			t.Error(err)
		}
	})
	if !c.Early() {
		t.Fatal("memory of a layer cannot be protected early")
	}
	if err := c.Announce(); err != nil {
		t.Fatal(err)
	}
	return m, c
}

// TestVerdicts: what an entry of the page map says about a page.
func TestVerdicts(t *testing.T) {
	m, c := lookGuest(t)
	scratch := newMemfd(t, nil)
	guestWrite(t, m, scratch, 0, []byte{2}) // page 0 is own, the others are not
	if err := errors.Join(c.Arm(), c.Begin()); err != nil {
		t.Fatal(err)
	}
	const swapped, present = pagemapSwapped | pagemapProtected, pagemapPresent | pagemapProtected
	for _, v := range []struct {
		name  string
		page  int
		entry uint64
		known bool
		own   bool
	}{
		{"not there", 0, 0, true, false},
		{"came later", 0, pagemapPresent, true, false},
		{"came later and is being moved", 0, pagemapSwapped, true, false},
		{"present", 1, present, true, true},
		{"of the file", 0, present | pagemapFile, true, false},
		{"of the file, being moved", 0, swapped | pagemapFile, true, false},
		{"own before, being moved", 0, swapped, true, true},
		{"own before, being moved, in a block that is not known", 0, swapped, false, true},
		{"a marker", 1, swapped, true, false},
		{"a marker in a block that is not known", 1, swapped, false, false},
	} {
		b := c.blocks[0].before
		with := block{before: b, known: v.known}
		own, err := c.isOwn(&with, v.page, v.entry, m.regions[0].bytes[v.page*PageSize:(v.page+1)*PageSize])
		if err != nil || own != v.own {
			t.Errorf("%s: own %t, not %t (%v)", v.name, own, v.own, err)
		}
	}
	// It was not noted as own, but reading it shows that it is.
	if own, err := c.isOwn(&block{}, 0, swapped, m.regions[0].bytes[:PageSize]); err != nil || !own {
		t.Errorf("an own page in a block that is not known: own %t (%v)", own, err)
	}
	// While a guest stands still nothing is protected.
	for entry, want := range map[uint64]bool{
		0: false, pagemapPresent: true, pagemapSwapped: true, pagemapPresent | pagemapFile: false, pagemapSwapped | pagemapFile: false,
	} {
		if own, err := c.isOwn(nil, 0, entry, nil); err != nil || own != want {
			t.Errorf("entry %#x while the guest stands still: own %t, not %t (%v)", entry, own, want, err)
		}
	}
}

// TestWrittenBetweenLookAndProtection: a page that a vCPU writes to just between the
// two is noted as own, whatever state it is in later, and the blocks around it are read.
func TestWrittenBetweenLookAndProtection(t *testing.T) {
	m, c := lookGuest(t)
	scratch := newMemfd(t, nil)
	n := uint64(len(c.blocks))
	// As armStep does.
	if err := c.lookBefore(0, n); err != nil {
		t.Fatal(err)
	}
	const page = 3*hugeSize/PageSize + 100
	guestWrite(t, m, scratch, page*PageSize, []byte{2})
	for i := range c.blocks {
		c.blocks[i].released.Store(false)
	}
	if err := errors.Join(c.protect(extent.Run{Start: 0, Length: m.size}), c.lookAgain(), c.Begin()); err != nil {
		t.Fatal(err)
	}
	for i := range c.blocks {
		want := uint16(0)
		if i == page/blockPages {
			want = 1 << (page % blockPages)
		}
		if b := &c.blocks[i]; b.before != want || b.known != (i/hugeBlocks != 3) {
			t.Errorf("block %d: own before %#x, known %t", i, b.before, b.known)
		}
	}
	data, zeros, err := c.List(nil)
	if err != nil || len(data) != 1 || data[0] != (extent.Run{Start: page * PageSize, Length: PageSize}) || zeros != nil {
		t.Errorf("listed %v, %v (%v)", data, zeros, err)
	}
}

// TestCaptureWhilePagesMoveBefore64: as on kernels before Linux 6.4, which leave no
// markers in anonymous memory, and cannot list own pages by themselves.
func TestCaptureWhilePagesMoveBefore64(t *testing.T) {
	for _, layered := range []bool{false, true} {
		t.Run(fmt.Sprintf("layered=%t", layered), func(t *testing.T) {
			g := newMovedGuest(t, layered)
			g.captureWhilePagesMove(func(cfg CaptureConfig) *Capture {
				c := g.m.newCapture(cfg, oldUserfaultfd)
				c.cannotScan = true
				return c
			})
		})
	}
}
