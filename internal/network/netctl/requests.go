package netctl

import (
	"fmt"
	"net/netip"
	"time"

	"agentrun.dev/internal/network/inject"
)

// Configure replaces the settings that all wires share.
type Configure struct {
	ID uint64
	Settings
}

// Settings are the settings that all wires of a netd share.
type Settings struct {
	// Upstreams are the DNS servers for names outside of internal domains.
	Upstreams []netip.AddrPort
	// InternalDomains have DNS servers of their own, whose private addresses are
	// trusted.
	InternalDomains []InternalDomain
	// ClosedRanges are closed in addition to the ranges that are closed everywhere.
	ClosedRanges []netip.Prefix
	// Defaults are the limits of wires without limits of their own. 0 is netd's own
	// default. Up and Down apply at once, the others to wires that are attached later.
	Defaults Limits
	// Roots are the certificates (PEM) of the CAs that verify the servers that
	// credentials are sent to.
	Roots []byte
}

// Check refuses settings that no message can carry. A netd would close the connection
// of each daemon that sends them.
func (s Settings) Check() error {
	m := Marshal(&Configure{Settings: s})
	if len(m) > MaxMessage {
		return fmt.Errorf("%w: they take %d bytes, at most %d are possible", ErrInvalid, len(m), MaxMessage)
	}
	if _, err := Unmarshal(m); err != nil {
		return fmt.Errorf("%w: a list or a name in them is too long: %w", ErrInvalid, err)
	}
	return nil
}

// InternalDomain is a domain with all names below it.
type InternalDomain struct {
	Domain    string
	Upstreams []netip.AddrPort
}

// Limits bound how much a sandbox can use of its netd. A limit of 0 is the default.
type Limits struct {
	// Connections bounds the TCP connections, and Opening those of them that are
	// being opened. Flows bounds the pairs of UDP addresses, and Queries the DNS
	// messages. All are numbers at one time.
	Connections, Opening, Flows, Queries int
	// Buffers bounds the bytes in the buffers of all connections together.
	Buffers int
	// Up and Down are bytes per second from and to the sandbox.
	Up, Down uint64
}

// Inside are the networks between sandboxes and their gateways, one for each version
// of IP. They are the same for all wires, and their addresses lead to no outside
// host.
var Inside = []netip.Prefix{netip.MustParsePrefix("10.255.255.0/30"), netip.MustParsePrefix("fd00:a9e7::/126")}

// Attach gives a netd a wire to serve. Its one descriptor is the host's end.
type Attach struct {
	ID uint64
	Wire
}

// Wire describes a sandbox's interface, and its rules.
type Wire struct {
	ID              ID
	MAC, GatewayMAC [6]byte
	// Address and Gateway are IPv4 addresses. The IPv6 addresses are both invalid if
	// the sandbox has no IPv6. All lie in Inside.
	Address, Gateway   netip.Addr
	Address6, Gateway6 netip.Addr
	MTU                int
	Rules              Rules
	Limits             Limits
	// Paused says that the sandbox is paused.
	Paused bool
	// Lineage is the network state that the sandbox continues from, which its new
	// wire does not know.
	Lineage Lineage
}

// Rules are the permissions of a sandbox.
type Rules struct {
	// Policies are a policy.Set in JSON. Each of them must allow a connection.
	Policies string
	// ECH allows TLS connections whose server name is encrypted.
	ECH bool
	// Injections are the hosts whose requests get credentials.
	Injections []inject.Host
}

// Lineage is the network state that a copy of a sandbox inherits.
type Lineage struct {
	// Tuples are the connections that the sandbox had. They are reset inside.
	Tuples []Tuple
	// Pins map the addresses that the sandbox knows to their names.
	Pins []Pin
	// Wildcards count the names asked for below wildcards of its policies.
	Wildcards []Wildcard
}

// Wildcard is the number of names asked for below a pattern since Began, and the sum
// of their lengths.
type Wildcard struct {
	Pattern      string
	Began        time.Time
	Names, Bytes int
}

