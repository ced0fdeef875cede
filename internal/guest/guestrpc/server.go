package guestrpc

import (
	"context"
	"encoding/binary"
	"errors"
	"io"
	"strconv"
	"sync"
	"time"
)

const (
	// MaxStreams is the number of calls that a server runs at a time. Further calls
	// are refused with resource_exhausted.
	MaxStreams = 128

	// serverWindow is the window of each channel that the agent receives on.
	serverWindow = 64 << 10
)

// Handler implements the agent's methods. Calls run concurrently. The context ends
// when the host cancels the call or the connection is lost. An error is sent to the
// host with the code that ErrorFrom finds in it.
type Handler interface {
	Info(ctx context.Context) (Info, error)
	Sync(ctx context.Context) error
	// Shutdown calls accept before it does anything irreversible.
	Shutdown(ctx context.Context, req *ShutdownRequest, accept func() error) error
	// Renew must not keep any part of req, which is wiped when it returns. Renew and
	// Prepare delay the other calls of their session.
	Renew(ctx context.Context, req *RenewRequest) (RenewReply, error)
	// Prepare makes the next Renew cheap.
	Prepare(ctx context.Context, req *PrepareRequest) error
	// SetClock sets the wall clock.
	SetClock(ctx context.Context, req *SetClockRequest) error
	// SetEnv replaces the base environment.
	SetEnv(ctx context.Context, req *SetEnvRequest) error

	// Exec and Attach return when the process has ended and its output has been sent,
	// or when ctx ends. The end of ctx must not end the process.
	Exec(ctx context.Context, req *ExecRequest, s *ExecStream) (ExitStatus, error)
	Attach(ctx context.Context, req *AttachRequest, s *ExecStream) (ExitStatus, error)
	ListExecs(ctx context.Context, req *ListExecsRequest) (ListExecsReply, error)
	Signal(ctx context.Context, req *SignalRequest) error
	Resize(ctx context.Context, req *ResizeRequest) error
	WriteStdin(ctx context.Context, req *WriteStdinRequest) error
	ReleaseExec(ctx context.Context, req *ReleaseExecRequest) error

	Stat(ctx context.Context, req *StatRequest) (FileInfo, error)
	List(ctx context.Context, req *ListRequest) (ListReply, error)
	Read(ctx context.Context, req *ReadRequest, s *ReadStream) error
	// Write reads the contents from r until io.EOF. Any other error means that the
	// host has given up.
	Write(ctx context.Context, req *WriteRequest, r io.Reader) (WriteReply, error)
	Mkdir(ctx context.Context, req *MkdirRequest) error
	Move(ctx context.Context, req *MoveRequest) error
	Remove(ctx context.Context, req *RemoveRequest) error
	Symlink(ctx context.Context, req *SymlinkRequest) error
	Readlink(ctx context.Context, req *ReadlinkRequest) (string, error)
	Chmod(ctx context.Context, req *ChmodRequest) error
	Chown(ctx context.Context, req *ChownRequest) error
	Watch(ctx context.Context, req *WatchRequest, s *WatchStream) error

	// Connect returns when both sides of a connection are closed, or when one has
	// failed.
	Connect(ctx context.Context, req *ConnectRequest, s *PortStream) error

	// CodeRun and CodeAttach return when the execution has ended and its outputs have
	// been sent, or when ctx ends. The end of ctx does not end the execution.
	CodeRun(ctx context.Context, req *CodeRunRequest, s *CodeStream) (CodeStatus, error)
	CodeAttach(ctx context.Context, req *CodeAttachRequest, s *CodeStream) (CodeStatus, error)
	CodeInterrupt(ctx context.Context, req *CodeInterruptRequest) error
	CodeRelease(ctx context.Context, req *CodeReleaseRequest) error
	CodeCreate(ctx context.Context, req *CodeCreateRequest) (CodeContext, error)
	CodeList(ctx context.Context) (CodeListReply, error)
	CodeRestart(ctx context.Context, req *CodeContextRequest) error
	CodeClose(ctx context.Context, req *CodeContextRequest) error
}

// server is the agent's end of a session.
type server struct {
	s       session
	handler Handler
	calls   sync.WaitGroup
	// jobs goes to a goroutine that has run a call before and waits for the next one.
	// Its stack has grown already, which in a fork saves fifty page faults. At most
	// one such goroutine waits; idle holds its place.
	jobs chan job
	idle chan struct{}

	renewal renewScratch // used by the read loop only

	mu      sync.Mutex // protects running
	running int

	idleBuffer [idleBuffer]byte // of the session; behind the fields that change with each frame
}

// Serve serves one host over conn until the connection or ctx ends, and closes conn.
// When it returns, all its calls have returned. A connection that the host has closed
// is no error. Closing conn must end a Read under way.
func Serve(ctx context.Context, conn io.ReadWriteCloser, h Handler, capabilities ...string) error {
	srv := &server{handler: h, jobs: make(chan job), idle: make(chan struct{}, 1)}
	s := &srv.s
	s.init(conn, serverWindow, srv.idleBuffer[:])
	s.onOpen = srv.open
	stop := context.AfterFunc(ctx, func() { s.fail(context.Cause(ctx)) })
	defer stop()
	err := srv.handshake(capabilities)
	if err == nil {
		err = s.readLoop()
	} else {
		s.fail(err)
		err = s.err
	}
	srv.calls.Wait()
	if errors.Is(err, io.EOF) {
		return nil
	}
	return err
}

