package agent

import (
	"errors"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"agentrun.dev/internal/guest/guestrpc"
)

// TestCodeHostile: whatever a cell does to its interpreter, the agent reports how the
// execution ended, and the next one runs.
func TestCodeHostile(t *testing.T) {
	c := startClient(t)
	const big = 100 << 20
	for _, tt := range []struct {
		name, source string
		check        func(o codeOutcome) bool
	}{
		{"much in one print", "print('x' * " + strconv.Itoa(big) + ")", func(o codeOutcome) bool {
			return o.State == guestrpc.CodeOK && len(o.stdout) == big+1 && o.Stdout.Dropped == 0
		}},
		{"gigantic repr", "'y' * 50_000_000", func(o codeOutcome) bool {
			s := o.result(t)
			return o.State == guestrpc.CodeOK && len(s) > 1<<20 && len(s) < 2<<20 && strings.HasSuffix(s, "(50000002 characters in all)")
		}},
		{"gigantic form", "class A:\n    def _repr_html_(self): return 'h' * 9_000_000\nA()", func(o codeOutcome) bool {
			return o.State == guestrpc.CodeOK && o.forms(t, guestrpc.CodeEventResult)[0]["text/html"] == "" && strings.Contains(o.stderr, "left out")
		}},
		{"deep recursion", "def f(n): return f(n + 1)\nf(0)", func(o codeOutcome) bool {
			return o.failure(t).Name == "RecursionError" && len(o.failure(t).Traceback) < 1<<20
		}},
		{"huge error", "raise ValueError('v' * 30_000_000)", func(o codeOutcome) bool {
			return o.failure(t).Name == "ValueError" && len(o.failure(t).Traceback) < 1<<20
		}},
		{"error that cannot be told", "class E(Exception):\n    def __str__(self): raise SystemExit(9)\nraise E", func(o codeOutcome) bool {
			return o.State == guestrpc.CodeRaised && o.failure(t).Name == "E"
		}},
		{"surrogates and zeros", "print('\\ud800\\0é'); '\\udfff\\0'", func(o codeOutcome) bool {
			return o.State == guestrpc.CodeOK && o.stdout == "\\ud800\x00é\n" && o.result(t) == `'\udfff\x00'`
		}},
		{"source with a zero", "1\x00", func(o codeOutcome) bool { return o.State == guestrpc.CodeRaised }},
		{"source that is no text", "'\xff\xfe'", func(o codeOutcome) bool { return o.State == guestrpc.CodeRaised }},
		{"str that lies", "class S(str):\n    def encode(self, *a): return 5\n    def __len__(self): return -1\nclass B:\n    def __repr__(self): return S('ok')\nB()", func(o codeOutcome) bool {
			return o.State == guestrpc.CodeOK || o.State == guestrpc.CodeRaised
		}},
		{"closed streams", "import os, sys\nsys.stdout.close(); os.close(1); os.close(2); sys.stderr = None", func(o codeOutcome) bool {
			return o.State == guestrpc.CodeOK
		}},
		{"redirected streams", "import os\nos.dup2(os.open('/dev/null', os.O_WRONLY), 1); print('lost')", func(o codeOutcome) bool {
			return o.State == guestrpc.CodeOK
		}},
		{"broken modules", "import sys, builtins\nfor m in ('traceback', 'linecache', 'ast', 'io', 'os'): sys.modules.pop(m, None)\nbuiltins.repr = None; builtins.len = None; del builtins.print", func(codeOutcome) bool { return true }},
		{"no handlers", "import signal\nsignal.signal(signal.SIGINT, signal.SIG_DFL); signal.signal(signal.SIGURG, signal.SIG_IGN)", func(o codeOutcome) bool { return o.State == guestrpc.CodeOK }},
		{"garbage in the control pipe", "import os\nfor fd in range(3, 1024):\n    try: os.write(fd, os.urandom(4096))\n    except OSError: pass", func(o codeOutcome) bool { return o.State == guestrpc.CodeDied }},
		{"a length that never ends", "import os\nfor fd in range(3, 1024):\n    try: os.write(fd, b'\\xff\\xff\\xff\\x00x')\n    except OSError: pass", func(o codeOutcome) bool { return o.State == guestrpc.CodeDied }},
		{"forged ends", "import os\nfor fd in range(3, 1024):\n    try: os.write(fd, b'\\4\\0\\0\\0\\4\\0\\0\\0' * 3)\n    except OSError: pass", func(codeOutcome) bool { return true }},
		{"forged events", "import os\nfor fd in range(3, 1024):\n    try: os.write(fd, b'\\3\\0\\0\\0\\3\\1\\1')\n    except OSError: pass", func(o codeOutcome) bool { return o.State == guestrpc.CodeDied }},
		{"no descriptors", "import os\nos.closerange(0, 1024)", func(o codeOutcome) bool { return o.State == guestrpc.CodeDied }},
		{"children that hold on", "import os\nfor _ in range(3):\n    if os.fork() == 0:\n        os.setsid(); os.execvp('sleep', ['sleep', '30'])\nos._exit(1)", func(o codeOutcome) bool { return o.State == guestrpc.CodeDied }},
		{"stopped", "import os, signal\nos.kill(os.getpid(), signal.SIGSTOP)", func(o codeOutcome) bool { return o.State == guestrpc.CodeDied && o.TimedOut }},
	} {
		t.Run(tt.name, func(t *testing.T) {
			timeout := 30 * time.Second
			if tt.name == "stopped" {
				timeout = 200 * time.Millisecond
			}
			o := runCode(t, c, guestrpc.CodeRunRequest{Source: tt.source, Timeout: timeout})
			if !tt.check(o) {
				f := o.failure(t)
				t.Errorf("%+v, error %s: %.2000s, stdout %.200q, stderr %.200q", o.CodeStatus, f.Name, f.Traceback, o.stdout, o.stderr)
			}
			// The user has to restart an interpreter that the cell has broken.
			if o := runCode(t, c, guestrpc.CodeRunRequest{Source: "import os\nos.write(1, b'out')\n1 + 1", Timeout: timeout}); o.State != guestrpc.CodeOK || o.stdout != "out" {
				if err := c.RestartContext(rpcContext(t), "default"); err != nil {
					t.Fatal(err)
				}
				o = python(t, c, "import os\nos.write(1, b'out')\n1 + 1")
				if o.State != guestrpc.CodeOK || o.stdout != "out" || o.result(t) != "2" {
					t.Errorf("the next: %+v, stdout %q", o.CodeStatus, o.stdout)
				}
			}
		})
	}
}

