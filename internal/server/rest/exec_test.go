package rest

import (
	"bufio"
	"context"
	"encoding/json"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/coder/websocket"

	"agentrun.dev/api/rest"
)

// TestExec: the answers of a buffered exec.
func TestExec(t *testing.T) {
	n := newNode(t)
	n.setUp()
	path := n.claim("a") + "/execs"
	run := func(req rest.ExecRequest) rest.ExecResult {
		t.Helper()
		return as[rest.ExecResult](n.do("POST", path, req).ok(200))
	}
	if r := run(rest.ExecRequest{Argv: []string{"echo", "a b", "$HOME"}}); r.Stdout != "a b $HOME\n" || r.ExitCode != 0 || r.Truncated || r.Id == "" || r.Wall == "" {
		t.Errorf("%+v", r)
	}
	if r := run(rest.ExecRequest{Shell: "echo out; echo err >&2; pwd; echo $GREETING; exit 3", Env: rest.Env{"GREETING": "hi"}}); r.ExitCode != 3 || r.Stderr != "err\n" || r.Stdout != "out\n"+n.Workdir+"\nhi\n" {
		t.Errorf("%+v", r)
	}
	if r := run(rest.ExecRequest{Argv: []string{"cat"}, Stdin: "in"}); r.Stdout != "in" {
		t.Errorf("%+v", r)
	}
	if r := run(rest.ExecRequest{Argv: []string{"cat"}, Stdin: "/wA=", StdinEncoding: rest.EncodingBase64}); r.Stdout != "/wA=" || r.StdoutEncoding != rest.EncodingBase64 {
		t.Errorf("bytes: %+v", r)
	}
	if r := run(rest.ExecRequest{Argv: []string{"cat"}}); r.Stdout != "" || r.ExitCode != 0 {
		t.Errorf("without stdin: %+v", r)
	}
	if r := run(rest.ExecRequest{Shell: "kill -9 $$"}); r.Signal != "SIGKILL" || r.ExitCode != 137 {
		t.Errorf("%+v", r)
	}
	if r := run(rest.ExecRequest{Argv: []string{"sleep", "100"}, Timeout: "10ms"}); !r.TimedOut || r.ExitCode == 0 {
		t.Errorf("%+v", r)
	}
	if r := run(rest.ExecRequest{Shell: "head -c 3000000 /dev/zero | tr '\\0' x"}); !r.Truncated || len(r.Stdout) != defaultOutput {
		t.Errorf("%d bytes, truncated %v", len(r.Stdout), r.Truncated)
	}
	if r := run(rest.ExecRequest{Shell: "printf 12345", OutputLimit: ptr(5)}); r.Truncated || r.Stdout != "12345" {
		t.Errorf("%+v", r)
	}
	if r := run(rest.ExecRequest{Shell: "printf 12345", OutputLimit: ptr(0)}); !r.Truncated || r.Stdout != "" {
		t.Errorf("%+v", r)
	}
	if r := run(rest.ExecRequest{Shell: "tty; stty size", Tty: true, Rows: 30, Cols: 100}); !strings.Contains(r.Stdout, "30 100") {
		t.Errorf("%+v", r)
	}
	n.do("POST", path, rest.ExecRequest{Argv: []string{"no-such-program"}}).refused(422, "cannot_run")
	n.do("POST", path, rest.ExecRequest{Argv: []string{"true"}, Cwd: "/no/such/folder"}).refused(400, "invalid")
	n.do("POST", path, rest.ExecRequest{Argv: []string{"true"}, User: "nobody-such"}).refused(400, "invalid")
	n.do("POST", path, rest.ExecRequest{}).refused(400, "invalid")
	n.do("POST", path, rest.ExecRequest{Argv: []string{"true"}, Shell: "true"}).refused(400, "invalid")
	n.do("POST", path, rest.ExecRequest{Argv: []string{"true"}, Env: rest.Env{"A=B": "c"}}).refused(400, "invalid")
	n.do("POST", path, rest.ExecRequest{Argv: []string{"cat"}, Stdin: "%", StdinEncoding: rest.EncodingBase64}).refused(400, "invalid")
	n.do("POST", path, rest.ExecRequest{Argv: []string{"cat"}, Stdin: "x", Background: true}).refused(400, "invalid")
	n.do("POST", path, rest.ExecRequest{Argv: []string{"true"}, OutputLimit: ptr(1 << 30)}).refused(400, "invalid")
	n.do("POST", path, rest.ExecRequest{Argv: []string{"true"}}, "Accept", "image/png").refused(406, "not_acceptable")
	n.do("POST", path, rest.ExecRequest{Argv: []string{strings.Repeat("x", 100<<10)}}).refused(400, "invalid")
}

