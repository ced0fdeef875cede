package guestrpc

import (
	"bytes"
	"context"
	"errors"
	"io"
	"io/fs"
	"reflect"
	"strings"
	"syscall"
	"testing"
	"time"
)

func TestInfoPingSync(t *testing.T) {
	c := start(t, newFakeGuest())
	ctx := testContext(t)
	if err := c.Ping(ctx); err != nil {
		t.Fatal(err)
	}
	info, err := c.Info(ctx)
	if err != nil {
		t.Fatal(err)
	}
	want := Info{AgentVersion: "test", Kernel: "6.1", Hostname: "h", BootID: "b", Uptime: time.Second, Generation: 7, Processes: 3}
	if info != want {
		t.Errorf("got %+v, want %+v", info, want)
	}
	if err := c.Sync(ctx); err != nil {
		t.Error(err)
	}
	if c.Version() != MaxVersion || !reflect.DeepEqual(c.Capabilities(), []string{"test"}) {
		t.Errorf("version %d, capabilities %v", c.Version(), c.Capabilities())
	}
	if c.Err() != nil {
		t.Error(c.Err())
	}
}

func TestRun(t *testing.T) {
	c := start(t, newFakeGuest())
	ctx := testContext(t)
	var stdout, stderr bytes.Buffer
	exit, err := c.Run(ctx, ExecRequest{Argv: []string{"echo", "hello", "world"}}, nil, &stdout, &stderr)
	if err != nil {
		t.Fatal(err)
	}
	if exit.Code != 0 || stdout.String() != "hello world\n" || stderr.String() != "noise\n" {
		t.Errorf("exit %+v, stdout %q, stderr %q", exit, &stdout, &stderr)
	}
	if exit.Stdout.Bytes != 12 || exit.Stderr.Bytes != 6 {
		t.Errorf("totals %+v", exit)
	}

	in := strings.Repeat("0123456789", 100_000)
	stdout.Reset()
	if _, err := c.Run(ctx, ExecRequest{Argv: []string{"cat"}}, strings.NewReader(in), &stdout, nil); err != nil {
		t.Fatal(err)
	}
	if stdout.String() != in {
		t.Errorf("cat returned %d bytes of %d", stdout.Len(), len(in))
	}
	if exit, err = c.Run(ctx, ExecRequest{Argv: []string{"exit", "3"}}, nil, nil, nil); err != nil || exit.Code != 3 {
		t.Errorf("exit %+v, %v", exit, err)
	}
	_, err = c.Run(ctx, ExecRequest{Argv: []string{"nosuch"}}, nil, nil, nil)
	if !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("got %v, want not found", err)
	}
	if _, err = c.Run(ctx, ExecRequest{Argv: []string{"echo", "x"}}, nil, failingWriter{}, nil); !errors.Is(err, errDisk) {
		t.Errorf("got %v, want the writer's error", err)
	}
}

var errDisk = errors.New("disk on fire")

type failingWriter struct{}

func (failingWriter) Write([]byte) (int, error) { return 0, errDisk }

func TestExecSession(t *testing.T) {
	g := newFakeGuest()
	c := start(t, g)
	ctx := testContext(t)
	x, err := c.Exec(ctx, ExecRequest{ID: "p", Argv: []string{"pause"}, TTY: true})
	if err != nil {
		t.Fatal(err)
	}
	if x.ID() != "p" || x.Started().PID != 42 {
		t.Errorf("started %+v", x.Started())
	}
	if err := x.Resize(ctx, 50, 132); err != nil {
		t.Error(err)
	}
	p, _ := g.get("p")
	p.mu.Lock()
	if p.rows != 50 || p.cols != 132 {
		t.Errorf("size %dx%d", p.rows, p.cols)
	}
	p.mu.Unlock()
	if err := x.Signal(ctx, int(syscall.SIGTERM), ScopeSession); err != nil {
		t.Error(err)
	}
	exit, err := x.Wait()
	if err != nil || exit.Signal != 15 || exit.Code != 143 {
		t.Errorf("exit %+v, %v", exit, err)
	}
	if n, err := x.Stdout().Read(make([]byte, 1)); n != 0 || err != io.EOF {
		t.Errorf("read after exit: %d, %v", n, err)
	}
	if _, err := x.Stdin().Write([]byte("x")); err != io.ErrClosedPipe {
		t.Errorf("write after exit: %v", err)
	}
	if err := c.ReleaseExec(ctx, "p"); err != nil {
		t.Error(err)
	}
	if err := c.ReleaseExec(ctx, "p"); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("released twice: %v", err)
	}
}

