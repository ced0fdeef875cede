package rest

import (
	"context"
	"encoding/json"
	"fmt"
	"net/http"
	"strings"
	"testing"
	"time"

	"github.com/coder/websocket"

	"agentrun.dev/api/rest"
	"agentrun.dev/internal/access"
	"agentrun.dev/internal/guest/guestrpc"
	"agentrun.dev/internal/sandbox"
)

// screen is an open terminal.
type screen struct {
	t    *testing.T
	conn *websocket.Conn
	seen string
}

// ticketFor asks for a token.
func (n *testNode) ticketFor(at string, req rest.TerminalRequest) rest.Terminal {
	n.t.Helper()
	return as[rest.Terminal](n.do("POST", at+"/terminal", req).ok(201))
}

// dial opens a terminal, as a page of an origin.
func (n *testNode) dialTerminal(path, token, origin string) (*websocket.Conn, *http.Response, error) {
	header := http.Header{}
	if origin != "" {
		header.Set("Origin", origin)
	}
	return websocket.Dial(n.t.Context(), "http://node"+path+query("token", token), &websocket.DialOptions{HTTPClient: n.client, HTTPHeader: header})
}

func openScreen(t *testing.T, n *testNode, at string, req rest.TerminalRequest) *screen {
	t.Helper()
	ticket := n.ticketFor(at, req)
	conn, _, err := n.dialTerminal(ticket.Path, ticket.Token, "http://node")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = conn.CloseNow() })
	return &screen{t: t, conn: conn}
}

func (s *screen) enter(text string) {
	s.t.Helper()
	if err := s.conn.Write(s.t.Context(), websocket.MessageBinary, []byte(text)); err != nil {
		s.t.Fatal(err)
	}
}

func (s *screen) say(v any) {
	s.t.Helper()
	data, err := json.Marshal(v)
	if err == nil {
		err = s.conn.Write(s.t.Context(), websocket.MessageText, data)
	}
	if err != nil {
		s.t.Fatal(err)
	}
}

// until reads the screen until it has a text, or until an event.
func (s *screen) until(text string) (event rest.TerminalEvent) {
	s.t.Helper()
	for text == "" || !strings.Contains(s.seen, text) {
		kind, data, err := s.conn.Read(s.t.Context())
		if err != nil {
			s.t.Fatalf("after %q: %v", s.seen, err)
		}
		if kind == websocket.MessageText {
			if err := json.Unmarshal(data, &event); err != nil {
				s.t.Fatal(err)
			}
			return event
		}
		s.seen += string(data)
	}
	return event
}

// TestTerminal: typed input is run, its output is shown, its size follows, and
// its end is reported.
func TestTerminal(t *testing.T) {
	n := newNode(t)
	n.setUp()
	s := openScreen(t, n, n.claim("box"), rest.TerminalRequest{Argv: []string{"/bin/sh"}, Rows: 30, Cols: 100, Env: rest.Env{"MINE": "yes"}})
	s.enter("stty size; echo $MINE-$TERM\n")
	s.until("30 100")
	s.until("yes-xterm-256color")
	s.say(rest.TerminalInput{Type: rest.TerminalInputTypeResize, Rows: 50, Cols: 132})
	s.enter("stty size\n")
	s.until("50 132")
	for _, bad := range []any{
		map[string]any{"type": "resize", "rows": 0, "cols": 1}, map[string]any{"type": "other", "rows": 1, "cols": 1},
		map[string]any{"type": "resize", "rows": 1, "cols": 1, "more": 1}, "text", nil,
	} {
		s.say(bad)
		if e := s.until(""); e.Type != rest.TerminalEventTypeError || e.Error.Code != "invalid" {
			t.Errorf("%v: %+v", bad, e)
		}
	}
	s.enter("exit 7\n")
	if e := s.until(""); e.Type != rest.TerminalEventTypeExit || *e.ExitCode != 7 {
		t.Errorf("%+v", e)
	}
	if _, _, err := s.conn.Read(t.Context()); websocket.CloseStatus(err) != websocket.StatusNormalClosure {
		t.Errorf("it is closed with %v", err)
	}
	n.Eventually(func() bool {
		return len(as[rest.ExecList](n.do("GET", v1+"/sandboxes/box/execs", nil).ok(200)).Items) == 0
	})
}

// TestTerminalShell: a terminal without a command is a shell.
func TestTerminalShell(t *testing.T) {
	n := newNode(t)
	n.setUp()
	s := openScreen(t, n, n.claim("box"), rest.TerminalRequest{})
	s.enter("echo $((6*7))-shell\n")
	s.until("42-shell")
	s.enter("exit\n")
	if e := s.until(""); e.Type != rest.TerminalEventTypeExit {
		t.Errorf("%+v", e)
	}
}

