package guestrpc

import (
	"context"
	"encoding/binary"
	"errors"
	"io"
	"slices"
	"sync"
	"time"
)

// clientWindow is the window of each channel that the host receives on.
const clientWindow = 256 << 10

// dialTimeout bounds the handshake of Dial.
const dialTimeout = 10 * time.Second

// Client is the host's end of a session. All methods may be called concurrently. If
// the context ends first, a method returns the context's error. The call in the guest
// is then cancelled, and the session goes on.
type Client struct {
	s *session

	mu        sync.Mutex // protects all following fields
	pings     map[uint64]chan struct{}
	lastToken uint64
}

// Dial is NewClient with a time limit of ten seconds for the handshake.
func Dial(conn io.ReadWriteCloser) (*Client, error) {
	ctx, cancel := context.WithTimeout(context.Background(), dialTimeout)
	defer cancel()
	return NewClient(ctx, conn)
}

// NewClient exchanges hellos over conn and returns a client that owns it. The hello
// comes from the agent itself, so the guest is up once the client exists. ctx bounds
// the handshake only. Closing conn must end a Read that is under way, as with every
// net.Conn. NewClient closes conn if it fails.
func NewClient(ctx context.Context, conn io.ReadWriteCloser, capabilities ...string) (*Client, error) {
	c := newClient(conn, clientWindow)
	s := c.s
	stop := context.AfterFunc(ctx, func() { _ = conn.Close() })
	err := c.handshake(capabilities)
	if !stop() && err == nil {
		err = ctx.Err()
	}
	if err != nil {
		s.fail(err)
		if ctx.Err() != nil {
			err = context.Cause(ctx)
		}
		var ve *VersionError
		if errors.As(err, &ve) {
			return nil, err
		}
		return nil, &Error{Code: CodeUnavailable, Message: "connect to guest agent: " + err.Error(), cause: err}
	}
	c.start()
	return c, nil
}

func newClient(conn io.ReadWriteCloser, window uint32) *Client {
	s := newSession(conn, window)
	c := &Client{s: s, pings: make(map[uint64]chan struct{})}
	s.onPong = c.onPong
	return c
}

func (c *Client) start() {
	go func() { _ = c.s.readLoop() }() // Err returns the reason for its end
}

func (c *Client) handshake(capabilities []string) error {
	if _, err := c.s.conn.Write(c.s.ourHello(capabilities)); err != nil {
		return err
	}
	peer, err := readHello(&c.s.r)
	if err != nil {
		return err
	}
	c.s.peer = peer
	c.s.version, err = negotiate(peer)
	return err
}

// ErrClosed is the reason that Client.Err returns after Close.
var ErrClosed = errors.New("session closed")

// Close ends the session. Calls under way fail; processes keep running.
func (c *Client) Close() error {
	c.s.fail(ErrClosed)
	return nil
}

// Done is closed when the session has ended.
func (c *Client) Done() <-chan struct{} { return c.s.closed }

// Err returns why the session ended, and nil while it stands.
func (c *Client) Err() error {
	select {
	case <-c.s.closed:
		return c.s.err
	default:
		return nil
	}
}

// Version returns the protocol version in use.
func (c *Client) Version() int { return int(c.s.version) }

// Capabilities returns the agent's capabilities beyond its version.
func (c *Client) Capabilities() []string { return slices.Clone(c.s.peer.capabilities) }

// Can reports whether the agent has a capability.
func (c *Client) Can(capability string) bool {
	return slices.Contains(c.s.peer.capabilities, capability)
}

// Ping asks the agent's read loop for an answer.
func (c *Client) Ping(ctx context.Context) error {
	answered := make(chan struct{})
	c.mu.Lock()
	c.lastToken++
	token := c.lastToken
	c.pings[token] = answered
	c.mu.Unlock()
	defer func() {
		c.mu.Lock()
		delete(c.pings, token)
		c.mu.Unlock()
	}()
	var b [pingSize]byte
	binary.LittleEndian.PutUint64(b[:], token)
	if err := c.s.w.write(ctx.Done(), header{typ: framePing}, b[:]); err != nil {
		return c.writeError(ctx, err)
	}
	select {
	case <-answered:
		return nil
	case <-ctx.Done():
		return context.Cause(ctx)
	case <-c.s.closed:
		return c.s.lost()
	}
}

// onPong takes the answer to a ping. It drops an answer that no caller waits for any
// more.
func (c *Client) onPong(token uint64) {
	c.mu.Lock()
	if answered, ok := c.pings[token]; ok {
		delete(c.pings, token)
		close(answered)
	}
	c.mu.Unlock()
}

// writeError says why a frame could not be written.
func (c *Client) writeError(ctx context.Context, err error) error {
	select {
	case <-c.s.closed:
		return c.s.lost()
	default:
	}
	if ctx.Err() != nil {
		return context.Cause(ctx)
	}
	return err
}

// maxStreamID leaves the id before an overflow unused.
const maxStreamID = 1<<32 - 3

