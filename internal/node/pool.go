package node

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"agentrun.dev/internal/engine"
	enginepool "agentrun.dev/internal/engine/pool"
	"agentrun.dev/internal/network/policy"
	"agentrun.dev/internal/node/journal"
	"agentrun.dev/internal/sandbox"
	"agentrun.dev/internal/storage/snapshot"
)

// pool keeps sandboxes ready to be claimed.
type pool struct {
	manager *Manager
	key     sandbox.Key
	wake    chan struct{} // holds at most one notice to look again
	cancel  context.CancelFunc
	done    chan struct{}
	looked  chan struct{} // closed once the pool has looked for builds that it can serve claims from

	mu      sync.Mutex // protects all following fields
	spec    sandbox.PoolSpec
	current *stock   // nil before the first build is ready
	older   []*stock // of earlier revisions, oldest first, until the current one has taken over
	// earlier is the build that an earlier daemon was replacing when it ended. It is nil
	// if there is no such build, or once its stock is open again.
	earlier *sandbox.Build
	closing []*stock // stocks whose machines are being ended
	problem string   // why there is no current stock of the template's revision
	phase   sandbox.Phase
	changed chan struct{} // closed and made anew with each change of phase
}

// set changes the phase and its problem; the caller holds the lock.
func (p *pool) set(phase sandbox.Phase, problem string) {
	p.phase, p.problem = phase, problem
	close(p.changed)
	p.changed = make(chan struct{})
	p.manager.noticeStatus()
}

// stock has the waiting sandboxes of one build.
type stock struct {
	manager *Manager

	pool  sandbox.Key
	build sandbox.Build
	spec  sandbox.TemplateSpec
	snap  *snapshot.Snapshot
	// ready has the waiting sandboxes. A claim looks for one by its host name.
	ready  *enginepool.Pool[*parked, string]
	spares engine.Spares
	// held lists the parts of the snapshot that its machines keep in memory. They
	// stay in memory as long as the stock exists, because a half-made machine keeps
	// them, too.
	held []sandbox.Held
	// policy is the template's network policy, which changes without a build.
	policy atomic.Pointer[policy.Policy]

	// reached is the largest number of the stock's sandboxes that have waited at once. It
	// never falls: a stock that is claimed from as fast as it is filled keeps its place in a
	// rollout.
	reached atomic.Int64
	// served is set once a claim has got one of its machines.
	served atomic.Bool

	gone   context.Context // ends with the pool, and ends the claims that are under way
	cancel context.CancelFunc
	mu     sync.Mutex    // protects all following fields
	claims int           // that are under way; they need the snapshot
	closed chan struct{} // nil until the stock closes, closed when no claim is under way
}

// poolSpares is the number of forks that a pool keeps half made.
const poolSpares = 1

// begin is called before a claim of the stock, while the stock still belongs to
// its pool. The caller calls end after the claim.
func (s *stock) begin() (end func()) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.claims++
	return func() {
		s.mu.Lock()
		defer s.mu.Unlock()
		if s.claims--; s.claims == 0 && s.closed != nil {
			close(s.closed)
		}
	}
}

// close waits for the claims that are under way, and then ends the waiting
// sandboxes. The stock has already left its pool.
func (s *stock) close() error {
	s.mu.Lock()
	s.closed = make(chan struct{})
	if s.claims == 0 {
		close(s.closed)
	}
	s.mu.Unlock()
	<-s.closed
	s.cancel()
	err := errors.Join(s.ready.Close(), s.spares.Close(), s.snap.Close())
	s.manager.capacity.release(s.pool.Namespace, 0, s.held...)
	s.manager.refill() // another pool may wait for that memory
	return err
}

// ApplyPool makes a pool or changes it, for an owner if one is given.
func (m *Manager) ApplyPool(ctx context.Context, k sandbox.Key, spec sandbox.PoolSpec, owner ...sandbox.UID) (sandbox.Pool, error) {
	if err := errors.Join(m.beginMaking(), sandbox.MayGive(ctx, oneOwner(owner))); err != nil {
		return sandbox.Pool{}, err
	}
	if spec.Stage == "" {
		spec.Stage = sandbox.AfterReady
	}
	if err := spec.Validate(); err != nil {
		return sandbox.Pool{}, err
	}
	defer m.poolTurns.lock(k)()
	// With its turn, the template cannot be deleted meanwhile.
	defer m.templateTurns.lock(sandbox.Key{Namespace: k.Namespace, Name: spec.Template})()
	p := sandbox.Pool{Key: k, Spec: spec, Created: time.Now().UTC()}
	err := m.db.Update(func(tx *journal.Tx) error {
		if _, found, err := templates.Get(tx, sandbox.Key{Namespace: k.Namespace, Name: spec.Template}.String()); err != nil || !found {
			return errors.Join(err, sandbox.NotFound(sandbox.KindTemplate, sandbox.Key{Namespace: k.Namespace, Name: spec.Template}))
		}
		old, found, err := pools.Get(tx, k.String())
		if err != nil {
			return err
		}
		if found {
			p.Created = old.Created
		}
		old.Key = k
		if p.Owner, err = give(ctx, old.Identity(), oneOwner(owner)); err != nil {
			return err
		}
		return pools.Write(tx, k.String(), &p)
	})
	if err != nil {
		return sandbox.Pool{}, fmt.Errorf("apply pool %s: %w", k.Name, err)
	}
	m.mu.Lock()
	running := m.pools[k]
	if running == nil && !m.closed {
		m.startPool(p, nil)
	}
	m.mu.Unlock()
	if running != nil {
		running.mu.Lock()
		running.spec = spec
		running.mu.Unlock()
		running.notice()
	}
	return p, nil
}

