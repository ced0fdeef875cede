package netds

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"slices"
	"sync"
	"time"

	"agentrun.dev/internal/engine"
	"agentrun.dev/internal/network/netctl"
	"agentrun.dev/internal/network/netproc"
	"agentrun.dev/internal/node"
	"agentrun.dev/internal/sandbox"
)

// namespace is the network of one namespace: a netd while there are machines.
type namespace struct {
	netds *Netds
	name  sandbox.Namespace

	// turn is held by whoever attaches or detaches wires, so that a netd that comes
	// back gets each wire once.
	turn sync.Mutex

	mu      sync.Mutex // protects all following fields
	joints  map[sandbox.ID]*node.Joint
	running bool             // whether run is
	client  *netctl.Client   // nil while there is no netd to speak with
	changed chan struct{}    // closed and made anew when client or joints change
	failed  error            // why there is no client
	process *netproc.Process // of client
	// lacking are machines without a wire in the netd, with the reason, and leaving those
	// that a netd may still have a wire of. Both are tried again.
	lacking map[sandbox.ID]string
	leaving map[sandbox.ID]bool
}

func newNamespace(n *Netds, name sandbox.Namespace) *namespace {
	return &namespace{
		netds: n, name: name, joints: map[sandbox.ID]*node.Joint{}, changed: make(chan struct{}),
		lacking: map[sandbox.ID]string{}, leaving: map[sandbox.ID]bool{},
	}
}

// notify wakes those who wait for a change. The caller holds mu.
func (ns *namespace) notify() {
	close(ns.changed)
	ns.changed = make(chan struct{})
}

// connected is the client, or nil.
func (ns *namespace) connected() *netctl.Client {
	ns.mu.Lock()
	defer ns.mu.Unlock()
	return ns.client
}

// await waits for a netd to speak with, which is started if none runs.
func (ns *namespace) await(ctx context.Context) (*netctl.Client, error) {
	for {
		ns.mu.Lock()
		if !ns.running && ns.netds.ctx.Err() == nil {
			ns.running, ns.failed = true, nil
			ns.netds.work.Go(ns.run)
		}
		client, changed, failed := ns.client, ns.changed, ns.failed
		ns.mu.Unlock()
		if client != nil {
			return client, nil
		}
		if failed != nil {
			return nil, failed
		}
		select {
		case <-changed:
		case <-ctx.Done():
			return nil, fmt.Errorf("wait for the netd of namespace %s: %w", ns.name, ctx.Err())
		case <-ns.netds.ctx.Done():
			return nil, fmt.Errorf("wait for the netd of namespace %s: the daemon is shutting down", ns.name)
		}
	}
}

// run keeps a netd for as long as there are machines.
func (ns *namespace) run() {
	ctx := ns.netds.ctx
	for ctx.Err() == nil {
		process, client, err := ns.start(ctx)
		if err != nil {
			if ctx.Err() == nil {
				ns.netds.cfg.Log.Error("start a netd", "namespace", ns.name, "error", err)
			}
			// Whoever waits is told; those that are joined wait for the next attempt.
			if !ns.tryAgain(ctx, again) {
				return
			}
			continue
		}
		if ended := ns.serve(ctx, process, client); ended {
			return
		}
	}
}

// tryAgain waits, and says whether to try again: not without machines.
func (ns *namespace) tryAgain(ctx context.Context, d time.Duration) bool {
	select {
	case <-time.After(d):
	case <-ctx.Done():
	}
	ns.mu.Lock()
	defer ns.mu.Unlock()
	if len(ns.joints) > 0 && ctx.Err() == nil {
		return true
	}
	ns.running = false
	ns.notify()
	return false
}

// start gets a netd, and tells those who wait. It has the turn meanwhile: what changes
// while a netd begins is told to it afterwards.
func (ns *namespace) start(ctx context.Context) (*netproc.Process, *netctl.Client, error) {
	ns.turn.Lock()
	defer ns.turn.Unlock()
	process, client, err := ns.open(ctx)
	ns.mu.Lock()
	defer ns.mu.Unlock()
	ns.process, ns.client, ns.failed = process, client, err
	ns.notify()
	return process, client, err
}

// open finds the netd or starts one, and gives it the wires that it lacks. The caller has
// the turn.
func (ns *namespace) open(ctx context.Context) (_ *netproc.Process, _ *netctl.Client, err error) {
	cfg := ns.netds.process(ns.name)
	process, err := netproc.Find(cfg)
	if errors.Is(err, netproc.ErrNone) {
		process, err = netproc.Start(ctx, cfg)
	}
	if err != nil {
		return nil, nil, err
	}
	client, err := process.Dial(ctx)
	if err == nil {
		err = client.Configure(ctx, ns.netds.cfg.Settings.Now().forNetd())
	}
	if err == nil {
		err = ns.attachMissing(ctx, client)
	}
	if err == nil {
		return process, client, nil
	}
	// One that cannot be used is in the way of the next.
	if client != nil {
		err = errors.Join(err, client.Close())
	}
	if ctx.Err() != nil {
		return nil, nil, errors.Join(err, process.Leave())
	}
	return nil, nil, errors.Join(err, process.Kill(ctx))
}

