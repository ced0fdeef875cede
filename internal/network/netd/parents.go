package netd

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"runtime/debug"
	"sync"
	"time"

	"agentrun.dev/internal/network/netctl"
)

// Bounds of parents.
const (
	maxParents = 32
	// helloPatience is how long a parent may take to send Hello. sendPatience is how
	// long it may take to read a reply.
	helloPatience = 10 * time.Second
	sendPatience  = 10 * time.Second
	// maxRequests is how many requests of one parent are served at once; further ones
	// wait. maxFollowers is how many of its requests may wait for entries of a log;
	// further ones are refused.
	maxRequests  = 64
	maxFollowers = 256
)

// parents are the processes that control the server, each by a connection. A parent
// may be killed just after a request, and its successor may ask for the opposite. The
// server then first completes the requests of the dead parent, although it reads from
// both at once.
type parents struct {
	mu  sync.Mutex // protects all following fields
	all map[*parent]bool
}

// parent is one connection.
type parent struct {
	conn   *netctl.Conn
	before []*parent     // parents that had hung up when this one came
	served chan struct{} // closed when all its requests are done
}

// add accepts a parent unless there are too many.
func (ps *parents) add(c *netctl.Conn) (*parent, bool) {
	ps.mu.Lock()
	defer ps.mu.Unlock()
	if len(ps.all) >= maxParents {
		return nil, false
	}
	p := &parent{conn: c, served: make(chan struct{})}
	for o := range ps.all {
		if o.conn.Gone() {
			p.before = append(p.before, o)
		}
	}
	if ps.all == nil {
		ps.all = map[*parent]bool{}
	}
	ps.all[p] = true
	return p, true
}

func (ps *parents) remove(p *parent) {
	ps.mu.Lock()
	defer ps.mu.Unlock()
	close(p.served)
	delete(ps.all, p)
}

func (ps *parents) count() int {
	ps.mu.Lock()
	defer ps.mu.Unlock()
	return len(ps.all)
}

// hangUp closes all connections, so that their readers return.
func (ps *parents) hangUp() {
	ps.mu.Lock()
	defer ps.mu.Unlock()
	for p := range ps.all {
		_ = p.conn.Close() // no more messages will be sent
	}
}

// serveParent serves a parent until it hangs up or breaks the protocol.
func (s *Server) serveParent(ctx context.Context, p *parent, owner uint32) {
	defer func() { _ = p.conn.Close() }() // no more messages will be sent
	if err := s.greet(p, owner); err != nil {
		s.cfg.Log.Warn("a parent was turned away", "error", err)
		return
	}
	for _, o := range p.before {
		<-o.served
	}
	if err := s.serveRequests(ctx, p); err != nil {
		s.cfg.Log.Warn("a parent was hung up on", "error", err)
	}
}

// greet decides whether to serve a parent. Only root and the user who has started
// this process may be parents.
func (s *Server) greet(p *parent, owner uint32) error {
	deadline := time.Now().Add(helloPatience)
	refuse := func(why error) error {
		_ = p.conn.Send(deadline, &netctl.Welcome{Protocol: netctl.Protocol, Refused: why.Error()}, nil) // as a courtesy
		return why
	}
	uid, err := p.conn.PeerUID()
	if err != nil {
		return err
	}
	if uid != 0 && uid != owner {
		return refuse(fmt.Errorf("user %d may not control this netd: it belongs to user %d", uid, owner))
	}
	m, file, err := p.conn.Receive(deadline)
	if file != nil {
		_ = file.Close() // of an invalid message
	}
	if err != nil {
		return err
	}
	hello, ok := m.(*netctl.Hello)
	if !ok {
		return refuse(errors.New("the first message is no Hello"))
	}
	if hello.Protocol != netctl.Protocol {
		return refuse(fmt.Errorf("protocol %d is spoken here, not %d", netctl.Protocol, hello.Protocol))
	}
	return p.conn.Send(deadline, &netctl.Welcome{
		Protocol: netctl.Protocol, Features: netctl.Features, Version: s.cfg.Version, PID: uint64(os.Getpid()), Started: s.started,
	}, nil)
}