// DeletePool ends a pool and the sandboxes that wait in it.
func (m *Manager) DeletePool(ctx context.Context, k sandbox.Key, when ...sandbox.Precondition) error {
	if err := m.begin(); err != nil {
		return err
	}
	p, err := m.forgetPool(ctx, k, when)
	if err != nil {
		return err
	}
	if p != nil {
		err = p.close()
	}
	return errors.Join(err, m.collectBuilds())
}

// forgetPool takes a pool out of the journal and out of memory, and returns the pool that
// ran.
func (m *Manager) forgetPool(ctx context.Context, k sandbox.Key, when []sandbox.Precondition) (*pool, error) {
	defer m.poolTurns.lock(k)()
	err := m.db.Update(func(tx *journal.Tx) error {
		now, found, err := pools.Get(tx, k.String())
		if err != nil || !found {
			return errors.Join(err, sandbox.NotFound(sandbox.KindPool, k))
		}
		poolVersion(tx, &now)
		if err := mayDelete(ctx, now.Identity(), when); err != nil {
			return err
		}
		return errors.Join(pools.Delete(tx, k.String()), poolStatuses.Delete(tx, k.String()))
	})
	if err != nil {
		return nil, err
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	p := m.pools[k]
	delete(m.pools, k)
	return p, nil
}

// WaitPool waits until claims of a pool can be made, or its template has failed.
func (m *Manager) WaitPool(ctx context.Context, k sandbox.Key) error {
	for {
		m.mu.Lock()
		p := m.pools[k]
		m.mu.Unlock()
		if p == nil {
			return sandbox.NotFound(sandbox.KindPool, k)
		}
		p.mu.Lock()
		phase, problem, changed := p.phase, p.problem, p.changed
		p.mu.Unlock()
		switch phase {
		case sandbox.PhaseReady:
			return nil
		case sandbox.PhaseFailed:
			return sandbox.Errorf(sandbox.CodeNotReady, "pool %s has failed", k.Name).Because("%s", problem)
		}
		select {
		case <-changed:
		case <-ctx.Done():
			return fmt.Errorf("wait for pool %s, which is %s: %w", k.Name, phase, ctx.Err())
		}
	}
}

// recoverPools starts the pools that the journal has.
func (m *Manager) recoverPools() error {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.db.View(func(tx *journal.Tx) error {
		return pools.Each(tx, "", func(_ string, p sandbox.Pool) error {
			earlier, err := earlierBuild(tx, p)
			m.startPool(p, earlier)
			return err
		})
	})
}

// startPool starts a pool; the caller holds the mutex. earlier is the build that the
// pool served before.
func (m *Manager) startPool(p sandbox.Pool, earlier *sandbox.Build) {
	ctx, cancel := context.WithCancel(m.ctx)
	run := &pool{
		manager: m, key: p.Key, spec: p.Spec, phase: sandbox.PhasePending, earlier: earlier,
		wake: make(chan struct{}, 1), cancel: cancel, done: make(chan struct{}), changed: make(chan struct{}), looked: make(chan struct{}),
	}
	m.pools[p.Key] = run
	m.work.Go(func() {
		defer close(run.done)
		run.run(ctx)
	})
}

// refill wakes all pools, and the builds that wait for memory: some memory may have been
// freed.
func (m *Manager) refill() {
	m.noticePools()
	m.mu.Lock()
	defer m.mu.Unlock()
	for _, b := range m.builds {
		b.notice()
	}
}

// noticePools wakes all pools to check what they lack: a build may be ready.
func (m *Manager) noticePools() {
	m.mu.Lock()
	defer m.mu.Unlock()
	for _, p := range m.pools {
		p.notice()
	}
}

func (p *pool) notice() {
	select {
	case p.wake <- struct{}{}:
	default:
	}
}

// run keeps the pool in line with its spec and its template.
func (p *pool) run(ctx context.Context) {
	looked := sync.OnceFunc(func() { close(p.looked) })
	defer looked()
	for {
		if err := p.reconcile(ctx); err != nil && ctx.Err() == nil {
			p.fail(err.Error())
		}
		looked()
		select {
		case <-p.wake:
		case <-ctx.Done():
			return
		}
	}
}

func (p *pool) fail(problem string) {
	p.mu.Lock()
	defer p.mu.Unlock()
	phase := sandbox.PhasePending
	if p.current == nil {
		phase = sandbox.PhaseFailed
	}
	p.set(phase, problem)
}

// open makes the stock of a build.
func (p *pool) open(ctx context.Context, b sandbox.Build, spec sandbox.TemplateSpec, count int) (*stock, error) {
	snap, err := snapshot.Open(p.manager.snapshotDir(b.Snapshot))
	if err != nil {
		return nil, fmt.Errorf("the snapshot of template %s: %w", b.Template.Name, err)
	}
	s := &stock{pool: p.key, build: b, spec: spec, snap: snap, manager: p.manager}
	s.policy.Store(spec.NetworkPolicy)
	s.gone, s.cancel = context.WithCancel(ctx)
	if s.held, err = heldBy(snap, ""); err == nil {
		err = p.manager.reserve(p.key.Namespace, 0, s.held...)
	}
	if err != nil {
		s.cancel()
		return nil, errors.Join(fmt.Errorf("the memory of template %s: %w", b.Template.Name, err), snap.Close())
	}
	if s.spares, err = engine.KeepSpares(p.manager.cfg.Engine, snap, poolSpares); err != nil {
		s.cancel()
		p.manager.capacity.release(p.key.Namespace, 0, s.held...)
		return nil, errors.Join(fmt.Errorf("make a pool: %w", err), snap.Close())
	}
	s.ready = engine.KeepReady(engine.ReadyConfig[*parked]{
		Count: count,
		Turn:  p.manager.turns.takeIdle,
		Fork:  func(ctx context.Context) (*parked, error) { return p.manager.forkWaiting(ctx, s) },
		Now: func(ctx context.Context, hostname string) (*parked, error) {
			return p.manager.forkClaimed(ctx, s, hostname)
		},
	})
	p.manager.work.Go(func() { p.watch(s) })
	return s, nil
}

func limitsOf(s sandbox.TemplateSpec) sandbox.Limits { return sandbox.Limits{MilliCPUs: s.MilliCPUs} }

// claim takes a machine of the newest revision that has a waiting one and fits, or
// makes one.
func (p *pool) claim(ctx context.Context, hostname string, fits func(*stock) bool) (*parked, *stock, error) {
	// A daemon that has just started already serves requests while its pools still look
	// for their snapshots.
	select {
	case <-p.looked:
	case <-ctx.Done():
		return nil, nil, ctx.Err()
	}
	from, end, err := p.source(fits)
	if err != nil {
		return nil, nil, err
	}
	defer end()
	inPool, cancel := context.WithCancel(ctx)
	defer cancel()
	defer context.AfterFunc(from.gone, cancel)()
	machine, err := from.ready.Get(inPool, hostname)
	switch {
	case err == nil:
		from.served.Store(true)
		return machine, from, nil
	case p.manager.ctx.Err() != nil:
		return nil, nil, errClosing()
	case from.gone.Err() != nil:
		err = sandbox.Errorf(sandbox.CodeNotFound, "pool %s is gone", p.key.Name).Because("it was deleted while the claim waited")
	}
	return nil, nil, err
}

// source finds the stock to claim from, and begins a claim of it.
func (p *pool) source(fits func(*stock) bool) (_ *stock, end func(), err error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.current == nil {
		e := sandbox.Errorf(sandbox.CodeNotReady, "pool %s has no sandboxes yet", p.key.Name)
		if p.phase == sandbox.PhaseFailed {
			return nil, nil, e.Because("%s", p.problem).Try("`agentrun logs template/%s` has more", p.spec.Template)
		}
		if p.problem != "" {
			e = e.Because("%s", p.problem)
		}
		return nil, nil, e.Try("`agentrun get pool %s` shows how far it is", p.key.Name)
	}
	from := p.serving(fits)
	return from, from.begin(), nil // a stock leaves the pool under the lock, and closes only then
}

func (p *pool) uses(into map[buildKey]bool) {
	p.mu.Lock()
	defer p.mu.Unlock()
	for _, s := range slices.Concat(p.older, p.closing) {
		into[keyOf(s.build)] = true
	}
	if p.current != nil {
		into[keyOf(p.current.build)] = true
	}
	if p.earlier != nil {
		into[keyOf(*p.earlier)] = true
	}
}

// close ends the pool and its waiting sandboxes.
func (p *pool) close() error {
	p.cancel()
	<-p.done
	p.mu.Lock()
	all := p.older
	if p.current != nil {
		all = append(all, p.current)
	}
	p.current, p.older = nil, nil
	p.mu.Unlock()
	var errs []error
	for _, s := range all {
		errs = append(errs, s.close())
	}
	return errors.Join(errs...)
}
