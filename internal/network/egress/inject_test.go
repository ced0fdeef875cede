package egress

import (
	"bufio"
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"io"
	"log"
	"net"
	"net/http"
	"net/netip"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/coder/websocket"

	"agentrun.dev/internal/network/inject"
	"agentrun.dev/internal/network/policy"
	"agentrun.dev/internal/node/authority"
)

const (
	theValue       = "sk-the-value-of-the-secret"
	thePlaceholder = "agentrun-injected.llm.KEY"
	theHost        = policy.Name("allowed.example")
)

// injecting is a sandbox whose requests to allowed.example get a credential, with the
// server of that name, which records its requests.
type injecting struct {
	*world
	sandbox *Sandbox
	rules   Rules
	ca      *authority.Authority
	trust   *x509.CertPool   // of programs in the sandbox
	memory  *atomic.Int64    // reserved by connections; nil does not count
	streams http.HTTP2Config // of the server, before its first connection
	greeted chan struct{}    // receives once the server has read the HTTP/2 preface

	mu   sync.Mutex
	got  []*http.Request // protected by mu, like body
	body []string
}

// hostOfTest is allowed.example with one credential.
func hostOfTest(t testing.TB, ca *authority.Authority, value string) inject.Host {
	t.Helper()
	certificate, key, err := ca.Leaf(theHost, time.Now())
	if err != nil {
		t.Fatal(err)
	}
	return inject.Host{Name: theHost, Certificate: certificate, Key: inject.Value(key), Credentials: []inject.Credential{
		{Secret: "llm/KEY", Header: "Authorization", Format: "Bearer {}", Placeholder: thePlaceholder, Value: inject.Value(value)},
	}}
}

func prepared(t testing.TB, hosts ...inject.Host) inject.Set {
	t.Helper()
	set, err := inject.Prepare(hosts)
	if err != nil {
		t.Fatal(err)
	}
	return set
}

func newInjecting(t testing.TB, rules Rules) *injecting {
	t.Helper()
	n := &injecting{world: newWorld(t), rules: rules, greeted: make(chan struct{}, 1)}
	var err error
	if n.ca, err = authority.New("default", nil, time.Now()); err != nil {
		t.Fatal(err)
	}
	n.trust = x509.NewCertPool()
	n.trust.AppendCertsFromPEM(n.ca.Certificate())
	n.upstream.set("allowed.example. A", addrAllowed)
	n.upstream.set("evil.example. A", addrAllowed)
	n.gateway.SetRoots(n.serveHTTPS(t, addrAllowed+":443"))
	n.rules.Inject = prepared(t, hostOfTest(t, n.ca, theValue))
	n.sandbox = n.world.sandbox(t, n.rules)
	resolve(t, n.sandbox, string(theHost))
	return n
}

// serveHTTPS plays the host. It returns the CA of its certificate.
func (n *injecting) serveHTTPS(t testing.TB, at string) *x509.CertPool {
	t.Helper()
	cert, pool := certificate(t)
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	n.route(at, l.Addr())
	protocols := new(http.Protocols)
	protocols.SetHTTP1(true)
	protocols.SetHTTP2(true)
	server := &http.Server{
		ReadHeaderTimeout: time.Minute, Protocols: protocols, HTTP2: &n.streams, Handler: http.HandlerFunc(n.answer), ErrorLog: log.New(io.Discard, "", 0),
		TLSConfig: &tls.Config{Certificates: []tls.Certificate{cert}, MinVersion: tls.VersionTLS12, NextProtos: []string{alpnHTTP2, alpnHTTP1}},
		ConnState: func(_ net.Conn, state http.ConnState) {
			if state == http.StateIdle {
				select {
				case n.greeted <- struct{}{}:
				default:
				}
			}
		},
	}
	t.Cleanup(func() { _ = server.Close() })
	go func() { _ = server.ServeTLS(l, "", "") }()
	return pool
}

func (n *injecting) answer(w http.ResponseWriter, r *http.Request) {
	if r.URL.Path == "/ws" {
		n.note1(r, "")
		conn, err := websocket.Accept(w, r, nil)
		if err != nil {
			return
		}
		kind, data, err := conn.Read(r.Context())
		if err == nil {
			_ = conn.Write(r.Context(), kind, data)
		}
		_ = conn.CloseNow()
		return
	}
	if r.URL.Path == "/stream" {
		n.note1(r, "")
		_ = http.NewResponseController(w).EnableFullDuplex()
		_, _ = io.Copy(flushing{w}, r.Body)
		return
	}
	body, _ := io.ReadAll(r.Body)
	n.note1(r, string(body))
	if r.URL.Path == "/redirect" {
		http.Redirect(w, r, "https://evil.example/", http.StatusFound)
		return
	}
	w.Header().Set("X-Proto", r.Proto)
	_, _ = io.WriteString(w, "served")
}

