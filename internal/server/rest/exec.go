package rest

import (
	"bytes"
	"context"
	"net/http"
	"regexp"
	"strconv"
	"strings"
	"syscall"

	"golang.org/x/sys/unix"

	"agentrun.dev/api/rest"
	"agentrun.dev/internal/convert/restconv"
	"agentrun.dev/internal/guest/guestrpc"
	"agentrun.dev/internal/sandbox"
	"agentrun.dev/internal/server"
)

// useNamed begins to use a sandbox that the path names.
func (a *api) useNamed(ctx context.Context, namespace, name string) (*server.Session, error) {
	k, err := sandbox.ParseKey(namespace, name)
	if err != nil {
		return nil, err
	}
	return a.Use(ctx, k)
}

// session begins to use the sandbox that the path names, unless err says that the
// request has failed already. On an error, it answers with the error and returns nil.
func (a *api) session(w http.ResponseWriter, r *http.Request, namespace, name string, err error) *server.Session {
	var u *server.Session
	if err == nil {
		u, err = a.useNamed(r.Context(), namespace, name)
	}
	if err != nil {
		a.fail(w, r, err)
		return nil
	}
	return u
}

// inside serves a route whose answer is empty on success.
func (a *api) inside(w http.ResponseWriter, r *http.Request, namespace, name string, do func(*server.Session) error) {
	u, err := a.useNamed(r.Context(), namespace, name)
	if err == nil {
		defer u.Close()
		err = do(u)
	}
	a.done(w, r, err)
}

// withExec serves such a route for one exec.
func (a *api) withExec(w http.ResponseWriter, r *http.Request, namespace, name, id string, do func(*server.Session) error) {
	if err := checkID("id", id); err != nil {
		a.fail(w, r, err)
		return
	}
	a.inside(w, r, namespace, name, do)
}

// run is an exec as its request describes it.
type run struct {
	rest.ExecRequest
	req   guestrpc.ExecRequest
	stdin []byte
	limit int
}

func parseExec(g rest.ExecRequest) (x run, err error) {
	x = run{ExecRequest: g, req: guestrpc.ExecRequest{
		ID: g.Id, Argv: g.Argv, Workdir: g.Cwd, User: g.User, TTY: g.Tty, Rows: uint16(g.Rows), Cols: uint16(g.Cols),
		Stdin: g.OpenStdin || g.Stdin != "",
	}}
	if (len(g.Argv) == 0) == (g.Shell == "") {
		return x, sandbox.Errorf(sandbox.CodeInvalid, "an exec has one of argv and shell")
	}
	if g.Shell != "" {
		x.req.Argv = []string{"/bin/sh", "-c", g.Shell}
	}
	if g.Id != "" {
		if err := checkID("id", g.Id); err != nil {
			return x, err
		}
	}
	if g.Rows < 0 || g.Cols < 0 || g.Rows > 65535 || g.Cols > 65535 {
		return x, sandbox.Invalid("rows, cols", "they are not between 1 and 65535")
	}
	if g.Background && g.Stdin != "" {
		return x, sandbox.Errorf(sandbox.CodeInvalid, "stdin: what runs in the background gets it with a POST").Try("Set openStdin, and POST to its stdin")
	}
	if x.req.Env, err = environment(g.Env); err != nil {
		return x, err
	}
	if x.req.Timeout, err = restconv.ToDuration("timeout", g.Timeout); err != nil {
		return x, err
	}
	if x.limit, err = outputLimit(g.OutputLimit); err != nil {
		return x, err
	}
	x.stdin, err = decoded("stdin", g.Stdin, g.StdinEncoding)
	return x, err
}

var envName = regexp.MustCompile(`^[A-Za-z_][A-Za-z0-9_]*$`)

func environment(env rest.Env) ([]string, error) {
	for name := range env {
		if !envName.MatchString(name) {
			return nil, sandbox.Invalid("env", "%q is not a name of letters, digits and underscores", server.Trimmed(name))
		}
	}
	return sandbox.Env(env).Strings(), nil
}

// Exec implements rest.ServerInterface.
func (a *api) Exec(w http.ResponseWriter, r *http.Request, namespace, name string) {
	var given rest.ExecRequest
	_, err := a.readJSON(w, r, maxExecBody, &given)
	var x run
	if err == nil {
		x, err = parseExec(given)
	}
	form := formJSON
	if err == nil && !x.Background {
		form, err = accepted(r, formJSON, formNDJSON, formSSE)
	}
	u := a.session(w, r, namespace, name, err)
	if u == nil {
		return
	}
	defer u.Close()
	ctx, end := u.Begin(r.Context(), sandbox.OpExec)
	defer func() { end(err) }()
	s, err := u.Exec(ctx, x.req)
	if err != nil {
		a.fail(w, r, recoded(err, startCodes))
		return
	}
	defer s.Close()
	switch {
	case x.Background:
		a.answer(w, r, http.StatusCreated, rest.ExecStarted{Id: s.ID(), Pid: s.Started().PID}, nil)
	case form == formJSON:
		x.feed(s)
		a.execBuffered(w, r, s, x.limit)
	default:
		x.feed(s)
		a.execEvents(w, form, s)
	}
}

