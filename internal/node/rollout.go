package node

import (
	"context"
	"errors"
	"fmt"
	"slices"

	enginepool "agentrun.dev/internal/engine/pool"
	"agentrun.dev/internal/sandbox"
)

// reconcile brings the pool nearer to its spec and its template. It waits for nothing: what
// it lacks wakes the pool when it is there, and so does whatever changes meanwhile.
func (p *pool) reconcile(ctx context.Context) error {
	p.mu.Lock()
	spec := p.spec
	p.mu.Unlock()
	t, err := p.manager.Template(ctx, sandbox.Key{Namespace: p.key.Namespace, Name: spec.Template})
	if err != nil {
		return err
	}
	k := buildKey{t.Key, t.Revision, spec.Stage}
	if !p.has(k) {
		// What serves is as large as the spec says, whatever becomes of the new revision.
		p.step(spec, false)
		b, err := p.ready(ctx, t, k)
		if err != nil || b == nil {
			return err
		}
		p.step(spec, true) // first the room that the new revision may have
		next, err := p.open(ctx, *b, t.Spec, 0)
		if err != nil {
			return err
		}
		p.replace(next)
	}
	p.mu.Lock()
	p.current.policy.Store(t.Spec.NetworkPolicy)
	p.set(sandbox.PhaseReady, "")
	p.mu.Unlock()
	p.step(spec, false)
	return nil
}

// ready returns the build that the pool is to be of. Without one and without an error it is
// being made, and its end wakes the pool.
func (p *pool) ready(_ context.Context, t sandbox.Template, k buildKey) (*sandbox.Build, error) {
	p.manager.ensureBuild(t, k.Stage)
	b, err := p.manager.build(k)
	switch {
	case sandbox.HasCode(err, sandbox.CodeNotFound):
		b = sandbox.Build{Phase: sandbox.PhaseBuilding}
	case err != nil:
		return nil, err
	case b.Phase == sandbox.PhaseReady:
		return &b, nil
	case b.Phase == sandbox.PhaseFailed:
		return nil, fmt.Errorf("template %s: %s", t.Name, b.Problem)
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	p.set(sandbox.PhaseBuilding, b.Problem)
	return nil, nil
}

// has reports whether the pool's current stock is of a build. One of an earlier revision
// that the template has come back to becomes it.
func (p *pool) has(k buildKey) bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.current == nil || keyOf(p.current.build) == k {
		return p.current != nil
	}
	i := slices.IndexFunc(p.older, func(s *stock) bool { return keyOf(s.build) == k })
	if i < 0 {
		return false
	}
	back := p.older[i]
	p.older = slices.Delete(p.older, i, i+1)
	p.follow(back)
	return true
}

func (p *pool) replace(next *stock) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.follow(next)
}

// follow makes a stock the current one. The one before it serves on if it ever has; the
// lock must be held.
func (p *pool) follow(next *stock) {
	if last := p.current; last != nil && (last.proven() || len(p.older) == 0) {
		p.older = append(p.older, last)
	} else if last != nil {
		p.end(last)
	}
	p.current = next
}

// proven reports whether a machine of the stock has become ready.
func (s *stock) proven() bool { return s.served.Load() || s.reached.Load() > 0 }

// watch wakes the pool when more of a stock wait than ever before.
func (p *pool) watch(s *stock) {
	for {
		most := s.reached.Load()
		var waiting int64
		if s.ready.WaitUntil(s.gone, func(now enginepool.Stats) bool {
			waiting = int64(now.Waiting)
			return waiting > most
		}) != nil {
			return // it closes
		}
		s.reached.Store(waiting)
		p.notice()
	}
}

// share is how many machines of earlier revisions and of the current one are to wait, of
// which reached have waited. There are never more than Replicas and MaxSurge together, and
// as many ready as before but for MaxUnavailable.
func share(spec sandbox.PoolSpec, reached int) (older, current int) {
	surge, unavailable := spec.Rollout()
	older = max(0, spec.Replicas-unavailable-reached)
	return older, max(0, min(spec.Replicas, spec.Replicas+surge-older))
}

