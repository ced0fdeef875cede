// Package helper is the process beside a sandbox on gVisor. It lets runsc make the
// sandbox, holds the host's end of the channel to its agent, and serves the requests
// of its parents over control sockets.
package helper

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"runtime"
	"slices"
	"sync"
	"syscall"

	"agentrun.dev/internal/engine/gvisorctl"
	"agentrun.dev/internal/vmm/vmmctl"
	"golang.org/x/sys/unix"
	"gvisor.dev/gvisor/pkg/log"
)

// server is a sandbox with its parents.
type server struct {
	box     *sandboxed
	console *console
	creates chan func() // for the main thread to run
	ended   chan struct{}
	parents vmmctl.Parents

	mu      sync.Mutex // protects all following fields
	survive bool       // the sandbox survives the end of a parent
	stopped bool       // a parent has asked for it
	exit    *gvisorctl.Exit
}

// Serve serves a control socket until the sandbox has ended. It takes over the
// socket.
func Serve(control int) error {
	// gVisor's kernel is killed with the thread that has started it. That is this
	// thread, the main thread, since it is locked before any other runs.
	runtime.LockOSThread()
	log.SetTarget(log.GoogleEmitter{Writer: &log.Writer{Next: io.Discard}})
	if err := limitOpenFiles(); err != nil {
		return fmt.Errorf("limit open files: %w", err)
	}
	out, err := captureStdio()
	if err != nil {
		return err
	}
	if err := unix.SetNonblock(control, true); err != nil {
		return fmt.Errorf("control socket: %w", err)
	}
	conn, err := gvisorctl.NewConn(os.NewFile(uintptr(control), "control"))
	if err != nil {
		return err
	}
	s := &server{console: out, creates: make(chan func()), ended: make(chan struct{})}
	s.parents.Add(conn.Conn) // it is the first parent
	go s.serve(conn)
	for {
		select {
		case f := <-s.creates:
			f()
		case <-s.ended:
			return s.finish()
		}
	}
}

// maxFiles is the maximum number of descriptors of this process, gVisor's kernel and
// its gofer, each. They need one for each stream to the sandbox, of which guestmux
// has 1024 at most, and those for checkpoints and runsc's sockets. Without this limit
// they would inherit the host's million.
const maxFiles = 4096

func limitOpenFiles() error {
	var now syscall.Rlimit
	if err := syscall.Getrlimit(syscall.RLIMIT_NOFILE, &now); err != nil {
		return err
	}
	most := min(now.Max, maxFiles)
	// syscall is used here, not package unix, because it also keeps Go from restoring
	// the original limit in started programs.
	return syscall.Setrlimit(syscall.RLIMIT_NOFILE, &syscall.Rlimit{Cur: most, Max: most})
}

// captureStdio makes the output of the sandbox's agent the console. runsc gives a
// sandbox the standard descriptors of this process.
func captureStdio() (*console, error) {
	r, w, err := os.Pipe()
	if err != nil {
		return nil, fmt.Errorf("make the console: %w", err)
	}
	os.Stdout, os.Stderr = w, w
	out := &console{}
	go func() { _, _ = io.Copy(out, r) }()
	return out, nil
}

// end records that the sandbox has ended. The first reason counts.
func (s *server) end(exit *gvisorctl.Exit) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.exit != nil {
		return
	}
	if s.stopped {
		exit = &gvisorctl.Exit{Reason: gvisorctl.ReasonStopped}
	}
	s.exit = exit
	close(s.ended)
}