// feed sends the input of the request. A process need not read it all.
func (x run) feed(s *guestrpc.AttachedExec) {
	if !x.req.Stdin {
		return
	}
	go func() {
		in := s.Stdin()
		_, err := bytes.NewReader(x.stdin).WriteTo(in)
		if err == nil && !x.OpenStdin {
			_ = in.Close() // the exit status tells
		}
	}()
}

func (a *api) execBuffered(w http.ResponseWriter, r *http.Request, s *guestrpc.AttachedExec, limit int) {
	stdout, stderr := capped{limit: limit}, capped{limit: limit}
	exit, err := s.Copy(nil, &stdout, &stderr)
	if err != nil {
		a.fail(w, r, err)
		return
	}
	out := rest.ExecResult{
		Id: s.ID(), ExitCode: exit.Code, Signal: signalName(exit.Signal), TimedOut: exit.TimedOut,
		Truncated: stdout.cut || stderr.cut || exit.Stdout.Dropped+exit.Stderr.Dropped > 0,
		Wall:      exit.Wall.String(), MaxRSS: exit.MaxRSS,
	}
	out.Stdout, out.StdoutEncoding = encoded(stdout.kept)
	out.Stderr, out.StderrEncoding = encoded(stderr.kept)
	a.answer(w, r, http.StatusOK, out, nil)
}

// execEvents streams a process to its end.
func (a *api) execEvents(w http.ResponseWriter, form string, s *guestrpc.AttachedExec) {
	e := a.newEvents(w, form)
	copyExec(s, func(event rest.ExecEvent) error { return e.send(string(event.Type), event) })
}

// copyExec turns the output of a process into events, until the process ends or
// the client stops receiving.
func copyExec(s *guestrpc.AttachedExec, send func(rest.ExecEvent) error) {
	began := s.Started()
	err := send(rest.ExecEvent{
		Type: rest.ExecEventTypeStarted, Id: s.ID(), Pid: began.PID,
		StdoutOffset: &began.Stdout.Offset, StdoutDropped: began.Stdout.Dropped,
		StderrOffset: &began.Stderr.Offset, StderrDropped: began.Stderr.Dropped,
	})
	if err != nil {
		return
	}
	pipe := func(kind rest.ExecEventType, offset int64) *output {
		return &output{offset: offset, send: func(offset int64, data string, encoding rest.Encoding) error {
			return send(rest.ExecEvent{Type: kind, Offset: &offset, Data: data, Encoding: encoding})
		}}
	}
	stdout, stderr := pipe(rest.ExecEventTypeStdout, began.Stdout.Offset), pipe(rest.ExecEventTypeStderr, began.Stderr.Offset)
	exit, err := s.Copy(nil, stdout, stderr)
	if err == nil && stdout.flush() == nil && stderr.flush() == nil {
		_ = send(rest.ExecEvent{
			Type: rest.ExecEventTypeExit, ExitCode: &exit.Code, Signal: signalName(exit.Signal), TimedOut: exit.TimedOut,
			Wall: exit.Wall.String(), MaxRSS: exit.MaxRSS,
		})
		return
	}
	if err != nil {
		problem := wireError(err)
		_ = send(rest.ExecEvent{Type: rest.ExecEventTypeError, Error: &problem})
	}
}

// AttachExec implements rest.ServerInterface.
func (a *api) AttachExec(w http.ResponseWriter, r *http.Request, namespace, name, id string, q rest.AttachExecParams) {
	form, err := accepted(r, formNDJSON, formSSE)
	if err != nil {
		a.fail(w, r, err)
		return
	}
	u, s, err := a.attach(r, namespace, name, id, q.Stdout, q.Stderr)
	if err != nil {
		a.fail(w, r, err)
		return
	}
	defer u.Close()
	defer s.Close()
	a.execEvents(w, form, s)
}

// attach joins an exec.
func (a *api) attach(r *http.Request, namespace, name, id string, stdout, stderr int64) (*server.Session, *guestrpc.AttachedExec, error) {
	if err := checkID("id", id); err != nil {
		return nil, nil, err
	}
	if stdout < -1 || stderr < -1 {
		return nil, nil, sandbox.Invalid("stdout, stderr", "an offset is -1 or more")
	}
	u, err := a.useNamed(r.Context(), namespace, name)
	if err != nil {
		return nil, nil, err
	}
	s, err := u.Agent().Attach(r.Context(), guestrpc.AttachRequest{ID: id, StdoutOffset: stdout, StderrOffset: stderr})
	if err != nil {
		u.Close()
		return nil, nil, err
	}
	return u, s, nil
}

// ListExecs implements rest.ServerInterface.
func (a *api) ListExecs(w http.ResponseWriter, r *http.Request, namespace, name string) {
	u, err := a.useNamed(r.Context(), namespace, name)
	if err != nil {
		a.fail(w, r, err)
		return
	}
	defer u.Close()
	found, err := u.Agent().ListExecs(r.Context())
	items := make([]rest.ExecInfo, 0, len(found))
	for _, x := range found {
		items = append(items, showExec(x))
	}
	a.answer(w, r, http.StatusOK, rest.ExecList{Items: items}, err)
}

