package egress

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"slices"
	"sync"
	"time"

	"agentrun.dev/internal/network/dns"
	"agentrun.dev/internal/network/policy"
	"agentrun.dev/internal/network/stack"
)

// maxResolved bounds the names of one address that are resolved again for one connection.
const maxResolved = 8

var _ stack.Outside = (*Sandbox)(nil)

// Sandbox is one sandbox's way out.
type Sandbox struct {
	gateway  *Gateway
	dns      *dns.Client
	log      ring
	counters counters

	mu     sync.Mutex
	rules  Rules // mu protects it and all following fields
	change int   // counts changes of the rules, and of everything else that decisions depend on
	pins   pins
	live   map[*connection]struct{}
	closed bool
}

// refusal is the error of a connection that the policy does not allow.
type refusal struct{ policy.Decision }

func (r *refusal) Error() string { return "refused by the network policy: " + r.Reason }

// Unwrap lets the sandbox see a refused connection.
func (r *refusal) Unwrap() error { return stack.ErrRefused }

// SetRules replaces the rules of the sandbox, and cuts connections that they do not
// allow.
func (s *Sandbox) SetRules(rules Rules) {
	s.mu.Lock()
	s.rules = rules
	s.mu.Unlock()
	s.Recheck()
}

// Recheck cuts connections that are no longer allowed, after closed ranges or
// internal domains have changed.
func (s *Sandbox) Recheck() {
	s.mu.Lock()
	s.change++ // connections whose decision is under way will decide again
	s.mu.Unlock()
	for _, c := range s.connections() {
		c.recheck()
	}
}

// Close cuts all connections. None can be opened afterwards.
func (s *Sandbox) Close() {
	s.mu.Lock()
	s.closed = true
	s.mu.Unlock()
	for _, c := range s.connections() {
		d, _ := c.settled()
		c.cut(policy.Decision{Kind: d.Kind, Rule: d.Rule, Reason: "the sandbox's network has ended"})
	}
	s.gateway.forget(s)
}

// Inheritance returns the state that forks of the sandbox inherit.
func (s *Sandbox) Inheritance() Inheritance {
	s.mu.Lock()
	defer s.mu.Unlock()
	return Inheritance{Pins: s.pins.all(), Wildcards: s.dns.Wildcards()}
}

// Log returns up to limit entries after a sequence number, oldest first. A gap before
// the first entry means that older entries are gone.
func (s *Sandbox) Log(after uint64, limit int) []Entry { return s.log.since(after, limit) }

// LogChanged returns a channel that is closed when the log next changes. Call it
// before Log.
func (s *Sandbox) LogChanged() <-chan struct{} { return s.log.next() }

// Connections returns the open connections, in the form of log entries.
func (s *Sandbox) Connections() []Entry {
	var list []Entry
	for _, c := range s.connections() {
		list = append(list, c.entry(Open))
	}
	slices.SortFunc(list, func(a, b Entry) int { return a.Time.Compare(b.Time) })
	return list
}

func (s *Sandbox) connections() []*connection {
	s.mu.Lock()
	defer s.mu.Unlock()
	list := make([]*connection, 0, len(s.live))
	for c := range s.live {
		list = append(list, c)
	}
	return list
}

// DialTCP opens a connection for the sandbox.
func (s *Sandbox) DialTCP(ctx context.Context, _, to netip.AddrPort) (stack.Remote, error) {
	c, err := s.dial(ctx, policy.TCP, to)
	if err != nil {
		return nil, err
	}
	return c, nil
}

// DialUDP opens a flow of datagrams for the sandbox.
func (s *Sandbox) DialUDP(ctx context.Context, _, to netip.AddrPort) (net.Conn, error) {
	c, err := s.dial(ctx, policy.UDP, to)
	if err != nil {
		return nil, err
	}
	return &flow{outside: c.out, connection: c}, nil
}

// ServeDNS answers a question of the sandbox.
func (s *Sandbox) ServeDNS(ctx context.Context, query []byte, tcp bool) []byte {
	s.gateway.queries.Add(1)
	return s.dns.Serve(ctx, query, tcp)
}

// dial decides about a connection, and opens it.
func (s *Sandbox) dial(ctx context.Context, protocol policy.Protocol, to netip.AddrPort) (*connection, error) {
	c := &connection{sandbox: s, protocol: protocol, to: normalize(to), asked: time.Now()}
	c.target = c.to
	if err := s.register(c); err != nil {
		return nil, err
	}
	now, pinned := s.situation(c.to.Addr())
	decision := s.decide(now.rules, protocol, c.to, pinned)
	c.settle(now, decision, pinned)
	err := refused(decision.Decision)
	if err == nil {
		err = c.locate(ctx)
	}
	if err == nil {
		err = c.connect(ctx)
	}
	if err != nil {
		c.fail(err)
		return nil, told(err)
	}
	return c, nil
}

// refused is the error for a decision; nil if it allows.
func refused(d policy.Decision) error {
	if d.Allowed {
		return nil
	}
	return &refusal{d}
}

