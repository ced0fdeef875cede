package servertest

import (
	"bytes"
	"fmt"
	"slices"
	"time"

	"agentrun.dev/internal/guest/guestrpc"
	"agentrun.dev/internal/sandbox"
)

// sandboxes are claimed, do what they are told, and end.
func (s *suite) sandboxes() {
	s.setUp()
	life := sandbox.Lifetime{Timeout: time.Hour, OnTimeout: sandbox.TimeoutHibernate}
	made, _, err := s.Service.Claim(s.ctx, sandbox.ClaimRequest{
		Key: s.key("a"), Spec: sandbox.ClaimSpec{Pool: "pool", Metadata: map[string]string{"k": "v"}, Lifetime: life},
	})
	s.state(made, err, sandbox.Running)
	if made.Pool != "pool" || made.Template != "template" || made.Revision == "" || made.Engine == "" || made.Metadata["k"] != "v" || made.Lifetime != life || made.Memory == 0 || made.Created.IsZero() {
		s.Errorf("%+v", made)
	}
	claim := func(name sandbox.Name, spec sandbox.ClaimSpec) error {
		_, _, err := s.Service.Claim(s.ctx, sandbox.ClaimRequest{Key: s.key(name), Spec: spec})
		return err
	}
	s.refused("a name that is taken", claim("a", sandbox.ClaimSpec{Pool: "pool"}), sandbox.CodeExists)
	s.refused("a time that is negative", claim("b", sandbox.ClaimSpec{Pool: "pool", Lifetime: sandbox.Lifetime{Timeout: -1}}), sandbox.CodeInvalid)
	s.missing("a claim of no pool", claim("b", sandbox.ClaimSpec{Pool: "none"}))
	got, err := s.Service.Sandbox(s.ctx, s.key("a"))
	s.state(got, err, sandbox.Running)
	if got.ID != made.ID {
		s.Errorf("%+v, not %+v", got, made)
	}
	got, err = s.Service.Pause(s.ctx, s.key("a"))
	s.state(got, err, sandbox.Paused)
	got, err = s.Service.Resume(s.ctx, s.key("a"))
	s.state(got, err, sandbox.Running)
	got, err = s.Service.Hibernate(s.ctx, s.key("a"))
	s.state(got, err, sandbox.Hibernated)
	got, err = s.Service.Extend(s.ctx, s.key("a"), 0)
	s.state(got, err, sandbox.Hibernated)
	if got.Timeout != 0 {
		s.Errorf("a timeout of none is %v", got.Timeout)
	}
	_, err = s.Service.Extend(s.ctx, s.key("a"), -time.Second)
	s.refused("a timeout that is negative", err, sandbox.CodeInvalid)
	_, err = s.Service.Pause(s.ctx, s.key("nobody"))
	s.missing("pausing nobody", err)
	got, err = s.Service.Kill(s.ctx, s.key("a"))
	s.state(got, err, sandbox.Ended)
	if got.Reason != sandbox.ReasonKilled || got.Ended.IsZero() {
		s.Errorf("%+v", got)
	}
	_, err = s.Service.Sandbox(s.ctx, s.key("a"))
	s.refused("one that has ended", err, sandbox.CodeEnded)
	_, err = s.Service.Kill(s.ctx, s.key("a"))
	s.refused("ending it again", err, sandbox.CodeEnded)
	if again := s.claim("a"); again.ID == made.ID { // its name is free
		s.Errorf("%+v has the id of one that has ended", again)
	}
}

// lists of sandboxes have pages, and ended ones only if they are asked for.
func (s *suite) lists() {
	s.setUp()
	name := names(s, func(one sandbox.Sandbox) sandbox.Name { return one.Name })
	made := map[sandbox.Name]sandbox.Sandbox{}
	for _, n := range []sandbox.Name{"b", "c", "a"} {
		made[n] = s.claim(n)
	}
	_, err := s.Service.Kill(s.ctx, s.key("b"))
	s.must(err)
	s.listed("all", name(s.Service.Sandboxes(s.ctx, sandbox.SandboxesRequest{Namespace: s.namespace})), "a", "c")
	s.listed("ended ones, too", name(s.Service.Sandboxes(s.ctx, sandbox.SandboxesRequest{Namespace: s.namespace, Ended: true})), "a", "b", "c")
	s.listed("a page", name(s.Service.Sandboxes(s.ctx, sandbox.SandboxesRequest{Namespace: s.namespace, Ended: true, Page: sandbox.Page{Limit: 1}})), "a")
	s.listed("the next", name(s.Service.Sandboxes(s.ctx, sandbox.SandboxesRequest{
		Namespace: s.namespace, Ended: true, Page: sandbox.Page{After: made["a"].Position(), Limit: 1},
	})), "b")
	s.listed("the largest page", name(s.Service.Sandboxes(s.ctx, sandbox.SandboxesRequest{Namespace: s.namespace, Page: sandbox.Page{Limit: 1 << 20}})), "a", "c")
	s.listed("another namespace", name(s.Service.Sandboxes(s.ctx, sandbox.SandboxesRequest{Namespace: s.namespace + "-2"})))
}

// byID: ids name sandboxes that have not ended.
func (s *suite) byID() {
	s.setUp()
	made := s.claim("a")
	got, err := s.Service.SandboxByID(s.ctx, made.ID)
	s.state(got, err, sandbox.Running)
	if got.Key != made.Key {
		s.Errorf("%+v, not %+v", got, made)
	}
	_, err = s.Service.Kill(s.ctx, s.key("a"))
	s.must(err)
	_, err = s.Service.SandboxByID(s.ctx, made.ID)
	s.missing("the id of one that has ended", err)
}

