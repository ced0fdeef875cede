// Package netd is the process that is the network of one namespace's sandboxes: it
// serves their wires (package stack), decides and dials by their policies (package
// egress), and does what its parents ask over its control socket (package netctl).
//
// It outlives its parents, and keeps all its state when they end. It stores nothing
// on disk: if it dies, connections are cut, and the next netd is given every wire
// again. Without a parent it finds out now and then which of its sandboxes have
// ended, and drops their wires. Without a parent and without wires it ends after a
// while, so that no netd stays that no daemon knows of.
//
// # Panics
//
// A panic while a sandbox's connection is decided, dialled or spliced, while a DNS
// message is answered, or while a request of a parent is served ends only that
// connection or request. It is logged, and does not affect other sandboxes. A panic
// in a goroutine of the TCP/IP stack itself, or in one that a connection has started
// for its second direction, cannot be caught here. Then the process ends, and its
// daemon starts another.
package netd

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"sync"
	"time"

	"agentrun.dev/internal/network/addresses"
	"agentrun.dev/internal/network/dns"
	"agentrun.dev/internal/network/egress"
	"agentrun.dev/internal/network/netctl"
	"agentrun.dev/internal/network/stack"
)

// Config configures a Server.
type Config struct {
	// Host knows the host's own addresses.
	Host addresses.Owner
	// Version is reported to parents.
	Version string
	Log     *slog.Logger
	// Patience is how long the server goes on with neither a wire nor a parent. It is
	// also how long a server without a parent waits before it checks its wires for
	// the first time.
	Patience time.Duration
	// Descriptors is how many descriptors the process may have; 0 is 64 Ki.
	Descriptors int
}

// shares splits the descriptors of a process. Most are for wires, connections and
// flows, and some for DNS. The rest is for parents, and for wires that are being
// attached, which briefly take two each.
func shares(descriptors int) (wires, flights int) {
	if descriptors <= 0 {
		descriptors = 64 << 10
	}
	flights = min(dns.DefaultFlights, descriptors/8)
	return descriptors - min(2*dns.DefaultFlights, descriptors/4), flights
}

// Server serves the wires of a namespace.
type Server struct {
	cfg      Config
	started  time.Time
	poller   *stack.Poller
	resolver *dns.Resolver
	guard    *addresses.Guard
	gateway  *egress.Gateway
	parents  parents
	shutdown chan struct{} // closed when a parent asks for a shutdown
	stop     func()        // closes it

	mu       sync.Mutex // protects all following fields
	wires    map[netctl.ID]*wire
	defaults netctl.Limits
	dropped  map[stack.Drop]uint64 // sums of wires that are gone
	lonely   *time.Timer           // runs while there is neither a wire nor a parent
	orphan   *time.Timer           // runs while there are wires but no parent
	pause    time.Duration         // until orphan fires the next time
	tidying  *time.Timer           // runs after a wire has come or gone
	untidy   bool                  // a wire has come or gone since tidying last ended
	closed   bool
}

// New makes a server. It opens no file and no socket.
func New(cfg Config) (*Server, error) {
	descriptors, flights := shares(cfg.Descriptors)
	resolver, err := dns.New(dns.Config{Flights: flights})
	if err != nil {
		return nil, err
	}
	poller, err := stack.NewPoller(descriptors)
	if err != nil {
		resolver.Close()
		return nil, err
	}
	guard := addresses.NewGuard(cfg.Host, nil)
	s := &Server{
		cfg: cfg, started: time.Now(), poller: poller, resolver: resolver, guard: guard,
		gateway:  egress.NewGateway(egress.Config{Resolver: resolver, Guard: guard, Inside: netctl.Inside}),
		shutdown: make(chan struct{}),
		wires:    map[netctl.ID]*wire{}, dropped: map[stack.Drop]uint64{},
	}
	s.stop = sync.OnceFunc(func() { close(s.shutdown) })
	return s, nil
}

// Serve accepts parents until a parent sends Shutdown, ctx ends, or the server is not
// needed any more. Then it drops all wires.
func (s *Server) Serve(ctx context.Context, listener *net.UnixListener) error {
	owner, err := netctl.ListenerUID(listener)
	if err != nil {
		return fmt.Errorf("serve: %w", err)
	}
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	s.lonely = time.AfterFunc(s.cfg.Patience, s.stop)
	s.orphan = time.AfterFunc(s.cfg.Patience, s.dropEnded)
	s.orphan.Stop()
	s.tidying = time.AfterFunc(tidyAfter, s.tidy) // cleans up after the start
	var serving sync.WaitGroup
	serving.Go(func() {
		select {
		case <-s.shutdown:
		case <-ctx.Done():
		}
		_ = listener.Close() // makes Accept return
	})
	err = s.accept(ctx, listener, owner, &serving)
	cancel()
	s.parents.hangUp()
	serving.Wait()
	s.close()
	return err
}

// accept accepts parents until the listener is closed.
func (s *Server) accept(ctx context.Context, listener *net.UnixListener, owner uint32, serving *sync.WaitGroup) error {
	for {
		socket, err := listener.AcceptUnix()
		if errors.Is(err, net.ErrClosed) {
			return nil
		}
		if err != nil {
			// Either the peer is gone already or no descriptor is left. Both pass.
			s.cfg.Log.Warn("accept a parent", "error", err)
			select {
			case <-time.After(acceptPause):
				continue
			case <-ctx.Done():
				return nil
			}
		}
		p, ok := s.parents.add(netctl.NewConn(socket))
		if !ok {
			s.cfg.Log.Warn("a parent was turned away: there are too many")
			_ = socket.Close() // no message was sent to it
			continue
		}
		s.consider()
		serving.Go(func() {
			defer s.consider()
			defer s.parents.remove(p)
			s.serveParent(ctx, p, owner)
		})
	}
}

// acceptPause keeps repeated failures of accept from taking a whole processor.
const acceptPause = 100 * time.Millisecond

// consider starts or stops two timers: the one after which a server without wires and
// parents ends, and the one after which a server without parents checks its wires.
func (s *Server) consider() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.lonely.Stop()
	s.orphan.Stop()
	switch {
	case s.closed || s.parents.count() > 0:
	case len(s.wires) == 0:
		s.lonely.Reset(s.cfg.Patience)
	default:
		s.pause = s.cfg.Patience
		s.orphan.Reset(s.pause)
	}
}

// maxPause is the longest time between two checks of a server without a parent.
const maxPause = time.Hour

// dropEnded drops the wires of sandboxes that have ended while no parent could report
// it. It checks again after twice the time.
func (s *Server) dropEnded() {
	if s.parents.count() > 0 {
		return
	}
	for _, w := range s.all() {
		if w.stack.Gone() {
			s.cfg.Log.Info("a sandbox has ended while there was no parent", "wire", w.id)
			_ = s.detach(w.id) // a parent that has just come may have detached it already
		}
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if len(s.wires) > 0 && !s.closed && s.parents.count() == 0 {
		s.pause = min(2*s.pause, maxPause)
		s.orphan.Reset(s.pause)
	}
}

// close drops everything.
func (s *Server) close() {
	s.mu.Lock()
	s.closed = true
	s.lonely.Stop()
	s.orphan.Stop()
	s.tidying.Stop()
	wires := s.wires
	s.wires = nil
	s.mu.Unlock()
	for _, w := range wires {
		if w != nil {
			w.close()
		}
	}
	if err := s.poller.Close(); err != nil {
		s.cfg.Log.Warn("close the poller", "error", err)
	}
	s.resolver.Close()
}
