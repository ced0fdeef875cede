package stack

import (
	"context"
	"errors"
	"slices"

	"gvisor.dev/gvisor/pkg/buffer"
	"gvisor.dev/gvisor/pkg/tcpip"
	"gvisor.dev/gvisor/pkg/tcpip/header"
	"gvisor.dev/gvisor/pkg/tcpip/stack"
	"gvisor.dev/gvisor/pkg/tcpip/transport/tcp"
	"gvisor.dev/gvisor/pkg/waiter"
)

// conn is a TCP connection of the sandbox, from its SYN until it is completely gone.
type conn struct {
	w     *Wire
	tuple Tuple
	// syn is the packet with which the sandbox has opened it.
	syn []byte
	// ctx ends when the connection is cut, or when its sandbox gives it up.
	ctx    context.Context
	cancel context.CancelFunc
	// requests carries netstack's request for the connection to its goroutine.
	requests chan *tcp.ForwarderRequest

	// Wire.mu protects all following fields.

	// stack is set once the SYN goes to netstack.
	stack  *netstack
	remote Remote
	inside *insideConn
	// isCut is set once our side has ended the connection with a RST.
	isCut bool
	// offered is set once netstack has taken the SYN.
	offered bool
	// buffer is how many bytes of Limits.Buffers the connection has.
	buffer int
}

// open begins a connection with the packet of its SYN. The caller holds w.mu.
func (w *Wire) open(t Tuple, syn []byte) {
	switch {
	case w.closed:
		return
	case w.opening >= w.cfg.Limits.Opening:
		w.drop(DropLimit)
		return
	case len(w.conns) >= w.cfg.Limits.Connections || !w.charge(usage{connMemory, 1}):
		w.drop(DropLimit)
		w.answer(w.resetFor(syn))
		return
	}
	c := &conn{w: w, tuple: t, syn: slices.Clone(syn), requests: make(chan *tcp.ForwarderRequest)}
	c.ctx, c.cancel = context.WithCancel(w.ctx)
	if w.conns == nil {
		w.conns = map[Tuple]*conn{}
	}
	w.conns[t] = c
	w.opening++
	w.spawn(c.run)
}

// run is the connection's goroutine.
func (c *conn) run() {
	defer c.remove()
	defer func() {
		// A RST that waits for room takes memory, so the connection counts until it
		// is sent.
		if inside := c.established(); inside != nil {
			inside.settle()
		}
	}()
	inside, remote := c.open()
	c.w.mu.Lock()
	c.w.opening--
	c.w.mu.Unlock()
	if inside == nil {
		return
	}
	remote.Splice(inside)
	// An unclean close of a connection needs no handling.
	_ = remote.Close()
	inside.linger()
}

// established is the sandbox's side of the connection, or nil before it exists.
func (c *conn) established() *insideConn {
	c.w.mu.Lock()
	defer c.w.mu.Unlock()
	return c.inside
}

// open dials, and then completes or refuses the sandbox's handshake.
func (c *conn) open() (*insideConn, Remote) {
	remote, err := c.dial()
	switch {
	case errors.Is(err, ErrRefused):
		c.w.answer(c.w.resetFor(c.syn))
		return nil, nil
	case err != nil:
		c.w.answer(c.w.unreachableFor(c.syn, hostUnreachable))
		return nil, nil
	}
	inside := c.accept(remote)
	if inside == nil {
		_ = remote.Close() // it was never used
	}
	return inside, remote
}

// dial asks the Outside. A connection that was cut meanwhile is refused.
func (c *conn) dial() (Remote, error) {
	if c.w.isResolver(c.tuple.Outside) {
		return &dnsRemote{w: c.w}, nil
	}
	remote, err := c.w.out.DialTCP(c.ctx, c.tuple.Inside, c.tuple.Outside)
	if c.ctx.Err() == nil {
		return remote, err
	}
	if err == nil {
		_ = remote.Close() // it was never used
	}
	return nil, ErrRefused
}

