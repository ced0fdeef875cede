package guestrpc

import (
	"context"
	"encoding/binary"
	"io"
	"strconv"
)

// callFunc runs one call whose request has been decoded.
type callFunc func(ctx context.Context, st *stream) (message, error)

// bind decodes a request and finds the handler for it.
func (srv *server) bind(m Method, body []byte) (callFunc, error) {
	h := srv.handler
	switch m {
	case MethodInfo:
		return answered[Info](body, func(ctx context.Context, _ *empty) (Info, error) { return h.Info(ctx) })
	case MethodSync:
		return done(body, func(ctx context.Context, _ *empty) error { return h.Sync(ctx) })
	case MethodShutdown:
		return streamed(body, func(ctx context.Context, req *ShutdownRequest, st *stream) (message, error) {
			return &empty{}, h.Shutdown(ctx, req, func() error { return st.sendHeaders(&empty{}) })
		})
	case MethodExec:
		return streamed(body, func(ctx context.Context, req *ExecRequest, st *stream) (message, error) {
			exit, err := h.Exec(ctx, req, &ExecStream{st})
			return &exit, err
		})
	case MethodAttach:
		return streamed(body, func(ctx context.Context, req *AttachRequest, st *stream) (message, error) {
			exit, err := h.Attach(ctx, req, &ExecStream{st})
			return &exit, err
		})
	case MethodListExecs:
		return answered[ListExecsReply](body, h.ListExecs)
	case MethodSignal:
		return done(body, h.Signal)
	case MethodResize:
		return done(body, h.Resize)
	case MethodReleaseExec:
		return done(body, h.ReleaseExec)
	case MethodConnect:
		return streamed(body, func(ctx context.Context, req *ConnectRequest, st *stream) (message, error) {
			return &empty{}, h.Connect(ctx, req, &PortStream{st})
		})
	case MethodWriteStdin:
		return done(body, h.WriteStdin)
	case MethodSetClock:
		return done(body, h.SetClock)
	}
	if m >= MethodCodeRun || m == MethodSetEnv {
		return srv.bindCode(m, body)
	}
	return srv.bindFile(m, body)
}

func (srv *server) bindFile(m Method, body []byte) (callFunc, error) {
	h := srv.handler
	switch m {
	case MethodStat:
		return answered[FileInfo](body, h.Stat)
	case MethodList:
		return answered[ListReply](body, h.List)
	case MethodRead:
		return streamed(body, func(ctx context.Context, req *ReadRequest, st *stream) (message, error) {
			return &empty{}, h.Read(ctx, req, &ReadStream{st})
		})
	case MethodWrite:
		return streamed(body, func(ctx context.Context, req *WriteRequest, st *stream) (message, error) {
			reply, err := h.Write(ctx, req, streamReader{st})
			return &reply, err
		})
	case MethodMkdir:
		return done(body, h.Mkdir)
	case MethodMove:
		return done(body, h.Move)
	case MethodRemove:
		return done(body, h.Remove)
	case MethodSymlink:
		return done(body, h.Symlink)
	case MethodReadlink:
		return answered[readlinkReply](body, func(ctx context.Context, req *ReadlinkRequest) (readlinkReply, error) {
			target, err := h.Readlink(ctx, req)
			return readlinkReply{target}, err
		})
	case MethodChmod:
		return done(body, h.Chmod)
	case MethodChown:
		return done(body, h.Chown)
	case MethodWatch:
		return streamed(body, func(ctx context.Context, req *WatchRequest, st *stream) (message, error) {
			return &empty{}, h.Watch(ctx, req, &WatchStream{st: st})
		})
	}
	return nil, unknownMethod(m)
}

func unknownMethod(m Method) error {
	return newError(CodeInvalidArgument, "method ", strconv.Itoa(int(m)), " is not known to this guest agent; rebuild the template")
}

// request is a pointer to a request struct.
type request[Q any] interface {
	*Q
	message
}

// streamed binds a call that uses its stream.
func streamed[Q any, P request[Q]](body []byte, f func(context.Context, P, *stream) (message, error)) (callFunc, error) {
	req := P(new(Q))
	if err := unmarshal(body, req); err != nil {
		return nil, malformed(err)
	}
	return func(ctx context.Context, st *stream) (message, error) { return f(ctx, req, st) }, nil
}

// answered binds a call with a reply.
func answered[R, Q any, PR request[R], P request[Q]](body []byte, f func(context.Context, P) (R, error)) (callFunc, error) {
	return streamed(body, func(ctx context.Context, req P, _ *stream) (message, error) {
		reply, err := f(ctx, req)
		return PR(&reply), err
	})
}

// done binds a call without a reply.
func done[Q any, P request[Q]](body []byte, f func(context.Context, P) error) (callFunc, error) {
	return streamed(body, func(ctx context.Context, req P, _ *stream) (message, error) {
		return &empty{}, f(ctx, req)
	})
}

// sendHeaders accepts a streaming call.
func (st *stream) sendHeaders(m message) error {
	b, err := marshal(nil, m)
	if err != nil {
		return err
	}
	return st.send(header{typ: frameHeaders}, b)
}

// streamReader reads bytes from the host.
type streamReader struct{ st *stream }

func (r streamReader) Read(p []byte) (int, error) { return r.st.read(Stdin, p) }

// ExecStream connects a handler to the host that runs or joins a process.
type ExecStream struct{ st *stream }

// Started accepts the call. It must precede any output.
func (s *ExecStream) Started(m ExecStarted) error { return s.st.sendHeaders(&m) }

// Stdin reads the host's input. io.EOF means that the host has closed stdin. Any
// other error means that the connection is lost or the host has left.
func (s *ExecStream) Stdin() io.Reader { return streamReader{s.st} }

// WriteOutput sends output of the process on Stdout or Stderr. It waits while
// the host does not read.
func (s *ExecStream) WriteOutput(c Channel, p []byte) error {
	_, err := s.st.write(c, p)
	return err
}

// CloseOutput marks the end of an output.
func (s *ExecStream) CloseOutput(c Channel) error { return s.st.closeWrite(c) }

// ReadStream carries a file to the host.
type ReadStream struct{ st *stream }

// Opened accepts the call. It must precede the contents.
func (s *ReadStream) Opened(info FileInfo) error { return s.st.sendHeaders(&info) }

// Write sends contents. It waits while the host does not read.
func (s *ReadStream) Write(p []byte) (int, error) { return s.st.write(Stdout, p) }

// WatchStream carries events to the host.
type WatchStream struct {
	st  *stream
	buf []byte
}

// Watching accepts the call. Changes from now on are reported.
func (s *WatchStream) Watching() error { return s.st.sendHeaders(&empty{}) }

// Send sends events in as few frames as possible. It waits while the host does not
// read. Meanwhile the kernel bounds its own queue of events.
func (s *WatchStream) Send(events ...WatchEvent) error {
	s.buf = s.buf[:0]
	for i := range events {
		at := len(s.buf)
		b, err := marshal(append(s.buf, 0, 0), &events[i])
		if err != nil {
			return err
		}
		binary.LittleEndian.PutUint16(b[at:], uint16(len(b)-at-2))
		s.buf = b
		if len(b) >= idleBuffer {
			if err := s.flush(); err != nil {
				return err
			}
		}
	}
	return s.flush()
}

func (s *WatchStream) flush() error {
	if len(s.buf) == 0 {
		return nil
	}
	_, err := s.st.write(Control, s.buf)
	s.buf = s.buf[:0]
	return err
}