// finish removes the sandbox and tells the parents how it ended.
func (s *server) finish() error {
	var err error
	if s.box != nil {
		err = s.box.destroy()
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.exit.Console = s.console.bytes()
	s.parents.Each(func(c *vmmctl.Conn) {
		_ = gvisorctl.Conn{Conn: c}.Send(&gvisorctl.Message{Exit: s.exit}) // the parent may have gone
	})
	return err
}

// serve serves the requests of a parent until it hangs up and all its requests are
// done.
func (s *server) serve(c gvisorctl.Conn) {
	ctx, cancel := context.WithCancel(context.Background())
	var requests sync.WaitGroup
	for {
		m, files, err := c.Receive()
		if err != nil {
			break
		}
		requests.Go(func() {
			reply := s.do(ctx, m, files)
			reply.ID, reply.Reply = m.ID, true
			for _, f := range files {
				_ = f.Close() // files that are kept were copied
			}
			var wire []*os.File
			if reply.Wire != nil {
				wire = append(wire, reply.Wire)
			}
			_ = c.Send(reply, wire...) // a parent that has gone is noticed by Receive
			_ = reply.Wire.Close()     // the parent has its own copy; Close refuses nil
		})
	}
	cancel()
	s.mu.Lock()
	survive := s.survive
	s.mu.Unlock()
	if !survive {
		s.end(&gvisorctl.Exit{Reason: gvisorctl.ReasonStopped})
	}
	requests.Wait()
	s.parents.Remove(c.Conn)
	_ = c.Close()
}

// accept accepts later parents.
func (s *server) accept(listener *os.File) {
	for {
		c, err := vmmctl.Accept(listener)
		if err != nil {
			return
		}
		wait := s.parents.Add(c)
		go func() {
			wait()
			s.serve(gvisorctl.Conn{Conn: c})
		}()
	}
}

// do carries out one request.
func (s *server) do(ctx context.Context, m *gvisorctl.Message, files []*os.File) *gvisorctl.Message {
	reply := &gvisorctl.Message{}
	if err := s.try(ctx, m, files, reply); err != nil {
		reply.Error = err.Error()
	}
	return reply
}

var errFiles = errors.New("the request came with the wrong files")

func (s *server) try(ctx context.Context, m *gvisorctl.Message, files []*os.File, reply *gvisorctl.Message) error {
	if m.Op == gvisorctl.OpCreate {
		if len(files) != 2 || m.Create == nil {
			return errFiles
		}
		return s.create(m.Create, files, reply)
	}
	s.mu.Lock()
	box := s.box
	s.mu.Unlock()
	if box == nil {
		return fmt.Errorf("%s: there is no sandbox yet", m.Op)
	}
	switch m.Op {
	case gvisorctl.OpStart:
		f, err := tellApart(m, files, 0)
		if err != nil || f.listener != nil {
			return errFiles
		}
		return box.start(ctx, m.Network, f)
	case gvisorctl.OpLoad:
		f, err := tellApart(m, files, len(gvisorctl.CheckpointFiles))
		if err != nil || f.listener != nil {
			return errFiles
		}
		return box.load(f, m.Network)
	case gvisorctl.OpRestore:
		return s.restore(ctx, m, files)
	case gvisorctl.OpDial:
		if len(files) != 1 {
			return errFiles
		}
		return box.dial(ctx, m.Port, files[0])
	case gvisorctl.OpPause:
		return box.pause()
	case gvisorctl.OpResume:
		return box.resume()
	case gvisorctl.OpCheckpoint:
		if len(files) != len(gvisorctl.CheckpointFiles) {
			return errFiles
		}
		took, err := box.checkpoint(files)
		reply.Took = took
		return err
	case gvisorctl.OpStream:
		first := len(gvisorctl.CheckpointFiles)
		if len(files) != first+2 {
			return errFiles
		}
		took, err := box.stream(slices.Clone(files[:first]), [2]*os.File(files[first:]))
		reply.Took = took
		return err
	case gvisorctl.OpDescribe:
		reply.Create, reply.SentryPID, reply.Protocol = box.made, box.cont.SandboxPid(), protocol
		return nil
	case gvisorctl.OpConsole:
		reply.Data = s.console.bytes()
		return nil
	case gvisorctl.OpStop:
		s.mu.Lock()
		s.stopped = true
		s.mu.Unlock()
		s.end(nil)
		return nil
	}
	return newest(box, m, reply)
}

// errUnknown is a helper's answer to a request of a later version of the protocol.
func errUnknown(m *gvisorctl.Message) error { return fmt.Errorf("unknown request %q", m.Op) }

// create makes the sandbox, on the main thread.
func (s *server) create(c *gvisorctl.Create, files []*os.File, reply *gvisorctl.Message) error {
	done := make(chan error, 1)
	s.creates <- func() {
		if s.box != nil {
			done <- errors.New("there is a sandbox already")
			return
		}
		filter := compile()
		box, err := create(c, files[0], files[1])
		if err == nil {
			if err = lockDown(filter); err != nil {
				err = errors.Join(err, box.destroy())
			}
		}
		if err == nil {
			s.mu.Lock()
			s.box = box
			s.mu.Unlock()
		}
		done <- err
	}
	if err := <-done; err != nil {
		return err
	}
	reply.SentryPID, reply.Protocol = s.box.cont.SandboxPid(), protocol
	go func() { s.end(s.box.wait()) }()
	return nil
}

func (s *server) restore(ctx context.Context, m *gvisorctl.Message, files []*os.File) error {
	first := len(gvisorctl.CheckpointFiles)
	if s.box.loaded() {
		first = 0
	}
	f, err := tellApart(m, files, first)
	if err != nil {
		return err
	}
	if f.listener != nil {
		listener, err := reopen(f.listener)
		if err != nil {
			return err
		}
		s.mu.Lock()
		s.survive = true
		s.mu.Unlock()
		go s.accept(listener)
	}
	return s.box.restore(ctx, f, m.Network)
}

// runFiles are the files of a request that lets the sandbox run.
type runFiles struct {
	first      []*os.File
	wire, host *os.File // the sandbox's end of its wire, and the host's; nil without an interface
	listener   *os.File // the listening socket; nil without one
}

// tellApart sorts the files of such a request. first is the number of files before the
// wire and the listening socket.
func tellApart(m *gvisorctl.Message, files []*os.File, first int) (f runFiles, err error) {
	want := first
	if m.Network != nil {
		want += 2
	}
	if m.Listen {
		want++
	}
	if len(files) != want {
		return f, errFiles
	}
	f.first = files[:first]
	if m.Network != nil {
		f.wire, f.host = files[first], files[first+1]
	}
	if m.Listen {
		f.listener = files[want-1]
	}
	return f, nil
}

// reopen returns a copy of a descriptor that outlives the request.
func reopen(f *os.File) (*os.File, error) {
	fd, err := unix.FcntlInt(f.Fd(), unix.F_DUPFD_CLOEXEC, 0)
	if err != nil {
		return nil, fmt.Errorf("copy a descriptor: %w", err)
	}
	if err := unix.SetNonblock(fd, true); err != nil {
		return nil, fmt.Errorf("copy a descriptor: %w", err)
	}
	return os.NewFile(uintptr(fd), f.Name()), nil
}
