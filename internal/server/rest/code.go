package rest

import (
	"encoding/base64"
	"net/http"
	"strings"

	"agentrun.dev/api/rest"
	"agentrun.dev/internal/convert/restconv"
	"agentrun.dev/internal/guest/guestrpc"
	"agentrun.dev/internal/sandbox"
	"agentrun.dev/internal/server"
)

// RunCode implements rest.ServerInterface.
func (a *api) RunCode(w http.ResponseWriter, r *http.Request, namespace, name string) {
	var given rest.CodeRequest
	_, err := a.readJSON(w, r, maxCodeBody, &given)
	var req guestrpc.CodeRunRequest
	if err == nil {
		req, err = parseCode(given)
	}
	limit, form := 0, formJSON
	if err == nil {
		limit, err = outputLimit(given.OutputLimit)
	}
	if err == nil && !given.Background {
		form, err = accepted(r, formJSON, formNDJSON, formSSE)
	}
	u := a.session(w, r, namespace, name, err)
	if u == nil {
		return
	}
	defer u.Close()
	ctx, end := u.Begin(r.Context(), sandbox.OpCode)
	defer func() { end(err) }()
	if req.Context == "" {
		req.Context, err = u.DefaultContext(ctx, req.Language)
	}
	var s *guestrpc.AttachedCode
	if err == nil {
		s, err = u.Agent().StartCode(ctx, req)
	}
	if err != nil {
		a.fail(w, r, err)
		return
	}
	defer s.Close()
	switch {
	case given.Background:
		a.answer(w, r, http.StatusCreated, rest.CodeStarted{Id: s.ID(), Context: s.Started().Context}, nil)
	case form == formJSON:
		a.codeBuffered(w, r, s, limit)
	default:
		a.codeEvents(w, form, s)
	}
}

func parseCode(g rest.CodeRequest) (req guestrpc.CodeRunRequest, err error) {
	req = guestrpc.CodeRunRequest{ID: g.Id, Context: g.Context, Language: string(g.Language), Source: g.Code}
	for _, id := range []struct{ field, value string }{{"id", g.Id}, {"context", g.Context}} {
		if id.value != "" {
			if err := checkID(id.field, id.value); err != nil {
				return req, err
			}
		}
	}
	if len(g.Code) > guestrpc.MaxCode {
		return req, sandbox.Errorf(server.CodeTooLarge, "the code has more than %d bytes", guestrpc.MaxCode).Try("Write it to a file and run that")
	}
	switch g.Mode {
	case "", rest.CodeModeCode:
	case rest.CodeModeText:
		req.Mode = guestrpc.ModeText
	default:
		return req, sandbox.Invalid("mode", "%q is neither code nor text", server.Trimmed(string(g.Mode)))
	}
	if req.Env, err = environment(g.Env); err != nil {
		return req, err
	}
	req.Timeout, err = restconv.ToDuration("timeout", g.Timeout)
	return req, err
}

var codeStates = map[guestrpc.CodeState]rest.CodeStatus{
	guestrpc.CodeOK:          rest.CodeStatusOk,
	guestrpc.CodeRaised:      rest.CodeStatusRaised,
	guestrpc.CodeInterrupted: rest.CodeStatusInterrupted,
	guestrpc.CodeExited:      rest.CodeStatusExited,
	guestrpc.CodeDied:        rest.CodeStatusDied,
	guestrpc.CodeCancelled:   rest.CodeStatusCancelled,
}

// maxValues is how many bytes of results and displays a buffered answer holds.
const maxValues = 64 << 20

func (a *api) codeBuffered(w http.ResponseWriter, r *http.Request, s *guestrpc.AttachedCode, limit int) {
	stdout, stderr := capped{limit: limit}, capped{limit: limit}
	out := rest.CodeResult{Id: s.ID(), Context: s.Started().Context, Displays: []rest.MimeBundle{}}
	values := 0
	status, err := s.Copy(&stdout, &stderr, func(e guestrpc.CodeEvent) error {
		if values += len(e.Data); values > maxValues {
			out.Truncated = true
			return nil
		}
		shown, err := showCodeEvent(e)
		if err != nil {
			return err
		}
		switch shown.Type {
		case rest.CodeEventTypeResult:
			out.Result = shown.Value
		case rest.CodeEventTypeDisplay:
			out.Displays = append(out.Displays, shown.Value)
		case rest.CodeEventTypeRaised:
			out.Error = shown.Exception
		}
		return nil
	})
	if err != nil {
		a.fail(w, r, err)
		return
	}
	out.Status, out.ExitCode, out.TimedOut = codeStates[status.State], status.Code, status.TimedOut
	out.Fresh, out.FreshReason, out.Reason = status.Fresh, status.FreshReason, status.Reason
	out.Language, out.Count, out.Wall = status.Language, int64(status.Count), status.Wall.String()
	out.Stdout, out.StdoutEncoding = encoded(stdout.kept)
	out.Stderr, out.StderrEncoding = encoded(stderr.kept)
	out.Truncated = out.Truncated || stdout.cut || stderr.cut || status.Stdout.Dropped+status.Stderr.Dropped+status.Events.Dropped > 0
	a.answer(w, r, http.StatusOK, out, nil)
}