func (srv *server) handshake(capabilities []string) error {
	s := &srv.s
	peer, err := readHello(&s.r)
	if err != nil {
		return err
	}
	// The hello is sent even if the versions do not match, so that the host can
	// report both.
	if _, err := s.conn.Write(s.ourHello(capabilities)); err != nil {
		return err
	}
	s.peer = peer
	s.version, err = negotiate(peer)
	return err
}

// open begins a call. The read loop calls it, so it does not wait.
func (srv *server) open(id uint32, payload []byte) error {
	s := &srv.s
	method, n := binary.Uvarint(payload)
	if n <= 0 || method > 1<<16-1 {
		return violation("OPEN without a method")
	}
	s.mu.Lock()
	if id <= s.lastID {
		s.mu.Unlock()
		return violation("stream id " + strconv.Itoa(int(id)) + " opened twice or out of order")
	}
	s.lastID = id
	s.mu.Unlock()

	switch Method(method) {
	case MethodRenew:
		srv.renew(id, payload[n:])
		return nil
	case MethodPrepare:
		srv.prepare(id, payload[n:])
		return nil
	}
	run, err := srv.bind(Method(method), payload[n:])
	if err != nil {
		s.reset(id, ErrorFrom(err))
		return nil
	}
	if !srv.begin() {
		s.reset(id, newError(CodeResourceExhausted, "the guest agent runs ", strconv.Itoa(MaxStreams), " calls already"))
		return nil
	}
	st := newStream(s, id, Method(method).toGuest())
	st.blocking = true
	s.mu.Lock()
	if s.streams == nil { // the session has ended meanwhile
		s.mu.Unlock()
		srv.end()
		return nil
	}
	s.streams[id] = st
	s.mu.Unlock()
	j := job{st, run}
	select {
	case srv.jobs <- j:
	default:
		srv.calls.Go(func() { srv.work(j) })
	}
	return nil
}

// job is a call to run.
type job struct {
	st  *stream
	run callFunc
}

// work runs a call. It then waits for further calls if no other goroutine does.
func (srv *server) work(j job) {
	for {
		srv.call(j.st, j.run)
		select {
		case srv.idle <- struct{}{}:
		default:
			return
		}
		select {
		case j = <-srv.jobs:
			<-srv.idle
		case <-srv.s.closed:
			return
		}
	}
}

// begin counts a call, unless too many run.
func (srv *server) begin() bool {
	srv.mu.Lock()
	defer srv.mu.Unlock()
	if srv.running >= MaxStreams {
		return false
	}
	srv.running++
	return true
}

func (srv *server) end() {
	srv.mu.Lock()
	srv.running--
	srv.mu.Unlock()
}

// call runs a handler and sends its result.
func (srv *server) call(st *stream, run callFunc) {
	reply, err := protect(st, run)
	h := header{typ: frameReply, stream: st.id}
	var payload []byte
	if err == nil {
		payload, err = marshal(nil, reply)
	}
	if err == nil && uint32(len(payload)) > srv.s.peer.maxPayload {
		err = newError(CodeResourceExhausted, "reply is larger than a frame")
	}
	if err != nil {
		h.typ = frameReset
		payload = appendError(nil, ErrorFrom(err))
	}
	srv.s.forget(st.id)
	if !st.finish(nil) {
		srv.end()
		return // the host has reset the stream
	}
	if srv.s.w.acquire(nil) != nil {
		srv.end()
		return
	}
	// The count drops before the host can see the reply and open the next stream, but
	// only while we hold the turn. So at most one running call is not counted.
	srv.end()
	// An error means that the session has ended, which the host sees.
	_ = srv.s.w.writeHoldingTurn(nil, h, payload)
}

// protect runs a call and turns a panic into an error.
func protect(st *stream, run callFunc) (reply message, err error) {
	err = guarded(func() (err error) {
		reply, err = run(streamContext{st}, st)
		return err
	})
	return reply, err
}

// guarded turns a panic of a handler into an error. The agent is PID 1, so its death
// would end the guest.
func guarded(f func() error) (err error) {
	defer func() {
		if r := recover(); r != nil {
			what := "unknown"
			switch v := r.(type) {
			case error:
				what = v.Error()
			case string:
				what = v
			}
			err = newError(CodeInternal, "panic in guest agent: ", what)
		}
	}()
	return f()
}

// streamContext is the context of a call. It needs no goroutine.
type streamContext struct{ st *stream }

func (c streamContext) Deadline() (time.Time, bool) { return time.Time{}, false }
func (c streamContext) Done() <-chan struct{}       { return c.st.done }
func (c streamContext) Value(any) any               { return nil }

func (c streamContext) Err() error {
	select {
	case <-c.st.done:
		return context.Canceled
	default:
		return nil
	}
}
