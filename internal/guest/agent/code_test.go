package agent

import (
	"bytes"
	"errors"
	"io/fs"
	"os"
	"strings"
	"testing"
	"time"

	"agentrun.dev/internal/guest/guestrpc"
)

// codeOutcome is the complete result of an execution.
type codeOutcome struct {
	guestrpc.CodeStatus
	id     string
	stdout string
	stderr string
	events []guestrpc.CodeEvent
}

func runCode(t testing.TB, c *guestrpc.Client, req guestrpc.CodeRunRequest) codeOutcome {
	t.Helper()
	x, err := c.StartCode(rpcContext(t), req)
	if err != nil {
		t.Fatalf("run %.100q: %v", req.Source, err)
	}
	defer x.Close()
	return collect(t, x)
}

func collect(t testing.TB, x *guestrpc.AttachedCode) codeOutcome {
	t.Helper()
	var stdout, stderr bytes.Buffer
	o := codeOutcome{id: x.ID()}
	status, err := x.Copy(&stdout, &stderr, func(e guestrpc.CodeEvent) error {
		o.events = append(o.events, e)
		return nil
	})
	if err != nil {
		t.Fatalf("execution %s: %v", x.ID(), err)
	}
	o.CodeStatus, o.stdout, o.stderr = status, stdout.String(), stderr.String()
	return o
}

func python(t testing.TB, c *guestrpc.Client, source string) codeOutcome {
	t.Helper()
	return runCode(t, c, guestrpc.CodeRunRequest{Source: source})
}

// forms returns the forms of the values in events of a kind.
func (o codeOutcome) forms(t testing.TB, kind guestrpc.CodeEventKind) []map[string]string {
	t.Helper()
	var all []map[string]string
	for _, e := range o.events {
		if e.Kind != kind {
			continue
		}
		r, err := e.Result()
		if err != nil {
			t.Fatal(err)
		}
		m := map[string]string{}
		for _, item := range r.Items {
			m[item.MIME] = string(item.Data)
		}
		all = append(all, m)
	}
	return all
}

// result is the plain form of the last value; empty if there was none.
func (o codeOutcome) result(t testing.TB) string {
	t.Helper()
	for _, m := range o.forms(t, guestrpc.CodeEventResult) {
		return m["text/plain"]
	}
	return ""
}

func (o codeOutcome) failure(t testing.TB) guestrpc.CodeError {
	t.Helper()
	for _, e := range o.events {
		if e.Kind == guestrpc.CodeEventError {
			f, err := e.Error()
			if err != nil {
				t.Fatal(err)
			}
			return f
		}
	}
	return guestrpc.CodeError{}
}

func wantOK(t testing.TB, o codeOutcome) {
	t.Helper()
	if o.State != guestrpc.CodeOK || o.Code != 0 {
		t.Fatalf("%+v\nstderr %q\n%s", o.CodeStatus, o.stderr, o.failure(t).Traceback)
	}
}

func TestCodeKeepsState(t *testing.T) {
	c := startClient(t)
	o := python(t, c, "x = 20\nprint('hi')\nimport sys\nprint('low', file=sys.stderr)\nx + 1")
	wantOK(t, o)
	if o.stdout != "hi\n" || o.stderr != "low\n" || o.result(t) != "21" || !o.Fresh || o.FreshReason != "" || o.Count != 1 || o.Language != "python" {
		t.Errorf("%+v, result %q", o, o.result(t))
	}
	begun, err := o.events[0].Begun()
	if err != nil || !begun.Fresh || begun.PID <= 0 {
		t.Errorf("begun %+v, %v", begun, err)
	}
	o = python(t, c, "x += 1\nx")
	wantOK(t, o)
	if o.result(t) != "21" || o.Fresh || o.Count != 2 {
		t.Errorf("%+v, result %q", o.CodeStatus, o.result(t))
	}
	// Only a last expression is a result, and not one behind a semicolon.
	for _, source := range []string{"5;", "5\ny = 1", "None", "", "# only a comment", "def f(): pass", "(1,\n2);"} {
		if o := python(t, c, source); o.State != guestrpc.CodeOK || o.result(t) != "" {
			t.Errorf("%q: result %q, %+v", source, o.result(t), o.CodeStatus)
		}
	}
	if o := python(t, c, "'last';'é'"); o.result(t) != "'é'" {
		t.Errorf("result %q", o.result(t))
	}
	list, err := c.ListContexts(rpcContext(t))
	if err != nil || len(list) != 1 || list[0].ID != "default" || list[0].Language != "python" || list[0].PID != begun.PID || !strings.HasPrefix(list[0].Version, "3.") {
		t.Errorf("contexts %+v, %v", list, err)
	}
}

