package netd

import (
	"crypto/x509"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"net/netip"
	"os"
	"slices"
	"sync"
	"time"

	"agentrun.dev/internal/network/dns"
	"agentrun.dev/internal/network/egress"
	"agentrun.dev/internal/network/inject"
	"agentrun.dev/internal/network/netctl"
	"agentrun.dev/internal/network/stack"
	"golang.org/x/sys/unix"
)

// wire is one sandbox's wire, with its way out.
type wire struct {
	id       netctl.ID
	attached time.Time
	sandbox  *egress.Sandbox
	stack    *stack.Wire
	limits   netctl.Limits // the wire's own
	gone     chan struct{} // closed when the wire is gone

	mu       sync.Mutex // protects all following fields
	paused   bool
	lastMark uint64
	marks    map[uint64]*stack.Mark
}

// maxMarks bounds the marks of a wire. A parent that dies during a capture leaves its
// mark.
const maxMarks = 16

// close cuts all connections, and waits until the wire is completely gone.
func (w *wire) close() {
	close(w.gone)
	w.sandbox.Close()
	w.stack.Close()
}

// configure changes the settings that all wires share. It cuts connections to ranges
// that are closed from now on.
func (s *Server) configure(c netctl.Settings) error {
	upstreams := dns.Upstreams{Default: c.Upstreams, Internal: map[string][]netip.AddrPort{}}
	for _, d := range c.InternalDomains {
		if _, twice := upstreams.Internal[d.Domain]; twice {
			return fmt.Errorf("%w: internal domain %q is named twice", netctl.ErrInvalid, d.Domain)
		}
		upstreams.Internal[d.Domain] = d.Upstreams
	}
	if err := s.resolver.SetUpstreams(upstreams); err != nil {
		return fmt.Errorf("%w: %w", netctl.ErrInvalid, err)
	}
	roots, err := parseRoots(c.Roots)
	if err != nil {
		return fmt.Errorf("%w: %w", netctl.ErrInvalid, err)
	}
	s.gateway.SetRoots(roots)
	s.guard.SetClosed(c.ClosedRanges)
	s.mu.Lock()
	s.defaults = c.Defaults
	for _, w := range s.wires {
		if w != nil {
			w.setRates(s.defaults)
		}
	}
	s.mu.Unlock()
	for _, w := range s.all() {
		w.sandbox.Recheck()
	}
	return nil
}

// setRates gives the wire its rates: its own, or the defaults.
func (w *wire) setRates(defaults netctl.Limits) {
	l := limits(w.limits, defaults)
	w.stack.SetRates(l.Up, l.Down)
}

// attach begins to serve a wire. The caller keeps file.
func (s *Server) attach(a netctl.Wire, file *os.File) error {
	if err := a.ID.Check(); err != nil {
		return fmt.Errorf("%w: %w", netctl.ErrInvalid, err)
	}
	rules, err := parseRules(a.Rules)
	if err != nil {
		return err
	}
	if err := s.reserve(a.ID); err != nil {
		return err
	}
	w, err := s.open(a, rules, file)
	s.mu.Lock()
	switch {
	case err != nil:
		delete(s.wires, a.ID)
	case s.closed:
		err = errors.New("netd is shutting down")
	default:
		s.wires[a.ID] = w
		w.setRates(s.defaults) // they may have changed meanwhile
	}
	s.mu.Unlock()
	s.tidySoon()
	if err != nil {
		if w != nil {
			w.close()
		}
		s.consider()
		return err
	}
	return nil
}

// reserve takes an id for a wire before it is attached.
func (s *Server) reserve(id netctl.ID) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.closed {
		return errors.New("netd is shutting down")
	}
	if _, taken := s.wires[id]; taken {
		return fmt.Errorf("%w: %s", netctl.ErrExists, id)
	}
	if len(s.wires) >= netctl.MaxWires {
		return fmt.Errorf("%w: %d wires are attached", netctl.ErrBusy, len(s.wires))
	}
	s.wires[id] = nil
	return nil
}