// TestCodeFloodsAreBounded: an interpreter that floods every output while no reader
// is attached does not make the agent grow.
func TestCodeFloodsAreBounded(t *testing.T) {
	c := startClient(t)
	x, err := c.StartCode(rpcContext(t), guestrpc.CodeRunRequest{Source: `import os
for i in range(200):
    print('x' * 100_000); os.write(2, b'y' * 100_000); display('z' * 500_000)
print('end')`, ID: "flood"})
	if err != nil {
		t.Fatal(err)
	}
	x.Close() // without a reader it goes on
	// The next execution starts once the flood has ended.
	wantOK(t, python(t, c, "1"))
	x, err = c.AttachCode(rpcContext(t), guestrpc.CodeAttachRequest{ID: "flood"})
	if err != nil {
		t.Fatal(err)
	}
	o := collect(t, x)
	wantOK(t, o)
	started := x.Started()
	if !strings.HasSuffix(o.stdout, "x\nend\n") || o.Stdout.Bytes != 200*100_001+4 || o.Stdout.Dropped == 0 ||
		started.Stdout.Dropped == 0 || started.Stdout.Offset+int64(len(o.stdout)) != o.Stdout.Bytes {
		t.Errorf("%d bytes of stdout, %+v, %+v", len(o.stdout), started.Stdout, o.Stdout)
	}
	if o.Events.Bytes != 201 || o.Events.Dropped == 0 || started.Events.Offset+int64(len(o.events)) != 201 || o.events[len(o.events)-1].Seq != 200 {
		t.Errorf("%d events, %+v, %+v", len(o.events), started.Events, o.Events)
	}
	size := 0
	for _, e := range o.events {
		size += len(e.Data)
	}
	if size > maxEventLog {
		t.Errorf("%d bytes of events were kept", size)
	}
}

