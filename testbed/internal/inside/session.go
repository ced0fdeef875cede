package inside

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"sync"
	"syscall"

	"golang.org/x/sys/unix"

	"agentrun.dev/testbed/internal/protocol"
)

// session is one command run for one client: a helper process in its own PID and
// mount namespace (helper.go), and the goroutines that move its bytes.
type session struct {
	server *server
	cmd    *exec.Cmd
	cgroup string
	master *os.File // the PTY, or nil

	quit chan struct{} // closed when the process has ended
	done chan struct{} // closed when the session is completely gone
	wake chan struct{} // stdin is ready to be fed

	mu     sync.Mutex // protects all following fields
	queued []byte     // stdin not yet taken by feed, at most protocol.Window
	eof    bool
}

func newSession(srv *server, start protocol.Start) (*session, error) {
	s := &session{
		server: srv,
		cgroup: cgroupRoot + "/testbed-" + srv.name,
		quit:   make(chan struct{}),
		done:   make(chan struct{}),
		wake:   make(chan struct{}, 1),
	}
	spec, err := json.Marshal(sessionSpec{Start: start, Port: srv.name})
	if err != nil {
		return nil, err
	}
	// The specification may be larger than an argument may be (128 KiB).
	specFile, err := memfile(spec)
	if err != nil {
		return nil, err
	}
	defer specFile.Close()
	if err := os.MkdirAll(s.cgroup, 0o755); err != nil {
		return nil, err
	}
	cgroup, err := os.Open(s.cgroup)
	if err != nil {
		return nil, err
	}
	defer cgroup.Close()

	s.cmd = exec.Command("/proc/self/exe")
	s.cmd.Args = []string{roleSession}
	s.cmd.Env = []string{}
	s.cmd.ExtraFiles = []*os.File{specFile}
	s.cmd.SysProcAttr = &syscall.SysProcAttr{
		Cloneflags:  syscall.CLONE_NEWNS | syscall.CLONE_NEWPID,
		UseCgroupFD: true,
		CgroupFD:    int(cgroup.Fd()),
		Setsid:      true,
	}
	stdin, outputs, err := s.connect(start)
	if err != nil {
		return nil, err
	}
	if err := s.cmd.Start(); err != nil {
		return nil, fmt.Errorf("start the session: %w", err)
	}
	srv.idle.enter()
	go s.run(stdin, outputs)
	return s, nil
}

type output struct {
	r io.ReadCloser
	t protocol.Type
}

// connect connects the helper's three standard files and returns our ends.
func (s *session) connect(start protocol.Start) (io.WriteCloser, []output, error) {
	if start.TTY {
		master, slave, err := openPTY(start.Rows, start.Cols)
		if err != nil {
			return nil, nil, err
		}
		s.master = master
		s.cmd.Stdin, s.cmd.Stdout, s.cmd.Stderr = slave, slave, slave
		return master, []output{{master, protocol.Stdout}}, nil
	}
	stdin, err := s.cmd.StdinPipe()
	if err != nil {
		return nil, nil, err
	}
	stdout, err := s.cmd.StdoutPipe()
	if err != nil {
		return nil, nil, err
	}
	stderr, err := s.cmd.StderrPipe()
	if err != nil {
		return nil, nil, err
	}
	return stdin, []output{{stdout, protocol.Stdout}, {stderr, protocol.Stderr}}, nil
}

// run moves the session's bytes until the process has ended, and reports the end.
func (s *session) run(stdin io.WriteCloser, outputs []output) {
	defer close(s.done)
	defer s.server.idle.leave()
	if s.master != nil {
		_ = s.cmd.Stdin.(*os.File).Close() // the slave: ours would keep the PTY open
	}
	inputDone := make(chan struct{})
	go func() {
		defer close(inputDone)
		s.feed(stdin)
	}()
	var copies sync.WaitGroup
	for _, o := range outputs {
		copies.Go(func() { s.drain(o) })
	}
	// Killing the helper kills its PID namespace, so the pipes end with it and
	// no output is lost by waiting for them first.
	copies.Wait()
	code := exitCode(s.cmd.Wait())
	if s.master != nil {
		_ = s.master.Close() // the process at its other end is dead
	}
	close(s.quit)
	<-inputDone
	removeCgroup(s.cgroup)
	_ = s.server.port.send(protocol.Exit, protocol.Uint32(code))
}

