package egress

import (
	"bytes"
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"io"
	"math/big"
	"net"
	"net/http"
	"net/netip"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"golang.org/x/net/dns/dnsmessage"

	"agentrun.dev/internal/network/addresses"
	"agentrun.dev/internal/network/dns"
	"agentrun.dev/internal/network/policy"
	"agentrun.dev/internal/network/stack"
)

// The addresses of the test's internet. No packets are sent to them: the world's dial
// function leads to servers on the loopback instead.
const (
	addrAllowed = "93.184.216.34" // of allowed.example, and of others at the same CDN
	addrMoved   = "93.184.216.35"
	addrOther   = "93.184.216.66" // of a host that no policy allows
	addrHost    = "93.184.216.99" // the host's own public address
	addr6       = "2606:2800:220:1::34"
)

// patience is how long tests wait for an expected event, because a busy host may be
// slow.
const patience = time.Minute

// patientConn is a connection to an upstream without deadlines, since the host may be
// slow.
type patientConn struct{ net.Conn }

func (patientConn) SetDeadline(time.Time) error { return nil }

func dialPatiently(ctx context.Context, network string, upstream netip.AddrPort) (net.Conn, error) {
	conn, err := (&net.Dialer{}).DialContext(ctx, network, upstream.String())
	return patientConn{conn}, err
}

// world is the internet of a test: a DNS server, and servers that record what reaches
// them.
type world struct {
	upstream *upstream
	gateway  *Gateway
	guard    *addresses.Guard

	mu sync.Mutex
	// routes leads public addresses to listeners; mu protects it and all following fields.
	routes  map[netip.AddrPort]string
	dials   []netip.AddrPort
	reached []string // received by servers: "tls NAME", "http METHOD HOST URI", "raw BYTES"
	// detour, if it is set, is the address that the dial function connects to
	// instead.
	detour netip.AddrPort
	// beforeDial, if it is set, runs after an address was checked.
	beforeDial func()
}

// hostAddresses are the host's addresses for the guard.
type hostAddresses struct{}

func (hostAddresses) Owns(a netip.Addr) (bool, string, error) {
	return a.String() == addrHost, "an address of the host", nil
}

func newWorld(t testing.TB) *world {
	t.Helper()
	w := &world{upstream: startUpstream(t), routes: make(map[netip.AddrPort]string)}
	internal := startUpstream(t)
	internal.set("db.corp. A", "10.1.2.3")
	internal.set("metadata.corp. A", "169.254.169.254")
	resolver, err := dns.New(dns.Config{Dial: dialPatiently, Upstreams: dns.Upstreams{
		Default:  []netip.AddrPort{w.upstream.addr},
		Internal: map[string][]netip.AddrPort{"corp": {internal.addr}},
	}})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(resolver.Close)
	w.guard = addresses.NewGuard(hostAddresses{}, nil)
	w.gateway = NewGateway(Config{
		Resolver: resolver, Guard: w.guard, Dial: w.dial, FirstBytes: patience,
		Inside: []netip.Prefix{netip.MustParsePrefix("10.255.255.0/30"), netip.MustParsePrefix("fd00:a9e7::/126")},
	})
	return w
}

// dial checks the given address, as the real one does, and connects to the listener
// that plays it.
func (w *world) dial(ctx context.Context, network string, to netip.AddrPort, check CheckFunc) (net.Conn, error) {
	w.mu.Lock()
	if w.detour.IsValid() {
		to = w.detour
	}
	listener, ok := w.routes[to]
	w.mu.Unlock()
	if err := check(to); err != nil {
		return nil, err
	}
	w.mu.Lock()
	w.dials = append(w.dials, to)
	before := w.beforeDial
	w.mu.Unlock()
	if before != nil {
		before()
	}
	if !ok {
		return nil, fmt.Errorf("no route to %v in this test", to)
	}
	var d net.Dialer
	return d.DialContext(ctx, network, listener)
}

func (w *world) note(format string, args ...any) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.reached = append(w.reached, fmt.Sprintf(format, args...))
}

func (w *world) seen() []string {
	w.mu.Lock()
	defer w.mu.Unlock()
	return slices.Clone(w.reached)
}

