package virtio

import (
	"bytes"
	"encoding/binary"
	"os"
	"testing"

	"agentrun.dev/internal/network/wire"
	"golang.org/x/sys/unix"
)

func TestNetReceive(t *testing.T) {
	n, host := newNet(t, unix.SOCK_DGRAM)
	g := newGuest(t, n)
	g.start(netMTU|netMAC|transportFeatures, 16)
	hdr, body := g.in(netHeaderLen), g.in(2000)
	write := func(f []byte) {
		t.Helper()
		if _, err := host.Write(message(f)); err != nil {
			t.Fatal(err)
		}
	}
	write(frame(60, 3)) // before there is a buffer: it waits in the socket
	g.send(netRx, hdr, body)
	if _, used := g.wait(netRx); used != 72 {
		t.Fatalf("used %d", used)
	}
	if got := g.get(hdr.gpa, netHeaderLen); !bytes.Equal(got, []byte{0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1, 0}) {
		t.Fatalf("header %x", got)
	}
	if got := g.get(body.gpa, 61); !bytes.Equal(got, append(frame(60, 3), 0)) {
		t.Fatalf("frame %x", got)
	}
	// Too short, too long, empty; then one that is right.
	g.send(netRx, hdr, body)
	for _, k := range []int{13, 1519, 3000, 0, 1518} {
		write(frame(k, 4))
	}
	if _, used := g.wait(netRx); used != 1518+netHeaderLen {
		t.Fatalf("used %d", used)
	}
	// A buffer that is too small keeps its place.
	g.send(netRx, g.in(40))
	write(frame(60, 5))
	write(frame(20, 6))
	if _, used := g.wait(netRx); used != 32 {
		t.Fatalf("used %d", used)
	}
	want := NetStats{RxFrames: 3, RxBytes: 60 + 1518 + 20, RxDropped: 5}
	if got := n.Stats(); got != want {
		t.Fatalf("stats %+v, want %+v", got, want)
	}
	g.wantHealthy()
}

// writeMessage sends a message to the guest.
func writeMessage(t *testing.T, host *os.File, h wire.Header, f []byte) {
	t.Helper()
	if _, err := host.Write(messageOf(h, f)); err != nil {
		t.Fatal(err)
	}
}

// collect takes the buffers of one frame out of the ring and returns their
// content behind the header.
func (g *guest) collect(bufs map[uint32]buf) (wire.Header, []byte) {
	g.t.Helper()
	var all []byte
	for left := 1; left > 0; left-- {
		head, used := g.wantUsed(netRx)
		if used > bufs[head].len {
			g.t.Fatalf("%d bytes in a buffer of %d", used, bufs[head].len)
		}
		if all == nil {
			left = int(binary.LittleEndian.Uint16(g.get(bufs[head].gpa+wire.HeaderLen, 2)))
		}
		all = append(all, g.get(bufs[head].gpa, int(used))...)
	}
	return wire.Get(all), all[netHeaderLen:]
}

// TestNetReceiveMergeable: a guest that accepts frames in several buffers gets
// long frames whole, as soon as it has enough buffers.
func TestNetReceiveMergeable(t *testing.T) {
	n, host := newNet(t, unix.SOCK_DGRAM)
	g := startGuest(t, n)
	h, long := tso(40000)
	writeMessage(t, host, h, long)
	writeMessage(t, host, wire.Header{}, frame(60, 3))
	writeMessage(t, host, wire.Header{Flags: wire.NeedsChecksum, ChecksumStart: 14, ChecksumOffset: 6}, frame(70, 4))
	bufs := map[uint32]buf{}
	add := func(n int) {
		b := g.in(n)
		bufs[uint32(g.send(netRx, b))] = b
	}
	for range 9 {
		add(4200) // not enough for the first frame, which blocks all others
	}
	g.bus.Pause() // no frame moves now
	if _, _, ok := g.used(netRx); ok {
		t.Fatal("a part of a frame was given to the guest")
	}
	g.bus.Resume()
	for range 3 {
		add(4200)
	}
	for got := uint64(0); got < 3; got = n.Stats().RxFrames {
		g.waitIRQ()
	}
	if got, f := g.collect(bufs); got != h || !bytes.Equal(f, long) {
		t.Fatalf("%+v and %d bytes", got, len(f))
	}
	if got, f := g.collect(bufs); got != (wire.Header{}) || !bytes.Equal(f, frame(60, 3)) {
		t.Fatalf("%+v and %d bytes", got, len(f))
	}
	if got, f := g.collect(bufs); got.Flags != wire.NeedsChecksum || got.ChecksumOffset != 6 || !bytes.Equal(f, frame(70, 4)) {
		t.Fatalf("%+v and %d bytes", got, len(f))
	}
	if got, want := n.Stats(), (NetStats{RxFrames: 3, RxBytes: uint64(len(long)) + 130}); got != want {
		t.Fatalf("stats %+v, want %+v", got, want)
	}
}

