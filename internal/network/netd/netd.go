// Package netd is the process that is the network of one namespace's sandboxes: it
// serves their wires (package stack), decides and dials by their policies (package
// egress), and does what its parents ask over its control socket (package netctl).
//
// It outlives its parents, and nothing that it has is lost with them. It keeps nothing
// itself: if it dies, connections are cut, and the next one is given every wire anew.
// Without a parent it finds out now and then which of its sandboxes have ended, and lets
// go of their wires. Without wires, too, it ends after a while, so that a netd of which
// no daemon knows does not stay.
//
// # Panics
//
// A panic while a sandbox's connection is decided, dialled or spliced, while a DNS
// message is answered, or while a request of a parent is served ends that connection or
// request; it is logged, and the other sandboxes notice nothing. A panic in a goroutine
// of the TCP/IP stack itself, or in one that a connection has started for its second
// direction, cannot be caught here. Then the process ends, and its daemon starts another.
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

// Config is what a Server is made with.
type Config struct {
	// Host knows the host's own addresses.
	Host addresses.Owner
	// Version is told to parents.
	Version string
	Log     *slog.Logger
	// Patience is how long the server goes on with neither a wire nor a parent, and how
	// long it waits without a parent before it looks at its wires, the first time.
	Patience time.Duration
	// Descriptors is how many the process can have; 0 is 64 Ki.
	Descriptors int
}

// shares splits the descriptors of a process: most are for wires, connections and flows,
// some for DNS. The rest is for parents, and for what a wire that is being attached takes
// twice for a moment.
func shares(descriptors int) (wires, flights int) {
	if descriptors <= 0 {
		descriptors = 64 << 10
	}
	flights = min(dns.DefaultFlights, descriptors/8)
	return descriptors - min(2*dns.DefaultFlights, descriptors/4), flights
}

// Server is a netd.
type Server struct {
	cfg      Config
	started  time.Time
	poller   *stack.Poller
	resolver *dns.Resolver
	guard    *addresses.Guard
	gateway  *egress.Gateway
	parents  parents
	shutdown chan struct{} // closed when a parent says so
	stop     func()        // closes it

	mu       sync.Mutex // protects the following
	wires    map[netctl.ID]*wire
	defaults netctl.Limits
	dropped  map[stack.Drop]uint64 // of wires that are gone
	lonely   *time.Timer           // runs while there is neither a wire nor a parent
	orphan   *time.Timer           // runs while there are wires, and no parent
	pause    time.Duration         // until orphan ends the next time
	tidying  *time.Timer           // runs after a wire has come or gone
	untidy   bool                  // a wire has come or gone since it ended
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

// Serve accepts parents until one of them says Shutdown, ctx ends, or nobody needs the
// server any more. Then it lets go of all wires.
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
	s.tidying = time.AfterFunc(tidyAfter, s.tidy) // what starting has left
	var serving sync.WaitGroup
	serving.Go(func() {
		select {
		case <-s.shutdown:
		case <-ctx.Done():
		}
		_ = listener.Close() // Accept returns
	})
	err = s.accept(ctx, listener, owner, &serving)
	cancel()
	s.parents.hangUp()
	serving.Wait()
	s.close()
	return err
}

// accept takes parents on until the listener is closed.
func (s *Server) accept(ctx context.Context, listener *net.UnixListener, owner uint32, serving *sync.WaitGroup) error {
	for {
		socket, err := listener.AcceptUnix()
		if errors.Is(err, net.ErrClosed) {
			return nil
		}
		if err != nil {
			// A peer that is gone already, or no descriptor left: both pass.
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
			_ = socket.Close() // it was told nothing
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

// acceptPause keeps a failing accept from taking a whole processor.
const acceptPause = 100 * time.Millisecond

// consider starts the time after which nobody needs the server, or that after which it
// looks at its wires, or stops both.
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

// maxPause is how long a server without a parent waits at most before it looks again.
const maxPause = time.Hour

// dropEnded lets go of the wires of sandboxes that have ended, while no parent would say
// so, and looks again after twice the time.
func (s *Server) dropEnded() {
	if s.parents.count() > 0 {
		return
	}
	for _, w := range s.all() {
		if w.stack.Gone() {
			s.cfg.Log.Info("a sandbox has ended while there was no parent", "wire", w.id)
			_ = s.detach(w.id) // a parent that has just come may have been faster
		}
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if len(s.wires) > 0 && !s.closed && s.parents.count() == 0 {
		s.pause = min(2*s.pause, maxPause)
		s.orphan.Reset(s.pause)
	}
}

// close lets go of everything.
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
