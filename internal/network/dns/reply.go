package dns

import (
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"time"

	"golang.org/x/net/dns/dnsmessage"
)

// errForeign says that a message does not answer the question that was asked.
var errForeign = errors.New("message does not answer the question")

// asked is one question in the form sent to an upstream.
type asked struct {
	id   uint16
	name dnsmessage.Name // in the mixed case in which it was sent
	// exact requires that the answer repeats name byte for byte
	// (draft-vixie-dnsext-dns0x20).
	exact bool
	typ   dnsmessage.Type
}

// message is an upstream's answer, parsed and bounded, before its relevant parts are
// chosen.
type message struct {
	header dnsmessage.Header
	// aliases and addrs are the records of the answer section, by owner.
	aliases map[string]alias
	addrs   map[string][]address
	// soa is the zone's bound on the lifetime of negative answers; 0 without a SOA
	// record.
	soa    time.Duration
	hasSOA bool
}

type alias struct {
	target string
	ttl    uint32
}

type address struct {
	addr netip.Addr
	ttl  uint32
}

// parseMessage reads an upstream's message. An error that wraps errForeign says that
// the message may come from somewhere else, and that the right one may still come.
func parseMessage(raw []byte, a asked) (message, error) {
	var p dnsmessage.Parser
	header, err := p.Start(raw)
	if err != nil {
		return message{}, fmt.Errorf("parse header: %w", errForeign)
	}
	if header.ID != a.id || !header.Response || header.OpCode != 0 {
		return message{}, fmt.Errorf("id or flags differ: %w", errForeign)
	}
	question, err := p.Question()
	if err != nil {
		return message{}, fmt.Errorf("parse question: %w", errForeign)
	}
	sameName := strings.EqualFold(question.Name.String(), a.name.String())
	if a.exact {
		sameName = question.Name == a.name
	}
	if !sameName || question.Type != a.typ || question.Class != dnsmessage.ClassINET {
		return message{}, fmt.Errorf("another question: %w", errForeign)
	}
	if _, err := p.Question(); !errors.Is(err, dnsmessage.ErrSectionDone) {
		return message{}, fmt.Errorf("more than one question: %w", errForeign)
	}
	m := message{header: header}
	if header.Truncated {
		return m, nil // the question is asked again over TCP
	}
	if err := m.parseAnswers(&p, a.typ); err != nil {
		return message{}, err
	}
	m.parseAuthority(&p, a.name)
	return m, nil
}

// parseAnswers collects the aliases and addresses of the answer section.
func (m *message) parseAnswers(p *dnsmessage.Parser, want dnsmessage.Type) error {
	m.aliases, m.addrs = make(map[string]alias), make(map[string][]address)
	for range maxRecords {
		h, err := p.AnswerHeader()
		if errors.Is(err, dnsmessage.ErrSectionDone) {
			return nil
		}
		if err != nil {
			return fmt.Errorf("parse answer: %w", err)
		}
		owner, err := canonical(h.Name)
		if err != nil || h.Class != dnsmessage.ClassINET || (h.Type != want && h.Type != dnsmessage.TypeCNAME) {
			if err := p.SkipAnswer(); err != nil {
				return fmt.Errorf("parse answer: %w", err)
			}
			continue
		}
		if err := m.parseRecord(p, owner, h); err != nil {
			return fmt.Errorf("parse answer of type %v: %w", h.Type, err)
		}
	}
	return p.SkipAllAnswers()
}

func (m *message) parseRecord(p *dnsmessage.Parser, owner string, h dnsmessage.ResourceHeader) error {
	var addr netip.Addr
	switch h.Type {
	case dnsmessage.TypeCNAME:
		r, err := p.CNAMEResource()
		if err != nil {
			return err
		}
		target, err := canonical(r.CNAME)
		if err != nil {
			return err
		}
		if _, twice := m.aliases[owner]; !twice { // RFC 1034 §3.6.2 allows only one
			m.aliases[owner] = alias{target: target, ttl: h.TTL}
		}
		return nil
	case dnsmessage.TypeA:
		r, err := p.AResource()
		if err != nil {
			return err
		}
		addr = netip.AddrFrom4(r.A)
	case dnsmessage.TypeAAAA:
		r, err := p.AAAAResource()
		if err != nil {
			return err
		}
		addr = netip.AddrFrom16(r.AAAA)
	}
	// An IPv4 address in an AAAA record serves only to evade checks of addresses.
	if !addr.Is4In6() && len(m.addrs[owner]) < maxAddresses {
		m.addrs[owner] = append(m.addrs[owner], address{addr: addr, ttl: h.TTL})
	}
	return nil
}

// parseAuthority looks for the SOA record of a zone that can contain the name. The
// record bounds how long a negative answer is kept (RFC 2308 §5). In a malformed
// section it finds none.
func (m *message) parseAuthority(p *dnsmessage.Parser, name dnsmessage.Name) {
	names := []string{}
	if n, err := canonical(name); err == nil {
		names = append(names, n)
	}
	for _, a := range m.aliases {
		names = append(names, a.target)
	}
	for range maxRecords {
		h, err := p.AuthorityHeader()
		if err != nil {
			return
		}
		if h.Type != dnsmessage.TypeSOA || h.Class != dnsmessage.ClassINET {
			if p.SkipAuthority() != nil {
				return
			}
			continue
		}
		r, err := p.SOAResource()
		if err != nil {
			return
		}
		zone := strings.ToLower(strings.TrimSuffix(h.Name.String(), "."))
		inZone := func(n string) bool { return zone == "" || below(n, zone) }
		if slices.ContainsFunc(names, inZone) {
			m.soa, m.hasSOA = time.Duration(min(h.TTL, r.MinTTL))*time.Second, true
			return
		}
	}
}

// reply follows the aliases in a message from name, as long as the upstream that sent
// the message is responsible for them. It drops all other records.
func (m *message) reply(name string, competent func(name string) bool, now time.Time) (reply, error) {
	r := reply{}
	ttl := maxTTL
	lower := func(seconds uint32) { ttl = min(ttl, time.Duration(seconds)*time.Second) }
	current := name
	for {
		a, ok := m.aliases[current]
		if !ok {
			break
		}
		if len(r.aliases) == maxAliases || a.target == name || slices.Contains(r.aliases, a.target) {
			return reply{}, ErrAlias
		}
		lower(a.ttl)
		r.aliases = append(r.aliases, a.target)
		current = a.target
		if !competent(current) {
			r.open = true
			r.expires = now.Add(max(ttl, minTTL))
			return r, nil
		}
	}
	for _, a := range m.addrs[current] {
		lower(a.ttl)
		if !slices.Contains(r.addrs, a.addr) {
			r.addrs = append(r.addrs, a.addr)
		}
	}
	r.notFound = m.header.RCode == dnsmessage.RCodeNameError && len(r.addrs) == 0
	switch {
	case len(r.addrs) > 0:
		r.expires = now.Add(max(ttl, minTTL))
	case len(r.aliases) > 0 && !r.notFound && !m.hasSOA:
		// The upstream did not follow the alias.
		r.open = true
		r.expires = now.Add(max(ttl, minTTL))
	case m.hasSOA:
		r.expires = now.Add(min(m.soa, ttl, maxNegativeTTL))
	default:
		r.expires = now // RFC 2308 §5: without SOA the answer is not kept
	}
	return r, nil
}
