package dns

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"net/netip"
	"slices"
	"time"

	"golang.org/x/net/dns/dnsmessage"
)

// Types that ask for several kinds of records, or for a whole zone (RFC 1035 §3.2.3,
// RFC 1995).
const (
	typeIXFR  dnsmessage.Type = 251
	typeAXFR  dnsmessage.Type = 252
	typeMAILB dnsmessage.Type = 253
	typeMAILA dnsmessage.Type = 254
)

// Extended errors (RFC 8914) tell a person who uses dig why there is no answer.
const (
	optionEDE    = 15
	edeBlocked   = 15
	edeFiltered  = 17
	edeForbidden = 18
	rcodeBadVers = 16 // RFC 6891 §9: needs the extended bits of OPT
)

// Client is one sandbox's access to a Resolver.
type Client struct {
	resolver *Resolver
	asker    Asker
	meter    meter
}

// NewClient makes the Client of one sandbox.
func (r *Resolver) NewClient(asker Asker, limits Limits) *Client {
	return &Client{resolver: r, asker: asker, meter: meter{limits: limits}}
}

// Inherit counts the names below wildcards that the source of this sandbox has asked
// for. The names that the source had resolved do not count again.
func (c *Client) Inherit(uses []WildcardUse, names []string) {
	c.meter.inherit(uses, names, time.Now())
}

// Wildcards returns the uses that forks of the sandbox inherit.
func (c *Client) Wildcards() []WildcardUse { return c.meter.uses(time.Now()) }

// Lookup returns the addresses of a name, within the sandbox's limits. It is for a
// name that the sandbox has resolved before, so it does not ask the Asker.
func (c *Client) Lookup(ctx context.Context, name string, family Family) (Answer, error) {
	if !c.meter.query(time.Now()) || !c.meter.begin() {
		return Answer{}, ErrLimit
	}
	defer c.meter.end()
	return c.resolver.lookup(ctx, c, name, family)
}

// query is a sandbox's message, parsed.
type query struct {
	header   dnsmessage.Header
	question dnsmessage.Question
	// size is the maximum size of the answer.
	size int
	// edns is set if the sandbox understands EDNS.
	edns       bool
	badVersion bool
}

// response is the answer to a query.
type response struct {
	code  dnsmessage.RCode
	chain []string // from the name asked for to the owner of addrs
	addrs []netip.Addr
	ttl   uint32
	// why is the code of the extended error, or 0.
	why  uint16
	text string
}

// Serve answers one message of the sandbox. It returns nil for a message that gets no
// answer: one that is too short to have an id, or that is an answer itself.
func (c *Client) Serve(ctx context.Context, raw []byte, tcp bool) []byte {
	q, code, ok := parseQuery(raw, tcp)
	if !ok {
		return nil
	}
	if code != dnsmessage.RCodeSuccess {
		return q.encode(response{code: code})
	}
	return q.encode(c.respond(ctx, q))
}

// parseQuery reads a sandbox's message. ok is false if the message gets no answer.
func parseQuery(raw []byte, tcp bool) (query, dnsmessage.RCode, bool) {
	var p dnsmessage.Parser
	header, err := p.Start(raw)
	if err != nil || header.Response {
		return query{}, 0, false
	}
	q := query{header: header, size: 512} // RFC 1035 §4.2.1
	if tcp {
		q.size = 65535
	}
	if header.OpCode != 0 {
		return q, dnsmessage.RCodeNotImplemented, true
	}
	if len(raw) > maxQuery {
		return q, dnsmessage.RCodeFormatError, true
	}
	if q.question, err = p.Question(); err != nil {
		return q, dnsmessage.RCodeFormatError, true
	}
	// Reading the end of each section in turn shows that the message contains nothing
	// else.
	if _, err := p.Question(); !errors.Is(err, dnsmessage.ErrSectionDone) {
		q.question = dnsmessage.Question{}
		return q, dnsmessage.RCodeFormatError, true
	}
	if _, err := p.AnswerHeader(); !errors.Is(err, dnsmessage.ErrSectionDone) {
		return q, dnsmessage.RCodeFormatError, true
	}
	if _, err := p.AuthorityHeader(); !errors.Is(err, dnsmessage.ErrSectionDone) {
		return q, dnsmessage.RCodeFormatError, true
	}
	if !q.parseOptions(&p, tcp) {
		return q, dnsmessage.RCodeFormatError, true
	}
	return q, dnsmessage.RCodeSuccess, true
}

