package helper

import (
	"context"
	"crypto/rand"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"path/filepath"
	"strconv"
	"sync"
	"time"

	"agentrun.dev/internal/engine/gvisorctl"
	"agentrun.dev/internal/guest/guestmux"
	"golang.org/x/sys/unix"
	"gvisor.dev/gvisor/pkg/sentry/control"
	"gvisor.dev/gvisor/pkg/state/statefile"
	"gvisor.dev/gvisor/pkg/urpc"
	"gvisor.dev/gvisor/runsc/boot"
	"gvisor.dev/gvisor/runsc/config"
	"gvisor.dev/gvisor/runsc/container"
)

// sandboxed is the sandbox of this process.
type sandboxed struct {
	conf *config.Config
	cont *container.Container
	host *guestmux.Host
	made *gvisorctl.Create

	mu      sync.Mutex // one change of the sandbox's state at a time; protects all following fields
	running bool       // started or restored
	paused  bool
	ahead   *loading     // set only between load and restore
	control *urpc.Client // to gVisor's kernel; nil until it is needed
	wire    *os.File     // the host's end of the wire; nil without one
}

var (
	errRuns       = errors.New("the sandbox runs already")
	errNotRunning = errors.New("the sandbox does not run yet")
)

// channelFD is the agent's end of the channel, in the sandbox.
const channelFD = 3

// create makes a sandbox that waits to be started or restored. The caller is locked
// to its thread. The thread must live as long as the sandbox, because gVisor's kernel
// is killed with it.
func create(c *gvisorctl.Create, root, agent *os.File) (*sandboxed, error) {
	conf, err := newConfig(c)
	if err != nil {
		return nil, err
	}
	spec := newSpec(c, "/proc/self/fd/"+strconv.Itoa(int(root.Fd())))
	bundle, err := writeBundle(c, spec)
	if err != nil {
		return nil, err
	}
	fds, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_SEQPACKET|unix.SOCK_CLOEXEC|unix.SOCK_NONBLOCK, 0)
	if err != nil {
		return nil, fmt.Errorf("make the agent's channel: %w", err)
	}
	ours, theirs := os.NewFile(uintptr(fds[0]), "channel"), os.NewFile(uintptr(fds[1]), "channel")
	defer func() { _ = theirs.Close() }() // the sandbox has its own
	cont, err := container.New(conf, container.Args{
		ID: c.ID, Spec: spec, BundleDir: bundle, Attached: true,
		PassFiles: map[int]*os.File{channelFD: theirs}, ExecFile: agent,
	})
	if err != nil {
		return nil, errors.Join(fmt.Errorf("make the sandbox: %w", err), ours.Close())
	}
	return &sandboxed{conf: conf, cont: cont, host: guestmux.NewHost(ours), made: c}, nil
}

// start boots the agent. n is nil without a network interface.
func (s *sandboxed) start(ctx context.Context, n *gvisorctl.Network, f runFiles) error {
	return s.begin(ctx, func() error {
		if s.ahead != nil {
			return errLoaded
		}
		if n == nil {
			return s.cont.Start(s.conf)
		}
		if err := s.keepWire(f.host); err != nil {
			return err
		}
		return s.startWired(linksOf(n, f.wire))
	})
}

// restore continues from a checkpoint, or from the one that was loaded ahead. Its
// pages are read while the sandbox runs.
func (s *sandboxed) restore(ctx context.Context, f runFiles, n *gvisorctl.Network) error {
	return s.begin(ctx, func() error {
		if l := s.ahead; l != nil {
			s.ahead = nil
			if n != nil {
				_ = l.abandon() // its failure is intended
				return errLoadedWired
			}
			return l.release()
		}
		dir, err := s.checkpointDir(f.first)
		if err != nil {
			return err
		}
		var links *boot.CreateLinksAndRoutesArgs // nil: the links of the configuration, a loopback
		if n != nil {
			if links, err = s.relink(n, f.wire, f.host); err != nil {
				return err
			}
		}
		return s.cont.Restore(s.conf, dir, false, true, links)
	})
}

// relink is linksOf for a restored sandbox. It also keeps the host's end of the wire.
// The caller holds s.mu.
func (s *sandboxed) relink(n *gvisorctl.Network, wire, host *os.File) (*boot.CreateLinksAndRoutesArgs, error) {
	if err := s.keepWire(host); err != nil {
		return nil, err
	}
	links := linksOf(n, wire)
	links.IsRestore = true
	return links, nil
}

// keepWire keeps the host's end for later parents. The caller holds s.mu.
func (s *sandboxed) keepWire(host *os.File) (err error) {
	s.wire, err = reopen(host)
	return err
}

// hostEnd is a copy of the host's end of the wire.
func (s *sandboxed) hostEnd() (*os.File, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.wire == nil {
		return nil, errors.New("the sandbox has no network interface")
	}
	return reopen(s.wire)
}

