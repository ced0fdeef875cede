package agent

import (
	"context"
	"io"
	"slices"
	"strings"

	"agentrun.dev/internal/guest/guestrpc"
)

const (
	firstCopy = 512      // buffer of a copy that has moved few bytes so far
	maxCopy   = 32 << 10 // buffer of a copy that moves many bytes
	maxArgv   = 4 << 10  // bytes of the arguments that ListExecs shows
)

// Exec implements guestrpc.Handler.
func (s *Server) Exec(ctx context.Context, req *guestrpc.ExecRequest, st *guestrpc.ExecStream) (guestrpc.ExitStatus, error) {
	p, out, err := s.Processes.StartAttached(ExecSpec{
		ID:       req.ID,
		Argv:     req.Argv,
		Env:      req.Env,
		CleanEnv: req.CleanEnv,
		Workdir:  req.Workdir,
		User:     req.User,
		TTY:      req.TTY,
		Rows:     req.Rows,
		Cols:     req.Cols,
		Stdin:    req.Stdin,
		Timeout:  req.Timeout,
	})
	if err != nil {
		return guestrpc.ExitStatus{}, rpcError(err)
	}
	return s.follow(ctx, p, out, st)
}

// Attach implements guestrpc.Handler.
func (s *Server) Attach(ctx context.Context, req *guestrpc.AttachRequest, st *guestrpc.ExecStream) (guestrpc.ExitStatus, error) {
	p, err := s.Processes.Get(req.ID)
	if err != nil {
		return guestrpc.ExitStatus{}, rpcError(err)
	}
	out, err := p.Attach(max(req.StdoutOffset, FromEnd), max(req.StderrOffset, FromEnd))
	if err != nil {
		return guestrpc.ExitStatus{}, rpcError(err)
	}
	return s.follow(ctx, p, out, st)
}

// follow connects a process to a host until the process has ended or the host has
// left. Each output has its own goroutine, so that an output that the host does not
// read cannot block the other. follow closes the readers.
func (s *Server) follow(ctx context.Context, p *Process, out Readers, st *guestrpc.ExecStream) (guestrpc.ExitStatus, error) {
	defer out.Close()
	started := guestrpc.ExecStarted{ID: p.ID(), PID: int32(p.PID()), Stdout: outputStart(out.Stdout)}
	if out.Stderr != nil {
		started.Stderr = outputStart(out.Stderr)
	}
	if err := st.Started(started); err != nil {
		return guestrpc.ExitStatus{}, err
	}
	if spec := p.Spec(); spec.Stdin || spec.TTY {
		go feed(ctx, p, st.Stdin())
	}
	done := make(chan error, 1)
	if out.Stderr != nil {
		go func() { done <- pumpOutput(ctx, out.Stderr, guestrpc.Stderr, st) }()
	} else {
		done <- st.CloseOutput(guestrpc.Stderr)
	}
	err := pumpOutput(ctx, out.Stdout, guestrpc.Stdout, st)
	if other := <-done; err == nil {
		err = other
	}
	if err != nil {
		return guestrpc.ExitStatus{}, rpcError(err)
	}
	select {
	case <-p.Done():
	case <-ctx.Done():
		return guestrpc.ExitStatus{}, ctx.Err()
	}
	exit, _ := p.Exit()
	return exitStatus(&exit), nil
}

func outputStart(r *Reader) guestrpc.OutputStart {
	return guestrpc.OutputStart{Offset: r.Began(), Dropped: r.Lost()}
}

// outputSink sends output to the host.
type outputSink interface {
	WriteOutput(c guestrpc.Channel, p []byte) error
	CloseOutput(c guestrpc.Channel) error
}

// pumpOutput sends an output to the host until it ends.
func pumpOutput(ctx context.Context, r *Reader, c guestrpc.Channel, st outputSink) error {
	buf := make([]byte, firstCopy)
	for {
		n, err := r.Read(ctx.Done(), buf)
		if err == io.EOF {
			return st.CloseOutput(c)
		}
		if err != nil {
			return err
		}
		if err := st.WriteOutput(c, buf[:n]); err != nil {
			return err
		}
		buf = grow(buf, n)
	}
}

