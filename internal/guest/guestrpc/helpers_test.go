package guestrpc

import (
	"bytes"
	"context"
	"errors"
	"io"
	"io/fs"
	"net"
	"os"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"
)

// socketPair returns two connected sockets.
func socketPair(t testing.TB) (host, guest net.Conn) {
	t.Helper()
	fds, err := syscall.Socketpair(syscall.AF_UNIX, syscall.SOCK_STREAM|syscall.SOCK_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	var conns [2]net.Conn
	for i, fd := range fds {
		f := os.NewFile(uintptr(fd), "socketpair")
		if conns[i], err = net.FileConn(f); err != nil {
			t.Fatal(err)
		}
		f.Close()
	}
	t.Cleanup(func() { conns[0].Close(); conns[1].Close() })
	return conns[0], conns[1]
}

// start serves h and returns a client for it. At the end of the test it checks that
// both end cleanly.
func start(t testing.TB, h Handler) *Client {
	t.Helper()
	host, guest := socketPair(t)
	served := make(chan error, 1)
	go func() { served <- Serve(context.Background(), guest, h, "test") }()
	c, err := Dial(host)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		c.Close()
		if err := <-served; err != nil && !errors.Is(err, syscall.ECONNRESET) && !errors.Is(err, syscall.EPIPE) {
			t.Errorf("Serve: %v", err)
		}
	})
	return c
}

func testContext(t testing.TB) context.Context {
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	t.Cleanup(cancel)
	return ctx
}

// fakeGuest is a guest with processes and files in memory.
type fakeGuest struct {
	Handler // nil: methods that are not implemented panic

	mu       sync.Mutex // protects all following fields
	procs    map[string]*fakeProc
	files    map[string][]byte
	links    map[string]string
	calls    []string
	shutdown *ShutdownRequest
	renewed  []RenewRequest
	clocks   []time.Time
	prepared []PrepareRequest
	watch    chan WatchEvent
	block    chan struct{} // Sync waits for it, if it is set
	blocked  chan struct{} // Sync reports that it waits
}

func newFakeGuest() *fakeGuest {
	return &fakeGuest{
		procs: map[string]*fakeProc{}, files: map[string][]byte{}, links: map[string]string{},
		watch: make(chan WatchEvent, 16), blocked: make(chan struct{}, 2*MaxStreams),
	}
}

func (g *fakeGuest) note(call string) {
	g.mu.Lock()
	g.calls = append(g.calls, call)
	g.mu.Unlock()
}

// killAll ends every process.
func (g *fakeGuest) killAll() {
	g.mu.Lock()
	defer g.mu.Unlock()
	for _, p := range g.procs {
		p.stdin.Close()
		select {
		case p.signal <- 9:
		default:
		}
	}
}

func (g *fakeGuest) put(path, contents string) {
	g.mu.Lock()
	g.files[path] = []byte(contents)
	g.mu.Unlock()
}

// fakeProc keeps all its output. Readers can begin anywhere.
type fakeProc struct {
	id   string
	argv []string
	tty  bool

	mu     sync.Mutex // protects all following fields
	cond   *sync.Cond
	out    [2][]byte
	ended  bool
	exit   ExitStatus
	stdin  *io.PipeWriter
	signal chan int32
	rows   uint16
	cols   uint16
}

func (p *fakeProc) write(stream int, b []byte) {
	p.mu.Lock()
	p.out[stream] = append(p.out[stream], b...)
	p.exit.Stdout.Bytes, p.exit.Stderr.Bytes = int64(len(p.out[0])), int64(len(p.out[1]))
	p.cond.Broadcast()
	p.mu.Unlock()
}

func (p *fakeProc) end(code, signal int32) {
	p.mu.Lock()
	p.ended, p.exit.Code, p.exit.Signal = true, code, signal
	p.cond.Broadcast()
	p.mu.Unlock()
}

// run plays the programs of the fake guest.
func (p *fakeProc) run(stdin io.Reader) {
	switch p.argv[0] {
	case "echo":
		p.write(0, []byte(strings.Join(p.argv[1:], " ")+"\n"))
		p.write(1, []byte("noise\n"))
	case "cat":
		buf := make([]byte, 32<<10)
		for {
			n, err := stdin.Read(buf)
			p.write(0, buf[:n])
			if err != nil {
				break
			}
		}
	case "pause":
		sig := <-p.signal
		p.end(128+sig, sig)
		return
	case "exit":
		code, _ := strconv.Atoi(p.argv[1])
		p.end(int32(code), 0)
		return
	}
	p.end(0, 0)
}

