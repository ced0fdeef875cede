package egress

import (
	"bytes"
	"context"
	"crypto/rand"
	"crypto/tls"
	"errors"
	"io"
	"net"
	"net/netip"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"

	"golang.org/x/net/dns/dnsmessage"

	"agentrun.dev/internal/network/addresses"
	"agentrun.dev/internal/network/policy"
	"agentrun.dev/internal/network/stack"
)

// TestTLS speaks TLS through a connection that is allowed by name, with a real client.
func TestTLS(t *testing.T) {
	w := newWorld(t)
	w.upstream.set("allowed.example. A", addrAllowed)
	w.upstream.set("deep.sub.allowed.example. A", addrAllowed)
	pool := w.serveTLS(t, addrAllowed+":443")
	s := w.sandbox(t, allow("allowed.example:443", "*.allowed.example:443"))
	resolve(t, s, "allowed.example", "deep.sub.allowed.example")

	for _, name := range []string{"allowed.example", "ALLOWED.Example"} {
		client := tls.Client(mustConnect(t, s, addrAllowed+":443"), &tls.Config{ServerName: name, RootCAs: pool, MinVersion: tls.VersionTLS12})
		sent := make([]byte, 3<<20)
		_, _ = rand.Read(sent)
		var wg sync.WaitGroup
		wg.Go(func() {
			if _, err := client.Write(sent); err != nil {
				t.Errorf("write: %v", err)
			}
			if err := client.CloseWrite(); err != nil {
				t.Errorf("close: %v", err)
			}
		})
		got, err := io.ReadAll(client)
		wg.Wait()
		if err != nil || !bytes.Equal(got, sent) {
			t.Fatalf("%s: %d bytes came back of %d, error %v", name, len(got), len(sent), err)
		}
		_ = client.Close()
		e := last(t, s, func(e Entry) bool { return e.Outcome == Closed })
		if e.Name != "allowed.example" || e.Rule != "allowed.example:443" || e.Sent < 3<<20 || e.Received < 3<<20 || e.Address.String() != addrAllowed+":443" {
			t.Errorf("log: %+v", e)
		}
	}
	count := s.Counters()[policy.ByName]
	if count.Connections != 2 || count.Sent < 6<<20 || count.Received < 6<<20 || w.gateway.Counters()[policy.ByName] != count {
		t.Errorf("counters %+v, of the gateway %+v", s.Counters(), w.gateway.Counters())
	}
}

// TestHelloSplits sends a ClientHello cut in every possible way.
func TestHelloSplits(t *testing.T) {
	w := newWorld(t)
	w.upstream.set("allowed.example. A", addrAllowed)
	w.serveTLS(t, addrAllowed+":443")
	s := w.sandbox(t, allow("allowed.example:443"))
	resolve(t, s, "allowed.example")
	whole := clientHello(sni("allowed.example"), extension(10, []byte{0, 2, 0, 29}))
	for name, pieces := range map[string][][]byte{
		"whole":    {whole},
		"bytes":    slices.Collect(slices.Chunk(whole, 1)),
		"segments": {whole[:7], whole[7:60], whole[60:]},
		"records":  {reRecord(whole, 1)},
		"both":     slices.Collect(slices.Chunk(reRecord(whole, 3), 2)),
		"and more": {append(slices.Clone(whole), reRecord(whole, 200)...)},
	} {
		t.Run(name, func(t *testing.T) {
			before := len(w.seen())
			conn := mustConnect(t, s, addrAllowed+":443")
			for _, piece := range pieces {
				if _, err := conn.Write(piece); err != nil {
					t.Fatal(err)
				}
			}
			_ = conn.CloseWrite()
			// The server refuses the hello with an alert, so it has received it.
			if got, err := readAll(conn); err != nil || len(got) == 0 {
				t.Errorf("answer %q, error %v", got, err)
			}
			if seen := w.seen()[before:]; len(seen) != 1 || !strings.HasPrefix(seen[0], "raw") {
				t.Errorf("the server got %q", seen)
			}
		})
	}
}

