package node

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"sync"
	"time"

	"agentrun.dev/internal/engine"
	"agentrun.dev/internal/network/inject"
	"agentrun.dev/internal/network/policy"
	"agentrun.dev/internal/sandbox"
	"agentrun.dev/internal/storage/snapshot"
)

// Network connects the interfaces of machines. Machines of different namespaces are
// in separate networks.
type Network interface {
	// Join connects the interface of a machine, until Leave. It fails with
	// engine.ErrNoWire for a machine without an interface. A machine that an
	// earlier daemon has joined stays joined, and gets these policies.
	Join(context.Context, Joint) error
	// SetPolicies replaces the rules for a machine's connections, and the values
	// that are put into its requests. It ends the connections that are no longer
	// allowed. After an error, the new rules apply as soon as the network is there
	// again.
	SetPolicies(context.Context, Joint) error
	// Leave ends a machine's connections.
	Leave(Joint)
	// Pause stops the clocks of a machine's connections, until Resume.
	Pause(context.Context, Joint)
	Resume(context.Context, Joint)
	// Capture is called before a machine is captured, and collect after that, even
	// if the capture has failed. collect returns the lineage for machines that
	// continue from this one. It is nil if that is unknown.
	Capture(context.Context, Joint) (collect func(context.Context) *sandbox.Lineage)
	// Traffic returns a part of a machine's log.
	Traffic(context.Context, Joint, sandbox.TrafficRequest) (sandbox.TrafficPage, error)
	// Use returns the network use of the machines of a namespace. It is empty if it is
	// not known soon.
	Use(context.Context, sandbox.Namespace) map[sandbox.ID]sandbox.NetworkUse
	// Keep forgets all machines that earlier daemons have joined and this one
	// has not.
	Keep(context.Context) error
	// BuildPolicy is the policy for builds whose template does not set one.
	BuildPolicy() policy.Policy
}

// Joint is the interface of a machine, with its policies.
type Joint struct {
	Namespace sandbox.Namespace
	// Machine names the interface.
	Machine sandbox.ID
	// Wire gives out the other end of the interface: engine.Sandbox.Wire.
	Wire     engine.Sandbox
	Policies policy.Set
	// Injections are the hosts whose requests get values put in.
	Injections []inject.Host
	// Lineage is the machine's inheritance; nil if it inherits no policies.
	Lineage *sandbox.Lineage
	// Paused says that the machine is paused.
	Paused bool
	// Adopted says that an earlier daemon has made the machine, and has probably joined
	// it. Its wire is asked for only if necessary, because a microVM then gets a new
	// one.
	Adopted bool
}

// NetworkStats counts the network use of a namespace's sandboxes, since the start of
// the process that connects them.
type NetworkStats struct {
	// Interfaces and Open are the present numbers of joined machines and of
	// their connections.
	Interfaces int
	Open       uint64
	Kinds      []NetworkKind
	// Dropped counts frames and datagrams without a destination, Queries questions to
	// DNS, Injected requests that got values of secrets.
	Dropped, Queries, Injected uint64
}

// NetworkKind counts the connections that rules of one kind have allowed and
// refused.
type NetworkKind struct {
	Kind                            string
	Opened, Refused, Sent, Received uint64
}

// Interface is the same for all sandboxes. Each sandbox has a network of its own, so
// all can have the same addresses, and forks keep theirs.
func Interface() *engine.Network {
	return &engine.Network{
		MAC: [6]byte{0x02, 0xa9, 0xe7, 0, 0, 2}, MTU: 1500,
		Address: netip.MustParsePrefix("10.255.255.2/30"), Gateway: netip.MustParseAddr("10.255.255.1"),
		Address6: netip.MustParsePrefix("fd00:a9e7::2/126"), Gateway6: netip.MustParseAddr("fd00:a9e7::1"),
		DNS: []netip.Addr{netip.MustParseAddr("10.255.255.1"), netip.MustParseAddr("fd00:a9e7::1")},
	}
}

// GatewayMAC is the address of the other end of Interface.
var GatewayMAC = [6]byte{0x02, 0xa9, 0xe7, 0, 0, 1}

// joined is a machine whose interface is connected.
type joined struct {
	engine.Sandbox
	network Network

	// pushing is held while at changes and the network is told, so that the network hears
	// of the last change last.
	pushing sync.Mutex
	// injections contains the machine while it is joined, if values are put into its
	// requests.
	injections *injections

	mu sync.Mutex // protects all following fields
	// at is the interface as it was joined; only its policies and injections
	// change.
	at Joint
	// captured is the lineage from the last capture, for machines that continue
	// from it.
	captured *sandbox.Lineage
}