// TestCodeAttachedLosesNothing: with a reader attached the interpreter waits.
func TestCodeAttachedLosesNothing(t *testing.T) {
	c := startClient(t)
	o := python(t, c, "for i in range(60):\n    display('z' * 500_000); print('x' * 10_000)")
	wantOK(t, o)
	if len(o.events) != 61 || o.Events.Dropped != 0 || o.Stdout.Dropped != 0 || len(o.stdout) != 600_060 {
		t.Errorf("%d events, %+v", len(o.events), o.CodeStatus)
	}
}

func TestCodeAttachAgain(t *testing.T) {
	path := startServer(t, nil)
	c, conn := dialServer(t, path)
	gate := filepath.Join(t.TempDir(), "gate")
	if err := unix.Mkfifo(gate, 0o600); err != nil {
		t.Fatal(err)
	}
	x, err := c.StartCode(rpcContext(t), guestrpc.CodeRunRequest{ID: "mine", Source: "print('first')\ndisplay(1)\nopen('" + gate + "').read()\nprint('second')\ndisplay(2)\n3"})
	if err != nil {
		t.Fatal(err)
	}
	buf := make([]byte, 6)
	if _, err := io.ReadFull(x.Stdout(), buf); err != nil {
		t.Fatal(err)
	}
	for range 2 { // begun, 1
		if _, err := x.NextEvent(); err != nil {
			t.Fatal(err)
		}
	}
	resume := x.Resume()
	if resume != (guestrpc.CodeAttachRequest{ID: "mine", StdoutOffset: 6, Event: 2}) {
		t.Errorf("%+v", resume)
	}
	conn.Close() // lost, as far as the agent can see
	c2, _ := dialServer(t, path)
	if _, err := c2.StartCode(rpcContext(t), guestrpc.CodeRunRequest{ID: "mine", Source: "1"}); !errors.Is(err, fs.ErrExist) {
		t.Errorf("an id twice: %v", err)
	}
	y, err := c2.AttachCode(rpcContext(t), resume)
	if err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(gate, nil, 0); err != nil { // opening it lets the cell go on
		t.Fatal(err)
	}
	o := collect(t, y)
	if wantOK(t, o); o.stdout != "second\n" || len(o.events) != 2 || o.events[0].Seq != 2 || o.result(t) != "3" {
		t.Errorf("%+v", o)
	}
	// A reader from the start gets everything, even after the end.
	y, err = c2.AttachCode(rpcContext(t), guestrpc.CodeAttachRequest{ID: "mine"})
	if err != nil {
		t.Fatal(err)
	}
	if o := collect(t, y); o.stdout != "first\nsecond\n" || len(o.events) != 4 {
		t.Errorf("%+v", o)
	}
	for _, req := range []guestrpc.CodeAttachRequest{{ID: "mine", StdoutOffset: 99}, {ID: "mine", Event: 99}, {ID: "mine", StderrOffset: 99}} {
		if _, err := c2.AttachCode(rpcContext(t), req); !errors.Is(err, fs.ErrInvalid) {
			t.Errorf("%+v: %v", req, err)
		}
	}
	if err := c2.ReleaseCode(rpcContext(t), "mine"); err != nil {
		t.Fatal(err)
	}
	if _, err := c2.AttachCode(rpcContext(t), guestrpc.CodeAttachRequest{ID: "mine"}); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("released: %v", err)
	}
	if err := c2.ReleaseCode(rpcContext(t), "mine"); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("released twice: %v", err)
	}
}

