package netd_test

import (
	"bufio"
	"crypto/tls"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"net/netip"
	"testing"
	"time"

	"agentrun.dev/internal/network/netctl"
	"agentrun.dev/internal/network/networktest"
	"golang.org/x/net/dns/dnsmessage"
	"golang.org/x/sys/unix"
)

// public is an address in a namespace that the test makes.
var public = netip.MustParseAddr("93.184.216.34")

// resolve answers all questions of a packet connection with the public address.
func resolve(c net.PacketConn) {
	b := make([]byte, 4096)
	for {
		n, from, err := c.ReadFrom(b)
		if err != nil {
			return
		}
		var m dnsmessage.Message
		if m.Unpack(b[:n]) != nil {
			continue
		}
		q := m.Questions[0]
		m.Response, m.RecursionAvailable, m.Additionals = true, true, nil
		if q.Type == dnsmessage.TypeA {
			m.Answers = []dnsmessage.Resource{{
				Header: dnsmessage.ResourceHeader{Name: q.Name, Type: q.Type, Class: q.Class, TTL: 60},
				Body:   &dnsmessage.AResource{A: public.As4()},
			}}
		}
		if out, err := m.Pack(); err == nil {
			_, _ = c.WriteTo(out, from)
		}
	}
}

// ask asks the gateway for a name, as a program in the guest does.
func ask(t *testing.T, g *networktest.Guest, name string) (dnsmessage.Message, error) {
	t.Helper()
	q := dnsmessage.Message{
		Header:    dnsmessage.Header{ID: 77, RecursionDesired: true},
		Questions: []dnsmessage.Question{{Name: dnsmessage.MustNewName(name), Type: dnsmessage.TypeA, Class: dnsmessage.ClassINET}},
	}
	b, err := q.Pack()
	if err != nil {
		t.Fatal(err)
	}
	c, err := g.Dial(t.Context(), "udp", netip.AddrPortFrom(networktest.Gateway, 53).String())
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = c.Close() }()
	if err := c.SetDeadline(time.Now().Add(time.Minute)); err != nil {
		t.Fatal(err)
	}
	if _, err := c.Write(b); err != nil {
		t.Fatal(err)
	}
	answer := make([]byte, 4096)
	n, err := c.Read(answer)
	if err != nil {
		t.Fatal(err)
	}
	var m dnsmessage.Message
	return m, m.Unpack(answer[:n])
}

// TestNames: a netd behind its filter resolves names, reads the names in TLS and
// HTTP, and refuses others. Calls of the standard library that the filter forbids do
// not end it.
func TestNames(t *testing.T) {
	cfg, _ := config(t)
	p := start(t, cfg)
	w := networktest.NewWorld(t, public)
	go resolve(w.ListenPacket(t, netip.AddrPortFrom(public, 53).String()))
	hello := http.HandlerFunc(func(rw http.ResponseWriter, r *http.Request) { _, _ = fmt.Fprintf(rw, "hello from %s", r.Host) })
	plain, secure := httptest.NewUnstartedServer(hello), httptest.NewUnstartedServer(hello)
	plain.Listener, secure.Listener = w.Listen(t, netip.AddrPortFrom(public, 80).String()), w.Listen(t, netip.AddrPortFrom(public, 443).String())
	plain.Start()
	secure.StartTLS()
	defer plain.Close()
	defer secure.Close()
	if err := p.Configure(t.Context(), netctl.Settings{Upstreams: []netip.AddrPort{netip.AddrPortFrom(public, 53)}}); err != nil {
		t.Fatal(err)
	}
	g := networktest.New(t)
	p.attach(t, g, wireOf("w", rules("api.example.com:443", "api.example.com:80")))
	if m, err := ask(t, g, "api.example.com."); err != nil || len(m.Answers) != 1 {
		t.Fatalf("an allowed name: %+v, %v", m, err)
	}
	if m, err := ask(t, g, "other.example.com."); err != nil || m.RCode != dnsmessage.RCodeRefused {
		t.Errorf("another name: %+v, %v", m, err)
	}
	for host, want := range map[string]int{"api.example.com": http.StatusOK, "other.example.com": http.StatusForbidden} {
		status, said := get(t, g, host)
		if status != want && (want == http.StatusOK || status < 400) {
			t.Errorf("HTTP for %s: %d %q", host, status, said)
		}
	}
	for name, allowed := range map[string]bool{"api.example.com": true, "other.example.com": false} {
		c, err := g.Dial(t.Context(), "tcp", netip.AddrPortFrom(public, 443).String())
		if err != nil {
			t.Fatal(err)
		}
		defer func() { _ = c.Close() }()
		client := tls.Client(c, &tls.Config{ServerName: name, InsecureSkipVerify: true}) // only the name is under test
		if err := client.HandshakeContext(t.Context()); (err == nil) != allowed || !allowed && !errors.Is(err, unix.ECONNRESET) {
			t.Errorf("TLS for %s: %v", name, err)
		}
	}
	// Pins belong to the lineage.
	mark, err := p.Mark(t.Context(), "w")
	if err != nil {
		t.Fatal(err)
	}
	l, err := p.Collect(t.Context(), "w", mark)
	if err != nil || len(l.Pins) != 1 || l.Pins[0].Name != "api.example.com" || l.Pins[0].Addr != public {
		t.Errorf("the lineage is %+v, %v", l, err)
	}
	copied := networktest.New(t)
	inherits := wireOf("copy", rules("api.example.com:80"))
	inherits.Lineage = netctl.Lineage{Pins: l.Pins}
	p.attach(t, copied, inherits)
	if status, said := get(t, copied, "api.example.com"); status != http.StatusOK {
		t.Errorf("a copy that has asked no name: %d %q", status, said)
	}
	// Ranges are closed from now on.
	if err := p.Configure(t.Context(), netctl.Settings{
		Upstreams: []netip.AddrPort{netip.AddrPortFrom(public, 53)}, ClosedRanges: []netip.Prefix{netip.PrefixFrom(public, 16).Masked()},
	}); err != nil {
		t.Fatal(err)
	}
	if c, err := g.Dial(t.Context(), "tcp", netip.AddrPortFrom(public, 80).String()); !errors.Is(err, unix.ECONNREFUSED) {
		t.Errorf("a range that was closed: %v, %v", c, err)
	}
}

// get asks for a page of a host at the public address, from inside of a guest.
func get(t *testing.T, g *networktest.Guest, host string) (status int, said string) {
	t.Helper()
	c, err := g.Dial(t.Context(), "tcp", netip.AddrPortFrom(public, 80).String())
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = c.Close() }()
	if err := c.SetDeadline(time.Now().Add(time.Minute)); err != nil {
		t.Fatal(err)
	}
	if _, err := fmt.Fprintf(c, "GET / HTTP/1.1\r\nHost: %s\r\n\r\n", host); err != nil {
		t.Fatal(err)
	}
	r, err := http.ReadResponse(bufio.NewReader(c), nil)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = r.Body.Close() }()
	b, err := io.ReadAll(r.Body)
	if err != nil {
		t.Fatal(err)
	}
	return r.StatusCode, string(b)
}
