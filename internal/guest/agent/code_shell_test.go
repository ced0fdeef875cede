package agent

import (
	"errors"
	"io"
	"io/fs"
	"os"
	"os/exec"
	"strings"
	"testing"
	"time"

	"agentrun.dev/internal/guest/guestrpc"
)

func inBash(t testing.TB, c *guestrpc.Client, source string) codeOutcome {
	t.Helper()
	return runCode(t, c, guestrpc.CodeRunRequest{Language: "bash", Source: source, Timeout: 30 * time.Second})
}

// shells makes a context for each shell that can be the interpreter.
func shells(t *testing.T, c *guestrpc.Client) []string {
	t.Helper()
	if _, err := c.CreateContext(rpcContext(t), guestrpc.CodeCreateRequest{ID: "default-bash", Language: "bash", Start: true}); err != nil {
		t.Fatal(err)
	}
	bin := openDir(t)
	for _, name := range []string{"sh", "cat", "sleep", "mkdir"} {
		at, err := exec.LookPath(name)
		if err == nil {
			err = os.Symlink(at, bin+"/"+name)
		}
		if err != nil {
			t.Fatal(err)
		}
	}
	if _, err := c.CreateContext(rpcContext(t), guestrpc.CodeCreateRequest{ID: "sh", Language: "bash", Env: []string{"PATH=" + bin}}); err != nil {
		t.Fatal(err)
	}
	return []string{"default-bash", "sh"}
}

func TestShellInterpreter(t *testing.T) {
	c := startClient(t)
	for _, id := range shells(t, c) {
		for _, tt := range []struct {
			source         string
			code           int32
			stdout, stderr string
		}{
			{"cd /; X='a  b'; export Y=2; f() { echo in f $1; return 5; }", 0, "", ""},
			{"echo \"$PWD $X $Y\"; f 7", 5, "/ a  b 2\nin f 7\n", ""},
			{"echo out; echo err >&2\n\nfalse", 1, "out\n", "err\n"},
			{"cat <<END\nhere\\n$X\nEND", 0, "here\\na  b\n", ""},
			{"printf '%s|' 'it'\"'\"'s' '\\\\0101' 'é'", 0, "it's|\\\\0101|é|", ""},
			{"", 0, "", ""},
			{"# nothing", 0, "", ""},
			{"cat", 0, "", ""},
			{"(exit 9)", 9, "", ""},
			{"echo fd >&4", 2, "", "4"},
		} {
			o := runCode(t, c, guestrpc.CodeRunRequest{Context: id, Source: tt.source, Timeout: 30 * time.Second})
			if o.Code != tt.code && (o.Code == 0 || tt.stderr != "4") || o.State != guestrpc.CodeOK || o.stdout != tt.stdout || !strings.Contains(o.stderr, tt.stderr) || tt.stderr == "" && o.stderr != "" {
				t.Errorf("%s: %q: %+v, stdout %q, stderr %q", id, tt.source, o.CodeStatus, o.stdout, o.stderr)
			}
		}
		// The child prints the line, because a shell that is just making a child may
		// miss a signal.
		x, err := c.StartCode(rpcContext(t), guestrpc.CodeRunRequest{Context: id, Source: "sh -c 'echo go; exec sleep 600'; echo not here"})
		if err != nil {
			t.Fatal(err)
		}
		if _, err := io.ReadFull(x.Stdout(), make([]byte, 3)); err != nil {
			t.Fatal(err)
		}
		if err := c.InterruptCode(rpcContext(t), guestrpc.CodeInterruptRequest{ID: x.ID()}); err != nil {
			t.Fatal(err)
		}
		if o := collect(t, x); o.State != guestrpc.CodeInterrupted || o.Code != 130 || o.stdout != "" {
			t.Errorf("%s: %+v, stdout %q", id, o.CodeStatus, o.stdout)
		}
		if o := runCode(t, c, guestrpc.CodeRunRequest{Context: id, Source: "echo $X; exit 4"}); o.State != guestrpc.CodeExited || o.Code != 4 || o.stdout != "a b\n" || o.Fresh {
			t.Errorf("%s: %+v, stdout %q", id, o.CodeStatus, o.stdout)
		}
		if o := runCode(t, c, guestrpc.CodeRunRequest{Context: id, Source: "echo $X"}); o.stdout != "\n" || !o.Fresh || !strings.Contains(o.FreshReason, "exited with code 4") {
			t.Errorf("%s: %+v, stdout %q", id, o.CodeStatus, o.stdout)
		}
	}
}

