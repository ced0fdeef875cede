package engine

import (
	"errors"
	"net/netip"
	"os"
	"reflect"
	"testing"

	"agentrun.dev/internal/snapshot"
	"golang.org/x/sys/unix"
)

func network() *Network {
	return &Network{
		MAC: [6]byte{2, 0, 0, 0, 0, 1}, MTU: 1500, Address: netip.MustParsePrefix("10.0.2.15/24"),
		Gateway: netip.MustParseAddr("10.0.2.2"), DNS: []netip.Addr{netip.MustParseAddr("9.9.9.9")},
	}
}

// TestNetworkInManifest: forks get the interface that was booted.
func TestNetworkInManifest(t *testing.T) {
	bare := network()
	bare.Gateway, bare.DNS = netip.Addr{}, nil
	for _, want := range []*Network{nil, network(), bare} {
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
		"IPv6 server":      func(n *Network) { n.DNS = []netip.Addr{v6} },
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

// TestOpenWire: a wire is copied; without one the interface leads nowhere, and
// notices nothing.
func TestOpenWire(t *testing.T) {
	ours, theirs, err := NewWire()
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = ours.Close() }()
	wire, err := OpenWire(network(), theirs)
	if err := errors.Join(err, theirs.Close()); err != nil {
		t.Fatal(err)
	}
	defer func() { _ = wire.Close() }()
	if _, err := wire.Write([]byte("frame")); err != nil {
		t.Fatal(err)
	}
	got := make([]byte, 10)
	if n, err := ours.Read(got); err != nil || string(got[:n]) != "frame" {
		t.Errorf("%q, %v", got[:n], err)
	}

	nowhere, err := OpenWire(network(), nil)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = nowhere.Close() }()
	fd := int(nowhere.Fd())
	if _, err := unix.Write(fd, []byte("frame")); err == nil {
		t.Error("somebody took a frame")
	}
	if n, err := unix.Read(fd, got); !errors.Is(err, unix.EAGAIN) {
		t.Errorf("read %d bytes, %v", n, err)
	}

	if wire, err := OpenWire(nil, nil); wire != nil || err != nil {
		t.Error(wire, err)
	}
	if _, err := OpenWire(nil, ours); !errors.Is(err, ErrMismatch) {
		t.Errorf("a wire for nothing: %v", err)
	}
	for _, kind := range []int{unix.SOCK_SEQPACKET, unix.SOCK_STREAM} {
		fds, err := unix.Socketpair(unix.AF_UNIX, kind|unix.SOCK_CLOEXEC, 0)
		if err != nil {
			t.Fatal(err)
		}
		a, b := os.NewFile(uintptr(fds[0]), "one end"), os.NewFile(uintptr(fds[1]), "the other")
		if _, err := OpenWire(network(), a); err == nil {
			t.Errorf("a socket of type %d was taken", kind)
		}
		_, _ = a.Close(), b.Close()
	}
	file, err := os.Open(os.DevNull)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = file.Close() }()
	if _, err := OpenWire(network(), file); err == nil {
		t.Error("a file was taken")
	}
}