// TestTerminalHangUp: when a client leaves, its programs end, even those that
// resist.
func TestTerminalHangUp(t *testing.T) {
	n := newNode(t)
	n.setUp()
	at := n.claim("box")
	for _, script := range []string{"echo up; exec sleep 1000", "trap '' HUP TERM; echo up; while :; do sleep 1000; done"} {
		s := openScreen(t, n, at, rest.TerminalRequest{Argv: []string{"/bin/sh", "-c", script}})
		s.until("up")
		if err := s.conn.CloseNow(); err != nil {
			t.Error(err)
		}
		n.Eventually(func() bool {
			return len(as[rest.ExecList](n.do("GET", at+"/execs", nil).ok(200)).Items) == 0
		})
	}
}

// TestTerminalTokens: a token opens one terminal, of one sandbox, for a while,
// for pages that may.
func TestTerminalTokens(t *testing.T) {
	store := NewTerminals()
	var ahead time.Duration
	store.now = func() time.Time { return time.Now().Add(ahead) }
	n := newNode(t, func(c *Config) { c.Terminals, c.AllowOrigins = store, []string{"https://console.example"} })
	n.setUp()
	at, other := n.claim("box"), n.claim("other")
	sh := rest.TerminalRequest{Argv: []string{"/bin/cat"}}
	refused := func(why, path, token, origin string, status int) {
		t.Helper()
		conn, res, err := n.dialTerminal(path, token, origin)
		if err == nil {
			_ = conn.CloseNow()
			t.Errorf("%s: it opened", why)
		} else if res.StatusCode != status {
			t.Errorf("%s: %d", why, res.StatusCode)
		}
	}
	first := n.ticketFor(at, sh)
	if len(first.Token) < 40 || first.Path != at+"/terminal" || time.Until(first.Expires) > ticketLife {
		t.Errorf("%+v", first)
	}
	for _, origin := range []string{"https://evil.example", "null", "https://console.example.evil.example", "https://node.evil", "http://console.example", "::"} {
		refused("origin "+origin, at+"/terminal", first.Token, origin, 403)
	}
	conn, _, err := n.dialTerminal(at+"/terminal", first.Token, "https://console.example") // it was not used up
	if err != nil {
		t.Fatal(err)
	}
	_ = conn.CloseNow()
	refused("twice", at+"/terminal", first.Token, "", 401)
	refused("made up", at+"/terminal", strings.Repeat("A", 52), "", 401)
	n.do("GET", at+"/terminal", nil).refused(400, "invalid")

	refused("of another sandbox", other+"/terminal", n.ticketFor(at, sh).Token, "", 401)
	refused("on another route", at, n.ticketFor(at, sh).Token, "", 400)

	late := n.ticketFor(at, sh)
	ahead = ticketLife
	refused("late", at+"/terminal", late.Token, "", 401)

	// A name that has gone to another sandbox.
	moved := n.ticketFor(at, sh)
	n.do("DELETE", at, nil).ok(200)
	n.claim("box")
	refused("of a sandbox that has ended", at+"/terminal", moved.Token, "", 401)

	for i := range maxTickets { // as many namespaces, each with the same number
		k := sandbox.Key{Namespace: sandbox.Namespace(fmt.Sprint("n", i)), Name: "box"}
		if _, _, err := store.issue(ticket{who: access.Principal{Name: fmt.Sprint("key:", i)}, key: k}); err != nil {
			t.Fatal(err)
		}
	}
	n.do("POST", at+"/terminal", sh).refused(503, "insufficient_capacity")
	ahead += ticketLife
	n.do("POST", at+"/terminal", sh).ok(201)
}

// TestTerminalShare: one principal takes no tokens from another, by their number or by
// their size.
func TestTerminalShare(t *testing.T) {
	for name, one := range map[string]struct {
		req guestrpc.ExecRequest
		fit int
	}{
		"many":  {guestrpc.ExecRequest{Argv: []string{"sh"}}, maxOwnTickets},
		"large": {guestrpc.ExecRequest{Argv: []string{"sh"}, Env: []string{strings.Repeat("x", maxTerminalBody/2)}}, 3},
	} {
		t.Run(name, func(t *testing.T) {
			store := NewTerminals()
			var token string
			for range one.fit {
				var err error
				if token, _, err = store.issue(ticket{who: access.Principal{Name: "key:greedy"}, req: one.req}); err != nil {
					t.Fatal(err)
				}
			}
			_, _, err := store.issue(ticket{who: access.Principal{Name: "key:greedy"}, req: one.req})
			if !sandbox.HasCode(err, sandbox.CodeCapacity) || !strings.Contains(err.Error(), "key:greedy") {
				t.Errorf("%v", err)
			}
			if _, _, err := store.issue(ticket{who: access.Principal{Name: "key:quiet"}, req: one.req}); err != nil {
				t.Errorf("another principal: %v", err)
			}
			if _, err := store.redeem(token); err != nil {
				t.Fatal(err)
			}
			if _, _, err := store.issue(ticket{who: access.Principal{Name: "key:greedy"}, req: one.req}); err != nil {
				t.Errorf("after one was used: %v", err)
			}
		})
	}
}