func TestListExecsFollowsPages(t *testing.T) {
	g := newFakeGuest()
	c := start(t, g)
	g.mu.Lock()
	for _, id := range []string{"a", "b", "c", "d", "e"} {
		g.procs[id] = &fakeProc{id: id, argv: []string{id}}
	}
	g.mu.Unlock()
	list, err := c.ListExecs(testContext(t))
	if err != nil {
		t.Fatal(err)
	}
	var ids string
	for _, e := range list {
		ids += e.ID
	}
	if ids != "abcde" || !list[0].Started.Equal(time.Unix(1, 2)) {
		t.Errorf("got %+v", list)
	}
}

func TestFiles(t *testing.T) {
	g := newFakeGuest()
	c := start(t, g)
	ctx := testContext(t)
	data := bytes.Repeat([]byte("agentrun"), 50_000)
	reply, err := c.WriteFile(ctx, WriteRequest{Path: "/f", Atomic: true}, bytes.NewReader(data))
	if err != nil || reply.Size != int64(len(data)) {
		t.Fatalf("write: %+v, %v", reply, err)
	}
	got, err := c.ReadFile(ctx, ReadRequest{Path: "/f"}, 1<<20)
	if err != nil || !bytes.Equal(got, data) {
		t.Fatalf("read %d bytes, %v", len(got), err)
	}
	got, err = c.ReadFile(ctx, ReadRequest{Path: "/f", Offset: 5, Length: 4}, 4)
	if err != nil || string(got) != "runa" {
		t.Errorf("read %q, %v", got, err)
	}
	var e *Error
	if _, err = c.ReadFile(ctx, ReadRequest{Path: "/f"}, 1000); !errors.As(err, &e) || e.Code != CodeResourceExhausted {
		t.Errorf("over the limit: %v", err)
	}
	r, err := c.OpenRead(ctx, ReadRequest{Path: "/f"})
	if err != nil || r.Info().Size != int64(len(data)) {
		t.Fatal(err)
	}
	r.Close()
	if _, err := r.Read(make([]byte, 1)); !errors.Is(err, ErrClosed) {
		t.Errorf("read after close: %v", err)
	}
	if _, err := c.OpenRead(ctx, ReadRequest{Path: "/none"}); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("open: %v", err)
	}
	g.put("bad sector", "part")
	if got, err := c.ReadFile(ctx, ReadRequest{Path: "bad sector"}, 100); err == nil {
		t.Errorf("read %q from a bad disk without an error", got)
	}
	_, err = c.WriteFile(ctx, WriteRequest{Path: "full"}, bytes.NewReader(make([]byte, 1<<20)))
	if !errors.As(err, &e) || e.Code != CodeResourceExhausted {
		t.Errorf("full disk: %v", err)
	}
	if _, err := c.WriteFile(ctx, WriteRequest{Path: "/g"}, io.MultiReader(strings.NewReader("x"), failingReader{})); !errors.Is(err, errDisk) {
		t.Errorf("failing source: %v", err)
	}
}

type failingReader struct{}

func (failingReader) Read([]byte) (int, error) { return 0, errDisk }

func TestFileVerbs(t *testing.T) {
	g := newFakeGuest()
	c := start(t, g)
	ctx := testContext(t)
	g.put("/f", "12345")
	info, err := c.Stat(ctx, StatRequest{FileScope: FileScope{User: "ann"}, Path: "/f"})
	if err != nil || info.Size != 5 || info.Owner != "ann" || info.IsDir() {
		t.Errorf("stat %+v, %v", info, err)
	}
	if _, err := c.Stat(ctx, StatRequest{Path: "/none"}); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("stat: %v", err)
	}
	page, err := c.List(ctx, ListRequest{Path: "/"})
	if err != nil || len(page.Entries) != 1 || page.Entries[0].Path != "/f" || page.Next != "" {
		t.Errorf("list %+v, %v", page, err)
	}
	for _, err := range []error{
		c.Mkdir(ctx, MkdirRequest{Path: "/d", Parents: true}),
		c.Move(ctx, MoveRequest{From: "/a", To: "/b"}),
		c.Remove(ctx, RemoveRequest{Path: "/d", Recursive: true}),
		c.Chmod(ctx, ChmodRequest{Path: "/f", Perm: 0o640}),
		c.Chown(ctx, ChownRequest{Path: "/f", Owner: "1", Group: "2", Follow: true}),
		c.Symlink(ctx, SymlinkRequest{Path: "/l", Target: "f"}),
	} {
		if err != nil {
			t.Error(err)
		}
	}
	if target, err := c.Readlink(ctx, ReadlinkRequest{Path: "/l"}); err != nil || target != "f" {
		t.Errorf("readlink %q, %v", target, err)
	}
	if _, err := c.Readlink(ctx, ReadlinkRequest{Path: "/f"}); !errors.Is(err, fs.ErrInvalid) {
		t.Errorf("readlink: %v", err)
	}
	g.mu.Lock()
	defer g.mu.Unlock()
	if want := []string{"mkdir /d", "move /a /b", "remove /d", "chmod 640", "chown 1:2"}; !reflect.DeepEqual(g.calls, want) {
		t.Errorf("calls %q, want %q", g.calls, want)
	}
}