// open begins a call. The stream ends with the context.
func (c *Client) open(ctx context.Context, m Method, req message) (*stream, error) {
	if ctx.Err() != nil {
		return nil, context.Cause(ctx)
	}
	payload := binary.AppendUvarint(nil, uint64(m))
	payload, err := marshal(payload, req)
	if err != nil {
		return nil, err
	}
	if uint32(len(payload)) > c.s.peer.maxPayload {
		return nil, newError(CodeInvalidArgument, "request is larger than a frame (64 KiB); pass large data as file contents or stdin")
	}
	// Ids must reach the guest in order, so each is assigned while its caller holds
	// the write turn.
	if err := c.s.w.acquire(ctx.Done()); err != nil {
		return nil, c.writeError(ctx, err)
	}
	st, err := c.register(m)
	if err != nil {
		c.s.w.release()
		return nil, err
	}
	err = c.s.w.writeHoldingTurn(ctx.Done(), header{typ: frameOpen, stream: st.id}, payload)
	if err != nil {
		return nil, c.writeError(ctx, err)
	}
	st.stopOn(ctx)
	return st, nil
}

// register makes the stream of a call.
func (c *Client) register(m Method) (*stream, error) {
	s := c.s
	s.mu.Lock()
	defer s.mu.Unlock()
	switch {
	case s.streams == nil:
		return nil, &Error{Code: CodeUnavailable, Message: "session closed", cause: s.err}
	case s.goaway != nil:
		return nil, newError(CodeUnavailable, "guest takes no more calls: ", s.goaway.Message)
	case s.lastID >= maxStreamID:
		return nil, newError(CodeUnavailable, "session has used up its stream ids; connect again")
	case s.lastID == 0:
		s.lastID = 1
	default:
		s.lastID += 2
	}
	st := newStream(s, s.lastID, m.toHost())
	st.streaming = m.streaming()
	s.streams[st.id] = st
	return st, nil
}

// stopOn aborts the stream when ctx ends.
func (st *stream) stopOn(ctx context.Context) {
	if ctx.Done() == nil {
		return
	}
	stop := context.AfterFunc(ctx, func() { st.abort(context.Cause(ctx)) })
	st.mu.Lock()
	st.onEnd = func() { stop() }
	ended := st.ended
	st.mu.Unlock()
	if ended {
		stop()
	}
}

// leave makes the stream independent of the context it was opened with.
func (st *stream) leave() {
	st.mu.Lock()
	stop := st.onEnd
	st.onEnd = nil
	st.mu.Unlock()
	if stop != nil {
		stop()
	}
}

// call makes a unary call.
func (c *Client) call(ctx context.Context, m Method, req, reply message) error {
	st, err := c.open(ctx, m, req)
	if err != nil {
		return err
	}
	return st.result(reply)
}

// openStreaming begins a streaming call and waits until it is accepted.
func (c *Client) openStreaming(ctx context.Context, m Method, req, headers message) (*stream, error) {
	st, err := c.open(ctx, m, req)
	if err != nil {
		return nil, err
	}
	if err := st.headersInto(headers); err != nil {
		return nil, err
	}
	return st, nil
}

// headersInto waits until a streaming call is accepted.
func (st *stream) headersInto(headers message) error {
	b, err := st.waitHeaders()
	if err != nil {
		return err
	}
	if err := unmarshal(b, headers); err != nil {
		err = badReply(err)
		st.abort(err)
		return err
	}
	return nil
}

// result waits for the reply of a call and decodes it.
func (st *stream) result(reply message) error {
	b, err := st.waitReply()
	if err != nil {
		return err
	}
	if err := unmarshal(b, reply); err != nil {
		return badReply(err)
	}
	return nil
}

func badReply(err error) error {
	return newError(CodeInternal, "guest sent a malformed reply: ", err.Error())
}

// Info describes the agent and its guest.
func (c *Client) Info(ctx context.Context) (Info, error) {
	var info Info
	err := c.call(ctx, MethodInfo, &empty{}, &info)
	return info, err
}

// Sync writes the guest's dirty pages to its disks.
func (c *Client) Sync(ctx context.Context) error {
	return c.call(ctx, MethodSync, &empty{}, &empty{})
}

// Renew gives a fork an identity of its own. If it fails, the fork still has all or a
// part of its parent's identity, and must not be used. The caller wipes req.Entropy
// afterwards.
func (c *Client) Renew(ctx context.Context, req RenewRequest) (RenewReply, error) {
	var reply RenewReply
	err := c.call(ctx, MethodRenew, &req, &reply)
	return reply, err
}

// SetClock sets the guest's wall clock. The agent must have CanSetClock.
func (c *Client) SetClock(ctx context.Context, req SetClockRequest) error {
	return c.call(ctx, MethodSetClock, &req, &empty{})
}

// Shutdown ends the guest. It returns once the agent has accepted. Done is closed
// when the connection has ended.
func (c *Client) Shutdown(ctx context.Context, req ShutdownRequest) error {
	st, err := c.openStreaming(ctx, MethodShutdown, &req, &empty{})
	if err != nil {
		return err
	}
	st.leave() // cancelling ctx later must not cancel the shutdown
	return nil
}
