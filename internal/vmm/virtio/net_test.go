package virtio

import (
	"bytes"
	"encoding/binary"
	"errors"
	"os"
	"runtime"
	"slices"
	"testing"
	"time"

	"agentrun.dev/internal/network/wire"
	"golang.org/x/sys/unix"
)

var testMAC = [6]byte{2, 0, 0, 0, 0, 9}

func newNet(t testing.TB, kind int) (*Net, *os.File) {
	t.Helper()
	a, b := socketpair(t, kind)
	n, err := NewNet(NetConfig{MAC: testMAC, MTU: 1500, Socket: a})
	if err != nil {
		t.Fatal(err)
	}
	return n, b
}

func frame(n int, fill byte) []byte { return bytes.Repeat([]byte{fill}, n) }

// netPacket is a frame as a driver passes it: after the device's header.
func netPacket(f []byte) []byte { return netPacketOf(wire.Header{}, f) }

func netPacketOf(h wire.Header, f []byte) []byte {
	p := append(make([]byte, netHeaderLen), f...)
	h.Put(p)
	return p
}

// message is a frame as it travels on the wire.
func message(f []byte) []byte { return messageOf(wire.Header{}, f) }

func messageOf(h wire.Header, f []byte) []byte {
	p := append(make([]byte, wire.HeaderLen), f...)
	h.Put(p)
	return p
}

// tso returns the header of a long TCP segment over IPv4, and its frame.
func tso(payload int) (wire.Header, []byte) {
	const ip, tcp = wire.EthernetLen, wire.EthernetLen + 20
	f := make([]byte, tcp+20+payload)
	f[12], f[13] = 8, 0
	f[ip], f[ip+9] = 0x45, 6
	binary.BigEndian.PutUint16(f[ip+2:], uint16(len(f)-ip))
	f[tcp+12] = 5 << 4
	for i := range payload {
		f[tcp+20+i] = byte(i >> 4)
	}
	return wire.Header{Flags: wire.NeedsChecksum, GSO: wire.GSOTCPv4, SegmentSize: 1400, ChecksumStart: tcp, ChecksumOffset: 16}, f
}

// readMessage reads one message at the host's end.
func readMessage(t testing.TB, f *os.File) (wire.Header, []byte) {
	t.Helper()
	p := make([]byte, wire.MaxMessage+1)
	n, err := f.Read(p)
	if err != nil {
		t.Fatal(err)
	}
	h, frame, err := wire.Parse(p[:n])
	if err != nil {
		t.Fatal(err)
	}
	return h, frame
}

// recvFrame reads a frame that needs no offload.
func recvFrame(t testing.TB, f *os.File) []byte {
	t.Helper()
	h, frame := readMessage(t, f)
	if h != (wire.Header{}) {
		t.Fatalf("header %+v", h)
	}
	return frame
}

// cut makes descriptors of at most n bytes of one packet.
func (g *guest) cut(p []byte, n int) (out []buf) {
	for c := range slices.Chunk(p, n) {
		out = append(out, g.out(c))
	}
	return out
}

// sendFar sends a packet from memory far from any ring, and waits for it.
func (g *guest) sendFar(q int, p []byte, n int) {
	g.t.Helper()
	defer func(next uint64) { g.next = next }(g.next)
	g.next = 2 << 20
	g.send(q, g.cut(p, n)...)
	g.wait(q)
}

func TestNetTransmit(t *testing.T) {
	for name, kind := range map[string]int{"dgram": unix.SOCK_DGRAM, "seqpacket": unix.SOCK_SEQPACKET} {
		t.Run(name, func(t *testing.T) {
			n, host := newNet(t, kind)
			g := startGuest(t, n)
			p := netPacket(frame(100, 7))
			g.send(netTx, g.out(p[:5]), g.out(p[5:40]), g.out(p[40:]))
			if _, used := g.wait(netTx); used != 0 {
				t.Fatalf("used %d", used)
			}
			if got := recvFrame(t, host); !bytes.Equal(got, frame(100, 7)) {
				t.Fatalf("frame of %d bytes", len(got))
			}
			for _, bad := range [][]byte{p[:5], netPacket(frame(13, 1)), netPacket(frame(1519, 1))} {
				g.send(netTx, g.out(bad))
				g.wait(netTx)
			}
			for _, good := range []int{14, 1518} {
				g.send(netTx, g.out(netPacket(frame(good, 2))))
				g.wait(netTx)
				if got := recvFrame(t, host); len(got) != good {
					t.Fatalf("frame of %d bytes, want %d", len(got), good)
				}
			}
			want := NetStats{TxFrames: 3, TxBytes: 100 + 14 + 1518, TxDropped: 3}
			if got := n.Stats(); got != want {
				t.Fatalf("stats %+v, want %+v", got, want)
			}
		})
	}
}