func TestCodeMainIsTheUsers(t *testing.T) {
	c := startClient(t)
	o := python(t, c, `import __main__, pickle, sys
class Point:
    def __init__(self, x): self.x = x
p = pickle.loads(pickle.dumps(Point(4)))
sorted(n for n in vars(__main__) if not n.startswith('__')), __name__, sys.argv, p.x`)
	wantOK(t, o)
	if want := "(['Point', 'display', 'p', 'pickle', 'sys'], '__main__', [''], 4)"; o.result(t) != want {
		t.Errorf("%s, want %s", o.result(t), want)
	}
}

func TestCodeFilesDoNotReplaceModules(t *testing.T) {
	c := startClient(t)
	dir := openDir(t)
	for _, name := range []string{"ast", "random", "traceback", "symtable", "signal"} {
		writeTestFile(t, dir+"/"+name+".py", "raise Exception('the user wrote "+name+"')\n", 0o644)
	}
	writeTestFile(t, dir+"/mine.py", "value = 7\n", 0o644)
	if _, err := c.CreateContext(rpcContext(t), guestrpc.CodeCreateRequest{ID: "default", Workdir: dir, Start: true}); err != nil {
		t.Fatal(err)
	}
	o := python(t, c, "import mine, os\nmine.value, os.getcwd()")
	wantOK(t, o)
	if want := "(7, '" + dir + "')"; o.result(t) != want {
		t.Errorf("%s, want %s", o.result(t), want)
	}
}

func TestCodeCapturesEverything(t *testing.T) {
	c := startClient(t)
	o := python(t, c, `import os, subprocess, sys, threading
os.write(1, b'fd\n')
os.system('echo child; echo child err >&2')
subprocess.run(['echo', 'grandchild'])
t = threading.Thread(target=lambda: print('thread')); t.start(); t.join()
print('no newline', end='')`)
	wantOK(t, o)
	if want := "fd\nchild\ngrandchild\nthread\nno newline"; o.stdout != want || o.stderr != "child err\n" {
		t.Errorf("stdout %q, stderr %q", o.stdout, o.stderr)
	}
	// The child leaves nothing for the next cell: a child of fork ends with its cell.
	o = python(t, c, "import os\npid = os.fork()\nif pid == 0:\n    print('child')\nelse:\n    print(os.WEXITSTATUS(os.waitpid(pid, 0)[1]))")
	wantOK(t, o)
	if o.stdout != "child\n0\n" {
		t.Errorf("stdout %q", o.stdout)
	}
	if o := python(t, c, "1"); o.stdout != "" || o.result(t) != "1" {
		t.Errorf("%+v", o)
	}
}

func TestCodeEventsTellWhereTheyCame(t *testing.T) {
	c := startClient(t)
	o := python(t, c, "import sys\nprint('one')\ndisplay(1)\nprint('three'); print('e', file=sys.stderr)\ndisplay(2, 3)\nprint('x')\n4")
	wantOK(t, o)
	type place struct{ out, err int64 }
	var got []place
	for i, e := range o.events {
		if e.Seq != uint64(i) {
			t.Errorf("event %d has number %d", i, e.Seq)
		}
		got = append(got, place{e.Stdout, e.Stderr})
	}
	want := []place{{0, 0}, {4, 0}, {10, 2}, {10, 2}, {12, 2}}
	if len(got) != len(want) {
		t.Fatalf("%+v", got)
	}
	for i := range want {
		if got[i] != want[i] {
			t.Errorf("event %d came at %+v, want %+v", i, got[i], want[i])
		}
	}
	if o.Events.Bytes != 5 || o.Stdout.Bytes != 12 {
		t.Errorf("%+v", o.CodeStatus)
	}
}