func (n *injecting) note1(r *http.Request, body string) {
	n.mu.Lock()
	defer n.mu.Unlock()
	n.got, n.body = append(n.got, r), append(n.body, body)
}

// reached returns the requests that the server got, and their bodies, and clears both
// lists.
func (n *injecting) reached() ([]*http.Request, []string) {
	n.mu.Lock()
	defer n.mu.Unlock()
	got, body := n.got, n.body
	n.got, n.body = nil, nil
	return got, body
}

// dialTLS opens TLS from a program in the sandbox to the host.
func (n *injecting) dialTLS(t testing.TB, name string, protocols ...string) (*tls.Conn, error) {
	t.Helper()
	conn, err := connectWith(t, n.sandbox, addrAllowed+":443", n.memory)
	if err != nil {
		return nil, err
	}
	c := tls.Client(conn, &tls.Config{ServerName: name, RootCAs: n.trust, NextProtos: protocols, MinVersion: tls.VersionTLS12})
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	return c, c.HandshakeContext(ctx)
}

// client is the HTTP client of a program in the sandbox.
func (n *injecting) client(t testing.TB, two bool) *http.Client {
	protocols, offers := new(http.Protocols), []string{alpnHTTP1}
	protocols.SetHTTP1(!two)
	protocols.SetHTTP2(two)
	if two {
		offers = []string{alpnHTTP2, alpnHTTP1}
	}
	transport := &http.Transport{
		Protocols: protocols,
		DialTLSContext: func(_ context.Context, _, address string) (net.Conn, error) {
			name, _, err := net.SplitHostPort(address)
			if err != nil {
				return nil, err
			}
			return n.dialTLS(t, name, offers...)
		},
	}
	t.Cleanup(transport.CloseIdleConnections)
	return &http.Client{Transport: transport, CheckRedirect: func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse }}
}

// TestInject: requests get the value, over both versions of HTTP. Everything else
// does not.
func TestInject(t *testing.T) {
	for proto, two := range map[string]bool{"HTTP/1.1": false, "HTTP/2.0": true} {
		t.Run(proto, func(t *testing.T) {
			n := newInjecting(t, allow("allowed.example:443"))
			client := n.client(t, two)
			for i := range 3 {
				r, err := http.NewRequest(http.MethodPost, fmt.Sprintf("https://allowed.example/v1?n=%d", i), strings.NewReader("say "+thePlaceholder))
				if err != nil {
					t.Fatal(err)
				}
				r.Header.Set("Authorization", "Bearer "+thePlaceholder)
				answer, err := client.Do(r)
				if err != nil {
					t.Fatal(err)
				}
				said, _ := io.ReadAll(answer.Body)
				_ = answer.Body.Close()
				if string(said) != "served" || answer.Header.Get("X-Proto") != proto || answer.Proto != proto {
					t.Fatalf("%s by %s, which the server saw as %s", said, answer.Proto, answer.Header.Get("X-Proto"))
				}
				got, body := n.reached()
				if len(got) != 1 || got[0].Header.Get("Authorization") != "Bearer "+theValue || got[0].Host != "allowed.example" || got[0].RequestURI != fmt.Sprintf("/v1?n=%d", i) {
					t.Fatalf("the server got %+v", got)
				}
				if body[0] != "say "+thePlaceholder {
					t.Errorf("the body was changed: %q", body[0])
				}
			}
			if got := n.gateway.Injected(); got != 3 {
				t.Errorf("%d requests were counted", got)
			}
			client.CloseIdleConnections()
			e := last(t, n.sandbox, func(e Entry) bool { return e.Protocol == "tcp" })
			if e.Outcome != Closed || e.Name != "allowed.example" || !strings.Contains(e.Reason, "credentials: llm/KEY x3") || strings.Contains(fmt.Sprintf("%+v", e), theValue) {
				t.Errorf("log: %+v", e)
			}
		})
	}
}