// register adds a connection to those that a change of the rules rechecks.
func (s *Sandbox) register(c *connection) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.closed {
		return fmt.Errorf("%w: the sandbox's network has ended", stack.ErrRefused)
	}
	if s.live == nil {
		s.live = make(map[*connection]struct{})
	}
	s.live[c] = struct{}{}
	return nil
}

// situation is the basis of decisions at one time.
type situation struct {
	rules  Rules
	change int
}

// situation returns the current situation, with the pins of an address.
func (s *Sandbox) situation(addr netip.Addr) (situation, []pin) {
	s.mu.Lock()
	defer s.mu.Unlock()
	return situation{rules: s.rules, change: s.change}, s.pins.of(addr)
}

func (s *Sandbox) current() Rules {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.rules
}

// decide asks the policy about a connection to an address with the given pins.
func (s *Sandbox) decide(rules Rules, protocol policy.Protocol, to netip.AddrPort, pinned []pin) policy.Connection {
	if s.gateway.inside(to.Addr()) {
		return policy.Connection{Decision: policy.Decision{
			Kind: policy.ByClosed, Rule: "closed: gateway",
			Reason: fmt.Sprintf("%v is in the network between the sandbox and its gateway, which serves DNS and nothing else", to),
		}}
	}
	if protocol == policy.UDP && to.Port() == portHTTPS {
		if name := injects(rules, pinned); name != "" {
			return policy.Connection{Decision: policy.Decision{
				Kind: ByInject, Rule: "inject: " + string(name),
				Reason: fmt.Sprintf("requests to %s get credentials, which cannot be put into QUIC: use TCP", name),
			}}
		}
	}
	query := policy.Query{Protocol: protocol, To: s.gateway.config.Guard.Check(to.Addr()), Port: to.Port()}
	for _, p := range pinned {
		// A domain may no longer be internal. Then the answers of its servers open no
		// closed addresses.
		internal := p.internal && s.gateway.config.Resolver.Internal(string(p.name))
		query.Names = append(query.Names, policy.Pinned{Name: p.name, Internal: internal})
	}
	return rules.Policy.Connect(query)
}

func (g *Gateway) inside(addr netip.Addr) bool {
	return slices.ContainsFunc(g.config.Inside, func(p netip.Prefix) bool { return p.Contains(addr) })
}

// locate finds the address to dial. It is the address that the sandbox has asked for,
// unless the connection needs a name and no name of the address has a fresh pin.
func (c *connection) locate(ctx context.Context) error {
	s := c.sandbox
	decision, pinned := c.settled()
	fresh := func(p pin) bool { return slices.Contains(decision.Names, p.name) && time.Now().Before(p.expires) }
	if !decision.NameNeeded || slices.ContainsFunc(pinned, fresh) {
		return nil
	}
	var failures []error
	var current netip.Addr
	moved := make(map[policy.Name]netip.Addr)
	for _, name := range decision.Names[:min(len(decision.Names), maxResolved)] {
		addrs, err := s.resolve(ctx, name, c.to.Addr().Is6())
		if err != nil {
			failures = append(failures, err)
			continue
		}
		if slices.Contains(addrs, c.to.Addr()) {
			moved, current = nil, c.to.Addr()
			break
		}
		moved[name] = addrs[0]
		if !current.IsValid() {
			current = addrs[0]
		}
	}
	if !current.IsValid() {
		var r *refusal
		if err := errors.Join(failures...); errors.As(err, &r) {
			return r
		}
		return fmt.Errorf("%w: no current address: %w", stack.ErrUnreachable, errors.Join(failures...))
	}
	return c.moveTo(current, moved)
}

// moveTo changes the address to dial. moved has the current addresses of the names
// that the sandbox knows under the old address.
func (c *connection) moveTo(to netip.Addr, moved map[policy.Name]netip.Addr) error {
	target := netip.AddrPortFrom(to, c.to.Port())
	now, pinned := c.sandbox.situation(to)
	decision := c.sandbox.decide(now.rules, c.protocol, target, pinned)
	if err := refused(decision.Decision); err != nil {
		return err
	}
	c.sandbox.mu.Lock()
	c.target, c.moved = target, moved
	c.sandbox.mu.Unlock()
	c.settle(now, decision, pinned)
	return nil
}

// resolve returns the current addresses of a name, at least one, and pins them.
func (s *Sandbox) resolve(ctx context.Context, name policy.Name, six bool) ([]netip.Addr, error) {
	answer, err := s.dns.Lookup(ctx, string(name), dns.Family(six))
	if err != nil {
		return nil, err
	}
	addrs, kept := (*names)(s).Resolved(string(name), answer)
	if len(addrs) == 0 {
		return nil, &refusal{policy.Decision{Kind: policy.ByClosed, Rule: "closed", Reason: fmt.Sprintf("%s leads nowhere else now: %s", name, kept)}}
	}
	return addrs, nil
}