func TestCodeRichResults(t *testing.T) {
	c := startClient(t)
	o := python(t, c, `class Rich:
    def __repr__(self): return 'plain'
    def _repr_html_(self): return '<b>'
    def _repr_png_(self): return b'\x89PNG'
    def _repr_jpeg_(self): return 'anBlZw=='
    def _repr_svg_(self): return '<svg/>'
    def _repr_markdown_(self): return '*m*', {'some': 'metadata'}
    def _repr_latex_(self): return None
    def _repr_json_(self): return {'a': [1]}
    def _repr_mimebundle_(self, include=None, exclude=None): return {'application/x': {'b': 2}, 'text/html': '<i>'}
Rich()`)
	wantOK(t, o)
	want := map[string]string{
		"text/plain": "plain", "text/html": "<i>", "image/png": "\x89PNG", "image/jpeg": "jpeg", "image/svg+xml": "<svg/>",
		"text/markdown": "*m*", "application/json": `{"a": [1]}`, "application/x": `{"b": 2}`,
	}
	got := o.forms(t, guestrpc.CodeEventResult)[0]
	for mime, data := range want {
		if got[mime] != data {
			t.Errorf("%s: %q, want %q", mime, got[mime], data)
		}
	}
	if len(got) != len(want) {
		t.Errorf("%q", got)
	}
	// A class is not an instance. An object that answers to every name has no forms.
	// A form that fails does not affect the others.
	o = python(t, c, `class Any:
    def __getattr__(self, name): return lambda *a, **k: 'everything'
    def __repr__(self): return 'any'
class Half(Rich):
    def _repr_html_(self): raise ValueError('no')
    def _repr_mimebundle_(self, **k): return None
display(Rich, Any(), Half())`)
	wantOK(t, o)
	shown := o.forms(t, guestrpc.CodeEventDisplay)
	if len(shown) != 3 || len(shown[0]) != 1 || len(shown[1]) != 1 || shown[2]["image/png"] == "" || shown[2]["text/html"] != "" {
		t.Errorf("%q", shown)
	}
	if !strings.Contains(o.stderr, "_repr_html_ of Half failed: ValueError: no") {
		t.Errorf("stderr %q", o.stderr)
	}
}

func TestCodeFigures(t *testing.T) {
	c := startClient(t)
	o := python(t, c, `import sys
before = 'matplotlib' in sys.modules
import matplotlib.pyplot as plt
plt.plot([1, 2]); plt.show()
plt.plot([2, 1]);
before, plt.get_fignums()`)
	wantOK(t, o)
	shown := o.forms(t, guestrpc.CodeEventDisplay)
	if len(shown) != 2 || o.result(t) != "(False, [1])" || o.stderr != "" {
		t.Fatalf("%d figures, result %q, stderr %q", len(shown), o.result(t), o.stderr)
	}
	for _, m := range shown {
		if !strings.HasPrefix(m["image/png"], "\x89PNG\r\n\x1a\n") || !strings.HasPrefix(m["text/plain"], "<Figure") {
			t.Errorf("%.100q", m)
		}
	}
	if o := python(t, c, "plt.get_fignums()"); o.result(t) != "[]" || len(o.events) != 2 {
		t.Errorf("shown again: %q, %d events", o.result(t), len(o.events))
	}
}

