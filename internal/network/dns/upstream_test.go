package dns

import (
	"bytes"
	"context"
	"encoding/binary"
	"io"
	"net"
	"net/netip"
	"sync/atomic"
	"testing"
	"time"

	"golang.org/x/net/dns/dnsmessage"
)

// server is a DNS server on the loopback, over UDP and TCP at the same port.
type server struct {
	addr netip.AddrPort
	udp  *net.UDPConn
	// datagrams and streams count questions.
	datagrams, streams atomic.Int64
	answer             func(q dnsmessage.Message, tcp bool) [][]byte
}

// startServer starts a server. answer returns the messages that answer a question.
func startServer(t testing.TB, answer func(q dnsmessage.Message, tcp bool) [][]byte) *server {
	t.Helper()
	s := &server{answer: answer}
	var listener net.Listener
	for range 20 { // the port may be in use for TCP
		var err error
		if s.udp, err = net.ListenUDP("udp", &net.UDPAddr{IP: net.IPv4(127, 0, 0, 1)}); err != nil {
			t.Fatal(err)
		}
		if listener, err = net.Listen("tcp", s.udp.LocalAddr().String()); err == nil {
			break
		}
		_ = s.udp.Close()
	}
	if listener == nil {
		t.Fatal("no port is free for both UDP and TCP")
	}
	s.addr = netip.MustParseAddrPort(s.udp.LocalAddr().String())
	t.Cleanup(func() { _ = s.udp.Close(); _ = listener.Close() })
	go s.serveDatagrams()
	go func() {
		for {
			conn, err := listener.Accept()
			if err != nil {
				return
			}
			go s.serveStream(conn)
		}
	}()
	return s
}

func (s *server) serveDatagrams() {
	buffer := make([]byte, 4096)
	for {
		n, from, err := s.udp.ReadFromUDPAddrPort(buffer)
		if err != nil {
			return
		}
		s.datagrams.Add(1)
		var q dnsmessage.Message
		if q.Unpack(buffer[:n]) != nil {
			continue
		}
		for _, raw := range s.answer(q, false) {
			_, _ = s.udp.WriteToUDPAddrPort(raw, from)
		}
	}
}

func (s *server) serveStream(conn net.Conn) {
	defer func() { _ = conn.Close() }()
	var length [2]byte
	if _, err := io.ReadFull(conn, length[:]); err != nil {
		return
	}
	raw := make([]byte, binary.BigEndian.Uint16(length[:]))
	if _, err := io.ReadFull(conn, raw); err != nil {
		return
	}
	s.streams.Add(1)
	var q dnsmessage.Message
	if q.Unpack(raw) != nil {
		return
	}
	for _, raw := range s.answer(q, true) {
		_, _ = conn.Write(append(binary.BigEndian.AppendUint16(nil, uint16(len(raw))), raw...))
	}
}

// records is a zone: the answers by name and type.
type records map[string][]dnsmessage.Resource

// serve answers with the records under "name TYPE", in the way of a recursive server.
func (r records) serve(q dnsmessage.Message, _ bool) [][]byte {
	return [][]byte{pack(r.reply(q))}
}

func (r records) reply(q dnsmessage.Message) dnsmessage.Message {
	question := q.Questions[0]
	m := dnsmessage.Message{
		Header:    dnsmessage.Header{ID: q.ID, Response: true, RecursionDesired: true, RecursionAvailable: true},
		Questions: q.Questions,
	}
	name := string(bytes.ToLower([]byte(question.Name.String())))
	found, ok := r[name+" "+question.Type.String()[len("Type"):]]
	if !ok {
		m.RCode = dnsmessage.RCodeNameError
		m.Authorities = []dnsmessage.Resource{soa("test.", 60)}
		return m
	}
	for _, record := range found {
		if record.Header.Type == dnsmessage.TypeSOA {
			m.Authorities = append(m.Authorities, record)
		} else {
			m.Answers = append(m.Answers, record)
		}
	}
	return m
}

func pack(m dnsmessage.Message) []byte {
	raw, err := m.Pack()
	if err != nil {
		panic(err)
	}
	return raw
}

func head(name string, ttl uint32, typ dnsmessage.Type) dnsmessage.ResourceHeader {
	return dnsmessage.ResourceHeader{Name: dnsmessage.MustNewName(name), Type: typ, Class: dnsmessage.ClassINET, TTL: ttl}
}

func addrRecord(name, addr string, ttl uint32) dnsmessage.Resource {
	a := netip.MustParseAddr(addr)
	if a.Is4() {
		return dnsmessage.Resource{Header: head(name, ttl, dnsmessage.TypeA), Body: &dnsmessage.AResource{A: a.As4()}}
	}
	return dnsmessage.Resource{Header: head(name, ttl, dnsmessage.TypeAAAA), Body: &dnsmessage.AAAAResource{AAAA: a.As16()}}
}

func cname(name, target string, ttl uint32) dnsmessage.Resource {
	return dnsmessage.Resource{Header: head(name, ttl, dnsmessage.TypeCNAME), Body: &dnsmessage.CNAMEResource{CNAME: dnsmessage.MustNewName(target)}}
}

func soa(name string, minTTL uint32) dnsmessage.Resource {
	return dnsmessage.Resource{Header: head(name, 3600, dnsmessage.TypeSOA), Body: &dnsmessage.SOAResource{
		NS: dnsmessage.MustNewName("ns."), MBox: dnsmessage.MustNewName("mail."), MinTTL: minTTL,
	}}
}

// patientConn is a connection to an upstream without deadlines, since the host may be
// slow.
type patientConn struct{ net.Conn }

func (patientConn) SetDeadline(time.Time) error { return nil }

func dialPatiently(ctx context.Context, network string, upstream netip.AddrPort) (net.Conn, error) {
	conn, err := (&net.Dialer{}).DialContext(ctx, network, upstream.String())
	return patientConn{conn}, err
}

// newResolver makes a resolver. It waits without deadlines for upstreams that are
// real servers.
func newResolver(t testing.TB, config Config) *Resolver {
	t.Helper()
	if config.Dial == nil {
		config.Dial = dialPatiently
	}
	r, err := New(config)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(r.Close)
	return r
}
