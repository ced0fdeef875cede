package agent

import (
	"bytes"
	"context"
	"errors"
	"io"
	"io/fs"
	"net"
	"os"
	"path/filepath"
	"runtime"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"agentrun.dev/internal/guest/guestrpc"
)

// startServer serves on a unix socket and returns its path.
func startServer(t testing.TB, down func(Action, time.Duration) error) string {
	t.Helper()
	return serve(t, &Server{Down: down})
}

// serve completes a server and serves it on a unix socket, whose path it
// returns.
func serve(t testing.TB, s *Server) string {
	t.Helper()
	ps := NewProcesses(Config{})
	s.Processes, s.Version, s.Log = ps, "test", func(msg string) { t.Log(msg) }
	path := filepath.Join(t.TempDir(), "agent.sock")
	l, err := ListenUnix(path)
	if err != nil {
		t.Fatal(err)
	}
	served := make(chan error, 1)
	ctx, cancel := context.WithCancel(context.Background())
	go func() { served <- s.Serve(ctx, l) }()
	t.Cleanup(func() {
		cancel()
		l.Close()
		if err := <-served; !errors.Is(err, ErrClosed) {
			t.Errorf("Serve: %v", err)
		}
		ps.Close()
	})
	return path
}

func dialServer(t testing.TB, path string) (*guestrpc.Client, net.Conn) {
	t.Helper()
	conn, err := net.Dial("unix", path)
	if err != nil {
		t.Fatal(err)
	}
	c, err := guestrpc.Dial(conn)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { c.Close() })
	return c, conn
}

func startClient(t testing.TB) *guestrpc.Client {
	path := startServer(t, nil)
	c, _ := dialServer(t, path)
	return c
}

func rpcContext(t testing.TB) context.Context {
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	t.Cleanup(cancel)
	return ctx
}

func shell(script string) guestrpc.ExecRequest {
	return guestrpc.ExecRequest{Argv: []string{"/bin/sh", "-c", script}, Workdir: "/"}
}

func code(err error) guestrpc.Code {
	var e *guestrpc.Error
	if errors.As(err, &e) {
		return e.Code
	}
	return 0
}

func TestServerInfo(t *testing.T) {
	c := startClient(t)
	ctx := rpcContext(t)
	info, err := c.Info(ctx)
	if err != nil {
		t.Fatal(err)
	}
	hostname, _ := os.Hostname()
	if info.AgentVersion != "test" || info.Hostname != hostname || info.Uptime <= 0 || info.Processes == 0 || info.MemoryTotal == 0 {
		t.Errorf("got %+v", info)
	}
	if err := c.Shutdown(ctx, guestrpc.ShutdownRequest{Mode: guestrpc.PowerOff}); code(err) != guestrpc.CodeFailedPrecondition {
		t.Errorf("shutdown outside of a VM: %v", err)
	}
}

func TestServerShutdown(t *testing.T) {
	called := make(chan Action, 1)
	path := startServer(t, func(a Action, grace time.Duration) error {
		called <- a
		return fail(ErrBusy, "shut down", "", "test")
	})
	c, _ := dialServer(t, path)
	if err := c.Shutdown(rpcContext(t), guestrpc.ShutdownRequest{Mode: guestrpc.Reboot}); err != nil {
		t.Fatal(err)
	}
	if a := <-called; a != Reboot {
		t.Errorf("action %v", a)
	}
	if err := c.Shutdown(rpcContext(t), guestrpc.ShutdownRequest{}); !errors.Is(err, fs.ErrInvalid) {
		t.Errorf("no mode: %v", err)
	}
}