func TestBashInterpreter(t *testing.T) {
	r, _ := newTestRenewer(t)
	c, _ := dialServer(t, serve(t, &Server{Renewer: r}))
	wantOK(t, inBash(t, c, "declare -a list=(1 2 3); declare n=5; alias x=y; shopt -s nullglob"))
	if o := inBash(t, c, "echo ${list[1]} $n; if [[ x == x ]]; then echo yes; fi; for ((;;)); do break; done"); o.stdout != "2 5\nyes\n" {
		t.Errorf("%+v, %q, %q", o.CodeStatus, o.stdout, o.stderr)
	}
	if o := inBash(t, c, "echo 'unfinished"); o.Code == 0 || o.State != guestrpc.CodeOK || o.stderr == "" {
		t.Errorf("%+v, %q", o.CodeStatus, o.stderr)
	}
	// An interrupt ends loops in functions, and the shell lives.
	x, err := c.StartCode(rpcContext(t), guestrpc.CodeRunRequest{Language: "bash", Source: "g() { echo go; while :; do :; done; }; h() { g; echo no; }; h; echo no"})
	if err != nil {
		t.Fatal(err)
	}
	if _, err := io.ReadFull(x.Stdout(), make([]byte, 3)); err != nil {
		t.Fatal(err)
	}
	if err := c.InterruptCode(rpcContext(t), guestrpc.CodeInterruptRequest{ID: x.ID()}); err != nil {
		t.Fatal(err)
	}
	if o := collect(t, x); o.State != guestrpc.CodeInterrupted || o.stdout != "" {
		t.Errorf("%+v, %q", o.CodeStatus, o.stdout)
	}
	if o := inBash(t, c, "h2() { echo $n; }; h2"); o.stdout != "5\n" || o.Fresh || o.Code != 0 {
		t.Errorf("%+v, %q", o.CodeStatus, o.stdout)
	}
	// A claim's environment, and a fork's random numbers.
	if err := c.SetEnv(rpcContext(t), guestrpc.SetEnvRequest{Env: []string{"CLAIM=it's \"$n\"\n", "not-a-name=1"}}); err != nil {
		t.Fatal(err)
	}
	if o := inBash(t, c, `printf %s "$CLAIM"`); o.stdout != "it's \"$n\"\n" {
		t.Errorf("%q, %q", o.stdout, o.stderr)
	}
	if err := c.SetEnv(rpcContext(t), guestrpc.SetEnvRequest{}); err != nil {
		t.Fatal(err)
	}
	if o := inBash(t, c, `echo "${CLAIM-gone}"`); o.stdout != "gone\n" {
		t.Errorf("%q, %q", o.stdout, o.stderr)
	}
	draw := "echo $RANDOM $RANDOM $RANDOM"
	inBash(t, c, "RANDOM=1")
	same := inBash(t, c, draw).stdout
	inBash(t, c, "RANDOM=1")
	if _, err := c.Renew(rpcContext(t), *renewal(1)); err != nil {
		t.Fatal(err)
	}
	if forked := inBash(t, c, draw).stdout; forked == same {
		t.Errorf("a fork draws %q too", same)
	}
	for _, req := range []guestrpc.CodeRunRequest{
		{Language: "bash", Source: "\x00"}, {Language: "bash", Mode: guestrpc.ModeText, Source: "ls"}, {Language: "bash", Env: []string{"A=b"}},
	} {
		if _, err := c.StartCode(rpcContext(t), req); !errors.Is(err, fs.ErrInvalid) {
			t.Errorf("%+v: %v", req, err)
		}
	}
	// A shell that writes to descriptors that are not its own, or ends itself, is replaced
	// by a new one.
	for _, source := range []string{
		"for fd in /proc/$$/fd/*; do head -c 4096 /dev/zero > $fd; done 2>/dev/null", "kill -9 $$", "exec 3<&- 4>&-; exit",
		"for fd in {10..40}; do echo done 300 >&$fd; done 2>/dev/null; kill -9 $$",
	} {
		if o := inBash(t, c, source); o.State != guestrpc.CodeDied && o.State != guestrpc.CodeExited {
			t.Errorf("%q: %+v", source, o.CodeStatus)
		}
		if o := inBash(t, c, "echo alive"); o.stdout != "alive\n" || !o.Fresh {
			t.Errorf("after %q: %+v, stdout %q", source, o.CodeStatus, o.stdout)
		}
	}
}
