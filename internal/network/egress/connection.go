package egress

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"sync/atomic"
	"time"

	"agentrun.dev/internal/network/policy"
	"agentrun.dev/internal/network/stack"
)

// inspection is what is read from a connection before it is allowed.
type inspection uint8

const (
	nothing   inspection = iota
	tlsName              // the server name of the ClientHello
	httpHosts            // the Host of each request
)

// connection is one TCP connection or UDP flow of a sandbox: a stack.Remote.
type connection struct {
	sandbox  *Sandbox
	protocol policy.Protocol
	to       netip.AddrPort // what the sandbox wants, normalized
	asked    time.Time

	bytes stack.Counters
	ended atomic.Bool // the log has its entry

	// The sandbox's mu protects all following fields.
	target   netip.AddrPort // what is dialled
	decision policy.Connection
	counted  policy.Kind // the kind that it is counted for, once it is connected
	pinned   []pin       // of target, when it was decided
	inspect  inspection
	// moved has current addresses of names for which the sandbox still uses an old one. It is
	// nil if the address that the sandbox wants is current.
	moved  map[policy.Name]netip.Addr
	name   policy.Name // that it says, once it was read
	hidden bool        // that there may be an encrypted name besides
	// through is set when what was read was allowed: from now on bytes are sent.
	through bool
	out     *outside
	inside  stack.Conn // while it is spliced
	// used counts the requests that got credentials, by secret.
	used map[string]int
	// ending is why it was cut or refused, if it was.
	ending  *policy.Decision
	outcome Outcome // with ending
}

// settle notes what was decided about the connection, and decides again if what it depends on
// has changed meanwhile.
func (c *connection) settle(by situation, d policy.Connection, pinned []pin) {
	c.sandbox.mu.Lock()
	c.decision, c.pinned = d, pinned
	c.inspect = c.inspectionOf(by.rules, d)
	changed := c.sandbox.change != by.change
	c.sandbox.mu.Unlock()
	if changed {
		c.recheck()
	}
}

// settled returns what was decided, with the pins that it was decided by.
func (c *connection) settled() (policy.Connection, []pin) {
	c.sandbox.mu.Lock()
	defer c.sandbox.mu.Unlock()
	return c.decision, c.pinned
}

// inspectionOf says what has to be read from the connection.
func (c *connection) inspectionOf(rules Rules, d policy.Connection) inspection {
	byPolicy := d.Looks() && (d.NameNeeded || rules.Policy.DeniesNames())
	if c.protocol != policy.TCP || !byPolicy && injects(rules, c.pinned) == "" {
		return nothing
	}
	switch c.to.Port() {
	case portHTTPS:
		return tlsName
	case portHTTP:
		return httpHosts
	}
	return nothing
}

// connect dials the connection's target.
func (c *connection) connect(ctx context.Context) error {
	c.sandbox.mu.Lock()
	target, old := c.target, c.out
	c.sandbox.mu.Unlock()
	if old != nil {
		old.abort() // before there is another: a connection has one descriptor
	}
	conn, err := c.sandbox.gateway.config.Dial(ctx, string(c.protocol), target, c.check)
	if err != nil {
		return err
	}
	out := &outside{Conn: conn, bytes: &c.bytes}
	c.sandbox.mu.Lock()
	ending, kind := c.ending, c.decision.Kind
	c.out = out
	if old == nil && ending == nil {
		c.counted = kind
	}
	c.sandbox.mu.Unlock()
	if old == nil && ending == nil {
		c.sandbox.counters.connected(kind)
		c.sandbox.gateway.counters.connected(kind)
	}
	if ending != nil { // it was cut while it was dialled
		out.abort()
		return &refusal{*ending}
	}
	return nil
}

// check decides, by the rules of now, about the address that is about to be connected to.
func (c *connection) check(actual netip.AddrPort) error {
	c.sandbox.mu.Lock()
	target, rules, pinned := c.target, c.sandbox.rules, c.pinned
	c.sandbox.mu.Unlock()
	if normalize(actual) != target {
		return &refusal{policy.Decision{Kind: policy.ByClosed, Rule: "closed: changed", Reason: fmt.Sprintf("%v would be dialled instead of %v", actual, target)}}
	}
	return refused(c.sandbox.decide(rules, c.protocol, target, pinned).Decision)
}

// admit decides about the name that the connection says. If the name has moved, the connection
// is dialled again, to where it is now; nothing was sent before.
func (c *connection) admit(ctx context.Context, name policy.Name) (policy.Decision, error) {
	c.sandbox.mu.Lock()
	d, address := c.decision, c.moved[name]
	c.sandbox.mu.Unlock()
	if address.IsValid() && !slices.Contains(d.Names, name) {
		if err := c.moveTo(address, nil); err != nil {
			return policy.Decision{}, err
		}
		if err := c.connect(ctx); err != nil {
			return policy.Decision{}, err
		}
	}
	c.sandbox.mu.Lock()
	defer c.sandbox.mu.Unlock()
	verdict := c.decision.Admits(name)
	if verdict.Allowed {
		c.name, c.through = name, true
		c.moved = nil // the connection stays where its first name has led it
	}
	return verdict, nil
}

