package rest

import (
	"context"
	"encoding/json"
	"net/http"
	"time"

	"github.com/coder/websocket"
	"golang.org/x/sys/unix"

	"agentrun.dev/api/rest"
	"agentrun.dev/internal/guest/guestrpc"
	"agentrun.dev/internal/sandbox"
	"agentrun.dev/internal/server"
)

// terminalRoute is the route that a token opens.
const terminalRoute = "GET /v1/namespaces/{namespace}/sandboxes/{name}/terminal"

// loginShell is the program in a terminal whose request names no other.
const loginShell = "command -v bash >/dev/null && exec bash -l; exec sh -l"

// hangUpGrace is how long a program may take to end itself when its terminal is
// gone.
const hangUpGrace = 2 * time.Second

// CreateTerminal implements rest.ServerInterface.
func (a *api) CreateTerminal(w http.ResponseWriter, r *http.Request, namespace, name string) {
	out, err := func() (out rest.Terminal, err error) {
		var given rest.TerminalRequest
		if _, err := a.readJSON(w, r, maxTerminalBody, &given); err != nil {
			return out, err
		}
		req, err := parseTerminal(given)
		if err != nil {
			return out, err
		}
		k, err := sandbox.ParseKey(namespace, name)
		if err != nil {
			return out, err
		}
		s, err := a.Service.Sandbox(r.Context(), k)
		if err != nil {
			return out, err
		}
		out.Token, out.Expires, err = a.Terminals.issue(ticket{who: server.PrincipalOf(r.Context()), key: k, id: s.ID, req: req})
		out.Path = r.URL.Path
		return out, err
	}()
	a.answer(w, r, http.StatusCreated, out, err)
}

func parseTerminal(g rest.TerminalRequest) (req guestrpc.ExecRequest, err error) {
	if g.Rows == 0 {
		g.Rows = 24
	}
	if g.Cols == 0 {
		g.Cols = 80
	}
	if err := checkSize(g.Rows, g.Cols); err != nil {
		return req, err
	}
	if len(g.Argv) == 0 {
		g.Argv = []string{"/bin/sh", "-c", loginShell}
	}
	env := rest.Env{"TERM": "xterm-256color"}
	for name, value := range g.Env {
		env[name] = value
	}
	req = guestrpc.ExecRequest{
		Argv: g.Argv, Workdir: g.Cwd, User: g.User, TTY: true, Stdin: true, Rows: uint16(g.Rows), Cols: uint16(g.Cols),
	}
	req.Env, err = environment(env)
	return req, err
}

// ConnectTerminal implements rest.ServerInterface. authenticateRoute has
// redeemed the token, which names the principal.
func (a *api) ConnectTerminal(w http.ResponseWriter, r *http.Request, namespace, name string, _ rest.ConnectTerminalParams) {
	t, ok := r.Context().Value(ticketKey).(ticket)
	if !ok || string(t.key.Namespace) != namespace || string(t.key.Name) != name {
		a.fail(w, r, errNoTicket())
		return
	}
	u, err := a.useNamed(r.Context(), namespace, name)
	if err != nil {
		a.fail(w, r, err)
		return
	}
	defer u.Close()
	if u.Record().ID != t.id { // another sandbox has got the name
		a.fail(w, r, errNoTicket())
		return
	}
	ctx, end := u.Begin(r.Context(), sandbox.OpTerminal)
	defer func() { end(err) }()
	s, err := u.Exec(ctx, t.req)
	if err != nil {
		a.fail(w, r, recoded(err, startCodes))
		return
	}
	defer s.Close()
	defer hangUp(ctx, u.Agent(), s)
	// authenticateRoute has checked the origin, before it redeemed the token.
	conn, err := websocket.Accept(w, r, &websocket.AcceptOptions{InsecureSkipVerify: true})
	if err != nil {
		return
	}
	defer func() { _ = conn.CloseNow() }()
	conn.SetReadLimit(maxMessage)
	a.runTerminal(ctx, conn, s)
}

