package node

import (
	"context"
	"errors"
	"io"
	"sync"
	"sync/atomic"
	"time"

	"google.golang.org/grpc"

	nodev1 "agentrun.dev/api/node/v1"
	"agentrun.dev/internal/access"
	"agentrun.dev/internal/access/audit"
	"agentrun.dev/internal/convert/nodeconv"
	"agentrun.dev/internal/guest/guestrpc"
	"agentrun.dev/internal/sandbox"
	"agentrun.dev/internal/server"
)

// Bounds of a stream.
const (
	// maxData is the size of the largest frame of guestrpc.
	maxData = guestrpc.MaxPayload + 12
	// maxWakes is how many answers a client may wait for at once.
	maxWakes = guestrpc.MaxStreams
	// idleStream is how long a stream without calls stays open.
	idleStream = 5 * time.Minute
)

// using is a stream to a sandbox's agent.
type using struct {
	*nodeAPI
	who    access.Principal
	key    sandbox.Key
	id     sandbox.ID
	ctx    context.Context // of the principal, and of the stream
	stream *useStream

	end   context.CancelFunc // of the session on the stream, and of its calls
	idle  *time.Timer
	under sync.WaitGroup // calls and wakes; added to with mu held, while closing is not set

	mu      sync.Mutex // protects all following fields
	calls   int
	waking  int
	closing bool  // takes no more calls, and ends with the last one
	cause   error // of its end
}

// UseSandbox implements nodev1.NodeServer.
func (n *nodeAPI) UseSandbox(ss grpc.BidiStreamingServer[nodev1.UseSandboxRequest, nodev1.UseSandboxResponse]) error {
	first, err := ss.Recv()
	if err != nil {
		return err
	}
	open := first.GetOpen()
	if open == nil { // the caller's rights are checked first, as always
		open = &nodev1.OpenSandbox{}
	}
	return n.serve(ss.Context(), nodev1.Node_UseSandbox_FullMethodName, open, func(ctx context.Context) error {
		if first.GetOpen() == nil || len(first.ProtoReflect().GetUnknown()) > 0 {
			return errNotOpen
		}
		when, err := nodeconv.ToPrecondition(open.GetPrecondition())
		if err != nil {
			return err
		}
		u := &using{nodeAPI: n, who: server.PrincipalOf(ctx), ctx: ctx}
		if u.key, err = sandbox.ParseKey(open.GetNamespace(), open.GetName()); err != nil {
			return err
		}
		leave, err := n.uses.take(u.who.Name, usesOfOne, usesOfAll)
		if err != nil {
			return err
		}
		defer leave()
		u.stream = &useStream{ss: ss, cut: patienceOf(ss.Context()).end, using: u}
		return u.run(when)
	})
}

var errNotOpen = sandbox.Invalid("open", "it must be in the first message, and in no other")

// run wakes the sandbox and serves the stream to its end.
func (u *using) run(when sandbox.Precondition) error {
	looked, err := u.Sandbox(u.ctx, u.key) // a sandbox that does not meet the precondition is not woken
	if err == nil {
		err = looked.Identity().Meets(when)
	}
	if err != nil {
		return err
	}
	u.id = looked.ID
	session, end := context.WithCancel(u.ctx)
	defer end()
	u.end = end
	s, err := u.use(u.ctx)
	if err != nil {
		return err
	}
	record, can := s.Record(), s.Agent().Capabilities()
	s.Close()
	if err := u.stream.awake(0, record, nil); err != nil {
		return err
	}
	u.idle = time.AfterFunc(idleStream, u.idled)
	defer u.idle.Stop()
	defer context.AfterFunc(u.serving, u.close)()
	served := make(chan error, 1)
	go func() { served <- guestrpc.ServeRelay(session, u.stream, u, can...) }()
	select {
	case err = <-served:
	case <-session.Done(): // a read that waits for the client ends with the stream, when run has returned
		err = session.Err()
	}
	end()
	u.stream.stop()
	u.mu.Lock()
	u.closing = true
	u.mu.Unlock()
	u.under.Wait()
	u.mu.Lock()
	defer u.mu.Unlock()
	if u.cause != nil {
		return u.cause
	}
	return err
}

// use begins to use the sandbox of the stream. If the sandbox has ended, the stream
// ends as well. If another sandbox has its name now, use does not wake that.
func (u *using) use(ctx context.Context) (s *server.Session, err error) {
	now, err := u.Sandbox(ctx, u.key)
	if err == nil && now.ID != u.id {
		err = u.another()
	}
	if err == nil {
		s, err = u.Use(ctx, u.key)
	}
	if err == nil && s.Record().ID != u.id { // another sandbox has got the name just now
		s.Close()
		s, err = nil, u.another()
	}
	if sandbox.HasCode(err, sandbox.CodeEnded) || sandbox.HasCode(err, sandbox.CodeNotFound) {
		u.finish(err)
	}
	return s, err
}