// admitNameless decides about a connection that says no name.
func (c *connection) admitNameless() policy.Decision {
	c.sandbox.mu.Lock()
	defer c.sandbox.mu.Unlock()
	d := c.decision.Decision
	if c.decision.NameNeeded {
		return policy.Decision{Kind: d.Kind, Rule: d.Rule, Reason: noName}
	}
	c.through = true
	return d
}

// noName is why a connection is refused, or cut, that says no name and needs one.
const noName = "the policy needs the connection's name, and none was read"

// recheck cuts the connection unless the sandbox's rules of now allow it as it is.
func (c *connection) recheck() {
	s := c.sandbox
	s.mu.Lock()
	for {
		now, target, pinned := situation{rules: s.rules, change: s.change}, c.target, c.pinned
		s.mu.Unlock()
		d := s.decide(now.rules, c.protocol, target, pinned)
		s.mu.Lock()
		if s.change != now.change || c.target != target {
			continue // it was decided about something of the past
		}
		verdict := c.stillAllowed(now.rules, d)
		if verdict.Allowed {
			c.decision = d
			if c.inspect == nothing {
				c.inspect = c.inspectionOf(now.rules, d)
			}
		}
		s.mu.Unlock()
		if !verdict.Allowed {
			c.cut(verdict)
		}
		return
	}
}

// stillAllowed says whether new rules allow what is known of the connection. The caller holds
// the sandbox's mutex.
func (c *connection) stillAllowed(rules Rules, d policy.Connection) policy.Decision {
	refuse := func(kind policy.Kind, reason string) policy.Decision {
		return policy.Decision{Kind: kind, Rule: d.Rule, Reason: reason}
	}
	switch needed := c.inspectionOf(rules, d) != nothing; {
	case !d.Allowed || !needed:
		return d.Decision
	case c.inspect == nothing && c.out != nil:
		return refuse(d.Kind, noName)
	case c.hidden && !rules.ECH:
		return refuse(ByTLS, "the new policy does not allow an encrypted server name (ECH)")
	case c.through && c.name == "" && d.NameNeeded:
		return refuse(d.Kind, noName)
	case c.through && c.name != "":
		return d.Admits(c.name)
	}
	return d.Decision
}

// cut ends the connection on both sides.
func (c *connection) cut(why policy.Decision) { c.end(Cut, why) }

// end breaks the connection off, for a reason that the log gets.
func (c *connection) end(outcome Outcome, why policy.Decision) {
	c.sandbox.mu.Lock()
	if c.ending == nil {
		c.ending, c.outcome = &why, outcome
	}
	out, inside := c.out, c.inside
	c.sandbox.mu.Unlock()
	if out != nil {
		out.abort()
	}
	if inside != nil {
		_ = inside.Reset()
	}
	if c.protocol == policy.UDP && out != nil {
		c.finish(Closed)
	}
}

// Splice moves bytes between the sandbox and the outside.
func (c *connection) Splice(inside stack.Conn) {
	defer func() { _ = inside.Close() }()
	c.sandbox.mu.Lock()
	c.inside = inside
	inspect, ending, out := c.inspect, c.ending, c.out
	c.sandbox.mu.Unlock()
	if ending != nil {
		_ = inside.Reset()
		c.finish(Cut)
		return
	}
	switch inspect {
	case tlsName:
		c.finish(c.spliceTLS(inside))
	case httpHosts:
		c.finish(c.serveHTTP(inside))
	default:
		c.finish(out.splice(inside))
	}
}

// spliceTLS reads the ClientHello first.
func (c *connection) spliceTLS(inside stack.Conn) Outcome {
	patience := c.sandbox.gateway.config.FirstBytes
	_ = inside.SetReadDeadline(time.Now().Add(patience))
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	h, err := readHello(ctx, inside)
	_ = inside.SetReadDeadline(time.Time{})
	d, _ := c.settled()
	c.sandbox.mu.Lock()
	c.hidden = h.hidden
	ech := c.sandbox.rules.ECH
	c.sandbox.mu.Unlock()
	name, verdict := h.judge(err, c.accepting(d), ech)
	switch {
	case verdict.Allowed && name == "":
		verdict = c.admitNameless()
	case verdict.Allowed:
		if verdict, err = c.admit(ctx, name); err != nil {
			verdict = failure(err, d.Decision)
			if verdict.Allowed { // the outside failed, not the policy
				_ = inside.Reset()
				return Failed
			}
		}
	}
	if !verdict.Allowed {
		c.sandbox.mu.Lock()
		if c.name == "" {
			c.name = policy.Name(printable(h.name))
		}
		c.sandbox.mu.Unlock()
		c.end(Refused, verdict)
		return Refused
	}
	c.sandbox.mu.Lock()
	out, host := c.out, c.sandbox.rules.Inject[name]
	c.sandbox.mu.Unlock()
	if host != nil {
		return c.intercept(ctx, inside, h, host)
	}
	if _, err := out.Write(h.raw); err != nil {
		_ = inside.Reset()
		return ResetByRemote
	}
	return out.splice(inside)
}

