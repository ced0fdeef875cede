package virtio

import (
	"bytes"
	"testing"
	"testing/synctest"
	"time"
)

func TestRNG(t *testing.T) {
	r := NewRNG()
	g := startGuest(t, r)
	a, b := g.in(10000), g.in(32)
	g.send(0, a, b)
	if _, n := g.wantUsed(0); n != 10032 {
		t.Fatalf("used %d", n)
	}
	if p := g.get(b.gpa, 32); bytes.Equal(p, make([]byte, 32)) {
		t.Fatal("zeros are not random")
	}
	if g.raised.Load() != 1 {
		t.Fatalf("%d interrupts", g.raised.Load())
	}
	// More than the limit of a request, and a chain without writable bytes.
	big := g.in(rngMaxRequest + 1)
	g.send(0, big)
	if _, n := g.wantUsed(0); n != rngMaxRequest {
		t.Fatalf("used %d", n)
	}
	if p := g.get(big.gpa+rngMaxRequest, 1); p[0] != 0 {
		t.Fatal("wrote beyond the cap")
	}
	g.send(0, g.out([]byte("give me")))
	if _, n := g.wantUsed(0); n != 0 {
		t.Fatalf("used %d", n)
	}
	if r.Bytes() != 10032+rngMaxRequest || r.chunk != [rngChunk]byte{} {
		t.Fatal("wrong count, or random bytes were kept")
	}
	if g.readReg(regConfig) != 0 {
		t.Fatal("there is no configuration")
	}
	g.writeReg(regConfig, 1)
	g.send(0, buf{gpa: 1 << 40, len: 8, write: true})
	g.wantBroken()
}

// TestRNGDue: after two requests the next one is expected after the same
// interval, but only for one interval.
func TestRNGDue(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := NewRNG()
		g := startGuest(t, r)
		ask := func(after time.Duration) {
			time.Sleep(after)
			g.send(0, g.in(8))
			g.wantUsed(0)
		}
		expect := func(within time.Duration, want bool) {
			t.Helper()
			if got := r.Due(within); got != want {
				t.Errorf("due within %v: %t", within, got)
			}
		}
		ask(time.Second)
		expect(time.Hour, false) // one request gives no interval
		asked := r.Asked()
		ask(time.Second)
		<-asked
		expect(900*time.Millisecond, false)
		expect(1100*time.Millisecond, true)
		time.Sleep(1500 * time.Millisecond) // later than expected
		expect(0, true)
		time.Sleep(time.Second)
		expect(time.Hour, false)
		ask(time.Millisecond)
		ask(time.Millisecond) // a program that draws random numbers
		expect(time.Hour, false)
		<-r.Asked()
		select {
		case <-asked:
			t.Error("two notices")
		default:
		}
	})
}

// TestRNGBounded: one notification serves at most as many buffers as the ring
// holds, even if the guest adds more.
func TestRNGBounded(t *testing.T) {
	g := startGuest(t, NewRNG())
	handled := 0
	d := &core{}
	d.activate(DriverContext{Mem: g.mem, Queues: g.bus.queues, Interrupt: func() {}, Fail: func(error) {}})
	b := g.in(1)
	g.add(0, b)
	d.serve(0, func(Chain) (uint32, error) {
		handled++
		g.add(0, b) // like another vCPU
		return 0, nil
	})
	if handled != 16 {
		t.Fatalf("%d in one pass over a ring of 16", handled)
	}
}

func TestRNGSaveRestore(t *testing.T) {
	r := NewRNG()
	g := startGuest(t, r)
	g.send(0, g.in(8))
	g.wantUsed(0)
	s := g.save()
	g.send(0, g.in(8)) // not begun
	if _, _, ok := g.used(0); ok {
		t.Fatal("works while paused")
	}
	r2 := NewRNG()
	if err := r2.Restore(r.Save()); err != nil {
		t.Fatal(err)
	}
	g.restore(r2, s)
	g.bus.Resume()
	if _, n := g.wantUsed(0); n != 8 || r2.Bytes() != 16 {
		t.Fatalf("used %d, %d bytes", n, r2.Bytes())
	}
}