// join connects a machine. A machine without an interface is returned unchanged
// if its policies let nothing out. Otherwise join fails: its user has asked for
// a connection that it would not get.
func (m *Manager) join(ctx context.Context, at Joint) (engine.Sandbox, error) {
	if m.cfg.Network == nil {
		return at.Wire, nil
	}
	err := m.cfg.Network.Join(ctx, at)
	switch {
	case errors.Is(err, engine.ErrNoWire) && !at.Policies.AllowsSomething():
		return at.Wire, nil
	case errors.Is(err, engine.ErrNoWire):
		return nil, sandbox.Errorf(sandbox.CodeConflict, "the sandbox has no network interface, and its policy lets it out").
			Because("%w", err).Try("Build the template again (`agentrun template build`): forks have the interface that it was built with")
	case err != nil:
		return nil, err
	}
	return &joined{Sandbox: at.Wire, network: m.cfg.Network, at: at}, nil
}

// now returns the present interface.
func (j *joined) now() Joint {
	j.mu.Lock()
	defer j.mu.Unlock()
	return j.at
}

// push changes the interface, and tells the network.
func (j *joined) push(ctx context.Context, change func(*Joint)) error {
	j.pushing.Lock()
	defer j.pushing.Unlock()
	j.mu.Lock()
	change(&j.at)
	j.mu.Unlock()
	return j.network.SetPolicies(ctx, j.now())
}

// Pause stops the machine, and then its connections' clocks.
func (j *joined) Pause(ctx context.Context) error {
	if err := j.Sandbox.Pause(ctx); err != nil {
		return err
	}
	j.network.Pause(ctx, j.now())
	return nil
}

// Resume resumes the clocks, and then the machine.
func (j *joined) Resume(ctx context.Context) error {
	j.network.Resume(ctx, j.now())
	return j.Sandbox.Resume(ctx)
}

// Snapshot captures the machine, and the lineage for machines that continue
// from it.
func (j *joined) Snapshot(ctx context.Context, dir string, opts ...snapshot.Option) (*snapshot.Snapshot, error) {
	defer j.capture(ctx)()
	return j.Sandbox.Snapshot(ctx, dir, opts...)
}

// Fork captures both as well.
func (j *joined) Fork(ctx context.Context, opts []engine.ForkOptions) (*engine.LiveFork, error) {
	defer j.capture(ctx)()
	return j.Sandbox.Fork(ctx, opts)
}

func (j *joined) capture(ctx context.Context) (end func()) {
	collect := j.network.Capture(ctx, j.now())
	return func() {
		lineage := collect(context.WithoutCancel(ctx))
		j.mu.Lock()
		defer j.mu.Unlock()
		j.captured = lineage
	}
}

// Close ends the machine and its connections.
func (j *joined) Close() error {
	if j.injections != nil {
		j.injections.remove(j)
	}
	j.network.Leave(j.now())
	return j.Sandbox.Close()
}

// captured returns the lineage of a machine's last capture.
func captured(sb engine.Sandbox) *sandbox.Lineage {
	j, ok := sb.(*joined)
	if !ok {
		return nil
	}
	j.mu.Lock()
	defer j.mu.Unlock()
	return j.captured
}

// joinMember connects the machine of a sandbox.
func (m *Manager) joinMember(ctx context.Context, s sandbox.Sandbox, machine sandbox.ID, sb engine.Sandbox, lineage *sandbox.Lineage) (engine.Sandbox, error) {
	policies, err := s.Egress.Policies()
	if err != nil {
		return nil, err
	}
	at := Joint{
		Namespace: s.Namespace, Machine: machine, Wire: sb, Policies: policies, Lineage: lineage,
		Paused: s.State == sandbox.Paused, Adopted: s.Machine == machine,
	}
	if !sandbox.Injects(s.Secrets) {
		return m.join(ctx, at)
	}
	m.injections.joining.RLock()
	defer m.injections.joining.RUnlock()
	what := injected{s.Namespace, s.Secrets, s.TrustedCA}
	at.Injections = m.hosts(what)
	connected, err := m.join(ctx, at)
	if j, ok := connected.(*joined); ok && err == nil {
		j.injections = &m.injections
		m.injections.add(j, what)
	}
	return connected, err
}