// TestOtherPorts speaks a protocol in which the server speaks first, by name and by address.
func TestOtherPorts(t *testing.T) {
	w := newWorld(t)
	w.upstream.set("git.example. A", addrAllowed)
	w.upstream.set("git.example. AAAA", addr6)
	w.serve(t, func(conn net.Conn) {
		_, _ = io.WriteString(conn, "SSH-2.0-test\r\n")
		_, _ = io.Copy(conn, conn)
	}, addrAllowed+":22", "["+addr6+"]:22", addrOther+":22")
	s := w.sandbox(t, allow("git.example:22", addrOther+":22"))
	if addrs, _ := lookup(t, s, "git.example", dnsmessage.TypeAAAA); !slices.Equal(addrs, []string{addr6}) {
		t.Fatalf("AAAA of git.example: %v", addrs)
	}
	resolve(t, s, "git.example")
	for to, rule := range map[string]string{
		addrAllowed + ":22":               "git.example:22",
		"[::ffff:" + addrAllowed + "]:22": "git.example:22",
		"[" + addr6 + "]:22":              "git.example:22",
		addrOther + ":22":                 addrOther + ":22",
	} {
		conn := mustConnect(t, s, to)
		_, _ = io.WriteString(conn, "hello")
		_ = conn.CloseWrite()
		if got, err := readAll(conn); err != nil || got != "SSH-2.0-test\r\nhello" {
			t.Errorf("%s: %q, %v", to, got, err)
		}
		want := normalize(netip.MustParseAddrPort(to))
		if e := last(t, s, func(e Entry) bool { return e.Address == want }); e.Rule != rule || e.Outcome != Closed || e.Sent != 5 || e.Received != 19 {
			t.Errorf("%s: log %+v", to, e)
		}
	}
}

// TestEnds: the end of one direction, and resets, are passed on both ways.
func TestEnds(t *testing.T) {
	w := newWorld(t)
	remotes := make(chan *net.TCPConn)
	release := make(chan struct{})
	t.Cleanup(func() { close(release) })
	w.serve(t, func(conn net.Conn) { remotes <- conn.(*net.TCPConn); <-release }, addrOther+":9")
	s := w.sandbox(t, allow(addrOther+":9"))
	start := func() (program, remote *net.TCPConn) {
		program = mustConnect(t, s, addrOther+":9")
		return program, <-remotes
	}
	lines := uint64(0)
	outcome := func(want Outcome) {
		t.Helper()
		lines++
		if e := last(t, s, func(e Entry) bool { return e.Seq == lines }); e.Outcome != want {
			t.Errorf("log: %+v", e)
		}
	}

	program, remote := start()
	_ = program.CloseWrite()
	if got, err := readAll(remote); got != "" || err != nil {
		t.Errorf("the remote read %q, %v", got, err)
	}
	_, _ = io.WriteString(remote, "late")
	_ = remote.CloseWrite()
	if got, err := readAll(program); got != "late" || err != nil {
		t.Errorf("the sandbox read %q, %v after its own end", got, err)
	}
	outcome(Closed)

	program, remote = start()
	_ = remote.SetLinger(0)
	_ = remote.Close()
	if _, err := readAll(program); !errors.Is(err, syscall.ECONNRESET) {
		t.Errorf("the sandbox read %v after the remote's reset", err)
	}
	outcome(ResetByRemote)

	program, remote = start()
	_ = program.SetLinger(0)
	_ = program.Close()
	if _, err := readAll(remote); !errors.Is(err, syscall.ECONNRESET) {
		t.Errorf("the remote read %v after the sandbox's reset", err)
	}
	outcome(ResetBySandbox)
}

