package node

import (
	"bytes"
	"context"
	"crypto/ecdsa"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"io"
	"net"
	"strings"
	"sync"
	"testing"
	"time"

	"golang.org/x/net/http2"
	"golang.org/x/net/http2/hpack"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/credentials/insecure"
	healthv1 "google.golang.org/grpc/health/grpc_health_v1"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/types/known/emptypb"

	nodev1 "agentrun.dev/api/node/v1"
	"agentrun.dev/internal/access/accesstest"
	"agentrun.dev/internal/node/managertest"
)

// check asks whether a node serves, over a connection.
func check(ctx context.Context, conn grpc.ClientConnInterface) error {
	_, err := healthv1.NewHealthClient(conn).Check(ctx, &healthv1.HealthCheckRequest{})
	return err
}

// serves requires that an honest component gets in, by a new connection.
func (n *mutualNode) serves(component string) {
	n.T.Helper()
	conn := n.as(component)
	defer func() { _ = conn.Close() }() // closed again by the test's end
	if err := check(n.T.Context(), conn); err != nil {
		n.T.Errorf("%s is not served: %v", component, err)
	}
}

// TestMutualStrangers: only a valid certificate of a component makes a connection,
// and only with TLS 1.3. Each refusal is logged with its reason and recorded in the
// audit log, and the server goes on serving others.
func TestMutualStrangers(t *testing.T) {
	n := newMutualNode(t, defaultBounds)
	other := accesstest.NewCA(t)
	const uri = "spiffe://agentrun.dev/controller/main"
	leaf := n.ca.Component("gateway/g")
	with := func(s accesstest.Spec) credentials.TransportCredentials {
		if s.URIs == nil {
			s.URIs = []string{uri}
		}
		return credentials.NewTLS(n.settings(n.ca.Issue(s)))
	}
	uris := func(list ...string) credentials.TransportCredentials { return with(accesstest.Spec{URIs: list}) }
	settings := func(change func(*tls.Config)) credentials.TransportCredentials {
		cfg := n.settings(n.ca.Component("controller/main"))
		change(cfg)
		return credentials.NewTLS(cfg)
	}
	for name, c := range map[string]struct {
		creds credentials.TransportCredentials
		says  string
	}{
		"plaintext":                   {insecure.NewCredentials(), "first record does not look like a TLS handshake"},
		"TLS 1.2":                     {settings(func(c *tls.Config) { c.MaxVersion = tls.VersionTLS12 }), "unsupported versions"},
		"no certificate":              {credentials.NewTLS(n.settings()), "didn't provide a certificate"},
		"another CA":                  {credentials.NewTLS(n.settings(other.Component("controller/main"))), "unknown authority"},
		"expired":                     {with(accesstest.Spec{Until: time.Now().Add(-time.Minute)}), "expired"},
		"not yet valid":               {with(accesstest.Spec{From: time.Now().Add(10 * time.Minute)}), "not yet valid"},
		"a server's":                  {with(accesstest.Spec{Uses: serversOnly}), "incompatible key usage"},
		"for any use":                 {with(accesstest.Spec{Uses: anyUse}), "no clientAuth"},
		"for no use":                  {with(accesstest.Spec{NoUse: true}), "no clientAuth"},
		"signed by a gateway":         {with(accesstest.Spec{By: &leaf}), "x509"},
		"no role":                     {uris([]string{}...), "0 URIs"},
		"two roles":                   {uris(uri, "spiffe://agentrun.dev/node/n1"), "2 URIs"},
		"one role twice":              {uris(uri, uri), "2 URIs"},
		"an admin":                    {uris("spiffe://agentrun.dev/admin/main"), "gives no role"},
		"another authority":           {uris("spiffe://example.com/controller/main"), "gives no role"},
		"a web server's":              {uris("https://agentrun.dev/controller/main"), "gives no role"},
		"a role and more":             {uris(uri + "/x"), "gives no role"},
		"a role and a query":          {uris(uri + "?x"), "gives no role"},
		"another name of the node":    {settings(func(c *tls.Config) { c.ServerName = "elsewhere.example" }), ""},
		"a CA that is not the node's": {settings(func(c *tls.Config) { c.RootCAs = other.Pool() }), ""},
	} {
		t.Run(name, func(t *testing.T) {
			logged, events := len(n.log.String()), len(n.Events())
			err := check(t.Context(), n.dial(c.creds))
			if status.Code(err) != codes.Unavailable {
				t.Errorf("%v", err)
			}
			n.serves("controller/other")
			if c.says == "" { // it is the client that is careful
				return
			}
			n.Eventually(func() bool { return strings.Contains(n.log.String()[logged:], c.says) })
			n.Eventually(func() bool { return len(n.Events()) > events })
			if e := n.Events()[events]; e.Verb != "grpc:connect" || e.Code != 401 || e.Principal != "" || e.Via != "" || !strings.HasPrefix(e.Remote, "127.0.0.1:") {
				t.Errorf("%+v", e)
			}
		})
	}
	for name, protocols := range map[string][]string{"no protocol": nil, "HTTP/1.1": {"http/1.1"}} {
		t.Run(name, func(t *testing.T) {
			cfg := n.settings(n.ca.Component("controller/main"))
			cfg.NextProtos = protocols
			conn, err := tls.Dial("tcp", n.address, cfg)
			if err == nil {
				_, err = io.Copy(io.Discard, conn)
				_ = conn.Close() // it was read to its end
			}
			if err == nil {
				t.Error("it is spoken to")
			}
			n.serves("controller/other")
		})
	}
	t.Run("the key of another", func(t *testing.T) {
		pair := n.ca.Component("controller/main")
		pair.PrivateKey = leaf.PrivateKey.(*ecdsa.PrivateKey)
		if err := check(t.Context(), n.dial(credentials.NewTLS(n.settings(pair)))); err == nil {
			t.Error("it is served")
		}
		n.serves("controller/other")
	})
}