func (g *fakeGuest) Exec(ctx context.Context, req *ExecRequest, s *ExecStream) (ExitStatus, error) {
	if len(req.Argv) == 0 {
		return ExitStatus{}, &Error{Code: CodeInvalidArgument, Message: "argv is empty"}
	}
	if req.Argv[0] == "nosuch" {
		return ExitStatus{}, &fs.PathError{Op: "exec", Path: "nosuch", Err: syscall.ENOENT}
	}
	r, w := io.Pipe()
	g.mu.Lock()
	id := req.ID
	if id == "" {
		id = "x" + strconv.Itoa(len(g.procs)+1)
	}
	p := &fakeProc{id: id, argv: req.Argv, tty: req.TTY, stdin: w, signal: make(chan int32, 1)}
	p.cond = sync.NewCond(&p.mu)
	g.procs[id] = p
	g.mu.Unlock()
	if !req.Stdin {
		w.Close()
	}
	go p.run(r)
	return g.follow(ctx, p, [2]int64{}, s)
}

func (g *fakeGuest) get(id string) (*fakeProc, error) {
	g.mu.Lock()
	defer g.mu.Unlock()
	if p := g.procs[id]; p != nil {
		return p, nil
	}
	return nil, &Error{Code: CodeNotFound, Message: "no process " + id}
}

func (g *fakeGuest) Attach(ctx context.Context, req *AttachRequest, s *ExecStream) (ExitStatus, error) {
	p, err := g.get(req.ID)
	if err != nil {
		return ExitStatus{}, err
	}
	return g.follow(ctx, p, [2]int64{req.StdoutOffset, req.StderrOffset}, s)
}