func TestServerExec(t *testing.T) {
	c := startClient(t)
	ctx := rpcContext(t)
	var stdout, stderr bytes.Buffer
	req := shell(`echo out $A; echo err >&2; cat; exit 3`)
	req.Env = []string{"A=b"}
	exit, err := c.Run(ctx, req, strings.NewReader("input"), &stdout, &stderr)
	if err != nil {
		t.Fatal(err)
	}
	if exit.Code != 3 || exit.Signal != 0 || stdout.String() != "out b\ninput" || stderr.String() != "err\n" {
		t.Errorf("exit %+v, stdout %q, stderr %q", exit, &stdout, &stderr)
	}
	if exit.Stdout.Bytes != 11 || exit.Wall <= 0 || exit.MaxRSS == 0 {
		t.Errorf("exit %+v", exit)
	}

	exit, err = c.Run(ctx, shell(`kill -9 $$`), nil, nil, nil)
	if err != nil || exit.Signal != 9 || exit.Code != 137 {
		t.Errorf("exit %+v, %v", exit, err)
	}
	if _, err := c.Run(ctx, guestrpc.ExecRequest{Argv: []string{"/no/such"}}, nil, nil, nil); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("no program: %v", err)
	}
	if _, err := c.Run(ctx, guestrpc.ExecRequest{Argv: []string{"true"}, User: "no such user"}, nil, nil, nil); !errors.Is(err, fs.ErrInvalid) {
		t.Errorf("no user: %v", err)
	}
	if _, err := c.Run(ctx, guestrpc.ExecRequest{}, nil, nil, nil); !errors.Is(err, fs.ErrInvalid) {
		t.Errorf("no argv: %v", err)
	}
	req = shell(`sleep 60 & sleep 60`)
	req.Timeout = 50 * time.Millisecond
	if exit, err = c.Run(ctx, req, nil, nil, nil); err != nil || !exit.TimedOut || exit.Signal != 9 {
		t.Errorf("timeout: %+v, %v", exit, err)
	}
	// A process that closes its stdin does not block the writer.
	if exit, err = c.Run(ctx, shell(`exec <&-; sleep 0.1`), io.LimitReader(zeros{}, 4<<20), nil, nil); err != nil || exit.Code != 0 {
		t.Errorf("closed stdin: %+v, %v", exit, err)
	}
}

type zeros struct{}

func (zeros) Read(p []byte) (int, error) { clear(p); return len(p), nil }

func TestServerBulkExec(t *testing.T) {
	c := startClient(t)
	var out bytes.Buffer
	const size = 8 << 20
	exit, err := c.Run(rpcContext(t), shell(`cat`), io.LimitReader(zeros{}, size), &out, nil)
	if err != nil || out.Len() != size || exit.Stdout.Bytes != size || exit.Stdout.Dropped != 0 {
		t.Errorf("%d bytes, %+v, %v", out.Len(), exit, err)
	}
	// No byte is lost at the start either, however fast the output comes.
	for range 5 {
		x, err := c.Exec(rpcContext(t), shell(`head -c 2000000 /dev/zero`))
		if err != nil {
			t.Fatal(err)
		}
		n, err := io.Copy(io.Discard, x.Stdout())
		if err != nil || n != 2000000 || x.Started().Stdout.Dropped != 0 {
			t.Errorf("%d bytes, %+v, %v", n, x.Started(), err)
		}
	}
}

func TestServerTerminal(t *testing.T) {
	c := startClient(t)
	ctx := rpcContext(t)
	req := shell(`stty size; read line; stty size; echo "got $line"; exit 5`)
	req.TTY, req.Rows, req.Cols = true, 30, 100
	x, err := c.Exec(ctx, req)
	if err != nil {
		t.Fatal(err)
	}
	buf := make([]byte, 8)
	if _, err := io.ReadFull(x.Stdout(), buf); err != nil || !strings.HasPrefix(string(buf), "30 100") {
		t.Fatalf("%q, %v", buf, err)
	}
	if err := x.Resize(ctx, 40, 120); err != nil {
		t.Error(err)
	}
	io.WriteString(x.Stdin(), "hello\n")
	out, err := io.ReadAll(x.Stdout())
	if err != nil || !strings.Contains(string(out), "40 120") || !strings.Contains(string(out), "got hello") {
		t.Errorf("%q, %v", out, err)
	}
	if exit, err := x.Wait(); err != nil || exit.Code != 5 {
		t.Errorf("%+v, %v", exit, err)
	}
	if err := c.Resize(ctx, guestrpc.ResizeRequest{ID: "none"}); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("resize: %v", err)
	}
}

