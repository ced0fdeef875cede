package servertest

import (
	"context"
	"errors"
	"time"

	"agentrun.dev/internal/sandbox"
)

// templates are made, changed, listed, built and deleted.
func (s *suite) templates() {
	name := names(s, func(t sandbox.Template) sandbox.Name { return t.Name })
	_, err := s.Service.Template(s.ctx, s.key("a"))
	s.missing("a template of none", err)
	s.missing("deleting it", s.Service.DeleteTemplate(s.ctx, s.key("a")))
	_, err = s.Service.ApplyTemplate(s.ctx, s.key("a"), sandbox.TemplateSpec{})
	s.refused("a template without an image", err, sandbox.CodeInvalid)
	first, err := s.Service.ApplyTemplate(s.ctx, s.key("a"), s.Template)
	s.must(err)
	again, err := s.Service.ApplyTemplate(s.ctx, s.key("a"), s.Template)
	s.must(err)
	other := s.Template
	other.Env = sandbox.Env{"OTHER": "yes"}
	changed, err := s.Service.ApplyTemplate(s.ctx, s.key("a"), other)
	s.must(err)
	if first.Key != s.key("a") || first.Created.IsZero() || first.Revision == "" || again.Revision != first.Revision || changed.Revision == first.Revision || changed.Spec.Env["OTHER"] != "yes" {
		s.Errorf("%+v, %+v and %+v", first, again, changed)
	}
	s.eventually(func() bool {
		builds, err := s.Service.Builds(s.ctx, changed)
		s.must(err)
		return len(builds) == 1 && builds[0].Stage == sandbox.AfterReady && builds[0].Phase == sandbox.PhaseReady && builds[0].Revision == changed.Revision
	})
	for _, n := range []sandbox.Name{"c", "b"} {
		_, err := s.Service.ApplyTemplate(s.ctx, s.key(n), s.Template)
		s.must(err)
	}
	s.listed("all", name(s.Service.Templates(s.ctx, s.namespace, sandbox.Page{})), "a", "b", "c")
	s.listed("a page", name(s.Service.Templates(s.ctx, s.namespace, sandbox.Page{Limit: 2})), "a", "b")
	s.listed("the next", name(s.Service.Templates(s.ctx, s.namespace, sandbox.Page{After: "b", Limit: 2})), "c")
	s.listed("another namespace", name(s.Service.Templates(s.ctx, s.namespace+"-2", sandbox.Page{})))
	_, err = s.Service.ApplyPool(s.ctx, s.key("pool"), sandbox.PoolSpec{Template: "a"})
	s.must(err)
	s.refused("deleting one in use", s.Service.DeleteTemplate(s.ctx, s.key("a")), sandbox.CodeConflict)
	s.must(s.Service.DeletePool(s.ctx, s.key("pool")))
	s.must(s.Service.DeleteTemplate(s.ctx, s.key("a")))
	_, err = s.Service.Template(s.ctx, s.key("a"))
	s.missing("one that was deleted", err)
}

// pools keep as many sandboxes ready as their specs say.
func (s *suite) pools() {
	_, _, err := s.Service.Pool(s.ctx, s.key("pool"))
	s.missing("a pool of none", err)
	_, err = s.Service.ApplyPool(s.ctx, s.key("pool"), sandbox.PoolSpec{Template: "none"})
	s.missing("a pool of no template", err)
	s.setUp()
	_, err = s.Service.ApplyPool(s.ctx, s.key("pool"), sandbox.PoolSpec{Template: "template", Replicas: -1})
	if err == nil {
		s.Error("a pool keeps less than nothing")
	}
	p, err := s.Service.ApplyPool(s.ctx, s.key("pool"), sandbox.PoolSpec{Template: "template", Replicas: 2})
	s.must(err)
	if p.Key != s.key("pool") || p.Spec.Replicas != 2 || p.Spec.Stage != sandbox.AfterReady || p.Created.IsZero() {
		s.Errorf("%+v", p)
	}
	s.eventually(func() bool {
		_, status, err := s.Service.Pool(s.ctx, s.key("pool"))
		s.must(err)
		return status.Ready == 2
	})
	s.listed("all", names(s, func(p sandbox.Pool) sandbox.Name { return p.Name })(s.Service.Pools(s.ctx, s.namespace, sandbox.Page{})), "pool")
	s.must(s.Service.DeletePool(s.ctx, s.key("pool")))
	s.missing("deleting it again", s.Service.DeletePool(s.ctx, s.key("pool")))
	_, _, err = s.Service.Claim(s.ctx, sandbox.ClaimRequest{Key: s.key("a"), Spec: sandbox.ClaimSpec{Pool: "pool"}})
	s.missing("a claim of no pool", err)
}

