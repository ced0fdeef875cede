package guestmem

import (
	"errors"
	"fmt"
	"os"
	"testing"

	"agentrun.dev/internal/storage/extent"
)

// lookGuest makes 8 MiB of RAM over a layer, with a capture that is not armed
// yet.
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

// TestVerdicts checks the meaning of each kind of page map entry.
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
	// Without userfaultfd no page is protected.
	for entry, want := range map[uint64]bool{
		0: false, pagemapPresent: true, pagemapSwapped: true, pagemapPresent | pagemapFile: false, pagemapSwapped | pagemapFile: false,
	} {
		if own, err := c.isOwn(nil, 0, entry, nil); err != nil || own != want {
			t.Errorf("entry %#x while the guest stands still: own %t, not %t (%v)", entry, own, want, err)
		}
	}
}

// TestWrittenBetweenLookAndProtection: a page that a vCPU writes to between the look and
// the protection is noted as own, whatever state it is in later, and the blocks around
// it are read.
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
	if err := errors.Join(c.protect(extent.Run{Start: 0, Length: m.size}), c.lookAgain([]extent.Run{{Start: 0, Length: n}}), c.Begin()); err != nil {
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

// TestCaptureWhilePagesMoveBefore64 simulates kernels before Linux 6.4, which leave
// no markers in anonymous memory and cannot list own pages by themselves.
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

// TestArmAgain: blocks written after they were armed can be armed again, with a new
// look.
func TestArmAgain(t *testing.T) {
	m, c := lookGuest(t)
	scratch := newMemfd(t, nil)
	if err := c.Arm(); err != nil {
		t.Fatal(err)
	}
	const page = 5*blockPages + 3
	guestWrite(t, m, scratch, page*PageSize, []byte{2})
	written := &c.blocks[page/blockPages]
	c.writers.Lock() // the writer continues just before serve is done with it
	released := written.released.Load()
	c.writers.Unlock()
	if !released {
		t.Fatal("a block that was written to is still protected")
	}
	if err := c.armReleased(); err != nil {
		t.Fatal(err)
	}
	if written.released.Load() || written.before != 1<<(page%blockPages) || !written.known {
		t.Errorf("armed again: released %t, own before %#x, known %t", written.released.Load(), written.before, written.known)
	}
	if err := c.Begin(); err != nil {
		t.Fatal(err)
	}
	guestWrite(t, m, scratch, page*PageSize, []byte{3}) // after the instant
	data, zeros, err := c.List(nil)
	if err != nil || len(data) != 1 || data[0] != (extent.Run{Start: page * PageSize, Length: PageSize}) || zeros != nil {
		t.Fatalf("listed %v, %v (%v)", data, zeros, err)
	}
	var got [1]byte
	if err := c.Copy(data); err != nil {
		t.Fatal(err)
	}
	if _, err := c.file.ReadAt(got[:], page*PageSize); err != nil || got[0] != 2 {
		t.Errorf("captured %d, not 2 (%v)", got[0], err)
	}
}

// TestExpect: pages that the host is about to write are present when the guest stands
// still, and do not count as changed.
func TestExpect(t *testing.T) {
	m, c := lookGuest(t)
	if err := c.Arm(); err != nil {
		t.Fatal(err)
	}
	c.Expect(3*blockSize+PageSize, 2*blockSize)
	entry := make([]uint64, len(c.blocks)*blockPages)
	if err := c.entries(m.regions[0].bytes, entry); err != nil {
		t.Fatal(err)
	}
	for i, e := range entry {
		block := i / blockPages
		if there := e&pagemapPresent != 0; there != (block >= 3 && block <= 5) || e&pagemapProtected == 0 {
			t.Errorf("page %d of block %d: entry %#x", i%blockPages, block, e)
		}
	}
	if err := c.Begin(); err != nil {
		t.Fatal(err)
	}
	if err := m.Write(4*blockSize, []byte{2}); err != nil {
		t.Fatal(err)
	}
	if data, zeros, err := c.List(nil); err != nil || data != nil || zeros != nil {
		t.Errorf("listed %v, %v (%v)", data, zeros, err)
	}
}

// TestExpectNothing: Expect brings in no pages of anonymous memory.
func TestExpectNothing(t *testing.T) {
	m := newMemory(t, 1<<20)
	pagemap := openFile(t, "/proc/self/pagemap", os.O_RDONLY)
	c := m.NewCapture(CaptureConfig{Userfaultfd: openFile(t, "/dev/userfaultfd", os.O_RDWR), Pagemap: pagemap, File: newMemfd(t, nil)})
	defer func() {
		if err := c.Close(); err != nil {
			t.Error(err)
		}
	}()
	c.Expect(0, m.size)
	entry := make([]uint64, m.size/PageSize)
	if err := c.entries(m.regions[0].bytes, entry); err != nil {
		t.Fatal(err)
	}
	for i, e := range entry {
		if e&pagemapPresent != 0 {
			t.Errorf("page %d: entry %#x", i, e)
		}
	}
}
