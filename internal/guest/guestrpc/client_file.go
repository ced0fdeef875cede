package guestrpc

import (
	"context"
	"encoding/binary"
	"errors"
	"io"
	"strconv"
)

// Stat describes a file.
func (c *Client) Stat(ctx context.Context, req StatRequest) (FileInfo, error) {
	var info FileInfo
	err := c.call(ctx, MethodStat, &req, &info)
	return info, err
}

// List returns one page of a folder; see ListReply.Next.
func (c *Client) List(ctx context.Context, req ListRequest) (ListReply, error) {
	var page ListReply
	err := c.call(ctx, MethodList, &req, &page)
	return page, err
}

// FileReader reads a file of the guest. Close it when done.
type FileReader struct {
	st   *stream
	info FileInfo
}

// OpenRead begins to read a file.
func (c *Client) OpenRead(ctx context.Context, req ReadRequest) (*FileReader, error) {
	r := &FileReader{}
	st, err := c.openStreaming(ctx, MethodRead, &req, &r.info)
	if err != nil {
		return nil, err
	}
	r.st = st
	return r, nil
}

// Info describes the file as it was when it was opened.
func (r *FileReader) Info() FileInfo { return r.info }

// Read returns io.EOF only after all requested bytes have come.
func (r *FileReader) Read(p []byte) (int, error) {
	n, err := r.st.read(Stdout, p)
	if errors.Is(err, io.EOF) {
		// The reply tells whether the file is complete or reading it has failed.
		if replyErr := r.st.result(&empty{}); replyErr != nil {
			err = replyErr
		}
	}
	return n, err
}

// Close ends the transfer.
func (r *FileReader) Close() error {
	r.st.abort(ErrClosed)
	return nil
}

// ReadFile reads a whole file of at most limit bytes.
func (c *Client) ReadFile(ctx context.Context, req ReadRequest, limit int64) ([]byte, error) {
	r, err := c.OpenRead(ctx, req)
	if err != nil {
		return nil, err
	}
	defer r.Close()
	data, err := io.ReadAll(io.LimitReader(r, limit+1))
	if err != nil {
		return nil, err
	}
	if int64(len(data)) > limit {
		return nil, newError(CodeResourceExhausted, "read ", req.Path, ": larger than the limit of ", strconv.FormatInt(limit, 10), " bytes")
	}
	return data, nil
}

// FileWriter writes a file of the guest. The write is complete once Close has
// returned nil. Abort gives it up.
type FileWriter struct {
	st     *stream
	result WriteReply
}

// OpenWrite begins to write a file. An error in the guest may be returned by a later
// Write or by Close.
func (c *Client) OpenWrite(ctx context.Context, req WriteRequest) (*FileWriter, error) {
	st, err := c.open(ctx, MethodWrite, &req)
	if err != nil {
		return nil, err
	}
	return &FileWriter{st: st}, nil
}

func (w *FileWriter) Write(p []byte) (int, error) { return w.st.write(Stdin, p) }

// Close completes the write and waits for the guest's confirmation.
func (w *FileWriter) Close() error {
	if err := w.st.closeWrite(Stdin); err != nil {
		return err
	}
	return w.st.result(&w.result)
}

// Result is the result of a completed Close.
func (w *FileWriter) Result() WriteReply { return w.result }

// Abort gives the write up. Bytes that were written to a file that is not Atomic
// stay.
func (w *FileWriter) Abort() { w.st.abort(ErrClosed) }

// WriteFile writes all of r to a file.
func (c *Client) WriteFile(ctx context.Context, req WriteRequest, r io.Reader) (WriteReply, error) {
	w, err := c.OpenWrite(ctx, req)
	if err != nil {
		return WriteReply{}, err
	}
	if _, err := io.CopyBuffer(onlyWriter{w}, onlyReader{r}, make([]byte, MaxPayload)); err != nil {
		w.Abort()
		return WriteReply{}, err
	}
	err = w.Close()
	return w.Result(), err
}

// Mkdir creates a folder.
func (c *Client) Mkdir(ctx context.Context, req MkdirRequest) error {
	return c.call(ctx, MethodMkdir, &req, &empty{})
}

// Move renames a file or folder.
func (c *Client) Move(ctx context.Context, req MoveRequest) error {
	return c.call(ctx, MethodMove, &req, &empty{})
}

// Remove removes a file or folder.
func (c *Client) Remove(ctx context.Context, req RemoveRequest) error {
	return c.call(ctx, MethodRemove, &req, &empty{})
}

// Symlink creates a symlink.
func (c *Client) Symlink(ctx context.Context, req SymlinkRequest) error {
	return c.call(ctx, MethodSymlink, &req, &empty{})
}

// Readlink returns the target of a symlink.
func (c *Client) Readlink(ctx context.Context, req ReadlinkRequest) (string, error) {
	var reply readlinkReply
	err := c.call(ctx, MethodReadlink, &req, &reply)
	return reply.target, err
}

// Chmod sets permission bits.
func (c *Client) Chmod(ctx context.Context, req ChmodRequest) error {
	return c.call(ctx, MethodChmod, &req, &empty{})
}

// Chown sets the owner.
func (c *Client) Chown(ctx context.Context, req ChownRequest) error {
	return c.call(ctx, MethodChown, &req, &empty{})
}

// Watcher receives the changes of a file or folder.
type Watcher struct {
	st *stream
}

// Watch begins to watch. Every change after its return is reported.
func (c *Client) Watch(ctx context.Context, req WatchRequest) (*Watcher, error) {
	st, err := c.openStreaming(ctx, MethodWatch, &req, &empty{})
	if err != nil {
		return nil, err
	}
	return &Watcher{st: st}, nil
}

// maxEvent is the size of a WatchEvent with the longest path.
const maxEvent = maxPath + 16

// Next waits for an event. Only one goroutine may call it at a time.
func (w *Watcher) Next() (WatchEvent, error) {
	var e WatchEvent
	var size [2]byte
	if err := w.readFull(size[:]); err != nil {
		return e, err
	}
	n := binary.LittleEndian.Uint16(size[:])
	if n > maxEvent {
		return e, w.malformed()
	}
	b := make([]byte, n)
	if err := w.readFull(b); err != nil {
		if errors.Is(err, io.EOF) {
			return e, w.malformed()
		}
		return e, err
	}
	if err := unmarshal(b, &e); err != nil {
		return WatchEvent{}, w.malformed()
	}
	return e, nil
}

func (w *Watcher) readFull(p []byte) error {
	_, err := io.ReadFull(readerFunc(func(p []byte) (int, error) { return w.st.read(Control, p) }), p)
	return err
}

func (w *Watcher) malformed() error {
	err := newError(CodeInternal, "guest sent a malformed event")
	w.st.abort(err)
	return err
}

type readerFunc func(p []byte) (int, error)

func (f readerFunc) Read(p []byte) (int, error) { return f(p) }

// Close ends the watch; a Next under way returns ErrClosed.
func (w *Watcher) Close() error {
	w.st.abort(ErrClosed)
	return nil
}
