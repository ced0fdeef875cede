package rest

import (
	"bufio"
	"encoding/json"
	"strings"
	"testing"

	"agentrun.dev/api/rest"
)

// TestCode: state stays, values are apart from output, errors are reported.
func TestCode(t *testing.T) {
	n := newNode(t)
	n.setUp()
	path := n.claim("a") + "/code"
	run := func(req rest.CodeRequest) rest.CodeResult {
		t.Helper()
		return as[rest.CodeResult](n.do("POST", path, req).ok(200))
	}
	if r := run(rest.CodeRequest{Code: "import os\nx = 41\nprint('out')\nx + 1"}); r.Status != rest.CodeStatusOk || r.Result["text/plain"] != "42" || r.Stdout != "out\n" || !r.Fresh || r.Context != "default" || r.Language != "python" {
		t.Errorf("%+v", r)
	}
	if r := run(rest.CodeRequest{Code: "x, os.getcwd(), os.environ['E']", Env: rest.Env{"E": "e"}}); r.Fresh || r.Result["text/plain"] != "(41, '"+n.Workdir+"', 'e')" || r.Count != 2 {
		t.Errorf("%+v", r)
	}
	if r := run(rest.CodeRequest{Code: "1/0"}); r.Status != rest.CodeStatusRaised || r.ExitCode != 1 || r.Error == nil || r.Error.Name != "ZeroDivisionError" || !strings.Contains(r.Error.Traceback, "1/0") {
		t.Errorf("%+v", r)
	}
	if r := run(rest.CodeRequest{Code: "raise SystemExit(5)"}); r.Status != rest.CodeStatusExited || r.ExitCode != 5 {
		t.Errorf("%+v", r)
	}
	if r := run(rest.CodeRequest{Code: "echo hello from sh", Mode: rest.CodeModeText}); r.Stdout != "hello from sh\n" || r.Language != "shell" {
		t.Errorf("%+v", r)
	}
	if r := run(rest.CodeRequest{Code: "print(x)", Mode: rest.CodeModeText}); r.Stdout != "41\n" || r.Language != "python" {
		t.Errorf("%+v", r)
	}
	if r := run(rest.CodeRequest{Code: "while True: pass", Timeout: "50ms"}); !r.TimedOut || r.Status != rest.CodeStatusInterrupted {
		t.Errorf("%+v", r)
	}
	if r := run(rest.CodeRequest{Code: "print('x' * 100)", OutputLimit: ptr(10)}); !r.Truncated || r.Stdout != strings.Repeat("x", 10) {
		t.Errorf("%+v", r)
	}
	if r := run(rest.CodeRequest{Code: "s = '" + strings.Repeat("y", 200_000) + "'\nlen(s)"}); r.Result["text/plain"] != "200000" {
		t.Errorf("%+v", r)
	}
	n.do("POST", path, rest.CodeRequest{Code: "1", Context: "nobody"}).refused(404, "not_found")
	n.do("POST", path, rest.CodeRequest{Code: "1", Language: "cobol"}).refused(400, "invalid")
	n.do("POST", path, rest.CodeRequest{Code: "1", Mode: "guess"}).refused(400, "invalid")
	n.do("POST", path, rest.CodeRequest{Code: "1", Context: "../x"}).refused(400, "invalid")
}

