package node

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"math/rand/v2"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"agentrun.dev/internal/engine"
	"agentrun.dev/internal/node/nodetest"
	"agentrun.dev/internal/sandbox"
	"agentrun.dev/internal/storage/snapshot"
)

var errChance = errors.New("it failed by chance")

// dice decides what fails, and for how long things take. It is safe for concurrent use.
type dice struct {
	mu   sync.Mutex // protects all following fields
	rand *rand.Rand
	off  bool // nothing fails
}

func (d *dice) n(n int) int {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.rand.IntN(n)
}

// fails takes a moment, and fails now and then.
func (d *dice) fails(ctx context.Context) error {
	d.mu.Lock()
	wait, bad := time.Duration(d.rand.IntN(5))*time.Millisecond, d.rand.IntN(8) == 0 && !d.off
	d.mu.Unlock()
	select {
	case <-time.After(wait):
	case <-ctx.Done():
		return ctx.Err()
	}
	if bad {
		return errChance
	}
	return nil
}

// shakyHost is a host on which things fail by chance.
type shakyHost struct {
	*nodetest.Host
	dice *dice
}

func (h *shakyHost) Fork(ctx context.Context, snap *snapshot.Snapshot, o engine.ForkOptions) (engine.Sandbox, error) {
	if err := h.dice.fails(ctx); err != nil {
		return nil, err
	}
	sb, err := h.Host.Fork(ctx, snap, o)
	if err != nil {
		return nil, err
	}
	if err := h.dice.fails(ctx); err != nil {
		return nil, errors.Join(err, sb.Close())
	}
	return &shakySandbox{sb, h}, nil
}

func (h *shakyHost) Adopt(ctx context.Context, folder string) (engine.Sandbox, error) {
	sb, err := h.Host.Adopt(ctx, folder)
	if err != nil {
		return nil, err
	}
	return &shakySandbox{sb, h}, nil
}

type shakySandbox struct {
	engine.Sandbox
	host *shakyHost
}

func (s *shakySandbox) Pause(ctx context.Context) error {
	return errors.Join(s.host.dice.fails(ctx), s.Sandbox.Pause(ctx))
}

func (s *shakySandbox) Resume(ctx context.Context) error {
	return errors.Join(s.host.dice.fails(ctx), s.Sandbox.Resume(ctx))
}

func (s *shakySandbox) Claim(ctx context.Context, name string) error {
	return errors.Join(s.host.dice.fails(ctx), s.Sandbox.Claim(ctx, name))
}

func (s *shakySandbox) Snapshot(ctx context.Context, dir string, opts ...snapshot.Option) (*snapshot.Snapshot, error) {
	if err := s.host.dice.fails(ctx); err != nil {
		return nil, err
	}
	return s.Sandbox.Snapshot(ctx, dir, opts...)
}

// Fork leaves a capture in memory that source and children have in common.
func (s *shakySandbox) Fork(ctx context.Context, opts []engine.ForkOptions) (*engine.LiveFork, error) {
	if err := s.host.dice.fails(ctx); err != nil {
		return nil, err
	}
	held := []engine.Held{{ID: "live-" + string(sandbox.NewID()), Bytes: uint64(1+s.host.dice.n(3)) * mib}}
	if err := s.host.dice.fails(ctx); err != nil {
		return &engine.LiveFork{Source: held}, err
	}
	live := &engine.LiveFork{Forks: make([]engine.Sandbox, len(opts)), Errs: make([]error, len(opts)), Held: held, Source: held}
	for i, o := range opts {
		if live.Errs[i] = s.host.dice.fails(ctx); live.Errs[i] != nil {
			continue
		}
		one, err := s.Sandbox.Fork(ctx, []engine.ForkOptions{o})
		if err != nil {
			live.Errs[i] = err
			continue
		}
		if live.Errs[i] = one.Errs[0]; one.Errs[0] == nil {
			live.Forks[i] = &shakySandbox{one.Forks[0], s.host}
		}
	}
	return live, nil
}

