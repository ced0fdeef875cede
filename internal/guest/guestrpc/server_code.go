package guestrpc

import (
	"context"
	"encoding/binary"
	"io"
)

func (srv *server) bindCode(m Method, body []byte) (callFunc, error) {
	h := srv.handler
	switch m {
	case MethodSetEnv:
		run, err := done(body, h.SetEnv)
		clear(body) // it may hold secrets, and lies in the session's read buffer
		return run, err
	case MethodCodeRun:
		return streamed(body, func(ctx context.Context, req *CodeRunRequest, st *stream) (message, error) {
			status, err := h.CodeRun(ctx, req, &CodeStream{st: st})
			return &status, err
		})
	case MethodCodeAttach:
		return streamed(body, func(ctx context.Context, req *CodeAttachRequest, st *stream) (message, error) {
			status, err := h.CodeAttach(ctx, req, &CodeStream{st: st})
			return &status, err
		})
	case MethodCodeInterrupt:
		return done(body, h.CodeInterrupt)
	case MethodCodeRelease:
		return done(body, h.CodeRelease)
	case MethodCodeCreate:
		return answered[CodeContext](body, h.CodeCreate)
	case MethodCodeList:
		return answered[CodeListReply](body, func(ctx context.Context, _ *empty) (CodeListReply, error) { return h.CodeList(ctx) })
	case MethodCodeRestart:
		return done(body, h.CodeRestart)
	case MethodCodeClose:
		return done(body, h.CodeClose)
	}
	return nil, unknownMethod(m)
}

// CodeStream connects a handler to the host that runs or joins an execution.
type CodeStream struct {
	st  *stream
	buf []byte
}

// Rest reads the rest of the source, if the request has More.
func (s *CodeStream) Rest() io.Reader { return streamReader{s.st} }

// Started accepts the call. It must precede any output.
func (s *CodeStream) Started(m CodeStarted) error { return s.st.sendHeaders(&m) }

// WriteOutput sends output on Stdout or Stderr. It waits while the host does
// not read.
func (s *CodeStream) WriteOutput(c Channel, p []byte) error {
	_, err := s.st.write(c, p)
	return err
}

// CloseOutput marks the end of an output, or with Control the end of the events.
func (s *CodeStream) CloseOutput(c Channel) error { return s.st.closeWrite(c) }

// Send sends an event. It waits while the host does not read.
func (s *CodeStream) Send(e *CodeEvent) error {
	b, err := marshal(append(s.buf[:0], 0, 0, 0, 0), e)
	if err != nil {
		return err
	}
	binary.LittleEndian.PutUint32(b, uint32(len(b)-4))
	if len(b) <= idleBuffer {
		s.buf = b
	}
	_, err = s.st.write(Control, b)
	return err
}