// serve waits until the netd has ended or nobody needs it, and says whether the
// namespace is done with it. Meanwhile it tries again what has failed.
func (ns *namespace) serve(ctx context.Context, process *netproc.Process, client *netctl.Client) (ended bool) {
	var retry <-chan time.Time
	pause := again
	remember, seen := time.NewTicker(rememberEvery), map[netctl.ID]uint64{}
	defer remember.Stop()
	for {
		ns.mu.Lock()
		needed, changed := len(ns.joints) > 0, ns.changed
		unsettled := len(ns.lacking)+len(ns.leaving) > 0
		ns.mu.Unlock()
		switch {
		case !unsettled:
			retry, pause = nil, again
		case retry == nil:
			retry, pause = time.After(pause), min(2*pause, mostAgain)
		}
		unneeded, look := (<-chan time.Time)(nil), remember.C
		if !needed {
			unneeded, look = time.After(ns.netds.cfg.Idle), nil
		}
		select {
		case <-changed:
			continue
		case <-ctx.Done():
			return true
		case <-retry:
			retry = nil
			ns.settle(ctx, client)
		case <-look:
			ns.remember(ctx, client, seen)
		case <-client.Done():
			ns.lost(ctx, process, client)
			return false
		case <-unneeded:
			if ns.retire(ctx, process, client) {
				return true
			}
		}
	}
}

// lost is called when the connection to the netd has ended. One that lives, and has
// hung up on us, cannot be used: another one gets its wires.
func (ns *namespace) lost(ctx context.Context, process *netproc.Process, client *netctl.Client) {
	ns.mu.Lock()
	ns.client, ns.process = nil, nil
	clear(ns.leaving) // with the process
	ns.notify()
	ns.mu.Unlock()
	err := errors.Join(client.Close(), process.Kill(ctx))
	ns.netds.cfg.Log.Error("a netd has ended; another one is started", "namespace", ns.name, "reason", process.Ended(), "error", err)
}

// retire ends a netd that has no wires. It fails if there are some by now.
func (ns *namespace) retire(ctx context.Context, process *netproc.Process, client *netctl.Client) bool {
	ns.turn.Lock()
	defer ns.turn.Unlock()
	ns.mu.Lock()
	if len(ns.joints) > 0 {
		ns.mu.Unlock()
		return false
	}
	ns.client, ns.process, ns.running = nil, nil, false
	ns.notify()
	ns.mu.Unlock()
	err := errors.Join(client.Close(), process.Kill(ctx), netproc.Remove(ctx, ns.netds.process(ns.name)))
	if err != nil && ctx.Err() == nil {
		ns.netds.cfg.Log.Error("end a netd", "namespace", ns.name, "error", err)
	}
	return true
}

// leave lets go of the netd, which goes on.
func (ns *namespace) leave() error {
	ns.mu.Lock()
	defer ns.mu.Unlock()
	var errs []error
	if ns.client != nil {
		errs = append(errs, ns.client.Close())
	}
	if ns.process != nil {
		errs = append(errs, ns.process.Leave())
	}
	ns.client, ns.process = nil, nil
	return errors.Join(errs...)
}

// keep ends what no machine of this daemon needs.
func (ns *namespace) keep(ctx context.Context) error {
	if gone, err := ns.removeForeign(ctx); gone || err != nil {
		return err
	}
	ns.mu.Lock()
	needed := len(ns.joints) > 0
	ns.mu.Unlock()
	c, err := ns.await(ctx)
	if err != nil && !needed {
		return nil // run has told why; a netd that could not be started has no wires
	}
	if err != nil {
		return err
	}
	ns.turn.Lock()
	defer ns.turn.Unlock()
	list, err := c.List(ctx)
	if err != nil {
		return err
	}
	var errs []error
	for _, w := range list {
		ns.mu.Lock()
		_, known := ns.joints[sandbox.ID(w.ID)]
		ns.mu.Unlock()
		if !known {
			errs = append(errs, c.Detach(ctx, w.ID))
		}
	}
	return errors.Join(errs...)
}

// removeForeign ends the netd of an earlier daemon unless this one uses it: run ends its
// own when nobody needs it, and a machine without an interface may have had it started.
func (ns *namespace) removeForeign(ctx context.Context) (gone bool, err error) {
	ns.turn.Lock() // run waits for it before it looks for a netd
	defer ns.turn.Unlock()
	ns.mu.Lock()
	running := ns.running
	ns.mu.Unlock()
	if running {
		return false, nil
	}
	return true, netproc.Remove(ctx, ns.netds.process(ns.name))
}

