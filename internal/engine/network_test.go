package engine

import (
	"errors"
	"net/netip"
	"os"
	"reflect"
	"testing"
	"time"

	"agentrun.dev/internal/storage/snapshot"
	"golang.org/x/sys/unix"
)

func network() *Network {
	return &Network{
		MAC: [6]byte{2, 0, 0, 0, 0, 1}, MTU: 1500, Address: netip.MustParsePrefix("10.0.2.15/24"),
		Gateway: netip.MustParseAddr("10.0.2.2"), DNS: []netip.Addr{netip.MustParseAddr("9.9.9.9")},
	}
}

// TestNetworkInManifest: forks get the interface of the booted sandbox.
func TestNetworkInManifest(t *testing.T) {
	bare := network()
	bare.Gateway, bare.DNS = netip.Addr{}, nil
	both := network()
	both.Address6, both.Gateway6 = netip.MustParsePrefix("fd00:a9e7::2/126"), netip.MustParseAddr("fd00:a9e7::1")
	both.DNS = append(both.DNS, both.Gateway6)
	for _, want := range []*Network{nil, network(), bare, both} {
		got, err := NetworkOf(snapshot.Manifest{Nets: want.Nets()})
		if err != nil || !reflect.DeepEqual(got, want) {
			t.Errorf("%+v became %+v, %v", want, got, err)
		}
	}
	for name, nets := range map[string][]snapshot.Net{
		"two":         append(network().Nets(), network().Nets()...),
		"no MAC":      {{MAC: "02", MTU: 1500, Address: "10.0.2.15/24"}},
		"no address":  {{MAC: "02:00:00:00:00:01", MTU: 1500}},
		"no gateway":  {{MAC: "02:00:00:00:00:01", MTU: 1500, Address: "10.0.2.15/24", Gateway: "x"}},
		"no server":   {{MAC: "02:00:00:00:00:01", MTU: 1500, Address: "10.0.2.15/24", DNS: []string{""}}},
		"no address6": {{MAC: "02:00:00:00:00:01", MTU: 1500, Address: "10.0.2.15/24", Address6: "x"}},
		"no gateway6": {{MAC: "02:00:00:00:00:01", MTU: 1500, Address: "10.0.2.15/24", Address6: "fd00::2/64", Gateway6: "10.0.2.2"}},
		"huge frames": {{MAC: "02:00:00:00:00:01", MTU: 65535, Address: "10.0.2.15/24"}},
	} {
		if got, err := NetworkOf(snapshot.Manifest{Nets: nets}); err == nil {
			t.Errorf("%s: %+v", name, got)
		}
	}
}

func TestNetworkCheck(t *testing.T) {
	if err := network().Check(); err != nil {
		t.Fatal(err)
	}
	v6 := netip.MustParseAddr("fd00::1")
	for name, change := range map[string]func(*Network){
		"group address":    func(n *Network) { n.MAC[0] = 1 },
		"no device":        func(n *Network) { n.MAC = [6]byte{} },
		"small frames":     func(n *Network) { n.MTU = 67 },
		"large frames":     func(n *Network) { n.MTU = MaxMTU + 1 },
		"no address":       func(n *Network) { n.Address = netip.Prefix{} },
		"everybody":        func(n *Network) { n.Address = netip.MustParsePrefix("0.0.0.0/8") },
		"no prefix":        func(n *Network) { n.Address = netip.MustParsePrefix("10.0.2.15/0") },
		"IPv6":             func(n *Network) { n.Address = netip.PrefixFrom(v6, 64) },
		"IPv6 gateway":     func(n *Network) { n.Gateway = v6 },
		"gateway far away": func(n *Network) { n.Gateway = netip.MustParseAddr("10.0.3.2") },
		"server of a zone": func(n *Network) { n.DNS = []netip.Addr{v6.WithZone("eth0")} },
		"mapped server":    func(n *Network) { n.DNS = []netip.Addr{netip.MustParseAddr("::ffff:9.9.9.9")} },
		"gateway alone":    func(n *Network) { n.Gateway6 = v6 },
		"IPv4 as IPv6":     func(n *Network) { n.Address6 = n.Address },
		"IPv4 gateway":     func(n *Network) { n.Address6, n.Gateway6 = netip.PrefixFrom(v6, 64), n.Gateway },
		"far gateway":      func(n *Network) { n.Address6, n.Gateway6 = netip.PrefixFrom(v6, 64), netip.MustParseAddr("fd01::1") },
		"no prefix6":       func(n *Network) { n.Address6 = netip.PrefixFrom(v6, 0) },
		"everybody6":       func(n *Network) { n.Address6 = netip.MustParsePrefix("::/64") },
		"group address6":   func(n *Network) { n.Address6 = netip.MustParsePrefix("ff02::1/64") },
		"small for IPv6":   func(n *Network) { n.Address6, n.MTU = netip.PrefixFrom(v6, 64), 1279 },
		"no server":        func(n *Network) { n.DNS = []netip.Addr{{}} },
		"many servers":     func(n *Network) { n.DNS = append(n.DNS, n.DNS[0], n.DNS[0], n.DNS[0]) },
	} {
		n := network()
		change(n)
		if n.Check() == nil {
			t.Errorf("%s: %+v is taken", name, n)
		}
	}
}