// parseOptions reads the OPT record, of which there is at most one (RFC 6891 §6.1.1).
// Its options are not used: cookies, client subnets and padding never reach an
// upstream.
func (q *query) parseOptions(p *dnsmessage.Parser, tcp bool) bool {
	for {
		h, err := p.AdditionalHeader()
		if errors.Is(err, dnsmessage.ErrSectionDone) {
			return true
		}
		if err != nil {
			return false
		}
		if h.Type == dnsmessage.TypeOPT {
			if q.edns {
				return false
			}
			q.edns = true
			q.badVersion = h.TTL>>16&0xff != 0
			if !tcp {
				q.size = min(max(int(h.Class), 512), udpSize)
			}
		}
		if err := p.SkipAdditional(); err != nil {
			return false
		}
	}
}

// respond decides on the answer for the sandbox.
func (c *Client) respond(ctx context.Context, q query) response {
	now := time.Now()
	if q.badVersion {
		return response{code: rcodeBadVers}
	}
	refuse := func(name string, reason Reason, detail string) response {
		c.asker.Refused(name, reason, detail)
		return response{code: dnsmessage.RCodeRefused, why: reason.extendedError(), text: string(reason)}
	}
	name, err := canonical(q.question.Name)
	if err != nil {
		name = fmt.Sprintf("%.64q", q.question.Name.String())
	}
	if !c.meter.query(now) {
		return refuse(name, ReasonRate, "")
	}
	if err != nil {
		return refuse(name, ReasonName, "")
	}
	if q.question.Class != dnsmessage.ClassINET {
		return refuse(name, ReasonClass, "")
	}
	verdict := c.asker.MayResolve(name)
	if !verdict.Allowed {
		return refuse(name, ReasonPolicy, "")
	}
	var family Family
	switch q.question.Type {
	case dnsmessage.TypeA:
		family = IPv4
	case dnsmessage.TypeAAAA:
		family = IPv6
	case dnsmessage.TypeALL, typeAXFR, typeIXFR, typeMAILA, typeMAILB:
		return refuse(name, ReasonType, "")
	default:
		return response{why: edeFiltered, text: string(ReasonType)}
	}
	if verdict.Wildcard != "" && !c.meter.name(verdict.Wildcard, name, now) {
		return refuse(name, ReasonWildcard, "")
	}
	if !c.meter.begin() {
		return refuse(name, ReasonPending, "")
	}
	answer, err := c.resolver.lookup(ctx, c, name, family)
	c.meter.end()
	if errors.Is(err, ErrLimit) {
		return refuse(name, ReasonPending, "")
	}
	if errors.Is(err, ErrAlias) {
		c.asker.Refused(name, ReasonAlias, err.Error())
	}
	if err != nil {
		return response{code: dnsmessage.RCodeServerFailure}
	}
	return c.tell(name, answer, refuse)
}