// TestTerminalShareOfNamespaces: each sandbox's token is a principal, and yet many sandboxes
// of one namespace take no tokens from another namespace, from a key of their own, and not
// much memory. Greedy namespaces together take none from one that has few.
func TestTerminalShareOfNamespaces(t *testing.T) {
	store := NewTerminals()
	now := time.Now()
	sum := func() (n int64) {
		for _, one := range store.tickets {
			n += one.cost
		}
		return n
	}
	large := strings.Repeat("x", maxTerminalBody/2)
	// ask is a sandbox's asking for a terminal of itself, with its token.
	ask := func(namespace sandbox.Namespace, box, env int) (string, error) {
		id := sandbox.ID(fmt.Sprint(namespace, "-", box))
		who := access.Principal{Name: "sandbox:" + string(id), Role: access.RoleSandbox, Namespaces: []sandbox.Namespace{namespace}, Sandbox: id}
		req := guestrpc.ExecRequest{Argv: []string{"sh"}, Env: []string{large[:env]}}
		token, _, err := store.issue(ticket{who: who, key: sandbox.Key{Namespace: namespace, Name: sandbox.Name(id)}, id: id, req: req})
		return token, err
	}
	for _, env := range []int{0, maxTerminalBody / 2} {
		store.now, store.tickets = func() time.Time { return now }, nil
		refused := 0
		for box := range 2 * maxNamespaceTickets { // 128 each would be 64 times the bound of the node
			for range 2 {
				if _, err := ask("greedy", box, env); err != nil {
					if !sandbox.HasCode(err, sandbox.CodeCapacity) || !strings.Contains(err.Error(), "namespace greedy") {
						t.Fatal(err)
					}
					refused++
				}
			}
		}
		if sum() > maxNamespaceTickets*ticketCost || refused == 0 {
			t.Errorf("sandboxes of a namespace have tokens of %d bytes, %d were refused", sum(), refused)
		}
		quiet, err := ask("quiet", 0, env)
		if err != nil {
			t.Fatalf("another namespace: %v", err)
		}
		for n := range 2 * maxTickets / maxNamespaceTickets { // all together have more than the node's bound
			for box := range maxNamespaceTickets {
				_, _ = ask(sandbox.Namespace(fmt.Sprint("greedy-", n)), box, env) // most are refused
			}
		}
		if sum() > maxTickets*ticketCost {
			t.Errorf("all tokens have %d bytes", sum())
		}
		if _, err := store.redeem(quiet); err != nil {
			t.Errorf("the token of a quiet namespace went: %v", err)
		}
		if _, err := ask("late", 0, env); err != nil {
			t.Errorf("a namespace that comes when all is taken: %v", err)
		}
	}
}

// TestTerminalShareInNamespace: sandboxes that take all tokens of their namespace do not keep
// out a key of the namespace that has no token yet.
func TestTerminalShareInNamespace(t *testing.T) {
	store := NewTerminals()
	box := func(n int) ticket {
		return ticket{who: access.Principal{Name: fmt.Sprint("sandbox:", n)}, key: sandbox.Key{Namespace: "a"}}
	}
	var first string
	for n := range 4 {
		for i := range maxNamespaceTickets / 4 {
			token, _, err := store.issue(box(n))
			if err != nil {
				t.Fatal(err)
			}
			if n == 0 && i == 0 {
				first = token
			}
		}
	}
	if _, _, err := store.issue(box(0)); !sandbox.HasCode(err, sandbox.CodeCapacity) {
		t.Errorf("beyond the namespace's bound: %v", err)
	}
	mine, _, err := store.issue(ticket{who: access.Principal{Name: "key:operator"}, key: sandbox.Key{Namespace: "a"}})
	if err != nil {
		t.Fatal(err)
	}
	if _, err := store.redeem(mine); err != nil {
		t.Error(err)
	}
	if _, err := store.redeem(first); err == nil || len(store.tickets) != maxNamespaceTickets-1 {
		t.Errorf("%d tokens wait, and the oldest of those who have the most is among them (%v)", len(store.tickets), err)
	}
}