// TestMutualHostileCalls: a component acts only for principals that its role may name,
// and only if the call names one once, in full and within bounds.
func TestMutualHostileCalls(t *testing.T) {
	n := newMutualNode(t, defaultBounds)
	conns := map[string]*grpc.ClientConn{}
	for _, role := range []string{"controller", "gateway", "node"} {
		conns[role] = n.as(role + "/x")
	}
	const principal, role, namespaces = "agentrun-principal", "agentrun-role", "agentrun-namespaces"
	const key = "gateway-key:aaaaaaaaaaaa"
	for name, c := range map[string]struct {
		by        string
		metadata  []string
		code      codes.Code
		own, says string
	}{
		"a node for a namespace":             {"node", []string{principal, "kubernetes:a"}, codes.PermissionDenied, "permission_denied", "node cannot act for"},
		"a node for a key":                   {"node", []string{principal, key, role, "viewer", namespaces, "a"}, codes.PermissionDenied, "permission_denied", "node cannot act for"},
		"a node for itself":                  {"node", []string{principal, "node:x"}, codes.InvalidArgument, "invalid", "nobody names"},
		"a node with a role":                 {"node", []string{role, "admin"}, codes.InvalidArgument, "invalid", "no principal"},
		"a controller for a key":             {"controller", []string{principal, key, role, "admin"}, codes.PermissionDenied, "permission_denied", "controller cannot act for"},
		"a controller for a user":            {"controller", []string{principal, "kubernetes-user:a", role, "admin"}, codes.PermissionDenied, "permission_denied", "controller cannot act for"},
		"a controller for root":              {"controller", []string{principal, "uid:0"}, codes.InvalidArgument, "invalid", "nobody names"},
		"a controller for a key of the node": {"controller", []string{principal, "key:aaaaaaaaaaaa"}, codes.InvalidArgument, "invalid", "nobody names"},
		"a controller for a token":           {"controller", []string{principal, "sandbox:aaaaaaaaaaaaaaaaaaaa"}, codes.InvalidArgument, "invalid", "nobody names"},
		"a controller for another":           {"controller", []string{principal, "controller:y"}, codes.InvalidArgument, "invalid", "nobody names"},
		"a controller for all namespaces":    {"controller", []string{principal, "kubernetes:*"}, codes.InvalidArgument, "invalid", "name"},
		"a controller with a role":           {"controller", []string{principal, "kubernetes:a", role, "admin"}, codes.InvalidArgument, "invalid", "already says"},
		"a controller with namespaces":       {"controller", []string{principal, "kubernetes:a", namespaces, "a,b"}, codes.InvalidArgument, "invalid", "already says"},
		"a gateway for a namespace":          {"gateway", []string{principal, "kubernetes:a"}, codes.PermissionDenied, "permission_denied", "gateway cannot act for"},
		"a gateway for root":                 {"gateway", []string{principal, "uid:0", role, "admin"}, codes.InvalidArgument, "invalid", "nobody names"},
		"a gateway for a controller":         {"gateway", []string{principal, "controller:x", role, "admin"}, codes.InvalidArgument, "invalid", "nobody names"},
		"a gateway as a controller":          {"gateway", []string{principal, key, role, "controller"}, codes.InvalidArgument, "invalid", "role"},
		"a key without a role":               {"gateway", []string{principal, key, namespaces, "a"}, codes.InvalidArgument, "invalid", "role"},
		"a user of no namespace":             {"gateway", []string{principal, key, role, "user"}, codes.InvalidArgument, "invalid", "namespaces"},
		"a principal twice":                  {"controller", []string{principal, "kubernetes:a", principal, "kubernetes:b"}, codes.InvalidArgument, "invalid", "once"},
		"the same one twice":                 {"controller", []string{principal, "kubernetes:a", principal, "kubernetes:a"}, codes.InvalidArgument, "invalid", "once"},
		"a role twice":                       {"gateway", []string{principal, key, role, "viewer", role, "admin", namespaces, "a"}, codes.InvalidArgument, "invalid", "once"},
		"an empty principal":                 {"controller", []string{principal, ""}, codes.InvalidArgument, "invalid", "once"},
		"a principal and a comma":            {"controller", []string{principal, "kubernetes:a,kubernetes:b"}, codes.InvalidArgument, "invalid", "name"},
		"a principal in bytes":               {"controller", []string{principal + "-bin", "kubernetes:a"}, codes.InvalidArgument, "invalid", "not known"},
		"another spelling":                   {"controller", []string{"agentrun-principle", "kubernetes:a"}, codes.InvalidArgument, "invalid", "not known"},
		"a long principal":                   {"gateway", []string{principal, "kubernetes-user:" + strings.Repeat("a", 4000), role, "user", namespaces, "a"}, codes.InvalidArgument, "invalid", "too long"},
		"1,000 namespaces":                   {"gateway", []string{principal, key, role, "user", namespaces, manyNamespaces(1000)}, codes.InvalidArgument, "invalid", "too long"},
		"65 namespaces":                      {"gateway", []string{principal, key, role, "user", namespaces, manyNamespaces(65)}, codes.InvalidArgument, "invalid", "more than 64"},
	} {
		t.Run(name, func(t *testing.T) {
			before := len(n.Events())
			wantRefused(t, check(acting(t, c.metadata...), conns[c.by]), c.code, c.own, c.says)
			n.serves("node/y")
			events := n.Events()[before:]
			if denied := c.code == codes.PermissionDenied; denied != (len(events) == 1) || denied && (events[0].Verb != "grpc:Check" || events[0].Code != 403 || events[0].Principal != c.by+":x" || events[0].Via != c.by+":x") {
				t.Errorf("%+v", events)
			}
		})
	}
	if err := check(acting(t, principal, key, role, "user", namespaces, manyNamespaces(64)), conns["gateway"]); err != nil {
		t.Errorf("64 namespaces: %v", err)
	}
	for _, method := range []string{"/agentrun.node.v1.Node/Explode", "/grpc.reflection.v1.ServerReflection/ServerReflectionInfo", "//", "/" + strings.Repeat("x", 1000)} {
		err := conns["node"].Invoke(t.Context(), method, &emptypb.Empty{}, &emptypb.Empty{})
		wantRefused(t, err, codes.PermissionDenied, "permission_denied", "is not for the role node")
		if err := conns["controller"].Invoke(t.Context(), method, &emptypb.Empty{}, &emptypb.Empty{}); err == nil {
			t.Errorf("%s is served", method)
		}
	}
}