// tell turns an answer of the upstreams into a response for the sandbox.
func (c *Client) tell(name string, answer Answer, refuse func(string, Reason, string) response) response {
	for _, alias := range answer.Aliases {
		if !c.asker.MayAlias(name, alias) {
			return refuse(name, ReasonAlias, alias)
		}
	}
	r := response{chain: answer.Aliases, ttl: uint32(max(time.Until(answer.Expires), 0) / time.Second)}
	if answer.NotFound {
		r.code = dnsmessage.RCodeNameError
		return r
	}
	if len(answer.Addrs) == 0 {
		return r
	}
	told, kept := c.asker.Resolved(name, answer)
	if len(told) == 0 {
		return refuse(name, ReasonAddresses, kept)
	}
	r.addrs = slices.Clone(told)
	// The cache has one order for all clients. Shuffling spreads the clients that
	// take the first address.
	rand.Shuffle(len(r.addrs), func(i, j int) { //nolint:gosec // nobody gains by guessing the order
		r.addrs[i], r.addrs[j] = r.addrs[j], r.addrs[i]
	})
	return r
}

func (r Reason) extendedError() uint16 {
	switch r {
	case ReasonPolicy, ReasonAlias, ReasonAddresses:
		return edeBlocked
	default:
		return edeForbidden
	}
}

// encode builds the message for a response. If it is too large for a datagram, it
// becomes an empty message that sends the sandbox to TCP.
func (q query) encode(r response) []byte {
	raw, err := q.build(r, false)
	if err == nil && len(raw) <= q.size {
		return raw
	}
	if err != nil {
		r = response{code: dnsmessage.RCodeServerFailure}
	} else {
		r = response{code: r.code}
	}
	raw, err = q.build(r, err == nil)
	if err != nil {
		return nil
	}
	return raw
}

func (q query) build(r response, truncated bool) ([]byte, error) {
	b := dnsmessage.NewBuilder(make([]byte, 0, 512), dnsmessage.Header{
		ID:                 q.header.ID,
		Response:           true,
		OpCode:             q.header.OpCode,
		RecursionDesired:   q.header.RecursionDesired,
		RecursionAvailable: true,
		CheckingDisabled:   q.header.CheckingDisabled,
		Truncated:          truncated,
		RCode:              r.code & 0xf,
	})
	b.EnableCompression()
	if q.question.Name.Length != 0 {
		if err := b.StartQuestions(); err != nil {
			return nil, err
		}
		if err := b.Question(q.question); err != nil {
			return nil, err
		}
	}
	if err := b.StartAnswers(); err != nil {
		return nil, err
	}
	if err := q.buildAnswers(&b, r); err != nil {
		return nil, err
	}
	if q.edns {
		if err := buildOptions(&b, r); err != nil {
			return nil, err
		}
	}
	return b.Finish()
}

func (q query) buildAnswers(b *dnsmessage.Builder, r response) error {
	h := dnsmessage.ResourceHeader{Name: q.question.Name, Class: dnsmessage.ClassINET, TTL: r.ttl}
	for _, alias := range r.chain {
		target := wireName(alias)
		if err := b.CNAMEResource(h, dnsmessage.CNAMEResource{CNAME: target}); err != nil {
			return err
		}
		h.Name = target
	}
	for _, addr := range r.addrs {
		if addr.Is4() != (q.question.Type == dnsmessage.TypeA) {
			return fmt.Errorf("address %v in an answer to a question of type %v", addr, q.question.Type)
		}
		var err error
		if addr.Is4() {
			err = b.AResource(h, dnsmessage.AResource{A: addr.As4()})
		} else {
			err = b.AAAAResource(h, dnsmessage.AAAAResource{AAAA: addr.As16()})
		}
		if err != nil {
			return err
		}
	}
	return nil
}

func buildOptions(b *dnsmessage.Builder, r response) error {
	if err := b.StartAdditionals(); err != nil {
		return err
	}
	var h dnsmessage.ResourceHeader
	if err := h.SetEDNS0(udpSize, r.code, false); err != nil {
		return err
	}
	var opt dnsmessage.OPTResource
	if r.why != 0 {
		data := append([]byte{byte(r.why >> 8), byte(r.why)}, r.text...)
		opt.Options = append(opt.Options, dnsmessage.Option{Code: optionEDE, Data: data})
	}
	return b.OPTResource(h, opt)
}
