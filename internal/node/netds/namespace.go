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

// namespace is the network of one namespace: it has a netd while there are
// machines.
type namespace struct {
	netds *Netds
	name  sandbox.Namespace

	// turn is held while wires are attached or detached, so that a new netd gets
	// each wire once.
	turn sync.Mutex

	mu      sync.Mutex // protects all following fields
	joints  map[sandbox.ID]*node.Joint
	running bool             // run is running
	client  *netctl.Client   // nil while no netd is connected
	changed chan struct{}    // closed and made anew when client or joints change
	failed  error            // why there is no client
	process *netproc.Process // of client
	// lacking has the machines without a wire in the netd, with the reason. leaving has
	// machines whose wire may still be in the netd. Both are tried again.
	lacking map[sandbox.ID]string
	leaving map[sandbox.ID]bool
}

func newNamespace(n *Netds, name sandbox.Namespace) *namespace {
	return &namespace{
		netds: n, name: name, joints: map[sandbox.ID]*node.Joint{}, changed: make(chan struct{}),
		lacking: map[sandbox.ID]string{}, leaving: map[sandbox.ID]bool{},
	}
}

// notify wakes the goroutines that wait for a change. The caller holds mu.
func (ns *namespace) notify() {
	close(ns.changed)
	ns.changed = make(chan struct{})
}

// connected returns the client, or nil.
func (ns *namespace) connected() *netctl.Client {
	ns.mu.Lock()
	defer ns.mu.Unlock()
	return ns.client
}

// await waits for a connected netd, and starts one if necessary.
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

// run keeps a netd running as long as there are machines.
func (ns *namespace) run() {
	ctx := ns.netds.ctx
	for ctx.Err() == nil {
		process, client, err := ns.start(ctx)
		if err != nil {
			if ctx.Err() == nil {
				ns.netds.cfg.Log.Error("start a netd", "namespace", ns.name, "error", err)
			}
			// Waiting calls get the error; joined machines wait for the next attempt.
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

// tryAgain waits, and reports whether to try again: only if there are machines.
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

// start gets a netd, and tells the waiting calls. It holds the turn: a change that
// comes while the netd begins is sent to it afterwards.
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
	// A netd that cannot be used would be in the way of the next.
	if client != nil {
		err = errors.Join(err, client.Close())
	}
	if ctx.Err() != nil {
		return nil, nil, errors.Join(err, process.Leave())
	}
	return nil, nil, errors.Join(err, process.Kill(ctx))
}

// serve waits until the netd has ended or is not needed any more. It reports
// whether the namespace no longer needs a netd. In the meantime it tries failed
// operations again.
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

// lost is called when the connection to the netd has ended. A netd that has closed
// the connection but still runs is of no use: another one gets its wires.
func (ns *namespace) lost(ctx context.Context, process *netproc.Process, client *netctl.Client) {
	ns.mu.Lock()
	ns.client, ns.process = nil, nil
	clear(ns.leaving) // with the process
	ns.notify()
	ns.mu.Unlock()
	err := errors.Join(client.Close(), process.Kill(ctx))
	ns.netds.cfg.Log.Error("a netd has ended; another one is started", "namespace", ns.name, "reason", process.Ended(), "error", err)
}

// retire ends a netd without wires. It fails if the netd has some by now.
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

// leave closes the connection to the netd, which keeps running.
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

// keep ends wires and netds that no machine of this daemon needs.
func (ns *namespace) keep(ctx context.Context) error {
	if gone, err := ns.removeForeign(ctx); gone || err != nil {
		return err
	}
	ns.mu.Lock()
	needed := len(ns.joints) > 0
	ns.mu.Unlock()
	c, err := ns.await(ctx)
	if err != nil && !needed {
		return nil // run has logged the reason; a netd that could not be started has no wires
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

// removeForeign ends the netd of an earlier daemon unless this daemon uses it. run ends
// its own netd when it is not needed any more. A machine without an interface may have
// caused run to start it.
func (ns *namespace) removeForeign(ctx context.Context) (gone bool, err error) {
	ns.turn.Lock() // run waits for the turn before it looks for a netd
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

// setPolicies replaces the rules for a machine's connections.
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
	// The change was already promised, so it is made even if the caller has
	// gone.
	ctx = context.WithoutCancel(ctx)
	err = ns.tell(ctx, c, at.Machine, rules)
	if errors.Is(err, netctl.ErrNotFound) {
		err = ns.attach(ctx, c, j) // it could not be attached before
		ns.note(j.Machine, err)
	}
	return err
}

// tell gives a wire other rules. If the netd does not take them, it must not continue with
// the old ones: it loses the wire, or is ended if it does not even answer.
func (ns *namespace) tell(ctx context.Context, c *netctl.Client, machine sandbox.ID, rules netctl.Rules) error {
	err := c.SetPolicy(ctx, netctl.ID(machine), rules)
	if err == nil || errors.Is(err, netctl.ErrBroken) {
		return err // without a netd no connection is possible
	}
	if !errors.Is(err, netctl.ErrNotFound) {
		err = errors.Join(err, ns.takeBack(ctx, c, machine))
	}
	ns.note(machine, err)
	return err
}

// reconfigure sends a netd the settings of the node, and to its wires the rules that depend
// on them. A netd that is not there yet, or does not take the settings, is started with them.
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
		err = errors.Join(err, c.Close()) // another netd is started
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

// pause stops or starts the clocks of a machine's connections. If there is no
// netd now, the next one gets this with the wire.
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
	if err != nil && !errors.Is(err, netctl.ErrBroken) && !errors.Is(err, netctl.ErrNotFound) { // sent with the wire
		ns.netds.cfg.Log.Error("pause a sandbox's network, or resume it", "machine", machine, "paused", paused, "error", err)
	}
}