// codeEvents streams an execution to its end.
func (a *api) codeEvents(w http.ResponseWriter, form string, s *guestrpc.AttachedCode) {
	e := a.newEvents(w, form)
	send := func(event rest.CodeEvent) error { return e.send(string(event.Type), event) }
	began := s.Started()
	err := send(rest.CodeEvent{
		Type: rest.CodeEventTypeStarted, Id: s.ID(), Context: began.Context,
		StdoutOffset: &began.Stdout.Offset, StdoutDropped: began.Stdout.Dropped,
		StderrOffset: &began.Stderr.Offset, StderrDropped: began.Stderr.Dropped,
		Event: &began.Events.Offset, EventsDropped: began.Events.Dropped,
	})
	if err != nil {
		return
	}
	pipe := func(kind rest.CodeEventType, offset int64) *output {
		return &output{offset: offset, send: func(offset int64, data string, encoding rest.Encoding) error {
			return send(rest.CodeEvent{Type: kind, Offset: &offset, Data: data, Encoding: encoding})
		}}
	}
	stdout, stderr := pipe(rest.CodeEventTypeStdout, began.Stdout.Offset), pipe(rest.CodeEventTypeStderr, began.Stderr.Offset)
	status, err := s.Copy(stdout, stderr, func(e guestrpc.CodeEvent) error {
		shown, err := showCodeEvent(e)
		if err != nil {
			return err
		}
		return send(shown)
	})
	if err == nil && stdout.flush() == nil && stderr.flush() == nil {
		_ = send(rest.CodeEvent{
			Type: rest.CodeEventTypeExit, Status: codeStates[status.State], ExitCode: &status.Code, TimedOut: status.TimedOut,
			Fresh: status.Fresh, FreshReason: status.FreshReason, Reason: status.Reason,
			Language: status.Language, Count: int64(status.Count), Wall: status.Wall.String(),
		})
		return
	}
	if err != nil {
		problem := wireError(err)
		_ = send(rest.CodeEvent{Type: rest.CodeEventTypeError, Error: &problem})
	}
}

// showCodeEvent reads an event of an interpreter, which may contain anything.
func showCodeEvent(e guestrpc.CodeEvent) (rest.CodeEvent, error) {
	seq := int64(e.Seq)
	out := rest.CodeEvent{Seq: &seq, StdoutOffset: &e.Stdout, StderrOffset: &e.Stderr}
	switch e.Kind {
	case guestrpc.CodeEventBegun:
		begun, err := e.Begun()
		out.Type, out.Fresh, out.FreshReason = rest.CodeEventTypeBegun, begun.Fresh, begun.Reason
		return out, err
	case guestrpc.CodeEventError:
		raised, err := e.Error()
		out.Type = rest.CodeEventTypeRaised
		out.Exception = &rest.CodeError{Name: text(raised.Name), Value: text(raised.Value), Traceback: text(raised.Traceback)}
		return out, err
	case guestrpc.CodeEventResult, guestrpc.CodeEventDisplay:
		result, err := e.Result()
		out.Type = rest.CodeEventTypeResult
		if e.Kind == guestrpc.CodeEventDisplay {
			out.Type = rest.CodeEventTypeDisplay
		}
		out.Value = rest.MimeBundle{}
		for _, item := range result.Items {
			out.Value[text(item.MIME)] = showItem(item)
		}
		return out, err
	}
	return out, sandbox.Errorf(server.CodeUnavailable, "the sandbox sent an event of kind %d, which is not known", e.Kind).
		Try("Rebuild the template")
}

func text(s string) string { return strings.ToValidUTF8(s, "\ufffd") }

// showItem returns text unchanged, anything else as base64.
func showItem(item guestrpc.CodeItem) string {
	if isText(item.MIME) {
		return text(string(item.Data))
	}
	return base64.StdEncoding.EncodeToString(item.Data)
}