// Tuple is a TCP connection of a sandbox.
type Tuple struct{ Inside, Outside netip.AddrPort }

// Pin is an address that the sandbox got for a name.
type Pin struct {
	Name string
	Addr netip.Addr
	// Internal says that an upstream of an internal domain has given the address.
	Internal bool
}

// SetPolicy replaces the rules of a wire. Connections that they do not allow are cut.
type SetPolicy struct {
	ID    uint64
	Wire  ID
	Rules Rules
}

// OfWire is a request about a wire without further arguments: Detach, Pause, Resume
// or Mark. The data of the reply to Mark is a Marked.
type OfWire struct {
	Kind Kind
	ID   uint64
	Wire ID
}

// Marked identifies an instant before a capture. A wire remembers the last few
// instants.
type Marked struct{ Mark uint64 }

// Collect asks for the pins, and for all connections that were open at any time since
// a mark. It ends the mark. The data of the reply is a Lineage.
type Collect struct {
	ID   uint64
	Wire ID
	Mark uint64
}

// Simple is a request without arguments: List, Stats or Shutdown. The data of the
// replies is a Wires and a Stats. After its reply to Shutdown the netd ends.
type Simple struct {
	Kind Kind
	ID   uint64
}

// Wires are all wires that a netd serves.
type Wires struct{ All []WireInfo }

// WireInfo is the current state of a wire.
type WireInfo struct {
	ID       ID
	Attached time.Time
	Paused   bool
	Counters Counters
}

// Counters count since the wire was attached; Connections and Flows are current
// numbers. In is from the sandbox, Out is to it.
type Counters struct {
	FramesIn, BytesIn, FramesOut, BytesOut, Dropped uint64
	Connections, Flows                              uint64
	// Opened and Refused count connections and flows.
	Opened, Refused uint64
}

// Log asks for entries of a wire's log: connections that have ended, and refusals.
type Log struct {
	ID   uint64
	Wire ID
	// From is the number of the first entry to return. The first entry of a log is 1.
	// A number beyond the next entry refers to the log of an earlier netd; the answer
	// then begins with the first entry.
	From uint64
	// Max bounds the entries of the answer; 0 is MaxEntries.
	Max int
	// Wait is how long to wait for an entry if the log has no new one, MaxWait at
	// most.
	Wait time.Duration
	// Open asks for the open connections as well.
	Open bool
}

// LogPage is the answer to Log.
type LogPage struct {
	Entries []Entry
	// Next is the value of From for the next request.
	Next uint64
	// Lost is how many entries from From on were overwritten before they were read.
	Lost uint64
	// Open are the open connections, at most MaxEntries, the oldest first. They have
	// no numbers yet.
	Open []Entry
}

// Entry is one line of a wire's log.
type Entry struct {
	// Seq counts up from 1.
	Seq uint64
	// Time is when the sandbox asked for the connection. Ended is when the entry was
	// written.
	Time, Ended time.Time
	// Protocol is tcp, udp or dns.
	Protocol string
	// Name is the name that the connection was for, if it is known.
	Name string
	// Address is the address that the sandbox asked for. Remote is the address that
	// was dialled instead, if the name has moved since the sandbox resolved it.
	Address, Remote netip.AddrPort
	// Sent and Received count bytes from the sandbox's point of view.
	Sent, Received uint64
	// Rule has decided, and Kind is its kind. Reason says why, for people.
	Rule, Kind, Reason string
	// Outcome is the way in which it ended: open, closed, reset by remote, reset by
	// sandbox, refused, failed or cut.
	Outcome string
	// Repeated is how many further attempts were refused for the same reason since
	// Time.
	Repeated uint64
}

