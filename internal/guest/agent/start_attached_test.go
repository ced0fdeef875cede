package agent

import (
	"io"
	"testing"
	"time"
)

// TestStartAttachedKeepsTheBeginning: the program writes far more than the ring holds
// before its output is read. Its readers were attached first, so it waits for them
// and no byte is lost. A reader attached now would be too late.
func TestStartAttachedKeepsTheBeginning(t *testing.T) {
	const total, limit = 1 << 20, 4 << 10
	ps := newProcesses(t, Config{OutputLimit: limit})
	p, out, err := ps.StartAttached(ExecSpec{Argv: sh(pattern(total))})
	if err != nil {
		t.Fatal(err)
	}
	defer out.Close()
	deadline := time.After(patience)
	for p.Stdout().Stats().Bytes < limit {
		select {
		case <-out.Stdout.Ready():
		case <-deadline:
			t.Fatalf("the ring does not fill: %+v", p.Stdout().Stats())
		}
	}
	if s := p.Stdout().Stats(); s.Bytes != limit || s.Dropped != 0 || s.Start != 0 {
		t.Errorf("with nobody reading: %+v, want a full ring from offset 0", s)
	}
	if _, ended := p.Exit(); ended {
		t.Error("the program has ended although nobody took its output")
	}
	got, err := io.ReadAll(readerOf(t, out.Stdout))
	if err != nil || string(got) != patternAt(0, total) {
		t.Errorf("%d bytes of %d, %v", len(got), total, err)
	}
	if out.Stdout.Began() != 0 || out.Stdout.Lost() != 0 || out.Stderr.Began() != 0 {
		t.Errorf("readers began at %d and %d, lost %d", out.Stdout.Began(), out.Stderr.Began(), out.Stdout.Lost())
	}
	if e := wait(t, p); e.Stdout.Bytes != total || e.Stdout.Dropped != 0 {
		t.Errorf("counted as %+v", e.Stdout)
	}
}

// TestPrepareRunsBeforeTheProgram: prepare runs before the fork, because between fork
// and pump the reaper may already take the output of a program that has ended at
// once.
func TestPrepareRunsBeforeTheProgram(t *testing.T) {
	ps := newProcesses(t, Config{})
	called := false
	p, err := ps.startWith(ExecSpec{Argv: sh("exit 0")}, func(p *Process) error {
		called = true
		if p.pid != 0 {
			t.Errorf("the program runs already, as %d", p.pid)
		}
		return nil
	})
	if err != nil || !called {
		t.Fatalf("called %v, %v", called, err)
	}
	wait(t, p)

	_, err = ps.startWith(ExecSpec{ID: "refused", Argv: sh("exit 0")}, func(*Process) error { return ErrBusy })
	wantKind(t, err, ErrBusy)
	_, err = ps.Get("refused")
	wantKind(t, err, ErrNotFound)
}

func TestStartAttachedToATerminal(t *testing.T) {
	ps := newProcesses(t, Config{})
	p, out, err := ps.StartAttached(ExecSpec{Argv: sh("echo hello"), TTY: true})
	if err != nil {
		t.Fatal(err)
	}
	defer out.Close()
	if out.Stderr != nil {
		t.Error("a terminal has one output")
	}
	until(t, out.Stdout, "hello\r\n")
	wait(t, p)

	if _, _, err := ps.StartAttached(ExecSpec{Argv: []string{"/does/not/exist"}}); err == nil {
		t.Error("a missing program was started")
	}
}
