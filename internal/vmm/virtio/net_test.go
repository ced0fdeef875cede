package virtio

import (
	"bytes"
	"errors"
	"os"
	"testing"

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

func netPacket(f []byte) []byte { return append(make([]byte, netHeaderLen), f...) }

// recvFrame reads one message at the host's end.
func recvFrame(t testing.TB, f *os.File) []byte {
	t.Helper()
	p := make([]byte, 4096)
	n, err := f.Read(p)
	if err != nil {
		t.Fatal(err)
	}
	return p[:n]
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
			flags, gso := netPacket(frame(60, 1)), netPacket(frame(60, 1))
			flags[0], gso[1] = 1, 1
			for _, bad := range [][]byte{p[:5], netPacket(frame(13, 1)), netPacket(frame(1519, 1)), flags, gso} {
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
			want := NetStats{TxFrames: 3, TxBytes: 100 + 14 + 1518, TxDropped: 5}
			if got := n.Stats(); got != want {
				t.Fatalf("stats %+v, want %+v", got, want)
			}
		})
	}
}

func TestNetTransmitToFullSocket(t *testing.T) {
	n, host := newNet(t, unix.SOCK_DGRAM)
	g := startGuest(t, n)
	b := g.out(netPacket(frame(1000, 1)))
	sent := 0
	for n.Stats().TxDropped == 0 {
		g.send(netTx, b)
		g.wait(netTx)
		sent++
	}
	for i := range sent - 1 {
		if got := recvFrame(t, host); len(got) != 1000 {
			t.Fatalf("frame %d of %d bytes", i, len(got))
		}
	}
	g.send(netTx, b)
	g.wait(netTx)
	if got := recvFrame(t, host); len(got) != 1000 {
		t.Fatalf("frame of %d bytes", len(got))
	}
	host.Close()
	g.send(netTx, b)
	g.wait(netTx)
	if n.Stats().TxDropped != 2 {
		t.Fatalf("stats %+v", n.Stats())
	}
}

func TestNetReceive(t *testing.T) {
	n, host := newNet(t, unix.SOCK_DGRAM)
	g := startGuest(t, n)
	hdr, body := g.in(netHeaderLen), g.in(2000)
	write := func(f []byte) {
		t.Helper()
		if _, err := host.Write(f); err != nil {
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

func TestNetBroken(t *testing.T) {
	for _, q := range []int{netRx, netTx} {
		n, host := newNet(t, unix.SOCK_DGRAM)
		g := startGuest(t, n)
		if _, err := host.Write(frame(60, 1)); err != nil {
			t.Fatal(err)
		}
		g.send(q, buf{gpa: 1 << 40, len: 100, write: q == netRx})
		g.waitIRQ()
		g.wantBroken()
		g.start(n.Features()|transportFeatures, 16) // and is well after a reset
		g.send(netRx, g.in(2000))
		if _, used := g.wait(netRx); used != 72 {
			t.Fatalf("used %d", used)
		}
	}
}

// TestNetHostGone: the receiver ends, the device stays.
func TestNetHostGone(t *testing.T) {
	n, host := newNet(t, unix.SOCK_SEQPACKET)
	g := startGuest(t, n)
	g.send(netRx, g.in(2000))
	host.Close()
	<-n.rxDone
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
	if _, err := host.Write(frame(62, 1)); err != nil {
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
	if _, err := host2.Write(frame(63, 1)); err != nil {
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
			if err == nil && k != 60+i {
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
		g.next = 1 << 20
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
