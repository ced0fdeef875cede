package engine

import (
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"sync"

	"agentrun.dev/internal/storage/snapshot"
	"golang.org/x/sys/unix"
)

// Network is the network interface of a sandbox, eth0 inside. Beside it the sandbox
// has only a loopback. Forks keep the settings and differ in their wires.
type Network struct {
	// MAC is the sandbox's hardware address, a unicast address.
	MAC [6]byte
	// MTU is how many bytes a frame carries at most, without its header.
	MTU int
	// Address is the sandbox's own IPv4 address, with the prefix of its network.
	Address netip.Prefix
	// Gateway is the router for all other addresses. Without one, they are
	// unreachable.
	Gateway netip.Addr
	// Address6 and Gateway6 are the same for IPv6. Without an Address6 the sandbox
	// has no IPv6.
	Address6 netip.Prefix
	Gateway6 netip.Addr
	// DNS are the servers in /etc/resolv.conf, three at most. Without any, the
	// image's own /etc/resolv.conf stays.
	DNS []netip.Addr
}

// MaxMTU is the largest MTU of a sandbox's interface.
const MaxMTU = 9000

// minMTU and minMTU6 are the least MTUs of IPv4 and of IPv6 (RFC 8200 §5).
const (
	minMTU  = 68
	minMTU6 = 1280
)

// maxDNS is MAXNS of resolv.conf(5).
const maxDNS = 3

// Check refuses settings that engines cannot give a sandbox.
func (n *Network) Check() error {
	switch {
	case n.MAC[0]&1 != 0 || n.MAC == [6]byte{}:
		return fmt.Errorf("network: %v is not the address of one device", net.HardwareAddr(n.MAC[:]))
	case n.Address6.IsValid() && n.MTU < minMTU6:
		return fmt.Errorf("network: an MTU of %d is less than the %d of IPv6", n.MTU, minMTU6)
	case n.MTU < minMTU || n.MTU > MaxMTU:
		return fmt.Errorf("network: an MTU of %d is not between %d and %d", n.MTU, minMTU, MaxMTU)
	case !usable(n.Address.Addr()) || n.Address.Bits() < 1:
		return fmt.Errorf("network: %v is no IPv4 address with the length of its network's prefix", n.Address)
	case n.Gateway.IsValid() && !usable(n.Gateway):
		return fmt.Errorf("network: the gateway %v is no IPv4 address", n.Gateway)
	case n.Gateway.IsValid() && !n.Address.Contains(n.Gateway):
		return fmt.Errorf("network: the gateway %v is not in the sandbox's network, %v", n.Gateway, n.Address.Masked())
	case len(n.DNS) > maxDNS:
		return fmt.Errorf("network: %d DNS servers are more than %d", len(n.DNS), maxDNS)
	}
	for _, a := range n.DNS {
		if !usable(a) && !usable6(a) {
			return fmt.Errorf("network: the DNS server %v is no address of IPv4 or IPv6", a)
		}
	}
	return n.check6()
}

// check6 checks the settings of IPv6.
func (n *Network) check6() error {
	switch {
	case !n.Address6.IsValid() && n.Gateway6.IsValid():
		return fmt.Errorf("network: the gateway %v is of no use without an address of IPv6", n.Gateway6)
	case !n.Address6.IsValid():
		return nil
	case !usable6(n.Address6.Addr()) || n.Address6.Bits() < 1:
		return fmt.Errorf("network: %v is no IPv6 address with the length of its network's prefix", n.Address6)
	case n.Gateway6.IsValid() && !usable6(n.Gateway6):
		return fmt.Errorf("network: the gateway %v is no IPv6 address", n.Gateway6)
	case n.Gateway6.IsValid() && !n.Address6.Contains(n.Gateway6):
		return fmt.Errorf("network: the gateway %v is not in the sandbox's network, %v", n.Gateway6, n.Address6.Masked())
	}
	return nil
}

func usable(a netip.Addr) bool { return a.Is4() && !a.IsUnspecified() }

// usable6 refuses zones: they name interfaces, and the sandbox has one.
func usable6(a netip.Addr) bool {
	return a.Is6() && !a.Is4In6() && a.Zone() == "" && !a.IsUnspecified() && !a.IsMulticast()
}

