package virtio

import (
	"errors"
	"math"
	"sync"
	"testing"

	"agentrun.dev/internal/vmm/guestmem"
)

// queueGuest is a guest with a bare queue of 8 slots and no device.
func queueGuest(t testing.TB) (*guest, *ring, *Queue) {
	t.Helper()
	g := &guest{t: t, mem: newMemory(t, 1<<20), next: guestmem.PageSize}
	r := g.newRing(8)
	g.rings = []*ring{r}
	q := newQueue(g.mem, 8)
	q.desc, q.avail, q.used, q.ready, q.indirect = r.desc, r.avail, r.used, true, true
	if err := q.check(); err != nil {
		t.Fatal(err)
	}
	return g, r, q
}

func mustPop(t testing.TB, q *Queue) Chain {
	t.Helper()
	c, ok, err := q.Pop()
	if err != nil || !ok {
		t.Fatalf("Pop: %v, %v", ok, err)
	}
	return c
}

func TestQueuePopPush(t *testing.T) {
	g, _, q := queueGuest(t)
	if _, ok, err := q.Pop(); ok || err != nil {
		t.Fatalf("empty ring: %v, %v", ok, err)
	}
	head := g.add(0, buf{gpa: 0x8000, len: 16}, buf{gpa: 0x9000, len: 0}, buf{gpa: 0x9000, len: 7, write: true}, buf{gpa: 0xa000, len: 1, write: true})
	c := mustPop(t, q)
	if c.Head != head || c.slots != 4 || len(c.Readable) != 1 || len(c.Writable) != 2 ||
		c.Readable[0] != (guestmem.Range{GPA: 0x8000, Len: 16}) || c.Writable[1] != (guestmem.Range{GPA: 0xa000, Len: 1}) {
		t.Fatalf("chain %+v", c)
	}
	q.Unpop()
	if c2 := mustPop(t, q); c2.Head != head {
		t.Fatalf("after Unpop: %+v", c2)
	}
	if err := q.Push(head, 8); err != nil {
		t.Fatal(err)
	}
	if h, n := g.wantUsed(0); h != uint32(head) || n != 8 {
		t.Fatalf("used %d, %d", h, n)
	}
	if !q.WantsInterrupt() {
		t.Fatal("interrupt not wanted")
	}
	g.maskIRQ(0, true)
	if q.WantsInterrupt() {
		t.Fatal("masked interrupt wanted")
	}
}

func TestQueueIndirect(t *testing.T) {
	g, r, q := queueGuest(t)
	g.addIndirect(0, buf{gpa: 0x8000, len: 16}, buf{gpa: 0x9000, len: 512, write: true}, buf{gpa: 0xa000, len: 1, write: true})
	c := mustPop(t, q)
	if len(c.Readable) != 1 || len(c.Writable) != 2 || c.slots != 1 {
		t.Fatalf("chain %+v", c)
	}
	// A direct descriptor may come before the table, whose write flag is
	// ignored (§2.7.5.3.2).
	table := g.out(rawDesc(0x9000, 4, descWrite, 0))
	g.setDesc(r, 5, 0x8000, 16, descNext, 6)
	g.setDesc(r, 6, table.gpa, table.len, descIndirect|descWrite, 0)
	g.publish(r, 5)
	c = mustPop(t, q)
	if len(c.Readable) != 1 || len(c.Writable) != 1 || c.slots != 2 {
		t.Fatalf("chain %+v", c)
	}
}

// TestQueueWrap runs the free-running indices past 65536.
func TestQueueWrap(t *testing.T) {
	g, r, q := queueGuest(t)
	const start = 65533
	r.availIdx, r.usedIdx, q.nextAvail, q.nextUsed = start, start, start, start
	for i := range 3 * 8 {
		head := g.add(0, buf{gpa: 0x8000, len: uint32(i + 1)})
		c := mustPop(t, q)
		if c.Head != head || c.Readable[0].Len != uint32(i+1) {
			t.Fatalf("round %d: %+v", i, c)
		}
		if err := q.Push(c.Head, uint32(i)); err != nil {
			t.Fatal(err)
		}
		if h, n := g.wantUsed(0); h != uint32(head) || n != uint32(i) {
			t.Fatalf("round %d: used %d, %d", i, h, n)
		}
	}
	if q.nextAvail != (start+24)%65536 {
		t.Fatalf("next %d", q.nextAvail)
	}
	// A full ring, again across the end.
	r.availIdx, q.nextAvail = 65530, 65530
	for range 8 {
		g.add(0, buf{gpa: 0x8000, len: 1})
	}
	for range 8 {
		mustPop(t, q)
	}
	if _, ok, err := q.Pop(); ok || err != nil {
		t.Fatalf("drained ring: %v, %v", ok, err)
	}
}