func TestCodeQueue(t *testing.T) {
	c := startClient(t)
	python(t, c, "import os\norder = []")
	first, err := c.StartCode(rpcContext(t), guestrpc.CodeRunRequest{Source: "print('go')\nimport time\nwhile True: time.sleep(600)"})
	if err != nil {
		t.Fatal(err)
	}
	buf := make([]byte, 3)
	if _, err := io.ReadFull(first.Stdout(), buf); err != nil {
		t.Fatal(err)
	}
	var rest []*guestrpc.AttachedCode
	for i := range 5 {
		x, err := c.StartCode(rpcContext(t), guestrpc.CodeRunRequest{Source: "order.append(" + strconv.Itoa(i) + ")\norder"})
		if err != nil {
			t.Fatal(err)
		}
		rest = append(rest, x)
	}
	list, err := c.ListContexts(rpcContext(t))
	if err != nil || list[0].Running != first.ID() || list[0].Queued != 5 {
		t.Errorf("%+v, %v", list, err)
	}
	if err := c.ReleaseCode(rpcContext(t), rest[0].ID()); code(err) != guestrpc.CodeFailedPrecondition {
		t.Errorf("released one that waits: %v", err)
	}
	// An interrupt cancels an execution that still waits.
	if err := c.InterruptCode(rpcContext(t), guestrpc.CodeInterruptRequest{ID: rest[3].ID()}); err != nil {
		t.Fatal(err)
	}
	if o := collect(t, rest[3]); o.State != guestrpc.CodeCancelled || len(o.events) != 0 {
		t.Errorf("%+v", o)
	}
	if err := c.InterruptCode(rpcContext(t), guestrpc.CodeInterruptRequest{}); err != nil {
		t.Fatal(err)
	}
	collect(t, first)
	for i, want := range []string{"[0]", "[0, 1]", "[0, 1, 2]", "", "[0, 1, 2, 4]"} {
		if i == 3 {
			continue
		}
		if o := collect(t, rest[i]); o.result(t) != want {
			t.Errorf("%d: %s, want %s", i, o.result(t), want)
		}
	}
}