// TestInjectRotates: the next request on the same connection gets the new value, or
// is refused.
func TestInjectRotates(t *testing.T) {
	for _, two := range []bool{false, true} {
		n := newInjecting(t, allow("allowed.example:443"))
		client := n.client(t, two)
		ask := func() (int, string) {
			r, _ := http.NewRequest(http.MethodGet, "https://allowed.example/", nil)
			r.Header.Set("Authorization", "Bearer "+thePlaceholder)
			answer, err := client.Do(r)
			if err != nil {
				t.Fatal(err)
			}
			_, _ = io.Copy(io.Discard, answer.Body)
			_ = answer.Body.Close()
			got, _ := n.reached()
			if len(got) == 0 {
				return answer.StatusCode, ""
			}
			return answer.StatusCode, got[0].Header.Get("Authorization")
		}
		set := func(change func(*inject.Host)) {
			h := hostOfTest(t, n.ca, "sk-another")
			change(&h)
			rules := n.rules
			rules.Inject = prepared(t, h)
			n.sandbox.SetRules(rules)
		}
		if code, got := ask(); code != 200 || got != "Bearer "+theValue {
			t.Fatalf("%d %q", code, got)
		}
		set(func(*inject.Host) {})
		if code, got := ask(); code != 200 || got != "Bearer sk-another" {
			t.Errorf("after the value was changed: %d %q", code, got)
		}
		n.mu.Lock()
		dials := len(n.dials)
		n.mu.Unlock()
		if dials != 1 {
			t.Errorf("%d connections", dials)
		}
		set(func(h *inject.Host) {
			h.Credentials[0].Value, h.Credentials[0].Problem = "", "secret llm was deleted"
		})
		if code, got := ask(); code != 403 || got != "" {
			t.Errorf("after the secret was deleted: %d %q", code, got)
		}
		last(t, n.sandbox, func(e Entry) bool {
			return e.Outcome == Refused && e.Kind == ByInject && strings.Contains(e.Reason, "llm/KEY: secret llm was deleted")
		})
		set(func(h *inject.Host) { h.Credentials[0].Value = "a\r\nX-Evil: b" })
		if code, got := ask(); code != 403 || got != "" {
			t.Errorf("with a value of two lines: %d %q", code, got)
		}
		set(func(h *inject.Host) { h.Problem, h.Certificate, h.Key = "the CA was replaced", nil, "" })
		if r, err := client.Get("https://allowed.example/"); err == nil {
			t.Errorf("a host with a problem answers %s", r.Status)
			_ = r.Body.Close()
		}
		last(t, n.sandbox, func(e Entry) bool { return e.Outcome == Refused && strings.Contains(e.Reason, "the CA was replaced") })
	}
}