func TestWatch(t *testing.T) {
	g := newFakeGuest()
	c := start(t, g)
	w, err := c.Watch(testContext(t), WatchRequest{Path: "/", Recursive: true})
	if err != nil {
		t.Fatal(err)
	}
	want := WatchEvent{Kind: EventCreate, Path: "/" + strings.Repeat("x", maxPath-1), Dir: true}
	g.watch <- want
	for range 2 {
		if e, err := w.Next(); err != nil || e != want {
			t.Fatalf("event %+v, %v", e, err)
		}
	}
	close(g.watch)
	if _, err := w.Next(); err != io.EOF {
		t.Errorf("got %v, want io.EOF at the end", err)
	}

	g.mu.Lock()
	g.watch = make(chan WatchEvent)
	g.mu.Unlock()
	if w, err = c.Watch(testContext(t), WatchRequest{Path: "/"}); err != nil {
		t.Fatal(err)
	}
	w.Close()
	if _, err := w.Next(); !errors.Is(err, ErrClosed) {
		t.Errorf("next after close: %v", err)
	}
}

func TestShutdown(t *testing.T) {
	g := newFakeGuest()
	c := start(t, g)
	ctx, cancel := context.WithCancel(testContext(t))
	if err := c.Shutdown(ctx, ShutdownRequest{}); !errors.Is(err, fs.ErrInvalid) {
		t.Errorf("shutdown without a mode: %v", err)
	}
	if err := c.Shutdown(ctx, ShutdownRequest{Mode: Reboot, Grace: time.Second}); err != nil {
		t.Fatal(err)
	}
	cancel()
	g.mu.Lock()
	defer g.mu.Unlock()
	if g.shutdown.Grace != time.Second || g.shutdown.Mode != Reboot {
		t.Errorf("got %+v", g.shutdown)
	}
}

func TestRequestOverItsLimits(t *testing.T) {
	c := start(t, newFakeGuest())
	ctx := testContext(t)
	many := make([]string, 10)
	for i := range many {
		many[i] = strings.Repeat("x", 10<<10)
	}
	for name, req := range map[string]ExecRequest{
		"id":        {ID: strings.Repeat("x", maxID+1)},
		"one arg":   {Argv: []string{strings.Repeat("x", maxArg+1)}},
		"arg count": {Argv: make([]string, maxArgs+1)},
		"frame":     {Argv: many},
	} {
		if _, err := c.Exec(ctx, req); !errors.Is(err, fs.ErrInvalid) {
			t.Errorf("%s: got %v, want invalid_argument", name, err)
		}
	}
	if err := c.Signal(ctx, SignalRequest{ID: "p", Signal: -1}); !errors.Is(err, fs.ErrInvalid) {
		t.Errorf("negative signal: %v", err)
	}
	if err := c.Ping(ctx); err != nil {
		t.Errorf("session did not survive: %v", err)
	}
}

func TestHandlerPanicIsAnError(t *testing.T) {
	c := start(t, struct{ Handler }{}) // nil methods
	_, err := c.Info(testContext(t))
	var e *Error
	if !errors.As(err, &e) || e.Code != CodeInternal {
		t.Fatalf("got %v", err)
	}
	if err := c.Ping(testContext(t)); err != nil {
		t.Error(err)
	}
}

func TestUnknownMethod(t *testing.T) {
	c := start(t, newFakeGuest())
	err := c.call(testContext(t), 999, &empty{}, &empty{})
	if !errors.Is(err, fs.ErrInvalid) || !strings.Contains(err.Error(), "999") {
		t.Fatalf("got %v", err)
	}
}

func TestCallsAfterTheEnd(t *testing.T) {
	c := start(t, newFakeGuest())
	ctx := testContext(t)
	c.Close()
	<-c.Done()
	if !errors.Is(c.Err(), ErrClosed) {
		t.Errorf("Err is %v", c.Err())
	}
	var e *Error
	if err := c.Sync(ctx); !errors.As(err, &e) || e.Code != CodeUnavailable || !errors.Is(err, ErrClosed) {
		t.Errorf("call: %v", err)
	}
	if err := c.Ping(ctx); !errors.As(err, &e) || e.Code != CodeUnavailable {
		t.Errorf("ping: %v", err)
	}
	cancelled, cancel := context.WithCancel(ctx)
	cancel()
	if err := c.Sync(cancelled); !errors.Is(err, context.Canceled) {
		t.Errorf("call: %v", err)
	}
}