// TestNetReceiveTooFewBuffers: a frame that does not fit into a full ring is
// lost, and the next one that fits arrives.
func TestNetReceiveTooFewBuffers(t *testing.T) {
	n, host := newNet(t, unix.SOCK_DGRAM)
	g := startGuest(t, n)
	h, long := tso(40000)
	bufs := map[uint32]buf{}
	for range 16 {
		b := g.in(1000)
		bufs[uint32(g.add(netRx, b))] = b
	}
	g.kick(netRx)
	writeMessage(t, host, h, long)
	writeMessage(t, host, wire.Header{}, frame(1400, 3))
	g.waitIRQ()
	if _, f := g.collect(bufs); !bytes.Equal(f, frame(1400, 3)) {
		t.Fatalf("%d bytes", len(f))
	}
	if got := n.Stats(); got.RxDropped != 1 || got.RxFrames != 1 {
		t.Fatalf("stats %+v", got)
	}
}

// TestNetReceiveInPieces: a frame in more pieces than the kernel accepts is lost;
// all others arrive.
func TestNetReceiveInPieces(t *testing.T) {
	n, host := newNet(t, unix.SOCK_DGRAM)
	g := newGuest(t, n)
	g.start(n.Features()|transportFeatures, 256)
	h, long := tso(2000)
	for range 9 {
		var pieces []buf
		for range 256 {
			pieces = append(pieces, buf{gpa: g.next, len: 1, write: true})
			g.next++
		}
		g.next = (g.next + 15) &^ 15
		g.addIndirect(netRx, pieces...)
	}
	g.kick(netRx)
	writeMessage(t, host, h, long)
	writeMessage(t, host, wire.Header{}, frame(100, 3))
	if _, used := g.wait(netRx); used != 100+netHeaderLen {
		t.Fatalf("used %d", used)
	}
	if got := n.Stats(); got.RxDropped != 1 || got.RxFrames != 1 {
		t.Fatalf("stats %+v", got)
	}
}

// TestNetReceiveForLess: a guest without offloads gets frames that need none, and
// none longer than its MTU, for all kinds of frames on the wire.
func TestNetReceiveForLess(t *testing.T) {
	for name, features := range map[string]uint64{
		"nothing": netMTU | netMAC, "checksums": netMTU | netMAC | netGuestCsum, "buffers": netMTU | netMAC | netMergeable,
		"TSO without checksums": netMTU | netMAC | netGuestTSO4,
	} {
		t.Run(name, func(t *testing.T) {
			n, host := newNet(t, unix.SOCK_DGRAM)
			g := newGuest(t, n)
			g.start(features|transportFeatures, 16)
			h, long := tso(40000)
			writeMessage(t, host, h, long)
			var data []byte
			for len(data) < 40000 {
				b := g.in(2000)
				g.send(netRx, b) // one at a time: the rest waits in the device
				_, used := g.wait(netRx)
				if got := g.get(b.gpa, netHeaderLen); !bytes.Equal(got, []byte{10: 1, 11: 0}) {
					t.Fatalf("header %x", got)
				}
				f := g.get(b.gpa+netHeaderLen, int(used)-netHeaderLen)
				if len(f) > 1514 || wholeSum(f) != 0 {
					t.Fatalf("a segment of %d bytes with the sum %#x", len(f), wholeSum(f))
				}
				data = append(data, f[54:]...)
				g.next = 2 << 20
			}
			if !bytes.Equal(data, long[54:]) {
				t.Fatal("other data arrived")
			}
			// A frame with an incomplete checksum, while the guest has no
			// buffer.
			h.GSO = wire.GSONone
			small := long[:54+1000]
			if features&netGuestCsum != 0 {
				return
			}
			writeMessage(t, host, h, small)
			b := g.in(2000)
			g.send(netRx, b)
			if _, used := g.wait(netRx); used != netHeaderLen+1054 {
				t.Fatalf("used %d", used)
			}
			if f := g.get(b.gpa+netHeaderLen, 1054); g.get(b.gpa, 1)[0] != 0 || bytes.Equal(f[50:52], small[50:52]) {
				t.Fatal("the checksum is still to be completed")
			}
			g.wantHealthy()
		})
	}
}