// TestFindWire: the wire of an adopted sandbox is looked up once, when it is first
// needed, and never after CloseWire.
func TestFindWire(t *testing.T) {
	var w WireEnd
	found := 0
	missing := errors.New("it does not answer")
	w.FindWire(func() (*os.File, error) {
		if found++; found == 1 {
			return nil, missing
		}
		return os.Open(os.DevNull)
	})
	if _, err := w.Wire(); !errors.Is(err, missing) {
		t.Errorf("%v", err)
	}
	for range 2 {
		f, err := w.Wire()
		if err != nil {
			t.Fatal(err)
		}
		_ = f.Close()
	}
	if err := w.CloseWire(); err != nil || found != 2 {
		t.Errorf("found %d times, %v", found, err)
	}
	if _, err := w.Wire(); !errors.Is(err, ErrNoWire) || found != 2 {
		t.Errorf("after the end: %v, found %d times", err, found)
	}
}

// TestWireEnd: each copy of a wire carries frames and can be waited for, whatever
// happens to the other copies.
func TestWireEnd(t *testing.T) {
	var w WireEnd
	if f, err := w.Wire(); !errors.Is(err, ErrNoWire) {
		t.Errorf("without a wire: %v, %v", f, err)
	}
	fds, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC|unix.SOCK_NONBLOCK, 0)
	if err != nil {
		t.Fatal(err)
	}
	guest := os.NewFile(uintptr(fds[1]), "guest")
	defer func() { _ = guest.Close() }()
	w.KeepWire(os.NewFile(uintptr(fds[0]), "host"))
	first, err := w.Wire()
	if err != nil {
		t.Fatal(err)
	}
	if err := first.Close(); err != nil { // as if the process that plays the network had died
		t.Fatal(err)
	}
	second, err := w.Wire()
	if err := errors.Join(err, w.CloseWire(), w.CloseWire()); err != nil {
		t.Fatal(err)
	}
	defer func() { _ = second.Close() }()
	if _, err := guest.Write([]byte("frame")); err != nil {
		t.Fatal(err)
	}
	got := make([]byte, 10)
	if n, err := second.Read(got); err != nil || string(got[:n]) != "frame" {
		t.Errorf("%q, %v", got[:n], err)
	}
	if err := second.SetReadDeadline(time.Unix(1, 0)); err != nil {
		t.Error(err)
	}
	if n, err := second.Read(got); !errors.Is(err, os.ErrDeadlineExceeded) {
		t.Errorf("%q, %v", got[:n], err)
	}
	if f, err := w.Wire(); !errors.Is(err, ErrNoWire) {
		t.Errorf("a wire that is closed: %v, %v", f, err)
	}
}
