package netds

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"

	"agentrun.dev/internal/engine"
	"agentrun.dev/internal/network/netctl"
	"agentrun.dev/internal/node"
	"agentrun.dev/internal/sandbox"
)

// join connects a machine. A machine of an earlier daemon keeps running in any case, and may
// have a wire in a netd with old rules. If it cannot be connected now, that is tried again.
func (ns *namespace) join(ctx context.Context, at node.Joint) error {
	j := &at
	if !at.Adopted {
		return ns.connect(ctx, j, false)
	}
	ns.mu.Lock()
	ns.joints[at.Machine] = j
	ns.notify()
	ns.mu.Unlock()
	err := ns.connect(ctx, j, true)
	if errors.Is(err, engine.ErrNoWire) {
		ns.mu.Lock()
		defer ns.mu.Unlock()
		delete(ns.joints, at.Machine)
		delete(ns.lacking, at.Machine)
		ns.notify()
		return err
	}
	if err != nil && !errors.Is(err, netctl.ErrBroken) {
		ns.note(at.Machine, err)
	}
	return nil
}

// connect attaches the wire of a machine to the netd, or waits for the next netd. An
// adopted machine may get its wire when the netd begins.
func (ns *namespace) connect(ctx context.Context, j *node.Joint, adopted bool) error {
	for {
		c, err := ns.await(ctx)
		if err != nil {
			return fmt.Errorf("join the network of namespace %s: %w", ns.name, err)
		}
		ns.turn.Lock()
		if !adopted || j.Adopted {
			err = ns.attach(ctx, c, j)
		}
		if err == nil {
			ns.mu.Lock()
			ns.joints[j.Machine] = j
			delete(ns.lacking, j.Machine)
			ns.notify()
			ns.mu.Unlock()
		}
		ns.turn.Unlock()
		if !errors.Is(err, netctl.ErrBroken) || ctx.Err() != nil {
			return err
		}
		select { // the next netd comes
		case <-c.Done():
		case <-ctx.Done():
		}
	}
}

// attach gives a wire to a netd. If it fails, it leaves nothing of the wire there. The
// caller has the turn.
func (ns *namespace) attach(ctx context.Context, c *netctl.Client, j *node.Joint) error {
	rules, err := ns.rules(*j)
	if err != nil {
		return err
	}
	if j.Adopted {
		if err := ns.attached(ctx, c, j, rules); !errors.Is(err, netctl.ErrNotFound) {
			return err
		}
	}
	end, err := j.Wire.Wire()
	if err != nil {
		return err
	}
	defer func() { _ = end.Close() }() // the netd has its own copy
	if err := c.Attach(ctx, wireOf(*j, rules), end); err != nil {
		return errors.Join(err, ns.takeBack(ctx, c, j.Machine)) // the netd may have attached it, and answered too late
	}
	j.Adopted = false
	return nil
}

// attached updates the rules of a wire that an earlier daemon has attached.
func (ns *namespace) attached(ctx context.Context, c *netctl.Client, j *node.Joint, rules netctl.Rules) error {
	id := netctl.ID(j.Machine)
	err := c.SetPolicy(ctx, id, rules)
	switch {
	case err != nil:
	case j.Paused:
		err = c.Pause(ctx, id)
	default:
		err = c.Resume(ctx, id)
	}
	if err == nil {
		j.Adopted = false
		return nil
	}
	if errors.Is(err, netctl.ErrNotFound) {
		return err
	}
	return errors.Join(err, ns.takeBack(ctx, c, j.Machine))
}

// takeBack makes a netd detach a wire that may have wrong rules. If the netd does not, its
// connection is closed: another netd is started, with the right rules.
func (ns *namespace) takeBack(ctx context.Context, c *netctl.Client, machine sandbox.ID) error {
	err := c.Detach(context.WithoutCancel(ctx), netctl.ID(machine))
	if err == nil || errors.Is(err, netctl.ErrNotFound) || errors.Is(err, netctl.ErrBroken) {
		return nil
	}
	return errors.Join(err, c.Close())
}

// note records whether a machine has its wire, and logs each change.
func (ns *namespace) note(machine sandbox.ID, err error) {
	ns.mu.Lock()
	defer ns.mu.Unlock()
	was, lacks := ns.lacking[machine]
	_, joined := ns.joints[machine]
	switch {
	case !joined:
		return
	case err == nil && lacks:
		delete(ns.lacking, machine)
		ns.netds.cfg.Log.Info("a sandbox has its network again", "machine", machine)
	case err != nil && was != err.Error():
		ns.lacking[machine] = err.Error()
		ns.netds.cfg.Log.Error("a sandbox has no network; it is tried again", "machine", machine, "error", err)
	default:
		return
	}
	ns.notify()
}

// attachMissing attaches the wires that a netd lacks. It updates those that an earlier daemon
// has attached, and detaches those that have to leave. The caller has the turn.
func (ns *namespace) attachMissing(ctx context.Context, c *netctl.Client) error {
	list, err := c.List(ctx)
	if err != nil {
		return err
	}
	there := map[sandbox.ID]bool{}
	for _, w := range list {
		there[sandbox.ID(w.ID)] = true
	}
	ns.mu.Lock()
	var missing []*node.Joint
	for id, j := range ns.joints {
		if !there[id] || j.Adopted {
			missing = append(missing, j)
		}
	}
	leaving := slices.Collect(maps.Keys(ns.leaving))
	ns.mu.Unlock()
	for _, id := range leaving {
		err := c.Detach(ctx, netctl.ID(id))
		if errors.Is(err, netctl.ErrBroken) {
			return err
		}
		if err == nil || errors.Is(err, netctl.ErrNotFound) {
			ns.mu.Lock()
			delete(ns.leaving, id)
			ns.mu.Unlock()
		}
	}
	for _, j := range missing {
		err := ns.attach(ctx, c, j)
		if errors.Is(err, netctl.ErrBroken) {
			return err
		}
		if errors.Is(err, engine.ErrNoWire) {
			continue // it is ending just now, or has no interface: join forgets it
		}
		ns.note(j.Machine, err)
	}
	return nil
}

// settle tries failed operations again.
func (ns *namespace) settle(ctx context.Context, c *netctl.Client) {
	ns.turn.Lock()
	defer ns.turn.Unlock()
	err := ns.attachMissing(ctx, c)
	if err != nil && !errors.Is(err, netctl.ErrBroken) && ctx.Err() == nil {
		ns.netds.cfg.Log.Error("give a netd its wires", "namespace", ns.name, "error", err)
	}
}
