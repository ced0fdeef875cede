package remote

import (
	"context"
	"errors"
	"io"
	"sync"

	nodev1 "agentrun.dev/api/node/v1"
	"agentrun.dev/internal/convert/nodeconv"
	"agentrun.dev/internal/guest/guestrpc"
	"agentrun.dev/internal/sandbox"
)

// maxWakes is how many answers a stream waits for at once: half of the node's bound.
const maxWakes = guestrpc.MaxStreams / 2

// stream is a stream to a sandbox's agent, with the session of guestrpc on it.
type stream struct {
	call   nodev1.Node_UseSandboxClient
	cancel context.CancelFunc
	agent  *guestrpc.Client
	record sandbox.Sandbox // as it was when the stream was opened
	rest   []byte          // the rest of a message; only the reader uses it

	sending sync.Mutex // only one may send at a time

	turns chan struct{} // taken while a wake waits for its answer

	mu      sync.Mutex // protects all following fields
	waiting map[uint64]chan awake
	last    uint64
	opened  bool
	err     error         // why it has ended
	ended   chan struct{} // closed then
}

// awake is the answer to a wake.
type awake struct {
	record sandbox.Sandbox
	err    error
}

// openStream opens the stream of a sandbox, which wakes the sandbox. The stream ends
// with ctx.
func openStream(ctx context.Context, node nodev1.NodeClient, k sandbox.Key) (*stream, error) {
	ctx, cancel := context.WithCancel(ctx)
	call, err := node.UseSandbox(ctx)
	if err != nil {
		cancel()
		return nil, problem(ctx, err)
	}
	s := &stream{call: call, cancel: cancel, turns: make(chan struct{}, maxWakes), waiting: map[uint64]chan awake{}, ended: make(chan struct{})}
	err = s.send(&nodev1.UseSandboxRequest{Request: &nodev1.UseSandboxRequest_Open{
		Open: &nodev1.OpenSandbox{Namespace: string(k.Namespace), Name: string(k.Name)},
	}})
	if err != nil && !errors.Is(err, io.EOF) { // io.EOF: the answer says why
		cancel()
		return nil, problem(ctx, err)
	}
	// The hello goes out before the answer has come.
	if s.agent, err = guestrpc.NewClient(ctx, s); err != nil {
		s.finish(err)
		return nil, s.why()
	}
	return s, nil
}

// Read implements io.Reader, for the session alone.
func (s *stream) Read(p []byte) (int, error) {
	for len(s.rest) == 0 {
		m, err := s.call.Recv()
		if err != nil {
			s.finish(problem(s.call.Context(), err))
			return 0, err
		}
		switch r := m.GetResponse().(type) {
		case *nodev1.UseSandboxResponse_Data:
			s.rest = r.Data
		case *nodev1.UseSandboxResponse_Awake:
			s.answered(r.Awake)
		}
	}
	n := copy(p, s.rest)
	s.rest = s.rest[n:]
	return n, nil
}

// answered gives an answer to the wake that waits for it.
func (s *stream) answered(g *nodev1.AwakeSandbox) {
	var a awake
	if g.GetError() != nil {
		a.err = nodeconv.ToError(g.GetError())
	} else {
		a.record, a.err = nodeconv.ToSandbox(g.GetSandbox())
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if g.GetWake() == 0 && !s.opened {
		s.opened, s.record = true, a.record
		return
	}
	if to, waits := s.waiting[g.GetWake()]; waits {
		delete(s.waiting, g.GetWake())
		<-s.turns
		to <- a // it has room
	}
}

// Write implements io.Writer. If the node has ended the stream, it succeeds and Read says why: an
// error here would have the session close the stream before Read has got the node's answer.
func (s *stream) Write(p []byte) (int, error) {
	for sent := 0; sent < len(p); sent += maxData {
		part := p[sent:min(len(p), sent+maxData)]
		err := s.send(&nodev1.UseSandboxRequest{Request: &nodev1.UseSandboxRequest_Data{Data: part}})
		if err != nil && !errors.Is(err, io.EOF) {
			return 0, err
		}
	}
	return len(p), nil
}

// maxData is the most that a message has: a frame of guestrpc.
const maxData = guestrpc.MaxPayload + 12

func (s *stream) send(m *nodev1.UseSandboxRequest) error {
	s.sending.Lock()
	defer s.sending.Unlock()
	return s.call.Send(m)
}

// Close implements io.Closer.
func (s *stream) Close() error {
	s.cancel()
	return nil
}

// finish ends the stream; only the first reason counts.
func (s *stream) finish(err error) {
	s.mu.Lock()
	if s.err == nil {
		s.err = err
		close(s.ended)
	}
	s.mu.Unlock()
	s.cancel()
}

// why is the reason for which a stream has ended.
func (s *stream) why() error {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.err
}

// errStreamEnded is the error of a wake on a stream that has ended, perhaps before the
// wake was called.
var errStreamEnded = errors.New("the stream has ended")

// wake wakes the sandbox and returns its record.
func (s *stream) wake(ctx context.Context) (sandbox.Sandbox, error) {
	select {
	case s.turns <- struct{}{}: // until it is answered
	case <-s.ended:
		return sandbox.Sandbox{}, errStreamEnded
	case <-ctx.Done():
		return sandbox.Sandbox{}, ctx.Err()
	}
	answer := make(chan awake, 1)
	s.mu.Lock()
	s.last++
	number := s.last
	s.waiting[number] = answer
	s.mu.Unlock()
	if err := s.send(&nodev1.UseSandboxRequest{Request: &nodev1.UseSandboxRequest_Wake{Wake: number}}); err != nil {
		return sandbox.Sandbox{}, errStreamEnded
	}
	select {
	case a := <-answer:
		return a.record, a.err
	case <-s.ended:
		return sandbox.Sandbox{}, errStreamEnded
	case <-ctx.Done():
		return sandbox.Sandbox{}, ctx.Err()
	}
}
