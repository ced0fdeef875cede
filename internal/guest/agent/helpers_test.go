package agent

import (
	"errors"
	"io"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// patience is how long a test waits for an event that must come.
const patience = 60 * time.Second

// helperMode makes the test binary, started again by a test, play the agent in
// namespaces of its own. An init function handles it, because other test files of the
// package may need TestMain.
const helperMode = "AGENTRUN_GUEST_HELPER"

func init() {
	if mode := os.Getenv(helperMode); mode != "" {
		os.Exit(runHelper(mode))
	}
}

func runHelper(mode string) int {
	var err error
	switch mode {
	case "orphans":
		err = helpOrphans()
	case "shutdown":
		err = helpShutdown()
	default:
		err = errors.New("unknown mode " + mode)
	}
	if err != nil {
		os.Stderr.WriteString("helper " + mode + ": " + err.Error() + "\n")
		return 1
	}
	return 0
}

func newProcesses(t *testing.T, cfg Config) *Processes {
	t.Helper()
	if cfg.Log == nil {
		cfg.Log = func(msg string) { t.Log(msg) }
	}
	ps := NewProcesses(cfg)
	t.Cleanup(ps.Close)
	return ps
}

func start(t *testing.T, ps *Processes, spec ExecSpec) *Process {
	t.Helper()
	p, err := ps.Start(spec)
	if err != nil {
		t.Fatalf("start %q: %v", spec.Argv, err)
	}
	return p
}

func sh(script string) []string { return []string{"/bin/sh", "-c", script} }

func bash(script string) []string { return []string{"bash", "-c", script} }

func wait(t *testing.T, p *Process) Exit {
	t.Helper()
	await(t, p.Done(), "the end of "+p.ID())
	e, ok := p.Exit()
	if !ok {
		t.Fatal("no exit after Done")
	}
	return e
}

func await(t *testing.T, c <-chan struct{}, what string) {
	t.Helper()
	select {
	case <-c:
	case <-time.After(patience):
		t.Fatalf("waited in vain for %s", what)
	}
}

// all reads a stream from the oldest byte to its end.
func all(t *testing.T, o *Output) string {
	t.Helper()
	r, err := o.Attach(0)
	if err != nil {
		t.Fatal(err)
	}
	defer r.Close()
	b, err := io.ReadAll(readerOf(t, r))
	if err != nil {
		t.Fatal(err)
	}
	return string(b)
}

// run runs a program to its end and returns what it wrote.
func run(t *testing.T, ps *Processes, spec ExecSpec) (Exit, string, string) {
	t.Helper()
	p := start(t, ps, spec)
	e := wait(t, p)
	stderr := ""
	if p.Stderr() != nil {
		stderr = all(t, p.Stderr())
	}
	return e, all(t, p.Stdout()), stderr
}

type plainReader struct {
	r    *Reader
	stop <-chan struct{}
}

func (p plainReader) Read(b []byte) (int, error) { return p.r.Read(p.stop, b) }

// readerOf is an io.Reader that gives up after patience.
func readerOf(t *testing.T, r *Reader) io.Reader {
	stop := make(chan struct{})
	timer := time.AfterFunc(patience, func() { close(stop) })
	t.Cleanup(func() { timer.Stop() })
	return plainReader{r, stop}
}

// until reads from r until want has been seen, and returns all that was read.
func until(t *testing.T, r *Reader, want string) string {
	t.Helper()
	in := readerOf(t, r)
	var got []byte
	buf := make([]byte, 256)
	for !strings.Contains(string(got), want) {
		n, err := in.Read(buf)
		got = append(got, buf[:n]...)
		if err != nil {
			t.Fatalf("waiting for %q, have %q: %v", want, got, err)
		}
	}
	return string(got)
}

func attach(t *testing.T, o *Output, from int64) *Reader {
	t.Helper()
	r, err := o.Attach(from)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(r.Close)
	return r
}

// lifeline is a FIFO that processes hold open for writing; it reads as ended
// when the last of them is gone.
type lifeline struct {
	path string
	file *os.File
}

func newLifeline(t *testing.T) *lifeline {
	t.Helper()
	path := filepath.Join(t.TempDir(), "life")
	if err := unix.Mkfifo(path, 0o666); err != nil {
		t.Fatal(err)
	}
	fd, err := unix.Open(path, unix.O_RDONLY|unix.O_NONBLOCK|unix.O_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	l := &lifeline{path, os.NewFile(uintptr(fd), path)}
	t.Cleanup(func() { l.file.Close() })
	return l
}

// awaitEnd waits until no process holds the FIFO any more.
func (l *lifeline) awaitEnd(t *testing.T) {
	t.Helper()
	l.file.SetReadDeadline(time.Now().Add(patience))
	if _, err := io.Copy(io.Discard, l.file); err != nil {
		t.Fatalf("some process survived: %v", err)
	}
}

func wantKind(t *testing.T, err error, kind Kind) {
	t.Helper()
	if !errors.Is(err, kind) {
		t.Fatalf("got %v, want %q", err, string(kind))
	}
}

func writeTestFile(t *testing.T, path, data string, mode os.FileMode) string {
	t.Helper()
	if err := os.WriteFile(path, []byte(data), mode); err != nil {
		t.Fatal(err)
	}
	if err := os.Chmod(path, mode); err != nil {
		t.Fatal(err)
	}
	return path
}

// openDir is a temporary folder that every user can enter.
func openDir(t *testing.T) string {
	t.Helper()
	dir, err := os.MkdirTemp("", "guest")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.RemoveAll(dir) })
	if err := os.Chmod(dir, 0o777); err != nil {
		t.Fatal(err)
	}
	return dir
}

// testAccounts contains alice (1234:1234, also in the groups staff and audio).
func testAccounts(t *testing.T) Accounts {
	t.Helper()
	dir := openDir(t)
	return Accounts{
		Passwd: writeTestFile(t, dir+"/passwd", "root:x:0:0:root:/root:/bin/bash\n# comment\n\nbroken line\n"+
			"alice:x:1234:1234:Alice,,,:"+dir+":/bin/sh\n", 0o644),
		Group: writeTestFile(t, dir+"/group", "root:x:0:\nalice:x:1234:\nstaff:x:50:bob,alice\naudio:x:29:alice\naudio2:x:29:alice\nother:x:77:alicex\n", 0o644),
	}
}
