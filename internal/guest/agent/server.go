package agent

import (
	"context"
	"errors"
	"io"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"agentrun.dev/internal/guest/guestrpc"
)

// maxConns bounds the number of open connections. One is normal.
const maxConns = 16

// Server implements guestrpc.Handler on top of the agent.
type Server struct {
	Processes *Processes
	Accounts  Accounts
	Version   string           // of the agent
	Log       func(msg string) // may be nil

	// Down ends the machine, and returns only if that failed. nil refuses shutdowns.
	Down func(action Action, grace time.Duration) error

	// Renewer gives a fork its identity. nil refuses renewals.
	Renewer *Renewer

	conns atomic.Int32

	codeOnce sync.Once
	code     atomic.Pointer[Interpreters] // nil until code is run
}

var _ guestrpc.Handler = (*Server)(nil)

// Serve accepts connections until the listener is closed. It returns when the last
// connection has ended, for which ctx may have to end.
func (s *Server) Serve(ctx context.Context, l *Listener) error {
	var open sync.WaitGroup
	defer open.Wait()
	for {
		conn, err := l.Accept()
		if err != nil {
			return err
		}
		if !s.admit() {
			_ = conn.Close()
			continue
		}
		open.Go(func() { s.serve(ctx, conn) })
	}
}

// admit counts one more connection, unless there are too many. serve decrements the
// count.
func (s *Server) admit() bool {
	if s.conns.Add(1) > maxConns {
		s.conns.Add(-1)
		s.log("refused a connection: 16 are open")
		return false
	}
	return true
}

// serve serves one host until it disconnects, which is normal even in the middle of a
// call.
func (s *Server) serve(ctx context.Context, conn io.ReadWriteCloser) {
	defer s.conns.Add(-1)
	err := guestrpc.Serve(ctx, conn, s, guestrpc.CanSetClock)
	var pe *guestrpc.ProtocolError
	var ve *guestrpc.VersionError
	if errors.As(err, &pe) || errors.As(err, &ve) {
		s.log("connection ended: " + err.Error())
	}
}

func (s *Server) log(msg string) {
	if s.Log != nil {
		s.Log(msg)
	}
}

// Info implements guestrpc.Handler.
func (s *Server) Info(context.Context) (guestrpc.Info, error) {
	info, err := s.Processes.Info(s.Version)
	generation := uint64(0)
	if s.Renewer != nil {
		generation = s.Renewer.Generation()
	}
	return guestrpc.Info{
		AgentVersion: info.Version,
		Kernel:       info.Kernel,
		Arch:         info.Arch,
		Hostname:     info.Hostname,
		BootID:       info.BootID,
		Uptime:       info.Uptime,
		Generation:   generation,
		Processes:    uint32(info.Processes),
		Execs:        uint32(info.Execs),
		MemoryTotal:  info.MemoryTotal,
		MemoryFree:   info.MemoryFree,
	}, rpcError(err)
}

// Sync implements guestrpc.Handler.
func (s *Server) Sync(context.Context) error {
	unix.Sync()
	return nil
}

// Shutdown implements guestrpc.Handler.
func (s *Server) Shutdown(_ context.Context, req *guestrpc.ShutdownRequest, accept func() error) error {
	var action Action
	switch req.Mode {
	case guestrpc.PowerOff:
		action = PowerOff
	case guestrpc.Reboot:
		action = Reboot
	default:
		return rpcError(fail(ErrInvalid, "shut down", "", "want power-off or reboot"))
	}
	if s.Down == nil {
		return rpcError(fail(ErrUnsupported, "shut down", "", "the agent is not PID 1"))
	}
	// The request holds even if the host has disconnected by now.
	_ = accept()
	return rpcError(s.Down(action, req.Grace))
}

// Renew implements guestrpc.Handler.
func (s *Server) Renew(ctx context.Context, req *guestrpc.RenewRequest) (guestrpc.RenewReply, error) {
	if s.Renewer == nil {
		clear(req.Entropy)
		return guestrpc.RenewReply{}, rpcError(fail(ErrUnsupported, "renew", "", "the agent is not PID 1"))
	}
	reply, err := s.Renewer.Renew(ctx, req)
	if ks := s.code.Load(); ks != nil && err == nil {
		ks.renewed()
	}
	return reply, rpcError(err)
}

// Prepare implements guestrpc.Handler.
func (s *Server) Prepare(ctx context.Context, req *guestrpc.PrepareRequest) error {
	if s.Renewer == nil {
		return rpcError(fail(ErrUnsupported, "prepare", "", "the agent is not PID 1"))
	}
	return rpcError(s.Renewer.Prepare(ctx, req.Settle))
}

// SetClock implements guestrpc.Handler.
func (s *Server) SetClock(ctx context.Context, req *guestrpc.SetClockRequest) error {
	if s.Renewer == nil {
		return rpcError(fail(ErrUnsupported, "set the wall clock", "", "the agent is not PID 1"))
	}
	return rpcError(s.Renewer.SetClock(ctx, req.WallClock))
}

// rpcError gives an error of this package its code in the protocol.
func rpcError(err error) error {
	if err == nil {
		return nil
	}
	var own *Error
	if !errors.As(err, &own) {
		var kind Kind
		if !errors.As(err, &kind) {
			return guestrpc.ErrorFrom(err)
		}
		own = &Error{Kind: kind}
	}
	return &guestrpc.Error{Code: codeOf(own.Kind), Message: err.Error()}
}

func codeOf(kind Kind) guestrpc.Code {
	switch kind {
	case ErrNotFound:
		return guestrpc.CodeNotFound
	case ErrExists, ErrDuplicateID:
		return guestrpc.CodeAlreadyExists
	case ErrInvalid, ErrBadUser, ErrBadDir:
		return guestrpc.CodeInvalidArgument
	case ErrPermission, ErrReadOnly, ErrNotExecutable:
		return guestrpc.CodePermissionDenied
	case ErrNoSpace, ErrTooMany, ErrTooLarge:
		return guestrpc.CodeResourceExhausted
	case ErrStopped:
		return guestrpc.CodeAborted
	case ErrShuttingDown:
		return guestrpc.CodeUnavailable
	case ErrIO:
		return guestrpc.CodeInternal
	}
	// The other kinds depend on the state of the file or process.
	return guestrpc.CodeFailedPrecondition
}

// Signal implements guestrpc.Handler.
func (s *Server) Signal(_ context.Context, req *guestrpc.SignalRequest) error {
	p, err := s.Processes.Get(req.ID)
	if err != nil {
		return rpcError(err)
	}
	return rpcError(p.Signal(syscall.Signal(req.Signal), Scope(req.Scope)))
}