func TestCodeErrors(t *testing.T) {
	c := startClient(t)
	o := python(t, c, "def outer():\n    inner()\ndef inner():\n    1/0\nprint('before')\nouter()")
	f := o.failure(t)
	if o.State != guestrpc.CodeRaised || o.Code != 1 || o.stdout != "before\n" || o.stderr != "" || f.Name != "ZeroDivisionError" || f.Value != "division by zero" {
		t.Errorf("%+v, %+v", o, f)
	}
	for _, part := range []string{"line 6, in <module>\n    outer()", "line 2, in outer\n    inner()", "line 4, in inner\n    1/0"} {
		if !strings.Contains(f.Traceback, part) {
			t.Errorf("the traceback lacks %q:\n%s", part, f.Traceback)
		}
	}
	for _, source := range []string{
		"1/0", "x = (", "import nosuchmodule", "input()", "display(undefined)", "raise ValueError from KeyError('k')",
		"try:\n    1/0\nexcept Exception:\n    undefined", "await broken", "class Bad:\n    def __repr__(self): raise ValueError('in repr')\nBad()",
		"async def f(): raise KeyError(1)\nawait f()",
	} {
		o := python(t, c, source)
		f := o.failure(t)
		if o.State != guestrpc.CodeRaised || o.Code != 1 || f.Name == "" {
			t.Errorf("%q: %+v, %+v", source, o.CodeStatus, f)
		}
		for _, ours := range []string{"<agentrun>", "<string>", "asyncio/"} {
			if strings.Contains(f.Traceback, ours) {
				t.Errorf("%q: a frame that is not the user's:\n%s", source, f.Traceback)
			}
		}
	}
	if f := python(t, c, "input('name? ')").failure(t); f.Name != "EOFError" || !strings.Contains(f.Value, "nobody to ask") {
		t.Errorf("input: %+v", f)
	}
	// Earlier cells are remembered for the tracebacks of later ones.
	if f := python(t, c, "outer()").failure(t); !strings.Contains(f.Traceback, "line 4, in inner\n    1/0") {
		t.Errorf("traceback:\n%s", f.Traceback)
	}
	for source, code := range map[string]int32{
		"import sys\nsys.exit(3)": 3, "raise SystemExit": 0, "exit(257)": 1, "import sys; sys.exit('message')": 1, "raise SystemExit(-1)": 255,
	} {
		if o := python(t, c, source); o.State != guestrpc.CodeExited || o.Code != code || len(o.events) != 1 {
			t.Errorf("%q: %+v", source, o)
		}
	}
	if o := python(t, c, "import sys; sys.exit('message')"); o.stderr != "message\n" {
		t.Errorf("stderr %q", o.stderr)
	}
	o = python(t, c, "import threading\nt = threading.Thread(target=exit); t.start(); t.join(); 'alive'")
	if wantOK(t, o); o.result(t) != "'alive'" || o.stderr != "" || o.Fresh {
		t.Errorf("%+v", o)
	}
}

func TestCodeAwait(t *testing.T) {
	c := startClient(t)
	o := python(t, c, "import asyncio\nasync def f(n):\n    await asyncio.sleep(0)\n    return n\nx = await f(2)\ntask = asyncio.ensure_future(f(5))\nawait f(x * 3)")
	if wantOK(t, o); o.result(t) != "6" {
		t.Errorf("result %q", o.result(t))
	}
	if o := python(t, c, "await task, [x async for x in (lambda: (i async for i in agen()))()] if False else 0"); o.result(t) != "(5, 0)" {
		t.Errorf("result %q, %+v", o.result(t), o.failure(t))
	}
	if o := python(t, c, "asyncio.run(f(8))"); o.result(t) != "8" {
		t.Errorf("result %q, %+v", o.result(t), o.failure(t))
	}
}

func TestCodeInterrupt(t *testing.T) {
	c := startClient(t)
	for _, source := range []string{
		"print('go')\nwhile True: pass",
		"import time\nprint('go')\ntime.sleep(600)",
		"import subprocess\nsubprocess.run(['sh', '-c', 'echo go; sleep 600'])",
		"class Slow:\n    def __repr__(self):\n        print('go')\n        while True: pass\nSlow()",
		"import asyncio\nprint('go')\nawait asyncio.sleep(600)",
		"import threading\nprint('go')\nthreading.Event().wait()",
		"while True:\n    try:\n        print('go')\n        while True: pass\n    except KeyboardInterrupt:\n        break\nraise KeyboardInterrupt",
	} {
		x, err := c.StartCode(rpcContext(t), guestrpc.CodeRunRequest{Source: source})
		if err != nil {
			t.Fatal(err)
		}
		var line [3]byte
		if _, err := x.Stdout().Read(line[:]); err != nil || string(line[:2]) != "go" {
			t.Fatalf("%q: %q, %v", source, line, err)
		}
		if err := c.InterruptCode(rpcContext(t), guestrpc.CodeInterruptRequest{ID: x.ID()}); err != nil {
			t.Fatal(err)
		}
		o := collect(t, x)
		if f := o.failure(t); o.State != guestrpc.CodeInterrupted || o.Code != 130 || f.Name != "KeyboardInterrupt" || strings.Contains(f.Traceback, "<agentrun>") {
			t.Errorf("%q: %+v, %+v", source, o.CodeStatus, f)
		}
	}
	// The interpreter has survived all of it, and an interrupt does not harm an idle
	// one.
	if o := python(t, c, "1"); o.Fresh {
		t.Errorf("%+v", o.CodeStatus)
	}
	if err := c.InterruptCode(rpcContext(t), guestrpc.CodeInterruptRequest{}); code(err) != guestrpc.CodeFailedPrecondition {
		t.Errorf("interrupt of nothing: %v", err)
	}
	if err := c.InterruptCode(rpcContext(t), guestrpc.CodeInterruptRequest{ID: "nosuch"}); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("interrupt of nobody: %v", err)
	}
}

