// Package netds connects the interfaces of a node's sandboxes, each namespace's by a
// netd of its own. It starts netds when they are needed, finds those again that an
// earlier daemon has started, starts another one when one has ended and gives it every
// wire anew, and ends those whose namespace has no sandboxes any more.
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

// Config is what the netds of a node work with.
type Config struct {
	// Dir has a folder for each namespace.
	Dir  string
	Jail *jail.Jail
	// Settings is what holds on this node. Watch reads it again.
	Settings *Settings
	// Idle is how long a netd stays that has no wires; 0 is a minute.
	Idle time.Duration
	Log  *slog.Logger
}

// Netds are those of a node. They are a node.Network.
type Netds struct {
	cfg    Config
	ctx    context.Context // ends when the daemon closes
	cancel context.CancelFunc
	work   sync.WaitGroup

	mu         sync.Mutex // protects all following fields
	namespaces map[sandbox.Namespace]*namespace
}

var _ node.Network = (*Netds)(nil)

// New makes the netds of a node; none runs yet.
func New(cfg Config) *Netds {
	if cfg.Idle == 0 {
		cfg.Idle = time.Minute
	}
	n := &Netds{cfg: cfg, namespaces: map[sandbox.Namespace]*namespace{}}
	n.ctx, n.cancel = context.WithCancel(context.Background())
	n.work.Go(func() { cfg.Settings.watch(n.ctx, cfg.Log, n.reconfigure) })
	return n
}

// Close lets go of all netds, which go on.
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

// of is the network of a namespace, which is made if it is missing.
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

// SetPolicies replaces what a machine may connect to.
func (n *Netds) SetPolicies(ctx context.Context, at node.Joint) error {
	return n.of(at.Namespace).setPolicies(ctx, at)
}

// Leave ends a machine's connections.
func (n *Netds) Leave(at node.Joint) { n.of(at.Namespace).part(n.ctx, at.Machine) }

// Pause stops the clocks of a machine's connections.
func (n *Netds) Pause(ctx context.Context, at node.Joint) {
	n.of(at.Namespace).pause(ctx, at.Machine, true)
}

// Resume lets them go on.
func (n *Netds) Resume(ctx context.Context, at node.Joint) {
	n.of(at.Namespace).pause(ctx, at.Machine, false)
}

// Capture notes the connections of a machine from now on.
func (n *Netds) Capture(ctx context.Context, at node.Joint) func(context.Context) *sandbox.Lineage {
	return n.of(at.Namespace).capture(ctx, at.Machine)
}

// Traffic is the log of a machine.
func (n *Netds) Traffic(ctx context.Context, at node.Joint, r sandbox.TrafficRequest) (sandbox.TrafficPage, error) {
	return n.of(at.Namespace).traffic(ctx, at.Machine, r)
}

// BuildPolicy is what builds may connect to whose template does not say.
func (n *Netds) BuildPolicy() policy.Policy { return n.cfg.Settings.Now().BuildNetwork }

// Keep forgets what earlier daemons have joined and this one has not: wires of
// sandboxes that have ended, and netds of namespaces without sandboxes.
func (n *Netds) Keep(ctx context.Context) error {
	entries, err := os.ReadDir(n.cfg.Dir)
	if err != nil && !errors.Is(err, os.ErrNotExist) {
		return fmt.Errorf("look for netds: %w", err)
	}
	var errs []error
	for _, e := range entries {
		name, err := sandbox.ParseNamespace(e.Name())
		if err != nil {
			continue // nothing of ours
		}
		errs = append(errs, n.of(name).keep(ctx))
	}
	return errors.Join(errs...)
}

// reconfigure tells all netds the settings of the node, each in its own time: one that
// does not answer must not keep others from closing what is closed now.
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

// again is how long to wait before a netd is started that has failed to start.
// It doubles for wires that a netd does not take, up to mostAgain.
const (
	again     = time.Second
	mostAgain = time.Minute
)