// TestServerWriteStdin: stdin can be written without attaching to the process. All
// bytes arrive in order. If a process takes no input, an error says so.
func TestServerWriteStdin(t *testing.T) {
	c := startClient(t)
	ctx := rpcContext(t)
	req := shell(`exec cat`)
	req.Stdin = true
	x, err := c.Exec(ctx, req)
	if err != nil {
		t.Fatal(err)
	}
	want := strings.Repeat("0123456789abcde\n", 3*guestrpc.MaxStdin/16) + "end"
	wrote := make(chan error, 1)
	go func() { wrote <- c.WriteStdin(ctx, x.ID(), strings.NewReader(want), true) }()
	got, err := io.ReadAll(x.Stdout())
	if err != nil || string(got) != want {
		t.Errorf("%d bytes came back, not %d (%v)", len(got), len(want), err)
	}
	if err := <-wrote; err != nil {
		t.Error(err)
	}
	if exit, err := x.Wait(); err != nil || exit.Code != 0 {
		t.Errorf("%+v, %v", exit, err)
	}
	var own *guestrpc.Error
	if err := c.WriteStdin(ctx, x.ID(), strings.NewReader("x"), false); !errors.As(err, &own) || own.Code != guestrpc.CodeFailedPrecondition {
		t.Errorf("write to what has ended: %v", err)
	}
	if err := c.WriteStdin(ctx, "none", strings.NewReader("x"), false); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("write to nobody: %v", err)
	}
}

func TestServerAttachAfterConnectionLoss(t *testing.T) {
	path := startServer(t, nil)
	c, conn := dialServer(t, path)
	ctx := rpcContext(t)
	req := shell(`echo one; read x; echo two $x; read y`)
	req.ID, req.Stdin = "job", true
	x, err := c.Exec(ctx, req)
	if err != nil {
		t.Fatal(err)
	}
	buf := make([]byte, 4)
	if _, err := io.ReadFull(x.Stdout(), buf); err != nil || string(buf) != "one\n" {
		t.Fatalf("%q, %v", buf, err)
	}
	conn.Close()
	if _, err := x.Wait(); code(err) != guestrpc.CodeUnavailable {
		t.Errorf("wait: %v", err)
	}

	c, _ = dialServer(t, path)
	list, err := c.ListExecs(ctx)
	if err != nil || len(list) != 1 || list[0].ID != "job" || !list[0].Running || list[0].Argv[0] != "/bin/sh" {
		t.Fatalf("%+v, %v", list, err)
	}
	if err := c.ReleaseExec(ctx, "job"); code(err) != guestrpc.CodeFailedPrecondition {
		t.Errorf("released while it runs: %v", err)
	}
	stdout, stderr := x.Offsets()
	y, err := c.Attach(ctx, guestrpc.AttachRequest{ID: "job", StdoutOffset: stdout, StderrOffset: stderr})
	if err != nil || y.Started().Stdout.Offset != 4 {
		t.Fatalf("%+v, %v", y, err)
	}
	io.WriteString(y.Stdin(), "more\n")
	buf = make([]byte, 9)
	if _, err := io.ReadFull(y.Stdout(), buf); err != nil || string(buf) != "two more\n" {
		t.Fatalf("%q, %v", buf, err)
	}
	if err := y.Signal(ctx, int(syscall.SIGTERM), guestrpc.ScopeGroup); err != nil {
		t.Error(err)
	}
	if exit, err := y.Wait(); err != nil || exit.Signal != int32(syscall.SIGTERM) || exit.Stdout.Bytes != 13 {
		t.Errorf("%+v, %v", exit, err)
	}
	// The exec has ended, and all its output is still there.
	z, err := c.Attach(ctx, guestrpc.AttachRequest{ID: "job"})
	if err != nil {
		t.Fatal(err)
	}
	if all, err := io.ReadAll(z.Stdout()); err != nil || string(all) != "one\ntwo more\n" {
		t.Errorf("%q, %v", all, err)
	}
	if exit, err := z.Wait(); err != nil || exit.Signal != int32(syscall.SIGTERM) {
		t.Errorf("%+v, %v", exit, err)
	}
	if err := c.ReleaseExec(ctx, "job"); err != nil {
		t.Error(err)
	}
	if _, err := c.Attach(ctx, guestrpc.AttachRequest{ID: "job"}); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("attach: %v", err)
	}
	if err := c.Signal(ctx, guestrpc.SignalRequest{ID: "job", Signal: 9}); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("signal: %v", err)
	}
}