func manyNamespaces(n int) string {
	var list []string
	for i := range n {
		list = append(list, fmt.Sprintf("n%d", i))
	}
	return strings.Join(list, ",")
}

// TestMutualRawMetadata: metadata that no client of gRPC sends: refused as HTTP/2 has it.
func TestMutualRawMetadata(t *testing.T) {
	n := newMutualNode(t, defaultBounds)
	for name, fields := range map[string][]hpack.HeaderField{
		"a NUL":          {{Name: "agentrun-principal", Value: "kubernetes:a\x00"}},
		"a line":         {{Name: "agentrun-principal", Value: "kubernetes:a\r\nagentrun-role: admin"}},
		"capitals":       {{Name: "Agentrun-Principal", Value: "kubernetes:a"}},
		"bytes":          {{Name: "agentrun-principal", Value: "kubernetes:\xff\xfe"}},
		"oversized":      {{Name: "agentrun-principal", Value: "kubernetes:" + strings.Repeat("a", 200<<10)}},
		"oversized, too": {{Name: "x-other", Value: strings.Repeat("a", 200<<10)}},
		"a space":        {{Name: "agentrun-principal", Value: "kubernetes:a "}},
	} {
		t.Run(name, func(t *testing.T) {
			if got := n.rawCheck(t, fields); got == "0" || got == "" {
				t.Errorf("it is served: grpc-status %q", got)
			}
			n.serves("controller/y")
		})
	}
	if got := n.rawCheck(t, []hpack.HeaderField{{Name: "agentrun-principal", Value: "kubernetes:a"}}); got != "0" {
		t.Errorf("a good call: grpc-status %q", got)
	}
}