func (u *using) another() error {
	return sandbox.Errorf(sandbox.CodeEnded, "sandbox %s has ended", u.key.Name).Because("another one has its name")
}

// finish ends the stream; only the first cause counts.
func (u *using) finish(cause error) {
	u.mu.Lock()
	if u.cause == nil {
		u.cause = cause
	}
	u.mu.Unlock()
	u.end()
}

// idled ends a stream without calls.
func (u *using) idled() {
	u.mu.Lock()
	defer u.mu.Unlock()
	if u.calls == 0 && u.cause == nil {
		u.cause = sandbox.Errorf(server.CodeUnavailable, "nothing was done on the stream for %v", idleStream).Try("Open it again")
		u.end()
	}
}

// errClosing ends calls and streams when the daemon shuts down.
var errClosing = sandbox.Errorf(sandbox.CodeClosing, "the daemon is shutting down").Try("Open the stream again when it is back")

// close ends the stream after its last call.
func (u *using) close() {
	u.mu.Lock()
	defer u.mu.Unlock()
	u.closing = true
	if u.cause == nil {
		u.cause = errClosing
	}
	if u.calls == 0 {
		u.end()
	}
}

// take counts a call.
func (u *using) take() error {
	u.mu.Lock()
	defer u.mu.Unlock()
	if u.closing {
		return errClosing
	}
	u.calls++
	u.under.Add(1)
	u.idle.Stop()
	return nil
}

func (u *using) release() {
	defer u.under.Done()
	u.mu.Lock()
	defer u.mu.Unlock()
	u.calls--
	if u.calls > 0 {
		return
	}
	u.idle.Reset(idleStream)
	if u.closing {
		u.end()
	}
}

// wake wakes the sandbox for a client, and answers with its record.
func (u *using) wake(number uint64) error {
	u.mu.Lock()
	defer u.mu.Unlock()
	if u.closing {
		return errClosing
	}
	if u.waking >= maxWakes {
		return sandbox.Errorf(sandbox.CodeCapacity, "the client waits for %d answers already", u.waking)
	}
	u.waking++
	u.idle.Reset(idleStream)
	u.under.Go(func() {
		s, err := u.use(u.ctx)
		var record sandbox.Sandbox
		if err == nil {
			record = s.Record()
			s.Close()
		}
		u.mu.Lock()
		u.waking--
		u.mu.Unlock()
		_ = u.stream.awake(number, record, err) // if it fails, the stream has ended
	})
	return nil
}

// Begin implements guestrpc.Relay. Each call is authorised, recorded and counted by
// itself.
func (u *using) Begin(ctx context.Context, c guestrpc.Call) (guestrpc.Relayed, error) {
	r, err := u.begin(ctx, c)
	if err != nil {
		return nil, toGuest(err)
	}
	return r, nil
}

func (u *using) begin(ctx context.Context, c guestrpc.Call) (*relayedCall, error) {
	operation, listed := relayed[c.Method]
	if !listed {
		return nil, sandbox.Errorf(sandbox.CodeDenied, "method %d is served to nobody", c.Method)
	}
	event := u.event(operation)
	target := server.Target{Operation: operation, Kind: sandbox.KindSandbox, Namespace: string(u.key.Namespace), Name: string(u.key.Name)}
	if err := u.Authorise(u.ctx, u.who, target); err != nil {
		u.auditRefused(u.refusals.Of(u.who.Name, event.Time), event, err)
		return nil, err
	}
	if err := u.take(); err != nil {
		return nil, err
	}
	if err := u.Audit.Write(event); err != nil {
		u.Log.Error("the audit log cannot be written", "error", err)
		u.release()
		return nil, server.AuditFailed()
	}
	r := &relayedCall{using: u, event: event}
	// It is the principal's context, and ends with the call at the latest.
	r.ctx, r.cancel = context.WithCancel(u.ctx)
	r.stop = context.AfterFunc(ctx, r.cancel)
	var err error
	if r.session, err = u.use(r.ctx); err != nil {
		r.End(err)
		return nil, err
	}
	if op := observed(c); op != "" {
		r.ctx, r.told = r.session.Begin(r.ctx, op)
	}
	if closes, ok := c.Request.(*guestrpc.CodeContextRequest); ok && c.Method == guestrpc.MethodCodeClose {
		r.session.ForgetContext(closes.ID)
	}
	return r, nil
}