func TestServerFiles(t *testing.T) {
	c := startClient(t)
	ctx := rpcContext(t)
	dir := t.TempDir()
	scope := guestrpc.FileScope{Workdir: dir}
	data := bytes.Repeat([]byte("0123456789"), 30_000)
	reply, err := c.WriteFile(ctx, guestrpc.WriteRequest{FileScope: scope, Path: "a/f", Parents: true, Atomic: true, Perm: 0o600}, bytes.NewReader(data))
	if err != nil || reply.Size != int64(len(data)) {
		t.Fatalf("%+v, %v", reply, err)
	}
	got, err := c.ReadFile(ctx, guestrpc.ReadRequest{Path: dir + "/a/f"}, 1<<20)
	if err != nil || !bytes.Equal(got, data) {
		t.Errorf("read %d bytes, %v", len(got), err)
	}
	reply, err = c.WriteFile(ctx, guestrpc.WriteRequest{FileScope: scope, Path: "a/f", Mode: guestrpc.WriteAppend}, strings.NewReader("end"))
	if err != nil || reply.Written != 3 || reply.Size != int64(len(data))+3 {
		t.Errorf("%+v, %v", reply, err)
	}
	if _, err = c.WriteFile(ctx, guestrpc.WriteRequest{FileScope: scope, Path: "a/f", Mode: guestrpc.WriteAt, Offset: 1}, strings.NewReader("X")); err != nil {
		t.Error(err)
	}
	got, err = c.ReadFile(ctx, guestrpc.ReadRequest{FileScope: scope, Path: "a/f", Length: 3}, 3)
	if err != nil || string(got) != "0X2" {
		t.Errorf("%q, %v", got, err)
	}
	info, err := c.Stat(ctx, guestrpc.StatRequest{FileScope: scope, Path: "a/f"})
	if err != nil || info.Mode != guestrpc.ModeRegular|0o600 || info.Path != dir+"/a/f" || info.Size != int64(len(data))+3 {
		t.Errorf("%+v, %v", info, err)
	}
	for _, err := range []error{
		c.Mkdir(ctx, guestrpc.MkdirRequest{FileScope: scope, Path: "b/c", Parents: true}),
		c.Move(ctx, guestrpc.MoveRequest{FileScope: scope, From: "a/f", To: "b/g"}),
		c.Chmod(ctx, guestrpc.ChmodRequest{FileScope: scope, Path: "b/g", Perm: 0o640}),
		c.Chown(ctx, guestrpc.ChownRequest{FileScope: scope, Path: "b/g", Owner: strconv.Itoa(os.Getuid())}),
		c.Symlink(ctx, guestrpc.SymlinkRequest{FileScope: scope, Path: "l", Target: "b/g"}),
		c.Sync(ctx),
	} {
		if err != nil {
			t.Error(err)
		}
	}
	if target, err := c.Readlink(ctx, guestrpc.ReadlinkRequest{FileScope: scope, Path: "l"}); err != nil || target != "b/g" {
		t.Errorf("%q, %v", target, err)
	}
	if info, err := c.Stat(ctx, guestrpc.StatRequest{FileScope: scope, Path: "l", Follow: true}); err != nil || info.Mode != guestrpc.ModeRegular|0o640 {
		t.Errorf("%+v, %v", info, err)
	}
	if err := c.Remove(ctx, guestrpc.RemoveRequest{FileScope: scope, Path: "b"}); code(err) != guestrpc.CodeFailedPrecondition {
		t.Errorf("remove: %v", err)
	}
	if err := c.Remove(ctx, guestrpc.RemoveRequest{FileScope: scope, Path: "b", Recursive: true}); err != nil {
		t.Error(err)
	}
}