// accept hands the SYN to netstack and completes the handshake. It returns nil if the
// sandbox does not complete it, or if the connection is cut.
func (c *conn) accept(remote Remote) *insideConn {
	c.w.mu.Lock()
	if c.w.closed {
		c.w.mu.Unlock()
		return nil
	}
	if c.w.stack == nil {
		c.w.stack = newNetstack(c.w)
	}
	stack := c.w.stack
	c.stack, c.remote = stack, remote
	c.w.mu.Unlock()

	stack.deliver(c.tuple.Inside.Addr().Is6(), buffer.MakeWithData(c.syn))
	c.w.mu.Lock()
	offered := c.offered
	c.w.mu.Unlock()
	if !offered { // netstack refuses malformed options
		c.w.drop(DropMalformed)
		c.w.answer(c.w.resetFor(c.syn))
		return nil
	}
	c.syn = nil
	var request *tcp.ForwarderRequest
	select {
	case request = <-c.requests:
	case <-c.ctx.Done():
		return nil
	}
	var events waiter.Queue
	endpoint, err := request.CreateEndpoint(&events)
	request.Complete(false)
	if err != nil {
		return nil
	}
	inside := newInsideConn(c, endpoint, &events)

	c.w.mu.Lock()
	c.inside = inside
	size := c.reserve()
	cut := c.isCut || c.w.closed
	c.w.mu.Unlock()
	if cut {
		_ = inside.Reset() // it never fails
		return nil
	}
	endpoint.SocketOptions().SetReceiveBufferSize(int64(size), true)
	endpoint.SocketOptions().SetSendBufferSize(int64(size), true)
	// Writers have complete data ready, so Nagle's algorithm would only delay them.
	endpoint.SocketOptions().SetDelayOption(false)
	return inside
}

// reserve takes room for two buffers and returns the size of each. The caller holds
// Wire.mu. A connection gets a share of the room that is left, so that every
// connection finds some.
func (c *conn) reserve() int {
	left := c.w.cfg.Limits.Buffers - c.w.buffers
	size := c.w.chargeBuffers(min(maxBuffer, left/bufferShare/2))
	c.buffer = 2 * size
	c.w.buffers += c.buffer
	return max(size, minBuffer)
}

// offer offers a segment without an endpoint to netstack's forwarder. If the
// forwarder makes no request from it, offer answers the segment by hand. It returns
// true in both cases, so that netstack does not answer as well: netstack would wait
// for room on the wire, and pollers call this function.
func (w *Wire) offer(f *tcp.Forwarder, id stack.TransportEndpointID, p *stack.PacketBuffer) bool {
	t := tupleOf(id)
	w.mu.Lock()
	c := w.conns[t]
	expected := c != nil && c.stack != nil && c.inside == nil
	w.mu.Unlock()
	if expected && f.HandlePacket(id, p) {
		w.mu.Lock()
		defer w.mu.Unlock()
		c.offered = true
		return true
	}
	segment := header.TCP(p.TransportHeader().Slice())
	answered := expected && segment.Flags()&header.TCPFlagSyn != 0 // accept answers it
	if !answered && segment.Flags()&header.TCPFlagRst == 0 {
		w.answer(w.resetTo(t, segment, p.Data().Size()))
	}
	return true
}

// forwarded receives netstack's request for a SYN.
func (w *Wire) forwarded(request *tcp.ForwarderRequest) {
	w.mu.Lock()
	c := w.conns[tupleOf(request.ID())]
	w.mu.Unlock()
	if c == nil {
		request.Complete(true)
		return
	}
	select {
	case c.requests <- request:
	case <-c.ctx.Done():
		request.Complete(true)
	}
}

// cut ends the connection with a RST, in whatever state it is. During the handshake
// it may have to wait for room on the wire.
func (c *conn) cut() {
	c.w.mu.Lock()
	c.isCut = true
	inside, remote, stack := c.inside, c.remote, c.stack
	c.w.mu.Unlock()
	c.cancel()
	if remote != nil {
		_ = remote.Close() // the connection is cut in any case
	}
	switch {
	case inside != nil:
		_ = inside.Reset() // it never fails
	case stack != nil:
		stack.abort(c.tuple)
	}
}

// remove removes the connection from its wire.
func (c *conn) remove() {
	c.cancel()
	w := c.w
	w.mu.Lock()
	defer w.mu.Unlock()
	delete(w.conns, c.tuple)
	w.buffers -= c.buffer
	w.releaseBuffers(c.buffer)
	w.release(usage{connMemory, 1})
	w.ended(c.tuple, c.isCut || c.inside != nil && c.inside.wasReset())
	if len(w.conns) > 0 || w.closed {
		return
	}
	w.conns = nil
	if w.idle == nil {
		w.idle = w.clock.AfterFunc(w.cfg.Limits.StackIdle, w.rest)
	} else {
		w.idle.Reset(w.cfg.Limits.StackIdle)
	}
}

// rest frees the netstack of a wire without connections.
func (w *Wire) rest() {
	w.mu.Lock()
	defer w.mu.Unlock()
	if len(w.conns) > 0 || w.closed {
		return
	}
	if w.stack != nil {
		w.spawn(w.stack.destroy)
	}
	w.stack, w.idle, w.reset = nil, nil, nil
}

// terminal reports whether an endpoint has reached its last state.
func terminal(e tcpip.Endpoint) bool {
	switch tcp.EndpointState(e.State()) {
	case tcp.StateClose, tcp.StateError, tcp.StateTimeWait:
		return true
	}
	return false
}