// open makes both halves of a wire, and resets the connections that the sandbox has
// inherited.
func (s *Server) open(a netctl.Wire, rules egress.Rules, file *os.File) (_ *wire, err error) {
	s.mu.Lock()
	defaults := s.defaults
	s.mu.Unlock()
	for _, addr := range []netip.Addr{a.Address, a.Gateway, a.Address6, a.Gateway6} {
		if addr.IsValid() && !slices.ContainsFunc(netctl.Inside, func(p netip.Prefix) bool { return p.Contains(addr) }) {
			return nil, fmt.Errorf("%w: %v is in none of the networks of sandboxes, %v", netctl.ErrInvalid, addr, netctl.Inside)
		}
	}
	w := &wire{id: a.ID, attached: time.Now(), paused: a.Paused, limits: a.Limits, gone: make(chan struct{})}
	w.sandbox = s.gateway.NewSandbox(rules, inheritance(a.Lineage))
	defer func() {
		if err != nil {
			w.sandbox.Close() // otherwise the gateway would keep it
		}
	}()
	fd, err := duplicate(file)
	if err != nil {
		return nil, fmt.Errorf("copy the descriptor of wire %s: %w", a.ID, err)
	}
	w.stack, err = s.poller.Attach(fd, stack.Config{
		MAC: a.MAC, GatewayMAC: a.GatewayMAC, Address: a.Address, Gateway: a.Gateway,
		Address6: a.Address6, Gateway6: a.Gateway6, MTU: a.MTU, Limits: limits(a.Limits, defaults),
	}, &caught{w.sandbox, a.ID, s.cfg.Log})
	if err != nil {
		kind := netctl.ErrInvalid
		if errors.Is(err, stack.ErrBusy) {
			kind = netctl.ErrBusy
		}
		return nil, fmt.Errorf("%w: wire %s: %w", kind, a.ID, errors.Join(err, unix.Close(fd)))
	}
	if a.Paused {
		w.stack.Pause()
	}
	var tuples []stack.Tuple
	for _, t := range a.Lineage.Tuples {
		tuples = append(tuples, stack.Tuple{Protocol: stack.TCP, Inside: t.Inside, Outside: t.Outside})
	}
	w.stack.ResetInherited(tuples)
	return w, nil
}

func inheritance(l netctl.Lineage) (out egress.Inheritance) {
	for _, p := range l.Pins {
		out.Pins = append(out.Pins, egress.Pin{Addr: p.Addr, Name: p.Name, Internal: p.Internal})
	}
	for _, w := range l.Wildcards {
		out.Wildcards = append(out.Wildcards, dns.WildcardUse(w))
	}
	return out
}

// duplicate returns a new descriptor of a file. It does not change the file's mode,
// which other processes share.
func duplicate(f *os.File) (fd int, err error) {
	raw, err := f.SyscallConn()
	if err != nil {
		return -1, err
	}
	var dupErr error
	err = raw.Control(func(from uintptr) { fd, dupErr = unix.FcntlInt(from, unix.F_DUPFD_CLOEXEC, 0) })
	return fd, errors.Join(err, dupErr)
}

// limits are the limits of a wire, or else the defaults. If both are 0, the stack
// uses its own.
func limits(own, defaults netctl.Limits) stack.Limits {
	pick := func(v, otherwise int) int {
		if v == 0 {
			return otherwise
		}
		return v
	}
	rate := func(v, otherwise uint64) int64 {
		if v == 0 {
			v = otherwise
		}
		return int64(v) // messages carry only values that fit
	}
	return stack.Limits{
		Connections: pick(own.Connections, defaults.Connections), Opening: pick(own.Opening, defaults.Opening),
		Flows: pick(own.Flows, defaults.Flows), Queries: pick(own.Queries, defaults.Queries),
		Buffers: pick(own.Buffers, defaults.Buffers),
		Up:      rate(own.Up, defaults.Up), Down: rate(own.Down, defaults.Down),
	}
}

// parseRoots reads CA certificates. Without any it returns nil, with which every
// server fails verification.
func parseRoots(text []byte) (*x509.CertPool, error) {
	if len(text) == 0 {
		return nil, nil
	}
	roots := x509.NewCertPool()
	if !roots.AppendCertsFromPEM(text) {
		return nil, errors.New("the roots have no CA certificate in them")
	}
	return roots, nil
}

