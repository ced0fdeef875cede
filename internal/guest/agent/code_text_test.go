package agent

import (
	"os"
	"os/exec"
	"strconv"
	"strings"
	"testing"
	"time"

	"agentrun.dev/internal/guest/guestrpc"
)

// textWorld is a context with known commands.
func textWorld(t *testing.T, c *guestrpc.Client) {
	t.Helper()
	bin, dir := openDir(t), openDir(t)
	for _, name := range strings.Fields("cat cp date deploy env from git import ls make pip sleep sort test yes") {
		writeTestFile(t, bin+"/"+name, "#!/bin/sh\n", 0o755)
	}
	for _, name := range []string{"bash", "sh"} {
		at, err := exec.LookPath(name)
		if err == nil {
			err = os.Symlink(at, bin+"/"+name)
		}
		if err != nil {
			t.Fatal(err)
		}
	}
	// This is a wrapper and not a link, because an interpreter finds its library by
	// its own path.
	writeTestFile(t, bin+"/python3", "#!/bin/sh\nexec /usr/bin/python3 \"$@\"\n", 0o755)
	if err := os.Mkdir(dir+"/bin", 0o755); err != nil {
		t.Fatal(err)
	}
	writeTestFile(t, dir+"/run.sh", "#!/bin/sh\n", 0o755)
	writeTestFile(t, dir+"/env.sh", "", 0o644)
	writeTestFile(t, dir+"/f", "", 0o644)
	writeTestFile(t, dir+"/bin/tool", "#!/bin/sh\n", 0o755)
	_, err := c.CreateContext(rpcContext(t), guestrpc.CodeCreateRequest{ID: "default", Workdir: dir, Env: []string{"PATH=" + bin, "HOME=" + dir}, Start: true})
	if err != nil {
		t.Fatal(err)
	}
}

func TestCodeTextTable(t *testing.T) {
	c := startClient(t)
	textWorld(t, c)
	table, err := os.ReadFile("../interpreter/testdata/texts.txt")
	if err != nil {
		t.Fatal(err)
	}
	given, checked := "", 0
	for i, line := range strings.Split(string(table), "\n") {
		if line == "" || line[0] == '#' {
			continue
		}
		verdict, quoted, _ := strings.Cut(line, " ")
		text, err := strconv.Unquote(strings.TrimSpace(quoted))
		if err != nil {
			t.Fatalf("line %d: %v", i+1, err)
		}
		if verdict == "given" {
			given = text
			continue
		}
		// No line may see names that another line has bound.
		wantOK(t, python(t, c, "for n in [n for n in globals() if not n.startswith('__') and n != 'display']: del globals()[n]\nimport builtins\nif hasattr(builtins, '_'): del builtins._"))
		wantOK(t, python(t, c, given))
		o := runCode(t, c, guestrpc.CodeRunRequest{Mode: guestrpc.ModeText, Source: text, Timeout: 20 * time.Second})
		if o.Language != verdict || o.State == guestrpc.CodeDied {
			t.Errorf("line %d: %q is %s, want %s (%+v)", i+1, text, o.Language, verdict, o.CodeStatus)
		}
		checked++
	}
	if checked < 40 {
		t.Errorf("the table has %d lines", checked)
	}
}

func TestCodeTextRuns(t *testing.T) {
	c := startClient(t)
	dir := openDir(t)
	if _, err := c.CreateContext(rpcContext(t), guestrpc.CodeCreateRequest{ID: "default", Workdir: dir}); err != nil {
		t.Fatal(err)
	}
	for _, tt := range []struct {
		text           string
		code           int32
		stdout, stderr string // the beginning
		result         string
	}{
		{"echo out; echo err >&2; exit 4", 4, "out\n", "err\n", ""},
		{"x = 6", 0, "", "", ""},
		{"x * 7", 0, "", "", "42"},
		{"print(x)", 0, "6\n", "", ""},
		{"1/0", 1, "", "Traceback (most recent call last):\n", ""},
		{"import sys; sys.exit(7)", 7, "", "", ""},
		{"x", 0, "", "", "6"},
		{"undefined", 1, "", "Traceback", ""},
		{"cd / && pwd", 0, "/\n", "", ""},
		{"pwd", 0, dir + "\n", "", ""},
		{"import os; os.environ['A'] = 'b'", 0, "", "", ""},
		{"echo $A", 0, "b\n", "", ""},
		{"yes | head -n 1", 0, "y\n", "", ""},
		{"kill -9 $$", 137, "", "", ""},
		{"cat", 0, "", "", ""},
		{"echo 'a' > f && cat f", 0, "a\n", "", ""},
		{"open('f').read()", 0, "", "", `'a\n'`},
		{"exit 3", 3, "", "", ""},
	} {
		o := runCode(t, c, guestrpc.CodeRunRequest{Mode: guestrpc.ModeText, Source: tt.text, Timeout: 20 * time.Second})
		if o.Code != tt.code || o.stdout != tt.stdout || !strings.HasPrefix(o.stderr, tt.stderr) || (tt.stderr == "") != (o.stderr == "") || o.result(t) != tt.result {
			t.Errorf("%q: %+v, stdout %q, stderr %q, result %q", tt.text, o.CodeStatus, o.stdout, o.stderr, o.result(t))
		}
		if strings.HasPrefix(o.stderr, "Traceback") && o.stderr != o.failure(t).Traceback {
			t.Errorf("%q: stderr %q", tt.text, o.stderr)
		}
	}
	// A command is interrupted and timed out like a cell.
	o := runCode(t, c, guestrpc.CodeRunRequest{Mode: guestrpc.ModeText, Source: "sleep 600", Timeout: time.Second})
	if o.State != guestrpc.CodeInterrupted || o.Code != 130 || !o.TimedOut || o.Language != "shell" {
		t.Errorf("%+v", o.CodeStatus)
	}
	o = runCode(t, c, guestrpc.CodeRunRequest{Mode: guestrpc.ModeText, Source: "x"})
	if o.result(t) != "6" || o.Fresh {
		t.Errorf("the kernel did not live through it: %+v", o.CodeStatus)
	}
}

