package virtio

import (
	"bytes"
	"encoding/binary"
	"errors"
	"sync"
	"testing"
)

func blkHeader(kind uint32, sector uint64) []byte {
	p := binary.LittleEndian.AppendUint32(nil, kind)
	p = binary.LittleEndian.AppendUint32(p, 0)
	return binary.LittleEndian.AppendUint64(p, sector)
}

func blkSegment(sector uint64, count, flags uint32) []byte {
	p := binary.LittleEndian.AppendUint64(nil, sector)
	p = binary.LittleEndian.AppendUint32(p, count)
	return binary.LittleEndian.AppendUint32(p, flags)
}

// request sends a chain. It returns the status byte, which is the last byte of
// the last buffer, and the used length.
func (g *guest) request(bufs ...buf) (status byte, n uint32) {
	g.t.Helper()
	last := bufs[len(bufs)-1]
	at := last.gpa + uint64(last.len) - 1
	g.put(at, []byte{0xee})
	head := g.send(0, bufs...)
	h, n := g.wait(0)
	if h != uint32(head) {
		g.t.Fatalf("used head %d, want %d", h, head)
	}
	return g.get(at, 1)[0], n
}

func newDisk(sectors int) *fakeDisk {
	d := &fakeDisk{data: make([]byte, sectors*SectorSize)}
	for i := range d.data {
		d.data[i] = byte(i / SectorSize)
	}
	return d
}

func TestBlockReadWrite(t *testing.T) {
	d := newDisk(16)
	b := NewBlock(BlockConfig{Disk: d, ID: "disk-0123456789-and-more"})
	g := startGuest(t, b)
	in := g.in(1024)
	status, n := g.request(g.out(blkHeader(blkIn, 3)), in, g.in(1))
	if status != blkOK || n != 1025 {
		t.Fatalf("read: status %d, used %d", status, n)
	}
	if got := g.get(in.gpa, 1024); got[0] != 3 || got[1023] != 4 {
		t.Fatalf("read %d … %d", got[0], got[1023])
	}
	// The same with a framing that no driver uses (§2.7.4.1): the header in
	// pieces, data and status in one buffer.
	h := blkHeader(blkIn, 15)
	in = g.in(513)
	if status, n := g.request(g.out(h[:1]), g.out(h[1:9]), g.out(h[9:]), in); status != blkOK || n != 513 {
		t.Fatalf("odd framing: status %d, used %d", status, n)
	}
	if got := g.get(in.gpa, 512); got[0] != 15 || got[511] != 15 {
		t.Fatalf("read %d … %d", got[0], got[511])
	}
	data := bytes.Repeat([]byte("agentrun"), 128)
	if status, n := g.request(g.out(append(blkHeader(blkOut, 14), data[:100]...)), g.out(data[100:]), g.in(1)); status != blkOK || n != 1 {
		t.Fatalf("write: status %d, used %d", status, n)
	}
	if !bytes.Equal(d.bytes(14*SectorSize, 16*SectorSize), data) {
		t.Fatal("write did not arrive")
	}
	in = g.in(20)
	if status, n := g.request(g.out(blkHeader(blkGetID, 0)), in, g.in(1)); status != blkOK || n != 21 {
		t.Fatalf("id: status %d, used %d", status, n)
	}
	if got := string(g.get(in.gpa, 20)); got != "disk-0123456789-and-" {
		t.Fatalf("id %q", got)
	}
	want := BlockStats{Requests: 4, ReadBytes: 1536, WrittenBytes: 1024}
	if got := b.Stats(); got != want {
		t.Fatalf("stats %+v, want %+v", got, want)
	}
}

func TestBlockConfigSpace(t *testing.T) {
	g := newGuest(t, NewBlock(BlockConfig{Disk: newDisk(16)}))
	for off, want := range map[uint64]uint32{
		0: 16, 4: 0, 8: 0, 12: 254, 20: 512, 36: blkMaxDiscardSectors, 40: 32, 44: 1,
		48: blkMaxZeroSectors, 52: 32, 56: 1, 60: 0, 0xe00: 0,
	} {
		if got := g.readReg(regConfig + off); got != want {
			t.Errorf("config %d = %d, want %d", off, got, want)
		}
	}
	g.writeReg(regConfig, 99)
	if g.readReg(regConfig) != 16 {
		t.Error("capacity was overwritten")
	}
}

