package egress

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log"
	"net"
	"net/http"
	"net/http/httputil"
	"net/netip"
	"net/url"
	"strconv"
	"strings"
	"sync"
	"time"

	"agentrun.dev/internal/network/policy"
	"agentrun.dev/internal/network/stack"
)

const (
	maxHTTPHead = 64 << 10
	// httpIdle is how long a connection may wait for its next request.
	httpIdle = 10 * time.Minute
	// maxHTTP2Buffer is how many bytes each side of an HTTP/2 connection may send
	// before the other reads them.
	maxHTTP2Buffer = 1 << 20
)

var errOneConnection = errors.New("the connection to the server has ended")

// exchange is one HTTP connection of a sandbox: a server for the sandbox, and a
// client on the one connection that was dialled. Each request is parsed, checked and
// written anew.
type exchange struct {
	*connection
	inside *endable
	proxy  *httputil.ReverseProxy
	// handlers counts the requests that are being served. Upgraded ones outlive the
	// server.
	handlers sync.WaitGroup
	// check decides about a request. The status is 0 if the request may pass. An
	// error comes from the outside.
	check func(*http.Request) (int, policy.Decision, error)
	// remote is the connection to the server, if it is not the one that was dialled.
	remote net.Conn
	// many is set if one connection can carry many requests at once: HTTP/2.
	many bool

	mu     sync.Mutex
	dialed bool // mu protects it and all following fields: the transport has taken the connection
	passed bool // a request was passed on
	active int  // requests that are being served
	gone   bool // the server has ended its connection
	broken bool // the server's connection has ended with a reset
	// unread is set while a request was read but not yet handled. It stays set if the
	// request is too malformed to be handled.
	unread bool
}

// serveHTTP serves the requests of a connection.
func (c *connection) serveHTTP(inside stack.Conn) Outcome {
	x := &exchange{connection: c, inside: &endable{Conn: inside}}
	x.check = x.judge
	protocols := new(http.Protocols)
	protocols.SetHTTP1(true)
	return x.serve(x.inside, protocols, x, rewrite)
}

// serve serves the requests on conn with handler, and passes them on as rewrite
// changes them.
func (x *exchange) serve(conn net.Conn, protocols *http.Protocols, handler http.Handler, rewrite func(*httputil.ProxyRequest)) Outcome {
	transport, err := x.client(protocols)
	if err != nil {
		return x.endWith(Failed, "", err)
	}
	discard := log.New(io.Discard, "", 0)
	x.proxy = &httputil.ReverseProxy{
		Rewrite: rewrite, Transport: transport, FlushInterval: -1, ErrorLog: discard,
		ModifyResponse: x.modifyResponse, ErrorHandler: x.failed,
	}
	listener := newOneListener(conn)
	server := &http.Server{
		Handler: handler, ErrorLog: discard, MaxHeaderBytes: maxHTTPHead, Protocols: protocols, HTTP2: limitsHTTP2,
		ReadHeaderTimeout: x.sandbox.gateway.config.FirstBytes, IdleTimeout: httpIdle,
		ConnState: func(_ net.Conn, state http.ConnState) { x.changed(state, listener) },
		// The remote answers OPTIONS * itself.
		DisableGeneralOptionsHandler: true,
	}
	_ = server.Serve(listener) // it ends with the connection
	x.handlers.Wait()
	transport.CloseIdleConnections()
	return x.outcome()
}

// client sends requests over the one connection to the server.
func (x *exchange) client(protocols *http.Protocols) (client, error) {
	if x.many {
		return newStreams(context.Background(), x.remote)
	}
	return &http.Transport{
		DialContext:            x.dialOnce,
		DialTLSContext:         x.dialOnce,
		DisableCompression:     true,
		MaxResponseHeaderBytes: maxHTTPHead,
		ExpectContinueTimeout:  time.Second,
		Protocols:              protocols,
	}, nil
}

type client interface {
	http.RoundTripper
	CloseIdleConnections()
}

// limitsHTTP2 bound how much memory one connection takes for a sandbox, or a server,
// that does not read.
var limitsHTTP2 = &http.HTTP2Config{
	MaxConcurrentStreams: 100, MaxReceiveBufferPerConnection: maxHTTP2Buffer, MaxReceiveBufferPerStream: 256 << 10,
}

