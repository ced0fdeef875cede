package gvisor

import (
	"context"
	"errors"
	"fmt"
	"os"
	"strings"
	"sync"
	"time"

	"agentrun.dev/internal/engine"
	"agentrun.dev/internal/engine/gvisorctl"
	"agentrun.dev/internal/engine/identity"
	"agentrun.dev/internal/guest/guestrpc"
	"agentrun.dev/internal/host/jail"
	"agentrun.dev/internal/storage/layer"
	"agentrun.dev/internal/storage/snapshot"
)

// sandbox is a helper's process together with the files that the sandbox was made
// from, so that it can be captured.
type sandbox struct {
	*process
	engine.WireEnd
	engine       *Engine
	self         identity.Self
	vcpus        int
	memory, disk uint64
	root         *shared
	network      *engine.Network    // nil without an interface
	parent       *snapshot.Snapshot // the snapshot that it was forked from; nil after a boot
	ownParent    bool               // whether the sandbox closes parent
	restored     time.Duration
	// build is the digest of its helper's program, which may come from another
	// AgentRun. Only that program reads the checkpoints that it writes.
	build layer.Digest

	capture sync.Mutex // held during a capture; a snapshot contains the identity

	mu       sync.Mutex       // protects all following fields
	agent    *guestrpc.Client // nil if the sandbox was adopted and not resumed since
	lastFork engine.LiveForkStats
}

var _ engine.Sandbox = (*sandbox)(nil)

// shared is the root filesystem's image, which a sandbox shares with its live forks.
type shared struct {
	file *os.File

	mu    sync.Mutex // protects all following fields
	ref   layer.Ref  // zero until it is needed
	users int
}

func newShared(f *os.File) *shared { return &shared{file: f, users: 1} }

func (r *shared) use() *shared {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.users++
	return r
}

// release closes the file after the last use. A sandbox may call it twice.
func (r *shared) release() error {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.users--; r.users != 0 {
		return nil
	}
	return r.file.Close()
}

func (s *sandbox) shape() shape {
	sh := shape{hostname: s.self.Hostname, memory: s.memory, disk: s.disk, vcpus: s.vcpus}
	if s.network != nil {
		sh.dns = s.network.DNS
	}
	return sh
}

// run sends a request that lets the sandbox run. Its files are first, then the wire
// of its interface, then the listening socket, if there is one. The wire is made in
// the network namespace of gVisor's kernel.
func (s *sandbox) run(ctx context.Context, m *gvisorctl.Message, files []*os.File, listener *os.File) (*gvisorctl.Message, error) {
	switch {
	case s.network == nil:
	case s.loaded: // it has got its wire with the checkpoint
		s.KeepWire(s.host)
		s.host = nil
	default:
		w, err := newWired(s.network, s.sentry)
		if err != nil {
			return nil, err
		}
		s.KeepWire(w.host)
		defer func() { _ = w.guest.Close() }() // the helper has its own copy
		m.Network = w.network
		files = append(files, w.guest, w.host)
	}
	if m.Listen = listener != nil; m.Listen {
		files = append(files, listener)
	}
	return s.request(ctx, m, files...)
}

// wired describes a sandbox's interface, with the two ends of its wire.
type wired struct {
	network     *gvisorctl.Network
	host, guest *os.File
}

// newWired makes a wire in the network namespace of gVisor's kernel.
func newWired(n *engine.Network, sentry int) (w wired, err error) {
	if w.host, w.guest, err = jail.WireOf(sentry); err != nil {
		return wired{}, err
	}
	w.network = &gvisorctl.Network{
		MAC: n.MAC, MTU: n.MTU, Address: n.Address, Gateway: n.Gateway, Address6: n.Address6, Gateway6: n.Gateway6,
	}
	return w, nil
}