// Clip shortens texts to the limits of messages.
func (e *Entry) Clip() {
	for text, limit := range map[*string]int{
		&e.Protocol: maxName, &e.Name: maxName, &e.Rule: maxReason, &e.Kind: maxName, &e.Reason: maxReason, &e.Outcome: maxName,
	} {
		*text = (*text)[:min(len(*text), limit)]
	}
}

// Stats are the sums over all wires that a netd has ever had.
type Stats struct {
	// Wires is the current number of wires.
	Wires int
	// Queries counts DNS messages.
	Queries uint64
	// Injected counts the requests that got credentials.
	Injected uint64
	Kinds    []KindCount
	Dropped  []DropCount
}

// KindCount counts the connections and refusals by rules of one kind. There are few
// kinds.
type KindCount struct {
	Kind                                  string
	Connections, Refusals, Sent, Received uint64
}

// DropCount counts the frames and datagrams that were dropped for one reason.
type DropCount struct {
	Reason string
	Count  uint64
}

func (*Configure) kind() Kind { return KindConfigure }
func (*Attach) kind() Kind    { return KindAttach }
func (*SetPolicy) kind() Kind { return KindSetPolicy }
func (m *OfWire) kind() Kind  { return m.Kind }
func (m *Simple) kind() Kind  { return m.Kind }
func (*Collect) kind() Kind   { return KindCollect }
func (*Log) kind() Kind       { return KindLog }

// RequestID is the id that the reply will have.
func (m *Configure) RequestID() uint64 { return m.ID }

// RequestID is the id that the reply will have.
func (m *Attach) RequestID() uint64 { return m.ID }

// RequestID is the id that the reply will have.
func (m *SetPolicy) RequestID() uint64 { return m.ID }

// RequestID is the id that the reply will have.
func (m *OfWire) RequestID() uint64 { return m.ID }

// RequestID is the id that the reply will have.
func (m *Collect) RequestID() uint64 { return m.ID }

// RequestID is the id that the reply will have.
func (m *Simple) RequestID() uint64 { return m.ID }

// RequestID is the id that the reply will have.
func (m *Log) RequestID() uint64 { return m.ID }

func upstreams(c coder, v *[]netip.AddrPort) { list(c, v, maxUpstreams, coder.endpoint) }

func (m *Configure) fields(c coder) {
	c.number(&m.ID)
	upstreams(c, &m.Upstreams)
	list(c, &m.InternalDomains, maxDomains, func(c coder, d *InternalDomain) {
		c.text(&d.Domain, maxName)
		upstreams(c, &d.Upstreams)
	})
	list(c, &m.ClosedRanges, maxRanges, coder.prefix)
	m.Defaults.fields(c)
	c.data(&m.Roots, maxRoots)
}

func (l *Limits) fields(c coder) {
	for _, v := range []*int{&l.Connections, &l.Opening, &l.Flows, &l.Queries, &l.Buffers} {
		c.integer(v)
	}
	c.numberMax(&l.Up, 1<<62)
	c.numberMax(&l.Down, 1<<62)
}

func (m *Attach) fields(c coder) {
	c.number(&m.ID)
	w := &m.Wire
	c.text((*string)(&w.ID), maxID)
	c.mac(&w.MAC)
	c.mac(&w.GatewayMAC)
	for _, a := range []*netip.Addr{&w.Address, &w.Gateway, &w.Address6, &w.Gateway6} {
		c.address(a)
	}
	c.integer(&w.MTU)
	w.Rules.fields(c)
	w.Limits.fields(c)
	c.flag(&w.Paused)
	w.Lineage.fields(c)
}

func (l *Lineage) fields(c coder) {
	list(c, &l.Tuples, MaxTuples, func(c coder, t *Tuple) {
		c.endpoint(&t.Inside)
		c.endpoint(&t.Outside)
	})
	list(c, &l.Pins, MaxPins, func(c coder, p *Pin) {
		c.text(&p.Name, maxName)
		c.address(&p.Addr)
		c.flag(&p.Internal)
	})
	list(c, &l.Wildcards, MaxWildcards, func(c coder, w *Wildcard) {
		c.text(&w.Pattern, maxReason)
		c.time(&w.Began)
		c.integer(&w.Names)
		c.integer(&w.Bytes)
	})
}