// forks have a source, children and outcomes.
func (s *suite) forks() {
	s.setUp()
	source := s.claim("a")
	ask := func(name, of sandbox.Name, n int) (sandbox.Fork, error) {
		f, _, err := s.Service.Fork(s.ctx, sandbox.ForkRequest{Key: s.key(name), Spec: sandbox.ForkSpec{Source: of, Replicas: n}})
		return f, err
	}
	f, err := ask("f", "a", 2)
	s.must(err)
	if f.Phase != sandbox.PhaseReady || f.Source != "a" || f.SourceID != source.ID || len(f.Children) != 2 {
		s.Fatalf("%+v", f)
	}
	for i, name := range []sandbox.Name{"f-1", "f-2"} {
		child, err := s.Service.Sandbox(s.ctx, s.key(name))
		s.state(child, err, sandbox.Running)
		if f.Children[i].ID != child.ID || f.Children[i].Name != name || child.Parent != source.ID || child.Fork != "f" {
			s.Errorf("%+v of %+v", child, f)
		}
	}
	got, err := s.Service.ForkOf(s.ctx, s.key("f"))
	s.must(err)
	if got.SourceID != source.ID || len(got.Children) != 2 {
		s.Errorf("%+v", got)
	}
	s.listed("all", names(s, func(f sandbox.Fork) sandbox.Name { return f.Name })(s.Service.Forks(s.ctx, s.namespace, sandbox.Page{})), "f")
	_, err = ask("f", "a", 1)
	s.refused("a name that is taken", err, sandbox.CodeExists)
	_, err = ask("g", "a", 0)
	s.refused("a fork of none", err, sandbox.CodeInvalid)
	_, err = ask("g", "nobody", 1)
	s.missing("a fork of nobody", err)
	s.must(s.Service.DeleteFork(s.ctx, s.key("f")))
	_, err = s.Service.Sandbox(s.ctx, s.key("f-1"))
	s.refused("a child of a fork that was deleted", err, sandbox.CodeEnded)
	_, err = s.Service.ForkOf(s.ctx, s.key("f"))
	s.missing("a fork that was deleted", err)
}

// checkpoints are written, and sandboxes are made of them.
func (s *suite) checkpoints() {
	s.setUp()
	source := s.claim("a")
	ask := func(name, of sandbox.Name) (sandbox.CheckpointSize, error) {
		c, _, err := s.Service.Checkpoint(s.ctx, sandbox.CheckpointRequest{Key: s.key(name), Source: of})
		return c, err
	}
	c, err := ask("c", "a")
	s.must(err)
	if c.ID == "" || c.Of.ID != source.ID || !c.Ready() || c.Stored == 0 {
		s.Errorf("%+v", c)
	}
	now, err := s.Service.Sandbox(s.ctx, s.key("a"))
	s.state(now, err, sandbox.Running)
	got, err := s.Service.CheckpointOf(s.ctx, s.key("c"))
	s.must(err)
	if got.ID != c.ID {
		s.Errorf("%+v, not %+v", got, c)
	}
	s.listed("all", names(s, func(c sandbox.CheckpointSize) sandbox.Name { return c.Name })(s.Service.Checkpoints(s.ctx, s.namespace, sandbox.Page{})), "c")
	_, err = ask("c", "a")
	s.refused("a name that is taken", err, sandbox.CodeExists)
	_, err = ask("d", "nobody")
	s.missing("a checkpoint of nobody", err)
	restore := func(name, of sandbox.Name) (sandbox.Sandbox, error) {
		made, _, err := s.Service.Restore(s.ctx, sandbox.RestoreRequest{
			Key: s.key(name), Checkpoint: of, Spec: sandbox.RestoreSpec{Metadata: map[string]string{"k": "v"}},
		})
		return made, err
	}
	made, err := restore("r", "c")
	s.state(made, err, sandbox.Running)
	if made.Parent != source.ID || made.Checkpoint != "c" || made.Metadata["k"] != "v" || made.ID == source.ID {
		s.Errorf("%+v", made)
	}
	_, err = restore("q", "none")
	s.missing("a restore of nothing", err)
	s.must(s.Service.DeleteCheckpoint(s.ctx, s.key("c")))
	_, err = s.Service.CheckpointOf(s.ctx, s.key("c"))
	s.missing("a checkpoint that was deleted", err)
}