// changed follows the state of the sandbox's connection in the HTTP server.
func (x *exchange) changed(state http.ConnState, listener *oneListener) {
	x.mu.Lock()
	defer x.mu.Unlock()
	switch state {
	case http.StateActive:
		x.unread = !x.many // HTTP/2 becomes active before the first request
	case http.StateClosed, http.StateHijacked:
		_ = listener.Close()
	}
}

func (x *exchange) outcome() Outcome {
	x.mu.Lock()
	unread, passed, broken := x.unread, x.passed, x.broken
	x.mu.Unlock()
	if unread {
		d, _ := x.settled()
		x.refuseRequest("", policy.Decision{Kind: ByHTTP, Rule: d.Rule, Reason: "not a well-formed HTTP/1 request"})
	}
	switch {
	case broken:
		return ResetByRemote
	case !passed && unread:
		return Refused
	}
	return Closed
}

// refuseRequest logs a refused request. If no request was passed on, it is the log
// entry of the whole connection.
func (x *exchange) refuseRequest(host string, d policy.Decision) {
	x.mu.Lock()
	passed := x.passed
	x.mu.Unlock()
	x.sandbox.mu.Lock()
	if !passed && x.ending == nil {
		x.name = policy.Name(printable(host))
		x.ending, x.connection.outcome = &d, Refused
	}
	x.sandbox.mu.Unlock()
	if passed {
		now := time.Now()
		x.sandbox.refuse(Entry{Time: now, Ended: now, Protocol: string(x.protocol), Name: printable(host), Address: x.to}, d)
	}
}

// ServeHTTP checks one request, and passes it on.
func (x *exchange) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	x.handlers.Add(1)
	defer x.handlers.Done()
	x.mu.Lock()
	x.unread = false
	x.active++
	x.mu.Unlock()
	defer x.served()
	status, d, err := x.check(r)
	if err != nil {
		x.failed(w, r, err)
	}
	if status != 0 {
		x.refuseRequest(r.Host, d)
		w.Header().Set("Connection", "close")
		http.Error(w, "refused by the sandbox's network policy: "+d.Reason, status)
		return
	}
	x.mu.Lock()
	x.passed = true
	x.mu.Unlock()
	// The sandbox gets only the answer's own headers, and none that net/http would
	// add.
	w.Header()["Content-Type"], w.Header()["Date"] = nil, nil
	// A server may answer before the request is complete.
	_ = http.NewResponseController(w).EnableFullDuplex()
	x.proxy.ServeHTTP(w, r)
}

// served ends the sandbox's connection if the server's connection has ended
// meanwhile.
func (x *exchange) served() {
	x.mu.Lock()
	x.active--
	gone := x.gone && x.active == 0
	x.mu.Unlock()
	x.inside.answer()
	if gone {
		x.inside.end() // after the answer was written
	}
}

// judge decides about a request on port 80.
func (x *exchange) judge(r *http.Request) (int, policy.Decision, error) {
	d, _ := x.settled()
	refuse := func(status int, format string, args ...any) (int, policy.Decision, error) {
		return status, policy.Decision{Kind: ByHTTP, Rule: d.Rule, Reason: fmt.Sprintf(format, args...)}, nil
	}
	switch {
	case r.ProtoMajor != 1:
		return refuse(http.StatusForbidden, "HTTP/2 without TLS")
	case r.Method == http.MethodConnect:
		return refuse(http.StatusForbidden, "CONNECT would hide where the connection leads")
	case r.URL.User != nil, r.URL.Scheme != "" && r.URL.Scheme != "http":
		return refuse(http.StatusForbidden, "the request is for another scheme, or has a user name")
	case !upgradeAllowed(r.Header):
		return refuse(http.StatusForbidden, "upgrade to %.40q: only WebSocket is allowed", r.Header.Values("Upgrade"))
	}
	host, err := hostOf(r.Host, portHTTP)
	if err != nil {
		return refuse(http.StatusMisdirectedRequest, "host %.80q: %v", r.Host, err)
	}
	if addr, err := netip.ParseAddr(host); err == nil && !d.NameNeeded && addr == x.to.Addr() {
		if verdict := x.admitNameless(); !verdict.Allowed {
			return http.StatusMisdirectedRequest, verdict, nil
		}
		return 0, d.Decision, nil
	}
	name, err := policy.ParseName(host)
	if err != nil {
		return refuse(http.StatusMisdirectedRequest, "host: %v", err)
	}
	if injects(x.sandbox.current(), []pin{{name: name}}) != "" {
		return http.StatusForbidden, policy.Decision{
			Kind: ByInject, Rule: "inject: " + string(name), Reason: fmt.Sprintf("requests to %s get credentials, which are sent over TLS only: use https", name),
		}, nil
	}
	verdict, err := x.admit(r.Context(), name)
	if err != nil {
		return 0, policy.Decision{}, err
	}
	if !verdict.Allowed {
		return http.StatusMisdirectedRequest, verdict, nil
	}
	return 0, verdict, nil
}

