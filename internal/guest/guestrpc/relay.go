package guestrpc

import (
	"context"
	"errors"
	"io"
	"strconv"
	"sync"
)

// Call is a call that the client of a relay has asked for.
type Call struct {
	Method Method
	// Request is a pointer to what was parsed of it, such as *ExecRequest.
	Request any
}

// Relay decides about the calls of a session that is relayed.
type Relay interface {
	// Begin permits a call and says where it is made, or refuses it. It may wait; ctx
	// ends with the call.
	Begin(ctx context.Context, c Call) (Relayed, error)
}

// Relayed is where one call is made.
type Relayed interface {
	// Agent is the session that the call is made on.
	Agent() *Client
	// Connect makes the connection of a call to MethodConnect.
	Connect(ctx context.Context, port uint16) (RelayedPort, error)
	// End is called once, when the call has ended and its client was told.
	End(err error)
}

// RelayedPort is a connection to a port.
type RelayedPort interface {
	io.ReadWriteCloser
	CloseWrite() error
	// Done is closed when the connection has ended, on either side.
	Done() <-chan struct{}
}

// relayWindow is the window of each channel that a relay receives on.
const relayWindow = clientWindow

// ServeRelay serves a session, whose client is not trusted, by making its calls elsewhere,
// each on the session that the relay names. Only methods that relayedRequest lists are
// asked about; all others are refused. Requests are parsed, and what was parsed is sent
// on. It returns as Serve does.
func ServeRelay(ctx context.Context, conn io.ReadWriteCloser, to Relay, capabilities ...string) error {
	srv := newServer(conn, relayWindow)
	srv.elsewhere = func(m Method, body []byte) (callFunc, error) { return bindRelayed(to, m, body) }
	return srv.serve(ctx, capabilities)
}

// relayedRequest is an empty request of a method that can be relayed, nil of all others:
// those that are the business of whoever runs the guest.
func relayedRequest(m Method) message {
	switch m {
	case MethodExec:
		return new(ExecRequest)
	case MethodAttach:
		return new(AttachRequest)
	case MethodListExecs:
		return new(ListExecsRequest)
	case MethodSignal:
		return new(SignalRequest)
	case MethodResize:
		return new(ResizeRequest)
	case MethodReleaseExec:
		return new(ReleaseExecRequest)
	case MethodWriteStdin:
		return new(WriteStdinRequest)
	case MethodConnect:
		return new(ConnectRequest)
	}
	if m >= MethodCodeRun {
		return relayedCode(m)
	}
	return relayedFile(m)
}

func relayedFile(m Method) message {
	switch m {
	case MethodStat:
		return new(StatRequest)
	case MethodList:
		return new(ListRequest)
	case MethodRead:
		return new(ReadRequest)
	case MethodWrite:
		return new(WriteRequest)
	case MethodMkdir:
		return new(MkdirRequest)
	case MethodMove:
		return new(MoveRequest)
	case MethodRemove:
		return new(RemoveRequest)
	case MethodSymlink:
		return new(SymlinkRequest)
	case MethodReadlink:
		return new(ReadlinkRequest)
	case MethodChmod:
		return new(ChmodRequest)
	case MethodChown:
		return new(ChownRequest)
	case MethodWatch:
		return new(WatchRequest)
	}
	return nil
}

func relayedCode(m Method) message {
	switch m {
	case MethodCodeRun:
		return new(CodeRunRequest)
	case MethodCodeAttach:
		return new(CodeAttachRequest)
	case MethodCodeInterrupt:
		return new(CodeInterruptRequest)
	case MethodCodeRelease:
		return new(CodeReleaseRequest)
	case MethodCodeCreate:
		return new(CodeCreateRequest)
	case MethodCodeList:
		return new(empty)
	case MethodCodeRestart, MethodCodeClose:
		return new(CodeContextRequest)
	}
	return nil
}