// rawCheck sends a check of health with metadata, frame by frame, and returns the
// grpc-status, or how else the call ended.
func (n *mutualNode) rawCheck(t *testing.T, fields []hpack.HeaderField) string {
	t.Helper()
	cfg := n.settings(n.ca.Component("controller/raw"))
	cfg.NextProtos = []string{"h2"}
	conn, err := tls.Dial("tcp", n.address, cfg)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = conn.Close() }() // whatever became of it
	var block bytes.Buffer
	enc := hpack.NewEncoder(&block)
	for _, f := range append([]hpack.HeaderField{
		{Name: ":method", Value: "POST"}, {Name: ":scheme", Value: "https"}, {Name: ":path", Value: healthv1.Health_Check_FullMethodName},
		{Name: ":authority", Value: "node"}, {Name: "content-type", Value: "application/grpc"}, {Name: "te", Value: "trailers"},
	}, fields...) {
		if err := enc.WriteField(f); err != nil {
			t.Fatal(err)
		}
	}
	framer := http2.NewFramer(conn, conn)
	framer.ReadMetaHeaders = hpack.NewDecoder(4096, nil)
	_, err = io.WriteString(conn, http2.ClientPreface)
	err = errors.Join(err, framer.WriteSettings())
	const most = 16 << 10 // of a frame
	rest := block.Bytes()
	first := rest[:min(most, len(rest))]
	rest = rest[len(first):]
	err = errors.Join(err, framer.WriteHeaders(http2.HeadersFrameParam{StreamID: 1, BlockFragment: first, EndHeaders: len(rest) == 0}))
	for len(rest) > 0 && err == nil {
		part := rest[:min(most, len(rest))]
		rest = rest[len(part):]
		err = framer.WriteContinuation(1, len(rest) == 0, part)
	}
	if err == nil {
		err = framer.WriteData(1, true, []byte{0, 0, 0, 0, 0}) // an empty message
	}
	if err != nil {
		return "cut off: " + err.Error()
	}
	for {
		frame, err := framer.ReadFrame()
		if err != nil {
			return "cut off: " + err.Error()
		}
		switch f := frame.(type) {
		case *http2.RSTStreamFrame:
			return "reset: " + f.ErrCode.String()
		case *http2.GoAwayFrame:
			return "away: " + f.ErrCode.String()
		case *http2.MetaHeadersFrame:
			for _, h := range f.Fields {
				if h.Name == "grpc-status" {
					return h.Value
				}
			}
		}
	}
}