func (g *fakeGuest) follow(ctx context.Context, p *fakeProc, from [2]int64, s *ExecStream) (ExitStatus, error) {
	err := s.Started(ExecStarted{ID: p.id, PID: 42, Stdout: OutputStart{Offset: from[0]}, Stderr: OutputStart{Offset: from[1]}})
	if err != nil {
		return ExitStatus{}, err
	}
	go func() {
		if _, err := io.Copy(p.stdin, s.Stdin()); err == nil {
			p.stdin.Close()
		}
	}()
	stop := context.AfterFunc(ctx, func() { p.mu.Lock(); p.cond.Broadcast(); p.mu.Unlock() })
	defer stop()
	var wg sync.WaitGroup
	for i, c := range []Channel{Stdout, Stderr} {
		wg.Go(func() { p.pump(ctx, i, from[i], c, s) })
	}
	wg.Wait()
	if ctx.Err() != nil {
		return ExitStatus{}, ctx.Err()
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.exit, nil
}

func (p *fakeProc) pump(ctx context.Context, i int, from int64, c Channel, s *ExecStream) {
	for {
		p.mu.Lock()
		for int64(len(p.out[i])) <= from && !p.ended && ctx.Err() == nil {
			p.cond.Wait()
		}
		b := p.out[i][min(int64(len(p.out[i])), from):]
		p.mu.Unlock()
		if ctx.Err() != nil {
			return
		}
		if len(b) == 0 {
			s.CloseOutput(c)
			return
		}
		if s.WriteOutput(c, b) != nil {
			return
		}
		from += int64(len(b))
	}
}

func (g *fakeGuest) ListExecs(_ context.Context, req *ListExecsRequest) (ListExecsReply, error) {
	g.mu.Lock()
	defer g.mu.Unlock()
	var reply ListExecsReply
	for id, p := range g.procs {
		if id > req.After {
			reply.Execs = append(reply.Execs, ExecInfo{ID: id, PID: 42, Argv: p.argv, Running: true, Started: time.Unix(1, 2)})
		}
	}
	slices.SortFunc(reply.Execs, func(a, b ExecInfo) int { return strings.Compare(a.ID, b.ID) })
	if len(reply.Execs) > 2 { // small pages test paging
		reply.Execs, reply.More = reply.Execs[:2], true
	}
	return reply, nil
}

func (g *fakeGuest) Signal(_ context.Context, req *SignalRequest) error {
	p, err := g.get(req.ID)
	if err == nil {
		select {
		case p.signal <- req.Signal:
		default: // it has a signal already
		}
	}
	return err
}

func (g *fakeGuest) WriteStdin(_ context.Context, req *WriteStdinRequest) error {
	_, err := g.get(req.ID)
	return err
}

func (g *fakeGuest) Resize(_ context.Context, req *ResizeRequest) error {
	p, err := g.get(req.ID)
	if err == nil {
		p.mu.Lock()
		p.rows, p.cols = req.Rows, req.Cols
		p.mu.Unlock()
	}
	return err
}

func (g *fakeGuest) ReleaseExec(_ context.Context, req *ReleaseExecRequest) error {
	_, err := g.get(req.ID)
	g.mu.Lock()
	delete(g.procs, req.ID)
	g.mu.Unlock()
	return err
}

func (g *fakeGuest) Info(context.Context) (Info, error) {
	return Info{AgentVersion: "test", Kernel: "6.1", Hostname: "h", BootID: "b", Uptime: time.Second, Generation: 7, Processes: 3}, nil
}

func (g *fakeGuest) Sync(ctx context.Context) error {
	if g.block != nil {
		g.blocked <- struct{}{}
		select {
		case <-g.block:
		case <-ctx.Done():
			return ctx.Err()
		}
	}
	return nil
}

func (g *fakeGuest) Shutdown(_ context.Context, req *ShutdownRequest, accept func() error) error {
	if req.Mode == 0 {
		return &Error{Code: CodeInvalidArgument, Message: "no mode"}
	}
	g.mu.Lock()
	g.shutdown = req
	g.mu.Unlock()
	return accept()
}

func (g *fakeGuest) Prepare(_ context.Context, req *PrepareRequest) error {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.prepared = append(g.prepared, *req)
	return nil
}

func (g *fakeGuest) SetClock(_ context.Context, req *SetClockRequest) error {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.clocks = append(g.clocks, req.WallClock)
	return nil
}

func (g *fakeGuest) Renew(_ context.Context, req *RenewRequest) (RenewReply, error) {
	g.mu.Lock()
	defer g.mu.Unlock()
	if n := len(g.renewed); n > 0 && req.Generation <= g.renewed[n-1].Generation {
		return RenewReply{}, &Error{Code: CodeInvalidArgument, Message: "refused " + req.String()}
	}
	own := *req
	own.Entropy, own.Hostname, own.MachineID = bytes.Clone(req.Entropy), strings.Clone(req.Hostname), strings.Clone(req.MachineID)
	g.renewed = append(g.renewed, own)
	return RenewReply{Generation: req.Generation, ClockStep: -time.Second}, nil
}

func (g *fakeGuest) Stat(_ context.Context, req *StatRequest) (FileInfo, error) {
	g.mu.Lock()
	defer g.mu.Unlock()
	b, ok := g.files[req.Path]
	if !ok {
		return FileInfo{}, &fs.PathError{Op: "stat", Path: req.Path, Err: fs.ErrNotExist}
	}
	return FileInfo{Path: req.Path, Mode: ModeRegular | 0o644, Size: int64(len(b)), Owner: req.User}, nil
}

func (g *fakeGuest) List(_ context.Context, req *ListRequest) (ListReply, error) {
	g.mu.Lock()
	defer g.mu.Unlock()
	var reply ListReply
	for name := range g.files {
		reply.Entries = append(reply.Entries, FileInfo{Path: name, Mode: ModeRegular})
	}
	return reply, nil
}

func (g *fakeGuest) Read(_ context.Context, req *ReadRequest, s *ReadStream) error {
	g.mu.Lock()
	b, ok := g.files[req.Path]
	g.mu.Unlock()
	if !ok {
		return fs.ErrNotExist
	}
	if err := s.Opened(FileInfo{Path: req.Path, Size: int64(len(b))}); err != nil {
		return err
	}
	b = b[req.Offset:]
	if req.Length > 0 {
		b = b[:req.Length]
	}
	if _, err := s.Write(b); err != nil {
		return err
	}
	if req.Path == "bad sector" {
		return syscall.EIO
	}
	return nil
}

func (g *fakeGuest) Write(_ context.Context, req *WriteRequest, r io.Reader) (WriteReply, error) {
	if req.Path == "full" {
		return WriteReply{}, syscall.ENOSPC
	}
	var b bytes.Buffer
	n, err := io.Copy(&b, r)
	if err != nil {
		g.note("write aborted")
		return WriteReply{}, err
	}
	g.mu.Lock()
	g.files[req.Path] = b.Bytes()
	g.mu.Unlock()
	return WriteReply{Written: n, Size: n}, nil
}

func (g *fakeGuest) Mkdir(_ context.Context, req *MkdirRequest) error {
	g.note("mkdir " + req.Path)
	return nil
}

func (g *fakeGuest) Move(_ context.Context, req *MoveRequest) error {
	g.note("move " + req.From + " " + req.To)
	return nil
}

func (g *fakeGuest) Remove(_ context.Context, req *RemoveRequest) error {
	g.note("remove " + req.Path)
	return nil
}

func (g *fakeGuest) Symlink(_ context.Context, req *SymlinkRequest) error {
	g.mu.Lock()
	g.links[req.Path] = req.Target
	g.mu.Unlock()
	return nil
}

func (g *fakeGuest) Readlink(_ context.Context, req *ReadlinkRequest) (string, error) {
	g.mu.Lock()
	defer g.mu.Unlock()
	if target, ok := g.links[req.Path]; ok {
		return target, nil
	}
	return "", syscall.EINVAL
}

func (g *fakeGuest) Chmod(_ context.Context, req *ChmodRequest) error {
	g.note("chmod " + strconv.FormatUint(uint64(req.Perm), 8))
	return nil
}

func (g *fakeGuest) Chown(_ context.Context, req *ChownRequest) error {
	g.note("chown " + req.Owner + ":" + req.Group)
	return nil
}

func (g *fakeGuest) Watch(ctx context.Context, _ *WatchRequest, s *WatchStream) error {
	if err := s.Watching(); err != nil {
		return err
	}
	g.mu.Lock()
	events := g.watch
	g.mu.Unlock()
	for {
		select {
		case e, ok := <-events:
			if !ok {
				return nil
			}
			if err := s.Send(e, e); err != nil {
				return err
			}
		case <-ctx.Done():
			return ctx.Err()
		}
	}
}