func parseRules(r netctl.Rules) (egress.Rules, error) {
	rules := egress.Rules{ECH: r.ECH}
	err := json.Unmarshal([]byte(r.Policies), &rules.Policy)
	if err == nil {
		rules.Inject, err = inject.Prepare(r.Injections)
	}
	if err != nil {
		return rules, fmt.Errorf("%w: %w", netctl.ErrInvalid, err)
	}
	return rules, nil
}

// find returns an attached wire.
func (s *Server) find(id netctl.ID) (*wire, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if w := s.wires[id]; w != nil {
		return w, nil
	}
	return nil, fmt.Errorf("%w: %s", netctl.ErrNotFound, id)
}

// all returns the attached wires in the order of their ids.
func (s *Server) all() (out []*wire) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, id := range slices.Sorted(maps.Keys(s.wires)) {
		if w := s.wires[id]; w != nil {
			out = append(out, w)
		}
	}
	return out
}

func (s *Server) setPolicy(id netctl.ID, r netctl.Rules) error {
	w, err := s.find(id)
	if err != nil {
		return err
	}
	rules, err := parseRules(r)
	if err != nil {
		return err
	}
	w.sandbox.SetRules(rules)
	return nil
}

func (s *Server) ofWire(kind netctl.Kind, id netctl.ID) (netctl.Result, error) {
	if kind == netctl.KindDetach {
		return nil, s.detach(id)
	}
	w, err := s.find(id)
	if err != nil {
		return nil, err
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	switch kind {
	case netctl.KindPause:
		w.paused = true
		w.stack.Pause()
	case netctl.KindResume:
		w.paused = false
		w.stack.Resume()
	case netctl.KindMark:
		return &netctl.Marked{Mark: w.mark()}, nil
	default:
		return nil, fmt.Errorf("%w: kind %d", netctl.ErrInvalid, kind)
	}
	return nil, nil
}

// mark makes a mark. If there are many, it replaces the oldest. The caller holds
// w.mu.
func (w *wire) mark() uint64 {
	if len(w.marks) >= maxMarks {
		oldest := slices.Min(slices.Collect(maps.Keys(w.marks)))
		w.marks[oldest].Collect()
		delete(w.marks, oldest)
	}
	w.lastMark++
	if w.marks == nil {
		w.marks = map[uint64]*stack.Mark{}
	}
	w.marks[w.lastMark] = w.stack.Mark()
	return w.lastMark
}

// collect returns the connections that a copy of the sandbox made since a mark
// inherits.
func (s *Server) collect(id netctl.ID, mark uint64) (netctl.Result, error) {
	w, err := s.find(id)
	if err != nil {
		return nil, err
	}
	w.mu.Lock()
	m := w.marks[mark]
	delete(w.marks, mark)
	w.mu.Unlock()
	if m == nil {
		return nil, fmt.Errorf("%w: wire %s has no mark %d: more than %d were made since, or it was collected", netctl.ErrInvalid, id, mark, maxMarks)
	}
	var l netctl.Lineage
	tuples := m.Collect()
	for _, t := range tuples[:min(len(tuples), netctl.MaxTuples)] {
		l.Tuples = append(l.Tuples, netctl.Tuple{Inside: t.Inside, Outside: t.Outside})
	}
	from := w.sandbox.Inheritance()
	for _, p := range from.Pins[:min(len(from.Pins), netctl.MaxPins)] {
		l.Pins = append(l.Pins, netctl.Pin{Name: p.Name, Addr: p.Addr, Internal: p.Internal})
	}
	for _, u := range from.Wildcards[:min(len(from.Wildcards), netctl.MaxWildcards)] {
		l.Wildcards = append(l.Wildcards, netctl.Wildcard(u))
	}
	return &l, nil
}

// detach ends a wire. Its drops still count.
func (s *Server) detach(id netctl.ID) error {
	s.mu.Lock()
	w := s.wires[id]
	if w != nil {
		delete(s.wires, id)
	}
	s.mu.Unlock()
	if w == nil {
		return fmt.Errorf("%w: %s", netctl.ErrNotFound, id)
	}
	w.close()
	s.mu.Lock()
	for why, n := range w.stack.Stats().Dropped {
		s.dropped[why] += n
	}
	s.mu.Unlock()
	s.tidySoon()
	s.consider()
	return nil
}
