package guestrpc

import (
	"context"
	"time"

	"agentrun.dev/internal/codec"
)

// The read loop itself runs Renew and Prepare. A renewal is the first call in every
// fork, and each page that it touches becomes the fork's own. Another goroutine would
// mean another stack, and each size class of allocations another page. Prepare runs
// on the same goroutine so that its stack has grown before the guest is captured.

// renewScratch is the memory of a renewal, allocated once.
type renewScratch struct {
	req   RenewRequest
	reply [32]byte
}

// renew runs a renewal. The request stays in the read buffer, where it is wiped.
func (srv *server) renew(id uint32, body []byte) {
	defer clear(body)
	r := &srv.renewal
	r.req = RenewRequest{}
	defer func() { r.req = RenewRequest{} }() // it points into the read buffer, which the next frame overwrites
	err := r.req.unmarshalInPlace(body)
	if err != nil {
		srv.s.reset(id, malformed(err))
		return
	}
	var reply RenewReply
	err = guarded(func() (err error) {
		reply, err = srv.handler.Renew(sessionContext{&srv.s}, &r.req)
		return err
	})
	if err != nil {
		srv.s.reset(id, ErrorFrom(err))
		return
	}
	srv.s.w.control(header{typ: frameReply, stream: id}, reply.marshal(r.reply[:0]))
}

// prepare runs a preparation.
func (srv *server) prepare(id uint32, body []byte) {
	var req PrepareRequest
	if err := unmarshal(body, &req); err != nil {
		srv.s.reset(id, malformed(err))
		return
	}
	if err := guarded(func() error { return srv.handler.Prepare(sessionContext{&srv.s}, &req) }); err != nil {
		srv.s.reset(id, ErrorFrom(err))
		return
	}
	b, err := marshal(nil, &empty{})
	if err != nil {
		srv.s.reset(id, ErrorFrom(err))
		return
	}
	srv.s.w.control(header{typ: frameReply, stream: id}, b)
}

func malformed(err error) *Error {
	return newError(CodeInvalidArgument, "malformed request: ", err.Error())
}

// unmarshalInPlace is unmarshal for a request that does not outlive b. It uses no
// interface, so that nothing escapes to the heap.
func (m *RenewRequest) unmarshalInPlace(b []byte) error {
	c := visitor{d: codec.NewDecoder(b), inPlace: true}
	c.version = c.d.Version(messageVersion)
	m.visit(&c)
	return c.d.Finish()
}

// marshal appends the reply to b. It cannot fail, since no field has a limit.
func (m *RenewReply) marshal(b []byte) []byte {
	c := visitor{e: codec.NewEncoder(b), version: messageVersion}
	c.e.Version(messageVersion)
	m.visit(&c)
	return c.e.Bytes()
}

// sessionContext is the context of a call that the read loop runs. The host cannot
// cancel it; it ends with the session.
type sessionContext struct{ s *session }

func (c sessionContext) Deadline() (time.Time, bool) { return time.Time{}, false }
func (c sessionContext) Done() <-chan struct{}       { return c.s.closed }
func (c sessionContext) Value(any) any               { return nil }

func (c sessionContext) Err() error {
	select {
	case <-c.s.closed:
		return context.Canceled
	default:
		return nil
	}
}