// hostileRequests are raw requests of a program in the sandbox. A request that passes
// reaches the server with want as its Authorization, and no other part has the value.
// A request that does not pass is refused with that reason in the log, or by net/http
// before any decision.
var hostileRequests = []struct {
	name, request string
	passes        bool
	want, reason  string
}{
	{name: "exact", request: "GET / HTTP/1.1\r\nHost: allowed.example\r\nAuthorization: Bearer " + thePlaceholder + "\r\n", passes: true, want: "Bearer " + theValue},
	{name: "case of the name", request: "GET / HTTP/1.1\r\nHost: allowed.example\r\naUTHORIZATION: Bearer " + thePlaceholder + "\r\n", passes: true, want: "Bearer " + theValue},
	{name: "host with port and case", request: "GET / HTTP/1.1\r\nHost: Allowed.Example:443\r\nAuthorization: Bearer " + thePlaceholder + "\r\n", passes: true, want: "Bearer " + theValue},
	{name: "absolute form of the host", request: "GET https://allowed.example/ HTTP/1.1\r\nHost: evil.example\r\nAuthorization: Bearer " + thePlaceholder + "\r\n", passes: true, want: "Bearer " + theValue},
	{name: "without the header", request: "GET / HTTP/1.1\r\nHost: allowed.example\r\n", passes: true},
	{name: "HTTP/1.0", request: "GET / HTTP/1.0\r\nHost: allowed.example\r\nAuthorization: Bearer " + thePlaceholder + "\r\n", passes: true, want: "Bearer " + theValue},

	{name: "another form", request: "GET / HTTP/1.1\r\nHost: allowed.example\r\nAuthorization: " + thePlaceholder + "\r\n", reason: "is not \"Bearer"},
	{name: "another scheme of authorization", request: "GET / HTTP/1.1\r\nHost: allowed.example\r\nAuthorization: Basic " + thePlaceholder + "\r\n", reason: "is not \"Bearer"},
	{name: "more than the form", request: "GET / HTTP/1.1\r\nHost: allowed.example\r\nAuthorization: Bearer " + thePlaceholder + ", Bearer x\r\n", reason: "is not \"Bearer"},
	{name: "a key of its own", request: "GET / HTTP/1.1\r\nHost: allowed.example\r\nAuthorization: Bearer sk-evil\r\n", reason: "is not \"Bearer"},
	{name: "an empty header", request: "GET / HTTP/1.1\r\nHost: allowed.example\r\nAuthorization:\r\n", reason: "is not \"Bearer"},
	{name: "twice", request: "GET / HTTP/1.1\r\nHost: allowed.example\r\nAuthorization: Bearer " + thePlaceholder + "\r\nauthorization: Bearer " + thePlaceholder + "\r\n", reason: "is there 2 times"},
	{name: "twice, one of its own", request: "GET / HTTP/1.1\r\nHost: allowed.example\r\nAuthorization: Bearer " + thePlaceholder + "\r\nAuthorization: Bearer x\r\n", reason: "is there 2 times"},
	{name: "underscore", request: "GET / HTTP/1.1\r\nHost: allowed.example\r\nX_Key: a\r\nX-Key: " + thePlaceholder + "\r\n", reason: "passes for X-Key"},
	{name: "hop by hop", request: "GET / HTTP/1.1\r\nHost: allowed.example\r\nConnection: close, authorization\r\nAuthorization: Bearer " + thePlaceholder + "\r\n", reason: "Connection names Authorization"},
	{name: "announced trailer", request: "POST / HTTP/1.1\r\nHost: allowed.example\r\nTransfer-Encoding: chunked\r\nTrailer: Authorization\r\n", reason: "announced as a trailer"},
	{name: "another header", request: "GET / HTTP/1.1\r\nHost: allowed.example\r\nX-Other: " + thePlaceholder + "\r\n", reason: "where nothing is put in"},
	{name: "cookie", request: "GET / HTTP/1.1\r\nHost: allowed.example\r\nCookie: k=" + thePlaceholder + "\r\n", reason: "where nothing is put in"},
	{name: "user agent beside the right header", request: "GET / HTTP/1.1\r\nHost: allowed.example\r\nUser-Agent: " + thePlaceholder + "\r\nAuthorization: Bearer " + thePlaceholder + "\r\n", reason: "where nothing is put in"},
	{name: "query", request: "GET /?key=" + thePlaceholder + " HTTP/1.1\r\nHost: allowed.example\r\n", reason: "in the path or the query"},
	{name: "path", request: "GET /" + thePlaceholder + " HTTP/1.1\r\nHost: allowed.example\r\n", reason: "in the path or the query"},

	{name: "another host", request: "GET / HTTP/1.1\r\nHost: evil.example\r\nAuthorization: Bearer " + thePlaceholder + "\r\n", reason: `the request is for "evil.example"`},
	{name: "no host", request: "GET / HTTP/1.0\r\nAuthorization: Bearer " + thePlaceholder + "\r\n", reason: `the request is for ""`},
	{name: "another port", request: "GET / HTTP/1.1\r\nHost: allowed.example:8443\r\nAuthorization: Bearer " + thePlaceholder + "\r\n", reason: "the connection is to port 443"},
	{name: "absolute form of another host", request: "GET https://evil.example/ HTTP/1.1\r\nHost: allowed.example\r\nAuthorization: Bearer " + thePlaceholder + "\r\n", reason: `the request is for "evil.example"`},
	{name: "absolute form without TLS", request: "GET http://allowed.example/ HTTP/1.1\r\nHost: allowed.example\r\nAuthorization: Bearer " + thePlaceholder + "\r\n", reason: "another scheme"},
	{name: "user name", request: "GET https://u:p@allowed.example/ HTTP/1.1\r\nHost: allowed.example\r\nAuthorization: Bearer " + thePlaceholder + "\r\n", reason: "another scheme, or has a user name"},
	{name: "two hosts", request: "GET / HTTP/1.1\r\nHost: allowed.example\r\nHost: evil.example\r\nAuthorization: Bearer " + thePlaceholder + "\r\n", reason: "not a well-formed"},
	{name: "space before the colon", request: "GET / HTTP/1.1\r\nHost: allowed.example\r\nAuthorization : Bearer " + thePlaceholder + "\r\n", reason: "not a well-formed"},
	{name: "folded line", request: "GET / HTTP/1.1\r\nHost: allowed.example\r\nAuthorization: Bearer\r\n " + thePlaceholder + "\r\n", passes: true, want: "Bearer " + theValue},
	{name: "NUL in the header", request: "GET / HTTP/1.1\r\nHost: allowed.example\r\nAuthorization: Bearer " + thePlaceholder + "\x00\r\n", reason: "not a well-formed"},
	{name: "both lengths", request: "POST / HTTP/1.1\r\nHost: allowed.example\r\nContent-Length: 4\r\nTransfer-Encoding: chunked\r\nAuthorization: Bearer " + thePlaceholder + "\r\n\r\n0\r\n\r\nGET /smuggled HTTP/1.1\r\nHost: evil.example\r\nAuthorization: Bearer " + thePlaceholder + "\r\n", passes: true, want: "Bearer " + theValue},
	{name: "two lengths", request: "POST / HTTP/1.1\r\nHost: allowed.example\r\nContent-Length: 4\r\nContent-Length: 5\r\nAuthorization: Bearer " + thePlaceholder + "\r\n", reason: "not a well-formed"},
	{name: "another transfer encoding", request: "POST / HTTP/1.1\r\nHost: allowed.example\r\nTransfer-Encoding: xchunked\r\nAuthorization: Bearer " + thePlaceholder + "\r\n", reason: "not a well-formed"},
	{name: "CONNECT", request: "CONNECT allowed.example:443 HTTP/1.1\r\nHost: allowed.example\r\nAuthorization: Bearer " + thePlaceholder + "\r\n", reason: "CONNECT would hide"},
	{name: "TRACE", request: "TRACE / HTTP/1.1\r\nHost: allowed.example\r\nAuthorization: Bearer " + thePlaceholder + "\r\n", reason: "TRACE would send the credentials back"},
	{name: "upgrade to h2c", request: "GET / HTTP/1.1\r\nHost: allowed.example\r\nConnection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAMAAABkAAQAAP__\r\nAuthorization: Bearer " + thePlaceholder + "\r\n", reason: "only WebSocket is allowed"},
	{name: "upgrade to TLS", request: "OPTIONS * HTTP/1.1\r\nHost: allowed.example\r\nConnection: Upgrade\r\nUpgrade: TLS/1.0\r\nAuthorization: Bearer " + thePlaceholder + "\r\n", reason: "only WebSocket is allowed"},
	{name: "HTTP/2 where HTTP/1.1 was agreed", request: "PRI * HTTP/2.0\r\n\r\nSM\r\n", reason: `the request is for ""`},
}

