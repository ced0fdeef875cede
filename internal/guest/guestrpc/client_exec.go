package guestrpc

import (
	"context"
	"errors"
	"io"
	"sync/atomic"
)

// AttachedExec is a connection to a process in the guest. The process does not depend
// on it: after Close, after its context has ended or after the connection is lost,
// the process goes on and Attach finds it again.
//
// Stdout and Stderr have to be read: a process whose output is not read blocks once
// the window and its pipes are full, as with any pipe.
type AttachedExec struct {
	c       *Client
	st      *stream
	started ExecStarted
	stdout  execReader
	stderr  execReader
}

// execReader reads one output and counts its offset.
type execReader struct {
	st      *stream
	channel Channel
	offset  atomic.Int64
}

func (r *execReader) Read(p []byte) (int, error) {
	n, err := r.st.read(r.channel, p)
	r.offset.Add(int64(n))
	return n, err
}

// Exec starts a process. The attachment ends with ctx; the process goes on.
func (c *Client) Exec(ctx context.Context, req ExecRequest) (*AttachedExec, error) {
	return c.execSession(ctx, MethodExec, &req)
}

// Attach joins a process that was started before.
func (c *Client) Attach(ctx context.Context, req AttachRequest) (*AttachedExec, error) {
	return c.execSession(ctx, MethodAttach, &req)
}

func (c *Client) execSession(ctx context.Context, m Method, req message) (*AttachedExec, error) {
	x := &AttachedExec{c: c}
	st, err := c.openStreaming(ctx, m, req, &x.started)
	if err != nil {
		return nil, err
	}
	x.st = st
	x.stdout.st, x.stdout.channel = st, Stdout
	x.stderr.st, x.stderr.channel = st, Stderr
	x.stdout.offset.Store(x.started.Stdout.Offset)
	x.stderr.offset.Store(x.started.Stderr.Offset)
	return x, nil
}

// ID names the process for Attach, Signal and the others.
func (x *AttachedExec) ID() string { return x.started.ID }

// Started is the pid, and the offsets at which the outputs begin.
func (x *AttachedExec) Started() ExecStarted { return x.started }

// Stdin writes to the process. Close closes its stdin; merely closing the
// attachment does not.
func (x *AttachedExec) Stdin() io.WriteCloser { return execStdin{x.st} }

type execStdin struct{ st *stream }

func (w execStdin) Write(p []byte) (int, error) { return w.st.write(Stdin, p) }
func (w execStdin) Close() error                { return w.st.closeWrite(Stdin) }

// Stdout reads the process's standard output. It returns io.EOF once the process has
// closed it.
func (x *AttachedExec) Stdout() io.Reader { return &x.stdout }

// Stderr reads the process's standard error, which is empty for a process with a
// terminal.
func (x *AttachedExec) Stderr() io.Reader { return &x.stderr }

// Offsets returns the offsets for an Attach that continues this attachment. Output
// that was read here is not read again there.
func (x *AttachedExec) Offsets() (stdout, stderr int64) {
	return x.stdout.offset.Load(), x.stderr.offset.Load()
}

// Wait returns how the process ended. It does not read the outputs. Read them to
// their end before Wait, or concurrently.
func (x *AttachedExec) Wait() (ExitStatus, error) {
	var exit ExitStatus
	err := x.st.result(&exit)
	return exit, err
}

// Signal sends a signal to the process.
func (x *AttachedExec) Signal(ctx context.Context, signal int, scope SignalScope) error {
	return x.c.Signal(ctx, SignalRequest{ID: x.ID(), Signal: int32(signal), Scope: scope})
}

// Resize sets the size of the process's terminal.
func (x *AttachedExec) Resize(ctx context.Context, rows, cols uint16) error {
	return x.c.Resize(ctx, ResizeRequest{ID: x.ID(), Rows: rows, Cols: cols})
}

// Close detaches. The process goes on.
func (x *AttachedExec) Close() error {
	x.st.abort(ErrClosed)
	return nil
}

