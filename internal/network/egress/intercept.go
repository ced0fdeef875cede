package egress

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"maps"
	"net/http"
	"net/http/httputil"
	"slices"
	"strings"

	"agentrun.dev/internal/network/inject"
	"agentrun.dev/internal/network/policy"
	"agentrun.dev/internal/network/stack"
)

// Protocols inside of TLS, by their ALPN names.
const (
	alpnHTTP1 = "http/1.1"
	alpnHTTP2 = "h2"
)

// SetRoots sets the CAs that verify the servers that credentials are sent to. Without
// any CA, verification fails.
func (g *Gateway) SetRoots(roots *x509.CertPool) { g.roots.Store(roots) }

// injects returns the host whose requests get credentials, if the sandbox got an
// address for such a host.
func injects(rules Rules, pinned []pin) policy.Name {
	for _, p := range pinned {
		if rules.Inject[p.name] != nil {
			return p.name
		}
	}
	return ""
}

// withUses appends the credentials that a connection has used to the reason in its
// log entry.
func withUses(reason string, used map[string]int) string {
	if len(used) == 0 {
		return reason
	}
	var list []string
	for _, secret := range slices.Sorted(maps.Keys(used)) {
		list = append(list, fmt.Sprintf("%s x%d", secret, used[secret]))
	}
	return strings.TrimPrefix(reason+"; credentials: "+strings.Join(list, ", "), "; ")
}

// Memory of HTTP inside of TLS, in addition to that of every connection.
const (
	// tlsMemory is for TLS records and the buffers of net/http, on both sides.
	tlsMemory = 128 << 10
	// http2Memory is for the bytes that both sides may send before the other reads
	// them, and for their state.
	http2Memory = 2*maxHTTP2Buffer + 128<<10
	// requestMemory is for one of the many requests of such a connection: heads, the
	// bytes being copied, goroutines.
	requestMemory = 192 << 10
)

// errNoMemory says that the sandbox has used up its share of a bound of the process.
var errNoMemory = errors.New("netd has no memory left for it: there are too many connections at one time")

// interception is one connection whose requests get credentials.
type interception struct {
	*exchange
	host policy.Name
}

// intercept ends the sandbox's TLS here, begins TLS with the server, and puts
// credentials into the requests between them.
func (c *connection) intercept(ctx context.Context, inside stack.Conn, h hello, host *inject.Prepared) Outcome {
	refuse := func(format string, args ...any) Outcome {
		return c.endWith(Refused, host.Name, fmt.Errorf(format, args...))
	}
	roots := c.sandbox.gateway.roots.Load()
	switch {
	case host.Problem != "":
		return refuse("%s", host.Problem)
	case roots == nil:
		return refuse("the node has no CA certificates to verify %s by: set injectRoots in the settings of its network", host.Name)
	}
	release, ok := inside.Reserve(tlsMemory)
	if !ok {
		return c.endWith(Failed, host.Name, errNoMemory)
	}
	defer release()
	i := &interception{host: host.Name, exchange: &exchange{connection: c, inside: &endable{Conn: &replayed{Conn: inside, first: h.raw}}}}
	i.check = i.judge
	c.sandbox.mu.Lock()
	out := c.out
	c.sandbox.mu.Unlock()
	server := tls.Client(&watched{outside: out, exchange: i.exchange}, &tls.Config{
		ServerName: string(host.Name), RootCAs: roots, MinVersion: tls.VersionTLS12, NextProtos: offered(h.protocols),
	})
	if err := server.HandshakeContext(ctx); err != nil {
		var unverified *tls.CertificateVerificationError
		if errors.As(err, &unverified) {
			return refuse("the server's certificate was not verified: %w", unverified.Err)
		}
		return c.endWith(Failed, host.Name, fmt.Errorf("TLS with the server: %w", err))
	}
	agreed := server.ConnectionState().NegotiatedProtocol
	if agreed == alpnHTTP2 {
		release, ok := inside.Reserve(http2Memory)
		if !ok {
			return c.endWith(Failed, host.Name, errNoMemory)
		}
		defer release()
	}
	program := tls.Server(i.inside, i.shown(host, agreed))
	if err := program.HandshakeContext(ctx); err != nil {
		return c.endWith(ResetBySandbox, host.Name, fmt.Errorf("TLS with the sandbox, which has to trust the CA of its namespace: %w", err))
	}
	i.remote, i.many = server, agreed == alpnHTTP2
	protocols := new(http.Protocols)
	protocols.SetHTTP1(!i.many)
	protocols.SetHTTP2(i.many)
	return i.serve(program, protocols, i, i.rewrite)
}

// endWith breaks the connection off for a reason in the interception.
func (c *connection) endWith(outcome Outcome, host policy.Name, why error) Outcome {
	c.end(outcome, policy.Decision{Kind: ByInject, Rule: "inject: " + string(host), Reason: why.Error()})
	return outcome
}

