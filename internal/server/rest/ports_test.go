package rest

import (
	"bufio"
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/json"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"net/url"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/coder/websocket"

	"agentrun.dev/api/rest"
	"agentrun.dev/internal/node"
	"agentrun.dev/internal/sandbox"
)

// program is a server as one in a sandbox: the agents of these tests have this
// host's loopback.
func program(t *testing.T, h http.HandlerFunc) (port string) {
	t.Helper()
	s := httptest.NewServer(h)
	t.Cleanup(s.Close)
	u, err := url.Parse(s.URL)
	if err != nil {
		t.Fatal(err)
	}
	return u.Port()
}

// raw sends a request as it is written, and returns the answer.
func (n *testNode) raw(text string) *http.Response {
	n.t.Helper()
	conn, err := net.Dial("unix", n.socket)
	if err != nil {
		n.t.Fatal(err)
	}
	n.t.Cleanup(func() { _ = conn.Close() })
	if _, err := io.WriteString(conn, strings.ReplaceAll(text, "\n", "\r\n")+"\r\n\r\n"); err != nil {
		n.t.Fatal(err)
	}
	res, err := http.ReadResponse(bufio.NewReader(conn), nil)
	if err != nil {
		n.t.Fatal(err)
	}
	return res
}

func bodyOf(t *testing.T, res *http.Response) string {
	t.Helper()
	defer res.Body.Close()
	b, err := io.ReadAll(res.Body)
	if err != nil {
		t.Fatal(err)
	}
	return string(b)
}

// newFront serves a handler over TCP and returns its URL.
func newFront(t *testing.T, h http.Handler) string {
	t.Helper()
	s := httptest.NewServer(h)
	t.Cleanup(s.Close)
	return s.URL
}

// listen is a program that has not accepted yet.
func listen(t *testing.T) (l net.Listener, port string) {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = l.Close() })
	return l, fmt.Sprint(l.Addr().(*net.TCPAddr).Port)
}

func readAll(t *testing.T, r io.Reader) string {
	t.Helper()
	b, err := io.ReadAll(r)
	if err != nil {
		t.Fatal(err)
	}
	return string(b)
}

func (n *testNode) idOf(name string) string {
	n.t.Helper()
	return as[rest.Sandbox](n.do("GET", v1+"/sandboxes/"+name, nil).ok(200)).Id
}

const domain = "sandbox.example"

func withDomain(c *Config) { c.Domain = domain }

// TestPortTargets: the program gets the target as the client wrote it, byte for
// byte, by path and by host name, and no target leads anywhere else.
func TestPortTargets(t *testing.T) {
	n := newNode(t, withDomain)
	n.setUp()
	at := n.claim("box")
	port := program(t, func(w http.ResponseWriter, r *http.Request) { _, _ = io.WriteString(w, r.RequestURI) })
	host := port + "-" + n.idOf("box") + "." + domain
	for _, target := range []string{
		"/", "/index.html", "/a/b/../c", "/../../../../v1/version", "/..", "/%2e%2e/%2e%2e", "/..%2f..%2fetc/passwd", "/a//b", "//a", "//a/%2F?x",
		"/%00", "/a%20b+c", "/%41%42", "/ünïcode", `/a"b<c>d|e^f`, "/semi;colon,comma=eq@at:colon!$&'()*",
		"/?", "/?a=1&b=2", "/?a;b", "/?%zz", "/?a=%2f..&q=?/", "/v1/namespaces/default/sandboxes/box/ports/1/", "/*", "/[x]",
	} {
		for form, request := range map[string]string{
			"path":      fmt.Sprintf("GET %s/ports/%s%s HTTP/1.1\nHost: node", at, port, target),
			"host name": fmt.Sprintf("GET %s HTTP/1.1\nHost: %s", target, host),
			"upper":     fmt.Sprintf("GET %s HTTP/1.1\nHost: %s", target, strings.ToUpper(host)+".:7070"),
			"absolute":  fmt.Sprintf("GET http://%s%s HTTP/1.1\nHost: ignored", host, target),
		} {
			res := n.raw(request)
			if got := bodyOf(t, res); res.StatusCode != http.StatusOK || got != target {
				t.Errorf("%s: %q became %d %q", form, target, res.StatusCode, got)
			}
		}
	}
	// Characters that no URL has, and that net/http cannot send unchanged.
	res := n.raw(fmt.Sprintf("GET %s/ports/%s//a|b HTTP/1.1\nHost: node", at, port))
	if got := bodyOf(t, res); res.StatusCode != http.StatusBadRequest || !strings.Contains(got, "invalid") {
		t.Errorf("answered %d %s", res.StatusCode, got)
	}
}