func TestBlockFlush(t *testing.T) {
	d := newDisk(4)
	g := startGuest(t, NewBlock(BlockConfig{Disk: d}))
	g.request(g.out(blkHeader(blkOut, 0)), g.out(make([]byte, 512)), g.in(1))
	if d.log() != "write" {
		t.Fatalf("with F_FLUSH a write is not flushed: %s", d.log())
	}
	if status, _ := g.request(g.out(blkHeader(blkFlushRequest, 0)), g.in(1)); status != blkOK || d.log() != "write flush" {
		t.Fatalf("flush: status %d, %s", status, d.log())
	}
	d.behave(errors.New("dead"), false)
	if status, _ := g.request(g.out(blkHeader(blkFlushRequest, 0)), g.in(1)); status != blkIOError {
		t.Fatalf("failed flush: status %d", status)
	}
	// Without F_FLUSH every write is durable when it completes (§5.2.6.2).
	d = newDisk(4)
	g = newGuest(t, NewBlock(BlockConfig{Disk: d}))
	g.start(FeatureVersion1, 16)
	g.request(g.out(blkHeader(blkOut, 0)), g.out(make([]byte, 512)), g.in(1))
	if d.log() != "write flush" {
		t.Fatalf("write through: %s", d.log())
	}
}

func TestBlockBadRequests(t *testing.T) {
	huge := ^uint64(0)
	tests := []struct {
		name   string
		header []byte
		out    []byte
		in     int // data bytes before the status
		want   byte
	}{
		{"unknown type", blkHeader(99, 0), nil, 0, blkUnsupported},
		{"short header", blkHeader(blkIn, 0)[:15], nil, 512, blkIOError},
		{"read of part of a sector", blkHeader(blkIn, 0), nil, 511, blkIOError},
		{"read of nothing", blkHeader(blkIn, 0), nil, 0, blkOK},
		{"read at the end", blkHeader(blkIn, 15), nil, 512, blkOK},
		{"read over the end", blkHeader(blkIn, 15), nil, 1024, blkIOError},
		{"read beyond the end", blkHeader(blkIn, 16), nil, 512, blkIOError},
		{"read far beyond", blkHeader(blkIn, huge), nil, 512, blkIOError},
		{"read with overflow", blkHeader(blkIn, huge/512), nil, 512, blkIOError},
		{"write of part of a sector", blkHeader(blkOut, 0), make([]byte, 100), 0, blkIOError},
		{"write of nothing", blkHeader(blkOut, 0), nil, 0, blkOK},
		{"write over the end", blkHeader(blkOut, 15), make([]byte, 1024), 0, blkIOError},
		{"write far beyond", blkHeader(blkOut, huge), make([]byte, 512), 0, blkIOError},
		{"short id", blkHeader(blkGetID, 0), nil, 19, blkIOError},
		{"discard", blkHeader(blkDiscardReq, 0), blkSegment(1, 2, 0), 0, blkOK},
		{"discard nothing", blkHeader(blkDiscardReq, 0), blkSegment(1, 0, 0), 0, blkOK},
		{"discard without segments", blkHeader(blkDiscardReq, 0), nil, 0, blkIOError},
		{"discard part of a segment", blkHeader(blkDiscardReq, 0), make([]byte, 17), 0, blkIOError},
		{"discard too many segments", blkHeader(blkDiscardReq, 0), make([]byte, 16*(blkMaxSegments+1)), 0, blkIOError},
		{"discard over the end", blkHeader(blkDiscardReq, 0), blkSegment(15, 2, 0), 0, blkIOError},
		{"discard far beyond", blkHeader(blkDiscardReq, 0), blkSegment(huge, 2, 0), 0, blkIOError},
		{"discard too much", blkHeader(blkDiscardReq, 0), blkSegment(0, blkMaxDiscardSectors+1, 0), 0, blkIOError},
		{"discard with unmap", blkHeader(blkDiscardReq, 0), blkSegment(0, 1, 1), 0, blkUnsupported},
		{"zero", blkHeader(blkWriteZeroesRq, 0), blkSegment(0, 1, 0), 0, blkOK},
		{"zero with unmap", blkHeader(blkWriteZeroesRq, 0), blkSegment(0, 1, 1), 0, blkOK},
		{"zero with unknown flag", blkHeader(blkWriteZeroesRq, 0), blkSegment(0, 1, 2), 0, blkUnsupported},
		{"zero too much", blkHeader(blkWriteZeroesRq, 0), blkSegment(0, blkMaxZeroSectors+1, 0), 0, blkIOError},
		{"second segment bad", blkHeader(blkWriteZeroesRq, 0), append(blkSegment(0, 1, 0), blkSegment(16, 1, 0)...), 0, blkIOError},
	}
	d := newDisk(16)
	g := startGuest(t, NewBlock(BlockConfig{Disk: d}))
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			g.t = t
			before := d.log()
			bufs := []buf{g.out(append(append([]byte{}, tt.header...), tt.out...))}
			status, n := g.request(append(bufs, g.in(tt.in+1))...)
			if status != tt.want {
				t.Fatalf("status %d, want %d", status, tt.want)
			}
			if want := uint32(tt.in + 1); status == blkOK && n != want || status != blkOK && tt.in > 0 && n != 0 {
				t.Fatalf("used %d", n)
			}
			if status != blkOK && d.log() != before {
				t.Fatalf("a refused request reached the disk: %s", d.log())
			}
			g.wantHealthy()
		})
	}
	g.t = t
}