// runTerminal connects a program with its user, until either leaves.
func (a *api) runTerminal(ctx context.Context, conn *websocket.Conn, s *guestrpc.AttachedExec) {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	go func() {
		defer cancel()
		defer s.Close() // a client that has left takes no more output
		a.takeTyping(ctx, conn, s)
	}()
	screen := writerFunc(func(p []byte) (int, error) {
		ctx, cancel := context.WithTimeout(ctx, a.StallTimeout)
		defer cancel()
		return len(p), conn.Write(ctx, websocket.MessageBinary, p)
	})
	exit, err := s.Copy(nil, screen, nil)
	event := rest.TerminalEvent{Type: rest.TerminalEventTypeExit, ExitCode: &exit.Code, Signal: signalName(exit.Signal)}
	if err != nil {
		problem := wireError(err)
		event = rest.TerminalEvent{Type: rest.TerminalEventTypeError, Error: &problem}
	}
	if a.sendTerminal(ctx, conn, event) == nil {
		_ = conn.Close(websocket.StatusNormalClosure, "")
	}
}

// writerFunc is a function as an io.Writer.
type writerFunc func(p []byte) (int, error)

func (f writerFunc) Write(p []byte) (int, error) { return f(p) }

func (a *api) sendTerminal(ctx context.Context, conn *websocket.Conn, event rest.TerminalEvent) error {
	data, err := json.Marshal(event)
	if err != nil {
		return err
	}
	ctx, cancel := context.WithTimeout(ctx, a.StallTimeout)
	defer cancel()
	return conn.Write(ctx, websocket.MessageText, data)
}

// takeTyping handles a client's messages until the client leaves. An error in a
// message is shown to the client, and does not end the rest.
func (a *api) takeTyping(ctx context.Context, conn *websocket.Conn, s *guestrpc.AttachedExec) {
	in := s.Stdin()
	for {
		kind, data, err := conn.Read(ctx)
		if err != nil {
			return
		}
		if kind == websocket.MessageBinary {
			_, _ = in.Write(data) // a program that has ended takes no input, and its end is reported
			continue
		}
		if err := resizeTerminal(ctx, s, data); err != nil {
			problem := wireError(err)
			if a.sendTerminal(ctx, conn, rest.TerminalEvent{Type: rest.TerminalEventTypeError, Error: &problem}) != nil {
				return
			}
		}
	}
}

func resizeTerminal(ctx context.Context, s *guestrpc.AttachedExec, data []byte) error {
	var in rest.TerminalInput
	if err := decode(data, &in); err != nil {
		return err
	}
	if in.Type != rest.TerminalInputTypeResize {
		return sandbox.Invalid("type", "%q is not resize", server.Trimmed(string(in.Type)))
	}
	if err := checkSize(in.Rows, in.Cols); err != nil {
		return err
	}
	return s.Resize(ctx, uint16(in.Rows), uint16(in.Cols))
}

// hangUp ends the programs in a terminal that is gone, and forgets the exec: no
// client can come back to it. Errors are ignored, because no client is left
// that could be told.
func hangUp(ctx context.Context, agent *guestrpc.Client, s *guestrpc.AttachedExec) {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), 2*hangUpGrace)
	defer cancel()
	for _, n := range []unix.Signal{unix.SIGHUP, unix.SIGKILL} {
		// It fails if all programs of the session have ended.
		_ = agent.Signal(ctx, guestrpc.SignalRequest{ID: s.ID(), Signal: int32(n), Scope: guestrpc.ScopeSession})
		if waitExec(ctx, agent, s.ID()) == nil {
			break
		}
	}
	_ = agent.ReleaseExec(ctx, s.ID())
}

// waitExec waits for the end of a program, for at most hangUpGrace.
func waitExec(ctx context.Context, agent *guestrpc.Client, id string) error {
	ctx, cancel := context.WithTimeout(ctx, hangUpGrace)
	defer cancel()
	s, err := agent.Attach(ctx, guestrpc.AttachRequest{ID: id, StdoutOffset: -1, StderrOffset: -1})
	if err != nil {
		return err
	}
	defer s.Close()
	_, err = s.Copy(nil, nil, nil)
	return err
}