// TestInjectHostileRequests: the value goes only into the one header of requests to
// the one host.
func TestInjectHostileRequests(t *testing.T) {
	n := newInjecting(t, allow("allowed.example:443", "evil.example:443"))
	h := hostOfTest(t, n.ca, theValue)
	h.Credentials = append(h.Credentials, inject.Credential{Secret: "llm/X", Header: "X-Key", Format: "{}", Placeholder: "agentrun-injected.llm.X", Value: "sk-x"})
	rules := n.rules
	rules.Inject = prepared(t, h)
	n.sandbox.SetRules(rules)
	for _, c := range hostileRequests {
		t.Run(c.name, func(t *testing.T) {
			begin := time.Now()
			conn, err := n.dialTLS(t, "allowed.example", alpnHTTP1)
			if err != nil {
				t.Fatal(err)
			}
			_, _ = io.WriteString(conn, c.request+"\r\n")
			_ = conn.SetReadDeadline(time.Now().Add(patience))
			answer, err := http.ReadResponse(bufio.NewReader(conn), nil)
			if err != nil {
				t.Fatalf("no answer: %v", err)
			}
			_ = conn.Close()
			got, bodies := n.reached()
			if !c.passes {
				if len(got) > 0 {
					t.Fatalf("the server got %+v", got[0])
				}
				if answer.StatusCode < 400 {
					t.Errorf("the answer is %s", answer.Status)
				}
				last(t, n.sandbox, func(e Entry) bool {
					return e.Ended.After(begin) && e.Outcome == Refused && strings.Contains(e.Reason, c.reason)
				})
				return
			}
			if len(got) != 1 || answer.StatusCode != http.StatusOK {
				t.Fatalf("%s; the server got %d requests", answer.Status, len(got))
			}
			r := got[0]
			if r.Header.Get("Authorization") != c.want || r.Host != "allowed.example" || len(r.Header["Authorization"]) > 1 {
				t.Errorf("the server got %v for %s", r.Header, r.Host)
			}
			r.Header.Del("Authorization")
			if text := fmt.Sprint(r.Header, r.RequestURI, bodies); strings.Contains(text, theValue) || strings.Contains(text, "smuggled") {
				t.Errorf("the value, or another request, is elsewhere: %s", text)
			}
		})
	}
	if text := fmt.Sprintf("%+v %+v", n.sandbox.Log(0, 1<<20), n.sandbox.Connections()); strings.Contains(text, theValue) {
		t.Error("the log has the value")
	}
}