func TestBlockDiskErrors(t *testing.T) {
	d := newDisk(4)
	d.err = errors.New("dead")
	b := NewBlock(BlockConfig{Disk: d})
	g := startGuest(t, b)
	read := func() byte {
		s, n := g.request(g.out(blkHeader(blkIn, 0)), g.in(512), g.in(1))
		if s != blkOK && n == 513 {
			t.Fatalf("status %d, used %d", s, n)
		}
		return s
	}
	if s := read(); s != blkIOError {
		t.Fatalf("read: %d", s)
	}
	if s, _ := g.request(g.out(blkHeader(blkOut, 0)), g.out(make([]byte, 512)), g.in(1)); s != blkIOError {
		t.Fatalf("write: %d", s)
	}
	if s, _ := g.request(g.out(append(blkHeader(blkDiscardReq, 0), blkSegment(0, 1, 0)...)), g.in(1)); s != blkIOError {
		t.Fatalf("discard: %d", s)
	}
	d.behave(errors.ErrUnsupported, false)
	if s, _ := g.request(g.out(append(blkHeader(blkDiscardReq, 0), blkSegment(0, 1, 0)...)), g.in(1)); s != blkUnsupported {
		t.Fatalf("unsupported discard: %d", s)
	}
	d.behave(nil, true)
	if s := read(); s != blkIOError {
		t.Fatalf("short read: %d", s)
	}
	if got := b.Stats().Errors; got != 5 {
		t.Fatalf("%d errors", got)
	}
}

func TestBlockReadOnly(t *testing.T) {
	d := newDisk(4)
	d.readOnly = true
	b := NewBlock(BlockConfig{Disk: d})
	if b.Features()&(blkReadOnly|blkDiscard|blkWriteZeroes) != blkReadOnly {
		t.Fatalf("features %#x", b.Features())
	}
	g := startGuest(t, b)
	for name, out := range map[string][]byte{
		"write":   append(blkHeader(blkOut, 0), make([]byte, 512)...),
		"discard": append(blkHeader(blkDiscardReq, 0), blkSegment(0, 1, 0)...),
		"zero":    append(blkHeader(blkWriteZeroesRq, 0), blkSegment(0, 1, 0)...),
	} {
		if s, _ := g.request(g.out(out), g.in(1)); s != blkIOError {
			t.Errorf("%s: status %d", name, s)
		}
	}
	if d.log() != "" {
		t.Fatalf("disk was called: %s", d.log())
	}
	if s, _ := g.request(g.out(blkHeader(blkIn, 0)), g.in(512), g.in(1)); s != blkOK {
		t.Fatalf("read: %d", s)
	}
}

func TestBlockFeatureNotNegotiated(t *testing.T) {
	g := newGuest(t, NewBlock(BlockConfig{Disk: newDisk(4)}))
	g.start(FeatureVersion1, 16)
	if s, _ := g.request(g.out(append(blkHeader(blkDiscardReq, 0), blkSegment(0, 1, 0)...)), g.in(1)); s != blkUnsupported {
		t.Fatalf("status %d", s)
	}
}

// TestBlockBroken: without a status byte, or with a broken ring, the device
// stops until it is reset, and then works.
func TestBlockBroken(t *testing.T) {
	for name, breakIt := range map[string]func(*guest){
		"no status": func(g *guest) { g.send(0, g.out(blkHeader(blkIn, 0))) },
		"loop": func(g *guest) {
			g.setDesc(g.rings[0], 0, 0x8000, 1, descNext, 0)
			g.publish(g.rings[0], 0)
			g.kick(0)
		},
	} {
		t.Run(name, func(t *testing.T) {
			d := newDisk(4)
			b := NewBlock(BlockConfig{Disk: d})
			g := startGuest(t, b)
			breakIt(g)
			g.waitIRQ()
			g.wantBroken()
			g.send(0, g.out(blkHeader(blkIn, 0)), g.in(512), g.in(1))
			b.Pause() // waits until the worker has seen it
			if _, _, ok := g.used(0); ok || d.log() != "" {
				t.Fatal("a broken device works")
			}
			b.Resume()
			g.start(b.Features()|transportFeatures, 16)
			if s, _ := g.request(g.out(blkHeader(blkIn, 0)), g.in(512), g.in(1)); s != blkOK {
				t.Fatalf("after reset: %d", s)
			}
		})
	}
}