// sessions reach into a sandbox, and wake one that sleeps.
func (s *suite) sessions() {
	s.setUp()
	made := s.claim("a")
	run := func(command string) string {
		s.Helper()
		u, err := s.Service.Use(s.ctx, s.key("a"))
		s.must(err)
		defer u.Close()
		if r := u.Record(); r.ID != made.ID || r.State != sandbox.Running {
			s.Errorf("%+v", r)
		}
		var out bytes.Buffer
		st, err := u.Agent().Run(s.ctx, guestrpc.ExecRequest{Argv: []string{"/bin/sh", "-c", command}}, nil, &out, nil)
		s.must(err)
		if st.Code != 0 {
			s.Errorf("%q exited with %d", command, st.Code)
		}
		return out.String()
	}
	if got := run("echo inside"); got != "inside\n" {
		s.Errorf("%q", got)
	}
	_, err := s.Service.Hibernate(s.ctx, s.key("a"))
	s.must(err)
	if got := run("echo awake"); got != "awake\n" {
		s.Errorf("%q", got)
	}
	u, err := s.Service.Use(s.ctx, s.key("a"))
	s.must(err)
	_, err = u.Stats(s.ctx)
	s.must(err)
	_, err = u.Connect(s.ctx, 1)
	s.refused("a port on which nothing listens", err, sandbox.CodePortClosed)
	u.Close()
	_, err = s.Service.Use(s.ctx, s.key("nobody"))
	s.missing("using nobody", err)
	_, err = s.Service.Kill(s.ctx, s.key("a"))
	s.must(err)
	_, err = s.Service.Use(s.ctx, s.key("a"))
	s.refused("using one that has ended", err, sandbox.CodeEnded)
}

// logs are those of builds, until they have ended.
func (s *suite) logs() {
	var out bytes.Buffer
	ask := func(follow bool) error {
		return s.Service.CopyBuildLog(s.ctx, sandbox.BuildLogRequest{Key: s.key("template"), Stage: sandbox.AfterReady, Follow: follow}, &out)
	}
	s.missing("the log of nothing", ask(true))
	s.setUp()
	s.must(ask(true))
	followed := out.String()
	out.Reset()
	s.must(ask(false))
	if out.String() != followed {
		s.Errorf("%q, and followed %q", out.String(), followed)
	}
}

// secrets have keys, and no answer shows their values.
func (s *suite) secrets() {
	_, err := s.Service.ApplySecret(s.ctx, s.key("secret"), sandbox.SecretData{})
	s.refused("a secret of nothing", err, sandbox.CodeInvalid)
	_, err = s.Service.ApplySecret(s.ctx, s.key("secret"), sandbox.SecretData{"A": []byte("1"), "B": []byte("2")})
	s.must(err)
	set, err := s.Service.SetSecret(s.ctx, s.key("secret"), sandbox.SecretData{"C": []byte("3")})
	s.must(err)
	got, err := s.Service.Secret(s.ctx, s.key("secret"))
	s.must(err)
	if want := []string{"A", "B", "C"}; !slices.Equal(set.Keys, want) || !slices.Equal(got.Keys, want) {
		s.Errorf("%v and %v, not %v", set.Keys, got.Keys, want)
	}
	s.listed("all", names(s, func(one sandbox.Secret) sandbox.Name { return one.Name })(s.Service.Secrets(s.ctx, s.namespace, sandbox.Page{})), "secret")
	s.must(s.Service.DeleteSecret(s.ctx, s.key("secret")))
	_, err = s.Service.Secret(s.ctx, s.key("secret"))
	s.missing("a secret that was deleted", err)
}

// quotas bound a namespace.
func (s *suite) quotas() {
	s.setUp()
	s.claim("a")
	_, err := s.Service.SetQuota(s.ctx, sandbox.Quota{Namespace: s.namespace, Sandboxes: -1})
	s.refused("a quota that is negative", err, sandbox.CodeInvalid)
	q, err := s.Service.SetQuota(s.ctx, sandbox.Quota{Namespace: s.namespace, Sandboxes: 1})
	s.must(err)
	if q.Sandboxes != 1 || q.UsedSandboxes != 1 {
		s.Errorf("%+v", q)
	}
	_, _, err = s.Service.Claim(s.ctx, sandbox.ClaimRequest{Key: s.key("b"), Spec: sandbox.ClaimSpec{Pool: "pool"}})
	s.refused("a claim beyond the quota", err, sandbox.CodeCapacity)
	_, err = s.Service.SetQuota(s.ctx, sandbox.Quota{Namespace: s.namespace})
	s.must(err)
	s.claim("b")
	if q, err = s.Service.QuotaOf(s.ctx, s.namespace); err != nil || q.Sandboxes != 0 || q.UsedSandboxes != 2 {
		s.Errorf("%+v, %v", q, err)
	}
}

// identity: a repeated request gets the answer of the first one, under any
// name.
func (s *suite) identity() {
	s.setUp()
	var made []sandbox.Sandbox
	for i := range 2 {
		one, replayed, err := s.Service.Claim(s.ctx, sandbox.ClaimRequest{
			Key: s.key(sandbox.Name(fmt.Sprintf("a%d", i))), Spec: sandbox.ClaimSpec{Pool: "pool"}, Once: new(s.once("body")),
		})
		s.must(err)
		if made = append(made, one); replayed != (i == 1) || one.ID != made[0].ID {
			s.Errorf("%+v, replayed %t", one, replayed)
		}
	}
	_, _, err := s.Service.Claim(s.ctx, sandbox.ClaimRequest{Key: s.key("b"), Spec: sandbox.ClaimSpec{Pool: "pool"}, Once: new(s.once("other"))})
	s.refused("another request under the same key", err, sandbox.CodeConflict)
}