// serveRequests serves requests, several at once. It returns when the parent has hung
// up and all its requests are done.
func (s *Server) serveRequests(ctx context.Context, p *parent) error {
	ctx, cancel := context.WithCancel(ctx)
	var serving sync.WaitGroup
	defer serving.Wait()
	defer cancel() // ends the requests that wait for entries of a log
	slots, followers := make(chan struct{}, maxRequests), make(chan struct{}, maxFollowers)
	for {
		m, file, err := p.conn.Receive(time.Time{})
		if errors.Is(err, io.EOF) || errors.Is(err, net.ErrClosed) { // one side has hung up
			return nil
		}
		noDescriptor := errors.Is(err, netctl.ErrNoDescriptor) // only this request fails; others go on
		if err != nil && !noDescriptor {
			return err
		}
		request, ok := m.(netctl.Request)
		if !ok {
			if file != nil {
				_ = file.Close() // of an invalid message
			}
			return fmt.Errorf("a message that is no request: %T", m)
		}
		if noDescriptor {
			p.reply(netctl.Fail(request.RequestID(), fmt.Errorf("netd: %w", err)))
			continue
		}
		places := slots
		if l, ok := m.(*netctl.Log); ok && l.Wait > 0 {
			places = followers
			if len(places) == maxFollowers { // only this goroutine adds to it
				p.reply(netctl.Fail(request.RequestID(), fmt.Errorf("%w: %d requests wait for entries of logs", netctl.ErrBusy, maxFollowers)))
				continue
			}
		}
		places <- struct{}{}
		serving.Go(func() {
			defer func() { <-places }()
			p.reply(s.answer(ctx, request, file))
			if simple, ok := request.(*netctl.Simple); ok && simple.Kind == netctl.KindShutdown {
				s.stop()
			}
		})
	}
}

// reply sends a reply. If the parent does not read it, the connection is closed.
func (p *parent) reply(r *netctl.Reply) {
	err := p.conn.Send(time.Now().Add(sendPatience), r, nil)
	if errors.Is(err, netctl.ErrInvalid) { // the reply is too large, and was not sent
		err = p.conn.Send(time.Now().Add(sendPatience), netctl.Fail(r.ID, err), nil)
	}
	if err != nil {
		_ = p.conn.Close() // the reader of the connection notices
	}
}

// answer carries out a request. file is the request's file, or nil.
func (s *Server) answer(ctx context.Context, request netctl.Request, file *os.File) (reply *netctl.Reply) {
	defer func() {
		if file != nil {
			_ = file.Close() // the wire has its own copy
		}
		if v := recover(); v != nil {
			s.cfg.Log.Error("a request has panicked", "request", fmt.Sprintf("%T", request), "panic", v, "stack", string(debug.Stack()))
			reply = netctl.Fail(request.RequestID(), fmt.Errorf("netd has panicked: %v", v))
		}
	}()
	result, err := s.do(ctx, request, file)
	if err != nil {
		return netctl.Fail(request.RequestID(), err)
	}
	reply = &netctl.Reply{ID: request.RequestID()}
	if result != nil {
		reply.Data = netctl.MarshalResult(result)
	}
	return reply
}

// do carries out a request, and returns the result for the reply.
func (s *Server) do(ctx context.Context, request netctl.Request, file *os.File) (netctl.Result, error) {
	switch r := request.(type) {
	case *netctl.Configure:
		return nil, s.configure(r.Settings)
	case *netctl.Attach:
		return nil, s.attach(r.Wire, file)
	case *netctl.SetPolicy:
		return nil, s.setPolicy(r.Wire, r.Rules)
	case *netctl.OfWire:
		return s.ofWire(r.Kind, r.Wire)
	case *netctl.Collect:
		return s.collect(r.Wire, r.Mark)
	case *netctl.Log:
		return s.log(ctx, r)
	case *netctl.Simple:
		switch r.Kind {
		case netctl.KindList:
			return s.list(), nil
		case netctl.KindStats:
			return s.stats(), nil
		case netctl.KindShutdown:
			return nil, nil // it starts after the reply
		}
	}
	return nil, fmt.Errorf("%w: %T", netctl.ErrInvalid, request)
}