// TestPortRefusals: a request that names no port of a sandbox reaches neither a
// program nor the API.
func TestPortRefusals(t *testing.T) {
	n := newNode(t, withDomain)
	n.setUp()
	at := n.claim("box")
	id := n.idOf("box")
	l, closed := listen(t)
	if err := l.Close(); err != nil {
		t.Fatal(err)
	}
	for _, tt := range []struct {
		host, path string
		status     int
		code       string
	}{
		{"node", at + "/ports/" + closed + "/", 502, "port_closed"},
		{closed + "-" + id + "." + domain, "/", 502, "port_closed"},
		{"node", at + "/ports/0/", 400, "invalid"},
		{"node", at + "/ports/65536/", 400, "invalid"},
		{"node", at + "/ports/-1/", 400, "invalid"},
		{"node", at + "/ports/+80/", 400, "invalid"},
		{"node", at + "/ports/080/", 400, "invalid"},
		{"node", at + "/ports/http/", 400, "invalid"},
		{"node", at + "/ports//", 400, "invalid"},
		{"node", at + "/ports/%38%30/", 400, "invalid"},
		{"node", v1 + "/sandboxes/nobody/ports/80/", 404, "not_found"},
		{"node", v1 + "/sandboxes/../ports/80/", 400, "invalid"},
		{"node", v1 + "/sandboxes/b%6fx/ports/80/", 400, "invalid"},
		{"node", v1 + "/sandboxes/box/../box/ports/80/", 400, "invalid"},
		{"node", "/v1/namespaces/other/sandboxes/box/ports/80/", 404, "not_found"},
		{"80-" + strings.Repeat("a", len(id)) + "." + domain, "/v1/version", 404, "not_found"},
		{"80-" + id[1:] + "." + domain, "/v1/version", 404, "not_found"},
		{id + "." + domain, "/v1/version", 404, "not_found"},
		{"0-" + id + "." + domain, "/v1/version", 404, "not_found"},
		{"80-" + id + ".x." + domain, "/v1/version", 404, "not_found"},
		{"80-box." + domain, "/v1/version", 404, "not_found"},
		{"." + domain, "/v1/version", 404, "not_found"},
	} {
		res := n.raw(fmt.Sprintf("GET %s HTTP/1.1\nHost: %s", tt.path, tt.host))
		body := bodyOf(t, res)
		var e rest.Error
		if err := json.Unmarshal([]byte(body), &e); err != nil || res.StatusCode != tt.status || string(e.Code) != tt.code {
			t.Errorf("%s%s: answered %d, not %d %s: %s", tt.host, tt.path, res.StatusCode, tt.status, tt.code, body)
		}
		if tt.code == "port_closed" && e.Remediation == "" {
			t.Errorf("%s does not say what to do", body)
		}
	}
	// The domain itself, and others, are the API's.
	for _, host := range []string{domain, "other.example", "80-" + id + "." + domain + ".evil.example"} {
		if res := n.raw("GET /v1/version HTTP/1.1\nHost: " + host); res.StatusCode != http.StatusOK {
			t.Errorf("%s: %d", host, res.StatusCode)
		}
	}
	n.do("DELETE", at, nil).ok(200)
	if res := n.raw("GET / HTTP/1.1\nHost: 80-" + id + "." + domain); res.StatusCode != http.StatusNotFound {
		t.Errorf("a sandbox that has ended: %d", res.StatusCode)
	}
	if res := n.raw("GET " + at + "/ports/80/ HTTP/1.1\nHost: node"); res.StatusCode != http.StatusGone {
		t.Errorf("a sandbox that has ended: %d", res.StatusCode)
	}
}

