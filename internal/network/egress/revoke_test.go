package egress

import (
	"crypto/tls"
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"golang.org/x/net/dns/dnsmessage"

	"agentrun.dev/internal/network/dns"
	"agentrun.dev/internal/network/policy"
	"agentrun.dev/internal/network/stack"
)

// TestUDP sends datagrams that a rule allows, and checks that revoking the rule ends
// the flow.
func TestUDP(t *testing.T) {
	w := newWorld(t)
	server, err := net.ListenUDP("udp", &net.UDPAddr{IP: net.IPv4(127, 0, 0, 1)})
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = server.Close() }()
	go func() {
		b := make([]byte, 100)
		for {
			n, from, err := server.ReadFromUDPAddrPort(b)
			if err != nil {
				return
			}
			_, _ = server.WriteToUDPAddrPort(b[:n], from)
		}
	}()
	w.route(addrOther+":123", server.LocalAddr())
	s := w.sandbox(t, allow("udp://"+addrOther+":123"))
	from := netip.MustParseAddrPort("10.255.255.2:5000")
	open := func() net.Conn {
		t.Helper()
		conn, err := s.DialUDP(t.Context(), from, netip.MustParseAddrPort(addrOther+":123"))
		if err != nil {
			t.Fatal(err)
		}
		_, _ = conn.Write([]byte("time?"))
		if n, err := conn.Read(make([]byte, 100)); n != 5 || err != nil {
			t.Fatalf("read %d bytes, %v", n, err)
		}
		return conn
	}
	_ = open().Close()
	e := last(t, s, func(e Entry) bool { return e.Protocol == "udp" })
	if e.Sent != 5 || e.Received != 5 || e.Outcome != Closed || e.Rule != "udp://"+addrOther+":123" {
		t.Errorf("log: %+v", e)
	}
	conn := open()
	s.SetRules(allow())
	if _, err := conn.Read(make([]byte, 100)); err == nil {
		t.Error("the flow goes on after its rule has gone")
	}
	if e := last(t, s, func(e Entry) bool { return e.Outcome == Cut }); e.Protocol != "udp" {
		t.Errorf("log: %+v", e)
	}
}

// TestInternalDomainIsTakenBack: when a domain is no longer internal, its private
// addresses are closed again, for existing and for new connections.
func TestInternalDomainIsTakenBack(t *testing.T) {
	w := newWorld(t)
	w.serveEcho(t, "10.1.2.3:5432")
	s := w.sandbox(t, allow("db.corp:5432"))
	if addrs, _ := lookup(t, s, "db.corp", dnsmessage.TypeA); len(addrs) != 1 {
		t.Fatalf("addresses %v", addrs)
	}
	conn := mustConnect(t, s, "10.1.2.3:5432")
	if err := w.gateway.config.Resolver.SetUpstreams(dns.Upstreams{Default: []netip.AddrPort{w.upstream.addr}}); err != nil {
		t.Fatal(err)
	}
	s.Recheck()
	_ = conn.SetDeadline(time.Now().Add(patience))
	if _, err := conn.Read(make([]byte, 1)); !errors.Is(err, syscall.ECONNRESET) && !errors.Is(err, io.EOF) && !errors.Is(err, net.ErrClosed) {
		t.Errorf("the connection goes on: %v", err)
	}
	if _, err := s.DialTCP(t.Context(), netip.MustParseAddrPort("10.255.255.2:5000"), netip.MustParseAddrPort("10.1.2.3:5432")); !errors.Is(err, stack.ErrRefused) {
		t.Errorf("a new connection: %v", err)
	}
	if e := last(t, s, func(e Entry) bool { return e.Outcome == Cut }); e.Rule != "closed: private" {
		t.Errorf("log: %+v", e)
	}
}

