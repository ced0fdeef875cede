package agent

import (
	"bytes"
	"errors"
	"math"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

func TestExitCodes(t *testing.T) {
	ps := newProcesses(t, Config{})
	var wg sync.WaitGroup
	turns := make(chan struct{}, 8)
	for code := range 256 {
		turns <- struct{}{}
		wg.Go(func() {
			defer func() { <-turns }()
			p, err := ps.Start(ExecSpec{Argv: sh("exit " + strconv.Itoa(code))})
			if err != nil {
				t.Error(err)
				return
			}
			<-p.Done()
			if e, _ := p.Exit(); e.Code != code || e.Signal != 0 || e.TimedOut {
				t.Errorf("exit %d reported as %+v", code, e)
			}
		})
	}
	wg.Wait()
}

func TestExitBySignalAndCore(t *testing.T) {
	ps := newProcesses(t, Config{})
	e, _, _ := run(t, ps, ExecSpec{Argv: sh("kill -TERM $$")})
	if e.Signal != syscall.SIGTERM || e.Code != 143 || e.Core {
		t.Errorf("SIGTERM reported as %+v", e)
	}
	e, _, _ = run(t, ps, ExecSpec{Argv: sh("ulimit -c unlimited; kill -SEGV $$"), Workdir: t.TempDir()})
	if e.Signal != syscall.SIGSEGV || !e.Core {
		t.Errorf("SIGSEGV with core reported as %+v", e)
	}
}

func TestUsageIsReported(t *testing.T) {
	ps := newProcesses(t, Config{})
	e, out, errOut := run(t, ps, ExecSpec{Argv: sh("i=0; while [ $i -lt 20000 ]; do i=$((i+1)); done; printf abc; printf de >&2")})
	if out != "abc" || errOut != "de" || e.Stdout.Bytes != 3 || e.Stderr.Bytes != 2 || !e.Stdout.EOF || !e.Stderr.EOF {
		t.Errorf("output %q %q counted as %+v %+v", out, errOut, e.Stdout, e.Stderr)
	}
	if e.MaxRSS < 100<<10 || e.User+e.System <= 0 || e.Wall <= 0 || e.Wall > patience {
		t.Errorf("implausible usage %+v", e)
	}
}

func TestEnvironment(t *testing.T) {
	accounts := testAccounts(t)
	ps := newProcesses(t, Config{Env: []string{"BASE=1", "BOTH=base"}, Accounts: accounts})
	env := func(spec ExecSpec) map[string]string {
		spec.Argv = []string{"/usr/bin/env"}
		_, out, _ := run(t, ps, spec)
		m := map[string]string{}
		for line := range strings.Lines(strings.ReplaceAll(out, "\r", "")) {
			k, v, _ := strings.Cut(strings.TrimSuffix(line, "\n"), "=")
			if _, twice := m[k]; twice {
				t.Errorf("%s twice in %q", k, out)
			}
			m[k] = v
		}
		return m
	}
	got := env(ExecSpec{Env: []string{"BOTH=exec", "OWN=a=b", "OWN=c"}})
	for k, want := range map[string]string{"BASE": "1", "BOTH": "exec", "OWN": "c", "PATH": DefaultPath, "HOME": "/root", "USER": "root", "LOGNAME": "root", "SHELL": "/bin/bash"} {
		if got[k] != want {
			t.Errorf("%s=%q, want %q", k, got[k], want)
		}
	}
	if _, has := got["TERM"]; has {
		t.Error("TERM without a terminal")
	}
	got = env(ExecSpec{CleanEnv: true, User: "alice", TTY: true, Env: []string{"HOME=/mine"}})
	if _, has := got["BASE"]; has || got["HOME"] != "/mine" || got["USER"] != "alice" || got["SHELL"] != "/bin/sh" || got["TERM"] != "xterm-256color" {
		t.Errorf("clean environment of alice: %v", got)
	}
	if err := ps.SetEnv([]string{"NEW=2"}); err != nil {
		t.Fatal(err)
	}
	if got = env(ExecSpec{}); got["NEW"] != "2" || got["BASE"] != "" {
		t.Errorf("after SetEnv: %v", got)
	}
	wantKind(t, ps.SetEnv([]string{"novalue"}), ErrInvalid)
}

func TestWorkingDirectory(t *testing.T) {
	accounts := testAccounts(t)
	ps := newProcesses(t, Config{Accounts: accounts})
	home := filepath.Dir(accounts.Passwd)
	nobody := t.TempDir()
	for _, c := range []struct {
		spec ExecSpec
		want string
	}{
		{ExecSpec{Workdir: nobody}, nobody},
		{ExecSpec{}, "/root"},
		{ExecSpec{User: "alice"}, home},
		{ExecSpec{User: "4242"}, "/"},
	} {
		c.spec.Argv = []string{"pwd"}
		if _, out, _ := run(t, ps, c.spec); out != c.want+"\n" {
			t.Errorf("%+v runs in %q, want %q", c.spec, out, c.want)
		}
	}
}

func TestStartErrors(t *testing.T) {
	dir := openDir(t)
	writeTestFile(t, dir+"/plain", "#!/bin/sh\n", 0o644)
	writeTestFile(t, dir+"/script", "#!/no/such/interpreter\n", 0o755)
	writeTestFile(t, dir+"/noise", "\x00\x01\x02\x03", 0o755)
	writeTestFile(t, dir+"/rootonly", "#!/bin/sh\n", 0o700)
	if err := os.Mkdir(dir+"/private", 0o700); err != nil {
		t.Fatal(err)
	}
	if err := syscall.Mkfifo(dir+"/fifo", 0o777); err != nil {
		t.Fatal(err)
	}
	ps := newProcesses(t, Config{Accounts: testAccounts(t)})
	long := strings.Repeat("x", 200)
	for name, c := range map[string]struct {
		spec ExecSpec
		want Kind
	}{
		"no args":          {ExecSpec{}, ErrInvalid},
		"zero byte":        {ExecSpec{Argv: []string{"echo", "a\x00b"}}, ErrInvalid},
		"long id":          {ExecSpec{ID: long, Argv: sh("")}, ErrInvalid},
		"id with newline":  {ExecSpec{ID: "a\nb", Argv: sh("")}, ErrInvalid},
		"bad env":          {ExecSpec{Argv: sh(""), Env: []string{"=x"}}, ErrInvalid},
		"negative timeout": {ExecSpec{Argv: sh(""), Timeout: -1}, ErrInvalid},
		"not in PATH":      {ExecSpec{Argv: []string{"no-such-program"}}, ErrNotFound},
		"no such file":     {ExecSpec{Argv: []string{dir + "/nothing"}}, ErrNotFound},
		"file as folder":   {ExecSpec{Argv: []string{dir + "/plain/x"}}, ErrNotFound},
		"no x bit":         {ExecSpec{Argv: []string{dir + "/plain"}}, ErrPermission},
		"no x bit, PATH":   {ExecSpec{Argv: []string{"plain"}, Env: []string{"PATH=/nowhere:" + dir}}, ErrPermission},
		"not for alice":    {ExecSpec{Argv: []string{dir + "/rootonly"}, User: "alice"}, ErrPermission},
		"a folder":         {ExecSpec{Argv: []string{dir}}, ErrIsDirectory},
		"a FIFO":           {ExecSpec{Argv: []string{dir + "/fifo"}}, ErrNotExecutable},
		"bad interpreter":  {ExecSpec{Argv: []string{dir + "/script"}}, ErrBadInterpreter},
		"no program":       {ExecSpec{Argv: []string{dir + "/noise"}}, ErrNotExecutable},
		"unknown user":     {ExecSpec{Argv: sh(""), User: "mallory"}, ErrBadUser},
		"unknown group":    {ExecSpec{Argv: sh(""), User: "alice:nobodies"}, ErrBadUser},
		"relative dir":     {ExecSpec{Argv: sh(""), Workdir: "tmp"}, ErrBadDir},
		"no such dir":      {ExecSpec{Argv: sh(""), Workdir: dir + "/nothing"}, ErrBadDir},
		"dir is a file":    {ExecSpec{Argv: sh(""), Workdir: dir + "/plain"}, ErrBadDir},
		"dir not for her":  {ExecSpec{Argv: sh(""), Workdir: dir + "/private", User: "alice"}, ErrBadDir},
		"arguments":        {ExecSpec{Argv: []string{"echo", strings.Repeat("x", 1<<20)}}, ErrTooLarge},
	} {
		_, err := ps.Start(c.spec)
		if err == nil {
			t.Errorf("%s: started", name)
			continue
		}
		t.Logf("%s: %v", name, err)
		wantKind(t, err, c.want)
	}
	if n := len(ps.List()); n != 0 {
		t.Errorf("%d execs left behind by failed starts", n)
	}
	_, out, _ := run(t, ps, ExecSpec{Argv: []string{"./hello"}, Workdir: func() string { writeTestFile(t, dir+"/hello", "#!/bin/sh\necho $0\n", 0o755); return dir }()})
	if !strings.HasSuffix(out, "/hello\n") {
		t.Errorf("relative program printed %q", out)
	}
}

// TestChildIsClean: a program inherits only the three streams from the agent, and
// leads its own session and group.
func TestChildIsClean(t *testing.T) {
	// Files that this test process inherited do not come from the agent.
	if err := unix.CloseRange(3, math.MaxUint32, unix.CLOSE_RANGE_CLOEXEC); err != nil {
		t.Fatal(err)
	}
	ps := newProcesses(t, Config{})
	if _, out, _ := run(t, ps, ExecSpec{Argv: []string{"ls", "-m", "/proc/self/fd"}, Stdin: true}); out != "0, 1, 2, 3\n" {
		t.Errorf("descriptors %q, want 0 to 2 and that of the folder itself", out)
	}
	_, out, _ := run(t, ps, ExecSpec{Argv: []string{"cat", "/proc/self/status"}})
	mine, err := os.ReadFile("/proc/self/status")
	if err != nil {
		t.Fatal(err)
	}
	if statusLine(out, "SigBlk") != "0000000000000000" || statusLine(out, "SigIgn") != statusLine(string(mine), "SigIgn") {
		t.Errorf("signals: blocked %s, ignored %s", statusLine(out, "SigBlk"), statusLine(out, "SigIgn"))
	}
	p := start(t, ps, ExecSpec{Argv: []string{"cat"}, Stdin: true})
	if group, session, ok := groupAndSession(p.PID()); !ok || group != p.PID() || session != p.PID() {
		t.Errorf("pid %d has group %d and session %d", p.PID(), group, session)
	}
}

func statusLine(status, key string) string {
	_, rest, _ := strings.Cut(status, key+":\t")
	value, _, _ := strings.Cut(rest, "\n")
	return value
}

func TestLimitsAndIDs(t *testing.T) {
	ps := newProcesses(t, Config{MaxProcesses: 2, KeepEnded: 2})
	a := start(t, ps, ExecSpec{ID: "a", Argv: []string{"cat"}, Stdin: true})
	start(t, ps, ExecSpec{ID: "b", Argv: []string{"cat"}, Stdin: true})
	_, err := ps.Start(ExecSpec{Argv: []string{"true"}})
	wantKind(t, err, ErrTooMany)
	wantKind(t, ps.Forget("a"), ErrBusy)
	if err := a.CloseStdin(); err != nil {
		t.Fatal(err)
	}
	wait(t, a)
	_, err = ps.Start(ExecSpec{ID: "a", Argv: []string{"true"}})
	wantKind(t, err, ErrDuplicateID)
	if err := ps.Forget("a"); err != nil {
		t.Fatal(err)
	}
	wantKind(t, ps.Forget("a"), ErrNotFound)
	for _, id := range []string{"a", "c", "d", "e"} {
		wait(t, start(t, ps, ExecSpec{ID: id, Argv: []string{"true"}}))
	}
	// The reaper remembers "e" only after Done, so the test waits for a further exec.
	wait(t, start(t, ps, ExecSpec{Argv: []string{"true"}}))
	if _, err := ps.Get("c"); err == nil {
		t.Error("the oldest ended exec is still remembered")
	}
	if p, err := ps.Get("b"); err != nil || p.ID() != "b" || p.PID() <= 0 || p.Started().IsZero() || p.Spec().Argv[0] != "cat" {
		t.Errorf("running exec: %v %v", p, err)
	}
	_, err = ps.Get("nothing")
	wantKind(t, err, ErrNotFound)
}

func TestFiftyAtOnce(t *testing.T) {
	ps := newProcesses(t, Config{})
	var wg sync.WaitGroup
	for i := range 50 {
		wg.Go(func() {
			p, err := ps.Start(ExecSpec{Argv: sh("cat; echo $N >&2"), Stdin: true, Env: []string{"N=" + strconv.Itoa(i)}})
			if err != nil {
				t.Error(err)
				return
			}
			data := bytes.Repeat([]byte{byte('A' + i%26)}, 100_000)
			go func() {
				p.WriteStdin(nil, data)
				p.CloseStdin()
			}()
			r, err := p.Stdout().Attach(0)
			if err != nil {
				t.Error(err)
				return
			}
			defer r.Close()
			got := 0
			buf := make([]byte, 4096)
			for {
				n, err := r.Read(nil, buf)
				got += n
				if err != nil {
					break
				}
			}
			<-p.Done()
			if e, _ := p.Exit(); e.Code != 0 || got != len(data) || e.Stdout.Dropped != 0 {
				t.Errorf("exec %d: %+v, %d bytes", i, e, got)
			}
		})
	}
	wg.Wait()
}

func TestStdin(t *testing.T) {
	ps := newProcesses(t, Config{})
	p := start(t, ps, ExecSpec{Argv: []string{"cat"}, Stdin: true})
	if n, err := p.WriteStdin(nil, []byte("hello")); n != 5 || err != nil {
		t.Fatal(n, err)
	}
	until(t, attach(t, p.Stdout(), 0), "hello")
	if err := p.CloseStdin(); err != nil {
		t.Fatal(err)
	}
	_, err := p.WriteStdin(nil, []byte("x"))
	if err == nil {
		t.Error("wrote to closed stdin")
	}
	if e := wait(t, p); e.Code != 0 {
		t.Errorf("cat ended with %+v", e)
	}
	_, err = p.WriteStdin(nil, []byte("x"))
	wantKind(t, err, ErrEnded)
	wantKind(t, p.CloseStdin(), ErrEnded)

	p = start(t, ps, ExecSpec{Argv: []string{"cat"}})
	wait(t, p) // closed stdin reads as empty
	_, err = p.WriteStdin(nil, []byte("x"))
	wantKind(t, err, ErrClosed)
	if err := p.CloseStdin(); err != nil {
		t.Error(err)
	}
}

func TestStdinThatNobodyReads(t *testing.T) {
	ps := newProcesses(t, Config{})
	p := start(t, ps, ExecSpec{Argv: []string{"sleep", "1000"}, Stdin: true})
	stop := make(chan struct{})
	type result struct {
		n   int
		err error
	}
	first, second := make(chan result, 1), make(chan result, 1)
	go func() {
		n, err := p.WriteStdin(stop, make([]byte, 1<<20))
		first <- result{n, err}
	}()
	// Other execs run meanwhile.
	if e, _, _ := run(t, ps, ExecSpec{Argv: []string{"true"}}); e.Code != 0 {
		t.Errorf("true: %+v", e)
	}
	close(stop)
	r := <-first
	wantKind(t, r.err, ErrStopped)
	if r.n > 1<<16 {
		t.Errorf("%d bytes fit into a pipe", r.n)
	}
	_, err := p.WriteStdin(stop, make([]byte, 1<<20))
	wantKind(t, err, ErrStopped)
	go func() {
		n, err := p.WriteStdin(nil, make([]byte, 1<<20))
		second <- result{n, err}
	}()
	if err := p.Signal(syscall.SIGKILL, ScopeProcess); err != nil {
		t.Fatal(err)
	}
	wait(t, p)
	// The process's end of the pipe is closed a moment before it can be waited for.
	if err := (<-second).err; !errors.Is(err, ErrEnded) && !errors.Is(err, ErrClosed) {
		t.Errorf("writing to a killed process: %v", err)
	}
}

func TestProcessThatIgnoresSIGTERM(t *testing.T) {
	ps := newProcesses(t, Config{})
	p := start(t, ps, ExecSpec{Argv: sh(`trap "" TERM; echo ready; read x; echo got $x; read x`), Stdin: true})
	r := attach(t, p.Stdout(), 0)
	until(t, r, "ready\n")
	if err := p.Signal(syscall.SIGTERM, ScopeProcess); err != nil {
		t.Fatal(err)
	}
	p.WriteStdin(nil, []byte("1\n"))
	until(t, r, "got 1\n")
	wantKind(t, p.Signal(99, ScopeProcess), ErrInvalid)
	wantKind(t, p.Signal(syscall.SIGTERM, 9), ErrInvalid)
	if err := p.Signal(syscall.SIGKILL, ScopeProcess); err != nil {
		t.Fatal(err)
	}
	if e := wait(t, p); e.Signal != syscall.SIGKILL || e.TimedOut {
		t.Errorf("ended with %+v", e)
	}
	for _, scope := range []Scope{ScopeProcess, ScopeGroup, ScopeSession} {
		wantKind(t, p.Signal(syscall.SIGKILL, scope), ErrEnded)
	}
}

func TestGroupAndSessionKill(t *testing.T) {
	ps := newProcesses(t, Config{})
	life := newLifeline(t)
	p := start(t, ps, ExecSpec{Argv: sh("exec 9>" + life.path + "; sleep 1000 & sleep 1000 & echo ready; wait")})
	until(t, attach(t, p.Stdout(), 0), "ready")
	if err := p.Signal(syscall.SIGKILL, ScopeGroup); err != nil {
		t.Fatal(err)
	}
	wait(t, p)
	life.awaitEnd(t)

	// Job control puts each background job into a group of its own.
	life = newLifeline(t)
	p = start(t, ps, ExecSpec{Argv: bash("set -m; exec 9>" + life.path + "; sleep 1000 & (sleep 1000 & wait) & echo ready; wait")})
	until(t, attach(t, p.Stdout(), 0), "ready")
	if err := p.Signal(syscall.SIGKILL, ScopeSession); err != nil {
		t.Fatal(err)
	}
	wait(t, p)
	life.awaitEnd(t)

	// Processes that an exec left behind can be signalled after its end.
	for _, scope := range []Scope{ScopeGroup, ScopeSession} {
		life = newLifeline(t)
		p = start(t, ps, ExecSpec{Argv: sh("exec 9>" + life.path + "; sleep 1000 &")})
		wait(t, p)
		if err := p.Signal(syscall.SIGKILL, scope); err != nil {
			t.Fatal(err)
		}
		life.awaitEnd(t)
	}
}

func TestTimeout(t *testing.T) {
	ps := newProcesses(t, Config{})
	life := newLifeline(t)
	p := start(t, ps, ExecSpec{Argv: bash("set -m; exec 9>" + life.path + "; sleep 1000 & wait"), Timeout: 300 * time.Millisecond})
	if e := wait(t, p); !e.TimedOut || e.Signal != syscall.SIGKILL || e.Wall < 300*time.Millisecond {
		t.Errorf("timeout reported as %+v", e)
	}
	life.awaitEnd(t)
	if e, _, _ := run(t, ps, ExecSpec{Argv: []string{"true"}, Timeout: time.Hour}); e.TimedOut || e.Code != 0 {
		t.Errorf("quick exec reported as %+v", e)
	}
	p = start(t, ps, ExecSpec{Argv: []string{"sleep", "1000"}, Timeout: time.Hour})
	p.Signal(syscall.SIGKILL, ScopeProcess)
	if e := wait(t, p); e.TimedOut {
		t.Errorf("killed exec reported as timed out: %+v", e)
	}
}

func TestUsers(t *testing.T) {
	ps := newProcesses(t, Config{Accounts: testAccounts(t)})
	for user, want := range map[string]string{
		"":             "0 0 0",
		"root":         "0 0 0",
		"alice":        "1234 1234 1234 29 50",
		"1234":         "1234 1234 1234 29 50",
		"alice:staff":  "1234 50 50",
		"alice:7":      "1234 7 7",
		"5555":         "5555 0 0",
		"5555:6666":    "5555 6666 6666",
		"0:0":          "0 0 0",
		"5555:audio":   "5555 29 29",
		"1234:1234":    "1234 1234 1234",
		"root:alice":   "0 1234 1234",
		"4294967294:1": "4294967294 1 1",
	} {
		_, out, errOut := run(t, ps, ExecSpec{Argv: sh("echo $(id -u) $(id -g) $(id -G)"), User: user, Workdir: "/"})
		if strings.TrimSpace(out) != want {
			t.Errorf("user %q runs as %q, want %q (%s)", user, out, want, errOut)
		}
	}
	// The streams belong to the user, who can open them again by name.
	_, out, errOut := run(t, ps, ExecSpec{Argv: sh("echo again > /dev/stdout; echo more > /proc/self/fd/2"), User: "alice"})
	if out != "again\n" || errOut != "more\n" {
		t.Errorf("reopened streams gave %q %q", out, errOut)
	}
}

func TestCloseKillsAndRefuses(t *testing.T) {
	ps := NewProcesses(Config{})
	p := start(t, ps, ExecSpec{Argv: []string{"sleep", "1000"}})
	ps.Close()
	if e, ok := p.Exit(); !ok || e.Signal != syscall.SIGKILL {
		t.Errorf("after Close: %+v %v", e, ok)
	}
	_, err := ps.Start(ExecSpec{Argv: []string{"true"}})
	wantKind(t, err, ErrShuttingDown)
}

// TestDescriptorsAreFreed counts the agent's descriptors before and after.
func TestDescriptorsAreFreed(t *testing.T) {
	ps := newProcesses(t, Config{})
	count := func() int {
		d, err := os.ReadDir("/proc/self/fd")
		if err != nil {
			t.Fatal(err)
		}
		return len(d)
	}
	run(t, ps, ExecSpec{Argv: []string{"true"}}) // the poller's own descriptors
	before := count()
	for i := range 20 {
		run(t, ps, ExecSpec{Argv: []string{"echo", "x"}, TTY: i%2 == 0})
		ps.Start(ExecSpec{Argv: []string{"no-such-program"}})
		ps.Start(ExecSpec{Argv: []string{"/etc/passwd"}})
	}
	// The pumps close their files a little later.
	for deadline := time.Now().Add(patience); count() > before; {
		if time.Now().After(deadline) {
			t.Fatalf("%d descriptors before, %d after", before, count())
		}
		exec.Command("true").Run() // lets the pumps run; os/exec is not disturbed
	}
}
