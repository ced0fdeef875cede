// Package egress is the way out of sandboxes. For each connection that a sandbox
// opens, it decides by the sandbox's policy, dials, reads the name of the host that
// the sandbox asks for, and moves the bytes. It keeps a log of connections and
// refusals.
//
// # Names and addresses
//
// A policy has names, packets have addresses. A pin connects them: it records that
// our DNS has given this sandbox an address for a name. A pin is a handle, not a
// permission. The policy decides about the name each time, and every address is
// checked again before it is dialled. An old pin is resolved again. So a fork or a
// woken sandbox that connects to an address from its past reaches the current address
// of the name.
//
// # Inspection of connections
//
// If a connection was allowed for certain names, the name in it decides, on the ports
// whose protocols carry a name. Nothing is sent to the other side before:
//
//	443    the server name of TLS. A ClientHello without one, one that cannot be read, or with
//	       an encrypted one (ECH, also the imitation that browsers send) is refused.
//	80     the Host of every request. The requests are parsed and written anew, so that the
//	       server sees exactly those that were checked. HTTP/2, CONNECT, and upgrades other
//	       than WebSocket are refused.
//	other  nothing: servers may speak first there. The pin alone decides.
//
// With egress: allow, names are read only if rules deny names. Then a connection to
// port 443 may have no name, and one that does not begin like TLS passes. Port 80 is
// HTTP only.
//
// The name in TLS is the sandbox's claim, not the identity of the server that
// answers. A server of several names can be asked for another name inside of TLS
// (domain fronting).
//
// # Credentials
//
// A connection to a host whose requests get credentials (package inject) ends here. A
// new connection to the host begins once its certificate was verified. Each request
// is checked and written anew, as on port 80.
package egress

import (
	"context"
	"crypto/x509"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"agentrun.dev/internal/network/addresses"
	"agentrun.dev/internal/network/dns"
	"agentrun.dev/internal/network/inject"
	"agentrun.dev/internal/network/policy"
	"agentrun.dev/internal/network/stack"

	"golang.org/x/sys/unix"
)

const (
	portHTTP  = 80
	portHTTPS = 443

	dialTimeout = 30 * time.Second
)

// CheckFunc refuses an address at the last moment before it is dialled.
type CheckFunc func(to netip.AddrPort) error

// DialFunc opens a connection; network is "tcp" or "udp". It calls check with the
// address that it is about to connect to, and connects only if check returns no
// error.
type DialFunc func(ctx context.Context, network string, to netip.AddrPort, check CheckFunc) (net.Conn, error)

// Config holds the parts that the sandboxes of a process share.
type Config struct {
	Resolver *dns.Resolver
	Guard    *addresses.Guard
	// Dial opens connections; nil uses the host's network.
	Dial DialFunc
	// Inside are the networks between sandboxes and their gateways. Connections to
	// them are refused.
	Inside []netip.Prefix
	// FirstBytes is how long a connection may be silent before its name was read, and
	// how long the head of an HTTP request may take; 0 is 30 seconds.
	FirstBytes time.Duration
	// DNS bounds the questions of each sandbox; the zero value is dns.DefaultLimits.
	DNS dns.Limits
	// LogSize is how many entries each sandbox's log keeps; 0 is 512.
	LogSize int
	// MaxPins is how many pins each sandbox has; 0 is 2048.
	MaxPins int
}

// Gateway makes the ways out of sandboxes, and counts for all of them.
type Gateway struct {
	config   Config
	counters counters
	queries  atomic.Uint64 // DNS messages of all sandboxes
	injected atomic.Uint64 // requests of all sandboxes that got credentials
	roots    atomic.Pointer[x509.CertPool]

	// counting is held for reading while the bytes of a connection move to the
	// counters, and for writing while the counters are read. It is locked before the
	// mutex of a sandbox.
	counting sync.RWMutex
	// sandboxes holds the sandboxes that have connections, or may get some. It is
	// protected by counting, held for writing.
	sandboxes map[*Sandbox]struct{}
}

// NewGateway returns a gateway.
func NewGateway(config Config) *Gateway {
	if config.Dial == nil {
		config.Dial = Dial
	}
	if config.FirstBytes <= 0 {
		config.FirstBytes = 30 * time.Second
	}
	if config.DNS == (dns.Limits{}) {
		config.DNS = dns.DefaultLimits()
	}
	if config.LogSize <= 0 {
		config.LogSize = 512
	}
	if config.MaxPins <= 0 {
		config.MaxPins = 2048
	}
	return &Gateway{config: config, sandboxes: make(map[*Sandbox]struct{})}
}