// checkpointDir makes the folder in which runsc finds the files of a checkpoint under
// their names.
func (s *sandboxed) checkpointDir(files []*os.File) (string, error) {
	dir := filepath.Join(s.made.RunDir, "restore")
	if err := os.Mkdir(dir, 0o700); err != nil {
		return "", fmt.Errorf("restore: %w", err)
	}
	for i, name := range gvisorctl.CheckpointFiles {
		if err := os.Symlink("/proc/self/fd/"+strconv.Itoa(int(files[i].Fd())), filepath.Join(dir, name)); err != nil {
			return "", fmt.Errorf("restore: %w", err)
		}
	}
	return dir, nil
}

// begin lets the sandbox run, and waits until its agent has answered.
func (s *sandboxed) begin(ctx context.Context, run func() error) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.running {
		return errRuns
	}
	epoch := make([]byte, 8)
	_, _ = rand.Read(epoch) // it never fails: crypto/rand ends the process instead
	// The message arrives before the agent first reads.
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	answered := make(chan error, 1)
	go func() { answered <- s.host.Reset(ctx, binary.LittleEndian.Uint64(epoch)) }()
	if err := run(); err != nil {
		return err
	}
	s.running = true
	if err := <-answered; err != nil {
		return fmt.Errorf("wait for the agent: %w", err)
	}
	return nil
}

// dial connects a stream to a port of the sandbox, until either end closes.
func (s *sandboxed) dial(ctx context.Context, port uint32, f *os.File) error {
	conn, err := net.FileConn(f)
	if err != nil {
		return fmt.Errorf("dial: %w", err)
	}
	st, err := s.host.Open(ctx, port)
	if err != nil {
		return errors.Join(fmt.Errorf("dial port %d: %w", port, err), conn.Close())
	}
	go bridge(conn.(*net.UnixConn), st)
	return nil
}

func bridge(conn *net.UnixConn, st *guestmux.Stream) {
	var both sync.WaitGroup
	both.Go(func() {
		if _, err := io.Copy(st, conn); err != nil {
			_ = st.Close() // ends the other direction
			return
		}
		_ = st.CloseWrite() // fails if the sandbox is gone
	})
	if _, err := io.Copy(conn, st); err != nil {
		_ = st.Close()
	}
	_ = conn.CloseWrite()
	both.Wait()
	_ = st.Close()
	_ = conn.Close()
}

func (s *sandboxed) pause() error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if !s.running {
		return errNotRunning
	}
	if s.paused {
		return nil
	}
	// The container is not asked, since it would write a file.
	if err := s.tell(boot.ContMgrPause); err != nil {
		return fmt.Errorf("pause: %w", err)
	}
	s.paused = true
	return nil
}

func (s *sandboxed) resume() error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if !s.paused {
		return nil
	}
	if err := s.tell(boot.ContMgrResume); err != nil {
		return fmt.Errorf("resume: %w", err)
	}
	s.paused = false
	return nil
}

// checkpoint writes the sandbox to files and returns how long that took. The sandbox
// stands still meanwhile, and stays paused if it was. runsc would make the files
// itself; these are the parent's, which seals them.
func (s *sandboxed) checkpoint(files []*os.File) (time.Duration, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if !s.running {
		return 0, errNotRunning
	}
	begin := time.Now()
	conn, err := s.connect()
	if err != nil {
		return 0, fmt.Errorf("checkpoint: %w", err)
	}
	defer func() { _ = conn.Close() }() // all was said
	if err := conn.Call(boot.ContMgrCheckpoint, &control.SaveOpts{
		Metadata: statefile.CompressionLevelNone.ToMetadata(), HavePagesFile: true, Resume: true,
		FilePayload: urpc.FilePayload{Files: files},
	}, nil); err != nil {
		return 0, fmt.Errorf("checkpoint: %w", err)
	}
	return time.Since(begin), nil
}

// wait returns how the sandbox ended.
func (s *sandboxed) wait() *gvisorctl.Exit {
	status, err := s.cont.Wait()
	switch {
	case err != nil:
		return &gvisorctl.Exit{Reason: gvisorctl.ReasonKilled, Detail: "gVisor's kernel: " + err.Error()}
	case status.Exited() && status.ExitStatus() == 0:
		return &gvisorctl.Exit{Reason: gvisorctl.ReasonPowerOff}
	case status.Exited():
		return &gvisorctl.Exit{Reason: gvisorctl.ReasonKilled, Detail: fmt.Sprintf("the agent exited with code %d", status.ExitStatus())}
	}
	return &gvisorctl.Exit{Reason: gvisorctl.ReasonKilled, Detail: fmt.Sprintf("killed by signal %d (%v)", status.Signal(), status.Signal())}
}

// destroy ends the sandbox and removes runsc's files.
func (s *sandboxed) destroy() error {
	s.mu.Lock()
	l := s.ahead
	s.ahead = nil
	s.mu.Unlock()
	if l != nil {
		// runsc does not support both at once, and the kernel may not listen any
		// more.
		_ = unix.Kill(s.cont.SandboxPid(), unix.SIGKILL)
		_ = l.abandon() // its failure is intended
	}
	return errors.Join(s.host.Close(), s.cont.Destroy())
}
