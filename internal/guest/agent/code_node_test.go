package agent

import (
	"io"
	"strings"
	"testing"
	"time"

	"agentrun.dev/internal/guest/guestrpc"
)

func inNode(t testing.TB, c *guestrpc.Client, source string) codeOutcome {
	t.Helper()
	return runCode(t, c, guestrpc.CodeRunRequest{Language: "node", Source: source, Timeout: 30 * time.Second})
}

func TestNodeInterpreter(t *testing.T) {
	r, _ := newTestRenewer(t)
	c, _ := dialServer(t, serve(t, &Server{Renewer: r}))
	for _, tt := range []struct {
		source, stdout, stderr, result string
	}{
		{"const x = 20; let f = (n) => n + 1; console.log('hi'); console.error('low'); f(x)", "hi\n", "low\n", "21"},
		{"x * 2", "", "", "40"},
		{"var v = 3; class A {}", "", "", ""},
		{"v", "", "", "3"},
		{"await Promise.resolve(7)", "", "", "7"},
		{"const y = await new Promise(r => setTimeout(r, 5, 'later'))", "", "", ""},
		{"y", "", "", "'later'"},
		{"require('child_process').execSync('echo child', {stdio: 'inherit'}); undefined", "child\n", "", ""},
		{"({a: [1, {b: 2}]})", "", "", "{ a: [ 1, { b: 2 } ] }"},
		{"os.platform(), path.join('a', 'b')", "", "", "'a/b'"},
		{"", "", "", ""},
		{"Promise.reject(new Error('nobody')); await new Promise(r => setTimeout(r, 5)); 1", "", "Uncaught Error: nobody", "1"},
	} {
		o := inNode(t, c, tt.source)
		if o.State != guestrpc.CodeOK || o.stdout != tt.stdout || !strings.HasPrefix(o.stderr, tt.stderr) || tt.stderr == "" && o.stderr != "" || o.result(t) != tt.result {
			t.Errorf("%q: %+v, stdout %q, stderr %q, result %q, %+v", tt.source, o.CodeStatus, o.stdout, o.stderr, o.result(t), o.failure(t))
		}
	}
	o := inNode(t, c, "display(1); display({[Symbol.for('Jupyter.display')]: () => ({'text/html': '<b>', 'application/json': {a: 1}})})")
	if shown := o.forms(t, guestrpc.CodeEventDisplay); len(shown) != 2 || shown[0]["text/plain"] != "1" || shown[1]["text/html"] != "<b>" || shown[1]["application/json"] != `{"a":1}` {
		t.Errorf("%q", shown)
	}
	for source, name := range map[string]string{
		"function g() { throw new TypeError('no') }\ng()": "TypeError", "throw 5": "number", "v = (": "SyntaxError", "const x = 4": "SyntaxError", "nosuch": "ReferenceError",
		"await Promise.reject(new RangeError('r'))": "RangeError",
	} {
		o := inNode(t, c, source)
		if f := o.failure(t); o.State != guestrpc.CodeRaised || o.Code != 1 || f.Name != name || strings.Contains(f.Traceback, "node:") || strings.Contains(f.Traceback, "<agentrun>") {
			t.Errorf("%q: %+v, %+v", source, o.CodeStatus, f)
		}
	}
	for source, code := range map[string]int32{"process.exit(3)": 3, "process.exit()": 0, "setTimeout(() => process.exit(4)); await new Promise(() => {})": 4} {
		if o := inNode(t, c, source); o.State != guestrpc.CodeExited || o.Code != code {
			t.Errorf("%q: %+v, %+v", source, o.CodeStatus, o.failure(t))
		}
	}
	for _, source := range []string{"console.log('go'); while (true) {}", "setTimeout(console.log, 50, 'go'); await new Promise(r => setTimeout(r, 600000))"} {
		x, err := c.StartCode(rpcContext(t), guestrpc.CodeRunRequest{Language: "node", Source: source, Timeout: 30 * time.Second})
		if err != nil {
			t.Fatal(err)
		}
		if _, err := io.ReadFull(x.Stdout(), make([]byte, 3)); err != nil {
			t.Fatal(err)
		}
		if err := c.InterruptCode(rpcContext(t), guestrpc.CodeInterruptRequest{ID: x.ID()}); err != nil {
			t.Fatal(err)
		}
		if o := collect(t, x); o.State != guestrpc.CodeInterrupted || o.Code != 130 || o.TimedOut {
			t.Errorf("%q: %+v, %+v", source, o.CodeStatus, o.failure(t))
		}
	}
	if o := inNode(t, c, "x"); o.result(t) != "20" || o.Fresh {
		t.Errorf("%+v", o.CodeStatus)
	}
	if err := c.SetEnv(rpcContext(t), guestrpc.SetEnvRequest{Env: []string{"CLAIM=it"}}); err != nil {
		t.Fatal(err)
	}
	if o := inNode(t, c, "process.env.CLAIM"); o.result(t) != "'it'" {
		t.Errorf("%s", o.result(t))
	}
	inNode(t, c, "const original = Math.random")
	if _, err := c.Renew(rpcContext(t), *renewal(1)); err != nil {
		t.Fatal(err)
	}
	o = inNode(t, c, "const draws = Array.from({length: 1000}, Math.random); [Math.random === original, draws.every(v => v >= 0 && v < 1), new Set(draws).size, Math.abs(draws.reduce((a, b) => a + b) / 1000 - 0.5) < 0.1]")
	if o.result(t) != "[ false, true, 1000, true ]" {
		t.Errorf("%s", o.result(t))
	}
	if o := inNode(t, c, "process.kill(process.pid, 'SIGKILL'); while (true) {}"); o.State != guestrpc.CodeDied {
		t.Errorf("%+v", o.CodeStatus)
	}
	if o := inNode(t, c, "1 + 1"); o.result(t) != "2" || !o.Fresh {
		t.Errorf("%+v", o.CodeStatus)
	}
}