// TestPortHeaders: the program gets the headers that are meant for it, and
// nothing that lets it act as the client.
func TestPortHeaders(t *testing.T) {
	n := newNode(t, withDomain)
	n.setUp()
	at := n.claim("box")
	id := as[rest.Sandbox](n.do("GET", at, nil).ok(200)).Id
	token := n.token("box")
	port := program(t, func(w http.ResponseWriter, r *http.Request) {
		h := r.Header.Clone()
		h.Set("Host", r.Host)
		w.Header().Set("Connection", "X-Gone")
		w.Header().Set("X-Gone", "1")
		w.Header().Set("Content-Security-Policy", "default-src 'self'")
		w.Header().Add("Set-Cookie", "a=1")
		w.Header().Add("Set-Cookie", "b=2")
		_ = json.NewEncoder(w).Encode(h)
	})
	send := func(first, host, credential string) (http.Header, *http.Response) {
		t.Helper()
		res := n.raw(first + " HTTP/1.1\nHost: " + host + "\n" + credential + `
Cookie: a=1; agentrun_session=secret; b=2
Cookie: agentrun_only=secret
Connection: X-Hop, keep-alive
X-Hop: 1
Keep-Alive: timeout=5
Proxy-Authorization: Basic secret
Te: trailers
X-Forwarded-For: 6.6.6.6
X-Forwarded-Host: evil.example
X-Forwarded-Prefix: /evil
Forwarded: for=6.6.6.6
X-Mine: yes`)
		var got http.Header
		if body := bodyOf(t, res); res.StatusCode == http.StatusOK {
			if err := json.Unmarshal([]byte(body), &got); err != nil {
				t.Fatalf("%s: %v", body, err)
			}
		}
		return got, res
	}
	for _, credential := range []string{"Authorization: Bearer " + token, "X-Access-Token: " + token} {
		got, res := send("GET "+at+"/ports/"+port+"/", "node", credential)
		for name, values := range got {
			if strings.Contains(strings.Join(values, " "), "secret") || strings.Contains(strings.Join(values, " "), token) || strings.Contains(strings.Join(values, " "), "6.6.6.6") {
				t.Errorf("the program got %s: %s", name, values)
			}
		}
		for _, name := range []string{"X-Hop", "Keep-Alive", "Proxy-Authorization", "Authorization", "X-Access-Token", "Forwarded"} {
			if got.Get(name) != "" {
				t.Errorf("the program got %s", name)
			}
		}
		for name, want := range map[string]string{
			"Host": "localhost:" + port, "X-Forwarded-Prefix": at + "/ports/" + port, "X-Forwarded-Host": "node",
			"X-Forwarded-Proto": "http", "X-Mine": "yes", "Cookie": "a=1; b=2", "X-Request-Id": res.Header.Get("X-Request-Id"),
		} {
			if got.Get(name) != want {
				t.Errorf("the program got %s: %q, not %q", name, got.Get(name), want)
			}
		}
		if res.Header.Get("X-Gone") != "" || len(res.Header["Set-Cookie"]) != 2 {
			t.Errorf("the client got %v", res.Header)
		}
		if policy := res.Header["Content-Security-Policy"]; len(policy) != 2 || !slices.Contains(policy, sandboxPolicy) {
			t.Errorf("a page in the daemon's origin has the policy %q", policy)
		}
	}
	host := port + "-" + id + "." + domain
	got, res := send("GET /", host, "X-Access-Token: "+token)
	if got.Get("Host") != host || got.Get("X-Forwarded-Prefix") != "" || len(res.Header["Content-Security-Policy"]) != 1 {
		t.Errorf("by host name: %v, %v", got, res.Header)
	}
	for _, credential := range []string{"X-Access-Token: wrong", "Authorization: Bearer wrong\nX-Access-Token: " + token} {
		for _, first := range []string{"GET " + at + "/ports/" + port + "/", "GET /"} {
			if _, res := send(first, host, credential); res.StatusCode != http.StatusUnauthorized {
				t.Errorf("%s with %q: %d", first, credential, res.StatusCode)
			}
		}
	}
	// Over TCP the kernel knows no user, and the header is for ports only.
	front := newFront(t, New(Config{Config: n.Config(), Domain: domain}))
	for path, want := range map[string]int{at + "/ports/" + port + "/": http.StatusOK, "/v1/version": http.StatusUnauthorized} {
		r, err := http.NewRequestWithContext(t.Context(), http.MethodGet, front+path, nil)
		if err != nil {
			t.Fatal(err)
		}
		for _, given := range []string{token, ""} {
			if r.Header.Set("X-Access-Token", given); given == "" {
				want = http.StatusUnauthorized
			}
			res, err := http.DefaultClient.Do(r)
			if err != nil {
				t.Fatal(err)
			}
			_ = res.Body.Close()
			if res.StatusCode != want {
				t.Errorf("%s with the token %q: %d", path, given, res.StatusCode)
			}
		}
	}
}

