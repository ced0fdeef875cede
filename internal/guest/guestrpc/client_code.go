package guestrpc

import (
	"context"
	"encoding/binary"
	"errors"
	"io"
	"strings"
	"sync"
	"sync/atomic"
)

// SetEnv replaces the base environment of execs and interpreters.
func (c *Client) SetEnv(ctx context.Context, req SetEnvRequest) error {
	return c.call(ctx, MethodSetEnv, &req, &empty{})
}

// AttachedCode is a connection to an execution in the guest. The execution does not
// depend on it: CodeAttach finds the execution again. Stdout, Stderr and the events
// have to be read, each to its end, because an execution whose output is not read
// blocks.
type AttachedCode struct {
	st      *stream
	started CodeStarted
	stdout  execReader
	stderr  execReader
	next    atomic.Int64 // sequence number of the next event
}

// StartCode starts an execution. The attachment ends with ctx; the execution goes on.
func (c *Client) StartCode(ctx context.Context, req CodeRunRequest) (*AttachedCode, error) {
	source := req.Source
	if len(source) > MaxCode {
		return nil, newError(CodeInvalidArgument, "the source is larger than 16 MiB; write it to a file and run that")
	}
	if req.More = len(source) > maxCodeInline; !req.More {
		return c.codeSession(ctx, MethodCodeRun, &req)
	}
	req.Source = ""
	st, err := c.open(ctx, MethodCodeRun, &req)
	if err != nil {
		return nil, err
	}
	// If the guest has refused the call, waiting for the headers returns the reason.
	if _, err = io.Copy(execStdin{st}, strings.NewReader(source)); err == nil {
		_ = st.closeWrite(Stdin)
	}
	return newAttachedCode(st)
}

// AttachCode joins an execution that was started before.
func (c *Client) AttachCode(ctx context.Context, req CodeAttachRequest) (*AttachedCode, error) {
	return c.codeSession(ctx, MethodCodeAttach, &req)
}

func (c *Client) codeSession(ctx context.Context, m Method, req message) (*AttachedCode, error) {
	st, err := c.open(ctx, m, req)
	if err != nil {
		return nil, err
	}
	return newAttachedCode(st)
}

func newAttachedCode(st *stream) (*AttachedCode, error) {
	x := &AttachedCode{st: st}
	if err := st.headersInto(&x.started); err != nil {
		return nil, err
	}
	x.stdout.st, x.stdout.channel = st, Stdout
	x.stderr.st, x.stderr.channel = st, Stderr
	x.stdout.offset.Store(x.started.Stdout.Offset)
	x.stderr.offset.Store(x.started.Stderr.Offset)
	x.next.Store(x.started.Events.Offset)
	return x, nil
}

// ID is the id of the execution.
func (x *AttachedCode) ID() string { return x.started.ID }

// Started says where the outputs begin.
func (x *AttachedCode) Started() CodeStarted { return x.started }

// Stdout reads the execution's standard output.
func (x *AttachedCode) Stdout() io.Reader { return &x.stdout }

// Stderr reads the execution's standard error.
func (x *AttachedCode) Stderr() io.Reader { return &x.stderr }

// Resume is the request for an attachment that continues where this one is now.
func (x *AttachedCode) Resume() CodeAttachRequest {
	return CodeAttachRequest{ID: x.ID(), StdoutOffset: x.stdout.offset.Load(), StderrOffset: x.stderr.offset.Load(), Event: x.next.Load()}
}

// NextEvent waits for an event. io.EOF says that no more events will come. Only one
// goroutine may call it at a time.
func (x *AttachedCode) NextEvent() (CodeEvent, error) {
	e, err := readCodeEvent(readerFunc(func(p []byte) (int, error) { return x.st.read(Control, p) }))
	if err == nil {
		x.next.Store(int64(e.Seq) + 1)
	}
	var own *Error
	if errors.As(err, &own) && own.Code == CodeInternal {
		x.st.abort(err)
	}
	return e, err
}

