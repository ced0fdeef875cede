// Package netds connects the interfaces of a node's sandboxes, with one netd per
// namespace. It starts netds when they are needed, and finds the netds of an earlier
// daemon again. If a netd has ended, it starts another one and gives it every wire
// again. It ends the netds of namespaces without sandboxes.
package netds

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"sync"
	"time"

	"agentrun.dev/internal/host/jail"
	"agentrun.dev/internal/network/netproc"
	"agentrun.dev/internal/network/policy"
	"agentrun.dev/internal/node"
	"agentrun.dev/internal/sandbox"
)

// Config configures the netds of a node.
type Config struct {
	// Dir has a folder for each namespace.
	Dir  string
	Jail *jail.Jail
	// Settings are the network settings of this node. Watch reads them again.
	Settings *Settings
	// Idle is how long a netd without wires stays; 0 is a minute.
	Idle time.Duration
	Log  *slog.Logger
}

// Netds are the netds of a node. They are a node.Network.
type Netds struct {
	cfg    Config
	ctx    context.Context // ends when the daemon closes
	cancel context.CancelFunc
	work   sync.WaitGroup

	mu         sync.Mutex // protects all following fields
	namespaces map[sandbox.Namespace]*namespace
}

var _ node.Network = (*Netds)(nil)

// New makes the netds of a node, without starting one.
func New(cfg Config) *Netds {
	if cfg.Idle == 0 {
		cfg.Idle = time.Minute
	}
	n := &Netds{cfg: cfg, namespaces: map[sandbox.Namespace]*namespace{}}
	n.ctx, n.cancel = context.WithCancel(context.Background())
	n.work.Go(func() { cfg.Settings.watch(n.ctx, cfg.Log, n.reconfigure) })
	return n
}

// Close closes the connections to all netds, which keep running.
func (n *Netds) Close() error {
	n.cancel()
	n.work.Wait()
	n.mu.Lock()
	defer n.mu.Unlock()
	var errs []error
	for _, ns := range n.namespaces {
		errs = append(errs, ns.leave())
	}
	return errors.Join(errs...)
}

// of returns the network of a namespace, and makes it if necessary.
func (n *Netds) of(name sandbox.Namespace) *namespace {
	n.mu.Lock()
	defer n.mu.Unlock()
	ns := n.namespaces[name]
	if ns == nil {
		ns = newNamespace(n, name)
		n.namespaces[name] = ns
	}
	return ns
}

// Join connects the interface of a machine.
func (n *Netds) Join(ctx context.Context, at node.Joint) error {
	return n.of(at.Namespace).join(ctx, at)
}

// SetPolicies replaces the rules for a machine's connections.
func (n *Netds) SetPolicies(ctx context.Context, at node.Joint) error {
	return n.of(at.Namespace).setPolicies(ctx, at)
}

// Leave ends a machine's connections.
func (n *Netds) Leave(at node.Joint) { n.of(at.Namespace).part(n.ctx, at.Machine) }

// Pause stops the clocks of a machine's connections.
func (n *Netds) Pause(ctx context.Context, at node.Joint) {
	n.of(at.Namespace).pause(ctx, at.Machine, true)
}

// Resume starts these clocks again.
func (n *Netds) Resume(ctx context.Context, at node.Joint) {
	n.of(at.Namespace).pause(ctx, at.Machine, false)
}

// Capture records the connections of a machine from now on.
func (n *Netds) Capture(ctx context.Context, at node.Joint) func(context.Context) *sandbox.Lineage {
	return n.of(at.Namespace).capture(ctx, at.Machine)
}

// Traffic returns a part of a machine's log.
func (n *Netds) Traffic(ctx context.Context, at node.Joint, r sandbox.TrafficRequest) (sandbox.TrafficPage, error) {
	return n.of(at.Namespace).traffic(ctx, at.Machine, r)
}

// BuildPolicy is the policy for builds whose template does not set one.
func (n *Netds) BuildPolicy() policy.Policy { return n.cfg.Settings.Now().BuildNetwork }

// Keep forgets all that earlier daemons have joined and this one has not: wires
// of ended sandboxes, and netds of namespaces without sandboxes.
func (n *Netds) Keep(ctx context.Context) error {
	entries, err := os.ReadDir(n.cfg.Dir)
	if err != nil && !errors.Is(err, os.ErrNotExist) {
		return fmt.Errorf("look for netds: %w", err)
	}
	var errs []error
	for _, e := range entries {
		name, err := sandbox.ParseNamespace(e.Name())
		if err != nil {
			continue // not a folder of ours
		}
		errs = append(errs, n.of(name).keep(ctx))
	}
	return errors.Join(errs...)
}

// reconfigure sends all netds the settings of the node, independently of each other. A
// netd that does not answer must not delay others, for which the settings may close
// ranges.
func (n *Netds) reconfigure(ctx context.Context) {
	n.mu.Lock()
	all := slices.Collect(maps.Values(n.namespaces))
	n.mu.Unlock()
	var told sync.WaitGroup
	for _, ns := range all {
		told.Go(func() { ns.reconfigure(ctx) })
	}
	told.Wait()
}

func (n *Netds) process(name sandbox.Namespace) netproc.Config {
	return netproc.Config{Folder: filepath.Join(n.cfg.Dir, string(name)), Jail: n.cfg.Jail}
}

// again is the pause before a netd that has failed to start is started again.
// For wires that a netd does not take the pause doubles, up to mostAgain.
const (
	again     = time.Second
	mostAgain = time.Minute
)
