package egress

import (
	"crypto/tls"
	"fmt"
	"io"
	"net/netip"
	"strings"
	"testing"
	"time"
)

// FuzzInject sends bytes, inside of TLS, to a host whose requests get a credential.
// The value is in one header of requests to this host, and the placeholder is never
// sent in its place.
func FuzzInject(f *testing.F) {
	n := newInjecting(f, allow("allowed.example:443"))
	for _, row := range hostileRequests {
		f.Add([]byte(row.request + "\r\n"))
	}
	f.Fuzz(func(t *testing.T, raw []byte) {
		remote, err := n.sandbox.DialTCP(t.Context(), netip.MustParseAddrPort("10.255.255.2:1"), netip.MustParseAddrPort(addrAllowed+":443"))
		if err != nil {
			t.Skip(err) // pins expire in a long run; the next one resolves again
		}
		program, inside := pair(t)
		done := make(chan struct{})
		go func() { defer close(done); remote.Splice(inside) }()
		conn := tls.Client(program, &tls.Config{ServerName: string(theHost), RootCAs: n.trust, NextProtos: []string{alpnHTTP1}, MinVersion: tls.VersionTLS12})
		_ = conn.SetDeadline(time.Now().Add(patience))
		_, _ = conn.Write(raw)
		_ = conn.CloseWrite()
		_, _ = io.Copy(io.Discard, conn)
		_ = program.Close()
		<-done
		got, bodies := n.reached()
		for _, r := range got {
			if len(r.Header["Authorization"]) > 1 {
				t.Errorf("two headers: %q", r.Header)
			}
			key := r.Header.Get("Authorization")
			if r.Host != string(theHost) || key != "" && key != "Bearer "+theValue {
				t.Errorf("the server got %q for %s", key, r.Host)
			}
			r.Header.Del("Authorization")
			if text := fmt.Sprint(r.Header, r.RequestURI, r.Trailer, bodies); strings.Contains(text, theValue) {
				t.Errorf("the value is elsewhere: %s", text)
			}
			if text := fmt.Sprint(r.Header, r.RequestURI); strings.Contains(text, thePlaceholder) {
				t.Errorf("the placeholder was sent: %s", text)
			}
		}
	})
}