// TestErrors: the errors that a sandbox sees for connections that the outside does
// not accept. It uses the real dial function, on the loopback, which a rule by
// address opens.
func TestErrors(t *testing.T) {
	w := newWorld(t)
	w.gateway.config.Dial = Dial
	s := w.sandbox(t, allow("127.0.0.1", "[::1]"))
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = l.Close() }()
	if conn, err := connect(t, s, l.Addr().String()); err != nil {
		t.Errorf("connect to a listener: %v", err)
	} else {
		_ = conn.Close()
	}
	const closed = "127.0.0.1:1" // a reserved port, on which no program listens by chance
	if _, err := connect(t, s, closed); !errors.Is(err, stack.ErrRefused) || !errors.Is(err, syscall.ECONNREFUSED) {
		t.Errorf("connect to a closed port: %v", err)
	}
	if e := last(t, s, func(e Entry) bool { return e.Outcome == Failed }); e.Rule != "127.0.0.1" || !strings.Contains(e.Reason, "refused") {
		t.Errorf("log: %+v", e)
	}
	for give, want := range map[error]error{
		&net.OpError{Op: "dial", Err: syscall.EHOSTUNREACH}: stack.ErrUnreachable,
		&net.OpError{Op: "dial", Err: syscall.ENETUNREACH}:  stack.ErrUnreachable,
		&net.OpError{Op: "dial", Err: syscall.EPERM}:        stack.ErrUnreachable,
		&net.OpError{Op: "dial", Err: syscall.ECONNREFUSED}: stack.ErrRefused,
		&net.OpError{Op: "dial", Err: syscall.ETIMEDOUT}:    context.DeadlineExceeded,
		context.DeadlineExceeded:                            context.DeadlineExceeded,
		&refusal{}:                                          stack.ErrRefused,
	} {
		if got := told(give); !errors.Is(got, want) {
			t.Errorf("%v is told as %v", give, got)
		}
	}
}

// TestMovedName connects to an old address, as a fork does.
func TestMovedName(t *testing.T) {
	w := newWorld(t)
	w.upstream.set("allowed.example. A", addrMoved)
	w.upstream.set("second.example. A", addrOther)
	w.upstream.set("still.example. A", addrAllowed)
	pool := w.serveTLS(t, addrAllowed+":443", addrMoved+":443", addrOther+":443")
	rules := allow("allowed.example:443", "second.example:443", "still.example:443")
	old := netip.MustParseAddr(addrAllowed)
	pins := []Pin{{Addr: old, Name: "allowed.example"}, {Addr: old, Name: "second.example"}}
	handshake := func(s *Sandbox, name string) {
		t.Helper()
		client := tls.Client(mustConnect(t, s, addrAllowed+":443"), &tls.Config{ServerName: name, RootCAs: pool, InsecureSkipVerify: true})
		if err := client.Handshake(); err != nil {
			t.Errorf("%s: %v", name, err)
		}
		_ = client.Close()
	}
	dialed := func() string {
		w.mu.Lock()
		defer w.mu.Unlock()
		return w.dials[len(w.dials)-1].Addr().String()
	}
	t.Run("moved", func(t *testing.T) {
		s := w.sandbox(t, rules, pins[0])
		handshake(s, "allowed.example")
		if got := dialed(); got != addrMoved {
			t.Errorf("dialled %s", got)
		}
		e := last(t, s, func(e Entry) bool { return e.Name == "allowed.example" })
		if e.Address.Addr() != old || e.Remote.Addr().String() != addrMoved {
			t.Errorf("log: %+v", e)
		}
	})
	t.Run("the second name of the address", func(t *testing.T) {
		s := w.sandbox(t, rules, pins...)
		handshake(s, "second.example")
		if got := dialed(); got != addrOther {
			t.Errorf("dialled %s", got)
		}
	})
	t.Run("still there", func(t *testing.T) {
		s := w.sandbox(t, rules, append(pins, Pin{Addr: old, Name: "still.example"})...)
		handshake(s, "still.example")
		if got := dialed(); got != addrAllowed {
			t.Errorf("dialled %s", got)
		}
	})
	t.Run("made up", func(t *testing.T) {
		// A forged pin leads only to the name's current address.
		private := netip.MustParseAddr("10.0.0.1")
		w.serveTLS(t, "10.1.2.3:443")
		s := w.sandbox(t, allow("db.corp:443"), Pin{Addr: private, Name: "db.corp", Internal: true})
		if _, err := connect(t, s, "10.0.0.1:443"); err != nil || dialed() != "10.1.2.3" {
			t.Errorf("dialled %s, error %v", dialed(), err)
		}
		s = w.sandbox(t, rules, Pin{Addr: private, Name: "allowed.example", Internal: true})
		if _, err := connect(t, s, "10.0.0.1:443"); !errors.Is(err, stack.ErrRefused) {
			t.Errorf("a name of no internal domain: %v", err)
		}
	})
	t.Run("gone", func(t *testing.T) {
		s := w.sandbox(t, allow("gone.example:443"), Pin{Addr: old, Name: "gone.example"})
		if _, err := connect(t, s, addrAllowed+":443"); err == nil {
			t.Error("connected")
		}
	})
	t.Run("exported", func(t *testing.T) {
		s := w.sandbox(t, rules, pins...)
		resolve(t, s, "still.example")
		want := append(slices.Clone(pins), Pin{Addr: old, Name: "still.example"})
		if got := s.Inheritance().Pins; !slices.Equal(got, want) {
			t.Errorf("pins %v, want %v", got, want)
		}
	})
}

