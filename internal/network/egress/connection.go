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

// inspection is the part of a connection that is read before the connection is
// allowed.
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
	to       netip.AddrPort // the address that the sandbox has asked for, normalized
	asked    time.Time

	bytes stack.Counters
	ended atomic.Bool // its log entry is written

	// Sandbox.mu protects all following fields.
	target   netip.AddrPort // the address that is dialled
	decision policy.Connection
	counted  policy.Kind // the kind under which the connection counts once it is connected
	pinned   []pin       // pins of target at the time of the decision
	inspect  inspection
	// moved maps names, for which the sandbox still uses an old address, to their
	// current addresses. It is nil if the address that the sandbox has asked for is
	// current.
	moved  map[policy.Name]netip.Addr
	name   policy.Name // the name in the connection, once it was read
	hidden bool        // the ClientHello may contain an encrypted name as well
	// through is set once the name was read and allowed. From then on bytes are sent.
	through bool
	out     *outside
	inside  stack.Conn // while Splice runs
	// used counts the requests that got credentials, by secret.
	used map[string]int
	// ending is why the connection was cut or refused; nil if it was not.
	ending  *policy.Decision
	outcome Outcome // set with ending
}

// settle stores a decision about the connection. If the rules or pins that it depends
// on have changed meanwhile, it decides again.
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

// settled returns the decision, and the pins that it is based on.
func (c *connection) settled() (policy.Connection, []pin) {
	c.sandbox.mu.Lock()
	defer c.sandbox.mu.Unlock()
	return c.decision, c.pinned
}

// inspectionOf returns the part of the connection that has to be read.
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
		old.abort() // before the next dial: a connection has one descriptor
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
	if ending != nil { // it was cut during the dial
		out.abort()
		return &refusal{*ending}
	}
	return nil
}

// check decides, by the current rules, about the address to be dialled.
func (c *connection) check(actual netip.AddrPort) error {
	c.sandbox.mu.Lock()
	target, rules, pinned := c.target, c.sandbox.rules, c.pinned
	c.sandbox.mu.Unlock()
	if normalize(actual) != target {
		return &refusal{policy.Decision{Kind: policy.ByClosed, Rule: "closed: changed", Reason: fmt.Sprintf("%v would be dialled instead of %v", actual, target)}}
	}
	return refused(c.sandbox.decide(rules, c.protocol, target, pinned).Decision)
}

// admit decides about the name in the connection. If the name has moved, admit dials
// the connection again, to the name's current address. Nothing was sent before.
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
		c.moved = nil // the connection stays at the address of its first name
	}
	return verdict, nil
}

// admitNameless decides about a connection without a name.
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

// noName is the reason for refusing or cutting a connection that needs a name and has
// none.
const noName = "the policy needs the connection's name, and none was read"

// recheck cuts the connection unless the sandbox's current rules allow it.
func (c *connection) recheck() {
	s := c.sandbox
	s.mu.Lock()
	for {
		now, target, pinned := situation{rules: s.rules, change: s.change}, c.target, c.pinned
		s.mu.Unlock()
		d := s.decide(now.rules, c.protocol, target, pinned)
		s.mu.Lock()
		if s.change != now.change || c.target != target {
			continue // the rules or the target have changed during the decision
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

// stillAllowed says whether new rules allow the connection, as far as it is known by
// now. The caller holds the sandbox's mutex.
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

// end breaks the connection off. why goes to the log.
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

// accepting returns a decision that also accepts the names that have moved, which
// admit then dials.
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

// failure returns the decision inside an error. For an error that does not come from
// the policy it returns an allowed one.
func failure(err error, d policy.Decision) policy.Decision {
	var r *refusal
	if errors.As(err, &r) {
		return r.Decision
	}
	d.Allowed = true
	return d
}

// Close ends the connection if the sandbox's side could not be opened, or was cut.
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

// finish writes the connection's log entry, once, and removes the connection.
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

// leave removes the connection from the sandbox's live ones, and adds its bytes to
// the counters.
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

// entry is the log entry of the connection as if it ended now.
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

// joined lists the names whose addresses are known, as far as a line has room.
func joined(names []policy.Name) string {
	var texts []string
	for _, n := range names[:min(len(names), 3)] {
		texts = append(texts, string(n))
	}
	return strings.Join(texts, ",")
}

// printable returns a sandbox's text in a form that is safe for a log.
func printable(text string) string {
	if _, err := policy.ParseName(text); err == nil || text == "" {
		return text
	}
	return fmt.Sprintf("%.80q", text)
}

// flow is a UDP flow for the stack.
type flow struct {
	*outside
	connection *connection
}

// Close ends the flow, and logs it.
func (f *flow) Close() error {
	f.connection.finish(Closed)
	return nil
}
