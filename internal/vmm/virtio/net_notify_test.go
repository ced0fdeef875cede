package virtio

import (
	"encoding/binary"
	"runtime"
	"sync"
	"testing"
	"time"

	"agentrun.dev/internal/network/wire"
	"golang.org/x/sys/unix"
)

// wantsNotify reports whether the device wants to be notified of buffers (§2.7.10).
func (g *guest) wantsNotify(q int) bool {
	g.t.Helper()
	flags, err := g.mem.LoadUint16(g.rings[q].used)
	if err != nil {
		g.t.Fatal(err)
	}
	return flags&usedNoNotify == 0
}

// withoutPumps ends the goroutines of a started device, which then continues as if they
// ran. After that only the thread that notifies the device can send frames.
func withoutPumps(t *testing.T, n *Net) {
	t.Helper()
	n.plug.Lock()
	defer n.plug.Unlock()
	n.stopPumps()
	n.pumping = true
	t.Cleanup(func() { // runs before the reset, which would end them again
		n.plug.Lock()
		defer n.plug.Unlock()
		n.pumping = false
	})
}

// TestNetTransmitAtOnce: frames are on the wire when the notification returns, and the
// guest gets one announcement for all of them.
func TestNetTransmitAtOnce(t *testing.T) {
	n, host := newNet(t, unix.SOCK_DGRAM)
	g := startGuest(t, n)
	withoutPumps(t, n)
	before := g.raised.Load()
	const frames = 7
	for i := range frames {
		g.add(netTx, g.out(netPacket(frame(60, byte(1+i)))))
	}
	g.kick(netTx)
	for range frames {
		g.wantUsed(netTx)
	}
	if raised := g.raised.Load() - before; raised != 1 {
		t.Errorf("%d interrupts for %d frames", raised, frames)
	}
	for i := range frames {
		if got := recvFrame(t, host); got[0] != byte(1+i) {
			t.Errorf("frame %d came as number %d", got[0], 1+i)
		}
	}
}

// TestNetQuiet: the device asks for notifications of frames unless it waits for the
// wire, and of buffers only while it waits for them.
func TestNetQuiet(t *testing.T) {
	n, host := newNet(t, unix.SOCK_DGRAM)
	g := startGuest(t, n)
	g.send(netRx, g.in(2000))
	for i := range 2 {
		if _, err := host.Write(message(frame(100, byte(i)))); err != nil {
			t.Fatal(err)
		}
	}
	g.wait(netRx)
	eventually(t, "the device to ask for a buffer", func() bool { return g.wantsNotify(netRx) })
	g.send(netRx, g.in(2000))
	g.wait(netRx)
	eventually(t, "the device to have enough", func() bool { return !g.wantsNotify(netRx) })

	long := g.out(netPacket(frame(1500, 1)))
	sent := 0
	for g.wantsNotify(netTx) {
		g.send(netTx, long)
		for _, _, ok := g.used(netTx); ok; _, _, ok = g.used(netTx) {
			sent++
		}
	}
	for range sent {
		recvFrame(t, host)
	}
	recvFrame(t, host) // the waiting frame, without a notification
	g.wait(netTx)
	eventually(t, "the device to listen again", func() bool { return g.wantsNotify(netTx) })
}

// eventually waits for a state that another goroutine reaches without an event.
func eventually(t *testing.T, what string, is func() bool) {
	t.Helper()
	for began := time.Now(); !is(); runtime.Gosched() {
		if time.Since(began) > patience {
			t.Fatalf("waited in vain for %s", what)
		}
	}
}

// TestNetNothingIsForgotten: with a driver that notifies only when asked to, and a network
// that is sometimes slow and sometimes fast, no frame is lost and neither side waits
// forever.
func TestNetNothingIsForgotten(t *testing.T) {
	const frames = 20000
	n, host := newNet(t, unix.SOCK_DGRAM)
	g := startGuest(t, n)
	number := func(b []byte) uint32 { return binary.LittleEndian.Uint32(b[20:]) }
	numbered := func(i uint32) []byte {
		f := frame(64, 0)
		binary.LittleEndian.PutUint32(f[20:], i)
		return f
	}
	var both sync.WaitGroup
	both.Go(func() { // echoes all messages
		p := make([]byte, wire.MaxMessage)
		for range frames {
			k, err := host.Read(p)
			if err == nil {
				_, err = host.Write(p[:k])
			}
			if err != nil {
				t.Error(err)
				return
			}
		}
	})
	// All memory that the driver uses: a buffer for each descriptor.
	var out, in [16]buf
	for i := range out {
		out[i], in[i] = g.out(netPacket(numbered(0))), g.in(netHeaderLen+64)
	}
	notify := func(q int) {
		if g.wantsNotify(q) {
			g.kick(q)
		}
	}
	for i := range 3 { // few, so that they often run out
		g.add(netRx, in[i])
	}
	notify(netRx)
	sent, done, received := uint32(0), uint32(0), uint32(0)
	for received < frames {
		progress := false
		for ; sent < frames && sent-done < 16; sent++ {
			b := out[sent%16]
			g.put(b.gpa+netHeaderLen, numbered(sent))
			g.add(netTx, b)
			notify(netTx)
			progress = true
		}
		for _, _, ok := g.used(netTx); ok; _, _, ok = g.used(netTx) {
			done++
			progress = true
		}
		for head, _, ok := g.used(netRx); ok; head, _, ok = g.used(netRx) {
			if got := number(g.get(in[head%3].gpa+netHeaderLen, 64)); got != received {
				t.Fatalf("frame %d came as number %d", got, received)
			}
			received++
			progress = true
			// The descriptor is unchanged: its head is published again.
			g.publish(g.rings[netRx], uint16(head))
			notify(netRx)
		}
		if !progress {
			g.waitIRQ()
		}
	}
	both.Wait()
	g.wantHealthy()
}