func TestCodeContexts(t *testing.T) {
	c := startClient(t)
	ctx := rpcContext(t)
	python(t, c, "x = 'default'")
	a, err := c.CreateContext(ctx, guestrpc.CodeCreateRequest{ID: "a", Workdir: "/", Start: true})
	if err != nil || a.PID == 0 || a.Version == "" {
		t.Fatalf("%+v, %v", a, err)
	}
	in := func(id, source string) codeOutcome {
		t.Helper()
		return runCode(t, c, guestrpc.CodeRunRequest{Context: id, Source: source})
	}
	if o := in("a", "x = 'a'\nimport os\nos.getcwd()"); o.result(t) != "'/'" || o.Fresh || o.Count != 1 {
		t.Errorf("%+v", o)
	}
	if o := in("default", "x"); o.result(t) != "'default'" {
		t.Errorf("%+v", o)
	}
	if err := c.RestartContext(ctx, "a"); err != nil {
		t.Fatal(err)
	}
	if o := in("a", "'x' in globals()"); o.result(t) != "False" || !o.Fresh || !strings.Contains(o.FreshReason, "restarted on request") {
		t.Errorf("%+v", o.CodeStatus)
	}
	// A running execution ends with its interpreter, and the waiting ones get a new
	// one.
	x, err := c.StartCode(ctx, guestrpc.CodeRunRequest{Context: "a", Source: "print('go')\nwhile True: pass"})
	if err != nil {
		t.Fatal(err)
	}
	if _, err := io.ReadFull(x.Stdout(), make([]byte, 3)); err != nil {
		t.Fatal(err)
	}
	y, err := c.StartCode(ctx, guestrpc.CodeRunRequest{Context: "a", Source: "2"})
	if err != nil {
		t.Fatal(err)
	}
	if err := c.RestartContext(ctx, "a"); err != nil {
		t.Fatal(err)
	}
	if o := collect(t, x); o.State != guestrpc.CodeDied || o.Reason != "the kernel was restarted on request" {
		t.Errorf("%+v", o.CodeStatus)
	}
	if o := collect(t, y); o.State != guestrpc.CodeOK || !o.Fresh {
		t.Errorf("%+v", o.CodeStatus)
	}
	if err := c.CloseContext(ctx, "a"); err != nil {
		t.Fatal(err)
	}
	for _, tt := range []struct {
		err  error
		want error
	}{
		{c.CloseContext(ctx, "a"), fs.ErrNotExist},
		{c.RestartContext(ctx, "a"), fs.ErrNotExist},
		{c.InterruptCode(ctx, guestrpc.CodeInterruptRequest{Context: "a"}), fs.ErrNotExist},
		{second(c.StartCode(ctx, guestrpc.CodeRunRequest{Context: "a"})), fs.ErrNotExist},
		{second(c.StartCode(ctx, guestrpc.CodeRunRequest{Context: "default", Language: "cobol"})), fs.ErrInvalid},
		{second(c.StartCode(ctx, guestrpc.CodeRunRequest{Language: "cobol"})), fs.ErrInvalid},
		{second(c.StartCode(ctx, guestrpc.CodeRunRequest{ID: "a\nb"})), fs.ErrInvalid},
		{second(c.StartCode(ctx, guestrpc.CodeRunRequest{Timeout: -1})), fs.ErrInvalid},
		{second(c.CreateContext(ctx, guestrpc.CodeCreateRequest{ID: "default"})), fs.ErrExist},
		{second(c.CreateContext(ctx, guestrpc.CodeCreateRequest{Language: "cobol"})), fs.ErrInvalid},
		{second(c.CreateContext(ctx, guestrpc.CodeCreateRequest{Workdir: "relative"})), fs.ErrInvalid},
		{second(c.CreateContext(ctx, guestrpc.CodeCreateRequest{ID: "\x01"})), fs.ErrInvalid},
		{second(c.CreateContext(ctx, guestrpc.CodeCreateRequest{User: "no such user", Start: true})), fs.ErrInvalid},
		{second(c.CreateContext(ctx, guestrpc.CodeCreateRequest{Workdir: "/no/such", Start: true})), fs.ErrInvalid},
		{second(c.CreateContext(ctx, guestrpc.CodeCreateRequest{Env: []string{"PATH=/nowhere"}, Start: true})), fs.ErrNotExist},
	} {
		if !errors.Is(tt.err, tt.want) {
			t.Errorf("%v, want %v", tt.err, tt.want)
		}
	}
	for i := range maxCodeContexts {
		_, err := c.CreateContext(ctx, guestrpc.CodeCreateRequest{})
		if (err != nil) != (i == maxCodeContexts-1) {
			t.Errorf("context %d: %v", i, err)
		}
	}
}

func second[T any](_ T, err error) error { return err }

func TestCodeLongSource(t *testing.T) {
	c := startClient(t)
	source := "x = '" + strings.Repeat("é", 1<<20) + "'\nlen(x)"
	if o := python(t, c, source); o.result(t) != strconv.Itoa(1<<20) {
		t.Errorf("%+v", o)
	}
	if _, err := c.StartCode(rpcContext(t), guestrpc.CodeRunRequest{Source: strings.Repeat("#", guestrpc.MaxCode+1)}); !errors.Is(err, fs.ErrInvalid) {
		t.Errorf("%v", err)
	}
}

func TestCodeForgetsTheOldest(t *testing.T) {
	c := startClient(t)
	first := python(t, c, "0")
	for range keepExecutions {
		python(t, c, "1")
	}
	if _, err := c.AttachCode(rpcContext(t), guestrpc.CodeAttachRequest{ID: first.id}); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("%v", err)
	}
	// A few large results count as much as many small ones.
	second := python(t, c, "2")
	for range 4 {
		python(t, c, "for i in range(20): display('z' * 500_000)")
	}
	if _, err := c.AttachCode(rpcContext(t), guestrpc.CodeAttachRequest{ID: second.id}); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("%v", err)
	}
}
