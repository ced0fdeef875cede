package client

import (
	"context"
	"encoding/base64"
	"fmt"
	"io"
	"net/http"
	"net/url"
	"strconv"

	"agentrun.dev/api/rest"
)

// Bytes decodes output that is text or base64.
func Bytes(data string, encoding rest.Encoding) ([]byte, error) {
	if encoding == rest.EncodingBase64 {
		return base64.StdEncoding.DecodeString(data)
	}
	return []byte(data), nil
}

// Output receives the output of a stream; output for a nil writer is discarded.
type Output struct{ Stdout, Stderr io.Writer }

func (o Output) write(stderr bool, data string, encoding rest.Encoding) error {
	w := o.Stdout
	if stderr {
		w = o.Stderr
	}
	if w == nil {
		return nil
	}
	b, err := Bytes(data, encoding)
	if err == nil {
		_, err = w.Write(b)
	}
	return err
}

// Run runs a program to its end and returns all its output.
func (c *Client) Run(ctx context.Context, sandbox string, req rest.ExecRequest) (rest.ExecResult, error) {
	return get[rest.ExecResult](ctx, c, call{method: http.MethodPost, path: c.object("sandboxes", sandbox, "execs"), body: req})
}

// Start starts a program in the background.
func (c *Client) Start(ctx context.Context, sandbox string, req rest.ExecRequest) (rest.ExecStarted, error) {
	req.Background = true
	return get[rest.ExecStarted](ctx, c, call{method: http.MethodPost, path: c.object("sandboxes", sandbox, "execs"), body: req})
}

// Stream runs a program and copies its output to out as it arrives.
func (c *Client) Stream(ctx context.Context, sandbox string, req rest.ExecRequest, out Output) (rest.ExecEvent, error) {
	return c.follow(ctx, call{method: http.MethodPost, path: c.object("sandboxes", sandbox, "execs"), body: req}, out)
}

// Attach attaches to a program; its outputs continue at these positions.
func (c *Client) Attach(ctx context.Context, sandbox, id string, stdout, stderr int64, out Output) (rest.ExecEvent, error) {
	query := url.Values{"stdout": {strconv.FormatInt(stdout, 10)}, "stderr": {strconv.FormatInt(stderr, 10)}}
	return c.follow(ctx, call{method: http.MethodGet, path: c.object("sandboxes", sandbox, "execs", id, "output"), query: query}, out)
}

func (c *Client) follow(ctx context.Context, q call, out Output) (exit rest.ExecEvent, err error) {
	err = events(ctx, c, q, func(e rest.ExecEvent) (bool, error) {
		switch e.Type {
		case rest.ExecEventTypeStdout, rest.ExecEventTypeStderr:
			return true, out.write(e.Type == rest.ExecEventTypeStderr, e.Data, e.Encoding)
		case rest.ExecEventTypeExit:
			exit = e
			return false, nil
		case rest.ExecEventTypeError:
			return false, &Error{Details: *e.Error}
		}
		return true, nil
	})
	return exit, err
}

// Execs lists the programs of a sandbox.
func (c *Client) Execs(ctx context.Context, sandbox string) ([]rest.ExecInfo, error) {
	l, err := get[rest.ExecList](ctx, c, call{method: http.MethodGet, path: c.object("sandboxes", sandbox, "execs")})
	return l.Items, err
}

// WriteStdin writes to a program's input, and closes it if eof is set.
func (c *Client) WriteStdin(ctx context.Context, sandbox, id string, in io.Reader, eof bool) error {
	return c.do(ctx, call{
		method: http.MethodPost, path: c.object("sandboxes", sandbox, "execs", id, "stdin"),
		query: url.Values{"close": {strconv.FormatBool(eof)}}, stream: in,
	})
}

// Signal sends a signal to a program.
func (c *Client) Signal(ctx context.Context, sandbox, id string, s rest.Signal) error {
	return c.do(ctx, call{method: http.MethodPost, path: c.object("sandboxes", sandbox, "execs", id, "signal"), body: s})
}

// Resize sets the size of a program's terminal.
func (c *Client) Resize(ctx context.Context, sandbox, id string, rows, cols int) error {
	return c.do(ctx, call{method: http.MethodPost, path: c.object("sandboxes", sandbox, "execs", id, "resize"), body: rest.TerminalSize{Rows: rows, Cols: cols}})
}

// Terminal requests a token that opens a terminal.
func (c *Client) Terminal(ctx context.Context, sandbox string, req rest.TerminalRequest) (rest.Terminal, error) {
	return get[rest.Terminal](ctx, c, call{method: http.MethodPost, path: c.object("sandboxes", sandbox, "terminal"), body: req})
}

