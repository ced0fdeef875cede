package virtio

import (
	"bytes"
	"errors"
	"io"
	"os"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// TestVsockGuestCredit: the host sends no more than the guest's credit, asks
// once for more, and continues when it gets more.
func TestVsockGuestCredit(t *testing.T) {
	g := newVsockGuest(t, 0)
	g.feed(8)
	g.credit = 100
	k, host := g.dial(9)
	mustWrite(t, host, make([]byte, 1000))
	got := 0
	for _, grant := range []uint32{100, 100, 1, 799} {
		before := got
		for got < before+int(grant) {
			_, p := g.want(k, opData)
			got += len(p)
		}
		if got != before+int(grant) {
			t.Fatalf("sent %d bytes for a credit of %d", got-before, grant)
		}
		g.want(k, opCreditRequest) // the credit is used up
		g.wantNothing()
		g.fwd, g.credit = uint32(got), map[uint32]uint32{100: 100, 1: 799, 799: 0}[grant]
		if got == 200 {
			g.credit = 1
		}
		g.tx(k, opCreditUpdate, 0, nil)
	}
	if got != 1000 {
		t.Fatalf("sent %d bytes", got)
	}
}

// TestVsockLyingCredit: inconsistent counters give no credit.
func TestVsockLyingCredit(t *testing.T) {
	g := newVsockGuest(t, 0)
	g.feed(8)
	g.fwd = 5 // although no bytes were sent
	k, host := g.dial(9)
	mustWrite(t, host, []byte("x"))
	g.want(k, opCreditRequest)
	g.fwd, g.credit = 0, 0
	g.tx(k, opCreditUpdate, 0, nil)
	g.wantNothing()
	g.credit = 1<<32 - 1
	g.tx(k, opCreditUpdate, 0, nil)
	g.want(k, opData)
	g.wantHealthy()
}

// TestVsockHostCredit: data that the host does not read is buffered up to the
// credit; one byte more ends the connection.
func TestVsockHostCredit(t *testing.T) {
	g := newVsockGuest(t, 0)
	g.feed(8)
	k, _ := g.dial(9)
	h, _ := connHeader(g, k)
	sent := uint32(0)
	for {
		// A correct guest never sends more than it knows to be free.
		room := h.bufAlloc - (sent - h.fwdCnt)
		if room == 0 {
			break
		}
		n := min(room, 48<<10)
		g.tx(k, opData, 0, make([]byte, n))
		sent += n
		h, _ = connHeader(g, k)
	}
	g.dev.mu.Lock()
	buffered := len(g.dev.conns[k].out)
	g.dev.mu.Unlock()
	if buffered != VsockBuffer {
		t.Fatalf("%d bytes buffered", buffered)
	}
	g.tx(k, opData, 0, []byte{1})
	g.want(k, opReset)
	if g.conns() != 0 {
		t.Fatal("connection survived")
	}
}

// connHeader asks for the device's counters.
func connHeader(g *vsockGuest, k connKey) (vsockHeader, []byte) {
	g.t.Helper()
	g.tx(k, opCreditRequest, 0, nil)
	for {
		h, p := g.rx()
		if h.op == opCreditUpdate {
			if _, _, more := g.used(vsockRx); more {
				g.t.Fatal("more packets")
			}
			return h, p
		}
	}
}

// TestVsockBufferedData: buffered data arrives in order when the host reads, and
// the guest gets its credit back without asking.
func TestVsockBufferedData(t *testing.T) {
	g := newVsockGuest(t, 0)
	g.feed(8)
	k, host := g.dial(9)
	data := make([]byte, 2<<20)
	for i := range data {
		data[i] = byte(i >> 8)
	}
	read := make(chan error, 1)
	go func() {
		got := make([]byte, len(data))
		for n := 0; n < len(got); {
			m, err := host.Read(got[n:min(n+10000, len(got))])
			if err != nil {
				read <- err
				return
			}
			n += m
		}
		if !bytes.Equal(got, data) {
			read <- errors.New("other bytes")
			return
		}
		read <- nil
	}()
	fwd := uint32(0)
	for sent := uint32(0); sent < uint32(len(data)); {
		n := min(VsockBuffer-(sent-fwd), 64<<10, uint32(len(data))-sent)
		if n == 0 {
			h, _ := g.want(k, opCreditUpdate)
			fwd = h.fwdCnt
			continue
		}
		g.tx(k, opData, 0, data[sent:sent+n])
		sent += n
	}
	if err := await(t, read); err != nil {
		t.Fatal(err)
	}
}

func TestVsockGuestShutdown(t *testing.T) {
	t.Run("send", func(t *testing.T) {
		g := newVsockGuest(t, 0)
		g.feed(8)
		k, host := g.dial(9)
		g.tx(k, opData, 0, []byte("last words"))
		g.tx(k, opShutdown, shutSend, nil)
		mustRead(t, host, []byte("last words"))
		wantEOF(t, host)
		mustWrite(t, host, []byte("reply"))
		if _, p := g.want(k, opData); string(p) != "reply" {
			t.Fatalf("data %q", p)
		}
		g.tx(k, opData, 0, []byte("one more thing"))
		g.want(k, opReset) // the guest had said that it would not send
	})
	t.Run("receive", func(t *testing.T) {
		g := newVsockGuest(t, 0)
		g.feed(8)
		k, host := g.dial(9)
		g.tx(k, opShutdown, shutReceive, nil)
		if h, _ := g.want(k, opShutdown); h.flags != shutSend {
			t.Fatalf("flags %d", h.flags)
		}
		if _, err := host.Write([]byte("x")); !errors.Is(err, unix.EPIPE) {
			t.Fatalf("write: %v", err)
		}
		g.tx(k, opData, 0, []byte("still here"))
		mustRead(t, host, []byte("still here"))
		g.tx(k, opShutdown, shutSend, nil) // hints add up: now both directions are shut
		g.want(k, opReset)
		wantEOF(t, host)
	})
	t.Run("both, with data in the buffer", func(t *testing.T) {
		g := newVsockGuest(t, 0)
		g.feed(8)
		k, host := g.dial(9)
		data := bytes.Repeat([]byte("0123456789abcdef"), VsockBuffer/16)
		g.tx(k, opData, 0, data)
		g.tx(k, opShutdown, shutBoth, nil)
		if g.conns() != 1 {
			t.Fatal("closed before the data was delivered")
		}
		mustRead(t, host, data)
		wantEOF(t, host)
		for {
			h, _ := g.rx()
			if h.op == opReset {
				break
			}
			// The device may announce that it will not send to a guest that
			// does not receive, while it still delivers the guest's data.
			if h.op != opCreditUpdate && h.op != opShutdown {
				t.Fatalf("packet %+v", h)
			}
		}
		if g.conns() != 0 {
			t.Fatal("connection survived")
		}
	})
}

func TestVsockHostClose(t *testing.T) {
	t.Run("half", func(t *testing.T) {
		g := newVsockGuest(t, 0)
		g.feed(8)
		k, host := g.dial(9)
		mustWrite(t, host, []byte("request"))
		closeWrite(t, host)
		g.want(k, opData)
		if h, _ := g.want(k, opShutdown); h.flags != shutSend {
			t.Fatalf("flags %d", h.flags)
		}
		g.tx(k, opData, 0, []byte("response"))
		mustRead(t, host, []byte("response"))
		host.Close()
		if h, _ := g.want(k, opShutdown); h.flags != shutBoth {
			t.Fatalf("flags %d", h.flags)
		}
		g.tx(k, opReset, 0, nil)
		if g.conns() != 0 {
			t.Fatal("connection survived")
		}
	})
	t.Run("full, guest never confirms", func(t *testing.T) {
		g := newVsockGuest(t, time.Millisecond)
		g.feed(8)
		k, host := g.call(52)
		mustWrite(t, host, []byte("bye"))
		host.Close()
		g.want(k, opData)
		if h, _ := g.want(k, opShutdown); h.flags != shutBoth {
			t.Fatalf("flags %d", h.flags)
		}
		g.want(k, opReset)
	})
	t.Run("stops reading", func(t *testing.T) {
		g := newVsockGuest(t, 0)
		g.feed(8)
		k, host := g.dial(9)
		shutHalf(t, host, unix.SHUT_RD)
		for range 8 { // far more than the credit: the device drops it
			g.tx(k, opData, 0, make([]byte, 64<<10))
		}
		g.want(k, opCreditUpdate)
		if h, _ := g.want(k, opShutdown); h.flags != shutReceive {
			t.Fatalf("flags %d", h.flags)
		}
		for range 7 {
			if h, _ := g.want(k, opCreditUpdate); h.fwdCnt%(64<<10) != 0 {
				t.Fatalf("forwarded %d", h.fwdCnt)
			}
		}
		mustWrite(t, host, []byte("but sends"))
		g.want(k, opData)
		closeWrite(t, host)
		if h, _ := g.want(k, opShutdown); h.flags != shutBoth {
			t.Fatalf("flags %d", h.flags)
		}
	})
	t.Run("stops reading with data in the buffer", func(t *testing.T) {
		g := newVsockGuest(t, 0)
		g.feed(8)
		k, host := g.dial(9)
		g.tx(k, opData, 0, make([]byte, VsockBuffer)) // more than a socket holds
		shutHalf(t, host, unix.SHUT_RD)
		if _, err := io.Copy(io.Discard, host); err != nil { // makes room and so wakes the writer
			t.Fatal(err)
		}
		for {
			h, _ := g.rx()
			if h.op == opShutdown && h.fwdCnt == VsockBuffer {
				break
			}
		}
		if g.conns() != 1 {
			t.Fatal("connection ended")
		}
	})
	t.Run("resets", func(t *testing.T) {
		g := newVsockGuest(t, time.Millisecond)
		g.feed(8)
		k, host := g.dial(9)
		g.tx(k, opData, 0, []byte("unread"))
		host.Close() // with unread data: the device's end gets ECONNRESET
		for {
			h, _ := g.rx()
			if h.op == opReset {
				break
			}
		}
		if g.conns() != 0 {
			t.Fatal("connection survived")
		}
	})
}

// TestVsockFairness: all connections that wait for receive buffers get some.
func TestVsockFairness(t *testing.T) {
	g := newVsockGuest(t, 0)
	g.feed(1)
	keys := make(map[connKey]bool)
	var hosts []*os.File
	for p := range uint32(5) {
		k, host := g.dial(p)
		keys[k] = true
		hosts = append(hosts, host)
	}
	for _, host := range hosts {
		mustWrite(t, host, []byte("me too"))
	}
	for len(keys) > 0 {
		h, _ := g.rx()
		delete(keys, connKey{host: h.srcPort, guest: h.dstPort})
	}
}