// TestPortBodies: large bodies go both ways at once and arrive whole, many at a
// time.
func TestPortBodies(t *testing.T) {
	n := newNode(t)
	n.setUp()
	at := n.claim("box")
	port := program(t, func(w http.ResponseWriter, r *http.Request) {
		if err := http.NewResponseController(w).EnableFullDuplex(); err != nil {
			t.Error(err)
		}
		_, _ = io.Copy(w, r.Body)
	})
	const size = 8 << 20
	sent := bytes.Repeat([]byte("0123456789abcdef"), size/16)
	want := sha256.Sum256(sent)
	var all sync.WaitGroup
	for range 8 {
		all.Go(func() {
			r := n.request("POST", at+"/ports/"+port+"/echo", nil)
			r.Body = io.NopCloser(bytes.NewReader(sent)) // in chunks
			res, err := n.client.Do(r)
			if err != nil {
				t.Error(err)
				return
			}
			defer res.Body.Close()
			sum := sha256.New()
			if got, err := io.Copy(sum, res.Body); err != nil || got != size || !bytes.Equal(sum.Sum(nil), want[:]) {
				t.Errorf("%d of %d bytes, %v", got, size, err)
			}
		})
	}
	all.Wait()
}

// TestPortStreams: events come when they are sent, and a client that leaves is
// noticed by the program.
func TestPortStreams(t *testing.T) {
	n := newNode(t)
	n.setUp()
	at := n.claim("box")
	next, left := make(chan string), make(chan struct{})
	port := program(t, func(w http.ResponseWriter, r *http.Request) {
		w.Header().Set("Content-Type", "text/event-stream")
		for {
			select {
			case s := <-next:
				_, _ = io.WriteString(w, "data: "+s+"\n\n")
				_ = http.NewResponseController(w).Flush()
			case <-r.Context().Done():
				close(left)
				return
			}
		}
	})
	ctx, leave := context.WithCancel(t.Context())
	go func() { next <- "one" }()
	res, err := n.client.Do(n.request("GET", at+"/ports/"+port+"/events", nil).WithContext(ctx))
	if err != nil {
		t.Fatal(err)
	}
	defer res.Body.Close()
	in := bufio.NewReader(res.Body)
	for _, want := range []string{"one", "two", "three"} {
		if want != "one" {
			next <- want
		}
		line, err := in.ReadString('\n')
		if err != nil || line != "data: "+want+"\n" {
			t.Fatalf("%q, %v", line, err)
		}
		_, _ = in.ReadString('\n')
	}
	leave()
	<-left
}

