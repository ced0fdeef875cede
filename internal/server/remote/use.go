package remote

import (
	"context"
	"errors"
	"sync"
	"time"

	nodev1 "agentrun.dev/api/node/v1"
	"agentrun.dev/internal/guest/guestrpc"
	"agentrun.dev/internal/sandbox"
)

// Bounds of the streams that stay open.
const (
	// idleStreams is how many unused streams stay open, each for idleStream.
	idleStreams = 64
	idleStream  = 30 * time.Second
	// freshStream is how long new sessions may begin on a stream. An older stream ends
	// with its last session. Its connection ends then as well, if that was replaced.
	freshStream = time.Minute
)

// streams has one stream for each sandbox, which the sessions share. The zero value is
// ready to use.
type streams struct {
	mu   sync.Mutex // protects all following fields, and those of held
	held map[sandbox.Key]*held
	idle int // of those
}

// held is a stream that is being opened, or is open.
type held struct {
	all   *streams
	key   sandbox.Key
	ready chan struct{} // closed when it is open, or is not going to be
	end   context.CancelFunc
	made  time.Time

	// Set before ready is closed.
	stream *stream
	err    error

	users int
	timer *time.Timer // runs while the stream is unused
}

// take returns the stream of a sandbox for one user, which calls leave at the end.
// fresh says that the stream was opened for this user.
func (all *streams) take(node nodev1.NodeClient, k sandbox.Key) (h *held, fresh bool) {
	all.mu.Lock()
	defer all.mu.Unlock()
	if h = all.held[k]; h != nil && h.good() {
		if h.users == 0 {
			h.timer.Stop()
			all.idle--
		}
		h.users++
		return h, false
	}
	if h != nil {
		h.drop()
	}
	ctx, end := context.WithCancel(context.Background())
	h = &held{all: all, key: k, ready: make(chan struct{}), end: end, made: time.Now(), users: 1}
	if all.held == nil {
		all.held = map[sandbox.Key]*held{}
	}
	all.held[k] = h
	go func() {
		h.stream, h.err = openStream(ctx, node, k)
		close(h.ready)
	}()
	return h, true
}

// good reports whether a session may begin on the stream. The caller holds
// all.mu.
func (h *held) good() bool {
	if time.Since(h.made) > freshStream {
		return false
	}
	select {
	case <-h.ready:
	default:
		return true
	}
	if h.err != nil {
		return false
	}
	select {
	case <-h.stream.ended:
		return false
	default:
		return true
	}
}

// drop makes sure that no session begins on the stream; the last one ends it. The
// caller holds all.mu.
func (h *held) drop() {
	if h.all.held[h.key] != h {
		return
	}
	delete(h.all.held, h.key)
	if h.users == 0 {
		h.timer.Stop()
		h.all.idle--
		h.end()
	}
}

// forget is drop, for callers that do not hold all.mu.
func (h *held) forget() {
	h.all.mu.Lock()
	defer h.all.mu.Unlock()
	h.drop()
}

// leave ends a use.
func (h *held) leave() {
	all := h.all
	all.mu.Lock()
	defer all.mu.Unlock()
	if h.users--; h.users > 0 {
		return
	}
	if all.held[h.key] != h || !h.good() || all.idle >= idleStreams {
		if all.held[h.key] == h {
			delete(all.held, h.key)
		}
		h.end()
		return
	}
	select {
	case <-h.ready:
	default: // no goroutine waits for it any more
		delete(all.held, h.key)
		h.end()
		return
	}
	all.idle++
	h.timer = time.AfterFunc(idleStream, func() {
		all.mu.Lock()
		defer all.mu.Unlock()
		if h.users == 0 {
			h.drop()
		}
	})
}

// Use implements server.Service.
func (s *Service) Use(ctx context.Context, k sandbox.Key) (sandbox.Session, error) {
	if err := s.needs(ctx, "use"); err != nil {
		return nil, err
	}
	for {
		h, fresh := s.streams.take(s.node, k)
		record, err := h.begin(ctx, fresh)
		if err == nil {
			return &session{service: s, held: h, record: record}, nil
		}
		// An open stream may be that of a sandbox that has ended, while another sandbox has its
		// name by now. That one has another stream, and only a new stream can tell that no
		// sandbox has the name.
		ended := errors.Is(err, errStreamEnded)
		if gone := sandbox.HasCode(err, sandbox.CodeEnded) || sandbox.HasCode(err, sandbox.CodeNotFound); ended || gone {
			h.forget()
			ended = ended || h.err == nil
		}
		h.leave()
		if ctx.Err() != nil {
			return nil, ctx.Err()
		}
		if !ended {
			return nil, err
		}
	}
}

// begin wakes the sandbox, and returns its record at the beginning of a
// session.
func (h *held) begin(ctx context.Context, fresh bool) (sandbox.Sandbox, error) {
	select {
	case <-h.ready:
	case <-ctx.Done():
		return sandbox.Sandbox{}, ctx.Err()
	}
	switch {
	case h.err != nil:
		return sandbox.Sandbox{}, h.err
	case fresh:
		return h.stream.record, nil
	}
	return h.stream.wake(ctx)
}

// session is a use of a sandbox of a node. The node counts each call that is made on it.
type session struct {
	service *Service
	held    *held
	record  sandbox.Sandbox
	close   sync.Once
}

var _ sandbox.Session = (*session)(nil)

// Record implements sandbox.Session.
func (u *session) Record() sandbox.Sandbox { return u.record }

// Agent implements sandbox.Session.
func (u *session) Agent() *guestrpc.Client { return u.held.stream.agent }

// Connect implements sandbox.Session.
func (u *session) Connect(ctx context.Context, port uint16) (sandbox.Conn, error) {
	conn, err := u.Agent().Connect(ctx, guestrpc.ConnectRequest{Port: port})
	if err == nil {
		return conn, nil
	}
	var said *guestrpc.Error // an error from the node, with its full text
	if errors.As(err, &said) {
		switch said.Code {
		case guestrpc.CodeFailedPrecondition:
			return nil, sandbox.Errorf(sandbox.CodePortClosed, "%s", said.Message)
		case guestrpc.CodeResourceExhausted:
			return nil, sandbox.Errorf(sandbox.CodeCapacity, "%s", said.Message)
		}
	}
	return nil, err
}

// Stats implements sandbox.Session.
func (u *session) Stats(ctx context.Context) (sandbox.Stats, error) {
	c, err := u.service.Cost(ctx, u.record.Key)
	return c.Stats, err
}

// Close implements sandbox.Session. Programs that it has started go on.
func (u *session) Close() { u.close.Do(u.held.leave) }