func TestQueueHostile(t *testing.T) {
	tests := map[string]func(*guest, *ring, *Queue){
		"avail index jumped":      func(g *guest, r *ring, _ *Queue) { r.availIdx = 8; g.publish(r, 0) },
		"avail index went back":   func(g *guest, r *ring, _ *Queue) { r.availIdx = math.MaxUint16 - 2; g.publish(r, 0) },
		"head beyond the table":   func(g *guest, r *ring, _ *Queue) { g.publish(r, 8) },
		"head far beyond":         func(g *guest, r *ring, _ *Queue) { g.publish(r, math.MaxUint16) },
		"next beyond the table":   func(g *guest, r *ring, _ *Queue) { g.setDesc(r, 0, 0x8000, 1, descNext, 8); g.publish(r, 0) },
		"loop of one":             func(g *guest, r *ring, _ *Queue) { g.setDesc(r, 0, 0x8000, 1, descNext, 0); g.publish(r, 0) },
		"loop of empty buffers":   func(g *guest, r *ring, _ *Queue) { g.setDesc(r, 0, 0, 0, descNext, 0); g.publish(r, 0) },
		"address beyond memory":   func(g *guest, r *ring, _ *Queue) { g.add(0, buf{gpa: 1 << 20, len: 1}) },
		"end beyond memory":       func(g *guest, r *ring, _ *Queue) { g.add(0, buf{gpa: 1<<20 - 4, len: 5}) },
		"address overflow":        func(g *guest, r *ring, _ *Queue) { g.add(0, buf{gpa: math.MaxUint64 - 3, len: 8, write: true}) },
		"length of 4 GiB":         func(g *guest, r *ring, _ *Queue) { g.add(0, buf{gpa: 0, len: math.MaxUint32}) },
		"readable after writable": func(g *guest, r *ring, _ *Queue) { g.add(0, buf{0x8000, 1, true}, buf{0x8000, 1, false}) },
		"readable after empty writable": func(g *guest, r *ring, _ *Queue) {
			g.add(0, buf{0x8000, 0, true}, buf{0x8000, 1, false})
		},
		"loop of two": func(g *guest, r *ring, _ *Queue) {
			g.setDesc(r, 0, 0x8000, 1, descNext, 1)
			g.setDesc(r, 1, 0x8000, 1, descNext, 0)
			g.publish(r, 0)
		},
		"indirect not negotiated": func(g *guest, r *ring, q *Queue) { q.indirect = false; g.addIndirect(0, buf{0x8000, 1, false}) },
		"indirect with next": func(g *guest, r *ring, _ *Queue) {
			g.setDesc(r, 0, 0x8000, 16, descIndirect|descNext, 1)
			g.publish(r, 0)
		},
		"indirect empty":       func(g *guest, r *ring, _ *Queue) { g.setDesc(r, 0, 0x8000, 0, descIndirect, 0); g.publish(r, 0) },
		"indirect odd length":  func(g *guest, r *ring, _ *Queue) { g.setDesc(r, 0, 0x8000, 17, descIndirect, 0); g.publish(r, 0) },
		"indirect too long":    func(g *guest, r *ring, _ *Queue) { g.setDesc(r, 0, 0x8000, 9*16, descIndirect, 0); g.publish(r, 0) },
		"indirect huge":        func(g *guest, r *ring, _ *Queue) { g.setDesc(r, 0, 0, 0xfffffff0, descIndirect, 0); g.publish(r, 0) },
		"indirect out of RAM":  func(g *guest, r *ring, _ *Queue) { g.setDesc(r, 0, 1<<40, 16, descIndirect, 0); g.publish(r, 0) },
		"indirect nested":      func(g *guest, r *ring, _ *Queue) { nested(g, r, rawDesc(0x8000, 16, descIndirect, 0)) },
		"indirect loop":        func(g *guest, r *ring, _ *Queue) { nested(g, r, rawDesc(0x8000, 16, descNext, 0)) },
		"indirect next beyond": func(g *guest, r *ring, _ *Queue) { nested(g, r, rawDesc(0x8000, 16, descNext, 1)) },
		"chain longer with table": func(g *guest, r *ring, _ *Queue) {
			var bufs []buf
			for range 8 {
				bufs = append(bufs, buf{0x8000, 1, false})
			}
			g.addIndirect(0, bufs...)
			g.setDesc(r, 7, 0x8000, 1, descNext, 0)
			g.publish(r, 7)
			r.availIdx--
			g.publish(r, 7)
			// Only the second, longer chain is read.
			if err := g.mem.StoreUint16(r.avail+4, 7); err != nil {
				g.t.Fatal(err)
			}
		},
	}
	for name, setup := range tests {
		t.Run(name, func(t *testing.T) {
			g, r, q := queueGuest(t)
			setup(g, r, q)
			_, ok, err := q.Pop()
			if ok || !errors.Is(err, ErrQueue) {
				t.Fatalf("Pop: %v, %v", ok, err)
			}
		})
	}
}