// counts are the numbers of an admission.
type counts struct {
	used   uint64
	spaces map[sandbox.Namespace]uint64
	held   map[holding]int
	users  map[string]int
	stored map[sandbox.Namespace]uint64
}

func (a *admission) counts() counts {
	a.mu.Lock()
	defer a.mu.Unlock()
	stored := maps.Clone(a.stored)
	maps.DeleteFunc(stored, func(_ sandbox.Namespace, bytes uint64) bool { return bytes == 0 })
	return counts{a.used, maps.Clone(a.spaces), maps.Clone(a.held), maps.Clone(a.users), stored}
}

// TestAccounts: after any concurrent operations and failures, the numbers equal
// those that the next daemon counts from the journal, and are zero when all
// sandboxes have ended.
func TestAccounts(t *testing.T) {
	for seed := range uint64(20) {
		t.Run(fmt.Sprint(seed), func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) { account(t, seed) })
		})
	}
}

func account(t *testing.T, seed uint64) {
	d := &dice{rand: rand.New(rand.NewPCG(seed, 1))}
	dir, h := t.TempDir(), &shakyHost{Host: nodetest.NewHost(t), dice: d}
	open := func() *Manager {
		return daemon(t, dir, h.Host, func(c *Config) {
			c.Engine, c.Builder, c.Starts, c.Capacity = h, &builder{pages: "16"}, 2, 20*64*mib
		})
	}
	m := open()
	defer func() { _ = m.Close() }()
	spaces := []sandbox.Namespace{"a", "b", "c"}
	for _, n := range spaces {
		must(t, second(m.ApplyTemplate(t.Context(), sandbox.Key{Namespace: n, Name: "t"}, sandbox.TemplateSpec{Image: "one", MilliCPUs: 1000, Memory: 64 * mib})),
			second(m.ApplyPool(t.Context(), sandbox.Key{Namespace: n, Name: "pool"}, sandbox.PoolSpec{Template: "t", Replicas: 2})))
	}
	var all sync.WaitGroup
	for range 24 {
		all.Go(func() {
			for range 25 {
				act(t, m, h, spaces[d.n(len(spaces))])
			}
		})
	}
	all.Wait()
	d.mu.Lock()
	d.off = true
	d.mu.Unlock()
	for _, n := range spaces {
		if err := m.DeletePool(t.Context(), sandbox.Key{Namespace: n, Name: "pool"}); err != nil && !sandbox.HasCode(err, sandbox.CodeNotFound) {
			t.Error(err)
		}
	}
	synctest.Wait()
	before := m.capacity.counts()
	must(t, m.Close())
	m = open()
	wantCounts(t, "after the daemon's restart", m.capacity.counts(), before)
	for _, n := range spaces {
		list, err := m.Sandboxes(t.Context(), sandbox.SandboxesRequest{Namespace: n, Page: sandbox.Page{}, Ended: false})
		must(t, err)
		for _, s := range list {
			must(t, second(m.Kill(t.Context(), s.Key)))
		}
		saved, err := m.Checkpoints(t.Context(), n, sandbox.Page{})
		must(t, err)
		for _, c := range saved {
			must(t, m.DeleteCheckpoint(t.Context(), c.Key))
		}
		_ = m.DeletePool(t.Context(), sandbox.Key{Namespace: n, Name: "pool"}) // it may be gone
		must(t, m.DeleteTemplate(t.Context(), sandbox.Key{Namespace: n, Name: "t"}))
	}
	synctest.Wait()
	wantCounts(t, "when all has ended", m.capacity.counts(), counts{})
	for _, turns := range []*turns{m.turns, m.buildTurns, m.captureTurns} {
		if turns.free != turns.most || turns.filling != 0 || len(turns.next)+len(turns.refills)+len(turns.holds) > 0 {
			t.Errorf("turns: %+v", turns)
		}
	}
	if left := len(h.Folders()); left > 0 || h.Resident() > 0 {
		t.Errorf("%d machines and %d bytes of layers are left", left, h.Resident())
	}
	for _, dir := range []string{machinesDir, imagesDir, checkpointsDir} {
		wantFolders(t, m, dir, 0)
	}
}

