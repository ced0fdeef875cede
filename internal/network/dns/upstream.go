package dns

import (
	"context"
	"crypto/rand"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"sync/atomic"
	"time"

	"golang.org/x/net/dns/dnsmessage"
)

const (
	attemptTimeout = 2 * time.Second
	lookupTimeout  = 10 * time.Second
	rounds         = 2 // how often each upstream of a zone is asked

	// maxForeign is how many datagrams that answer another question are ignored. More
	// than that suggest an attacker who guesses ids, so the question is then asked
	// over TCP.
	maxForeign = 16
)

// DialFunc opens a connection to an upstream: network is "udp" or "tcp". A datagram
// connection must have a source port of its own, and must deliver only datagrams from
// the upstream's address.
type DialFunc func(ctx context.Context, network string, upstream netip.AddrPort) (net.Conn, error)

// zone is a part of the name tree whose names are asked for at the same upstreams.
type zone struct {
	domain    string // "" contains every name that no other zone contains
	upstreams []netip.AddrPort
	// preferred is the index of the upstream that answered last.
	preferred atomic.Uint32
}

// internal reports whether the zone is an internal domain of the administrator's.
func (z *zone) internal() bool { return z.domain != "" }

// exchanger asks upstreams.
type exchanger struct {
	dial    DialFunc
	mixCase bool
}

// ask asks the zone's upstreams in turn until one answers.
func (e *exchanger) ask(ctx context.Context, z *zone, q question) (message, error) {
	first := z.preferred.Load()
	var failures []error
	for i := range rounds * len(z.upstreams) {
		index := (int(first) + i) % len(z.upstreams)
		m, err := e.askOne(ctx, z.upstreams[index], q)
		if err == nil {
			z.preferred.Store(uint32(index))
			return m, nil
		}
		failures = append(failures, fmt.Errorf("ask %v: %w", z.upstreams[index], err))
		if ctx.Err() != nil {
			break
		}
	}
	return message{}, fmt.Errorf("%w about %s: %w", ErrFailed, q.name, errors.Join(failures...))
}

// askOne asks one upstream over UDP. It asks over TCP if the answer does not fit or
// looks forged.
func (e *exchanger) askOne(ctx context.Context, upstream netip.AddrPort, q question) (message, error) {
	ctx, cancel := context.WithTimeout(ctx, attemptTimeout)
	defer cancel()
	m, err := e.exchange(ctx, "udp", upstream, q, true)
	if err == nil && m.header.RCode == dnsmessage.RCodeFormatError {
		m, err = e.exchange(ctx, "udp", upstream, q, false) // the server is older than EDNS
	}
	if errors.Is(err, errForeign) || (err == nil && m.header.Truncated) {
		m, err = e.exchange(ctx, "tcp", upstream, q, false)
	}
	if err != nil {
		return message{}, err
	}
	switch m.header.RCode {
	case dnsmessage.RCodeSuccess, dnsmessage.RCodeNameError:
	default:
		return message{}, fmt.Errorf("upstream said %v", m.header.RCode)
	}
	if m.header.Truncated {
		return message{}, errors.New("truncated over TCP")
	}
	if !m.header.RecursionAvailable && !m.header.Authoritative && len(m.aliases)+len(m.addrs) == 0 {
		return message{}, errors.New("upstream is not recursive, and has no answer of its own")
	}
	return m, nil
}

func (e *exchanger) exchange(ctx context.Context, network string, upstream netip.AddrPort, q question, edns bool) (message, error) {
	a, query, err := e.query(q, edns)
	if err != nil {
		return message{}, err
	}
	conn, err := e.dial(ctx, network, upstream)
	if err != nil {
		return message{}, err
	}
	defer func() { _ = conn.Close() }()
	stop := context.AfterFunc(ctx, func() { _ = conn.SetDeadline(time.Unix(1, 0)) })
	defer stop()
	if network == "tcp" {
		return exchangeStream(conn, a, query)
	}
	return exchangeDatagrams(conn, a, query)
}

func exchangeDatagrams(conn net.Conn, a asked, query []byte) (message, error) {
	if _, err := conn.Write(query); err != nil {
		return message{}, err
	}
	// An upstream that honours udpSize sends no more. A longer datagram is cut, and
	// does not parse.
	buffer := make([]byte, 4096)
	for range maxForeign {
		n, err := conn.Read(buffer)
		if err != nil {
			return message{}, err
		}
		m, err := parseMessage(buffer[:n], a)
		if errors.Is(err, errForeign) {
			continue
		}
		return m, err
	}
	return message{}, fmt.Errorf("%d datagrams: %w", maxForeign, errForeign)
}

func exchangeStream(conn net.Conn, a asked, query []byte) (message, error) {
	if _, err := conn.Write(append(binary.BigEndian.AppendUint16(nil, uint16(len(query))), query...)); err != nil {
		return message{}, err
	}
	var length [2]byte
	if _, err := io.ReadFull(conn, length[:]); err != nil {
		return message{}, err
	}
	raw := make([]byte, binary.BigEndian.Uint16(length[:]))
	if _, err := io.ReadFull(conn, raw); err != nil {
		return message{}, err
	}
	m, err := parseMessage(raw, a)
	if errors.Is(err, errForeign) {
		return message{}, errors.New("another answer over TCP") // final: TCP is much harder to forge
	}
	return m, err
}

// query builds the message for one attempt. Each attempt has an id of its own.
func (e *exchanger) query(q question, edns bool) (asked, []byte, error) {
	var random [2 + 32]byte // an id, and a bit for each letter of a name
	_, _ = rand.Read(random[:])
	a := asked{id: binary.BigEndian.Uint16(random[:]), name: wireName(q.name), typ: q.family.recordType()}
	if e.mixCase {
		a.exact = true
		mixCase(&a.name, random[2:])
	}
	b := dnsmessage.NewBuilder(make([]byte, 0, 512), dnsmessage.Header{ID: a.id, RecursionDesired: true})
	if err := b.StartQuestions(); err != nil {
		return asked{}, nil, err
	}
	if err := b.Question(dnsmessage.Question{Name: a.name, Type: a.typ, Class: dnsmessage.ClassINET}); err != nil {
		return asked{}, nil, fmt.Errorf("build question about %s: %w", q.name, err)
	}
	if edns {
		if err := b.StartAdditionals(); err != nil {
			return asked{}, nil, err
		}
		var h dnsmessage.ResourceHeader
		if err := h.SetEDNS0(udpSize, dnsmessage.RCodeSuccess, false); err != nil {
			return asked{}, nil, err
		}
		if err := b.OPTResource(h, dnsmessage.OPTResource{}); err != nil {
			return asked{}, nil, err
		}
	}
	raw, err := b.Finish()
	return a, raw, err
}

// mixCase sets the case of each letter by a random bit. An upstream echoes the case,
// and a forger has to guess it (draft-vixie-dnsext-dns0x20).
func mixCase(name *dnsmessage.Name, random []byte) {
	for i := range int(name.Length) {
		c := name.Data[i]
		if c >= 'a' && c <= 'z' && random[i/8]>>(i%8)&1 == 1 {
			name.Data[i] = c - 'a' + 'A'
		}
	}
}