// accepting is a decision that also accepts the names that have moved: admit dials them.
func (c *connection) accepting(d policy.Connection) policy.Connection {
	c.sandbox.mu.Lock()
	defer c.sandbox.mu.Unlock()
	for name := range c.moved {
		if !slices.Contains(d.Names, name) {
			d.Names = append(slices.Clone(d.Names), name)
		}
	}
	return d
}

// failure is the decision in an error, or an allowed one if the error is not of the policy.
func failure(err error, d policy.Decision) policy.Decision {
	var r *refusal
	if errors.As(err, &r) {
		return r.Decision
	}
	d.Allowed = true
	return d
}

// Close ends the connection if the sandbox's side of it could not be opened, or was cut.
func (c *connection) Close() error {
	if c.ended.Load() {
		return nil
	}
	c.sandbox.mu.Lock()
	spliced, d, out := c.inside != nil, c.decision, c.out
	c.sandbox.mu.Unlock()
	if spliced {
		c.cut(policy.Decision{Kind: d.Kind, Rule: d.Rule, Reason: "the sandbox's end of the connection has gone"})
		return nil
	}
	if out != nil {
		out.abort()
	}
	c.finish(ResetBySandbox)
	return nil
}

// fail logs a connection that was not opened.
func (c *connection) fail(err error) {
	c.sandbox.mu.Lock()
	var r *refusal
	if errors.As(err, &r) {
		c.ending, c.outcome = &r.Decision, Refused
	} else if c.ending == nil {
		d := c.decision.Decision
		d.Reason = err.Error()
		c.ending, c.outcome = &d, Failed
	}
	c.sandbox.mu.Unlock()
	c.finish(Failed)
}

// finish writes the connection's line of the log, once, and forgets the connection.
func (c *connection) finish(outcome Outcome) {
	if c.ended.Swap(true) {
		return
	}
	out := c.leave()
	if out != nil {
		_ = out.Close()
	}
	e := c.entry(outcome)
	if e.Outcome == Refused {
		c.sandbox.refuse(e, policy.Decision{Kind: e.Kind, Rule: e.Rule, Reason: e.Reason})
		return
	}
	c.sandbox.log.add(e)
}

// leave takes the connection out of those that go on, and adds its bytes to the counters.
func (c *connection) leave() *outside {
	s := c.sandbox
	s.gateway.counting.RLock()
	s.mu.Lock()
	delete(s.live, c)
	out, closed := c.out, s.closed
	if c.counted != "" {
		s.counters.moved(c.counted, &c.bytes)
		s.gateway.counters.moved(c.counted, &c.bytes)
	}
	s.mu.Unlock()
	s.gateway.counting.RUnlock()
	if closed {
		s.gateway.forget(s)
	}
	return out
}

// entry is the connection as the log has it, if it ended now.
func (c *connection) entry(outcome Outcome) Entry {
	c.sandbox.mu.Lock()
	defer c.sandbox.mu.Unlock()
	e := Entry{
		Time: c.asked, Ended: time.Now(), Protocol: string(c.protocol), Name: string(c.name), Address: c.to,
		Sent: uint64(c.bytes.Sent.Load()), Received: uint64(c.bytes.Received.Load()),
		Rule: c.decision.Rule, Kind: c.decision.Kind, Reason: c.decision.Reason, Outcome: outcome,
	}
	if c.target != c.to {
		e.Remote = c.target
	}
	e.Reason = withUses(e.Reason, c.used)
	if e.Name == "" {
		e.Name = joined(c.decision.Names)
	}
	if c.ending != nil {
		e.Rule, e.Kind, e.Reason, e.Outcome = c.ending.Rule, c.ending.Kind, c.ending.Reason, c.outcome
	}
	return e
}

// joined names those for which an address is known, as far as a line has room.
func joined(names []policy.Name) string {
	var texts []string
	for _, n := range names[:min(len(names), 3)] {
		texts = append(texts, string(n))
	}
	return strings.Join(texts, ",")
}

// printable is text of a sandbox as a log may show it.
func printable(text string) string {
	if _, err := policy.ParseName(text); err == nil || text == "" {
		return text
	}
	return fmt.Sprintf("%.80q", text)
}

// flow is a UDP flow as the stack has it.
type flow struct {
	*outside
	connection *connection
}

// Close ends the flow, and logs it.
func (f *flow) Close() error {
	f.connection.finish(Closed)
	return nil
}
