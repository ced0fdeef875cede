package rest

import (
	"bytes"
	"errors"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"agentrun.dev/api/rest"
	"agentrun.dev/internal/client"
	"agentrun.dev/internal/node/managertest"
)

func (n *testNode) newClient() *client.Client {
	n.t.Helper()
	c, err := client.New(client.Config{Socket: n.socket})
	if err != nil {
		n.t.Fatal(err)
	}
	n.t.Cleanup(c.Close)
	return c
}

// TestClientObjects: the Go client against the server.
func TestClientObjects(t *testing.T) {
	n := newNode(t)
	c, ctx := n.newClient(), t.Context()
	if v := managertest.Must(c.Version(ctx))(t); v.Version != "test" {
		t.Errorf("%+v", v)
	}
	managertest.Must(c.PutTemplate(ctx, "python", rest.TemplateSpec{Image: "x"}))(t)
	var log bytes.Buffer
	if err := c.TemplateLog(ctx, "python", rest.GetTemplateLogParams{Follow: new(true)}, &log); err != nil || log.String() != "building\n" {
		t.Errorf("%q, %v", log.String(), err)
	}
	managertest.Must(c.PutPool(ctx, "pool", rest.PoolSpec{Template: "python", Replicas: 1}))(t)
	n.Eventually(func() bool { return managertest.Must(c.Pool(ctx, "pool"))(t).Ready == 1 })
	s := managertest.Must(c.CreateSandbox(ctx, rest.SandboxCreate{Pool: "pool"}, "k"))(t)
	if again := managertest.Must(c.CreateSandbox(ctx, rest.SandboxCreate{Pool: "pool"}, "k"))(t); again.Id != s.Id {
		t.Errorf("%s and %s", again.Id, s.Id)
	}
	for _, step := range []struct {
		verb client.Verb
		want rest.SandboxState
	}{{client.Pause, rest.SandboxStatePaused}, {client.Resume, rest.SandboxStateRunning}, {client.Hibernate, rest.SandboxStateHibernated}} {
		if s := managertest.Must(c.Do(ctx, s.Name, step.verb))(t); s.State != step.want {
			t.Errorf("%s: %s", step.verb, s.State)
		}
	}
	managertest.Must(c.Extend(ctx, s.Name, "1h"))(t)
	f := managertest.Must(c.Fork(ctx, s.Name, rest.ForkCreate{Name: "f", Replicas: 130}, ""))(t)
	if l := managertest.Must(c.Sandboxes(ctx, false))(t); len(l) != 131 { // more than a page
		t.Errorf("%d sandboxes", len(l))
	}
	if got := managertest.Must(c.ForkOf(ctx, "f"))(t); got.SourceID != f.SourceID || len(managertest.Must(c.Forks(ctx))(t)) != 1 {
		t.Errorf("%+v", got)
	}
	if err := c.DeleteFork(ctx, "f"); err != nil {
		t.Error(err)
	}
	managertest.Must(c.Kill(ctx, s.Name))(t)
	_, err := c.Sandbox(ctx, s.Name)
	var own *client.Error
	if !client.HasCode(err, rest.ErrorCodeEnded) || !errors.As(err, &own) || own.Status != 410 || own.RequestID == "" || !strings.Contains(err.Error(), s.Name) {
		t.Errorf("%v", err)
	}
	if len(managertest.Must(c.Templates(ctx))(t)) != 1 || len(managertest.Must(c.Pools(ctx))(t)) != 1 {
		t.Error("lists")
	}
	managertest.Must(c.Template(ctx, "python"))(t)
	if err := errors.Join(c.DeletePool(ctx, "pool"), c.DeleteTemplate(ctx, "python")); err != nil {
		t.Error(err)
	}
	// A name cannot become another path.
	if _, err := c.Sandbox(ctx, "../../version"); !client.HasCode(err, rest.ErrorCodeInvalid) {
		t.Errorf("%v", err)
	}
}