// TestSetRules: which live connections a change of the policy cuts.
func TestSetRules(t *testing.T) {
	w := newWorld(t)
	w.upstream.set("allowed.example. A", addrAllowed)
	pool := w.serveTLS(t, addrAllowed+":443")
	w.serveEcho(t, addrAllowed+":22", addrOther+":22")
	for _, test := range []struct {
		title         string
		before, after Rules
		to            string
		cut           string // the reason, if the connection is cut
		nameless      bool   // the connection has no name
	}{
		{"same", allow("allowed.example:443"), allow("allowed.example:443"), addrAllowed + ":443", "", false},
		{"wider", allow("allowed.example:443"), written("allow", nil, nil), addrAllowed + ":443", "", false},
		{"revoked", allow("allowed.example:443"), allow(), addrAllowed + ":443", "egress is deny", false},
		{"another port", allow("allowed.example:443"), allow("allowed.example:22"), addrAllowed + ":443", "egress is deny", false},
		{"denied", allow("allowed.example:443"), written("deny", []string{"allowed.example:443"}, []string{"allowed.example:443"}), addrAllowed + ":443", "denies", false},
		{"denied by address", allow("allowed.example:443"), written("deny", []string{"allowed.example:443"}, []string{addrAllowed}), addrAllowed + ":443", "denies", false},
		{"pin only", allow("allowed.example:22"), allow("allowed.example:443"), addrAllowed + ":22", "egress is deny", false},
		{"address", allow(addrOther + ":22"), allow(addrAllowed + ":22"), addrOther + ":22", "no rule allows", false},
		{"from address to name", allow(addrAllowed + ":443"), allow("allowed.example:443"), addrAllowed + ":443", "no name is pinned", false},
		{"default", written("allow", nil, nil), written("allow", nil, []string{"evil.example"}), addrAllowed + ":443", "needs the connection's name", false},
		{"nameless, still open", written("allow", nil, []string{"evil.example"}), written("allow", nil, []string{"bad.example"}), addrAllowed + ":443", "", true},
		{"nameless, then for names", written("allow", nil, []string{"evil.example"}), allow("allowed.example:443"), addrAllowed + ":443", "needs the connection's name", true},
	} {
		t.Run(test.title, func(t *testing.T) {
			s := w.sandbox(t, test.before)
			_, _ = lookup(t, s, "allowed.example", dnsmessage.TypeA)
			raw := mustConnect(t, s, test.to)
			conn := net.Conn(raw)
			if strings.HasSuffix(test.to, ":443") {
				config := &tls.Config{ServerName: "allowed.example", RootCAs: pool, MinVersion: tls.VersionTLS12}
				if test.nameless {
					config.ServerName, config.InsecureSkipVerify = "", true
				}
				conn = tls.Client(raw, config)
			}
			echo := func() error {
				_ = conn.SetDeadline(time.Now().Add(patience))
				if _, err := io.WriteString(conn, "ping"); err != nil {
					return err
				}
				_, err := io.ReadFull(conn, make([]byte, 4))
				return err
			}
			if err := echo(); err != nil {
				t.Fatal(err)
			}
			s.SetRules(test.after)
			err := echo()
			if test.cut == "" {
				if err != nil || len(s.Connections()) != 1 {
					t.Errorf("cut: %v", err)
				}
				return
			}
			if err == nil {
				t.Fatal("the connection goes on")
			}
			if e := last(t, s, func(e Entry) bool { return e.Outcome == Cut }); !strings.Contains(e.Reason, test.cut) {
				t.Errorf("reason %q", e.Reason)
			}
			if len(s.Connections()) != 0 {
				t.Errorf("connections: %+v", s.Connections())
			}
		})
	}
}

// TestClose: a sandbox that has ended leaves nothing behind.
func TestClose(t *testing.T) {
	w := newWorld(t)
	w.serveEcho(t, addrOther+":22")
	s := w.sandbox(t, allow(addrOther+":22"))
	conn := mustConnect(t, s, addrOther+":22")
	if open := s.Connections(); len(open) != 1 || open[0].Outcome != Open {
		t.Errorf("connections: %+v", open)
	}
	s.Close()
	if _, err := readAll(conn); !errors.Is(err, syscall.ECONNRESET) {
		t.Errorf("the connection ended with %v", err)
	}
	if _, err := connect(t, s, addrOther+":22"); !wasRefused(err) {
		t.Errorf("a connection after the end: %v", err)
	}
}

func TestLogIsBounded(t *testing.T) {
	r := ring{size: 4}
	for i := range 10 {
		r.add(Entry{Name: fmt.Sprint(i), Outcome: Closed})
	}
	var seqs []uint64
	for _, e := range r.since(0, 100) {
		seqs = append(seqs, e.Seq)
		if e.Name != fmt.Sprint(e.Seq-1) {
			t.Errorf("entry %d is %s", e.Seq, e.Name)
		}
	}
	if !slices.Equal(seqs, []uint64{7, 8, 9, 10}) {
		t.Errorf("entries %v", seqs)
	}
	if got := r.since(8, 1); len(got) != 1 || got[0].Seq != 9 {
		t.Errorf("after 8: %v", got)
	}
	if got := r.since(10, 100); got != nil {
		t.Errorf("after the last: %v", got)
	}
	for range 1000 {
		r.add(Entry{Name: "loop", Outcome: Refused})
	}
	if got := r.since(10, 100); len(got) != 1 || got[0].Repeated != 999 {
		t.Errorf("a refusal 1000 times: %+v", got)
	}
}

func TestPinsAreBounded(t *testing.T) {
	p := pins{limit: 100}
	now := time.Now()
	for i := range 1000 {
		addr := netip.AddrFrom4([4]byte{20, 0, byte(i >> 8), byte(i)})
		p.add("a.example", []netip.Addr{addr}, false, now.Add(time.Duration(i)))
	}
	if p.count != 100 || len(p.all()) != 100 {
		t.Errorf("%d pins, %d listed", p.count, len(p.all()))
	}
	if first := p.all()[0].Addr.String(); first != "20.0.3.132" {
		t.Errorf("the first pin that was kept is %s", first)
	}
	one := netip.MustParseAddr("20.1.1.1")
	for i := range 100 {
		p.add(policy.Name(fmt.Sprintf("n%d.example", i)), []netip.Addr{one}, false, now.Add(time.Hour))
	}
	if got := len(p.of(one)); got != maxNamesOfAddress || p.count != 100 {
		t.Errorf("%d names of one address, %d pins", got, p.count)
	}
}