// TestMutualHalfOpen: clients that connect and send nothing, begin a handshake and do
// not end it, or go on with it for ever, stall no other client. The server ends their
// connections.
func TestMutualHalfOpen(t *testing.T) {
	n := newMutualNode(t, quick)
	const each = 12 // of three kinds, each more than quick.shaking
	var let sync.WaitGroup
	begin := func(say func(net.Conn)) {
		conn, err := net.Dial("tcp", n.address)
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { _ = conn.Close() }) // it is the other end that has let go
		say(conn)
		let.Go(func() { _, _ = io.Copy(io.Discard, conn) }) // until the end, however that comes
	}
	hello := "\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03"
	for range each {
		begin(func(net.Conn) {})
		begin(func(c net.Conn) { _, _ = io.WriteString(c, hello) })
		begin(func(c net.Conn) {
			_, _ = io.WriteString(c, hello)
			let.Go(func() {
				for err := error(nil); err == nil; {
					_, err = c.Write([]byte{0})
					time.Sleep(time.Millisecond) // as slowly as it likes to be
				}
			})
		})
		n.serves("node/a")
		n.serves("controller/b")
	}
	let.Wait()
	n.serves("node/a")
	n.server.entrance.mu.Lock()
	defer n.server.entrance.mu.Unlock()
	if left := n.server.entrance.shaking.Len(); left != 0 {
		t.Errorf("%d are remembered", left)
	}
}

// TestMutualGivesWay: the number of connections that have not ended their handshake
// is bounded. One more ends the oldest, however long that might take yet.
func TestMutualGivesWay(t *testing.T) {
	b := quick
	b.handshake = time.Hour
	n := newMutualNode(t, b)
	var all []net.Conn
	for range 3 * b.shaking {
		conn, err := net.Dial("tcp", n.address)
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { _ = conn.Close() }) // it may have given way
		all = append(all, conn)
	}
	for _, conn := range all[:2*b.shaking] {
		_, _ = io.Copy(io.Discard, conn) // its end may be a reset
	}
	n.serves("node/a")
	n.server.entrance.mu.Lock()
	defer n.server.entrance.mu.Unlock()
	if left := n.server.entrance.shaking.Len(); left == 0 || left > b.shaking {
		t.Errorf("%d are left", left)
	}
}

// TestMutualSilent: a component that ends its handshake and then sends nothing is
// disconnected, and gets its place back.
func TestMutualSilent(t *testing.T) {
	n := newMutualNode(t, quick)
	cfg := n.settings(n.ca.Component("node/silent"))
	cfg.NextProtos = []string{"h2"}
	var all []*tls.Conn
	for range quick.connections {
		conn, err := tls.Dial("tcp", n.address, cfg)
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { _ = conn.Close() }) // it was let go
		all = append(all, conn)
	}
	n.serves("node/other")
	for _, conn := range all {
		_, _ = io.Copy(io.Discard, conn) // its end may be a reset
	}
	n.Eventually(func() bool { return check(t.Context(), n.as("node/silent")) == nil })
}