// TestNetTransmitOffloads: a guest's offload request arrives unchanged, and only
// if the feature was negotiated and the header is consistent.
func TestNetTransmitOffloads(t *testing.T) {
	n, host := newNet(t, unix.SOCK_DGRAM)
	g := startGuest(t, n)
	checksum := wire.Header{Flags: wire.NeedsChecksum, ChecksumStart: 34, ChecksumOffset: 16}
	long, longFrame := tso(60000)
	longest, longestFrame := tso(wire.MaxFrame - 54)
	for i, c := range []struct {
		h     wire.Header
		frame []byte
	}{{checksum, frame(600, 1)}, {long, longFrame}, {longest, longestFrame}} {
		g.sendFar(netTx, netPacketOf(c.h, c.frame), 5000)
		if h, f := readMessage(t, host); h != c.h || !bytes.Equal(f, c.frame) {
			t.Fatalf("message %d: %+v, %d bytes", i, h, len(f))
		}
	}
	lies := map[string]wire.Header{
		"flags":           {Flags: 4},
		"far checksum":    {Flags: wire.NeedsChecksum, ChecksumStart: 590, ChecksumOffset: 16},
		"UDP":             {Flags: wire.NeedsChecksum, GSO: 3, SegmentSize: 9, ChecksumStart: 34, ChecksumOffset: 6},
		"ECN":             {Flags: wire.NeedsChecksum, GSO: wire.GSOTCPv4 | wire.GSOECN, SegmentSize: 9, ChecksumStart: 34, ChecksumOffset: 16},
		"no checksum":     {GSO: wire.GSOTCPv4, SegmentSize: 9, ChecksumStart: 34, ChecksumOffset: 16},
		"segments of 0":   {Flags: wire.NeedsChecksum, GSO: wire.GSOTCPv4, ChecksumStart: 34, ChecksumOffset: 16},
		"headers too far": {Flags: wire.NeedsChecksum, GSO: wire.GSOTCPv6, SegmentSize: 9, ChecksumStart: 590, ChecksumOffset: 16},
	}
	refused := func(name string, p []byte) {
		t.Helper()
		before := n.Stats()
		g.sendFar(netTx, p, 8000)
		if got := n.Stats(); got.TxDropped != before.TxDropped+1 || got.TxFrames != before.TxFrames {
			t.Errorf("%s: stats %+v after %+v", name, got, before)
		}
	}
	for name, h := range lies {
		refused(name, netPacketOf(h, frame(600, 1)))
	}
	refused("too long", netPacketOf(long, append(longestFrame, 0)))
	refused("long without segments", netPacketOf(checksum, longFrame))

	for name, c := range map[string]struct {
		without uint64
		h       wire.Header
	}{"checksum": {netOffloads, checksum}, "TSO": {netHostTSO4, long}, "TSO6": {netHostTSO6, wire.Header{
		Flags: wire.NeedsChecksum, GSO: wire.GSOTCPv6, SegmentSize: 1400, ChecksumStart: 54, ChecksumOffset: 16,
	}}} {
		g.start(n.Features()&^c.without|transportFeatures, 16)
		refused(name+" that was not negotiated", netPacketOf(c.h, frame(600, 1)))
	}
	valid := netPacketOf(wire.Header{Flags: wire.DataValid}, frame(60, 1))
	g.send(netTx, g.out(valid))
	g.wait(netTx)
	recvFrame(t, host) // flags that only a device may set are not passed on
	g.wantHealthy()
}