// offered returns the protocols of a ClientHello that are supported here.
func offered(protocols []string) []string {
	var known []string
	for _, p := range protocols {
		if p == alpnHTTP1 || p == alpnHTTP2 {
			known = append(known, p)
		}
	}
	return known
}

// shown is the TLS configuration for the sandbox. It offers only the protocol that
// was agreed with the server.
func (i *interception) shown(host *inject.Prepared, agreed string) *tls.Config {
	if agreed == "" {
		agreed = alpnHTTP1
	}
	return &tls.Config{
		Certificates: []tls.Certificate{host.Leaf}, MinVersion: tls.VersionTLS12, NextProtos: []string{agreed},
		// All forks would present the session ticket of their source.
		SessionTicketsDisabled: true,
	}
}

// usesKey is the key of a request's credentials in its context.
type usesKey struct{}

// ServeHTTP serves one request.
func (i *interception) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	if i.many {
		release, ok := i.inside.Reserve(requestMemory)
		if !ok {
			d, _ := i.settled()
			i.refuseRequest(r.Host, policy.Decision{Kind: ByInject, Rule: d.Rule, Reason: errNoMemory.Error()})
			http.Error(w, errNoMemory.Error(), http.StatusServiceUnavailable)
			return
		}
		defer release()
	}
	uses := new([]inject.Use)
	i.exchange.ServeHTTP(w, r.WithContext(context.WithValue(r.Context(), usesKey{}, uses)))
}

// judge decides about a request and its credentials, by the current rules.
func (i *interception) judge(r *http.Request) (int, policy.Decision, error) {
	refuse := func(status int, format string, args ...any) (int, policy.Decision, error) {
		return status, policy.Decision{Kind: ByInject, Rule: "inject: " + string(i.host), Reason: fmt.Sprintf(format, args...)}, nil
	}
	switch {
	case r.Method == http.MethodConnect:
		return refuse(http.StatusForbidden, "CONNECT would hide what is requested")
	case r.Method == http.MethodTrace, r.Method == "TRACK":
		return refuse(http.StatusForbidden, "%s would send the credentials back", r.Method)
	case r.URL.User != nil, r.URL.Scheme != "" && r.URL.Scheme != "https":
		return refuse(http.StatusForbidden, "the request is for another scheme, or has a user name")
	case !upgradeAllowed(r.Header):
		return refuse(http.StatusForbidden, "upgrade to %.40q: only WebSocket is allowed", r.Header.Values("Upgrade"))
	}
	host, err := hostOf(r.Host, portHTTPS)
	if err != nil {
		return refuse(http.StatusMisdirectedRequest, "host %.80q: %v", r.Host, err)
	}
	if name, err := policy.ParseName(host); err != nil || name != i.host {
		return refuse(http.StatusMisdirectedRequest, "the request is for %.80q, and the connection for %s", r.Host, i.host)
	}
	rules := i.sandbox.current().Inject[i.host]
	switch {
	case rules == nil:
		return refuse(http.StatusForbidden, "requests to %s get no credentials any more: connect anew", i.host)
	case rules.Problem != "":
		return refuse(http.StatusForbidden, "%s", rules.Problem)
	}
	uses, err := rules.Uses(inject.Request{Target: r.RequestURI, Header: r.Header, Trailer: r.Trailer})
	if err != nil {
		return refuse(http.StatusForbidden, "%v", err)
	}
	if into, ok := r.Context().Value(usesKey{}).(*[]inject.Use); ok {
		*into = uses
	}
	return 0, policy.Decision{}, nil
}

// rewrite makes the request for the server.
func (i *interception) rewrite(r *httputil.ProxyRequest) {
	rewrite(r)
	r.Out.URL.Scheme, r.Out.Host = "https", string(i.host)
	uses, _ := r.In.Context().Value(usesKey{}).(*[]inject.Use)
	if uses == nil || len(*uses) == 0 {
		return
	}
	for _, u := range *uses {
		r.Out.Header[u.Header] = []string{string(u.Value)}
	}
	i.sandbox.gateway.injected.Add(1)
	i.sandbox.mu.Lock()
	defer i.sandbox.mu.Unlock()
	if i.used == nil {
		i.used = make(map[string]int)
	}
	for _, u := range *uses {
		i.used[u.Secret]++
	}
}

// failedOne ends one of many requests. The others go on.
func (x *exchange) failedOne(w http.ResponseWriter, err error) {
	if errors.Is(err, errOneConnection) { // no part of the request was sent
		w.Header().Set("Connection", "close")
		http.Error(w, "the server is ending its connection: connect anew", http.StatusServiceUnavailable)
		return
	}
	panic(http.ErrAbortHandler)
}

// replayed is a connection whose first bytes have been read already.
type replayed struct {
	stack.Conn
	first []byte
}

func (r *replayed) Read(b []byte) (int, error) {
	if len(r.first) == 0 {
		return r.Conn.Read(b)
	}
	n := copy(b, r.first)
	r.first = r.first[n:]
	return n, nil
}