// Run runs a process to its end. It copies stdin to the process, and the process's
// outputs to stdout and stderr. A nil stdin is empty, and an output whose argument is
// nil is discarded. If ctx ends first, the process goes on; set ExecRequest.Timeout
// to have it killed. Run may return while a Read of stdin is still under way, and
// drops its result.
func (c *Client) Run(ctx context.Context, req ExecRequest, stdin io.Reader, stdout, stderr io.Writer) (ExitStatus, error) {
	req.Stdin = stdin != nil
	x, err := c.Exec(ctx, req)
	if err != nil {
		return ExitStatus{}, err
	}
	defer x.Close()
	return x.Copy(stdin, stdout, stderr)
}

// Copy serves an exec until its process ends, as Run does.
func (x *AttachedExec) Copy(stdin io.Reader, stdout, stderr io.Writer) (ExitStatus, error) {
	if stdin != nil {
		go func() {
			w := x.Stdin()
			// A process need not read all of its input. Its exit status says whether
			// that was a failure.
			_, _ = io.Copy(w, stdin)
			_ = w.Close()
		}()
	}
	return x.drain(stdout, stderr)
}

// drain copies the outputs until they end and returns the exit status.
func (x *AttachedExec) drain(stdout, stderr io.Writer) (ExitStatus, error) {
	copied := make(chan error, 1)
	go func() { copied <- x.copyOutput(stderr, x.Stderr()) }()
	err := errors.Join(x.copyOutput(stdout, x.Stdout()), <-copied)
	if err != nil {
		if _, waitErr := x.Wait(); waitErr != nil && !errors.Is(waitErr, ErrClosed) {
			err = waitErr // the reason why both copies failed
		}
		return ExitStatus{}, err
	}
	return x.Wait()
}

// copyOutput ends the attachment if it cannot write the output, so that the process
// does not block.
func (x *AttachedExec) copyOutput(w io.Writer, r io.Reader) error {
	if w == nil {
		w = io.Discard
	}
	_, err := io.CopyBuffer(onlyWriter{w}, onlyReader{r}, make([]byte, 32<<10))
	if err != nil {
		_ = x.Close()
	}
	return err
}

// onlyReader and onlyWriter hide ReadFrom and WriteTo, so that CopyBuffer
// uses its buffer.
type (
	onlyReader struct{ io.Reader }
	onlyWriter struct{ io.Writer }
)

// ListExecs returns the processes started with Exec that have not been
// released, sorted by id.
func (c *Client) ListExecs(ctx context.Context) ([]ExecInfo, error) {
	var all []ExecInfo
	var req ListExecsRequest
	for {
		var page ListExecsReply
		if err := c.call(ctx, MethodListExecs, &req, &page); err != nil {
			return nil, err
		}
		all = append(all, page.Execs...)
		if !page.More || len(page.Execs) == 0 {
			return all, nil
		}
		last := page.Execs[len(page.Execs)-1].ID
		if last <= req.After || len(all) > maxExecs {
			return nil, newError(CodeInternal, "guest lists processes without end")
		}
		req.After = last
	}
}

// maxExecs exceeds the number of processes that an agent keeps.
const maxExecs = 1 << 16

// Signal sends a signal to a process.
func (c *Client) Signal(ctx context.Context, req SignalRequest) error {
	return c.call(ctx, MethodSignal, &req, &empty{})
}

// Resize sets the size of a process's terminal.
func (c *Client) Resize(ctx context.Context, req ResizeRequest) error {
	return c.call(ctx, MethodResize, &req, &empty{})
}

// WriteStdin writes all of r to the stdin of a process, and closes it if eof is set.
// It returns once the process's pipe has taken all of it.
func (c *Client) WriteStdin(ctx context.Context, id string, r io.Reader, eof bool) error {
	buf := make([]byte, MaxStdin)
	for {
		n, err := io.ReadFull(r, buf)
		last := errors.Is(err, io.EOF) || errors.Is(err, io.ErrUnexpectedEOF)
		if err != nil && !last {
			return err
		}
		req := WriteStdinRequest{ID: id, Data: buf[:n], EOF: last && eof}
		if err := c.call(ctx, MethodWriteStdin, &req, &empty{}); err != nil || last {
			return err
		}
	}
}

// ReleaseExec removes a process that has ended, and its output.
func (c *Client) ReleaseExec(ctx context.Context, id string) error {
	return c.call(ctx, MethodReleaseExec, &ReleaseExecRequest{ID: id}, &empty{})
}
