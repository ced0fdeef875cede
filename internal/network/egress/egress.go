// Package egress is the way out of sandboxes: for each connection that a sandbox opens it
// decides by the sandbox's policy, dials, looks for the name that the sandbox says it speaks
// to, moves the bytes, and keeps a log of what was connected and refused.
//
// # Names and addresses
//
// A policy has names, packets have addresses. What connects them is a pin: the fact that our
// DNS has given this sandbox an address for a name. A pin is a handle, not a permission: the
// policy decides about the name each time, every address is checked again before it is
// dialled, and an old pin is resolved again, so that a fork or a woken sandbox that connects
// to an address from its past reaches where the name leads now.
//
// # What is read from connections
//
// Where a connection was allowed for certain names, the name that it says decides on the
// ports where it says one. Nothing is sent to the other side before:
//
//	443    the server name of TLS. A ClientHello without one, one that cannot be read, or with
//	       an encrypted one (ECH, also the imitation that browsers send) is refused.
//	80     the Host of every request. The requests are parsed and written anew, so that the
//	       server sees exactly those that were checked. HTTP/2, CONNECT, and upgrades other
//	       than WebSocket are refused.
//	other  nothing: servers may speak first there. The pin alone decides.
//
// With egress: allow, names are looked at only if rules deny names. Then a connection to port
// 443 may say no name, and one that does not begin like TLS passes; port 80 is HTTP only.
//
// The name in TLS is what the sandbox says to the outside, not who answers: a server that
// serves several names can be asked for another one inside of TLS (domain fronting).
//
// # Credentials
//
// Connections to a host whose requests get credentials (package inject) are ended here, and
// begun anew towards the host, once its certificate was verified. Each request is checked and
// written anew, as on port 80.
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

// DialFunc opens a connection; network is "tcp" or "udp". It calls check with the address that
// it is about to connect to, and connects only if that is no error.
type DialFunc func(ctx context.Context, network string, to netip.AddrPort, check CheckFunc) (net.Conn, error)

// Config is what the sandboxes of a process share.
type Config struct {
	Resolver *dns.Resolver
	Guard    *addresses.Guard
	// Dial opens connections; nil is the host's network.
	Dial DialFunc
	// Inside are the networks between sandboxes and their gateways. They lead nowhere.
	Inside []netip.Prefix
	// FirstBytes is how long a connection whose name is looked at may keep silent, and how
	// long the head of an HTTP request may take; 0 is 30 seconds.
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

	// counting is held for reading while a connection's bytes move from the connection to the
	// counters, and for writing while they are read. It comes before the mutex of a sandbox.
	counting sync.RWMutex
	// sandboxes have connections, or may get some; counting, held for writing, protects it.
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

// Rules are what a sandbox may do.
type Rules struct {
	// Policy is that of the sandbox, of its claim and its template, and of the forks between.
	Policy policy.Set
	// ECH lets TLS connections through whose inner name is encrypted: then only the outer
	// name, which says little, is checked.
	ECH bool
	// Inject has the hosts whose requests get credentials.
	Inject inject.Set
}

// Inheritance is what a sandbox has of the one that it was forked from, or woken from.
type Inheritance struct {
	// Pins are resolved again before they are used.
	Pins []Pin
	// Wildcards count for the sandbox as if it had asked itself.
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

// Sandboxes is how many there are that have connections, or may get some.
func (g *Gateway) Sandboxes() int {
	g.counting.RLock()
	defer g.counting.RUnlock()
	return len(g.sandboxes)
}

// forget takes a sandbox out whose last connection has ended. The caller holds neither mutex.
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

// maxUnsent is how many bytes the kernel keeps that it has not sent yet, where it would keep
// megabytes for a server that does not read. What was sent, and is not acknowledged, comes on
// top of it: that keeps long ways busy.
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

// told turns the error of a dial into what the sandbox is told.
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

// normalize is the form in which addresses are decided about.
func normalize(a netip.AddrPort) netip.AddrPort {
	return netip.AddrPortFrom(addresses.Normalize(a.Addr()), a.Port())
}
