package virtio

import (
	"bytes"
	"os"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

func TestVsockTransportReset(t *testing.T) {
	g := newVsockGuest(t, 0)
	g.feed(8)
	g.feedEvents(2)
	_, host := g.dial(9)
	g.dev.TransportReset()
	wantEOF(t, host)
	if _, n := g.wantUsed(vsockEvent); n != 4 {
		t.Fatalf("used %d", n)
	}
	// A connection made before the guest has handled the event waits.
	a, _ := socketpair(t, unix.SOCK_STREAM)
	result := make(chan error, 1)
	g.dev.Connect(52, a, func(err error) { result <- err })
	g.kick(vsockRx)
	g.kick(vsockEvent)
	g.wantNothing()
	old := connKey{host: acceptPort, guest: 9}
	g.tx(old, opData, 0, nil) // others do not
	g.want(old, opReset)
	g.feedEvents(1)
	h, _ := g.rx()
	if h.op != opRequest {
		t.Fatalf("packet %+v", h)
	}
	g.tx(connKey{host: h.srcPort, guest: 52}, opResponse, 0, nil)
	if err := await(t, result); err != nil {
		t.Fatal(err)
	}
	// Without an event buffer the event waits for one.
	for range 2 {
		g.dev.TransportReset()
	}
	g.wantUsed(vsockEvent)
	g.wantUsed(vsockEvent)
	g.dev.TransportReset()
	if _, _, ok := g.used(vsockEvent); ok || !g.dev.Save().ResetDue {
		t.Fatal("event without a buffer")
	}
	g.feedEvents(1)
	g.wantUsed(vsockEvent)
	g.wantHealthy()
	g.writeReg(regStatus, 0)
	g.dev.TransportReset() // nobody to tell
	if g.dev.Save().ResetDue {
		t.Fatal("event without a driver")
	}
}

// TestVsockSaveRestore: packets that were not looked at are in the ring, the
// connections are gone, the new device answers for both.
func TestVsockSaveRestore(t *testing.T) {
	g := newVsockGuest(t, 0)
	g.feed(8)
	g.feedEvents(1)
	k, host := g.dial(9)
	k52, _ := g.call(52)
	s := g.save()
	p := make([]byte, vsockHeaderLen+4)
	h := g.fill(vsockHeader{srcPort: k.guest, dstPort: k.host, op: opData, len: 4})
	h.put(p)
	g.send(vsockTx, g.out(p))
	h = g.fill(vsockHeader{srcPort: 10, dstPort: acceptPort, op: opRequest})
	h.put(p)
	g.send(vsockTx, g.out(p[:vsockHeaderLen]))
	mustWrite(t, host, []byte("not now"))
	a, _ := socketpair(t, unix.SOCK_STREAM)
	canceled := make(chan error, 1)
	g.dev.Connect(1, a, func(err error) { canceled <- err }) // not sent
	if _, _, ok := g.used(vsockTx); ok {
		t.Fatal("works while paused")
	}
	g.wantNothing()
	state := g.dev.Save()
	g.bus.Close()
	if err := await(t, canceled); err == nil {
		t.Fatal("connected")
	}

	g.dev = g.newDevice(t, 0)
	if err := g.dev.Restore(state); err != nil {
		t.Fatal(err)
	}
	g.restore(g.dev, s)
	g.dev.TransportReset()
	if _, _, ok := g.used(vsockEvent); ok {
		t.Fatal("event before Resume")
	}
	g.bus.Resume()
	g.wantUsed(vsockEvent)
	g.wantUsed(vsockTx)
	g.wantUsed(vsockTx)
	g.want(k, opReset)
	g.want(connKey{host: acceptPort, guest: 10}, opResponse)
	g.feedEvents(1)
	if k2, _ := g.call(52); k2.host == k52.host {
		t.Fatal("a port was used again")
	}
	if err := g.dev.Restore(VsockState{}); err != nil || g.dev.nextPort != vsockFirstPort {
		t.Fatal("a damaged state gives a bad port")
	}
}

// TestVsockPauseWhileBusy pauses under traffic: nothing moves, nothing is lost.
func TestVsockPauseWhileBusy(t *testing.T) {
	g := newVsockGuest(t, 0)
	g.feed(8)
	k, host := g.dial(9)
	const total = 300 << 10
	failed := make(chan error, 1)
	go func() {
		for i := range total / 1024 {
			if _, err := host.Write(bytes.Repeat([]byte{byte(i)}, 1024)); err != nil {
				failed <- err
				return
			}
		}
		failed <- nil
	}()
	var got []byte
	for i := 0; len(got) < total; i++ {
		if i%5 == 0 {
			g.bus.Pause()
			ring := g.get(g.rings[vsockRx].used, 140)
			stats := g.dev.Stats()
			if g.dev.Stats() != stats || !bytes.Equal(ring, g.get(g.rings[vsockRx].used, 140)) {
				t.Fatal("something moved")
			}
			g.bus.Resume()
		}
		_, p := g.want(k, opData)
		got = append(got, p...)
		g.fwd += uint32(len(p))
		if i%8 == 0 {
			g.tx(k, opCreditUpdate, 0, nil)
		}
	}
	if err := await(t, failed); err != nil {
		t.Fatal(err)
	}
	for i, b := range got {
		if b != byte(i/1024) {
			t.Fatalf("byte %d is %d", i, b)
		}
	}
}

// TestVsockResetUnderLoad: a driver that resets the device in full traffic gets
// a quiet device, and every host end is closed.
func TestVsockResetUnderLoad(t *testing.T) {
	g := newVsockGuest(t, time.Minute)
	g.feed(8)
	var hosts []*os.File
	for p := range uint32(20) {
		_, host := g.dial(p)
		hosts = append(hosts, host)
	}
	for p, host := range hosts {
		k := connKey{host: acceptPort, guest: uint32(p)}
		g.tx(k, opData, 0, make([]byte, 250<<10)) // more than a socket holds
		if p%2 == 0 {
			mustWrite(t, host, make([]byte, 8<<10))
		} else {
			closeWrite(t, host)
		}
	}
	g.writeReg(regStatus, 0)
	if g.conns() != 0 {
		t.Fatal("connections survived")
	}
	used := g.get(g.rings[vsockRx].used, 140)
	for _, h := range hosts {
		h.Close()
	}
	if !bytes.Equal(used, g.get(g.rings[vsockRx].used, 140)) {
		t.Fatal("the ring changed after the reset")
	}
}