// TestExecStream: output comes as it is written, in both forms, whole
// characters together.
func TestExecStream(t *testing.T) {
	n := newNode(t)
	n.setUp()
	path := n.claim("a") + "/execs"
	fifo := filepath.Join(n.Workdir, "go")
	req := rest.ExecRequest{Shell: `mkfifo go; printf 'one \303'; cat go; printf '\251\n'; echo err >&2; exit 4`}
	for _, form := range []string{formNDJSON, formSSE} {
		_ = os.Remove(fifo)
		r := n.request("POST", path, req, "Accept", form)
		res, err := n.client.Do(r)
		if err != nil {
			t.Fatal(err)
		}
		var seen strings.Builder
		lines := bufio.NewScanner(res.Body)
		for lines.Scan() {
			seen.WriteString(lines.Text() + "\n")
			// The rest is written only when the first part has come.
			if strings.Contains(lines.Text(), `"one `) {
				if err := os.WriteFile(fifo, nil, 0o600); err != nil {
					t.Fatal(err)
				}
			}
		}
		res.Body.Close()
		got := &response{t: t, status: res.StatusCode, header: res.Header, body: []byte(seen.String())}
		n.conforms(r, got)
		events := stream[rest.ExecEvent](got)
		if e := events[0]; e.Type != rest.ExecEventTypeStarted || e.Id == "" || e.Pid == 0 || *e.StdoutOffset != 0 {
			t.Errorf("%s: %+v", form, e)
		}
		if out := streamText(t, events, rest.ExecEventTypeStdout, 0); out != "one \u00e9\n" {
			t.Errorf("%s: %q", form, out)
		}
		if !strings.Contains(seen.String(), "\u00e9") {
			t.Errorf("%s: a character was cut in two: %s", form, seen.String())
		}
		if out := streamText(t, events, rest.ExecEventTypeStderr, 0); out != "err\n" {
			t.Errorf("%s: %q", form, out)
		}
		if e := last(t, events); e.Type != rest.ExecEventTypeExit || *e.ExitCode != 4 {
			t.Errorf("%s: %+v", form, e)
		}
		if form == formSSE && !strings.Contains(seen.String(), "event: exit\ndata: {") {
			t.Errorf("%s", seen.String())
		}
	}
}

// TestBackground: started, listed, fed, attached to from where one was, signalled,
// forgotten.
func TestBackground(t *testing.T) {
	n := newNode(t)
	n.setUp()
	path := n.claim("a") + "/execs"
	x := as[rest.ExecStarted](n.do("POST", path, rest.ExecRequest{Id: "my.cat-1", Argv: []string{"cat"}, OpenStdin: true, Background: true}).ok(201))
	if x.Id != "my.cat-1" || x.Pid == 0 {
		t.Errorf("%+v", x)
	}
	n.do("POST", path, rest.ExecRequest{Id: "my.cat-1", Argv: []string{"true"}}).refused(409, "already_exists")
	one := path + "/" + x.Id
	n.do("POST", one+"/stdin", []byte("first\n")).ok(204)
	if i := as[rest.ExecInfo](n.do("GET", one, nil).ok(200)); !i.Running || i.Argv[0] != "cat" || i.ExitCode != nil {
		t.Errorf("%+v", i)
	}
	n.do("DELETE", one, nil).refused(409, "conflict")
	n.do("POST", one+"/resize", rest.TerminalSize{Rows: 1, Cols: 1}).refused(400, "invalid") // it has no terminal
	n.do("POST", one+"/stdin?close=true", []byte("second\n")).ok(204)
	events := stream[rest.ExecEvent](n.do("GET", one+"/output", nil).ok(200))
	if out := streamText(t, events, rest.ExecEventTypeStdout, 0); out != "first\nsecond\n" {
		t.Errorf("%q", out)
	}
	if e := last(t, events); e.Type != rest.ExecEventTypeExit || *e.ExitCode != 0 {
		t.Errorf("%+v", e)
	}
	events = stream[rest.ExecEvent](n.do("GET", one+"/output?stdout=6", nil, "Accept", formSSE).ok(200))
	if out := streamText(t, events, rest.ExecEventTypeStdout, 6); out != "second\n" {
		t.Errorf("%q", out)
	}
	n.do("POST", one+"/stdin", []byte("late")).refused(409, "conflict")
	if l := as[rest.ExecList](n.do("GET", path, nil).ok(200)); len(l.Items) != 1 || l.Items[0].Running || *l.Items[0].ExitCode != 0 {
		t.Errorf("%+v", l)
	}
	n.do("DELETE", one, nil).ok(204)
	n.do("GET", one, nil).refused(404, "not_found")
	n.do("GET", one+"/output", nil).refused(404, "not_found")
	n.do("GET", one+"/output?stdout=-2", nil).refused(400, "invalid")
	n.do("POST", one+"/stdin", []byte("x")).refused(404, "not_found")

	x = as[rest.ExecStarted](n.do("POST", path, rest.ExecRequest{Shell: "sleep 1000 & wait", Background: true}).ok(201))
	one = path + "/" + x.Id
	n.do("POST", one+"/signal", rest.Signal{Signal: "NOPE"}).refused(400, "invalid")
	n.do("POST", one+"/signal", rest.Signal{Signal: "TERM", Scope: "all"}).refused(400, "invalid")
	n.do("POST", one+"/signal", rest.Signal{Signal: "term", Scope: rest.SignalScopeSession}).ok(204)
	if e := last(t, stream[rest.ExecEvent](n.do("GET", one+"/output", nil).ok(200))); e.Signal != "SIGTERM" {
		t.Errorf("%+v", e)
	}
	n.do("POST", path+"/none/signal", rest.Signal{Signal: "9"}).refused(404, "not_found")
}

