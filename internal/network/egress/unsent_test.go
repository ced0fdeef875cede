package egress

import (
	"errors"
	"io"
	"net"
	"net/netip"
	"testing"

	"golang.org/x/sys/unix"
)

// TestUnsentIsBounded: when a fast server stops reading, few bytes wait unsent in the
// kernel, which no budget counts.
func TestUnsentIsBounded(t *testing.T) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = l.Close() }()
	const first = 256 << 20
	stopped, done := make(chan error, 1), make(chan struct{})
	defer close(done)
	go func() {
		c, err := l.Accept()
		if err != nil {
			stopped <- err
			return
		}
		_, err = io.CopyN(io.Discard, c, first)
		stopped <- err
		<-done
		_ = c.Close()
	}()
	to := netip.MustParseAddrPort(l.Addr().String())
	conn, err := Dial(t.Context(), "tcp", to, func(netip.AddrPort) error { return nil })
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = conn.Close() }()
	b := make([]byte, 64<<10)
	for n := 0; n < first; {
		k, err := conn.Write(b[:min(len(b), first-n)])
		if err != nil {
			t.Fatal(err)
		}
		n += k
	}
	if err := <-stopped; err != nil {
		t.Fatal(err)
	}
	raw, err := conn.(*net.TCPConn).SyscallConn()
	if err != nil {
		t.Fatal(err)
	}
	unsent := 0
	err = raw.Control(func(fd uintptr) {
		for unsent == 0 { // until the other end takes no more
			for err == nil {
				_, err = unix.Write(int(fd), b) // it does not wait
			}
			if !errors.Is(err, unix.EAGAIN) {
				return
			}
			unsent, err = unix.IoctlGetInt(int(fd), unix.SIOCOUTQNSD)
		}
	})
	if err != nil {
		t.Fatal(err)
	}
	if unsent == 0 || unsent > 4*maxUnsent {
		t.Errorf("%d bytes wait in the kernel", unsent)
	}
}