// Rules are the permissions of a sandbox.
type Rules struct {
	// Policy contains the policies of the sandbox, of its claim and template, and of
	// the forks between.
	Policy policy.Set
	// ECH allows TLS connections with an encrypted inner name. Then only the outer
	// name is checked, which says little.
	ECH bool
	// Inject holds the hosts whose requests get credentials.
	Inject inject.Set
}

// Inheritance is the state that a sandbox takes over from the sandbox that it was
// forked or woken from.
type Inheritance struct {
	// Pins are resolved again before they are used.
	Pins []Pin
	// Wildcards count as if the sandbox itself had asked for the names.
	Wildcards []dns.WildcardUse
}

// NewSandbox returns a sandbox's way out. Close ends it.
func (g *Gateway) NewSandbox(rules Rules, from Inheritance) *Sandbox {
	s := &Sandbox{gateway: g, rules: rules, pins: pins{limit: g.config.MaxPins}, log: ring{size: g.config.LogSize}}
	s.dns = g.config.Resolver.NewClient((*names)(s), g.config.DNS)
	s.pins.inherit(from.Pins)
	if len(from.Wildcards) > 0 {
		known := make([]string, 0, len(from.Pins))
		for _, p := range from.Pins {
			known = append(known, p.Name)
		}
		s.dns.Inherit(from.Wildcards, known)
	}
	g.counting.Lock()
	defer g.counting.Unlock()
	g.sandboxes[s] = struct{}{}
	return s
}

// Sandboxes is the number of sandboxes that have connections, or may get some.
func (g *Gateway) Sandboxes() int {
	g.counting.RLock()
	defer g.counting.RUnlock()
	return len(g.sandboxes)
}

// forget removes a sandbox whose last connection has ended. The caller holds neither
// mutex.
func (g *Gateway) forget(s *Sandbox) {
	g.counting.Lock()
	defer g.counting.Unlock()
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.closed && len(s.live) == 0 {
		delete(g.sandboxes, s)
	}
}

// Dial is the DialFunc of the host's network.
func Dial(ctx context.Context, network string, to netip.AddrPort, check CheckFunc) (net.Conn, error) {
	d := net.Dialer{Timeout: dialTimeout, Control: func(network, address string, conn syscall.RawConn) error {
		actual, err := netip.ParseAddrPort(address)
		if err != nil {
			return fmt.Errorf("check the address to dial: %w", err)
		}
		if err := check(actual); err != nil || !strings.HasPrefix(network, "tcp") {
			return err
		}
		return boundUnsent(conn)
	}}
	return d.DialContext(ctx, network, to.String())
}

// maxUnsent is how many unsent bytes the kernel keeps. Otherwise it would keep
// megabytes for a server that does not read. Bytes that are sent and not acknowledged
// do not count, so long paths stay busy.
const maxUnsent = 128 << 10

func boundUnsent(conn syscall.RawConn) error {
	var err error
	controlErr := conn.Control(func(fd uintptr) {
		err = unix.SetsockoptInt(int(fd), unix.IPPROTO_TCP, unix.TCP_NOTSENT_LOWAT, maxUnsent)
	})
	if err = errors.Join(controlErr, err); err != nil {
		return fmt.Errorf("bound what waits to be sent: %w", err)
	}
	return nil
}

// told turns the error of a dial into the error that the sandbox sees.
func told(err error) error {
	switch {
	case errors.Is(err, stack.ErrRefused), errors.Is(err, stack.ErrUnreachable):
		return err
	case errors.Is(err, syscall.ECONNREFUSED), errors.Is(err, syscall.ECONNRESET):
		return fmt.Errorf("%w: %w", stack.ErrRefused, err)
	case errors.Is(err, os.ErrDeadlineExceeded), errors.Is(err, context.DeadlineExceeded), errors.Is(err, syscall.ETIMEDOUT):
		return fmt.Errorf("%w: %w", context.DeadlineExceeded, err)
	default:
		return fmt.Errorf("%w: %w", stack.ErrUnreachable, err)
	}
}

// normalize returns the form of an address in which decisions are made.
func normalize(a netip.AddrPort) netip.AddrPort {
	return netip.AddrPortFrom(addresses.Normalize(a.Addr()), a.Port())
}