func nested(g *guest, r *ring, table []byte) {
	b := g.out(table)
	g.setDesc(r, 0, b.gpa, b.len, descIndirect, 0)
	g.publish(r, 0)
}

// TestQueueTotalLength: each buffer is inside memory, but the sum exceeds 32
// bits.
func TestQueueTotalLength(t *testing.T) {
	mem, err := guestmem.NewAnonymous(1 << 30) // only the pages of the rings are touched
	if err != nil {
		t.Fatal(err)
	}
	defer mem.Close()
	g := &guest{t: t, mem: mem, next: guestmem.PageSize}
	r := g.newRing(8)
	g.rings = []*ring{r}
	q := newQueue(mem, 8)
	q.desc, q.avail, q.used, q.ready = r.desc, r.avail, r.used, true
	big := buf{gpa: 0, len: 1 << 30}
	g.add(0, big, big, big, big)
	if _, _, err := q.Pop(); !errors.Is(err, ErrQueue) {
		t.Fatalf("4 GiB: %v", err)
	}
	r.availIdx = 0
	g.add(0, big, big, big, buf{gpa: 0, len: 1<<30 - 1})
	if c := mustPop(t, q); size(c.Readable) != math.MaxUint32 {
		t.Fatalf("size %d", size(c.Readable))
	}
}

func TestQueueCheck(t *testing.T) {
	_, _, good := queueGuest(t)
	tests := map[string]func(*Queue){
		"size 0":            func(q *Queue) { q.size = 0 },
		"size 3":            func(q *Queue) { q.size = 3 },
		"size above max":    func(q *Queue) { q.size = 16 },
		"desc misaligned":   func(q *Queue) { q.desc += 8 },
		"avail misaligned":  func(q *Queue) { q.avail++ },
		"used misaligned":   func(q *Queue) { q.used += 2 },
		"desc out of RAM":   func(q *Queue) { q.desc = 1<<20 - 64 },
		"avail out of RAM":  func(q *Queue) { q.avail = 1<<20 - 20 },
		"used out of RAM":   func(q *Queue) { q.used = 1<<20 - 64 },
		"address wraps":     func(q *Queue) { q.used = math.MaxUint64 &^ 3 },
		"desc in the skies": func(q *Queue) { q.desc = 1 << 63 },
	}
	for name, change := range tests {
		t.Run(name, func(t *testing.T) {
			q := *good
			change(&q)
			if err := q.check(); !errors.Is(err, ErrQueue) {
				t.Fatalf("check: %v", err)
			}
			if _, err := restoreQueue(q.mem, q.max, true, q.save()); !errors.Is(err, ErrQueue) {
				t.Fatalf("restore: %v", err)
			}
			// A queue that was never checked stays within bounds, too.
			if q.size != 0 {
				_, _, _ = q.Pop()
				_ = q.Push(0, 0)
				q.WantsInterrupt()
			}
		})
	}
	good.ready = false
	if _, ok, err := good.Pop(); ok || err != nil {
		t.Fatalf("Pop of a stopped queue: %v, %v", ok, err)
	}
	if err := good.Push(0, 0); err != nil || good.nextUsed != 0 {
		t.Fatalf("Push to a stopped queue: %v", err)
	}
}