// TestMutualConnections: the number of connections of a component is bounded. Others
// have their own bound, and a connection that ends makes room.
func TestMutualConnections(t *testing.T) {
	n := newMutualNode(t, quick)
	var all []*grpc.ClientConn
	for range quick.connections {
		conn := n.as("node/many")
		if err := check(t.Context(), conn); err != nil {
			t.Fatal(err)
		}
		all = append(all, conn)
	}
	if err := check(t.Context(), n.as("node/many")); status.Code(err) != codes.Unavailable {
		t.Errorf("one more: %v", err)
	}
	n.Eventually(func() bool { return strings.Contains(n.log.String(), "node:many has 4 connections already") })
	var refused bool
	for _, e := range n.Events() {
		refused = refused || e.Verb == "grpc:connect" && e.Code == 503 && e.Via == "node:many"
	}
	if !refused {
		t.Errorf("%+v", n.Events())
	}
	n.serves("controller/many")
	n.serves("node/other")
	for _, conn := range all {
		if err := check(t.Context(), conn); err != nil {
			t.Error(err)
		}
	}
	if err := all[0].Close(); err != nil {
		t.Fatal(err)
	}
	n.Eventually(func() bool { return check(t.Context(), n.as("node/many")) == nil })
}

// TestMutualStreams: the number of calls on a connection at once is bounded.
// Calls on other connections go on.
func TestMutualStreams(t *testing.T) {
	n := newMutualNode(t, defaultBounds)
	conn := n.as("controller/busy")
	busy := nodev1.NewNodeClient(conn)
	for range maxStreams { // calls whose requests are on their way
		managertest.Must(conn.NewStream(t.Context(), &grpc.StreamDesc{ClientStreams: true}, nodev1.Node_GetNode_FullMethodName))(t)
	}
	ctx, cancel := context.WithTimeout(t.Context(), 50*time.Millisecond)
	defer cancel()
	if _, err := busy.GetNode(ctx, &nodev1.GetNodeRequest{}); status.Code(err) != codes.DeadlineExceeded {
		t.Errorf("one more: %v", err)
	}
	n.serves("controller/busy")
	n.serves("gateway/g")
}

// usages of certificates.
var (
	serversOnly = []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth}
	anyUse      = []x509.ExtKeyUsage{x509.ExtKeyUsageAny}
)

// TestMutualShutdown: connections that say nothing, before or after their handshake, do
// not keep a daemon from ending.
func TestMutualShutdown(t *testing.T) {
	b := quick
	b.handshake = time.Hour
	for name, end := range map[string]func(*Server){
		"at once": (*Server).Stop,
		"in peace": func(s *Server) {
			ctx, cancel := context.WithTimeout(t.Context(), 50*time.Millisecond)
			defer cancel()
			s.Shutdown(ctx)
		},
	} {
		t.Run(name, func(t *testing.T) {
			n := newMutualNode(t, b)
			silent, err := net.Dial("tcp", n.address)
			if err != nil {
				t.Fatal(err)
			}
			defer func() { _ = silent.Close() }() // the other end has
			cfg := n.settings(n.ca.Component("node/silent"))
			cfg.NextProtos = []string{"h2"}
			shaken, err := tls.Dial("tcp", n.address, cfg)
			if err != nil {
				t.Fatal(err)
			}
			defer func() { _ = shaken.Close() }() // as well
			n.serves("node/a")
			events := len(n.Events())
			end(n.server)
			for _, conn := range []net.Conn{silent, shaken} {
				_, _ = io.Copy(io.Discard, conn) // its end may be a reset
			}
			if more := n.Events()[events:]; len(more) > 0 {
				t.Errorf("%+v", more)
			}
		})
	}
}
