package servertest

import (
	"time"

	"agentrun.dev/internal/sandbox"
)

// preconditions: an object that does not meet them is left alone.
func (s *suite) preconditions() {
	s.setUp()
	before := s.claim("a")
	_, err := s.Service.Kill(s.ctx, s.key("a"), sandbox.Precondition{ID: before.ID, Version: before.ResourceVersion})
	s.must(err)
	now := s.claim("a")
	_, err = s.Service.Kill(s.ctx, s.key("a"), sandbox.Precondition{ID: before.ID})
	s.refused("ending the one before again", err, sandbox.CodeEnded)
	_, err = s.Service.Pause(s.ctx, s.key("a"), sandbox.Precondition{ID: now.ID}, sandbox.Precondition{Version: before.ResourceVersion})
	s.refused("another version", err, sandbox.CodeConflict)
	_, err = s.Service.Hibernate(s.ctx, s.key("a"), sandbox.Precondition{ID: now.ID}, sandbox.Precondition{ID: before.ID})
	if err == nil {
		s.Error("preconditions that contradict each other hold")
	}
	_, _, err = s.Service.Fork(s.ctx, sandbox.ForkRequest{Key: s.key("f"), Spec: sandbox.ForkSpec{Source: "a", Replicas: 1}, When: sandbox.Precondition{Owner: "nobody"}})
	s.refused("another owner", err, sandbox.CodeConflict)
	got, err := s.Service.Sandbox(s.ctx, s.key("a"))
	s.state(got, err, sandbox.Running)
	got, err = s.Service.Pause(s.ctx, s.key("a"), sandbox.Precondition{ID: now.ID, Version: got.ResourceVersion})
	s.state(got, err, sandbox.Paused)
	s.refused("deleting a pool of another owner", s.Service.DeletePool(s.ctx, s.key("pool"), sandbox.Precondition{Owner: "nobody"}), sandbox.CodeConflict)
}

// endTimes are kept, moved, and refused when they have passed.
func (s *suite) endTimes() {
	s.setUp()
	at := time.Now().Add(time.Hour).UTC().Truncate(time.Second)
	spec := sandbox.ClaimSpec{Pool: "pool", Lifetime: sandbox.Lifetime{Expires: at}}
	made, _, err := s.Service.Claim(s.ctx, sandbox.ClaimRequest{Key: s.key("a"), Spec: spec})
	s.must(err)
	moved, err := s.Service.SetExpiry(s.ctx, s.key("a"), at.Add(time.Hour), sandbox.Precondition{ID: made.ID})
	s.must(err)
	if !made.Expires.Equal(at) || !moved.Expires.Equal(at.Add(time.Hour)) {
		s.Errorf("%v and %v, not %v", made.Expires, moved.Expires, at)
	}
	_, err = s.Service.SetExpiry(s.ctx, s.key("a"), time.Unix(1, 0))
	s.refused("a time that has passed", err, sandbox.CodeInvalid)
	_, err = s.Service.SetExpiry(s.ctx, s.key("a"), time.Now().Add(100*time.Millisecond))
	s.must(err)
	s.eventually(func() bool {
		_, err := s.Service.Sandbox(s.ctx, s.key("a"))
		return sandbox.HasCode(err, sandbox.CodeEnded)
	})
}

// owners have one sandbox each, and their objects.
func (s *suite) owners() {
	s.setUp()
	r := sandbox.ClaimRequest{
		Key: s.key("a"), Owner: "owner", Spec: sandbox.ClaimSpec{Pool: "pool"},
		Token: sandbox.HashToken("ars_" + string(s.namespace)), Values: sandbox.SecretData{"KEY": []byte("value")},
	}
	if !s.Owns {
		_, _, err := s.Service.Claim(s.ctx, r)
		s.refused("an owner", err, sandbox.CodeDenied)
		return
	}
	made, replayed, err := s.Service.Claim(s.ctx, r)
	s.must(err)
	again, replayedNow, err := s.Service.Claim(s.ctx, r)
	s.must(err)
	if replayed || !replayedNow || again.ID != made.ID || again.Owner != "owner" || again.ResourceVersion == 0 {
		s.Errorf("%+v, replayed %t; then %+v, replayed %t", made, replayed, again, replayedNow)
	}
	other := r
	other.Spec.Metadata = map[string]string{"k": "v"}
	_, _, err = s.Service.Claim(s.ctx, other)
	s.refused("a claim that differs", err, sandbox.CodeConflict)
	release := sandbox.ReleaseRequest{Namespace: s.namespace, Owner: "owner"}
	s.refused("releasing one that runs", s.Service.ReleaseOwner(s.ctx, release), sandbox.CodeConflict)
	_, err = s.Service.SetToken(s.ctx, s.key("a"), sandbox.HashToken("ars_2_"+string(s.namespace)), sandbox.Precondition{Owner: "owner"})
	s.must(err)
	_, err = s.Service.Kill(s.ctx, s.key("a"), sandbox.Precondition{Owner: "owner"})
	s.must(err)
	last, replayed, err := s.Service.Claim(s.ctx, r)
	s.state(last, err, sandbox.Ended)
	if !replayed || last.ID != made.ID || last.Reason != sandbox.ReasonKilled {
		s.Errorf("%+v", last)
	}
	s.must(s.Service.ReleaseOwner(s.ctx, release))
	s.missing("releasing it again", s.Service.ReleaseOwner(s.ctx, release))
	t, err := s.Service.ApplyTemplate(s.ctx, s.key("owned"), s.Template, "template")
	s.must(err)
	p, err := s.Service.ApplyPool(s.ctx, s.key("owned"), sandbox.PoolSpec{Template: "owned"}, "pool")
	s.must(err)
	if t.Owner != "template" || p.Owner != "pool" {
		s.Errorf("%+v and %+v", t, p)
	}
	_, err = s.Service.ApplyPool(s.ctx, s.key("owned"), sandbox.PoolSpec{Template: "owned"}, "another")
	s.refused("another owner", err, sandbox.CodeConflict)
	s.must(s.Service.DeletePool(s.ctx, s.key("owned"), sandbox.Precondition{Owner: "pool"}))
}