// TestQueueDescriptorsChange flips descriptors between good and bad while the
// device reads them: all that Pop returns was checked.
func TestQueueDescriptorsChange(t *testing.T) {
	g, r, q := queueGuest(t)
	g.add(0, buf{gpa: 0x8000, len: 16}, buf{gpa: 0x9000, len: 16, write: true})
	stop := make(chan struct{})
	var wg sync.WaitGroup
	wg.Go(func() {
		good, bad := rawDesc(0x8000, 16, descNext, 1), rawDesc(math.MaxUint64-8, math.MaxUint32, descNext, 1)
		loop := rawDesc(0x8000, 16, descNext, 0)
		for i := 0; ; i++ {
			select {
			case <-stop:
				return
			default:
			}
			_ = g.mem.Write(r.desc, [][]byte{good, bad, loop}[i%3])
		}
	})
	popped := 0
	for range 20000 {
		c, ok, err := q.Pop()
		if err != nil {
			if !errors.Is(err, ErrQueue) {
				t.Fatal(err)
			}
			continue
		}
		if !ok {
			t.Fatal("buffer vanished")
		}
		popped++
		for _, x := range append(append([]guestmem.Range{}, c.Readable...), c.Writable...) {
			if !g.mem.Contains(x.GPA, uint64(x.Len)) {
				t.Fatalf("unchecked range %+v", x)
			}
		}
		q.Unpop()
	}
	close(stop)
	wg.Wait()
	t.Logf("%d of 20000 were good", popped)
}

func TestQueueAllocatesNothing(t *testing.T) {
	g, r, q := queueGuest(t)
	head := g.chain(r, buf{gpa: 0x8000, len: 16}, buf{gpa: 0x9000, len: 512, write: true}, buf{gpa: 0xa000, len: 1, write: true})
	g.publish(r, head)
	mustPop(t, q)
	q.Unpop()
	if n := testing.AllocsPerRun(100, func() {
		c, _, _ := q.Pop()
		_ = q.Push(c.Head, 1)
		q.WantsInterrupt()
		q.Unpop()
	}); n != 0 {
		t.Fatalf("%v allocations", n)
	}
}

func TestRanges(t *testing.T) {
	mem := newMemory(t, guestmem.PageSize)
	parts := func() []guestmem.Range {
		return []guestmem.Range{{GPA: 0, Len: 3}, {GPA: 100, Len: 2}, {GPA: 200, Len: 1}}
	}
	if n, err := scatter(mem, parts(), []byte("abcdefgh")); n != 6 || err != nil {
		t.Fatalf("scatter: %d, %v", n, err)
	}
	p := make([]byte, 4)
	if n, err := gather(mem, parts(), p); n != 4 || err != nil || string(p) != "abcd" {
		t.Fatalf("gather: %d, %v, %q", n, err, p)
	}
	rest := skip(parts(), 4)
	if n, _ := gather(mem, rest, p); n != 2 || string(p[:n]) != "ef" {
		t.Fatalf("skip: %q", p[:n])
	}
	if rest := skip(parts(), 6); len(rest) != 0 {
		t.Fatalf("skip all: %v", rest)
	}
	at, rest := cutLast(parts())
	if at != 200 || size(rest) != 5 || len(rest) != 2 {
		t.Fatalf("cutLast: %d, %v", at, rest)
	}
	if at, rest = cutLast(rest); at != 101 || size(rest) != 4 {
		t.Fatalf("cutLast: %d, %v", at, rest)
	}
	outside := []guestmem.Range{{GPA: 1 << 30, Len: 1}}
	if _, err := gather(mem, outside, p); !errors.Is(err, guestmem.ErrRange) {
		t.Fatal(err)
	}
	if _, err := scatter(mem, outside, p); !errors.Is(err, guestmem.ErrRange) {
		t.Fatal(err)
	}
}