// TestCodeInterruptAtOnce: an interrupt is never lost and never hits another
// execution, whenever it comes.
func TestCodeInterruptAtOnce(t *testing.T) {
	c := startClient(t)
	python(t, c, "1")
	for range 30 {
		x, err := c.StartCode(rpcContext(t), guestrpc.CodeRunRequest{Source: "while True: pass"})
		if err != nil {
			t.Fatal(err)
		}
		if err := c.InterruptCode(rpcContext(t), guestrpc.CodeInterruptRequest{ID: x.ID()}); err != nil {
			t.Fatal(err)
		}
		if o := collect(t, x); o.State != guestrpc.CodeInterrupted && o.State != guestrpc.CodeCancelled {
			t.Fatalf("%+v", o.CodeStatus)
		}
		x, err = c.StartCode(rpcContext(t), guestrpc.CodeRunRequest{Source: "7"})
		if err != nil {
			t.Fatal(err)
		}
		err = c.InterruptCode(rpcContext(t), guestrpc.CodeInterruptRequest{ID: x.ID()})
		if err != nil && code(err) != guestrpc.CodeFailedPrecondition {
			t.Fatal(err)
		}
		collect(t, x)
		if o := python(t, c, "7"); o.State != guestrpc.CodeOK || o.result(t) != "7" || o.Fresh {
			t.Fatalf("%+v", o)
		}
	}
}

func TestCodeTimeout(t *testing.T) {
	c := startClient(t)
	python(t, c, "kept = 1")
	o := runCode(t, c, guestrpc.CodeRunRequest{Source: "while True: pass", Timeout: 200 * time.Millisecond})
	if o.State != guestrpc.CodeInterrupted || !o.TimedOut || o.Code != 130 {
		t.Errorf("%+v", o.CodeStatus)
	}
	if o := python(t, c, "kept"); o.result(t) != "1" || o.Fresh {
		t.Errorf("%+v", o.CodeStatus)
	}
	o = runCode(t, c, guestrpc.CodeRunRequest{Source: "import time\nwhile True:\n    try:\n        time.sleep(600)\n    except BaseException: pass", Timeout: 200 * time.Millisecond})
	if o.State != guestrpc.CodeDied || !o.TimedOut || o.Code != 137 || !strings.Contains(o.Reason, "did not heed") {
		t.Errorf("%+v", o.CodeStatus)
	}
	o = python(t, c, "'kept' in globals()")
	if wantOK(t, o); o.result(t) != "False" || !o.Fresh || !strings.Contains(o.FreshReason, "SIGKILL") {
		t.Errorf("%+v", o.CodeStatus)
	}
}

func TestCodeInterpreterDies(t *testing.T) {
	c := startClient(t)
	for source, want := range map[string]string{
		"import os\nprint('last words')\nos._exit(3)":                                                                         "exited with code 3",
		"import os, signal\nprint('last words')\nos.kill(os.getpid(), 9)":                                                     "SIGKILL",
		"import ctypes\nprint('last words')\nctypes.string_at(0)":                                                             "SIGSEGV",
		"import os\nprint('last words')\nos.closerange(3, 1000)":                                                              "kernel",
		"import os\nprint('last words')\nfor fd in range(3, 1000):\n  try: os.write(fd, b'\\0' * 99)\n  except OSError: pass": "kernel",
	} {
		o := python(t, c, source)
		if o.State != guestrpc.CodeDied || !strings.Contains(o.Reason, want) || !strings.HasPrefix(o.stdout, "last words\n") {
			t.Errorf("%q: %+v, stdout %q", source, o.CodeStatus, o.stdout)
		}
		o = python(t, c, "6 * 7")
		if wantOK(t, o); !o.Fresh || o.FreshReason == "" || o.result(t) != "42" || o.Count != 1 {
			t.Errorf("after %q: %+v", source, o.CodeStatus)
		}
	}
	// An interpreter that dies between two executions.
	python(t, c, "import os, threading\nthreading.Timer(0, lambda: os._exit(5)).start()\nthreading.Event().wait(0)")
	for {
		o := python(t, c, "1")
		if wantOK(t, o); o.Fresh {
			if !strings.Contains(o.FreshReason, "exited with code 5") {
				t.Errorf("%+v", o.CodeStatus)
			}
			break
		}
	}
}