func (m *SetPolicy) fields(c coder) {
	c.number(&m.ID)
	c.text((*string)(&m.Wire), maxID)
	m.Rules.fields(c)
}

func (r *Rules) fields(c coder) {
	c.text(&r.Policies, maxPolicies)
	c.flag(&r.ECH)
	list(c, &r.Injections, maxInjections, injection)
}

func injection(c coder, h *inject.Host) {
	c.text((*string)(&h.Name), maxName)
	c.data(&h.Certificate, maxDER)
	c.text((*string)(&h.Key), maxDER)
	c.text(&h.Problem, maxReason)
	list(c, &h.Credentials, maxInjections, func(c coder, v *inject.Credential) {
		c.text(&v.Secret, maxFormat)
		c.text(&v.Header, maxFormat)
		c.text(&v.Format, maxFormat)
		c.text(&v.Placeholder, maxFormat)
		c.text((*string)(&v.Value), inject.MaxValue)
		c.text(&v.Problem, maxReason)
	})
}

func (m *OfWire) fields(c coder) {
	c.number(&m.ID)
	c.text((*string)(&m.Wire), maxID)
}

func (r *Marked) fields(c coder) { c.number(&r.Mark) }

func (m *Collect) fields(c coder) {
	c.number(&m.ID)
	c.text((*string)(&m.Wire), maxID)
	c.number(&m.Mark)
}

func (m *Simple) fields(c coder) { c.number(&m.ID) }

func (m *Log) fields(c coder) {
	c.number(&m.ID)
	c.text((*string)(&m.Wire), maxID)
	c.number(&m.From)
	c.integer(&m.Max)
	c.duration(&m.Wait)
	c.flag(&m.Open)
}

func (r *Wires) fields(c coder) {
	list(c, &r.All, MaxWires, func(c coder, w *WireInfo) {
		c.text((*string)(&w.ID), maxID)
		c.time(&w.Attached)
		c.flag(&w.Paused)
		n := &w.Counters
		for _, v := range []*uint64{
			&n.FramesIn, &n.BytesIn, &n.FramesOut, &n.BytesOut, &n.Dropped,
			&n.Connections, &n.Flows, &n.Opened, &n.Refused,
		} {
			c.number(v)
		}
	})
}

func (e *Entry) fields(c coder) {
	c.number(&e.Seq)
	c.time(&e.Time)
	c.time(&e.Ended)
	c.text(&e.Protocol, maxName)
	c.text(&e.Name, maxName)
	c.endpoint(&e.Address)
	c.endpoint(&e.Remote)
	c.number(&e.Sent)
	c.number(&e.Received)
	c.text(&e.Rule, maxReason)
	c.text(&e.Kind, maxName)
	c.text(&e.Reason, maxReason)
	c.text(&e.Outcome, maxName)
	c.number(&e.Repeated)
}

func (r *LogPage) fields(c coder) {
	list(c, &r.Entries, MaxEntries, func(c coder, e *Entry) { e.fields(c) })
	c.number(&r.Next)
	c.number(&r.Lost)
	list(c, &r.Open, MaxEntries, func(c coder, e *Entry) { e.fields(c) })
}

func (r *Stats) fields(c coder) {
	c.integer(&r.Wires)
	c.number(&r.Queries)
	c.number(&r.Injected)
	list(c, &r.Kinds, maxCounters, func(c coder, k *KindCount) {
		c.text(&k.Kind, maxName)
		for _, v := range []*uint64{&k.Connections, &k.Refusals, &k.Sent, &k.Received} {
			c.number(v)
		}
	})
	list(c, &r.Dropped, maxCounters, func(c coder, d *DropCount) {
		c.text(&d.Reason, maxName)
		c.number(&d.Count)
	})
}