// fillWire makes count numbered frames available. It returns when the device has
// filled the wire, whose other end is not read.
func fillWire(t *testing.T, g *guest, n *Net, count int) {
	t.Helper()
	for i := range count {
		g.add(netTx, g.out(netPacket(frame(1000+i, byte(i)))))
	}
	g.kick(netTx)
	fd := int(n.socket.Fd())
	if err := unix.SetNonblock(fd, true); err != nil { // Fd made it blocking
		t.Fatal(err)
	}
	room, err := unix.GetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_SNDBUF)
	for began := time.Now(); err == nil; runtime.Gosched() {
		var queued int
		if queued, err = unix.IoctlGetInt(fd, unix.SIOCOUTQ); queued >= room {
			return
		}
		if time.Since(began) > patience {
			t.Fatalf("%d of %d bytes are in the wire", queued, room)
		}
	}
	t.Fatal(err)
}

// wantFrames reads numbered frames and expects no others.
func wantFrames(t *testing.T, host *os.File, from, to int) {
	t.Helper()
	for i := from; i < to; i++ {
		if got := recvFrame(t, host); !bytes.Equal(got, frame(1000+i, byte(i))) {
			t.Fatalf("frame %d has %d bytes of %d", i, len(got), got[0])
		}
	}
}

// TestNetTransmitWaits: a full wire makes the guest wait. No frame is lost when
// the wire is read again, nor by a pause, a reset or another wire.
func TestNetTransmitWaits(t *testing.T) {
	const count = 250
	begin := func(t *testing.T) (*Net, *os.File, *guest) {
		n, host := newNet(t, unix.SOCK_DGRAM)
		g := newGuest(t, n)
		g.start(n.Features()|transportFeatures, 256)
		fillWire(t, g, n, count)
		return n, host, g
	}
	lostNone := func(t *testing.T, n *Net) {
		t.Helper()
		if got := n.Stats(); got.TxDropped != 0 || got.TxFrames != count {
			t.Fatalf("stats %+v", got)
		}
	}
	t.Run("read", func(t *testing.T) {
		n, host, g := begin(t)
		wantFrames(t, host, 0, count)
		for range count {
			g.wait(netTx)
		}
		lostNone(t, n)
	})
	t.Run("pause", func(t *testing.T) {
		n, host, g := begin(t)
		g.bus.Pause()
		sent := int(n.Stats().TxFrames)
		wantFrames(t, host, 0, sent)
		if got := n.Stats().TxFrames; got != uint64(sent) {
			t.Fatalf("%d frames moved in a pause", got-uint64(sent))
		}
		g.bus.Resume()
		wantFrames(t, host, sent, count)
	})
	t.Run("save", func(t *testing.T) {
		n, host, g := begin(t)
		s, state := g.save(), n.Save()
		sent := int(state.Stats.TxFrames)
		fork, forkHost := newNet(t, unix.SOCK_DGRAM)
		if err := fork.Restore(state); err != nil {
			t.Fatal(err)
		}
		g.bus.Close()
		g.restore(fork, s)
		g.bus.Resume()
		wantFrames(t, host, 0, sent)
		wantFrames(t, forkHost, sent, count)
		lostNone(t, fork)
	})
	t.Run("reset", func(t *testing.T) {
		n, host, g := begin(t)
		g.writeReg(regStatus, 0) // returns when no pump waits
		sent := int(n.Stats().TxFrames)
		g.start(n.Features()|transportFeatures, 16)
		wantFrames(t, host, 0, sent)
		g.send(netTx, g.out(netPacket(frame(99, 1))))
		if got := recvFrame(t, host); len(got) != 99 {
			t.Fatalf("frame of %d bytes", len(got))
		}
	})
	t.Run("plug", func(t *testing.T) {
		n, host, g := begin(t)
		a, b := socketpair(t, unix.SOCK_DGRAM)
		old, err := n.Plug(a)
		if err != nil {
			t.Fatal(err)
		}
		sent := 0
		for ; ; sent++ { // count the frames in the old wire
			if err := host.SetReadDeadline(time.Unix(1, 0)); err != nil {
				t.Fatal(err)
			}
			raw, err := host.SyscallConn()
			if err != nil {
				t.Fatal(err)
			}
			var k int
			if ctlErr := raw.Control(func(fd uintptr) { k, err = unix.Read(int(fd), make([]byte, 2000)) }); ctlErr != nil {
				t.Fatal(ctlErr)
			}
			if err != nil {
				break
			}
			if k != wire.HeaderLen+1000+sent {
				t.Fatalf("message %d has %d bytes", sent, k)
			}
		}
		old.Close()
		wantFrames(t, b, sent, count)
		lostNone(t, n)
		if _, err := b.Write(message(frame(77, 1))); err != nil {
			t.Fatal(err)
		}
		g.send(netRx, g.in(2000))
		if _, used := g.wait(netRx); used != 77+netHeaderLen {
			t.Fatalf("used %d", used)
		}
		if _, err := n.Plug(old); err == nil {
			t.Fatal("a closed socket was plugged in")
		}
		g.send(netTx, g.out(netPacket(frame(55, 1))))
		if got := recvFrame(t, b); len(got) != 55 {
			t.Fatalf("frame of %d bytes", len(got))
		}
	})
}