// event makes the event of a call on the stream for the audit log.
func (u *using) event(o access.Operation) audit.Event {
	named := &nodev1.OpenSandbox{Namespace: string(u.key.Namespace), Name: string(u.key.Name)}
	return call{string(o), named}.event(u.ctx, u.who, audit.Start)
}

// relayedCall is a call that is under way.
type relayedCall struct {
	*using
	event   audit.Event
	session *server.Session
	ctx     context.Context
	cancel  context.CancelFunc
	stop    func() bool
	told    func(error) // nil if no observer is told
}

// Agent implements guestrpc.Relayed.
func (r *relayedCall) Agent() *guestrpc.Client { return r.session.Agent() }

// Connect implements guestrpc.Relayed.
func (r *relayedCall) Connect(_ context.Context, port uint16) (guestrpc.RelayedPort, error) {
	conn, err := r.session.Connect(r.ctx, port)
	if err != nil {
		return nil, toGuest(err)
	}
	return conn, nil
}

// End implements guestrpc.Relayed.
func (r *relayedCall) End(err error) {
	r.stop()
	r.cancel()
	if r.told != nil {
		r.told(err)
	}
	if r.session != nil {
		r.session.Close()
	}
	r.auditEnd(r.event, err)
	r.release()
}

// useStream carries the bytes of a session. Only the relay reads from it.
type useStream struct {
	*using
	ss   grpc.BidiStreamingServer[nodev1.UseSandboxRequest, nodev1.UseSandboxResponse]
	cut  context.CancelFunc // ends the call at once, and the reads and writes that wait for the client
	rest []byte             // of a message

	sending sync.Mutex // only one may send at a time
	stopped atomic.Bool
}

var (
	_ io.ReadWriteCloser  = (*useStream)(nil)
	_ guestrpc.CloserWith = (*useStream)(nil)
)

// Read implements io.Reader.
func (s *useStream) Read(p []byte) (int, error) {
	for len(s.rest) == 0 {
		m, err := s.ss.Recv()
		if err != nil {
			return 0, err
		}
		if err := s.received(m); err != nil {
			s.finish(err)
			return 0, err
		}
	}
	n := copy(p, s.rest)
	s.rest = s.rest[n:]
	return n, nil
}

// received handles a message.
func (s *useStream) received(m *nodev1.UseSandboxRequest) error {
	if len(m.ProtoReflect().GetUnknown()) > 0 {
		return checkFields(m.ProtoReflect())
	}
	switch r := m.GetRequest().(type) {
	case *nodev1.UseSandboxRequest_Data:
		if len(r.Data) == 0 || len(r.Data) > maxData {
			return sandbox.Invalid("data", "a message has 1 to %d bytes, not %d", maxData, len(r.Data))
		}
		s.rest = r.Data
		return nil
	case *nodev1.UseSandboxRequest_Wake:
		return s.wake(r.Wake)
	}
	return errNotOpen
}

// Write implements io.Writer.
func (s *useStream) Write(p []byte) (int, error) {
	if err := s.send(&nodev1.UseSandboxResponse{Response: &nodev1.UseSandboxResponse_Data{Data: p}}); err != nil {
		return 0, err
	}
	return len(p), nil
}

func (s *useStream) send(m *nodev1.UseSandboxResponse) error {
	s.sending.Lock()
	defer s.sending.Unlock()
	if s.stopped.Load() {
		return io.ErrClosedPipe
	}
	return s.ss.Send(m)
}

// stop sends nothing more. If the client does not receive the message that is being
// sent, stop ends the call at once: such a client would not receive the reason, either.
func (s *useStream) stop() {
	s.stopped.Store(true)
	if !s.sending.TryLock() {
		s.cut()
		return
	}
	s.sending.Unlock()
}

// awake answers with the sandbox, or with the reason why it is not awake.
func (s *useStream) awake(number uint64, record sandbox.Sandbox, err error) error {
	a := &nodev1.AwakeSandbox{Wake: number}
	if err != nil {
		a.Error = nodeconv.FromError(server.ToError(err))
	} else {
		a.Sandbox = nodeconv.FromSandbox(record)
	}
	return s.send(&nodev1.UseSandboxResponse{Response: &nodev1.UseSandboxResponse_Awake{Awake: a}})
}

// CloseWith implements guestrpc.CloserWith. A read that is under way ends with the call.
func (s *useStream) CloseWith(err error) {
	var violation *guestrpc.ProtocolError
	if errors.As(err, &violation) {
		s.finish(sandbox.Errorf(sandbox.CodeInvalid, "the bytes of the stream are not those of a session").Because("%v", err))
		return
	}
	s.end()
}

// Close implements io.Closer.
func (s *useStream) Close() error {
	s.end()
	return nil
}