// hostOf removes the port from a Host. The port must be that of the connection.
func hostOf(host string, to int) (string, error) {
	if name, port, err := net.SplitHostPort(host); err == nil {
		if port != strconv.Itoa(to) {
			return "", fmt.Errorf("the connection is to port %d", to)
		}
		return name, nil
	}
	return strings.TrimSuffix(strings.TrimPrefix(host, "["), "]"), nil
}

// upgradeAllowed is true for a request without an upgrade, and for WebSocket. After
// other upgrades (h2c, TLS) requests would pass unchecked.
func upgradeAllowed(h http.Header) bool {
	for _, value := range h.Values("Upgrade") {
		if !strings.EqualFold(strings.TrimSpace(value), "websocket") {
			return false
		}
	}
	return len(h.Values("Http2-Settings")) == 0
}

// rewrite makes the request for the server. Path and query stay the same byte for
// byte.
func rewrite(r *httputil.ProxyRequest) {
	in, out := r.In, r.Out
	// All names of a connection use the one connection to the server, so the
	// transport sees one host.
	target := &url.URL{Scheme: "http", Host: "remote", Path: in.URL.Path, RawPath: in.URL.RawPath}
	target.RawQuery, target.ForceQuery = in.URL.RawQuery, in.URL.ForceQuery
	if path, _, _ := strings.Cut(in.RequestURI, "?"); strings.HasPrefix(path, "/") && !strings.HasPrefix(path, "//") {
		target.Opaque = path
	}
	out.URL, out.Host = target, in.Host
	for _, key := range []string{"Forwarded", "X-Forwarded-For", "X-Forwarded-Host", "X-Forwarded-Proto"} {
		if values, ok := in.Header[key]; ok {
			out.Header[key] = values // the sandbox's own headers, which ReverseProxy has removed
		}
	}
	if len(in.Trailer) > 0 && out.Body != nil {
		out.Body = &trailing{ReadCloser: out.Body, from: in, to: out}
	}
}

// trailing copies the trailers of a request, which are known once its body has ended.
type trailing struct {
	io.ReadCloser
	from, to *http.Request
}

func (t *trailing) Read(b []byte) (int, error) {
	n, err := t.ReadCloser.Read(b)
	if errors.Is(err, io.EOF) {
		for key := range t.to.Trailer {
			t.to.Trailer[key] = t.from.Trailer[key]
		}
	}
	return n, err
}

// modifyResponse lets the end of the server's connection end the sandbox's
// connection.
func (x *exchange) modifyResponse(r *http.Response) error {
	if r.Close {
		r.Header.Set("Connection", "close")
	}
	return nil
}

// failed breaks the sandbox's connection off if the server's connection has ended
// before the answer.
func (x *exchange) failed(w http.ResponseWriter, r *http.Request, err error) {
	if x.many {
		x.failedOne(w, err)
		return
	}
	x.mu.Lock()
	x.broken = r.Context().Err() == nil // otherwise the sandbox has gone
	x.mu.Unlock()
	_ = x.inside.Reset()
	panic(http.ErrAbortHandler)
}

// dialOnce hands the transport the connection that was dialled before the first
// request.
func (x *exchange) dialOnce(context.Context, string, string) (net.Conn, error) {
	x.mu.Lock()
	defer x.mu.Unlock()
	if x.dialed {
		return nil, errOneConnection
	}
	x.dialed = true
	if x.remote != nil {
		return x.remote, nil
	}
	x.sandbox.mu.Lock()
	defer x.sandbox.mu.Unlock()
	return &watched{outside: x.out, exchange: x}, nil
}

// remoteEnded records that the server has ended its connection. While no request is
// served, the sandbox's connection ends with it.
func (x *exchange) remoteEnded(err error) {
	x.mu.Lock()
	x.gone = true
	reset := !errors.Is(err, io.EOF) && !errors.Is(err, net.ErrClosed)
	idle := x.active == 0
	x.mu.Unlock()
	if !idle {
		return
	}
	if reset {
		_ = x.inside.Reset()
		return
	}
	x.inside.end()
}
