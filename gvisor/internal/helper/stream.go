package helper

import (
	"errors"
	"fmt"
	"os"
	"slices"
	"sync"
	"time"

	"agentrun.dev/internal/engine/gvisorctl"
	"golang.org/x/sys/unix"
	"gvisor.dev/gvisor/pkg/hostarch"
	"gvisor.dev/gvisor/pkg/sentry/control"
	"gvisor.dev/gvisor/pkg/sentry/state/stateio"
	"gvisor.dev/gvisor/pkg/sentry/state/stateipc"
	"gvisor.dev/gvisor/pkg/state/statefile"
	"gvisor.dev/gvisor/pkg/unet"
	"gvisor.dev/gvisor/pkg/urpc"
	"gvisor.dev/gvisor/runsc/boot"
)

// streamPiece is the size of the pieces in which the pages go to a pipe: that of
// gVisor's writes to files. streamAhead is how many pieces are under way, enough that
// the next is ready when one is written.
const (
	streamPiece = 256 << 10
	streamAhead = 16
)

// stream writes the sandbox to three pipes, in the order of CheckpointFiles, and
// returns how long that took. The sandbox stands still meanwhile, and stays paused if
// it was.
//
// gVisor's kernel writes the pages of a checkpoint at offsets, which a pipe does not
// have. It can also let another process write them: one that serves the files of a
// checkpoint over a socket and maps the kernel's memory (runsc's checkpoint gofer).
// Here the helper is that process. The two sockets are the ends of a stream; the
// filter of this process does not let it make them.
func (s *sandboxed) stream(pipes []*os.File, sockets [2]*os.File) (took time.Duration, err error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if !s.running {
		return 0, errNotRunning
	}
	defer func() {
		if err != nil {
			err = fmt.Errorf("checkpoint: %w", err)
		}
	}()
	files, err := stateipc.NewAsyncFileServer(&checkpointFiles{pipes: pipes})
	if err != nil {
		return 0, err
	}
	server := urpc.NewServer()
	server.Register(files)
	ours, err := takeSocket(sockets[0])
	if err != nil {
		return 0, err
	}
	server.StartHandling(ours)
	defer server.Stop(0) // closes the socket; the kernel has closed its end, or is not waited for
	conn, err := s.connect()
	if err != nil {
		return 0, err
	}
	defer func() { _ = conn.Close() }() // the answer is there
	begin := time.Now()
	err = conn.Call(boot.ContMgrCheckpoint, &control.SaveOpts{
		Metadata: statefile.CompressionLevelNone.ToMetadata(), Resume: true,
		UseCheckpointGofer: true, HavePagesFile: true,
		FilePayload: urpc.FilePayload{Files: sockets[1:]},
	}, nil)
	return time.Since(begin), err
}

// takeSocket makes a socket of gVisor's package from a copy of a descriptor.
func takeSocket(f *os.File) (*unet.Socket, error) {
	fd, err := unix.FcntlInt(f.Fd(), unix.F_DUPFD_CLOEXEC, 0)
	if err != nil {
		return nil, err
	}
	s, err := unet.NewSocket(fd)
	if err != nil {
		return nil, errors.Join(err, unix.Close(fd))
	}
	return s, nil
}

// checkpointFiles are the files that gVisor's kernel may write, each one once.
type checkpointFiles struct {
	mu    sync.Mutex // protects pipes
	pipes []*os.File // in the order of CheckpointFiles; nil once opened
}

var errNoSuchFile = errors.New("no file of a checkpoint, or one that was written already")

// OpenWrite opens one of the files.
func (c *checkpointFiles) OpenWrite(name string) (stateio.AsyncWriter, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	i := slices.Index(gvisorctl.CheckpointFiles, name)
	if i < 0 || c.pipes[i] == nil {
		return nil, errNoSuchFile
	}
	f := c.pipes[i]
	c.pipes[i] = nil
	return stateio.NewIOWriter(f, streamPiece, streamPiece/hostarch.PageSize, streamAhead), nil
}

// OpenRead refuses, because no file may be read.
func (c *checkpointFiles) OpenRead(string) (stateio.AsyncReader, error) { return nil, errNoSuchFile }

// Destroy does nothing, because the request closes the pipes.
func (c *checkpointFiles) Destroy() {}