func TestServerFileErrors(t *testing.T) {
	c := startClient(t)
	ctx := rpcContext(t)
	dir := t.TempDir()
	if _, err := c.Stat(ctx, guestrpc.StatRequest{Path: dir + "/none"}); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("stat: %v", err)
	}
	if _, err := c.Stat(ctx, guestrpc.StatRequest{}); !errors.Is(err, fs.ErrInvalid) {
		t.Errorf("stat: %v", err)
	}
	if _, err := c.Stat(ctx, guestrpc.StatRequest{FileScope: guestrpc.FileScope{Workdir: "rel"}, Path: "x"}); !errors.Is(err, fs.ErrInvalid) {
		t.Errorf("relative workdir: %v", err)
	}
	if _, err := c.OpenRead(ctx, guestrpc.ReadRequest{Path: dir}); code(err) != guestrpc.CodeFailedPrecondition {
		t.Errorf("read of a folder: %v", err)
	}
	if err := c.Mkdir(ctx, guestrpc.MkdirRequest{Path: dir}); !errors.Is(err, fs.ErrExist) {
		t.Errorf("mkdir: %v", err)
	}
	if _, err := c.WriteFile(ctx, guestrpc.WriteRequest{Path: dir + "/no/f"}, zeros{}); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("write: %v", err)
	}
	if err := c.Move(ctx, guestrpc.MoveRequest{FileScope: guestrpc.FileScope{Workdir: "/"}, From: "/x", To: ""}); !errors.Is(err, fs.ErrInvalid) {
		t.Errorf("move: %v", err)
	}
	// An abandoned atomic write leaves nothing.
	w, err := c.OpenWrite(ctx, guestrpc.WriteRequest{Path: dir + "/f", Atomic: true})
	if err != nil {
		t.Fatal(err)
	}
	w.Write([]byte("half"))
	w.Abort()
	if _, err := c.Stat(ctx, guestrpc.StatRequest{Path: dir + "/f"}); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("stat: %v", err)
	}
}

func TestServerListPages(t *testing.T) {
	c := startClient(t)
	ctx := rpcContext(t)
	dir := t.TempDir()
	const files = 900
	for i := range files {
		name := strconv.Itoa(i) + strings.Repeat("x", i%200)
		if err := os.WriteFile(filepath.Join(dir, name), nil, 0o600); err != nil {
			t.Fatal(err)
		}
	}
	seen := map[string]bool{}
	pages := 0
	req := guestrpc.ListRequest{Path: dir, Depth: 2}
	for {
		page, err := c.List(ctx, req)
		if err != nil {
			t.Fatal(err)
		}
		for _, e := range page.Entries {
			if seen[e.Path] {
				t.Fatalf("%s listed twice", e.Path)
			}
			seen[e.Path] = true
		}
		pages++
		if page.Next == "" {
			break
		}
		req.Token = page.Next
	}
	if len(seen) != files || pages < 2 {
		t.Errorf("%d files on %d pages", len(seen), pages)
	}
	page, err := c.List(ctx, guestrpc.ListRequest{Path: dir, Limit: 3})
	if err != nil || len(page.Entries) != 3 || page.Next == "" {
		t.Errorf("%+v, %v", page, err)
	}
}

