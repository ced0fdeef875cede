package addresses

import (
	"encoding/binary"
	"errors"
	"net/netip"
	"os"
	"runtime"
	"slices"
	"sync"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// inNamespace runs fn on a thread of its own in a new network namespace. Both end
// with fn.
func inNamespace(t *testing.T, fn func()) {
	t.Helper()
	done := make(chan error)
	go func() {
		defer close(done)
		runtime.LockOSThread() // and never unlocked
		if err := unix.Unshare(unix.CLONE_NEWNET); err != nil {
			done <- err
			return
		}
		fn()
	}()
	if err := <-done; errors.Is(err, unix.EPERM) {
		t.Skip("only root may make a network namespace")
	} else if err != nil {
		t.Fatal(err)
	}
}

func attr(kind uint16, value []byte) []byte {
	b := binary.NativeEndian.AppendUint16(nil, uint16(unix.SizeofRtAttr+len(value)))
	b = append(binary.NativeEndian.AppendUint16(b, kind), value...)
	return append(b, make([]byte, -len(b)&3)...)
}

// rtnetlink asks the kernel to change the thread's network namespace.
func rtnetlink(t *testing.T, kind uint16, flags uint16, body ...[]byte) {
	t.Helper()
	fd, err := unix.Socket(unix.AF_NETLINK, unix.SOCK_RAW|unix.SOCK_CLOEXEC, unix.NETLINK_ROUTE)
	if err != nil {
		t.Error(err)
		return
	}
	defer func() { _ = unix.Close(fd) }()
	b := slices.Concat(append([][]byte{make([]byte, unix.SizeofNlMsghdr)}, body...)...)
	binary.NativeEndian.PutUint32(b, uint32(len(b)))
	binary.NativeEndian.PutUint16(b[4:], kind)
	binary.NativeEndian.PutUint16(b[6:], unix.NLM_F_REQUEST|unix.NLM_F_ACK|flags)
	if err := unix.Sendto(fd, b, 0, &unix.SockaddrNetlink{Family: unix.AF_NETLINK}); err != nil {
		t.Error(err)
		return
	}
	answer := make([]byte, 4096)
	if n, err := unix.Read(fd, answer); err != nil || n < unix.SizeofNlMsghdr+4 {
		t.Errorf("read of %d bytes: %v", n, err)
	} else if e := -int32(binary.NativeEndian.Uint32(answer[unix.SizeofNlMsghdr:])); e != 0 {
		t.Errorf("message of type %d: %v", kind, unix.Errno(e))
	}
}

// up brings up the interface with this index.
func up(t *testing.T, index uint32) {
	t.Helper()
	info := make([]byte, unix.SizeofIfInfomsg)
	binary.NativeEndian.PutUint32(info[4:], index)
	binary.NativeEndian.PutUint32(info[8:], unix.IFF_UP)
	binary.NativeEndian.PutUint32(info[12:], unix.IFF_UP)
	rtnetlink(t, unix.RTM_NEWLINK, 0, info)
}

// give gives an interface an address.
func give(t *testing.T, index uint32, prefix string) {
	t.Helper()
	p := netip.MustParsePrefix(prefix)
	family := byte(unix.AF_INET6)
	if p.Addr().Is4() {
		family = unix.AF_INET
	}
	msg := binary.NativeEndian.AppendUint32([]byte{family, byte(p.Bits()), unix.IFA_F_NODAD, 0}, index)
	rtnetlink(t, unix.RTM_NEWADDR, unix.NLM_F_CREATE, msg, attr(unix.IFA_LOCAL, p.Addr().AsSlice()), attr(unix.IFA_ADDRESS, p.Addr().AsSlice()))
}

// TestRoutes: the kernel tells which addresses belong to the host, including public
// ones.
func TestRoutes(t *testing.T) {
	inNamespace(t, func() {
		rtnetlink(t, unix.RTM_NEWLINK, unix.NLM_F_CREATE, make([]byte, unix.SizeofIfInfomsg), attr(unix.IFLA_LINKINFO, attr(unix.IFLA_INFO_KIND, []byte("veth"))))
		up(t, 1)
		up(t, 2)
		up(t, 3)
		give(t, 2, "93.184.216.34/24")
		give(t, 2, "10.1.0.5/16")
		give(t, 2, "2606:2800:220:1::34/64")
		r, err := OpenRoutes()
		if err != nil {
			t.Error(err)
			return
		}
		g := NewGuard(r, nil)
		// The kernel makes the route of an IPv6 address a little later, and has no
		// event for it.
		for begin := time.Now(); g.Check(netip.MustParseAddr("2606:2800:220:1::34")).Class != Host && time.Since(begin) < time.Minute; {
			time.Sleep(time.Millisecond)
		}
		for addr, class := range map[string]Class{
			"93.184.216.34": Host, "::ffff:93.184.216.34": Host, "64:ff9b::93.184.216.34": Host, "93.184.216.255": Host, "10.1.0.5": Host, "10.1.255.255": Host,
			"2606:2800:220:1::34": Host, "2606:2800:220:1::35": Public,
			"93.184.216.35": Public, "10.1.0.6": Private, "8.8.8.8": Public, "2a00::1": Public, "127.0.0.1": Loopback,
		} {
			if v := g.Check(netip.MustParseAddr(addr)); v.Class != class {
				t.Errorf("%s: %+v, want %v", addr, v, class)
			}
		}
		give(t, 3, "8.8.8.8/32")
		if v := g.Check(netip.MustParseAddr("8.8.8.8")); v.Class != Host {
			t.Errorf("an address that the host was given later: %+v", v)
		}
		var all sync.WaitGroup
		for range 8 {
			all.Go(func() {
				for range 100 {
					if !g.Check(netip.MustParseAddr("93.184.216.34")).Closed() || g.Check(netip.MustParseAddr("93.184.216.35")).Closed() {
						t.Error("answers were mixed up")
					}
				}
			})
		}
		all.Wait()
		if err := errors.Join(r.Close(), r.Close()); err != nil {
			t.Error(err)
		}
		if v := g.Check(netip.MustParseAddr("1.1.1.1")); !v.Closed() || v.Range.IsValid() {
			t.Errorf("after Close: %+v", v)
		}
		if _, _, err := r.Owns(netip.MustParseAddr("1.1.1.1")); !errors.Is(err, os.ErrClosed) {
			t.Errorf("after Close: %v", err)
		}
	})
}

// FuzzParseRoute: every message is parsed, or refused with an error.
func FuzzParseRoute(f *testing.F) {
	f.Add(routeRequest(netip.MustParseAddr("1.2.3.4"), 1), uint32(1))
	f.Add(routeRequest(netip.MustParseAddr("::1"), 1), uint32(2))
	f.Fuzz(func(t *testing.T, b []byte, seq uint32) {
		if kind, ours, err := parseRoute(b, seq); err != nil && kind != 0 || !ours && kind != 0 {
			t.Fatalf("type %d, ours %v: %v", kind, ours, err)
		}
	})
}

func BenchmarkCheck(b *testing.B) {
	r, err := OpenRoutes()
	if err != nil {
		b.Fatal(err)
	}
	defer func() { _ = r.Close() }()
	g, a := NewGuard(r, nil), netip.MustParseAddr("8.8.8.8")
	for b.Loop() {
		g.Check(a)
	}
}