// grow returns a larger buffer after a read that has filled this one.
func grow(buf []byte, n int) []byte {
	if n < len(buf) || len(buf) >= maxCopy {
		return buf
	}
	return make([]byte, min(len(buf)*8, maxCopy))
}

// feed writes the host's input to the process's stdin. It closes stdin only if the
// host has asked for that, because a host that lost its connection may come back.
func feed(ctx context.Context, p *Process, in io.Reader) {
	buf := make([]byte, firstCopy)
	taken := true
	for {
		n, err := in.Read(buf)
		if n > 0 && taken {
			// A process that no longer takes input must not block the host, which
			// learns of it from the exit status. So the rest is dropped.
			_, werr := p.WriteStdin(ctx.Done(), buf[:n])
			taken = werr == nil
		}
		if err == io.EOF {
			_ = p.CloseStdin() // fails if the process has closed its end
			return
		}
		if err != nil {
			return
		}
		buf = grow(buf, n)
	}
}

func exitStatus(e *Exit) guestrpc.ExitStatus {
	return guestrpc.ExitStatus{
		Code:       int32(e.Code),
		Signal:     int32(e.Signal),
		Core:       e.Core,
		TimedOut:   e.TimedOut,
		Stdout:     guestrpc.OutputTotal{Bytes: e.Stdout.Bytes, Dropped: e.Stdout.Dropped},
		Stderr:     guestrpc.OutputTotal{Bytes: e.Stderr.Bytes, Dropped: e.Stderr.Dropped},
		Wall:       e.Wall,
		UserTime:   e.User,
		SystemTime: e.System,
		MaxRSS:     e.MaxRSS,
	}
}

// ListExecs implements guestrpc.Handler.
func (s *Server) ListExecs(_ context.Context, req *guestrpc.ListExecsRequest) (guestrpc.ListExecsReply, error) {
	all := s.Processes.List()
	slices.SortFunc(all, func(a, b *Process) int { return strings.Compare(a.ID(), b.ID()) })
	var reply guestrpc.ListExecsReply
	for _, p := range all {
		if p.ID() > req.After {
			reply.Execs = append(reply.Execs, execInfo(p))
		}
	}
	if n := guestrpc.FitExecs(reply.Execs); n < len(reply.Execs) {
		reply.Execs, reply.More = reply.Execs[:n], true
	}
	return reply, nil
}

func execInfo(p *Process) guestrpc.ExecInfo {
	spec := p.Spec()
	info := guestrpc.ExecInfo{
		ID:      p.ID(),
		PID:     int32(p.PID()),
		Argv:    cutArgv(spec.Argv),
		User:    spec.User,
		Workdir: spec.Workdir,
		TTY:     spec.TTY,
		Started: p.Started(),
	}
	exit, ended := p.Exit()
	info.Running = !ended
	if ended {
		info.Exit = exitStatus(&exit)
	}
	return info
}

// cutArgv keeps the first arguments, and the beginning of a long one.
func cutArgv(argv []string) []string {
	var out []string
	left := maxArgv
	for _, a := range argv {
		if left <= 0 {
			break
		}
		a = a[:min(len(a), left)]
		left -= len(a) + 1
		out = append(out, a)
	}
	return out
}

// Resize implements guestrpc.Handler.
func (s *Server) Resize(_ context.Context, req *guestrpc.ResizeRequest) error {
	p, err := s.Processes.Get(req.ID)
	if err != nil {
		return rpcError(err)
	}
	return rpcError(p.Resize(req.Rows, req.Cols))
}

// WriteStdin implements guestrpc.Handler.
func (s *Server) WriteStdin(ctx context.Context, req *guestrpc.WriteStdinRequest) error {
	p, err := s.Processes.Get(req.ID)
	if err != nil {
		return rpcError(err)
	}
	if len(req.Data) > 0 {
		if _, err := p.WriteStdin(ctx.Done(), req.Data); err != nil {
			return rpcError(err)
		}
	}
	if req.EOF {
		return rpcError(p.CloseStdin())
	}
	return nil
}

// ReleaseExec implements guestrpc.Handler.
func (s *Server) ReleaseExec(_ context.Context, req *guestrpc.ReleaseExecRequest) error {
	return rpcError(s.Processes.Forget(req.ID))
}