// GetExec implements rest.ServerInterface.
func (a *api) GetExec(w http.ResponseWriter, r *http.Request, namespace, name, id string) {
	err := checkID("id", id)
	u := a.session(w, r, namespace, name, err)
	if u == nil {
		return
	}
	defer u.Close()
	found, err := u.Agent().ListExecs(r.Context())
	for _, x := range found {
		if x.ID == id {
			a.answer(w, r, http.StatusOK, showExec(x), nil)
			return
		}
	}
	if err == nil {
		err = sandbox.Errorf(sandbox.CodeNotFound, "exec %q is not known in sandbox %s", server.Trimmed(id), name)
	}
	a.fail(w, r, err)
}

func showExec(x guestrpc.ExecInfo) rest.ExecInfo {
	out := rest.ExecInfo{Id: x.ID, Pid: x.PID, Argv: []string{}, User: x.User, Cwd: x.Workdir, Tty: x.TTY, Started: x.Started.UTC(), Running: x.Running}
	for _, arg := range x.Argv {
		out.Argv = append(out.Argv, strings.ToValidUTF8(arg, "\ufffd"))
	}
	if !x.Running {
		out.ExitCode, out.Signal, out.TimedOut = &x.Exit.Code, signalName(x.Exit.Signal), x.Exit.TimedOut
	}
	return out
}

// ReleaseExec implements rest.ServerInterface.
func (a *api) ReleaseExec(w http.ResponseWriter, r *http.Request, namespace, name, id string) {
	a.withExec(w, r, namespace, name, id, func(u *server.Session) error { return u.Agent().ReleaseExec(r.Context(), id) })
}

// WriteStdin implements rest.ServerInterface.
func (a *api) WriteStdin(w http.ResponseWriter, r *http.Request, namespace, name, id string, q rest.WriteStdinParams) {
	a.withExec(w, r, namespace, name, id, func(u *server.Session) error {
		body := a.upload(w, r)
		return body.done(u.Agent().WriteStdin(r.Context(), id, body, q.Close))
	})
}

// SignalExec implements rest.ServerInterface.
func (a *api) SignalExec(w http.ResponseWriter, r *http.Request, namespace, name, id string) {
	var given rest.Signal
	_, err := a.readJSON(w, r, server.MaxBody, &given)
	req := guestrpc.SignalRequest{ID: id}
	if err == nil {
		req.Signal, err = parseSignal(given.Signal)
	}
	if err == nil {
		req.Scope, err = parseScope(given.Scope)
	}
	if err != nil {
		a.fail(w, r, err)
		return
	}
	a.withExec(w, r, namespace, name, id, func(u *server.Session) error { return u.Agent().Signal(r.Context(), req) })
}

func parseScope(s rest.SignalScope) (guestrpc.SignalScope, error) {
	switch s {
	case "", rest.SignalScopeProcess:
		return guestrpc.ScopeProcess, nil
	case rest.SignalScopeGroup:
		return guestrpc.ScopeGroup, nil
	case rest.SignalScopeSession:
		return guestrpc.ScopeSession, nil
	}
	return 0, sandbox.Invalid("scope", "%q is none of process, group and session", server.Trimmed(string(s)))
}

// maxSignal is the last real-time signal.
const maxSignal = 64

// parseSignal reads a signal's name, with or without SIG, or its number.
func parseSignal(s string) (int32, error) {
	if n, err := strconv.ParseInt(s, 10, 32); err == nil && n > 0 && n <= maxSignal {
		return int32(n), nil
	}
	name := strings.ToUpper(s)
	if !strings.HasPrefix(name, "SIG") {
		name = "SIG" + name
	}
	if n := unix.SignalNum(name); n > 0 {
		return int32(n), nil
	}
	return 0, sandbox.Invalid("signal", "%q is not a signal such as TERM, SIGTERM or 15", server.Trimmed(s))
}

func signalName(n int32) string {
	if n == 0 {
		return ""
	}
	if name := unix.SignalName(syscall.Signal(n)); name != "" {
		return name
	}
	return strconv.Itoa(int(n))
}

// ResizeExec implements rest.ServerInterface.
func (a *api) ResizeExec(w http.ResponseWriter, r *http.Request, namespace, name, id string) {
	var given rest.TerminalSize
	_, err := a.readJSON(w, r, server.MaxBody, &given)
	if err == nil {
		err = checkSize(given.Rows, given.Cols)
	}
	if err != nil {
		a.fail(w, r, err)
		return
	}
	a.withExec(w, r, namespace, name, id, func(u *server.Session) error {
		return u.Agent().Resize(r.Context(), guestrpc.ResizeRequest{ID: id, Rows: uint16(given.Rows), Cols: uint16(given.Cols)})
	})
}

func checkSize(rows, cols int) error {
	if rows < 1 || rows > 65535 || cols < 1 || cols > 65535 {
		return sandbox.Invalid("rows, cols", "%d and %d are not between 1 and 65535", rows, cols)
	}
	return nil
}