// RunCode runs code to its end.
func (c *Client) RunCode(ctx context.Context, sandbox string, req rest.CodeRequest) (rest.CodeResult, error) {
	return get[rest.CodeResult](ctx, c, call{method: http.MethodPost, path: c.object("sandboxes", sandbox, "code"), body: req})
}

// StreamCode runs code. It copies the output to out, and calls each, which may
// be nil, with every other event. It returns the last event.
func (c *Client) StreamCode(ctx context.Context, sandbox string, req rest.CodeRequest, out Output, each func(rest.CodeEvent) error) (exit rest.CodeEvent, err error) {
	q := call{method: http.MethodPost, path: c.object("sandboxes", sandbox, "code"), body: req}
	err = events(ctx, c, q, func(e rest.CodeEvent) (bool, error) {
		switch e.Type {
		case rest.CodeEventTypeStdout, rest.CodeEventTypeStderr:
			return true, out.write(e.Type == rest.CodeEventTypeStderr, e.Data, e.Encoding)
		case rest.CodeEventTypeExit:
			exit = e
			return false, nil
		case rest.CodeEventTypeError:
			return false, &Error{Details: *e.Error}
		}
		if each == nil {
			return true, nil
		}
		return true, each(e)
	})
	return exit, err
}

// InterruptCode interrupts an execution.
func (c *Client) InterruptCode(ctx context.Context, sandbox, id string) error {
	return c.do(ctx, call{method: http.MethodPost, path: c.object("sandboxes", sandbox, "code", "executions", id, "interrupt")})
}

func (c *Client) files(sandbox string, more ...string) string {
	return c.object("sandboxes", sandbox, append([]string{"files"}, more...)...)
}

// ReadFile writes the contents of a file to w.
func (c *Client) ReadFile(ctx context.Context, sandbox, path string, w io.Writer) error {
	res, err := c.send(ctx, call{method: http.MethodGet, path: c.files(sandbox), query: url.Values{"path": {path}}})
	if err != nil {
		return err
	}
	defer res.Body.Close()
	if _, err := io.Copy(w, res.Body); err != nil {
		return fmt.Errorf("read %s: %w", path, err)
	}
	return nil
}

// WriteFile writes a file. mode is octal; the daemon's default if it is empty.
func (c *Client) WriteFile(ctx context.Context, sandbox, path, mode string, r io.Reader) (rest.FileWritten, error) {
	query := url.Values{"path": {path}}
	if mode != "" {
		query.Set("mode", mode)
	}
	return get[rest.FileWritten](ctx, c, call{method: http.MethodPut, path: c.files(sandbox), query: query, stream: r})
}

// Stat describes a file. It follows a symbolic link.
func (c *Client) Stat(ctx context.Context, sandbox, path string) (rest.FileInfo, error) {
	return get[rest.FileInfo](ctx, c, call{method: http.MethodGet, path: c.files(sandbox, "stat"), query: url.Values{"path": {path}}})
}

// ListFiles lists the content of a folder, down to depth levels.
func (c *Client) ListFiles(ctx context.Context, sandbox, path string, depth int) ([]rest.FileInfo, error) {
	query := url.Values{"path": {path}, "depth": {strconv.Itoa(depth)}}
	return all(ctx, c, c.files(sandbox, "list"), query, func(l rest.FileList) ([]rest.FileInfo, string) { return l.Items, l.Next })
}

// MakeFolder makes a folder and its parents.
func (c *Client) MakeFolder(ctx context.Context, sandbox, path, mode string) error {
	return c.do(ctx, call{method: http.MethodPost, path: c.files(sandbox, "mkdir"), body: rest.MakeFolder{Path: path, Mode: mode}})
}

// MoveFile moves a file or folder.
func (c *Client) MoveFile(ctx context.Context, sandbox string, move rest.MoveFile) error {
	return c.do(ctx, call{method: http.MethodPost, path: c.files(sandbox, "move"), body: move})
}

// RemoveFile removes a file; with recursive, also a folder with its content.
func (c *Client) RemoveFile(ctx context.Context, sandbox, path string, recursive bool) error {
	query := url.Values{"path": {path}, "recursive": {strconv.FormatBool(recursive)}}
	return c.do(ctx, call{method: http.MethodDelete, path: c.files(sandbox), query: query})
}

// Watch calls each with every change of a file or folder until it has been
// deleted.
func (c *Client) Watch(ctx context.Context, sandbox, path string, recursive bool, each func(rest.WatchEvent) error) error {
	query := url.Values{"path": {path}, "recursive": {strconv.FormatBool(recursive)}}
	return events(ctx, c, call{method: http.MethodGet, path: c.files(sandbox, "watch"), query: query}, func(e rest.WatchEvent) (bool, error) {
		if e.Type == rest.WatchEventTypeError {
			return false, &Error{Details: *e.Error}
		}
		return e.Type != rest.WatchEventTypeGone, each(e)
	})
}
