package virtio

import (
	"encoding/binary"
	"testing"

	"agentrun.dev/internal/vmm/guestmem"
)

func pfnList(pfns ...uint32) []byte {
	var p []byte
	for _, n := range pfns {
		p = binary.LittleEndian.AppendUint32(p, n)
	}
	return p
}

// balloonGuest writes a byte to each of the pages 512 to 527.
func balloonGuest(t testing.TB) (*guest, *Balloon) {
	b := NewBalloon()
	g := startGuest(t, b)
	for i := uint64(512); i < 528; i++ {
		g.put(i*guestmem.PageSize, []byte{1})
	}
	return g, b
}

func (g *guest) pageSet(pfn uint64) bool { return g.get(pfn*guestmem.PageSize, 1)[0] == 1 }

func TestBalloonInflate(t *testing.T) {
	g, b := balloonGuest(t)
	last := uint32(g.mem.Size()/guestmem.PageSize) - 1
	g.send(balloonInflate, g.out(pfnList(514, 512, 513, 514, 520, last, last+1, ^uint32(0))))
	g.wantUsed(balloonInflate)
	for pfn, want := range map[uint64]bool{512: false, 513: false, 514: false, 515: true, 519: true, 520: false, 521: true} {
		if g.pageSet(pfn) != want {
			t.Errorf("page %d: set %v", pfn, !want)
		}
	}
	if s := b.Stats(); s.DiscardedBytes != 5*guestmem.PageSize || s.RefusedRanges != 2 {
		t.Fatalf("stats %+v", s)
	}
	g.send(balloonDeflate, g.out(pfnList(512)))
	g.wantUsed(balloonDeflate)
	// A list that ends within an entry, an empty one, and one that is too long.
	g.send(balloonInflate, g.out(append(pfnList(521), 1, 2, 3)))
	g.send(balloonInflate, g.in(8))
	long := make([]uint32, balloonMaxPFNs+1)
	for i := range long {
		long[i] = 522
	}
	long[balloonMaxPFNs] = 523
	g.send(balloonInflate, g.out(pfnList(long...)))
	if g.pageSet(521) || g.pageSet(522) || !g.pageSet(523) {
		t.Fatal("wrong pages")
	}
	g.wantHealthy()
}

func TestBalloonReport(t *testing.T) {
	g, b := balloonGuest(t)
	page := func(n uint64) uint64 { return n * guestmem.PageSize }
	// Whole pages are discarded; the rest of an unaligned range stays.
	g.send(balloonReport, buf{page(512), 2 * guestmem.PageSize, true}, buf{page(516) - 100, guestmem.PageSize + 300, true}, buf{page(518), 100, true})
	g.wantUsed(balloonReport)
	for pfn, want := range map[uint64]bool{512: false, 513: false, 514: true, 516: false, 517: true, 518: true} {
		if g.pageSet(pfn) != want {
			t.Errorf("page %d: set %v", pfn, !want)
		}
	}
	if got := b.Stats().DiscardedBytes; got != 3*guestmem.PageSize {
		t.Fatalf("discarded %d", got)
	}
	// Without the feature a report has no effect.
	g.start(FeatureVersion1, 16)
	g.send(balloonReport, buf{page(519), guestmem.PageSize, true})
	if _, _, ok := g.used(balloonReport); ok || !g.pageSet(519) {
		t.Fatal("reporting was not negotiated")
	}
}

func TestBalloonTarget(t *testing.T) {
	b := NewBalloon()
	b.SetTarget(7)
	g := newGuest(t, b)
	g.start(b.Features()|transportFeatures, 16)
	if g.readReg(regConfig) != 7 || g.raised.Load() != 0 {
		t.Fatal("target set before the driver came")
	}
	b.SetTarget(9)
	b.SetTarget(9)
	if g.readReg(regConfig) != 9 || g.readReg(regConfigGeneration) != 1 || g.raised.Load() != 1 ||
		g.readReg(regInterruptStatus) != interruptConfig {
		t.Fatalf("generation %d, %d interrupts", g.readReg(regConfigGeneration), g.raised.Load())
	}
	g.writeReg(regConfig, 100) // the host's field
	g.writeReg(regConfig+4, 5)
	if s := b.Stats(); s.TargetPages != 9 || s.ActualPages != 5 || g.readReg(regConfig+4) != 5 {
		t.Fatalf("stats %+v", s)
	}
	g.writeReg(regStatus, 0)
	if b.Stats().ActualPages != 0 {
		t.Fatal("a new driver has given nothing")
	}
}

func TestBalloonSaveRestore(t *testing.T) {
	g, b := balloonGuest(t)
	g.send(balloonInflate, g.out(pfnList(512)))
	g.wantUsed(balloonInflate)
	b.SetTarget(3)
	g.writeReg(regConfig+4, 1)
	s := g.save()
	g.send(balloonInflate, g.out(pfnList(513)))
	g.send(balloonDeflate, g.out(pfnList(512)))
	g.send(balloonReport, buf{514 * guestmem.PageSize, guestmem.PageSize, true})
	if !g.pageSet(513) || !g.pageSet(514) {
		t.Fatal("works while paused")
	}
	b2 := NewBalloon()
	if err := b2.Restore(b.Save()); err != nil {
		t.Fatal(err)
	}
	g.restore(b2, s)
	g.bus.Resume()
	for q := range 3 {
		g.wantUsed(q)
	}
	if g.pageSet(513) || g.pageSet(514) || g.readReg(regConfig) != 3 || g.readReg(regConfig+4) != 1 {
		t.Fatal("state was lost")
	}
	if got := b2.Stats().DiscardedBytes; got != 3*guestmem.PageSize {
		t.Fatalf("discarded %d", got)
	}
}