func (w *world) route(to string, listener net.Addr) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.routes[netip.MustParseAddrPort(to)] = listener.String()
}

// serve accepts connections at public addresses, and gives each to handle.
func (w *world) serve(t testing.TB, handle func(net.Conn), at ...string) {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = l.Close() })
	for _, to := range at {
		w.route(to, l.Addr())
	}
	go func() {
		for {
			conn, err := l.Accept()
			if err != nil {
				return
			}
			go func() {
				defer func() { _ = conn.Close() }()
				handle(conn)
			}()
		}
	}()
}

// serveTLS plays a TLS server that echoes.
func (w *world) serveTLS(t testing.TB, at ...string) *x509.CertPool {
	t.Helper()
	cert, pool := certificate(t)
	config := &tls.Config{Certificates: []tls.Certificate{cert}, MinVersion: tls.VersionTLS12}
	w.serve(t, func(conn net.Conn) {
		raw := &sniffed{Conn: conn}
		server := tls.Server(raw, config)
		if err := server.Handshake(); err != nil {
			if raw.n > 0 {
				w.note("raw %d bytes", raw.n)
			}
			_, _ = io.Copy(io.Discard, conn) // closing before everything is read would be a reset
			return
		}
		w.note("tls %s", server.ConnectionState().ServerName)
		_, _ = io.Copy(server, server)
		_ = server.CloseWrite()
	}, at...)
	return pool
}

type sniffed struct {
	net.Conn
	n int
}

func (s *sniffed) Read(b []byte) (int, error) {
	n, err := s.Conn.Read(b)
	s.n += n
	return n, err
}

// serveHTTP plays an HTTP server.
func (w *world) serveHTTP(t testing.TB, handler http.Handler, at ...string) {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	for _, to := range at {
		w.route(to, l.Addr())
	}
	protocols := new(http.Protocols)
	protocols.SetHTTP1(true)
	protocols.SetUnencryptedHTTP2(true) // an upgrade that a sandbox must not be able to use
	server := &http.Server{ReadHeaderTimeout: time.Minute, Protocols: protocols, Handler: http.HandlerFunc(func(rw http.ResponseWriter, r *http.Request) {
		w.note("http %s %s %s", r.Method, r.Host, r.RequestURI)
		handler.ServeHTTP(rw, r)
	})}
	t.Cleanup(func() { _ = server.Close() })
	go func() { _ = server.Serve(l) }()
}

// serveEcho plays a server of any other protocol.
func (w *world) serveEcho(t testing.TB, at ...string) {
	t.Helper()
	w.serve(t, func(conn net.Conn) {
		w.note("raw connection")
		_, _ = io.Copy(conn, conn)
	}, at...)
}

func (w *world) sandbox(t testing.TB, rules Rules, inherited ...Pin) *Sandbox {
	t.Helper()
	s := w.gateway.NewSandbox(rules, Inheritance{Pins: inherited})
	t.Cleanup(s.Close)
	return s
}

// allow is a policy with egress: deny.
func allow(rules ...string) Rules { return written("deny", rules, nil) }

func written(egress string, allow, deny []string) Rules {
	p, err := policy.Parse(egress, allow, deny)
	if err != nil {
		panic(err)
	}
	return Rules{Policy: policy.Set{p}}
}

// connect does the stack's work for a connection: dial, answer the sandbox, splice.
func connect(t testing.TB, s *Sandbox, to string) (*net.TCPConn, error) {
	t.Helper()
	return connectWith(t, s, to, nil)
}

// connectWith is connect with counted memory.
func connectWith(t testing.TB, s *Sandbox, to string, memory *atomic.Int64) (*net.TCPConn, error) {
	t.Helper()
	remote, err := s.DialTCP(t.Context(), netip.MustParseAddrPort("10.255.255.2:40000"), netip.MustParseAddrPort(to))
	if err != nil {
		return nil, err
	}
	program, end := pair(t)
	inside := end.(resettable)
	inside.memory = memory
	done := make(chan struct{})
	go func() {
		defer close(done)
		remote.Splice(inside)
		_ = remote.Close()
	}()
	t.Cleanup(func() { _ = program.Close(); <-done })
	return program, nil
}