func BenchmarkCode(b *testing.B) {
	c := startClient(b)
	python(b, c, "1")
	for b.Loop() {
		python(b, c, "1 + 1")
	}
}

func TestCodeEnvironment(t *testing.T) {
	c := startClient(t)
	ctx := rpcContext(t)
	if err := c.SetEnv(ctx, guestrpc.SetEnvRequest{Env: []string{"BASE=1", "GONE=1", "KEPT=1"}}); err != nil {
		t.Fatal(err)
	}
	if _, err := c.CreateContext(ctx, guestrpc.CodeCreateRequest{ID: "default", Env: []string{"OWN=own"}, Start: true}); err != nil {
		t.Fatal(err)
	}
	show := "import os\n[os.environ.get(n) for n in ('BASE', 'GONE', 'KEPT', 'OWN', 'NEW', 'PATH', 'ONCE')], os.popen('echo $NEW $ONCE').read()"
	if o := python(t, c, show); o.result(t) != "(['1', '1', '1', 'own', None, '"+DefaultPath+"', None], '\\n')" {
		t.Errorf("%s", o.result(t))
	}
	// A claim's environment reaches a running interpreter. Variables that the user
	// has set stay.
	python(t, c, "os.environ['KEPT'] = 'by user'")
	if err := c.SetEnv(ctx, guestrpc.SetEnvRequest{Env: []string{"BASE=2", "KEPT=1", "OWN=base", "NEW=n"}}); err != nil {
		t.Fatal(err)
	}
	if o := python(t, c, show); o.result(t) != "(['2', None, 'by user', 'own', 'n', '"+DefaultPath+"', None], 'n\\n')" {
		t.Errorf("%s", o.result(t))
	}
	o := runCode(t, c, guestrpc.CodeRunRequest{Source: "os.environ['SET'] = 'stays'\n" + show, Env: []string{"ONCE=o", "BASE=3"}})
	if o.result(t) != "(['3', None, 'by user', 'own', 'n', '"+DefaultPath+"', 'o'], 'n o\\n')" {
		t.Errorf("%s", o.result(t))
	}
	if o := python(t, c, "os.environ.get('ONCE'), os.environ['BASE'], os.environ['SET']"); o.result(t) != "(None, '2', 'stays')" {
		t.Errorf("%s", o.result(t))
	}
	if err := c.SetEnv(ctx, guestrpc.SetEnvRequest{Env: []string{"=x"}}); !errors.Is(err, fs.ErrInvalid) {
		t.Errorf("%v", err)
	}
	if _, err := c.StartCode(ctx, guestrpc.CodeRunRequest{Env: []string{"bad"}}); !errors.Is(err, fs.ErrInvalid) {
		t.Errorf("%v", err)
	}
}

func TestCodeRunsAsAUser(t *testing.T) {
	if os.Getuid() != 0 {
		t.Fatal("run as root")
	}
	c := startClient(t)
	dir := openDir(t)
	info, err := c.CreateContext(rpcContext(t), guestrpc.CodeCreateRequest{User: "1234:1234", Workdir: dir})
	if err != nil || info.ID == "" || info.PID != 0 {
		t.Fatalf("%+v, %v", info, err)
	}
	o := runCode(t, c, guestrpc.CodeRunRequest{Context: info.ID, Source: "import os\nopen('f', 'w').close()\nopen('/dev/stdout', 'w').write('hello')\nos.getuid(), os.getgid(), os.getcwd(), os.stat('f').st_uid"})
	if wantOK(t, o); o.result(t) != "(1234, 1234, '"+dir+"', 1234)" || o.stdout != "hello" {
		t.Errorf("%s, stdout %q", o.result(t), o.stdout)
	}
}