func (ns *namespace) rules(at node.Joint) (netctl.Rules, error) {
	b, err := json.Marshal(at.Policies)
	if err != nil {
		return netctl.Rules{}, fmt.Errorf("encode network policies: %w", err)
	}
	return netctl.Rules{Policies: string(b), ECH: ns.netds.cfg.Settings.Now().ECH, Injections: at.Injections}, nil
}

// setPolicies replaces what a machine may connect to.
func (ns *namespace) setPolicies(ctx context.Context, at node.Joint) error {
	rules, err := ns.rules(at)
	if err != nil {
		return err
	}
	ns.turn.Lock()
	defer ns.turn.Unlock()
	ns.mu.Lock()
	c, j := ns.client, ns.joints[at.Machine]
	ns.mu.Unlock()
	if j == nil {
		return fmt.Errorf("set the network policy of machine %s: %w", at.Machine, engine.ErrNoWire)
	}
	j.Policies, j.Injections = at.Policies, at.Injections
	if c == nil {
		return fmt.Errorf("set the network policy of machine %s: the netd of namespace %s is being started; the policy holds as soon as it runs", at.Machine, ns.name)
	}
	// It was promised already: whoever has asked for it may be gone.
	ctx = context.WithoutCancel(ctx)
	err = ns.tell(ctx, c, at.Machine, rules)
	if errors.Is(err, netctl.ErrNotFound) {
		err = ns.attach(ctx, c, j) // it could not be attached before
		ns.note(j.Machine, err)
	}
	return err
}

// tell gives a wire other rules. If the netd does not take them, it must not go on with the
// old ones: it loses the wire, or, if it does not even answer, its life.
func (ns *namespace) tell(ctx context.Context, c *netctl.Client, machine sandbox.ID, rules netctl.Rules) error {
	err := c.SetPolicy(ctx, netctl.ID(machine), rules)
	if err == nil || errors.Is(err, netctl.ErrBroken) {
		return err // without a netd nothing is open
	}
	if !errors.Is(err, netctl.ErrNotFound) {
		err = errors.Join(err, ns.takeBack(ctx, c, machine))
	}
	ns.note(machine, err)
	return err
}

// reconfigure tells a netd the settings of the node, and the wires what of the settings is in
// their rules. One that is not there yet, or does not take them, begins with them.
func (ns *namespace) reconfigure(ctx context.Context) {
	ns.turn.Lock()
	defer ns.turn.Unlock()
	ns.mu.Lock()
	c, joints := ns.client, slices.Collect(maps.Values(ns.joints))
	ns.mu.Unlock()
	if c == nil {
		return
	}
	err := c.Configure(ctx, ns.netds.cfg.Settings.Now().forNetd())
	if err != nil {
		err = errors.Join(err, c.Close()) // another one is started
		joints = nil
	}
	for _, j := range joints {
		rules, rulesErr := ns.rules(*j)
		if rulesErr == nil {
			rulesErr = ns.tell(ctx, c, j.Machine, rules)
		}
		err = errors.Join(err, rulesErr)
	}
	if err != nil && ctx.Err() == nil {
		ns.netds.cfg.Log.Error("configure a netd", "namespace", ns.name, "error", err)
	}
}

// part ends a machine's connections.
func (ns *namespace) part(ctx context.Context, machine sandbox.ID) {
	ns.turn.Lock()
	defer ns.turn.Unlock()
	ns.mu.Lock()
	c := ns.client
	_, joined := ns.joints[machine]
	delete(ns.joints, machine)
	delete(ns.lacking, machine)
	ns.notify()
	ns.mu.Unlock()
	if c == nil || !joined {
		return
	}
	if err := c.Detach(ctx, netctl.ID(machine)); err != nil && !errors.Is(err, netctl.ErrNotFound) && !errors.Is(err, netctl.ErrBroken) && ctx.Err() == nil {
		ns.mu.Lock()
		ns.leaving[machine] = true
		ns.notify()
		ns.mu.Unlock()
		ns.netds.cfg.Log.Error("let go of a sandbox's network", "machine", machine, "error", err)
	}
}

// pause stops or starts the clocks of a machine's connections. A netd that is not
// there is told when it comes back.
func (ns *namespace) pause(ctx context.Context, machine sandbox.ID, paused bool) {
	ns.turn.Lock()
	defer ns.turn.Unlock()
	ns.mu.Lock()
	c, j := ns.client, ns.joints[machine]
	ns.mu.Unlock()
	if j == nil {
		return
	}
	j.Paused = paused
	if c == nil {
		return
	}
	do := c.Resume
	if paused {
		do = c.Pause
	}
	err := do(ctx, netctl.ID(machine))
	if err != nil && !errors.Is(err, netctl.ErrBroken) && !errors.Is(err, netctl.ErrNotFound) { // it is told with the wire
		ns.netds.cfg.Log.Error("pause a sandbox's network, or resume it", "machine", machine, "paused", paused, "error", err)
	}
}