func TestClientInside(t *testing.T) {
	n := newNode(t)
	n.setUp()
	n.claim("a")
	c, ctx := n.newClient(), t.Context()
	if r := managertest.Must(c.Run(ctx, "a", rest.ExecRequest{Shell: "echo hi"}))(t); r.Stdout != "hi\n" {
		t.Errorf("%+v", r)
	}
	var out, errs bytes.Buffer
	exit := managertest.Must(c.Stream(ctx, "a", rest.ExecRequest{Shell: `printf '\377x'; echo e >&2; exit 3`}, client.Output{Stdout: &out, Stderr: &errs}))(t)
	if out.String() != "\xffx" || errs.String() != "e\n" || *exit.ExitCode != 3 {
		t.Errorf("%q, %q, %+v", out.String(), errs.String(), exit)
	}
	x := managertest.Must(c.Start(ctx, "a", rest.ExecRequest{Argv: []string{"cat"}, OpenStdin: true, Tty: true}))(t)
	if err := c.Resize(ctx, "a", x.Id, 10, 20); err != nil {
		t.Error(err)
	}
	if err := c.WriteStdin(ctx, "a", x.Id, strings.NewReader("line\n"), false); err != nil {
		t.Error(err)
	}
	if err := c.Signal(ctx, "a", x.Id, rest.Signal{Signal: "KILL"}); err != nil {
		t.Error(err)
	}
	if exit := managertest.Must(c.Attach(ctx, "a", x.Id, 0, 0, client.Output{}))(t); exit.Signal != "SIGKILL" {
		t.Errorf("%+v", exit)
	}
	if l := managertest.Must(c.Execs(ctx, "a"))(t); len(l) != 3 {
		t.Errorf("%+v", l)
	}
	if r := managertest.Must(c.RunCode(ctx, "a", rest.CodeRequest{Code: "6*7"}))(t); r.Result["text/plain"] != "42" {
		t.Errorf("%+v", r)
	}
	out.Reset()
	var result string
	end := managertest.Must(c.StreamCode(ctx, "a", rest.CodeRequest{Code: "print(1)\n2"}, client.Output{Stdout: &out}, func(e rest.CodeEvent) error {
		if e.Type == rest.CodeEventTypeResult {
			result = e.Value["text/plain"]
		}
		return nil
	}))(t)
	if out.String() != "1\n" || result != "2" || end.Status != rest.CodeStatusOk {
		t.Errorf("%q, %q, %+v", out.String(), result, end)
	}
	if err := c.InterruptCode(ctx, "a", "none"); !client.HasCode(err, rest.ErrorCodeNotFound) {
		t.Errorf("%v", err)
	}
	managertest.Must(c.WriteFile(ctx, "a", "d/f", "600", strings.NewReader("text")))(t)
	out.Reset()
	if err := c.ReadFile(ctx, "a", "d/f", &out); err != nil || out.String() != "text" {
		t.Errorf("%q, %v", out.String(), err)
	}
	if i := managertest.Must(c.Stat(ctx, "a", "d/f"))(t); i.Mode != "0600" {
		t.Errorf("%+v", i)
	}
	if err := errors.Join(c.MakeFolder(ctx, "a", "e", ""), c.MoveFile(ctx, "a", rest.MoveFile{From: "d/f", To: "e/f"})); err != nil {
		t.Error(err)
	}
	if l := managertest.Must(c.ListFiles(ctx, "a", "e", 1))(t); len(l) != 1 || filepath.Base(l[0].Path) != "f" {
		t.Errorf("%+v", l)
	}
	var kinds []string
	err := c.Watch(ctx, "a", "e", false, func(e rest.WatchEvent) error {
		kinds = append(kinds, string(e.Type))
		if e.Type == rest.WatchEventTypeWatching {
			return c.RemoveFile(ctx, "a", "e", true)
		}
		return nil
	})
	if err != nil || kinds[len(kinds)-1] != "gone" {
		t.Errorf("%v, %v", kinds, err)
	}
}

// TestClientCutOff: a stream without its end is an error, and so is an answer
// that is not our server's.
func TestClientCutOff(t *testing.T) {
	answer := `{"type":"stdout","offset":0,"data":"x","encoding":"utf-8"}` + "\n"
	status := 200
	srv := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.Header.Get("Authorization") != "Bearer t" {
			t.Error("no token")
		}
		w.WriteHeader(status)
		_, _ = w.Write([]byte(answer))
	}))
	defer srv.Close()
	c, err := client.New(client.Config{URL: srv.URL + "/", Key: "t", Namespace: "other"})
	if err != nil {
		t.Fatal(err)
	}
	if _, err := c.Stream(t.Context(), "a", rest.ExecRequest{}, client.Output{}); !errors.Is(err, client.ErrCutOff) {
		t.Errorf("%v", err)
	}
	status, answer = 502, "<html>"
	if _, err := c.Version(t.Context()); err == nil || !strings.Contains(err.Error(), "502") {
		t.Errorf("%v", err)
	}
	for _, bad := range []client.Config{{}, {URL: "ftp://x"}, {URL: "x"}, {URL: "http://x", Socket: os.DevNull}} {
		if _, err := client.New(bad); err == nil {
			t.Errorf("%+v was taken", bad)
		}
	}
}
