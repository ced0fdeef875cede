package agent

import (
	"syscall"
	"testing"
)

func TestTerminal(t *testing.T) {
	ps := newProcesses(t, Config{Accounts: testAccounts(t)})
	_, out, _ := run(t, ps, ExecSpec{Argv: sh("stty size; echo $TERM; echo tty > /dev/tty"), TTY: true, Rows: 40, Cols: 132})
	if out != "40 132\r\nxterm-256color\r\ntty\r\n" {
		t.Errorf("terminal said %q", out)
	}
	_, out, _ = run(t, ps, ExecSpec{Argv: sh("stty size; echo own > $(tty)"), TTY: true, User: "alice", Env: []string{"TERM=dumb"}})
	if out != "24 80\r\nown\r\n" {
		t.Errorf("terminal of alice said %q", out)
	}

	p := start(t, ps, ExecSpec{Argv: bash(`trap 'stty size; exit 7' WINCH; echo ready; sleep 1000 & wait; wait`), TTY: true})
	r := attach(t, p.Stdout(), 0)
	until(t, r, "ready")
	if err := p.Resize(50, 100); err != nil {
		t.Fatal(err)
	}
	until(t, r, "50 100")
	if e := wait(t, p); e.Code != 7 {
		t.Errorf("ended with %+v", e)
	}
	if err := p.Resize(1, 1); err != nil {
		wantKind(t, err, ErrEnded)
	}

	p = start(t, ps, ExecSpec{Argv: []string{"cat"}, TTY: true})
	r = attach(t, p.Stdout(), 0)
	p.WriteStdin(nil, []byte("line\n"))
	until(t, r, "line\r\nline\r\n")
	if err := p.CloseStdin(); err != nil {
		t.Fatal(err)
	}
	if e := wait(t, p); e.Code != 0 || p.Stderr() != nil || !e.Stderr.EOF {
		t.Errorf("cat in a terminal ended with %+v", e)
	}

	p = start(t, ps, ExecSpec{Argv: sh("echo ready; exec sleep 1000"), TTY: true})
	until(t, attach(t, p.Stdout(), 0), "ready")
	p.WriteStdin(nil, []byte{3}) // Ctrl-C
	if e := wait(t, p); e.Signal != syscall.SIGINT {
		t.Errorf("Ctrl-C ended it with %+v", e)
	}
	p = start(t, ps, ExecSpec{Argv: []string{"true"}})
	wantKind(t, p.Resize(1, 1), ErrInvalid)
}

// TestTerminalClosedByItsProcess: a program that closes all its standard streams and
// goes on must not get SIGHUP, and can open its terminal again.
func TestTerminalClosedByItsProcess(t *testing.T) {
	ps := newProcesses(t, Config{})
	life := newLifeline(t)
	for range 20 {
		e, out, _ := run(t, ps, ExecSpec{Argv: sh("exec 9>" + life.path + "; echo a; exec <&- >&- 2>&-; read x < /proc/self/stat; echo b > /dev/tty; exit 5"), TTY: true})
		if e.Code != 5 || out != "a\r\nb\r\n" {
			t.Fatalf("%+v, %q", e, out)
		}
	}
	life.awaitEnd(t)
}