// feed writes stdin as it arrives, and acknowledges the bytes that the process took.
func (s *session) feed(stdin io.WriteCloser) {
	for {
		select {
		case <-s.wake:
		case <-s.quit:
			return
		}
		b, eof := s.pop()
		if len(b) > 0 {
			// A process which closed its stdin drops the rest, as a pipe does.
			_, _ = stdin.Write(b)
			_ = s.server.port.send(protocol.StdinAck, protocol.Uint32(uint32(len(b))))
		}
		if eof && s.master == nil {
			_ = stdin.Close() // an error means that the process has closed it
			return
		} else if eof {
			_, _ = stdin.Write([]byte{4}) // ^D: a terminal has no other end
		}
	}
}

func (s *session) drain(o output) {
	buf := make([]byte, protocol.MaxPayload)
	for {
		n, err := o.r.Read(buf)
		if n > 0 {
			// A client that is gone reads nothing. The loop goes on draining, since
			// end() has killed the process.
			_ = s.server.port.send(o.t, buf[:n])
		}
		if err != nil {
			return
		}
	}
}

// handle takes a frame of the client. It must not block.
func (s *session) handle(t protocol.Type, payload []byte) {
	switch t {
	case protocol.Stdin:
		s.push(payload, false)
	case protocol.StdinEOF:
		s.push(nil, true)
	case protocol.Signal:
		if len(payload) == 1 {
			_ = s.cmd.Process.Signal(syscall.Signal(payload[0]))
		}
	case protocol.Resize:
		if rows, cols, err := protocol.ParseSize(payload); err == nil && s.master != nil {
			_ = setSize(s.master, rows, cols)
		}
	}
}

func (s *session) push(b []byte, eof bool) {
	s.mu.Lock()
	if len(s.queued)+len(b) <= protocol.Window { // a client that sends more is not one of ours
		s.queued = append(s.queued, b...)
	}
	s.eof = s.eof || eof
	s.mu.Unlock()
	select {
	case s.wake <- struct{}{}:
	default:
	}
}

func (s *session) pop() ([]byte, bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	b, eof := s.queued, s.eof
	s.queued, s.eof = nil, false
	return b, eof
}

// end kills the session and waits until it is completely gone.
func (s *session) end() {
	s.server.port.interrupt()
	_ = s.cmd.Process.Kill()
	<-s.done
	s.server.port.resume()
}

func exitCode(err error) uint32 {
	if err == nil {
		return 0
	}
	var exit *exec.ExitError
	if errors.As(err, &exit) {
		status := exit.Sys().(syscall.WaitStatus)
		if status.Signaled() {
			return 128 + uint32(status.Signal())
		}
		return uint32(status.ExitStatus())
	}
	return exitTestbed
}

func memfile(b []byte) (*os.File, error) {
	fd, err := unix.MemfdCreate("session", unix.MFD_CLOEXEC)
	if err != nil {
		return nil, fmt.Errorf("memfd_create: %w", err)
	}
	f := os.NewFile(uintptr(fd), "session")
	if _, err := f.WriteAt(b, 0); err != nil {
		_ = f.Close() // it is of no use any more
		return nil, err
	}
	return f, nil
}

// removeCgroup removes a cgroup, and the cgroups that the command made below it.
func removeCgroup(path string) {
	entries, _ := os.ReadDir(path)
	for _, e := range entries {
		if e.IsDir() {
			removeCgroup(path + "/" + e.Name())
		}
	}
	if err := os.Remove(path); err != nil {
		fmt.Fprintf(os.Stderr, "testbed machine: %v\n", err)
	}
}