// mustConnect is connect for a connection that the policy allows.
func mustConnect(t testing.TB, s *Sandbox, to string) *net.TCPConn {
	t.Helper()
	conn, err := connect(t, s, to)
	if err != nil {
		t.Fatalf("connect to %s: %v", to, err)
	}
	return conn
}

// resettable is a TCP connection on the loopback with the methods of the stack's.
type resettable struct {
	*net.TCPConn
	memory *atomic.Int64 // reserved; nil does not count
}

func (r resettable) Reserve(bytes int) (func(), bool) {
	if r.memory == nil {
		return func() {}, true
	}
	if r.memory.Add(int64(bytes)) > testMemory {
		r.memory.Add(-int64(bytes))
		return nil, false
	}
	return sync.OnceFunc(func() { r.memory.Add(-int64(bytes)) }), true
}

// testMemory is how much connections with counted memory may reserve.
const testMemory = 4 << 20

func (r resettable) Reset() error {
	_ = r.SetLinger(0)
	return r.Close()
}

// pair returns the program's and the stack's end of a connection.
func pair(t testing.TB) (*net.TCPConn, stack.Conn) {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = l.Close() }()
	program, err := net.Dial("tcp", l.Addr().String())
	if err != nil {
		t.Fatal(err)
	}
	inside, err := l.Accept()
	if err != nil {
		t.Fatal(err)
	}
	return program.(*net.TCPConn), resettable{TCPConn: inside.(*net.TCPConn)}
}

// lookup asks our DNS for a name, as a program does.
func lookup(t testing.TB, s *Sandbox, name string, typ dnsmessage.Type) ([]string, dnsmessage.RCode) {
	t.Helper()
	m := ask(t, s, name, typ, dnsmessage.ClassINET)
	var list []string
	for _, r := range m.Answers {
		switch body := r.Body.(type) {
		case *dnsmessage.AResource:
			list = append(list, netip.AddrFrom4(body.A).String())
		case *dnsmessage.AAAAResource:
			list = append(list, netip.AddrFrom16(body.AAAA).String())
		case *dnsmessage.CNAMEResource:
		default:
			t.Errorf("record %v in an answer", r)
		}
	}
	return list, m.RCode
}

func ask(t testing.TB, s *Sandbox, name string, typ dnsmessage.Type, class dnsmessage.Class) dnsmessage.Message {
	t.Helper()
	q := dnsmessage.Message{
		Header:    dnsmessage.Header{ID: 1, RecursionDesired: true},
		Questions: []dnsmessage.Question{{Name: dnsmessage.MustNewName(name + "."), Type: typ, Class: class}},
	}
	raw, err := q.Pack()
	if err != nil {
		t.Fatal(err)
	}
	var m dnsmessage.Message
	if err := m.Unpack(s.ServeDNS(t.Context(), raw, false)); err != nil {
		t.Fatal(err)
	}
	return m
}

func resolve(t testing.TB, s *Sandbox, names ...string) {
	t.Helper()
	for _, name := range names {
		if addrs, code := lookup(t, s, name, dnsmessage.TypeA); len(addrs) == 0 {
			t.Fatalf("%s was not resolved: %v", name, code)
		}
	}
}

// last returns the newest log entry, once it satisfies fits.
func last(t testing.TB, s *Sandbox, fits func(Entry) bool) Entry {
	t.Helper()
	over := time.After(patience)
	for {
		changed := s.LogChanged()
		entries := s.Log(0, 1<<20)
		for _, e := range slices.Backward(entries) {
			if fits(e) {
				return e
			}
		}
		select {
		case <-changed:
		case <-over:
			t.Fatalf("no such entry in the log: %+v", entries)
		}
	}
}