// TestTerminalRace: of many clients with the same token one gets the terminal.
func TestTerminalRace(t *testing.T) {
	store := NewTerminals()
	token, _, err := store.issue(ticket{})
	if err != nil {
		t.Fatal(err)
	}
	results := make(chan error, 16)
	for range cap(results) {
		go func() {
			_, err := store.redeem(token)
			results <- err
		}()
	}
	won := 0
	for range cap(results) {
		if <-results == nil {
			won++
		}
	}
	if won != 1 {
		t.Errorf("%d got it", won)
	}
}

// TestTerminalAuthentication: the token is all that is needed, and not to be
// had without.
func TestTerminalAuthentication(t *testing.T) {
	store := NewTerminals()
	n := newNode(t, func(c *Config) { c.Terminals = store })
	n.setUp()
	at := n.claim("box")
	ticket := n.ticketFor(at, rest.TerminalRequest{Argv: []string{"/bin/echo", "hello"}})
	// Over TCP the kernel knows no user.
	stranger := New(Config{Config: n.Config(), Terminals: store})
	front := newFront(t, stranger)
	conn, _, err := websocket.Dial(t.Context(), front+ticket.Path+query("token", ticket.Token), nil)
	if err != nil {
		t.Fatal(err)
	}
	s := &screen{t: t, conn: conn}
	s.until("hello")
	_ = conn.CloseNow()
	res, err := http.Post(front+at+"/terminal", "application/json", strings.NewReader("{}"))
	if err != nil {
		t.Fatal(err)
	}
	_ = res.Body.Close()
	if res.StatusCode != http.StatusUnauthorized {
		t.Errorf("anybody gets a token: %d", res.StatusCode)
	}
}

// TestTunnel: a connection goes both ways, each side ends for itself, and
// messages that do not belong to it are refused.
func TestTunnel(t *testing.T) {
	n := newNode(t)
	n.setUp()
	at := n.claim("box")
	l, port := listen(t)
	dial := func() *websocket.Conn {
		conn, _, err := websocket.Dial(t.Context(), "http://node"+at+"/tunnels/"+port, &websocket.DialOptions{HTTPClient: n.client})
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { _ = conn.CloseNow() })
		return conn
	}
	conn := dial()
	inside, err := l.Accept()
	if err != nil {
		t.Fatal(err)
	}
	if err := conn.Write(t.Context(), websocket.MessageBinary, []byte("ping")); err != nil {
		t.Fatal(err)
	}
	if err := conn.Write(t.Context(), websocket.MessageText, []byte(`{"type":"end"}`)); err != nil {
		t.Fatal(err)
	}
	if got := readAll(t, inside); got != "ping" {
		t.Errorf("the program got %q", got)
	}
	if _, err := inside.Write([]byte("pong")); err != nil {
		t.Fatal(err)
	}
	_ = inside.Close()
	if _, got, err := conn.Read(t.Context()); err != nil || string(got) != "pong" {
		t.Errorf("%q, %v", got, err)
	}
	if kind, got, err := conn.Read(t.Context()); err != nil || kind != websocket.MessageText || string(got) != `{"type":"end"}` {
		t.Errorf("%q, %v", got, err)
	}
	if _, _, err := conn.Read(t.Context()); websocket.CloseStatus(err) != websocket.StatusNormalClosure {
		t.Errorf("it is closed with %v", err)
	}
	for _, bad := range []string{"", "{}", `{"type":"begin"}`, `{"type":"end","more":1}`, "x"} {
		conn := dial()
		inside, err := l.Accept()
		if err != nil {
			t.Fatal(err)
		}
		if err := conn.Write(t.Context(), websocket.MessageText, []byte(bad)); err != nil {
			t.Fatal(err)
		}
		_ = readAll(t, inside) // it is closed
		ctx, cancel := context.WithTimeout(t.Context(), 10*time.Second)
		if _, _, err := conn.Read(ctx); websocket.CloseStatus(err) != websocket.StatusInternalError {
			t.Errorf("%q: %v", bad, err)
		}
		cancel()
	}
	// The program notices when a client leaves, with or without an end.
	for _, first := range []string{"", `{"type":"end"}`} {
		conn := dial()
		inside, err := l.Accept()
		if err != nil {
			t.Fatal(err)
		}
		if first != "" {
			if err := conn.Write(t.Context(), websocket.MessageText, []byte(first)); err != nil {
				t.Fatal(err)
			}
			_ = readAll(t, inside)
		}
		_ = conn.CloseNow()
		n.Eventually(func() bool {
			_, err := inside.Write([]byte("x"))
			return err != nil
		})
	}
	n.do("GET", at+"/tunnels/0", nil).refused(400, "invalid")
	_ = l.Close()
	n.do("GET", at+"/tunnels/"+port, nil).refused(502, "port_closed")
}