// rejoin connects a machine that an earlier daemon has made. If that fails, the
// machine goes on without a network: ending it would lose more.
func (m *Manager) rejoin(ctx context.Context, s sandbox.Sandbox, sb engine.Sandbox) engine.Sandbox {
	connected, err := m.joinMember(ctx, s, s.Machine, sb, nil)
	if err != nil {
		m.cfg.Log.Error("a sandbox has lost its network", "sandbox", s.ID, "error", err)
		return sb
	}
	return connected
}

// connectMade connects a machine that was just made, and ends it if that fails.
func (m *Manager) connectMade(ctx context.Context, s sandbox.Sandbox, machine sandbox.ID, sb engine.Sandbox, lineage *sandbox.Lineage) (engine.Sandbox, error) {
	s.State = sandbox.Running
	connected, err := m.joinMember(ctx, s, machine, sb, lineage)
	if err != nil {
		return nil, errors.Join(fmt.Errorf("connect sandbox %s: %w", s.Name, err), sb.Close(), m.cfg.Engine.Remove(m.ctx, m.machineDir(machine)))
	}
	return connected, nil
}

// joinBuild connects a machine that becomes a template's snapshot, or that is made
// ready after a fork of one.
func (m *Manager) joinBuild(ctx context.Context, n sandbox.Namespace, spec sandbox.TemplateSpec, sb engine.Sandbox) (engine.Sandbox, error) {
	if m.cfg.Network == nil {
		return sb, nil
	}
	may := m.cfg.Network.BuildPolicy()
	if spec.BuildNetwork != nil {
		may = *spec.BuildNetwork
	}
	if spec.Network == sandbox.NetworkNone {
		may = policy.Policy{}
	}
	return m.join(ctx, Joint{Namespace: n, Machine: sandbox.NewID(), Wire: sb, Policies: policy.Set{may}})
}

// SetNetworkPolicy replaces a sandbox's own policy, within the limits of its template
// and of the sandboxes it was forked from. With nil only these limits apply.
// Connections that are no longer allowed end.
func (m *Manager) SetNetworkPolicy(ctx context.Context, k sandbox.Key, own *policy.Policy, when ...sandbox.Precondition) (sandbox.Sandbox, error) {
	return m.alter(ctx, k, when, func(ctx context.Context, b *member) error {
		egress := b.now().Egress
		if err := egress.CheckOwn(own); err != nil {
			return err
		}
		egress.Own = own
		policies, err := egress.Policies()
		if err != nil {
			return err
		}
		j, ok := b.machine.(*joined)
		if b.machine != nil && !ok && policies.AllowsSomething() {
			return sandbox.Errorf(sandbox.CodeConflict, "sandbox %s has no network", k.Name).
				Because("its template was built without an interface").Try("Claim a new one of a template with one")
		}
		if err := b.change(func(s *sandbox.Sandbox) { s.Egress = egress }); err != nil || !ok {
			return err
		}
		return j.push(ctx, func(at *Joint) { at.Policies = policies })
	})
}

// Traffic returns a part of the log of a sandbox's network. A hibernated sandbox has
// no log.
func (m *Manager) Traffic(ctx context.Context, r sandbox.TrafficRequest) (sandbox.TrafficPage, error) {
	if err := r.Validate(); err != nil {
		return sandbox.TrafficPage{}, err
	}
	if r.Max == 0 {
		r.Max = sandbox.DefaultTraffic
	}
	nothing := sandbox.TrafficPage{Next: max(r.From, 1)}
	b, err := m.find(r.Key)
	if err != nil {
		return sandbox.TrafficPage{}, err
	}
	j := b.joined()
	if j == nil {
		// A client that follows the log asks again at once.
		select {
		case <-time.After(r.Wait):
			return nothing, nil
		case <-ctx.Done():
			return sandbox.TrafficPage{}, ctx.Err()
		}
	}
	page, err := j.network.Traffic(ctx, j.now(), r)
	if err == nil || ctx.Err() != nil || b.joined() == j {
		return page, err
	}
	// It has lost its machine in the meantime: it has ended, or was hibernated.
	if _, err := m.find(r.Key); err != nil {
		return sandbox.TrafficPage{}, err
	}
	return nothing, nil
}

// joined returns the machine of a sandbox with a network, or nil.
func (b *member) joined() *joined {
	b.mu.Lock()
	defer b.mu.Unlock()
	j, _ := b.machine.(*joined)
	return j
}
