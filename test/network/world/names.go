package world

import (
	"encoding/binary"
	"errors"
	"io"
	"net"
	"net/netip"
	"strings"
	"sync"
	"testing"

	"golang.org/x/net/dns/dnsmessage"
)

// names is the data of the world's name server.
type names struct {
	mu      sync.Mutex // protects all following fields
	known   map[string]record
	queries map[string]int
}

// record is the data of a name: addresses, or another name.
type record struct {
	addresses []netip.Addr
	alias     string
	ttl       uint32
}

func newNames() *names { return &names{known: map[string]record{}, queries: map[string]int{}} }

func plain(name string) string { return strings.ToLower(strings.TrimSuffix(name, ".")) }

// Name defines a name or replaces its definition.
func (w *World) Name(name string, ttl uint32, addresses ...string) {
	r := record{ttl: ttl}
	for _, a := range addresses {
		r.addresses = append(r.addresses, netip.MustParseAddr(a))
	}
	w.names.define(name, r)
}

// Alias defines a name as an alias of another.
func (w *World) Alias(name, other string, ttl uint32) {
	w.names.define(name, record{alias: plain(other), ttl: ttl})
}

// Asked returns the number of queries for a name.
func (w *World) Asked(name string) int {
	w.names.mu.Lock()
	defer w.names.mu.Unlock()
	return w.names.queries[plain(name)]
}

func (n *names) define(name string, r record) {
	n.mu.Lock()
	defer n.mu.Unlock()
	n.known[plain(name)] = r
}

// serveNames answers queries on UDP and TCP until the test ends.
func (w *World) serveNames(t testing.TB) {
	t.Helper()
	udp, tcp := w.ListenPacket(t, NameServer.String()), w.Listen(t, NameServer.String())
	go func() {
		buf := make([]byte, 4096)
		for {
			n, from, err := udp.ReadFrom(buf)
			if err != nil {
				return
			}
			if answer, err := w.names.answer(buf[:n]); err == nil {
				_, _ = udp.WriteTo(answer, from) // as unreliable as any UDP
			}
		}
	}()
	go func() {
		for {
			c, err := tcp.Accept()
			if err != nil {
				return
			}
			go w.names.serveStream(c)
		}
	}()
}

// serveStream answers the queries of one TCP connection, RFC 1035 §4.2.2.
func (n *names) serveStream(c net.Conn) {
	defer func() { _ = c.Close() }()
	for {
		var size [2]byte
		if _, err := io.ReadFull(c, size[:]); err != nil {
			return
		}
		query := make([]byte, binary.BigEndian.Uint16(size[:]))
		if _, err := io.ReadFull(c, query); err != nil {
			return
		}
		answer, err := n.answer(query)
		if err != nil {
			return
		}
		if _, err := c.Write(append(binary.BigEndian.AppendUint16(nil, uint16(len(answer))), answer...)); err != nil {
			return
		}
	}
}

var errQuestion = errors.New("not one question")

// answer returns the answer to a query.
func (n *names) answer(query []byte) ([]byte, error) {
	var p dnsmessage.Parser
	h, err := p.Start(query)
	if err != nil {
		return nil, err
	}
	q, err := p.Question()
	if err != nil {
		return nil, errors.Join(errQuestion, err)
	}
	name := plain(q.Name.String())
	n.mu.Lock()
	defer n.mu.Unlock()
	n.queries[name]++
	out := dnsmessage.Message{
		Header:    dnsmessage.Header{ID: h.ID, Response: true, RecursionDesired: h.RecursionDesired, RecursionAvailable: true},
		Questions: []dnsmessage.Question{q},
	}
	if _, found := n.known[name]; !found {
		out.RCode = dnsmessage.RCodeNameError
		return out.Pack()
	}
	const longest = 8 // of a chain of aliases
	for range longest {
		r := n.known[name]
		owner, err := dnsmessage.NewName(name + ".")
		if err != nil {
			return nil, err
		}
		head := dnsmessage.ResourceHeader{Name: owner, Class: dnsmessage.ClassINET, TTL: r.ttl}
		if r.alias != "" {
			target, err := dnsmessage.NewName(r.alias + ".")
			if err != nil {
				return nil, err
			}
			out.Answers = append(out.Answers, dnsmessage.Resource{Header: head, Body: &dnsmessage.CNAMEResource{CNAME: target}})
			name = r.alias
			continue
		}
		for _, a := range r.addresses {
			switch {
			case a.Is4() && q.Type == dnsmessage.TypeA:
				out.Answers = append(out.Answers, dnsmessage.Resource{Header: head, Body: &dnsmessage.AResource{A: a.As4()}})
			case a.Is6() && q.Type == dnsmessage.TypeAAAA:
				out.Answers = append(out.Answers, dnsmessage.Resource{Header: head, Body: &dnsmessage.AAAAResource{AAAA: a.As16()}})
			}
		}
		break
	}
	return out.Pack()
}