// step sizes the stocks, and ends those that are needed no longer. With next there is room
// to be made for a stock that is not there yet.
func (p *pool) step(spec sandbox.PoolSpec, next bool) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.current == nil {
		return
	}
	if len(p.older) == 0 {
		count := spec.Replicas
		if next {
			count, _ = share(spec, 0)
		}
		p.current.ready.Resize(count)
		return
	}
	rest, count := share(spec, int(p.current.reached.Load()))
	if next {
		count = min(count, int(p.current.reached.Load()))
	}
	if took := p.current.proven() || spec.Replicas == 0; rest == 0 && took && !next {
		for _, s := range p.older {
			p.end(s)
		}
		p.older = nil
		p.current.ready.Resize(spec.Replicas)
		return
	}
	p.current.ready.Resize(count)
	p.sizeOlder(rest)
}

// sizeOlder has the stocks of earlier revisions keep so many together: the newest those that
// the others do not have. The lock must be held.
func (p *pool) sizeOlder(count int) {
	last := len(p.older) - 1
	var kept []*stock
	for _, s := range p.older[:last] {
		has := min(count, s.ready.Stats().Waiting)
		if count -= has; has == 0 {
			p.end(s)
			continue
		}
		s.ready.Resize(has)
		kept = append(kept, s)
	}
	p.older[last].ready.Resize(count)
	kept = append(kept, p.older[last])
	p.older = kept
}

// end closes a stock that has left the pool, in the background: a claim under way may take
// as long as a ready check. The lock must be held.
func (p *pool) end(s *stock) {
	m := p.manager
	p.closing = append(p.closing, s)
	m.work.Go(func() {
		err := s.close()
		p.mu.Lock()
		p.closing = slices.DeleteFunc(p.closing, func(other *stock) bool { return other == s })
		p.mu.Unlock()
		if err = errors.Join(err, m.collectBuilds()); err != nil && m.ctx.Err() == nil {
			m.cfg.Log.Error("end the sandboxes of an earlier revision", "pool", p.key, "error", err)
		}
	})
}

// serving is the stock to claim of: the newest revision that has a machine waiting, or else
// the newest of which a machine has become ready. Earlier revisions have to fit. The lock must
// be held.
func (p *pool) serving(fits func(*stock) bool) *stock {
	if p.current.ready.Stats().Waiting > 0 {
		return p.current
	}
	newestFirst := slices.Clone(p.older)
	slices.Reverse(newestFirst)
	for _, s := range newestFirst {
		if s.ready.Stats().Waiting > 0 && fits(s) {
			return s
		}
	}
	if p.current.proven() {
		return p.current
	}
	for _, s := range newestFirst {
		if s.proven() && fits(s) {
			return s
		}
	}
	return p.current
}

// status is what the pool has.
func (p *pool) status() sandbox.PoolStatus {
	p.mu.Lock()
	defer p.mu.Unlock()
	st := sandbox.PoolStatus{Phase: p.phase, Problem: p.problem}
	if p.current == nil {
		return st
	}
	now := p.current.ready.Stats()
	st.Ready = now.Waiting
	if p.phase == sandbox.PhaseReady { // the current one is of the template's revision
		st.Snapshots = now.Waiting
	}
	earlier := 0
	for _, s := range p.older {
		earlier += s.ready.Stats().Waiting
	}
	st.Ready += earlier
	switch {
	case st.Problem != "":
	case len(p.older) > 0:
		st.Problem = fmt.Sprintf("revision %s is being rolled out: %d of %d sandboxes are of it, %d of earlier revisions serve until then",
			p.current.build.Revision, now.Waiting, p.spec.Replicas, earlier)
		if now.LastError != "" {
			st.Problem += "; the last one of it failed: " + now.LastError
		}
	case now.Waiting < p.spec.Replicas:
		st.Problem = now.LastError
	}
	return st
}
