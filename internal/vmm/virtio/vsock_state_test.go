package virtio

import (
	"bytes"
	"maps"
	"os"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// callStandby makes the connection that copies continue.
func (g *vsockGuest) callStandby(port uint32) (connKey, *os.File) {
	g.t.Helper()
	a, b := socketpair(g.t, unix.SOCK_STREAM)
	result := make(chan error, 1)
	g.dev.ConnectStandby(port, a, func(err error) { result <- err })
	h, _ := g.rx()
	k := connKey{host: h.srcPort, guest: port}
	g.tx(k, opResponse, 0, nil)
	if err := await(g.t, result); err != nil {
		g.t.Fatal(err)
	}
	return k, b
}

// copyOf captures the guest and continues in a copy of it.
func (g *vsockGuest) copyOf(want bool) (end *os.File) {
	g.t.Helper()
	s := g.save()
	state := g.dev.Save()
	if state.HasStandby() != want {
		g.t.Fatalf("standby saved: %v, want %v", state.HasStandby(), want)
	}
	g.bus.Close()
	g.dev = g.newDevice(g.t, 0)
	if err := g.dev.Restore(state); err != nil {
		g.t.Fatal(err)
	}
	g.restore(g.dev, s)
	if !want {
		g.bus.Resume()
		return nil
	}
	a, b := socketpair(g.t, unix.SOCK_STREAM)
	g.settled.Store(0)
	if err := g.dev.AttachStandby(a, func() { g.settled.Add(1) }); err != nil {
		g.t.Fatal(err)
	}
	g.bus.Resume()
	return b
}

// TestVsockStandby: a copy continues one connection. It gets a RST for the
// others once it has answered on that one.
func TestVsockStandby(t *testing.T) {
	g := newVsockGuest(t, 0)
	g.feed(8)
	other, _ := g.dial(9)
	k, host := g.callStandby(52)
	mustWrite(t, host, []byte("before"))
	g.want(k, opData)
	g.tx(k, opData, 0, []byte("answer"))
	mustRead(t, host, []byte("answer"))
	for generation := range 3 {
		end := g.copyOf(true)
		g.wantNothing()
		mustWrite(t, end, []byte("hello"))
		if _, p := g.want(k, opData); string(p) != "hello" {
			t.Fatalf("generation %d read %q", generation, p)
		}
		g.wantNothing()
		if g.settled.Load() != 0 {
			t.Fatal("settled before the guest has answered")
		}
		g.tx(k, opData, 0, []byte("child"))
		mustRead(t, end, []byte("child"))
		if generation == 0 {
			g.want(other, opReset)
		}
		g.wantNothing()
		if g.settled.Load() != 0 {
			t.Fatal("settled before the guest is used")
		}
		if generation == 1 { // on another connection
			dialed, _ := g.callStandby(53)
			g.tx(dialed, opReset, 0, nil)
		} else {
			mustWrite(t, end, []byte("use"))
			g.want(k, opData)
			mustWrite(t, end, []byte("more"))
			g.want(k, opData)
		}
		if g.settled.Load() != 1 {
			t.Fatalf("settled %d times", g.settled.Load())
		}
		// Each copy must choose its own standby.
		if g.dev.Save().HasStandby() {
			t.Fatal("a connection that was attached is a standby again")
		}
		if err := end.Close(); err != nil {
			t.Fatal(err)
		}
		g.want(k, opShutdown)
		g.tx(k, opReset, 0, nil)
		k, _ = g.callStandby(52)
	}
	g.wantHealthy()
}

// TestVsockStandbyRefused: a connection with data in transit cannot be a
// standby, and a standby that is not attached gets a RST like all others.
func TestVsockStandbyRefused(t *testing.T) {
	for name, disturb := range map[string]func(*vsockGuest, connKey, *os.File){
		"unread by the guest": func(g *vsockGuest, _ connKey, host *os.File) {
			g.bus.Pause()
			mustWrite(g.t, host, []byte("x"))
		},
		"shut by the guest": func(g *vsockGuest, k connKey, _ *os.File) { g.tx(k, opShutdown, shutSend, nil) },
		"shut by the host": func(g *vsockGuest, k connKey, host *os.File) {
			closeWrite(g.t, host)
			g.want(k, opShutdown)
		},
	} {
		t.Run(name, func(t *testing.T) {
			g := newVsockGuest(t, 0)
			g.feed(8)
			k, host := g.callStandby(52)
			disturb(g, k, host)
			g.copyOf(false)
			g.want(k, opReset)
			a, _ := socketpair(t, unix.SOCK_STREAM)
			if err := g.dev.AttachStandby(a, nil); err == nil {
				t.Fatal("attached")
			}
		})
	}
	g := newVsockGuest(t, 0)
	g.feed(8)
	k, _ := g.callStandby(52)
	s := g.save()
	state := g.dev.Save()
	g.bus.Close()
	g.dev = g.newDevice(t, 0)
	if err := g.dev.Restore(state); err != nil {
		t.Fatal(err)
	}
	g.restore(g.dev, s)
	g.bus.Resume()
	g.want(k, opReset)
}

// TestVsockStandbyLost: a guest that ends the standby without an answer still
// gets a RST for the others.
func TestVsockStandbyLost(t *testing.T) {
	g := newVsockGuest(t, 0)
	g.feed(8)
	other, _ := g.dial(9)
	k, _ := g.callStandby(52)
	end := g.copyOf(true)
	g.tx(k, opReset, 0, nil)
	g.want(other, opReset)
	wantEOF(t, end)
	if g.settled.Load() != 1 {
		t.Fatalf("settled %d times", g.settled.Load())
	}
}

// TestVsockGoneTold: a packet of the guest on a connection that is gone is
// answered at once, and its ports can be used again.
func TestVsockGoneTold(t *testing.T) {
	g := newVsockGuest(t, 0)
	g.feed(8)
	first, _ := g.dial(9)
	second, _ := g.dial(10)
	k, _ := g.callStandby(52)
	g.copyOf(true)
	g.tx(first, opData, 0, []byte("old"))
	g.want(first, opReset)
	g.tx(second, opRequest, 0, nil)
	g.want(second, opResponse)
	g.tx(k, opData, 0, []byte("answer"))
	g.wantNothing()
}

// TestVsockSaveRestore: packets that were not handled are in the ring, and the
// connections are gone. The new device answers for both.
func TestVsockSaveRestore(t *testing.T) {
	g := newVsockGuest(t, 0)
	g.feed(8)
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
	g.wantNothing()
	g.bus.Resume()
	g.wantUsed(vsockTx)
	g.wantUsed(vsockTx)
	told := map[connKey]uint16{}
	for range 5 { // one more for the data that the guest had sent on the first
		h, _ := g.rx()
		told[connKey{host: h.srcPort, guest: h.dstPort}] = h.op
	}
	want := map[connKey]uint16{
		k: opReset, k52: opReset, {host: k52.host + 1, guest: 1}: opReset, {host: acceptPort, guest: 10}: opResponse,
	}
	if !maps.Equal(told, want) {
		t.Fatalf("the guest was told %v, want %v", told, want)
	}
	if k2, _ := g.call(52); k2.host == k52.host {
		t.Fatal("a port was used again")
	}
	if err := g.dev.Restore(VsockState{}); err != nil || g.dev.nextPort != vsockFirstPort {
		t.Fatal("a damaged state gives a bad port")
	}
}

// TestVsockPauseWhileBusy pauses under traffic: no data moves meanwhile, and
// none is lost.
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

// TestVsockResetUnderLoad: after a reset in full traffic the device is quiet,
// and all host ends are closed.
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

// TestVsockWakeOn: data from the host for a paused guest is noticed once, the end
// of the stream is not, and no data is lost.
func TestVsockWakeOn(t *testing.T) {
	g := newVsockGuest(t, 0)
	g.feed(8)
	k, host := g.call(52)
	other, gone := g.call(53)
	knocked := make(chan error, 8)
	park := func() {
		g.bus.Pause()
		g.dev.WakeOn(func() { knocked <- nil })
	}
	for round := range 3 {
		park()
		if round == 0 {
			if err := gone.Close(); err != nil {
				t.Fatal(err)
			}
		}
		mustWrite(t, host, []byte("one"))
		if err := await(t, knocked); err != nil {
			t.Fatal(err)
		}
		mustWrite(t, host, []byte("two"))
		g.wantNothing()
		g.bus.Resume()
		if round == 0 {
			seen := map[connKey]bool{}
			for range 2 {
				h, _ := g.rx()
				seen[connKey{host: h.srcPort, guest: h.dstPort}] = true
			}
			if !seen[k] || !seen[other] {
				t.Fatalf("after it went on the guest heard of %v", seen)
			}
		} else if _, p := g.want(k, opData); string(p) != "onetwo" {
			t.Fatalf("the guest read %q", p)
		}
		if len(knocked) != 0 {
			t.Fatal("noticed twice")
		}
	}
	park()
	g.dev.WakeOn(nil)
	mustWrite(t, host, []byte("three"))
	g.wantNothing()
	g.bus.Resume()
	if _, p := g.want(k, opData); string(p) != "three" {
		t.Fatalf("the guest read %q", p)
	}
	park()
	g.bus.Resume()
	mustWrite(t, host, []byte("four"))
	if _, p := g.want(k, opData); string(p) != "four" || len(knocked) != 0 {
		t.Fatalf("the guest read %q; noticed %d times while it ran", p, len(knocked))
	}
	g.wantHealthy()
}