// TestInjectHTTP2Hostile: hostile requests that only HTTP/2 can express.
func TestInjectHTTP2Hostile(t *testing.T) {
	n := newInjecting(t, allow("allowed.example:443", "evil.example:443"))
	client := n.client(t, true)
	for _, c := range []struct {
		name   string
		change func(*http.Request)
		code   int
		reason string
	}{
		{"another authority", func(r *http.Request) { r.Host = "evil.example" }, 421, `the request is for "evil.example"`},
		{"two headers", func(r *http.Request) {
			r.Header["Authorization"] = []string{"Bearer " + thePlaceholder, "Bearer x"}
		}, 403, "is there 2 times"},
		{"another header", func(r *http.Request) { r.Header.Set("X-Api-Key", thePlaceholder) }, 403, "where nothing is put in"},
	} {
		t.Run(c.name, func(t *testing.T) {
			r, _ := http.NewRequest(http.MethodGet, "https://allowed.example/", nil)
			r.Header.Set("Authorization", "Bearer "+thePlaceholder)
			c.change(r)
			answer, err := client.Do(r)
			if err != nil {
				t.Fatal(err)
			}
			_ = answer.Body.Close()
			got, _ := n.reached()
			if answer.StatusCode != c.code || len(got) != 0 {
				t.Errorf("%s; the server got %d requests", answer.Status, len(got))
			}
			last(t, n.sandbox, func(e Entry) bool { return e.Outcome == Refused && strings.Contains(e.Reason, c.reason) })
		})
	}
}

// TestInjectRedirect: another host gets the placeholder at most.
func TestInjectRedirect(t *testing.T) {
	n := newInjecting(t, allow("allowed.example:443", "evil.example:443"))
	resolve(t, n.sandbox, "evil.example")
	r, _ := http.NewRequest(http.MethodGet, "https://allowed.example/redirect", nil)
	r.Header.Set("Authorization", "Bearer "+thePlaceholder)
	answer, err := n.client(t, false).Do(r)
	if err != nil {
		t.Fatal(err)
	}
	_ = answer.Body.Close()
	if answer.StatusCode != http.StatusFound || answer.Header.Get("Location") != "https://evil.example/" {
		t.Fatalf("%s to %s", answer.Status, answer.Header.Get("Location"))
	}
	if got, _ := n.reached(); len(got) != 1 {
		t.Fatalf("%d requests", len(got))
	}
	// The connection to evil.example is the sandbox's own, so it sees the server's
	// certificate.
	conn, err := connect(t, n.sandbox, addrAllowed+":443")
	if err != nil {
		t.Fatal(err)
	}
	own := tls.Client(conn, &tls.Config{ServerName: "evil.example", RootCAs: n.gateway.roots.Load(), MinVersion: tls.VersionTLS12})
	_, _ = io.WriteString(own, "GET / HTTP/1.1\r\nHost: evil.example\r\nAuthorization: Bearer "+thePlaceholder+"\r\nConnection: close\r\n\r\n")
	if _, err := io.ReadAll(own); err != nil {
		t.Fatal(err)
	}
	if got, _ := n.reached(); len(got) != 1 || got[0].Header.Get("Authorization") != "Bearer "+thePlaceholder {
		t.Errorf("the other host got %+v", got)
	}
}