// TestBlockGuestChangesItsMind: descriptors and headers change while requests
// run. In any case the device stays inside its disk and memory, and a reset
// makes it work again.
func TestBlockGuestChangesItsMind(t *testing.T) {
	b := NewBlock(BlockConfig{Disk: newDisk(4)})
	g := startGuest(t, b)
	header, data, status := g.out(blkHeader(blkIn, 0)), g.in(512), g.in(1)
	rings := g.next
	stop := make(chan struct{})
	var wg sync.WaitGroup
	wg.Go(func() {
		headers := [][]byte{blkHeader(blkIn, 0), blkHeader(blkOut, 3), blkHeader(blkIn, 1<<60), blkHeader(blkWriteZeroesRq, 0)}
		addrs := []uint64{data.gpa, 1 << 40, data.gpa, data.gpa}
		for i := 0; ; i++ {
			select {
			case <-stop:
				return
			default:
			}
			// The rings are always at the same place, see below.
			_ = g.mem.Write(header.gpa, headers[i%4])
			_ = g.mem.Write(rings+16, rawDesc(addrs[i%4], 512, descWrite|descNext, 2))
		}
	})
	resets := 0
	for range 500 {
		if g.readReg(regStatus)&statusNeedsReset != 0 || resets == 0 {
			g.next = rings
			if err := g.mem.Zero(rings, 1024); err != nil {
				t.Fatal(err)
			}
			g.start(b.Features()|transportFeatures, 16)
			resets++
		}
		g.rings[0].nextDesc = 0
		g.send(0, header, data, status)
		for { // wait for an answer, or for a device that asks for a reset
			if _, _, ok := g.used(0); ok || g.readReg(regStatus)&statusNeedsReset != 0 {
				break
			}
			g.waitIRQ()
		}
	}
	close(stop)
	wg.Wait()
	t.Logf("%d requests, %d resets, %+v", 500, resets, b.Stats())
}

// TestBlockPauseWhileBusy: Pause waits for the request in flight. The next
// request stays in the ring, survives save and restore, and is served by the
// new device.
func TestBlockPauseWhileBusy(t *testing.T) {
	d := newDisk(4)
	d.entered, d.proceed = make(chan struct{}), make(chan struct{})
	b := NewBlock(BlockConfig{Disk: d})
	g := startGuest(t, b)
	read := func() { g.send(0, g.out(blkHeader(blkIn, 1)), g.in(512), g.in(1)) }
	read()
	<-d.entered
	read() // while the first is in flight: Notify must not block
	paused := make(chan struct{})
	go func() {
		g.bus.Pause()
		close(paused)
	}()
	d.proceed <- struct{}{}
	// The worker may have begun the second before Pause got the lock.
	done := 1
	for waiting := true; waiting; {
		select {
		case <-d.entered:
			d.proceed <- struct{}{}
			done++
		case <-paused:
			waiting = false
		}
	}
	for range done {
		if _, n := g.wait(0); n != 513 {
			t.Fatalf("used %d", n)
		}
	}
	if _, _, ok := g.used(0); ok {
		t.Fatal("the device works while paused")
	}
	if done == 2 {
		read() // so that the ring holds one
	}
	g.kick(0)
	s, err := g.bus.Save()
	if err != nil {
		t.Fatal(err)
	}
	d2 := newDisk(8)
	b2 := NewBlock(BlockConfig{Disk: d2, ID: "other"})
	if err := b2.Restore(b.Save()); err != nil {
		t.Fatal(err)
	}
	g.restore(b2, s)
	if g.readReg(regConfig) != 4 {
		t.Fatal("the guest's disk grew")
	}
	if d2.log() != "" {
		t.Fatal("the restored device did not wait for Resume")
	}
	g.bus.Resume()
	if _, n := g.wait(0); n != 513 || d2.log() != "read" {
		t.Fatalf("used %d, %s", n, d2.log())
	}
}

func TestBlockRestoreRefuses(t *testing.T) {
	s := NewBlock(BlockConfig{Disk: newDisk(8)}).Save()
	if err := NewBlock(BlockConfig{Disk: newDisk(7)}).Restore(s); err == nil {
		t.Error("a smaller disk was accepted")
	}
	ro := newDisk(8)
	ro.readOnly = true
	if err := NewBlock(BlockConfig{Disk: ro}).Restore(s); err == nil {
		t.Error("a read-only disk was accepted")
	}
}