// TestPortWebSocket: a WebSocket passes through, both ways, in either form.
func TestPortWebSocket(t *testing.T) {
	n := newNode(t, withDomain)
	n.setUp()
	at := n.claim("box")
	port := program(t, func(w http.ResponseWriter, r *http.Request) {
		conn, err := websocket.Accept(w, r, nil) // it compares origin and host
		if err != nil {
			return
		}
		defer func() { _ = conn.CloseNow() }()
		conn.SetReadLimit(1 << 20)
		for {
			kind, data, err := conn.Read(r.Context())
			if err != nil || conn.Write(r.Context(), kind, data) != nil {
				return
			}
		}
	})
	host := port + "-" + n.idOf("box") + "." + domain
	for _, target := range []string{"http://node" + at + "/ports/" + port + "/ws", "http://" + host + "/ws"} {
		header := http.Header{}
		if strings.Contains(target, host) {
			header.Set("Origin", "https://"+host)
		}
		conn, _, err := websocket.Dial(t.Context(), target, &websocket.DialOptions{HTTPClient: n.client, HTTPHeader: header})
		if err != nil {
			t.Fatal(err)
		}
		conn.SetReadLimit(1 << 20)
		for _, size := range []int{1, 100, 100 << 10} {
			sent := bytes.Repeat([]byte("x"), size)
			if err := conn.Write(t.Context(), websocket.MessageBinary, sent); err != nil {
				t.Fatal(err)
			}
			if _, got, err := conn.Read(t.Context()); err != nil || !bytes.Equal(got, sent) {
				t.Fatalf("%d of %d bytes, %v", len(got), size, err)
			}
		}
		if err := conn.Close(websocket.StatusNormalClosure, ""); err != nil {
			t.Error(err)
		}
	}
}

// TestPortUse: a request wakes a sandbox that sleeps, and an open connection
// keeps it from being idle.
func TestPortUse(t *testing.T) {
	n := newNode(t)
	n.setUp()
	at := n.claim("box")
	port := program(t, func(w http.ResponseWriter, _ *http.Request) { _, _ = io.WriteString(w, "hello") })
	n.do("POST", at+"/hibernate", nil).ok(200)
	res, err := n.client.Do(n.request("GET", at+"/ports/"+port+"/", nil))
	if err != nil {
		t.Fatal(err)
	}
	if got := bodyOf(t, res); got != "hello" {
		t.Errorf("%q", got)
	}
	if s := as[rest.Sandbox](n.do("GET", at, nil).ok(200)); s.State != rest.SandboxStateRunning {
		t.Errorf("it is %s", s.State)
	}

	n.do("POST", v1+"/sandboxes", rest.SandboxCreate{Name: "idle", Pool: "pool", IdleTimeout: "50ms"}).ok(201)
	l, port := listen(t)
	conn, _, err := websocket.Dial(t.Context(), "http://node"+v1+"/sandboxes/idle/tunnels/"+port, &websocket.DialOptions{HTTPClient: n.client})
	if err != nil {
		t.Fatal(err)
	}
	inside, err := l.Accept()
	if err != nil {
		t.Fatal(err)
	}
	timeout := time.NewTimer(200 * time.Millisecond) // four times what it may be idle
	<-timeout.C
	if s := as[rest.Sandbox](n.do("GET", v1+"/sandboxes/idle", nil).ok(200)); s.State != rest.SandboxStateRunning {
		t.Errorf("with a connection it is %s", s.State)
	}
	_ = inside.Close()
	_ = conn.CloseNow()
	n.Eventually(func() bool {
		return n.do("GET", v1+"/sandboxes/idle", nil).status == http.StatusGone
	})
}

// TestPortSlash: a page is where relative links work.
func TestPortSlash(t *testing.T) {
	n := newNode(t)
	n.setUp()
	at := n.claim("box")
	res := n.raw("GET " + at + "/ports/8080?a=1 HTTP/1.1\nHost: node")
	if res.StatusCode != http.StatusPermanentRedirect || res.Header.Get("Location") != "8080/?a=1" {
		t.Errorf("%d to %q", res.StatusCode, res.Header.Get("Location"))
	}
}