// dialAgent opens the session with the agent.
func (s *sandbox) dialAgent(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, identity.AnswerPatience)
	defer cancel()
	conn, err := s.Dial(ctx, guestrpc.AgentPort)
	if err != nil {
		return err
	}
	agent, err := guestrpc.NewClient(ctx, conn)
	if err != nil {
		return err
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.agent != nil { // another call was faster
		return agent.Close()
	}
	s.agent = agent
	return nil
}

func (s *sandbox) closeAgent() error {
	if a := s.Agent(); a != nil {
		return a.Close()
	}
	return nil
}

// abandon kills a sandbox that did not come up, and adds the tail of its console to
// the error.
func (s *sandbox) abandon(ctx context.Context, err error) error {
	if s.process == nil {
		return err
	}
	console, _ := s.Console(context.WithoutCancel(ctx)) // the helper may be gone
	s.kill()
	s.process.mu.Lock()
	if len(console) == 0 && s.last != nil {
		console = s.last.Console
	}
	s.process.mu.Unlock()
	err = errors.Join(err, s.closeAgent())
	if len(console) > 0 {
		lines := strings.Split(strings.TrimRight(string(console), "\r\n"), "\n")
		err = fmt.Errorf("%w\nthe sandbox's console ended with:\n%s", err, strings.Join(lines[max(0, len(lines)-20):], "\n"))
	}
	return err
}

// Agent is a session with the sandbox's agent.
func (s *sandbox) Agent() *guestrpc.Client {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.agent
}

// Settle returns at once: the host's kernel postpones work, but the sandbox's does
// not.
func (s *sandbox) Settle(ctx context.Context) error { return ctx.Err() }

// Park is Pause: only its helper can let gVisor's kernel go on.
func (s *sandbox) Park(ctx context.Context) error { return s.Pause(ctx) }

// Claim lets a paused fork go on as a different sandbox.
func (s *sandbox) Claim(ctx context.Context, hostname string) error {
	s.capture.Lock() // a snapshot contains the identity, so no capture may run meanwhile
	defer s.capture.Unlock()
	return s.self.Claim(ctx, s.Agent(), hostname, func() (func(context.Context) error, error) {
		resumed, err := s.post(&gvisorctl.Message{Op: gvisorctl.OpResume})
		if err != nil {
			return nil, err
		}
		s.paused.Store(false)
		return func(ctx context.Context) error {
			_, err := s.await(ctx, resumed)
			return err
		}, nil
	})
}

// Wait blocks until the sandbox has ended, and returns the reason.
func (s *sandbox) Wait() error {
	<-s.done
	return s.ended()
}

// Close ends the sandbox at once.
func (s *sandbox) Close() error {
	s.kill()
	return errors.Join(s.closeAgent(), s.release())
}

// release closes the files that a sandbox keeps for its captures. It does so once.
func (s *sandbox) release() error {
	s.capture.Lock()
	defer s.capture.Unlock()
	err := s.CloseWire()
	if s.root == nil {
		return err
	}
	err = errors.Join(err, s.root.release())
	s.root = nil
	if s.ownParent {
		err = errors.Join(err, s.parent.Close())
		s.ownParent = false
	}
	return err
}

// shutdownMargin is the time that a sandbox gets beyond the grace of its processes.
const shutdownMargin = 30 * time.Second

// Shutdown ends the sandbox from inside: its processes get grace to end.
func (s *sandbox) Shutdown(ctx context.Context, grace time.Duration) error {
	ctx, cancel := context.WithTimeout(ctx, grace+shutdownMargin)
	defer cancel()
	err := s.Agent().Shutdown(ctx, guestrpc.ShutdownRequest{Mode: guestrpc.PowerOff, Grace: grace})
	if err == nil {
		select {
		case <-s.done:
		case <-ctx.Done():
			err = fmt.Errorf("shut down: %w", ctx.Err())
		}
	}
	if err != nil {
		s.kill()
	}
	return errors.Join(err, s.closeAgent(), s.release())
}