// manyForks: children have the names that they are given, all or none, and a checkpoint of the
// same instant.
func (s *suite) manyForks() {
	s.setUp()
	s.claim("a")
	ask := func(name sandbox.Name, spec sandbox.ForkSpec) (sandbox.Fork, error) {
		spec.Source, spec.Replicas = "a", 2
		f, _, err := s.Service.Fork(s.ctx, sandbox.ForkRequest{Key: s.key(name), Spec: spec})
		return f, err
	}
	f, err := ask("f", sandbox.ForkSpec{Atomic: true, Checkpoint: "c", Children: []sandbox.ForkChild{{Name: "x"}, {Token: sandbox.HashToken("ars_f2_" + string(s.namespace))}}})
	s.must(err)
	if f.Phase != sandbox.PhaseReady || f.Checkpoint != "c" || len(f.Children) != 2 || f.Children[0].Name != "x" || f.Children[1].Name != "f-2" {
		s.Fatalf("%+v", f)
	}
	for _, c := range f.Children {
		child, err := s.Service.Sandbox(s.ctx, s.key(c.Name))
		s.state(child, err, sandbox.Running)
		if child.ID != c.ID || child.Fork != "f" {
			s.Errorf("%+v of %+v", child, f)
		}
	}
	_, err = s.Service.CheckpointOf(s.ctx, s.key("c"))
	s.must(err)
	_, err = ask("g", sandbox.ForkSpec{Atomic: true, Children: []sandbox.ForkChild{{Name: "y"}, {Name: "x"}}})
	s.refused("an atomic fork with a name that is taken", err, sandbox.CodeExists)
	_, err = s.Service.Sandbox(s.ctx, s.key("y"))
	s.missing("a child of it", err)
	_, err = s.Service.ForkOf(s.ctx, s.key("g"))
	s.missing("that fork", err)
	_, err = ask("g", sandbox.ForkSpec{Children: []sandbox.ForkChild{{Name: "y"}}})
	s.refused("fewer children than replicas", err, sandbox.CodeInvalid)
	owned := sandbox.ForkSpec{Children: []sandbox.ForkChild{{Owner: "1"}, {Owner: "2"}}}
	f, err = ask("g", owned)
	if !s.Owns {
		s.refused("owners", err, sandbox.CodeDenied)
		return
	}
	s.must(err)
	again, replayed, err := s.Service.Fork(s.ctx, sandbox.ForkRequest{Key: s.key("g"), Spec: sandbox.ForkSpec{Source: "a", Replicas: 2, Children: owned.Children}})
	s.must(err)
	if !replayed || f.Children[1].Owner != "2" || again.Children[1] != f.Children[1] {
		s.Errorf("%+v, then %+v, replayed %t", f, again, replayed)
	}
}

// tokens are of one sandbox, until they are replaced.
func (s *suite) tokens() {
	s.setUp()
	made := s.claim("a")
	got, until, err := s.Service.SandboxOfToken(s.ctx, sandbox.Token{Derived: made.ID})
	s.state(got, err, sandbox.Running)
	hash := sandbox.HashToken("ars_tokens")
	_, err = s.Service.SetToken(s.ctx, s.key("a"), hash)
	s.must(err)
	select {
	case <-until.Done():
	case <-s.ctx.Done():
		s.Error("the token before is good still")
	}
	_, _, err = s.Service.SandboxOfToken(s.ctx, sandbox.Token{Derived: made.ID})
	s.missing("the token before", err)
	got, _, err = s.Service.SandboxOfToken(s.ctx, sandbox.Token{Hash: hash})
	s.must(err)
	if got.ID != made.ID {
		s.Errorf("%+v", got)
	}
}
