package agent

import (
	"context"
	"errors"
	"io"

	"agentrun.dev/internal/guest/guestrpc"
)

// interpreters returns the server's Interpreters, made when code is first run.
func (s *Server) interpreters() *Interpreters {
	s.codeOnce.Do(func() {
		ks := &Interpreters{Processes: s.Processes}
		if s.Renewer != nil {
			ks.Generation = s.Renewer.Generation
		}
		s.code.Store(ks)
	})
	return s.code.Load()
}

// SetEnv implements guestrpc.Handler.
func (s *Server) SetEnv(_ context.Context, req *guestrpc.SetEnvRequest) error {
	return rpcError(s.Processes.SetEnv(req.Env))
}

// CodeRun implements guestrpc.Handler.
func (s *Server) CodeRun(ctx context.Context, req *guestrpc.CodeRunRequest, st *guestrpc.CodeStream) (guestrpc.CodeStatus, error) {
	if req.More {
		rest, err := io.ReadAll(io.LimitReader(st.Rest(), guestrpc.MaxCode+1))
		if err != nil {
			return guestrpc.CodeStatus{}, rpcError(err)
		}
		req.Source += string(rest)
		if len(req.Source) > guestrpc.MaxCode {
			return guestrpc.CodeStatus{}, rpcError(fail(ErrTooLarge, "run code", req.ID, "the source is larger than 16 MiB"))
		}
	}
	e, r, err := s.interpreters().start(req)
	if err != nil {
		return guestrpc.CodeStatus{}, rpcError(err)
	}
	return followCode(ctx, e, r, st)
}

// CodeAttach implements guestrpc.Handler.
func (s *Server) CodeAttach(ctx context.Context, req *guestrpc.CodeAttachRequest, st *guestrpc.CodeStream) (guestrpc.CodeStatus, error) {
	e, err := s.interpreters().get(req.ID)
	if err != nil {
		return guestrpc.CodeStatus{}, rpcError(err)
	}
	r, err := e.attach(max(req.StdoutOffset, FromEnd), max(req.StderrOffset, FromEnd), max(req.Event, FromEnd))
	if err != nil {
		return guestrpc.CodeStatus{}, rpcError(err)
	}
	return followCode(ctx, e, r, st)
}

// followCode connects an execution to a host until either is gone, and closes the
// readers. Each output has its own goroutine, as in follow.
func followCode(ctx context.Context, e *execution, r codeReaders, st *guestrpc.CodeStream) (guestrpc.CodeStatus, error) {
	defer r.close()
	err := st.Started(guestrpc.CodeStarted{
		ID: e.id, Context: e.context.id, Stdout: outputStart(r.stdout), Stderr: outputStart(r.stderr), Events: r.events.start,
	})
	if err != nil {
		return guestrpc.CodeStatus{}, err
	}
	sent := make(chan error, 2)
	go func() { sent <- pumpOutput(ctx, r.stdout, guestrpc.Stdout, st) }()
	go func() { sent <- pumpOutput(ctx, r.stderr, guestrpc.Stderr, st) }()
	err = pumpEvents(ctx, r.events, st)
	err = errors.Join(err, <-sent, <-sent)
	if err != nil {
		return guestrpc.CodeStatus{}, rpcError(err)
	}
	select {
	case <-e.done:
	case <-ctx.Done():
		return guestrpc.CodeStatus{}, ctx.Err()
	}
	if e.err != nil {
		return guestrpc.CodeStatus{}, rpcError(e.err)
	}
	status := e.status
	status.Stdout, status.Stderr, status.Events = outputTotal(e.stdout), outputTotal(e.stderr), e.events.total()
	return status, nil
}

func outputTotal(o *Output) guestrpc.OutputTotal {
	stats := o.Stats()
	return guestrpc.OutputTotal{Bytes: stats.Bytes, Dropped: stats.Dropped}
}

// pumpEvents sends events to the host until there are no more.
func pumpEvents(ctx context.Context, r *eventReader, st *guestrpc.CodeStream) error {
	for {
		e, err := r.read(ctx.Done())
		if err == io.EOF {
			return st.CloseOutput(guestrpc.Control)
		}
		if err == nil {
			err = st.Send(&e)
		}
		if err != nil {
			return err
		}
	}
}

// CodeInterrupt implements guestrpc.Handler.
func (s *Server) CodeInterrupt(_ context.Context, req *guestrpc.CodeInterruptRequest) error {
	return rpcError(s.interpreters().interrupt(req.Context, req.ID))
}

// CodeRelease implements guestrpc.Handler.
func (s *Server) CodeRelease(_ context.Context, req *guestrpc.CodeReleaseRequest) error {
	return rpcError(s.interpreters().release(req.ID))
}

// CodeCreate implements guestrpc.Handler.
func (s *Server) CodeCreate(ctx context.Context, req *guestrpc.CodeCreateRequest) (guestrpc.CodeContext, error) {
	info, err := s.interpreters().create(ctx.Done(), req)
	return info, rpcError(err)
}

// CodeList implements guestrpc.Handler.
func (s *Server) CodeList(context.Context) (guestrpc.CodeListReply, error) {
	return guestrpc.CodeListReply{Contexts: s.interpreters().list()}, nil
}

// CodeRestart implements guestrpc.Handler.
func (s *Server) CodeRestart(_ context.Context, req *guestrpc.CodeContextRequest) error {
	return rpcError(s.interpreters().restart(req.ID))
}

// CodeClose implements guestrpc.Handler.
func (s *Server) CodeClose(_ context.Context, req *guestrpc.CodeContextRequest) error {
	return rpcError(s.interpreters().close(req.ID))
}
