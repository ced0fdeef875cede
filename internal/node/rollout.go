package node

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"time"

	enginepool "agentrun.dev/internal/engine/pool"
	"agentrun.dev/internal/node/journal"
	"agentrun.dev/internal/sandbox"
)

// reconcile brings the pool nearer to its spec and its template. It never waits: when a
// missing build, or memory, is there, that wakes the pool again, as do all changes in the
// meantime.
func (p *pool) reconcile(ctx context.Context) error {
	p.mu.Lock()
	spec := p.spec
	p.mu.Unlock()
	t, err := p.manager.Template(ctx, sandbox.Key{Namespace: p.key.Namespace, Name: spec.Template})
	if err != nil {
		return err
	}
	p.reopen(ctx, t)
	k := buildKey{Template: t.Key, Revision: t.Revision, Stage: spec.Stage}
	if !p.has(k) {
		// The stocks that serve get the size of the spec, even if the new revision never
		// becomes ready.
		p.step(spec, false)
		b, err := p.ready(ctx, t, k)
		if err != nil || b == nil {
			return err
		}
		p.step(spec, true) // makes room first for the new revision
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

// ready returns the build that the pool should serve. If it returns neither a build nor an
// error, the build is being made, and its end wakes the pool.
func (p *pool) ready(_ context.Context, t sandbox.Template, k buildKey) (*sandbox.Build, error) {
	if err := p.manager.ensureBuild(t, k.Stage); err != nil { // for example until another build ends
		p.mu.Lock()
		defer p.mu.Unlock()
		p.set(sandbox.PhasePending, fmt.Sprintf("template %s: %v", t.Name, err))
		return nil, nil
	}
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
	problem := strings.Join(slices.DeleteFunc([]string{p.whyAnew(t), b.Problem}, func(s string) bool { return s == "" }), "; ")
	if problem != "" {
		problem = fmt.Sprintf("template %s: %s", t.Name, problem)
		if !b.Next.IsZero() {
			problem += fmt.Sprintf("; it is tried again at %s", b.Next.Format(time.RFC3339))
		}
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	p.set(sandbox.PhaseBuilding, problem)
	return nil, nil
}

// whyAnew says why the snapshot of an unchanged template is made again. It is empty if the
// snapshot is not made again.
func (p *pool) whyAnew(t sandbox.Template) string {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.current == nil || p.current.build.Revision != t.Revision || p.current.build.Outdated == "" {
		return ""
	}
	return "its snapshot is made anew: " + p.current.build.Outdated
}

// earlierBuild returns the newest build of another revision of a pool's template, or of the
// same revision by another AgentRun. It exists until a rollout has replaced it. It returns
// nil if there is no such build.
func earlierBuild(tx *journal.Tx, p sandbox.Pool) (newest *sandbox.Build, err error) {
	template := sandbox.Key{Namespace: p.Namespace, Name: p.Spec.Template}
	t, _, err := templates.Get(tx, template.String())
	if err != nil {
		return nil, err
	}
	err = builds.Each(tx, template.String()+"/", func(_ string, b sandbox.Build) error {
		if superseded(b, t) && b.Stage == p.Spec.Stage && b.Spec != nil && (newest == nil || newest.Finished.Before(b.Finished)) {
			newest = &b
		}
		return nil
	})
	return newest, err
}

// reopen opens the stock that an earlier daemon was replacing when it ended. That stock
// serves until the current one does. If it cannot be opened, each later change tries it
// again.
func (p *pool) reopen(ctx context.Context, t sandbox.Template) {
	m := p.manager
	p.mu.Lock()
	earlier := p.earlier
	if earlier != nil && p.current != nil && p.current.proven() {
		p.earlier = nil
		p.mu.Unlock()
		m.collect()
		return
	}
	p.mu.Unlock()
	if earlier == nil {
		return
	}
	spec := *earlier.Spec
	spec.NetworkPolicy = t.Spec.NetworkPolicy // the policy changes without a build
	s, err := p.open(ctx, *earlier, spec, 0)
	if err != nil {
		m.cfg.Log.Warn("an earlier revision does not serve", "pool", p.key, "error", err)
		return
	}
	s.served.Store(true) // a stock that has never served would have been replaced
	p.mu.Lock()
	defer p.mu.Unlock()
	p.earlier = nil
	if p.current == nil {
		p.current = s
	} else {
		p.older = append(p.older, s)
	}
}

// has reports whether the pool's current stock is of a build. If the template has come
// back to an earlier revision whose stock is still there, has makes that stock the
// current one.
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

// follow makes a stock the current one. The previous one keeps serving if one of its
// machines ever became ready, or if no older stock is left. The caller holds the lock.
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

// watch wakes the pool when more machines of a stock wait than ever before. It reports each
// change in their number or their last error to the watchers of the pool.
func (p *pool) watch(s *stock) {
	var last enginepool.Stats
	for {
		if s.ready.WaitUntil(s.gone, func(now enginepool.Stats) bool {
			changed := now.Waiting != last.Waiting || now.LastError != last.LastError
			last = now
			return changed
		}) != nil {
			return // the stock closes
		}
		p.manager.noticeStatus()
		if waiting := int64(last.Waiting); waiting > s.reached.Load() {
			s.reached.Store(waiting)
			p.notice()
		}
	}
}

// share divides the waiting machines between earlier revisions and the current one, of
// which reached have waited already. Together there are never more than Replicas and
// MaxSurge. As many are ready as before, except for MaxUnavailable.
func share(spec sandbox.PoolSpec, reached int) (older, current int) {
	surge, unavailable := spec.Rollout()
	older = max(0, spec.Replicas-unavailable-reached)
	return older, max(0, min(spec.Replicas, spec.Replicas+surge-older))
}

// step sets the sizes of the stocks, and ends those that are no longer needed. With next
// it makes room for a stock that is not there yet.
func (p *pool) step(spec sandbox.PoolSpec, next bool) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.current == nil {
		return
	}
	if p.manager.draining() {
		for _, s := range append(slices.Clone(p.older), p.current) {
			s.ready.Resize(0)
		}
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

// sizeOlder sets the total size of the stocks of earlier revisions: the older ones keep the
// machines that they have, and the newest gets the rest. The caller holds the lock.
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

// end closes a stock that has left the pool, in the background: a claim that is under way
// may take as long as a ready check. The caller holds the lock.
func (p *pool) end(s *stock) {
	m := p.manager
	p.closing = append(p.closing, s)
	m.work.Go(func() {
		err := s.close()
		p.mu.Lock()
		p.closing = slices.DeleteFunc(p.closing, func(other *stock) bool { return other == s })
		p.mu.Unlock()
		if err != nil && m.ctx.Err() == nil {
			m.cfg.Log.Error("end the sandboxes of an earlier revision", "pool", p.key, "error", err)
		}
		m.collect()
	})
}

// serving returns the stock to claim from. That is the newest revision with a waiting machine,
// or else the newest of which a machine has ever become ready. Earlier revisions have to fit.
// The caller holds the lock.
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

// status describes the pool for its users.
func (p *pool) status() sandbox.PoolStatus {
	p.mu.Lock()
	defer p.mu.Unlock()
	st := sandbox.PoolStatus{Phase: p.phase, Problem: p.problem}
	if p.current == nil {
		return st
	}
	now := p.current.ready.Stats()
	st.Ready = now.Waiting
	if p.phase == sandbox.PhaseReady { // the current stock is of the template's revision
		st.Snapshots = now.Waiting
	}
	earlier := 0
	for _, s := range p.older {
		earlier += s.ready.Stats().Waiting
	}
	st.Ready += earlier
	cordoned, _ := p.manager.cordon.get()
	switch {
	case st.Problem != "":
	case cordoned != nil && st.Ready < p.spec.Replicas:
		st.Problem = "the node is cordoned: pools are not filled"
	case len(p.older) > 0:
		what, before := "revision "+p.current.build.Revision, "earlier revisions"
		if p.older[len(p.older)-1].build.Revision == p.current.build.Revision {
			what, before = "a new snapshot", "the one before"
		}
		st.Problem = fmt.Sprintf("%s is being rolled out: %d of %d sandboxes are of it, %d of %s serve until then",
			what, now.Waiting, p.spec.Replicas, earlier, before)
		if now.LastError != "" {
			st.Problem += "; the last one of it failed: " + now.LastError
		}
	case now.Waiting < p.spec.Replicas:
		st.Problem = now.LastError
	}
	return st
}