// watch reports the objects that exist, and then changes.
func (s *suite) watch() {
	s.setUp()
	there := s.claim("a")
	ctx, cancel := context.WithCancel(s.ctx)
	defer cancel()
	events, ended := make(chan sandbox.Event, 64), make(chan error, 1)
	kinds := []sandbox.Kind{sandbox.KindSandbox}
	watch := func(r sandbox.WatchRequest) {
		go func() { ended <- s.Service.Watch(ctx, r, func(e sandbox.Event) error { events <- e; return nil }) }()
	}
	next := func(t sandbox.EventType, state sandbox.State) (e sandbox.Event) {
		s.Helper()
		select {
		case e = <-events:
			is := e.Type == t && (e.Sandbox != nil) == (state != "")
			if !is || e.Sandbox != nil && (e.Sandbox.ID != there.ID || e.Sandbox.State != state || e.Sandbox.ResourceVersion != e.ResourceVersion) {
				s.Errorf("%+v, not %s %s", e, t, state)
			}
		case err := <-ended:
			s.Fatalf("it has ended: %v", err)
		case <-s.ctx.Done():
			s.Fatal("nothing was told")
		}
		return e
	}
	watch(sandbox.WatchRequest{Namespace: s.namespace, Kinds: kinds})
	next(sandbox.EventObject, sandbox.Running)
	synced := next(sandbox.EventSynced, "")
	now, err := s.Service.Version(s.ctx)
	s.must(err)
	if now.ID == "" || now.Version < synced.ResourceVersion || there.ResourceVersion == 0 || synced.ResourceVersion < there.ResourceVersion {
		s.Errorf("at %+v, synced at %d, made at %d", now, synced.ResourceVersion, there.ResourceVersion)
	}
	_, err = s.Service.Pause(s.ctx, s.key("a"))
	s.must(err)
	paused := next(sandbox.EventObject, sandbox.Paused)
	_, err = s.Service.Kill(s.ctx, s.key("a"))
	s.must(err)
	next(sandbox.EventDeleted, sandbox.Ended)
	cancel()
	if err := <-ended; !errors.Is(err, context.Canceled) {
		s.Errorf("a watch that was cancelled: %v", err)
	}
	ctx, cancel = context.WithCancel(s.ctx)
	defer cancel()
	watch(sandbox.WatchRequest{Kinds: kinds, From: paused.ResourceVersion, State: now.ID})
	next(sandbox.EventBookmark, "")
	next(sandbox.EventDeleted, sandbox.Ended)
	enough := errors.New("enough")
	if err := s.Service.Watch(s.ctx, sandbox.WatchRequest{}, func(sandbox.Event) error { return enough }); !errors.Is(err, enough) {
		s.Errorf("a watch of all that has enough: %v", err)
	}
	for what, r := range map[string]sandbox.WatchRequest{
		"the future": {From: 1 << 60}, "another state folder": {From: paused.ResourceVersion, State: "other"},
	} {
		s.refused(what, s.Service.Watch(s.ctx, r, func(sandbox.Event) error { return nil }), sandbox.CodeOtherState)
	}
}

// cordon: a cordoned node makes nothing new, and a drained one runs nothing.
func (s *suite) cordon() {
	s.setUp()
	s.claim("a")
	n, err := s.Service.Cordon(s.ctx, false)
	s.must(err)
	if n.Cordon == nil || n.Cordon.Drain || n.Cordon.Since.IsZero() || n.ID == "" || n.State == "" {
		s.Errorf("%+v", n)
	}
	defer func() {
		n, err := s.Service.Uncordon(s.ctx)
		s.must(err)
		if n.Cordon != nil {
			s.Errorf("%+v", n.Cordon)
		}
		s.claim("c")
		_, err = s.Service.Resume(s.ctx, s.key("a"))
		s.must(err)
	}()
	_, _, err = s.Service.Claim(s.ctx, sandbox.ClaimRequest{Key: s.key("b"), Spec: sandbox.ClaimSpec{Pool: "pool"}})
	s.refused("a claim", err, sandbox.CodeCordoned)
	_, err = s.Service.Cordon(s.ctx, true)
	s.must(err)
	s.eventually(func() bool {
		got, err := s.Service.Sandbox(s.ctx, s.key("a"))
		s.must(err)
		return got.State == sandbox.Hibernated
	})
	s.eventually(func() bool {
		n, err := s.Service.Node(s.ctx)
		s.must(err)
		return n.Cordon != nil && n.Cordon.Drain && n.Cordon.Left == 0
	})
	_, err = s.Service.Resume(s.ctx, s.key("a"))
	s.refused("waking up", err, sandbox.CodeCordoned)
}

// costs are those of sandboxes, and of the node.
func (s *suite) costs() {
	s.setUp()
	made := s.claim("a")
	before := time.Now().Add(-patience)
	c, err := s.Service.Cost(s.ctx, s.key("a"))
	s.must(err)
	if c.ID != made.ID || c.Key != made.Key || c.Reserved == 0 || c.At.Before(before) {
		s.Errorf("%+v", c)
	}
	_, err = s.Service.Cost(s.ctx, s.key("nobody"))
	s.missing("the cost of nobody", err)
	s.listed("all", names(s, func(c sandbox.Cost) sandbox.Name { return c.Name })(s.Service.Costs(s.ctx, s.namespace, sandbox.Page{})), "a")
	n, err := s.Service.Node(s.ctx)
	s.must(err)
	if n.Engine != made.Engine || n.Capacity == 0 || n.Reserved == 0 || n.Sandboxes == 0 {
		s.Errorf("%+v", n)
	}
}