func isText(kind string) bool {
	switch kind {
	case "application/json", "application/javascript", "application/xml":
		return true
	}
	return strings.HasPrefix(kind, "text/") || strings.HasSuffix(kind, "+json") || strings.HasSuffix(kind, "+xml")
}

// AttachCode implements rest.ServerInterface.
func (a *api) AttachCode(w http.ResponseWriter, r *http.Request, namespace, name, id string, q rest.AttachCodeParams) {
	form, err := accepted(r, formNDJSON, formSSE)
	if err == nil {
		err = checkID("id", id)
	}
	if err == nil && (q.Stdout < -1 || q.Stderr < -1 || q.Event < -1) {
		err = sandbox.Invalid("stdout, stderr, event", "a place to begin at is -1 or more")
	}
	u := a.session(w, r, namespace, name, err)
	if u == nil {
		return
	}
	defer u.Close()
	s, err := u.Agent().AttachCode(r.Context(), guestrpc.CodeAttachRequest{ID: id, StdoutOffset: q.Stdout, StderrOffset: q.Stderr, Event: q.Event})
	if err != nil {
		a.fail(w, r, err)
		return
	}
	defer s.Close()
	a.codeEvents(w, form, s)
}

// ReleaseCode implements rest.ServerInterface.
func (a *api) ReleaseCode(w http.ResponseWriter, r *http.Request, namespace, name, id string) {
	a.withExec(w, r, namespace, name, id, func(u *server.Session) error { return u.Agent().ReleaseCode(r.Context(), id) })
}

// InterruptCode implements rest.ServerInterface.
func (a *api) InterruptCode(w http.ResponseWriter, r *http.Request, namespace, name, id string) {
	a.withExec(w, r, namespace, name, id, func(u *server.Session) error {
		return u.Agent().InterruptCode(r.Context(), guestrpc.CodeInterruptRequest{ID: id})
	})
}

// ListContexts implements rest.ServerInterface.
func (a *api) ListContexts(w http.ResponseWriter, r *http.Request, namespace, name string) {
	u, err := a.useNamed(r.Context(), namespace, name)
	if err != nil {
		a.fail(w, r, err)
		return
	}
	defer u.Close()
	found, err := u.Agent().ListContexts(r.Context())
	items := make([]rest.Context, 0, len(found))
	for _, c := range found {
		items = append(items, showContext(c))
	}
	a.answer(w, r, http.StatusOK, rest.ContextList{Items: items}, err)
}

// CreateContext implements rest.ServerInterface.
func (a *api) CreateContext(w http.ResponseWriter, r *http.Request, namespace, name string) {
	var given rest.ContextCreate
	_, err := a.readJSON(w, r, server.MaxBody, &given)
	req := guestrpc.CodeCreateRequest{ID: given.Id, Language: string(given.Language), Workdir: given.Cwd, User: given.User, Start: given.Start}
	if err == nil && given.Id != "" {
		err = checkID("id", given.Id)
	}
	if err == nil {
		req.Env, err = environment(given.Env)
	}
	u := a.session(w, r, namespace, name, err)
	if u == nil {
		return
	}
	defer u.Close()
	if scope := u.Scope(); req.Workdir == "" {
		req.Workdir = scope.Workdir
	}
	if scope := u.Scope(); req.User == "" {
		req.User = scope.User
	}
	c, err := u.Agent().CreateContext(r.Context(), req)
	a.answer(w, r, http.StatusCreated, showContext(c), err)
}

func showContext(c guestrpc.CodeContext) rest.Context {
	return rest.Context{
		Id: c.ID, Language: c.Language, Cwd: c.Workdir, User: c.User, Pid: c.PID, Version: text(c.Version),
		Running: c.Running, Queued: int64(c.Queued),
	}
}

// DeleteContext implements rest.ServerInterface.
func (a *api) DeleteContext(w http.ResponseWriter, r *http.Request, namespace, name, id string) {
	a.withExec(w, r, namespace, name, id, func(u *server.Session) error { return u.CloseContext(r.Context(), id) })
}

// RestartContext implements rest.ServerInterface.
func (a *api) RestartContext(w http.ResponseWriter, r *http.Request, namespace, name, id string) {
	a.withExec(w, r, namespace, name, id, func(u *server.Session) error { return u.Agent().RestartContext(r.Context(), id) })
}

// InterruptContext implements rest.ServerInterface.
func (a *api) InterruptContext(w http.ResponseWriter, r *http.Request, namespace, name, id string) {
	a.withExec(w, r, namespace, name, id, func(u *server.Session) error {
		return u.Agent().InterruptCode(r.Context(), guestrpc.CodeInterruptRequest{Context: id})
	})
}