// wholeSum is the checksum of a TCP segment over IPv4: 0 if it is right.
func wholeSum(f []byte) uint16 {
	var sum uint32
	tcp := f[34:]
	for _, b := range [][]byte{f[26:34], {0, 6, byte(len(tcp) >> 8), byte(len(tcp))}, tcp} {
		for i := range b {
			sum += uint32(b[i]) << (8 * (1 - i%2))
		}
	}
	for sum > 0xffff {
		sum = sum>>16 + sum&0xffff
	}
	return ^uint16(sum)
}

// TestNetReceiveLies: messages with a false header are lost.
func TestNetReceiveLies(t *testing.T) {
	n, host := newNet(t, unix.SOCK_DGRAM)
	g := startGuest(t, n)
	h, long := tso(3000)
	notTCP := bytes.Clone(long)
	notTCP[23] = 17
	lies := [][]byte{
		{}, {1}, make([]byte, wire.HeaderLen), message(frame(13, 1)), message(frame(1519, 1)),
		messageOf(wire.Header{Flags: 4}, frame(60, 1)),
		messageOf(wire.Header{Flags: wire.NeedsChecksum, ChecksumStart: 60}, frame(60, 1)),
		messageOf(wire.Header{GSO: 3}, frame(60, 1)),
		messageOf(wire.Header{Flags: 1, GSO: wire.GSOTCPv4, ChecksumStart: 34, ChecksumOffset: 16}, long),
		messageOf(h, append(make([]byte, wire.MaxFrame-10), long[:11]...)),
	}
	for i, m := range lies {
		if _, err := host.Write(m); err != nil {
			t.Fatalf("message %d: %v", i, err)
		}
	}
	writeMessage(t, host, wire.Header{}, frame(61, 1))
	g.send(netRx, g.in(2000))
	if _, used := g.wait(netRx); used != 61+netHeaderLen {
		t.Fatalf("used %d", used)
	}
	if got := n.Stats().RxDropped; got != uint64(len(lies)) {
		t.Fatalf("%d of %d messages were dropped", got, len(lies))
	}
	// A guest that needs segmentation does not get an invalid segment either.
	g.start(netMTU|netMAC|transportFeatures, 16)
	writeMessage(t, host, h, notTCP)
	h.SegmentSize = 9000 // a segment longer than the MTU
	writeMessage(t, host, h, long)
	writeMessage(t, host, wire.Header{Flags: wire.DataValid}, frame(62, 1))
	b := g.in(2000)
	g.send(netRx, b)
	if _, used := g.wait(netRx); used != 62+netHeaderLen || g.get(b.gpa, 1)[0] != 0 {
		t.Fatalf("used %d", used)
	}
	if got := n.Stats().RxDropped; got != uint64(len(lies))+2 {
		t.Fatalf("%d messages were dropped", got)
	}
}

// TestNetReceiveSmallBuffer: a mergeable buffer without room for the header breaks
// the rules.
func TestNetReceiveSmallBuffer(t *testing.T) {
	n, host := newNet(t, unix.SOCK_DGRAM)
	g := startGuest(t, n)
	g.send(netRx, g.in(netHeaderLen-1))
	writeMessage(t, host, wire.Header{}, frame(60, 1))
	g.waitIRQ()
	g.wantBroken()
}

// TestNetIdleMemory: a card that has moved no frames holds no buffers, and
// neither does one that was reset.
func TestNetIdleMemory(t *testing.T) {
	n, host := newNet(t, unix.SOCK_DGRAM)
	g := newGuest(t, n)
	g.start(netMTU|netMAC|transportFeatures, 16)
	wantNone := func() {
		t.Helper()
		n.mu.Lock()
		defer n.mu.Unlock()
		if n.held != nil || n.buffers != nil || n.pieces != nil {
			t.Fatal("the card holds buffers")
		}
	}
	wantNone()
	h, long := tso(40000)
	writeMessage(t, host, h, long)
	g.send(netRx, g.in(2000))
	g.wait(netRx)
	g.writeReg(regStatus, 0)
	wantNone()
}