// bindRelayed decodes a request and finds out where its call is made.
func bindRelayed(to Relay, m Method, body []byte) (callFunc, error) {
	req := relayedRequest(m)
	if req == nil {
		return nil, newError(CodePermissionDenied, "method ", strconv.Itoa(int(m)), " is not relayed")
	}
	if err := unmarshal(body, req); err != nil {
		return nil, malformed(err)
	}
	return func(ctx context.Context, st *stream) (reply message, err error) {
		at, err := to.Begin(ctx, Call{m, req})
		if err != nil {
			return nil, err
		}
		defer func() { st.after = func() { at.End(err) } }()
		if connect, ok := req.(*ConnectRequest); ok {
			return &empty{}, relayPort(ctx, st, at, connect.Port)
		}
		return relayCall(ctx, st, at.Agent(), m, req)
	}, nil
}

// relayCall makes a call on another session. Everything that it carries is passed on
// until it has ended there, or the client has cancelled it.
func relayCall(ctx context.Context, st *stream, agent *Client, m Method, req message) (message, error) {
	there, err := agent.open(ctx, m, req)
	if err != nil {
		return nil, err
	}
	for c := range Channel(channelCount) {
		if m.toGuest().has(c) {
			go pump(there, st, c) // ends with the stream, which is not longer than the call
		}
	}
	if m.streaming() {
		headers, err := there.waitHeaders()
		if err == nil && uint32(len(headers)) > st.s.peer.maxPayload {
			err = newError(CodeResourceExhausted, "answer is larger than a frame")
		}
		if err == nil {
			err = st.send(header{typ: frameHeaders}, headers)
		}
		if err != nil {
			there.abort(errCancelled)
			return nil, err
		}
	}
	var outputs sync.WaitGroup
	for c := range Channel(channelCount) {
		if m.toHost().has(c) {
			outputs.Go(func() { pump(st, there, c) })
		}
	}
	reply, err := there.waitReply()
	outputs.Wait()
	if err != nil {
		return nil, err
	}
	return &relayedReply{reply}, nil
}

// relayedReply is a reply as it came: only the client reads it.
type relayedReply struct{ payload []byte }

func (*relayedReply) visit(*visitor) {}

// pumpBuffers are those of pumps that have something to pass on.
var pumpBuffers = sync.Pool{New: func() any { return new([MaxPayload]byte) }}

// pump passes on what comes on a channel, and its end. If it cannot, from ends; a
// stream to that has ended needs nothing more.
func pump(to, from *stream, c Channel) {
	for {
		from.await(c)
		buf := pumpBuffers.Get().(*[MaxPayload]byte)
		n, err := from.read(c, buf[:])
		if n > 0 {
			_, err = to.write(c, buf[:n])
		}
		pumpBuffers.Put(buf)
		switch {
		case errors.Is(err, io.EOF):
			_ = to.closeWrite(c) // if it fails, to has ended, and says why
			return
		case err != nil:
			return
		}
	}
}

// await waits until there is something to read from a channel, or its end.
func (st *stream) await(c Channel) {
	st.mu.Lock()
	defer st.mu.Unlock()
	in := &st.in[c]
	for in.off == len(in.buf) && !in.eof && !st.ended {
		st.cond.Wait()
	}
}

// relayPort makes a connection and passes on what it carries, until both sides have closed
// it or one has failed.
func relayPort(ctx context.Context, st *stream, at Relayed, port uint16) error {
	conn, err := at.Connect(ctx, port)
	if err != nil {
		return err
	}
	defer func() { _ = conn.Close() }() // it has ended, or is to end
	if err := st.sendHeaders(&empty{}); err != nil {
		return err
	}
	sent, received := make(chan struct{}), make(chan error, 1)
	go func() { // ends with the stream
		defer close(sent)
		if _, err := io.Copy(onlyWriter{conn}, onlyReader{streamReader{st}}); err == nil {
			_ = conn.CloseWrite() // if it fails, the connection has ended
		}
	}()
	go func() { // ends with the connection
		_, err := io.CopyBuffer(onlyWriter{&PortStream{st}}, onlyReader{conn}, make([]byte, MaxPayload/2))
		if err == nil {
			err = st.closeWrite(Stdout)
		}
		received <- err
	}()
	select {
	case err = <-received:
	case <-ctx.Done():
		err = ctx.Err()
	}
	if err != nil {
		return err
	}
	select { // the program has closed its side; it may still read
	case <-sent:
	case <-conn.Done():
	case <-ctx.Done():
	}
	return nil
}