// TestSocket: a terminal over a WebSocket.
func TestSocket(t *testing.T) {
	n := newNode(t)
	n.setUp()
	path := n.claim("a") + "/execs"
	x := as[rest.ExecStarted](n.do("POST", path, rest.ExecRequest{
		Shell: `read a; stty size; read b; echo "got $a and $b"; cat; exit 7`, Tty: true, Rows: 24, Cols: 80, Background: true,
	}).ok(201))
	one := path + "/" + x.Id
	n.do("GET", one+"/socket?stdout=x", nil).refused(400, "invalid")
	n.do("GET", path+"/none/socket", nil).refused(404, "not_found")

	ctx := t.Context()
	conn, _, err := websocket.Dial(ctx, "ws://node"+one+"/socket", &websocket.DialOptions{HTTPClient: n.client})
	if err != nil {
		t.Fatal(err)
	}
	defer conn.CloseNow()
	say := func(in any) {
		t.Helper()
		data, err := json.Marshal(in)
		if err != nil {
			t.Fatal(err)
		}
		if err := conn.Write(ctx, websocket.MessageText, data); err != nil {
			t.Fatal(err)
		}
	}
	say(map[string]any{"type": "dance"})
	say(map[string]any{"type": "stdin", "unknown": 1})
	say(rest.ExecInput{Type: rest.ExecInputTypeResize, Rows: 50, Cols: 132})
	say(rest.ExecInput{Type: rest.ExecInputTypeStdin, Data: "one\n"})
	say(rest.ExecInput{Type: rest.ExecInputTypeStdin, Data: "dHdvCg==", Encoding: rest.EncodingBase64})
	var events []rest.ExecEvent
	problems := 0
	var seen strings.Builder
	for {
		_, data, err := conn.Read(ctx)
		if err != nil {
			if websocket.CloseStatus(err) != websocket.StatusNormalClosure {
				t.Error(err)
			}
			break
		}
		var value any
		var e rest.ExecEvent
		if json.Unmarshal(data, &value) != nil || json.Unmarshal(data, &e) != nil {
			t.Fatalf("%s", data)
		}
		if err := n.spec.Components.Schemas["ExecEvent"].Value.VisitJSON(value); err != nil {
			t.Errorf("%s: %v", data, err)
		}
		events = append(events, e)
		if e.Type == rest.ExecEventTypeError {
			problems++
		}
		if seen.WriteString(e.Data); strings.Contains(seen.String(), "got one and two") && problems < 100 {
			problems += 100
			say(rest.ExecInput{Type: rest.ExecInputTypeCloseStdin})
		}
	}
	if out := streamText(t, events, rest.ExecEventTypeStdout, 0); !strings.Contains(out, "50 132") || !strings.Contains(out, "got one and two") {
		t.Errorf("%q", out)
	}
	if e := last(t, events); e.Type != rest.ExecEventTypeExit || *e.ExitCode != 7 {
		t.Errorf("%+v", e)
	}
	if problems != 102 {
		t.Errorf("%d problems were told", problems-100)
	}
	// A page of another site gets no socket.
	_, res, err := websocket.Dial(ctx, "ws://node"+one+"/socket", &websocket.DialOptions{
		HTTPClient: n.client, HTTPHeader: http.Header{"Origin": {"https://evil.example"}},
	})
	if err == nil || res.StatusCode != http.StatusForbidden {
		t.Errorf("another origin: %v", err)
	}
}

// TestClientLeaves: a process goes on when its client has left, and can be found
// again.
func TestClientLeaves(t *testing.T) {
	n := newNode(t)
	n.setUp()
	path := n.claim("a") + "/execs"
	fifo := filepath.Join(n.Workdir, "go")
	ctx, cancel := context.WithCancel(t.Context())
	r := n.request("POST", path, rest.ExecRequest{Id: "x", Shell: "mkfifo go; echo one; cat go; echo two"}, "Accept", formNDJSON).WithContext(ctx)
	res, err := n.client.Do(r)
	if err != nil {
		t.Fatal(err)
	}
	lines := bufio.NewScanner(res.Body)
	for lines.Scan() && !strings.Contains(lines.Text(), "one") {
	}
	cancel()
	res.Body.Close()
	if err := os.WriteFile(fifo, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	events := stream[rest.ExecEvent](n.do("GET", path+"/x/output?stdout=4", nil).ok(200))
	if out := streamText(t, events, rest.ExecEventTypeStdout, 4); out != "two\n" {
		t.Errorf("%q", out)
	}
}

// dial opens a connection of its own.
func (n *testNode) dial() net.Conn {
	n.t.Helper()
	conn, err := (&net.Dialer{}).DialContext(n.t.Context(), "unix", n.socket)
	if err != nil {
		n.t.Fatal(err)
	}
	n.t.Cleanup(func() { conn.Close() })
	return conn
}
