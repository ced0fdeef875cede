package egress

import (
	"crypto/tls"
	"io"
	"net"
	"net/http"
	"strings"
	"testing"

	"golang.org/x/net/dns/dnsmessage"
)

// TestOpen: which connections pass with egress: allow, without and with rules that
// deny names.
func TestOpen(t *testing.T) {
	w := newWorld(t)
	w.upstream.set("any.example. A", addrOther)
	w.upstream.set("evil.example. A", addrOther)
	pool := w.serveTLS(t, addrOther+":443")
	w.serveHTTP(t, http.HandlerFunc(func(rw http.ResponseWriter, r *http.Request) { _, _ = io.WriteString(rw, "hello "+r.Host) }), addrOther+":80")
	w.serve(t, func(conn net.Conn) {
		b := make([]byte, 4)
		_, _ = io.ReadFull(conn, b)
		_, _ = conn.Write(b)
	}, addrMoved+":443", addrOther+":22")
	for title, rules := range map[string]Rules{
		"nothing denied": written("allow", nil, nil),
		"names denied":   written("allow", nil, []string{"evil.example", "*.evil.example"}),
	} {
		t.Run(title, func(t *testing.T) {
			s := w.sandbox(t, rules)
			if addrs, _ := lookup(t, s, "any.example", dnsmessage.TypeA); len(addrs) != 1 {
				t.Errorf("any.example: %v", addrs)
			}
			for _, name := range []string{"any.example", "not-resolved.example", ""} {
				client := tls.Client(mustConnect(t, s, addrOther+":443"), &tls.Config{ServerName: name, RootCAs: pool, InsecureSkipVerify: true})
				if err := client.Handshake(); err != nil {
					t.Errorf("TLS for %q: %v", name, err)
				}
				_ = client.Close()
			}
			for _, to := range []string{addrMoved + ":443", addrOther + ":22"} { // neither is TLS
				conn := mustConnect(t, s, to)
				_, _ = io.WriteString(conn, "SSH-")
				if got, err := readAll(conn); got != "SSH-" || err != nil {
					t.Errorf("%s: %q, %v", to, got, err)
				}
			}
			for _, host := range []string{"any.example", addrOther, addrOther + ":80"} {
				conn := mustConnect(t, s, addrOther+":80")
				_, _ = io.WriteString(conn, "GET / HTTP/1.1\r\nConnection: close\r\nHost: "+host+"\r\n\r\n")
				if got, err := readAll(conn); !strings.HasSuffix(got, "hello "+host) || err != nil {
					t.Errorf("Host %s: %q, %v", host, got, err)
				}
			}
		})
	}
}

// TestECH: with ECH set, encrypted names pass with allowed outer names. Clearing it
// cuts their connections.
func TestECH(t *testing.T) {
	w := newWorld(t)
	w.upstream.set("allowed.example. A", addrAllowed)
	w.serve(t, func(conn net.Conn) { _, _ = io.Copy(conn, conn) }, addrAllowed+":443")
	rules := allow("allowed.example:443")
	rules.ECH = true
	s := w.sandbox(t, rules)
	resolve(t, s, "allowed.example")
	conn := mustConnect(t, s, addrAllowed+":443")
	hello := clientHello(sni("allowed.example"), ech())
	_, _ = conn.Write(hello)
	if _, err := io.ReadFull(conn, make([]byte, len(hello))); err != nil {
		t.Fatalf("the ClientHello did not come back: %v", err)
	}
	rules.ECH = false
	s.SetRules(rules)
	if _, err := readAll(conn); err == nil {
		t.Error("the connection goes on")
	}
	if e := last(t, s, func(e Entry) bool { return e.Outcome == Cut }); e.Kind != ByTLS || !strings.Contains(e.Reason, "ECH") {
		t.Errorf("log: %+v", e)
	}
}