// TestInjectWebSocket: the request gets the value, messages do not.
func TestInjectWebSocket(t *testing.T) {
	n := newInjecting(t, allow("allowed.example:443"))
	conn, _, err := websocket.Dial(t.Context(), "wss://allowed.example/ws", &websocket.DialOptions{
		HTTPClient: n.client(t, false), HTTPHeader: http.Header{"Authorization": {"Bearer " + thePlaceholder}},
	})
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = conn.CloseNow() }()
	if err := conn.Write(t.Context(), websocket.MessageText, []byte(thePlaceholder)); err != nil {
		t.Fatal(err)
	}
	if _, got, err := conn.Read(t.Context()); err != nil || string(got) != thePlaceholder {
		t.Errorf("the message came back as %q, %v", got, err)
	}
	if got, _ := n.reached(); len(got) != 1 || got[0].Header.Get("Authorization") != "Bearer "+theValue {
		t.Errorf("the server got %+v", got)
	}
}

// TestInjectConnections: which connections are intercepted, and which are refused.
func TestInjectConnections(t *testing.T) {
	t.Run("unverified server", func(t *testing.T) {
		n := newInjecting(t, allow("allowed.example:443"))
		_, other := certificate(t)
		n.gateway.SetRoots(other)
		if _, err := n.dialTLS(t, "allowed.example", alpnHTTP1); err == nil {
			t.Fatal("the handshake succeeded")
		}
		last(t, n.sandbox, func(e Entry) bool {
			return e.Outcome == Refused && e.Kind == ByInject && strings.Contains(e.Reason, "certificate was not verified: x509:")
		})
	})
	t.Run("server of another name", func(t *testing.T) {
		n := newInjecting(t, allow("allowed.example:443", "other.example:443"))
		n.upstream.set("other.example. A", addrAllowed)
		h := hostOfTest(t, n.ca, theValue)
		h.Name = "other.example"
		h.Certificate, h.Key = leafOf(t, n.ca, h.Name)
		n.sandbox.SetRules(Rules{Policy: n.rules.Policy, Inject: prepared(t, h)})
		resolve(t, n.sandbox, "other.example")
		if _, err := n.dialTLS(t, "other.example", alpnHTTP1); err == nil {
			t.Fatal("the handshake succeeded")
		}
		last(t, n.sandbox, func(e Entry) bool { return e.Outcome == Refused && strings.Contains(e.Reason, "not other.example") })
	})
	t.Run("no roots", func(t *testing.T) {
		n := newInjecting(t, allow("allowed.example:443"))
		n.gateway.SetRoots(nil)
		if _, err := n.dialTLS(t, "allowed.example"); err == nil {
			t.Fatal("the handshake succeeded")
		}
		last(t, n.sandbox, func(e Entry) bool { return e.Outcome == Refused && strings.Contains(e.Reason, "injectRoots") })
	})
	t.Run("a sandbox without the CA", func(t *testing.T) {
		n := newInjecting(t, allow("allowed.example:443"))
		n.trust = x509.NewCertPool()
		if _, err := n.dialTLS(t, "allowed.example", alpnHTTP1); err == nil {
			t.Fatal("the handshake succeeded")
		}
		last(t, n.sandbox, func(e Entry) bool {
			return e.Outcome == ResetBySandbox && strings.Contains(e.Reason, "trust the CA of its namespace")
		})
		if got, _ := n.reached(); len(got) > 0 {
			t.Error("a request was made")
		}
	})
	t.Run("plain HTTP", func(t *testing.T) {
		for name, rules := range map[string]Rules{
			"by name": allow("allowed.example"), "by address": allow(addrAllowed+"/32", "allowed.example:443"), "open": written("allow", nil, nil),
		} {
			n := newInjecting(t, rules)
			n.serveHTTP(t, http.HandlerFunc(n.answer), addrAllowed+":80")
			conn := mustConnect(t, n.sandbox, addrAllowed+":80")
			_, _ = io.WriteString(conn, "GET / HTTP/1.1\r\nHost: allowed.example\r\nAuthorization: Bearer "+thePlaceholder+"\r\nConnection: close\r\n\r\n")
			said, _ := readAll(conn)
			if got, _ := n.reached(); len(got) > 0 || !strings.Contains(said, "403 Forbidden") {
				t.Errorf("%s: %q; the server got %d", name, said, len(got))
			}
			last(t, n.sandbox, func(e Entry) bool { return e.Outcome == Refused && strings.Contains(e.Reason, "use https") })
		}
	})
	t.Run("whatever rule allows it", func(t *testing.T) {
		for name, rules := range map[string]Rules{
			"wildcard": allow("*.example:443"), "by address": allow(addrAllowed+"/32", "allowed.example:443"), "open": written("allow", nil, nil),
		} {
			n := newInjecting(t, rules)
			r, _ := http.NewRequest(http.MethodGet, "https://allowed.example/", nil)
			r.Header.Set("Authorization", "Bearer "+thePlaceholder)
			answer, err := n.client(t, true).Do(r)
			if err != nil {
				t.Fatal(name, err)
			}
			_ = answer.Body.Close()
			if got, _ := n.reached(); len(got) != 1 || got[0].Header.Get("Authorization") != "Bearer "+theValue {
				t.Errorf("%s: the server got %+v", name, got)
			}
		}
	})
	t.Run("not allowed", func(t *testing.T) {
		n := newInjecting(t, allow("allowed.example:80"))
		if _, err := n.dialTLS(t, "allowed.example"); !wasRefused(err) {
			t.Errorf("connect: %v", err)
		}
	})
	t.Run("QUIC", func(t *testing.T) {
		n := newInjecting(t, allow("allowed.example:443", "udp://allowed.example:443"))
		_, err := n.sandbox.DialUDP(t.Context(), netip.MustParseAddrPort("10.255.255.2:5"), netip.MustParseAddrPort(addrAllowed+":443"))
		var r *refusal
		if !errors.As(err, &r) || r.Kind != ByInject {
			t.Errorf("a flow to port 443: %v", err)
		}
	})
	t.Run("other ALPN", func(t *testing.T) {
		n := newInjecting(t, allow("allowed.example:443"))
		if _, err := n.dialTLS(t, "allowed.example", "h3", "acme-tls/1"); err == nil {
			t.Error("the handshake succeeded")
		}
		if got, _ := n.reached(); len(got) > 0 {
			t.Error("a request was made")
		}
	})
	t.Run("no ALPN", func(t *testing.T) {
		n := newInjecting(t, allow("allowed.example:443"))
		conn, err := n.dialTLS(t, "allowed.example")
		if err != nil {
			t.Fatal(err)
		}
		_, _ = io.WriteString(conn, "GET / HTTP/1.1\r\nHost: allowed.example\r\nAuthorization: Bearer "+thePlaceholder+"\r\nConnection: close\r\n\r\n")
		if said, err := readAll(conn); !strings.Contains(said, "served") {
			t.Errorf("%q, %v", said, err)
		}
	})
	t.Run("the policy is withdrawn", func(t *testing.T) {
		n := newInjecting(t, allow("allowed.example:443"))
		conn, err := n.dialTLS(t, "allowed.example", alpnHTTP1)
		if err != nil {
			t.Fatal(err)
		}
		n.sandbox.SetRules(Rules{Inject: n.rules.Inject})
		if _, err := conn.Read(make([]byte, 1)); err == nil {
			t.Error("the connection goes on")
		}
		last(t, n.sandbox, func(e Entry) bool { return e.Outcome == Cut })
	})
}