// TestPortStall: a client that stops sending, or that stops reading, does not
// keep a sandbox in use for ever.
func TestPortStall(t *testing.T) {
	n := newNode(t, func(c *Config) { c.StallTimeout = 300 * time.Millisecond })
	n.setUp()
	at := n.claim("box")
	gone := make(chan struct{}, 2)
	port := program(t, func(w http.ResponseWriter, r *http.Request) {
		defer func() { gone <- struct{}{} }()
		_, _ = io.Copy(io.Discard, r.Body)
		big := make([]byte, 1<<20)
		for r.URL.Path == "/big" {
			if _, err := w.Write(big); err != nil {
				return
			}
		}
	})
	res := n.raw("POST " + at + "/ports/" + port + "/ HTTP/1.1\nHost: node\nContent-Length: 10")
	if got := bodyOf(t, res); res.StatusCode != http.StatusRequestTimeout || !strings.Contains(got, "timeout") {
		t.Errorf("a body that never comes: %d %s", res.StatusCode, got)
	}
	<-gone
	res = n.raw("GET " + at + "/ports/" + port + "/big HTTP/1.1\nHost: node")
	if res.StatusCode != http.StatusOK {
		t.Error(res.StatusCode)
	}
	<-gone // though the client reads no answer
}

// TestPortLimit: the number of connections is bounded, and each that ends makes
// room.
func TestPortLimit(t *testing.T) {
	n := newNode(t)
	n.setUp()
	at := n.claim("box")
	l, _ := listen(t)
	port := l.Addr().(*net.TCPAddr).Port
	u, err := n.Manager.Use(t.Context(), sandbox.Key{Namespace: "default", Name: "box"})
	if err != nil {
		t.Fatal(err)
	}
	defer u.Close()
	var conns []sandbox.Conn
	for range node.MaxConns {
		c, err := u.Connect(t.Context(), uint16(port))
		if err != nil {
			t.Fatal(err)
		}
		conns = append(conns, c)
	}
	n.do("GET", fmt.Sprintf("%s/ports/%d/", at, port), nil).refused(503, "insufficient_capacity")
	n.do("POST", at+"/execs", rest.ExecRequest{Argv: []string{"true"}}).ok(200) // others have room
	for _, c := range conns {
		_ = c.Close()
		_ = c.Close() // of no effect
	}
	for range node.MaxConns {
		c, err := u.Connect(t.Context(), uint16(port))
		if err != nil {
			t.Fatal(err)
		}
		defer func() { _ = c.Close() }()
	}
}

// FuzzPortTargets: the program gets each target as it was written, or the
// request is refused.
func FuzzPortTargets(f *testing.F) {
	f.Add("/v1/namespaces/a/sandboxes/b/ports/80/x", "node")
	f.Add("http://x/v1/namespaces/a/sandboxes/b/ports/80", "80-"+strings.Repeat("a", 20)+"."+domain)
	f.Add("//", "-.")
	a := &api{Config: Config{Domain: domain}}
	f.Fuzz(func(t *testing.T, uri, host string) {
		parsed, err := url.ParseRequestURI(uri)
		if err != nil {
			return
		}
		to, err := a.portTarget(&http.Request{Method: http.MethodGet, URL: parsed, RequestURI: uri, Host: host})
		if err != nil || to == nil {
			return
		}
		if to.port == 0 || to.path != "" && to.path[0] != '/' {
			t.Fatalf("%+v", to)
		}
		target, err := to.url(parsed)
		if err != nil {
			return
		}
		want, _, _ := strings.Cut(uri, "?")
		if to.path != "" && !strings.HasSuffix(want, to.path) {
			t.Fatalf("%q is no part of %q", to.path, uri)
		}
		sent, _, _ := strings.Cut(target.RequestURI(), "?")
		if to.path != "" && sent != to.path {
			t.Fatalf("%q is sent as %q", to.path, sent)
		}
	})
}