// TestNetTransmitToNobody: frames for a wire whose other end is closed are
// lost.
func TestNetTransmitToNobody(t *testing.T) {
	n, host := newNet(t, unix.SOCK_DGRAM)
	g := startGuest(t, n)
	host.Close()
	for range 2 {
		g.send(netTx, g.out(netPacket(frame(60, 1))))
		g.wait(netTx)
	}
	if got := n.Stats(); got.TxDropped != 2 || got.TxFrames != 0 {
		t.Fatalf("stats %+v", got)
	}
	g.wantHealthy()
}

func TestNetBroken(t *testing.T) {
	for _, q := range []int{netRx, netTx} {
		n, host := newNet(t, unix.SOCK_DGRAM)
		g := startGuest(t, n)
		if _, err := host.Write(message(frame(60, 1))); err != nil {
			t.Fatal(err)
		}
		g.send(q, buf{gpa: 1 << 40, len: 100, write: q == netRx})
		g.waitIRQ()
		g.wantBroken()
		g.start(n.Features()|transportFeatures, 16) // the device works after a reset
		g.send(netRx, g.in(2000))
		if _, used := g.wait(netRx); used != 72 {
			t.Fatalf("used %d", used)
		}
	}
}

// TestNetHostGone: if the host closes its end, the receiver ends and the device
// stays.
func TestNetHostGone(t *testing.T) {
	n, host := newNet(t, unix.SOCK_SEQPACKET)
	g := startGuest(t, n)
	g.send(netRx, g.in(2000))
	host.Close()
	n.rx.wait()
	g.send(netTx, g.out(netPacket(frame(60, 1))))
	g.wait(netTx)
	g.wantHealthy()
}

func TestNetConfigSpace(t *testing.T) {
	n, _ := newNet(t, unix.SOCK_DGRAM)
	g := newGuest(t, n)
	got := make([]byte, 8)
	g.bus.Read(regConfig, got)
	if !bytes.Equal(got[:6], testMAC[:]) || g.readReg(regConfig+8)>>16 != 1500 {
		t.Fatalf("config %x", got)
	}
	g.writeReg(regConfig, 0)
	if _, err := NewNet(NetConfig{MTU: 67}); err == nil {
		t.Fatal("MTU 67 was accepted")
	}
	f, err := os.Open(os.DevNull)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := NewNet(NetConfig{MTU: 1500, Socket: f}); err == nil {
		t.Fatal("a file that cannot be polled was accepted")
	}
	f.Close()
	if _, err := NewNet(NetConfig{MTU: 1500, Socket: f}); err == nil {
		t.Fatal("a closed file was accepted")
	}
	n.socket.Close()
	g.start(n.Features()|transportFeatures, 16)
	g.wantBroken()
}