func leafOf(t testing.TB, ca *authority.Authority, name policy.Name) ([]byte, inject.Value) {
	t.Helper()
	certificate, key, err := ca.Leaf(name, time.Now())
	if err != nil {
		t.Fatal(err)
	}
	return certificate, inject.Value(key)
}

// TestInjectStreams: each piece of an answer arrives when it is sent, while the
// request goes on, like the answers of models word by word.
func TestInjectStreams(t *testing.T) {
	for _, two := range []bool{false, true} {
		n := newInjecting(t, allow("allowed.example:443"))
		read, write := io.Pipe()
		r, _ := http.NewRequest(http.MethodPost, "https://allowed.example/stream", read)
		r.Header.Set("Authorization", "Bearer "+thePlaceholder)
		go func() { _, _ = io.WriteString(write, "word0") }()
		answer, err := n.client(t, two).Do(r) // it returns before the request is complete
		if err != nil {
			t.Fatal(err)
		}
		for i := range 5 {
			got := make([]byte, 5)
			if _, err := io.ReadFull(answer.Body, got); err != nil || string(got) != fmt.Sprintf("word%d", i) {
				t.Fatalf("%q, %v", got, err)
			}
			_, _ = fmt.Fprintf(write, "word%d", i+1)
		}
		_ = write.Close()
		if rest, err := io.ReadAll(answer.Body); err != nil || string(rest) != "word5" {
			t.Errorf("%q, %v", rest, err)
		}
		_ = answer.Body.Close()
		if got, _ := n.reached(); len(got) != 1 || got[0].Header.Get("Authorization") != "Bearer "+theValue {
			t.Errorf("the server got %+v", got)
		}
	}
}