// TestCodeStream: output, values and the end as events, joined again from the
// middle; and interrupts.
func TestCodeStream(t *testing.T) {
	n := newNode(t)
	n.setUp()
	path := n.claim("a") + "/code"
	res := n.do("POST", path, rest.CodeRequest{Code: "print('one')\n2", Id: "x"}, "Accept", formSSE).ok(200)
	var kinds []string
	for _, e := range stream[rest.CodeEvent](res) {
		kinds = append(kinds, string(e.Type))
		if e.Type == rest.CodeEventTypeResult && (e.Value["text/plain"] != "2" || *e.StdoutOffset != 4) {
			t.Errorf("%+v", e)
		}
	}
	if got := strings.Join(kinds, " "); !strings.HasPrefix(got, "started") || !strings.Contains(got, "begun") || !strings.Contains(got, "stdout") || !strings.Contains(got, "result") || !strings.HasSuffix(got, "exit") {
		t.Errorf("%s", got)
	}
	events := stream[rest.CodeEvent](n.do("GET", path+"/executions/x/output?stdout=2&event=-1", nil).ok(200))
	for _, e := range events {
		if e.Type == rest.CodeEventTypeStdout && (e.Data != "e\n" || *e.Offset != 2) || e.Type == rest.CodeEventTypeResult {
			t.Errorf("%+v", e)
		}
	}
	if e := last(t, events); e.Type != rest.CodeEventTypeExit || e.Status != rest.CodeStatusOk || *e.ExitCode != 0 {
		t.Errorf("%+v", e)
	}
	n.do("DELETE", path+"/executions/x", nil).ok(204)
	n.do("GET", path+"/executions/x/output", nil).refused(404, "not_found")
	n.do("GET", path+"/executions/x/output?event=-2", nil).refused(400, "invalid")

	for i, interrupt := range []string{path + "/executions/y0/interrupt", path + "/contexts/default/interrupt"} {
		id := []string{"y0", "y1"}[i]
		x := as[rest.CodeStarted](n.do("POST", path, rest.CodeRequest{Code: "print('go', flush=True)\nwhile True: pass", Id: id, Background: true}).ok(201))
		if x.Id != id || x.Context != "default" {
			t.Errorf("%+v", x)
		}
		r := n.request("GET", path+"/executions/"+id+"/output", nil)
		res, err := n.client.Do(r)
		if err != nil {
			t.Fatal(err)
		}
		var e rest.CodeEvent
		for lines := bufio.NewScanner(res.Body); lines.Scan(); {
			if err := json.Unmarshal(lines.Bytes(), &e); err != nil {
				t.Fatal(err)
			}
			if e.Type == rest.CodeEventTypeStdout {
				n.do("POST", interrupt, nil).ok(204)
			}
		}
		res.Body.Close()
		if e.Type != rest.CodeEventTypeExit || e.Status != rest.CodeStatusInterrupted {
			t.Errorf("%+v", e)
		}
	}
}

func TestContexts(t *testing.T) {
	n := newNode(t)
	n.setUp()
	path := n.claim("a") + "/code"
	c := as[rest.Context](n.do("POST", path+"/contexts", rest.ContextCreate{Id: "mine", Env: rest.Env{"E": "e"}, Start: true}).ok(201))
	if c.Id != "mine" || c.Language != "python" || c.Cwd != n.Workdir || c.Pid == 0 {
		t.Errorf("%+v", c)
	}
	n.do("POST", path+"/contexts", rest.ContextCreate{Id: "mine"}).refused(409, "already_exists")
	n.do("POST", path+"/contexts", rest.ContextCreate{Id: "a/b"}).refused(400, "invalid")
	run := func(code string) rest.CodeResult {
		t.Helper()
		return as[rest.CodeResult](n.do("POST", path, rest.CodeRequest{Code: code, Context: "mine"}).ok(200))
	}
	if r := run("import os\nx = 1\nos.environ['E']"); r.Result["text/plain"] != "'e'" {
		t.Errorf("%+v", r)
	}
	n.do("POST", path+"/contexts/mine/restart", nil).ok(204)
	if r := run("x"); !r.Fresh || r.FreshReason == "" || r.Error == nil || r.Error.Name != "NameError" {
		t.Errorf("%+v", r)
	}
	if l := as[rest.ContextList](n.do("GET", path+"/contexts", nil).ok(200)); len(l.Items) != 1 || l.Items[0].Id != "mine" {
		t.Errorf("%+v", l)
	}
	n.do("DELETE", path+"/contexts/mine", nil).ok(204)
	n.do("DELETE", path+"/contexts/mine", nil).refused(404, "not_found")
	n.do("POST", path+"/contexts/mine/restart", nil).refused(404, "not_found")
	// The default one starts in the working folder, also after it was deleted.
	for range 2 {
		if r := as[rest.CodeResult](n.do("POST", path, rest.CodeRequest{Code: "import os; os.getcwd()"}).ok(200)); r.Result["text/plain"] != "'"+n.Workdir+"'" || !r.Fresh {
			t.Errorf("%+v", r)
		}
		n.do("DELETE", path+"/contexts/default", nil).ok(204)
	}
}