func TestNetSaveRestore(t *testing.T) {
	n, host := newNet(t, unix.SOCK_DGRAM)
	g := startGuest(t, n)
	g.send(netTx, g.out(netPacket(frame(60, 1))))
	g.wait(netTx)
	recvFrame(t, host)
	s := g.save()
	g.send(netTx, g.out(netPacket(frame(61, 1))))
	g.send(netRx, g.in(2000))
	if _, err := host.Write(message(frame(62, 1))); err != nil {
		t.Fatal(err)
	}
	state := n.Save()
	g.bus.Close() // all goroutines have ended
	for q := range 2 {
		if _, _, ok := g.used(q); ok {
			t.Fatal("works while paused")
		}
	}
	n2, host2 := newNet(t, unix.SOCK_DGRAM)
	if err := n2.Restore(state); err != nil {
		t.Fatal(err)
	}
	g.restore(n2, s)
	if _, err := host2.Write(message(frame(63, 1))); err != nil {
		t.Fatal(err)
	}
	g.bus.Resume()
	if got := recvFrame(t, host2); len(got) != 61 {
		t.Fatalf("frame of %d bytes", len(got))
	}
	if _, used := g.wait(netRx); used != 63+netHeaderLen {
		t.Fatalf("used %d", used)
	}
	g.wait(netTx)
	if got := n2.Stats(); got.TxFrames != 2 || got.RxFrames != 1 {
		t.Fatalf("stats %+v", got)
	}
	state.Config[0]++
	if err := n2.Restore(state); err == nil {
		t.Fatal("another address was accepted")
	}
}

// TestNetRestoreOld: a driver that was saved before the card had offloads
// continues with the features that it knew.
func TestNetRestoreOld(t *testing.T) {
	n, _ := newNet(t, unix.SOCK_DGRAM)
	g := newGuest(t, n)
	g.start(netMTU|netMAC|transportFeatures, 16)
	s, state := g.save(), n.Save()
	g.bus.Close()
	n, host := newNet(t, unix.SOCK_DGRAM)
	if err := n.Restore(state); err != nil {
		t.Fatal(err)
	}
	g.restore(n, s)
	h, long := tso(1500)
	if _, err := host.Write(messageOf(h, long)); err != nil {
		t.Fatal(err)
	}
	g.bus.Resume()
	for _, want := range []uint32{1400, 100} {
		g.send(netRx, g.in(2000))
		if _, used := g.wait(netRx); used != netHeaderLen+54+want {
			t.Fatalf("used %d", used)
		}
	}
}

// TestNetPauseWhileBusy pauses and resumes under traffic in both directions:
// no frame is lost, and none moves during a pause.
func TestNetPauseWhileBusy(t *testing.T) {
	n, host := newNet(t, unix.SOCK_SEQPACKET)
	g := startGuest(t, n)
	const frames = 200
	done := make(chan error, 1)
	go func() {
		p := make([]byte, 4096)
		for i := range frames {
			k, err := host.Read(p)
			if err == nil && k != wire.HeaderLen+60+i {
				err = errors.New("frame lost or out of order")
			}
			if err == nil {
				_, err = host.Write(p[:k])
			}
			if err != nil {
				done <- err
				return
			}
		}
		done <- nil
	}()
	rx := g.in(2000)
	for i := range frames {
		g.next = 2 << 20
		g.send(netRx, rx)
		g.send(netTx, g.out(netPacket(frame(60+i, byte(i)))))
		if i%10 == 0 {
			g.bus.Pause()
			a, b := g.rings[netRx].used, g.rings[netTx].used
			before := [][]byte{g.get(a, 128), g.get(b, 128)}
			stats := n.Stats()
			if n.Stats() != stats || !bytes.Equal(g.get(a, 128), before[0]) || !bytes.Equal(g.get(b, 128), before[1]) {
				t.Fatal("something moved")
			}
			g.bus.Resume()
		}
		if _, used := g.wait(netRx); used != uint32(60+i+netHeaderLen) {
			t.Fatalf("used %d", used)
		}
		if got := g.get(rx.gpa+netHeaderLen, 1); got[0] != byte(i) {
			t.Fatalf("frame %d holds %d", i, got[0])
		}
		g.wait(netTx)
	}
	if err := <-done; err != nil {
		t.Fatal(err)
	}
}