// Nets is the interface as a manifest stores it; an empty list for nil.
func (n *Network) Nets() []snapshot.Net {
	if n == nil {
		return nil
	}
	out := snapshot.Net{MAC: net.HardwareAddr(n.MAC[:]).String(), MTU: n.MTU, Address: n.Address.String()}
	if n.Gateway.IsValid() {
		out.Gateway = n.Gateway.String()
	}
	if n.Address6.IsValid() {
		out.Address6 = n.Address6.String()
	}
	if n.Gateway6.IsValid() {
		out.Gateway6 = n.Gateway6.String()
	}
	for _, a := range n.DNS {
		out.DNS = append(out.DNS, a.String())
	}
	return []snapshot.Net{out}
}

// NetworkOf is the interface of a snapshot's sandboxes, or nil.
func NetworkOf(m snapshot.Manifest) (*Network, error) {
	switch len(m.Nets) {
	case 0:
		return nil, nil
	case 1:
	default:
		return nil, fmt.Errorf("%w: it has %d network interfaces, and one is possible", ErrMismatch, len(m.Nets))
	}
	in, out := m.Nets[0], &Network{MTU: m.Nets[0].MTU}
	mac, err := net.ParseMAC(in.MAC)
	if err != nil || len(mac) != len(out.MAC) {
		return nil, fmt.Errorf("network of the snapshot: %q is no MAC address", in.MAC)
	}
	copy(out.MAC[:], mac)
	if out.Address, err = netip.ParsePrefix(in.Address); err == nil && in.Gateway != "" {
		out.Gateway, err = netip.ParseAddr(in.Gateway)
	}
	if err == nil && in.Address6 != "" {
		out.Address6, err = netip.ParsePrefix(in.Address6)
	}
	if err == nil && in.Gateway6 != "" {
		out.Gateway6, err = netip.ParseAddr(in.Gateway6)
	}
	for _, s := range in.DNS {
		a, dnsErr := netip.ParseAddr(s)
		err = errors.Join(err, dnsErr)
		out.DNS = append(out.DNS, a)
	}
	if err == nil {
		err = out.Check()
	}
	if err != nil {
		return nil, fmt.Errorf("network of the snapshot: %w", err)
	}
	return out, nil
}

// WireEnd holds the host's end of a sandbox's wire for an engine. The zero value is
// the WireEnd of a sandbox without an interface.
type WireEnd struct {
	mu   sync.Mutex // protects all following fields
	file *os.File   // nil without an interface, and before find has succeeded
	// find gets the end that the sandbox's maker has left. It is set only in an
	// adopted sandbox.
	find func() (*os.File, error)
}

// KeepWire takes over the host's end of a sandbox's wire.
func (w *WireEnd) KeepWire(f *os.File) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.file = f
}

// FindWire sets how the WireEnd of an adopted sandbox gets the host's end once it is
// needed.
func (w *WireEnd) FindWire(find func() (*os.File, error)) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.find = find
}

// Wire returns a copy of the host's end.
func (w *WireEnd) Wire() (*os.File, error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.file == nil && w.find != nil {
		file, err := w.find()
		if err != nil {
			return nil, err
		}
		w.file = file
	}
	if w.file == nil {
		return nil, fmt.Errorf("%w: the sandbox has no network interface, or it is closed", ErrNoWire)
	}
	raw, err := w.file.SyscallConn()
	if err != nil {
		return nil, fmt.Errorf("copy a wire: %w", err)
	}
	fd := -1
	ctlErr := raw.Control(func(from uintptr) { fd, err = unix.FcntlInt(from, unix.F_DUPFD_CLOEXEC, 0) })
	if err = errors.Join(err, ctlErr); err != nil {
		return nil, fmt.Errorf("copy a wire: %w", err)
	}
	return os.NewFile(uintptr(fd), "wire"), nil
}

// ErrOldWire says why a sandbox that an older AgentRun has started has no wire to
// hand out.
var ErrOldWire = fmt.Errorf("%w: an older AgentRun has started the sandbox, and only the process that did has its wire: hibernate and wake it, or fork it anew", ErrNoWire)

// CloseWire closes the engine's end. Copies of it stay open.
func (w *WireEnd) CloseWire() error {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.find = nil
	if w.file == nil {
		return nil
	}
	err := w.file.Close()
	w.file = nil
	return err
}