func TestServerWatch(t *testing.T) {
	c := startClient(t)
	ctx := rpcContext(t)
	dir := t.TempDir()
	w, err := c.Watch(ctx, guestrpc.WatchRequest{Path: dir, Recursive: true})
	if err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(dir+"/f", []byte("x"), 0o600); err != nil {
		t.Fatal(err)
	}
	want := []guestrpc.EventKind{guestrpc.EventCreate, guestrpc.EventWrite, guestrpc.EventClose}
	for _, kind := range want {
		e, err := w.Next()
		if err != nil || e.Kind != kind || e.Path != dir+"/f" {
			t.Fatalf("%+v, %v, want kind %d", e, err, kind)
		}
	}
	w.Close()
	if _, err := c.Watch(ctx, guestrpc.WatchRequest{Path: dir + "/none"}); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("watch: %v", err)
	}
}

func TestServerLimitsConnections(t *testing.T) {
	path := startServer(t, nil)
	for range maxConns {
		dialServer(t, path)
	}
	conn, err := net.Dial("unix", path)
	if err != nil {
		t.Fatal(err)
	}
	if c, err := guestrpc.Dial(conn); err == nil {
		c.Close()
		t.Error("one connection more was taken")
	}
}

// TestServerIdleCost allows the agent two goroutines for each connection, one that
// reads and one that has run a call and waits for the next, and one that accepts.
func TestServerIdleCost(t *testing.T) {
	c := startClient(t)
	if _, err := c.Run(rpcContext(t), shell("true"), nil, nil, nil); err != nil {
		t.Fatal(err)
	}
	if err := c.Ping(rpcContext(t)); err != nil {
		t.Fatal(err)
	}
	// The reply has arrived, so other goroutines have nothing left to do.
	var mine []string
	for range 1000 {
		mine = mine[:0]
		buf := make([]byte, 1<<20)
		for _, stack := range strings.Split(string(buf[:runtime.Stack(buf, true)]), "\n\n") {
			if strings.Contains(stack, "agent.(*Server)") || strings.Contains(stack, "guestrpc.(*server)") {
				mine = append(mine, stack)
			}
		}
		if len(mine) == 3 {
			return
		}
		runtime.Gosched()
	}
	t.Errorf("%d goroutines when idle, want 3:\n%s", len(mine), strings.Join(mine, "\n\n"))
}

func TestListenUnixErrors(t *testing.T) {
	if _, err := ListenUnix(t.TempDir() + "/no/such/dir"); !errors.Is(err, ErrNotFound) {
		t.Errorf("got %v", err)
	}
}

func TestOnlyTheHostMayConnect(t *testing.T) {
	for _, tt := range []struct {
		from unix.RawSockaddrVM
		want bool
	}{
		{unix.RawSockaddrVM{Family: unix.AF_VSOCK, Cid: unix.VMADDR_CID_HOST, Port: 1}, true},
		{unix.RawSockaddrVM{Family: unix.AF_VSOCK, Cid: unix.VMADDR_CID_LOCAL}, false},
		{unix.RawSockaddrVM{Family: unix.AF_VSOCK, Cid: unix.VMADDR_CID_HYPERVISOR}, false},
		{unix.RawSockaddrVM{Family: unix.AF_VSOCK, Cid: 3}, false}, // the guest's own
		{unix.RawSockaddrVM{Family: unix.AF_UNIX, Cid: unix.VMADDR_CID_HOST}, false},
		{unix.RawSockaddrVM{}, false},
	} {
		if got := fromHost(&tt.from); got != tt.want {
			t.Errorf("%+v: %v", tt.from, got)
		}
	}
}

func BenchmarkServerPing(b *testing.B) {
	c := startClient(b)
	ctx := context.Background()
	b.ReportAllocs()
	for b.Loop() {
		if err := c.Ping(ctx); err != nil {
			b.Fatal(err)
		}
	}
}

func BenchmarkServerExecTrue(b *testing.B) {
	c := startClient(b)
	ctx := context.Background()
	for b.Loop() {
		if _, err := c.Run(ctx, guestrpc.ExecRequest{Argv: []string{"/bin/true"}, Workdir: "/"}, nil, nil, nil); err != nil {
			b.Fatal(err)
		}
	}
}