func certificate(t testing.TB) (tls.Certificate, *x509.CertPool) {
	t.Helper()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	template := &x509.Certificate{
		SerialNumber: big.NewInt(1), NotBefore: time.Now().Add(-time.Hour), NotAfter: time.Now().Add(time.Hour),
		DNSNames: []string{"allowed.example", "*.allowed.example", "evil.example"}, IsCA: true, BasicConstraintsValid: true,
	}
	raw, err := x509.CreateCertificate(rand.Reader, template, template, &key.PublicKey, key)
	if err != nil {
		t.Fatal(err)
	}
	cert, err := x509.ParseCertificate(raw)
	if err != nil {
		t.Fatal(err)
	}
	pool := x509.NewCertPool()
	pool.AddCert(cert)
	return tls.Certificate{Certificate: [][]byte{raw}, PrivateKey: key}, pool
}

// upstream is a DNS server over UDP whose records can change.
type upstream struct {
	addr netip.AddrPort

	mu      sync.Mutex
	records map[string][]string // protected by mu, like asked: "name. TYPE" → addresses and aliases ("=name."), or "other.=address"
	asked   []string
}

func startUpstream(t testing.TB) *upstream {
	t.Helper()
	conn, err := net.ListenUDP("udp", &net.UDPAddr{IP: net.IPv4(127, 0, 0, 1)})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = conn.Close() })
	u := &upstream{addr: netip.MustParseAddrPort(conn.LocalAddr().String()), records: make(map[string][]string)}
	go func() {
		buffer := make([]byte, 4096)
		for {
			n, from, err := conn.ReadFromUDPAddrPort(buffer)
			if err != nil {
				return
			}
			var q dnsmessage.Message
			if q.Unpack(buffer[:n]) == nil {
				_, _ = conn.WriteToUDPAddrPort(u.answer(q), from)
			}
		}
	}()
	return u
}

// set sets the records of a name. dns keeps answers for a while even with a TTL of 0,
// so tests that need an expired pin inherit it.
func (u *upstream) set(question string, records ...string) {
	u.mu.Lock()
	defer u.mu.Unlock()
	u.records[question] = records
}

func (u *upstream) answer(q dnsmessage.Message) []byte {
	u.mu.Lock()
	defer u.mu.Unlock()
	question := q.Questions[0]
	key := strings.ToLower(question.Name.String()) + " " + strings.TrimPrefix(question.Type.String(), "Type")
	u.asked = append(u.asked, key)
	m := dnsmessage.Message{
		Header:    dnsmessage.Header{ID: q.ID, Response: true, RecursionAvailable: true},
		Questions: q.Questions,
	}
	records, ok := u.records[key]
	if !ok {
		m.RCode = dnsmessage.RCodeNameError
	}
	owner := question.Name
	for _, record := range records {
		h := dnsmessage.ResourceHeader{Name: owner, Class: dnsmessage.ClassINET, TTL: 60}
		if other, addr, ok := strings.Cut(record, ".="); ok {
			h.Name, record = dnsmessage.MustNewName(other+"."), addr
		}
		if alias, ok := strings.CutPrefix(record, "="); ok {
			owner = dnsmessage.MustNewName(alias)
			m.Answers = append(m.Answers, dnsmessage.Resource{Header: h, Body: &dnsmessage.CNAMEResource{CNAME: owner}})
			continue
		}
		addr := netip.MustParseAddr(record)
		if addr.Is4() {
			m.Answers = append(m.Answers, dnsmessage.Resource{Header: h, Body: &dnsmessage.AResource{A: addr.As4()}})
		} else {
			m.Answers = append(m.Answers, dnsmessage.Resource{Header: h, Body: &dnsmessage.AAAAResource{AAAA: addr.As16()}})
		}
	}
	raw, err := m.Pack()
	if err != nil {
		panic(err)
	}
	return raw
}

func (u *upstream) questions() []string {
	u.mu.Lock()
	defer u.mu.Unlock()
	return slices.Clone(u.asked)
}

// readAll reads a connection until its end or an error.
func readAll(conn net.Conn) (string, error) {
	_ = conn.SetReadDeadline(time.Now().Add(patience))
	var b bytes.Buffer
	_, err := io.Copy(&b, conn)
	return b.String(), err
}

// wasRefused reports whether a program saw its connection refused or reset.
func wasRefused(err error) bool { return errors.Is(err, stack.ErrRefused) }