// TestInternalDomain reaches a private address through a name that an administrator's
// DNS knows.
func TestInternalDomain(t *testing.T) {
	w := newWorld(t)
	w.serveEcho(t, "10.1.2.3:5432")
	s := w.sandbox(t, allow("db.corp:5432"))
	resolve(t, s, "db.corp")
	if _, err := connect(t, s, "10.1.2.3:5432"); err != nil {
		t.Errorf("connect to db.corp: %v", err)
	}
	w.guard.SetClosed([]netip.Prefix{netip.MustParsePrefix("10.1.0.0/16")}) // the services of a cluster
	if _, err := connect(t, s, "10.1.2.3:5432"); err != nil {
		t.Errorf("connect to db.corp in a closed range: %v", err)
	}
	// The same name through an inherited pin, and through a pin that claims less than
	// is true.
	child := w.sandbox(t, allow("db.corp:5432"), s.Inheritance().Pins...)
	if _, err := connect(t, child, "10.1.2.3:5432"); err != nil {
		t.Errorf("connect to db.corp in a fork: %v", err)
	}
}

// TestDialControl: the real dial function checks the address that it connects to.
func TestDialControl(t *testing.T) {
	routes, err := addresses.OpenRoutes()
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = routes.Close() }()
	stop := errors.New("stopped")
	var checked []netip.AddrPort
	for _, to := range []string{"127.0.0.1:9", "[::1]:9", "[::ffff:127.0.0.1]:9"} {
		_, err := Dial(t.Context(), "tcp", netip.MustParseAddrPort(to), func(actual netip.AddrPort) error {
			checked = append(checked, normalize(actual))
			return stop
		})
		if !errors.Is(err, stop) {
			t.Errorf("dial %s: %v", to, err)
		}
	}
	want := []netip.AddrPort{netip.MustParseAddrPort("127.0.0.1:9"), netip.MustParseAddrPort("[::1]:9"), netip.MustParseAddrPort("127.0.0.1:9")}
	if !slices.Equal(checked, want) {
		t.Errorf("checked %v", checked)
	}
}

// TestNarrowerTellsNoMore: a claim's policy beside its template's does not let DNS
// answer questions that the template's policy alone refuses: an alias of a denied
// name, a private address.
func TestNarrowerTellsNoMore(t *testing.T) {
	w := newWorld(t)
	w.upstream.set("front.example. A", "=evil.example.", addrOther)
	template := written("allow", nil, []string{"evil.example"})
	claimed := Rules{Policy: append(template.Policy, allow("front.example:443", "db.corp:5432").Policy...)}
	for title, rules := range map[string]Rules{"template": template, "claim": claimed} {
		s := w.sandbox(t, rules)
		for _, name := range []string{"front.example", "db.corp"} {
			if addrs, code := lookup(t, s, name, dnsmessage.TypeA); len(addrs) != 0 || code != dnsmessage.RCodeRefused {
				t.Errorf("%s: %s is answered with %v, %v", title, name, addrs, code)
			}
		}
	}
	if addrs, _ := lookup(t, w.sandbox(t, allow("front.example:443")), "front.example", dnsmessage.TypeA); len(addrs) != 1 {
		t.Errorf("a rule about the name itself: %v", addrs)
	}
}
