// Package trust holds the defences that engines share against the processes of their
// sandboxes, which a guest may have taken over. It bounds the wait for an answer,
// stops a process of which only the socket is known, and takes over a file that such
// a process has written.
package trust

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"time"

	"golang.org/x/sys/unix"
)

// A process may take answerTime for an answer, plus the time to copy memory and disks
// at slowestCopy. Emulated machines on a busy host copy some MiB in a second.
const (
	answerTime  = 5 * time.Minute
	slowestCopy = 4 << 20 // bytes in a second
	// Longest exceeds the time of any copy.
	Longest = 24 * time.Hour
)

// Patience is how long a process may take for an answer if it may have to copy this
// many bytes. It applies to every request, since a request may have to wait until a
// running copy ends.
func Patience(bytes uint64) time.Duration {
	seconds := min(bytes/slowestCopy, uint64(Longest/time.Second))
	return answerTime + time.Duration(seconds)*time.Second
}

// Conn is a connection to a process, in messages of its protocol.
type Conn[M any] interface {
	Send(m M, files ...*os.File) error
	Receive() (M, []*os.File, error)
	Close() error
}

// Nobody reports whether a socket could not be dialled because no process listens there.
func Nobody(err error) bool {
	return errors.Is(err, unix.ECONNREFUSED) || errors.Is(err, fs.ErrNotExist)
}

// Stop sends a process the message to stop, waits until it has gone, and closes the
// connection.
func Stop[M any](ctx context.Context, conn Conn[M], stop M) error {
	ctx, cancel := context.WithTimeout(ctx, answerTime)
	defer cancel()
	defer context.AfterFunc(ctx, func() { _ = conn.Close() })()
	if err := conn.Send(stop); err != nil {
		return errors.Join(err, conn.Close())
	}
	for {
		_, files, err := conn.Receive()
		for _, f := range files {
			_ = f.Close() // a process must not send files here
		}
		if err != nil {
			return errors.Join(ctx.Err(), conn.Close()) // the process has gone
		}
	}
}

// Seal closes a file in memory to writers for good, since the process that has
// written it may still have it open. It fails while any process has the file mapped
// for writing.
func Seal(f *os.File) error {
	const seals = unix.F_SEAL_WRITE | unix.F_SEAL_SHRINK | unix.F_SEAL_GROW | unix.F_SEAL_SEAL
	if _, err := unix.FcntlInt(f.Fd(), unix.F_ADD_SEALS, seals); err != nil {
		return fmt.Errorf("seal %s: %w", f.Name(), err)
	}
	return nil
}