func wantCounts(t *testing.T, when string, got, want counts) {
	t.Helper()
	if got.used != want.used || !maps.Equal(got.spaces, want.spaces) || !maps.Equal(got.held, want.held) ||
		!maps.Equal(got.users, want.users) || !maps.Equal(got.stored, want.stored) {
		t.Errorf("%s:\n%+v, want\n%+v", when, got, want)
	}
}

// act does something. That it fails is fine.
func act(t *testing.T, m *Manager, h *shakyHost, n sandbox.Namespace) {
	d := h.dice
	name := func() sandbox.Key { return sandbox.Key{Namespace: n, Name: sandbox.Name(fmt.Sprint("s", d.n(5)))} }
	ctx, cancel := context.WithTimeout(t.Context(), time.Duration(1+d.n(40))*time.Millisecond)
	if d.n(4) > 0 {
		ctx = t.Context()
	}
	defer cancel()
	switch d.n(16) {
	case 0, 1, 2:
		k := name()
		if s, _, err := m.Claim(ctx, sandbox.ClaimRequest{Key: k, Spec: sandbox.ClaimSpec{Pool: "pool"}}); err == nil && d.n(2) == 0 {
			h.Write(m.machineDir(s.Machine), nodetest.LayerKey, "16")
		}
	case 3:
		_, _ = m.Kill(ctx, name())
	case 4, 5:
		_, _ = m.Hibernate(ctx, name())
	case 6:
		_, _ = m.Resume(ctx, name())
	case 7:
		_, _ = m.Pause(ctx, name())
	case 8, 9:
		_, _, _ = m.Fork(ctx, sandbox.ForkRequest{Key: sandbox.Key{Namespace: n, Name: sandbox.Name(fmt.Sprint("f", d.n(3)))}, Spec: sandbox.ForkSpec{Source: name().Name, Replicas: 1 + d.n(3)}})
	case 10:
		_, _, _ = m.Checkpoint(ctx, sandbox.CheckpointRequest{Key: sandbox.Key{Namespace: n, Name: sandbox.Name(fmt.Sprint("c", d.n(3)))}, Source: name().Name})
	case 11:
		_, _, _ = m.Restore(ctx, sandbox.RestoreRequest{Key: name(), Checkpoint: sandbox.Name(fmt.Sprint("c", d.n(3))), Spec: sandbox.RestoreSpec{}})
	case 12:
		_ = m.DeleteCheckpoint(ctx, sandbox.Key{Namespace: n, Name: sandbox.Name(fmt.Sprint("c", d.n(3)))})
	case 13:
		_ = m.DeleteFork(ctx, sandbox.Key{Namespace: n, Name: sandbox.Name(fmt.Sprint("f", d.n(3)))})
	case 14:
		if folders := h.Folders(); len(folders) > 0 {
			h.End(folders[d.n(len(folders))], engine.ErrOutOfMemory)
		}
	case 15:
		switch d.n(4) {
		case 0:
			_ = m.DeletePool(ctx, sandbox.Key{Namespace: n, Name: "pool"})
			_, _ = m.ApplyPool(ctx, sandbox.Key{Namespace: n, Name: "pool"}, sandbox.PoolSpec{Template: "t", Replicas: d.n(3)})
		case 1:
			_, _ = m.ApplyTemplate(ctx, sandbox.Key{Namespace: n, Name: "t"}, sandbox.TemplateSpec{Image: fmt.Sprint(d.n(1000)), MilliCPUs: 1000, Memory: 64 * mib})
		case 2:
			_, _ = m.SetQuota(ctx, sandbox.Quota{Namespace: n, Memory: uint64(d.n(12)) * 64 * mib, Storage: uint64(d.n(4)) * 128 << 10})
		case 3:
			_, _ = m.ApplyPool(ctx, sandbox.Key{Namespace: n, Name: "pool"}, sandbox.PoolSpec{Template: "t", Replicas: d.n(4)})
		}
	}
}