// readCodeEvent reads the length of an event and the event.
func readCodeEvent(r io.Reader) (CodeEvent, error) {
	var e CodeEvent
	var size [4]byte
	if _, err := io.ReadFull(r, size[:]); err != nil {
		if errors.Is(err, io.ErrUnexpectedEOF) {
			err = malformedCodeEvent()
		}
		return e, err
	}
	n := binary.LittleEndian.Uint32(size[:])
	if n > MaxCodeEvent+64 {
		return e, malformedCodeEvent()
	}
	// Memory grows only with the bytes that arrive, since the length may be a lie.
	b, err := io.ReadAll(io.LimitReader(r, int64(n)))
	if err != nil {
		return e, err
	}
	if uint32(len(b)) != n || unmarshal(b, &e) != nil {
		return CodeEvent{}, malformedCodeEvent()
	}
	return e, nil
}

func malformedCodeEvent() error { return newError(CodeInternal, "guest sent a malformed event") }

// Wait returns how the execution ended. It does not read the outputs.
func (x *AttachedCode) Wait() (CodeStatus, error) {
	var status CodeStatus
	err := x.st.result(&status)
	return status, err
}

// Close detaches. The execution goes on.
func (x *AttachedCode) Close() error {
	x.st.abort(ErrClosed)
	return nil
}

// Copy serves an attachment until its execution ends. It copies the outputs, and
// passes the events to event, in order. Outputs and events whose argument is nil are
// discarded. If a copy fails, the attachment is closed.
func (x *AttachedCode) Copy(stdout, stderr io.Writer, event func(CodeEvent) error) (CodeStatus, error) {
	var wg sync.WaitGroup
	var errs [3]error
	copyTo := func(i int, w io.Writer, r io.Reader) {
		if w == nil {
			w = io.Discard
		}
		if _, errs[i] = io.CopyBuffer(onlyWriter{w}, onlyReader{r}, make([]byte, 32<<10)); errs[i] != nil {
			_ = x.Close()
		}
	}
	wg.Go(func() { copyTo(0, stdout, x.Stdout()) })
	wg.Go(func() { copyTo(1, stderr, x.Stderr()) })
	errs[2] = x.eachEvent(event)
	wg.Wait()
	if err := errors.Join(errs[:]...); err != nil {
		if _, waitErr := x.Wait(); waitErr != nil && !errors.Is(waitErr, ErrClosed) {
			err = waitErr // the reason why the copies failed
		}
		return CodeStatus{}, err
	}
	return x.Wait()
}

func (x *AttachedCode) eachEvent(f func(CodeEvent) error) error {
	for {
		e, err := x.NextEvent()
		if errors.Is(err, io.EOF) {
			return nil
		}
		if err == nil && f != nil {
			err = f(e)
		}
		if err != nil {
			_ = x.Close()
			return err
		}
	}
}

// RunCode starts a source and serves it until its end, as Copy does.
func (c *Client) RunCode(ctx context.Context, req CodeRunRequest, stdout, stderr io.Writer, event func(CodeEvent) error) (CodeStatus, error) {
	x, err := c.StartCode(ctx, req)
	if err != nil {
		return CodeStatus{}, err
	}
	defer x.Close()
	return x.Copy(stdout, stderr, event)
}

// InterruptCode interrupts an execution.
func (c *Client) InterruptCode(ctx context.Context, req CodeInterruptRequest) error {
	return c.call(ctx, MethodCodeInterrupt, &req, &empty{})
}

// ReleaseCode removes an execution that has ended, and its output.
func (c *Client) ReleaseCode(ctx context.Context, id string) error {
	return c.call(ctx, MethodCodeRelease, &CodeReleaseRequest{ID: id}, &empty{})
}

// CreateContext makes a context.
func (c *Client) CreateContext(ctx context.Context, req CodeCreateRequest) (CodeContext, error) {
	var reply CodeContext
	err := c.call(ctx, MethodCodeCreate, &req, &reply)
	return reply, err
}

// ListContexts returns the contexts, sorted by id.
func (c *Client) ListContexts(ctx context.Context) ([]CodeContext, error) {
	var reply CodeListReply
	err := c.call(ctx, MethodCodeList, &empty{}, &reply)
	return reply.Contexts, err
}

// RestartContext ends the interpreter of a context, and with it the running
// execution. The next execution gets a new interpreter.
func (c *Client) RestartContext(ctx context.Context, id string) error {
	return c.call(ctx, MethodCodeRestart, &CodeContextRequest{ID: id}, &empty{})
}

// CloseContext ends the interpreter of a context and removes the context.
func (c *Client) CloseContext(ctx context.Context, id string) error {
	return c.call(ctx, MethodCodeClose, &CodeContextRequest{ID: id}, &empty{})
}