// TestCodeTextInterrupted: a command that ends at the moment of an interrupt, for example
// because it receives the interrupt itself, is reported as ended or interrupted, and no
// message appears on stderr.
func TestCodeTextInterrupted(t *testing.T) {
	c := startClient(t)
	if _, err := c.CreateContext(rpcContext(t), guestrpc.CodeCreateRequest{ID: "default", Workdir: openDir(t)}); err != nil {
		t.Fatal(err)
	}
	for range 200 {
		// It interrupts the interpreter, which waits for it, and ends.
		o := runCode(t, c, guestrpc.CodeRunRequest{Mode: guestrpc.ModeText, Source: "kill -INT $PPID"})
		if o.State != guestrpc.CodeInterrupted && o.State != guestrpc.CodeOK || o.stderr != "" || o.Language != "shell" {
			t.Fatalf("%+v, %q", o.CodeStatus, o.stderr)
		}
	}
}

func TestCodeTextWithoutPython(t *testing.T) {
	c := startClient(t)
	bin := openDir(t)
	if err := os.Symlink("/bin/sh", bin+"/sh"); err != nil {
		t.Fatal(err)
	}
	if _, err := c.CreateContext(rpcContext(t), guestrpc.CodeCreateRequest{ID: "default", Workdir: "/", Env: []string{"PATH=" + bin}}); err != nil {
		t.Fatal(err)
	}
	text := func(s string) codeOutcome {
		return runCode(t, c, guestrpc.CodeRunRequest{Mode: guestrpc.ModeText, Source: s, Timeout: 20 * time.Second})
	}
	for _, tt := range []struct {
		text   string
		code   int32
		stdout string
	}{{"cd /tmp; X=1; echo hi; (exit 3)", 3, "hi\n"}, {"echo $PWD $X", 0, "/\n"}, {"exit 5", 5, ""}, {"print(1)", 2, ""}, {"nosuch", 127, ""}} {
		if o := text(tt.text); o.Code != tt.code || o.stdout != tt.stdout || o.Language != "shell" || o.State == guestrpc.CodeDied {
			t.Errorf("%q: %+v, stdout %q, stderr %q", tt.text, o.CodeStatus, o.stdout, o.stderr)
		}
	}
	x, err := c.StartCode(rpcContext(t), guestrpc.CodeRunRequest{Source: "1"})
	if err == nil {
		_, err = x.Copy(nil, nil, nil)
	}
	if code(err) != guestrpc.CodeNotFound || !strings.Contains(err.Error(), "use an image that has it") {
		t.Errorf("%v", err)
	}
	if o := text("echo still"); o.stdout != "still\n" {
		t.Errorf("%+v", o)
	}
}

func TestCodeInAFork(t *testing.T) {
	r, _ := newTestRenewer(t)
	c, _ := dialServer(t, serve(t, &Server{Renewer: r}))
	renew := func(generation uint64) {
		t.Helper()
		if _, err := c.Renew(rpcContext(t), *renewal(generation)); err != nil {
			t.Fatal(err)
		}
	}
	seed := "import random, numpy\nrandom.seed(1); numpy.random.seed(1)"
	draw := "random.random(), numpy.random.random()"
	wantOK(t, python(t, c, seed))
	same := python(t, c, draw).result(t)
	wantOK(t, python(t, c, seed))
	if again := python(t, c, draw).result(t); again != same {
		t.Fatalf("seeded, and yet %s and %s", same, again)
	}
	wantOK(t, python(t, c, seed+"\nmine = random.Random(1)"))
	renew(1)
	forked := python(t, c, draw).result(t)
	for i, part := range strings.Split(strings.Trim(forked, "()"), ", ") {
		if strings.Contains(same, part) {
			t.Errorf("generator %d was not reseeded: %s, %s", i, same, forked)
		}
	}
	// Seeding once is enough, and generators that the user has made stay as they are.
	wantOK(t, python(t, c, seed))
	if again := python(t, c, draw+"\n"+draw); !strings.HasPrefix(again.result(t), "(0.") {
		t.Fatalf("%+v", again)
	}
	wantOK(t, python(t, c, seed))
	if again := python(t, c, draw).result(t); again != same {
		t.Errorf("reseeded twice: %s, %s", again, same)
	}
	if o := python(t, c, "mine.random() == random.Random(1).random()"); o.result(t) != "True" {
		t.Errorf("%s", o.result(t))
	}

	// An execution that runs at that instant is reseeded in place.
	x, err := c.StartCode(rpcContext(t), guestrpc.CodeRunRequest{Source: "random.seed(1)\nstate = random.getstate()\nprint('go')\nimport time\nwhile random.getstate() == state: time.sleep(0.001)\n'reseeded'"})
	if err != nil {
		t.Fatal(err)
	}
	if _, err := x.Stdout().Read(make([]byte, 3)); err != nil {
		t.Fatal(err)
	}
	renew(2)
	if o := collect(t, x); o.result(t) != "'reseeded'" {
		t.Errorf("%+v", o.CodeStatus)
	}
}
