package node

import (
	"bytes"
	"context"
	"fmt"
	"io"
	"strings"
	"sync"
	"testing"
	"testing/synctest"

	"agentrun.dev/internal/guest/guestrpc"
	"agentrun.dev/internal/node/nodetest"
	"agentrun.dev/internal/sandbox"
	"agentrun.dev/internal/storage/seal/sealtest"
)

// wantToken requires whose a token is; empty is nobody's.
func wantToken(t *testing.T, m *Manager, token sandbox.Token, id sandbox.ID) context.Context {
	t.Helper()
	s, until, err := m.SandboxOfToken(t.Context(), token)
	if id == "" && !sandbox.HasCode(err, sandbox.CodeNotFound) || id != "" && (err != nil || s.ID != id || until.Err() != nil) {
		t.Errorf("%+v is of %q, not of %q: %v", token, s.ID, id, err)
	}
	return until
}

func hashed(text string) sandbox.Token { return sandbox.Token{Hash: sandbox.HashToken(text)} }

// TestTokens: a sandbox has one token, the derived one or that of its caller. An earlier token
// is refused, and its calls end.
func TestTokens(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		dir, h := t.TempDir(), nodetest.NewHost(t)
		m := daemon(t, dir, h)
		defer func() { _ = m.Close() }()
		setUp(t, m, 0)
		derived := claim(t, m, "derived", sandbox.Lifetime{})
		given := claimFor(t, m, ownedClaim(func(r *sandbox.ClaimRequest) { r.Token = sandbox.HashToken("ars_one") }))
		wantToken(t, m, sandbox.Token{Derived: given.ID}, "")
		wantToken(t, m, sandbox.Token{}, "")
		wantToken(t, m, sandbox.Token{Derived: given.ID, Hash: given.Token}, "") // says two things
		one := wantToken(t, m, hashed("ars_one"), given.ID)
		before := wantToken(t, m, sandbox.Token{Derived: derived.ID}, derived.ID)
		for _, s := range []sandbox.Sandbox{derived, given} {
			if _, err := m.SetToken(owning(t), s.Key, sandbox.HashToken("ars_two-"+string(s.Name))); err != nil {
				t.Fatal(err)
			}
			if s, err := m.SetToken(owning(t), s.Key, sandbox.HashToken("ars_two-"+string(s.Name))); err != nil || s.Token == "" {
				t.Fatal(err)
			}
		}
		wantInvalid(t, second(m.SetToken(owning(t), key("a"), "")))
		if one.Err() == nil || before.Err() == nil {
			t.Error("what is done with a token that was replaced goes on")
		}
		two := wantToken(t, m, hashed("ars_two-a"), given.ID)
		if err := m.Close(); err != nil {
			t.Fatal(err)
		}
		m = daemon(t, dir, h)
		synctest.Wait()
		wantToken(t, m, hashed("ars_one"), "")
		wantToken(t, m, sandbox.Token{Derived: derived.ID}, "")
		wantToken(t, m, hashed("ars_two-derived"), derived.ID)
		if _, err := m.SetToken(owning(t), key("a"), sandbox.HashToken("ars_three")); err != nil {
			t.Fatal(err)
		}
		if two.Err() != nil {
			t.Error("the daemon before was told")
		}
		last := wantToken(t, m, hashed("ars_three"), given.ID)
		if _, err := m.Kill(owning(t), key("a")); err != nil {
			t.Fatal(err)
		}
		wantToken(t, m, hashed("ars_three"), "")
		if last.Err() != nil {
			t.Error("who uses a sandbox when it ends is cut off, and not told that it has ended")
		}
		claimFor(t, m, ownedClaim(func(r *sandbox.ClaimRequest) { r.Owner, r.Token = "b", sandbox.HashToken("ars_three") }))
	})
}

// TestTokenOfAnother: a token is of one sandbox, also where many ask at once, and a copy of a
// sandbox has none of it.
func TestTokenOfAnother(t *testing.T) {
	onDaemon(t, func(t *testing.T, m *Manager, h *nodetest.Host) {
		shared := sandbox.HashToken("ars_shared")
		for i := range 4 {
			claim(t, m, fmt.Sprintf("s-%d", i), sandbox.Lifetime{})
		}
		var mu sync.Mutex
		taken := 0
		var all sync.WaitGroup
		count := func(err error) {
			mu.Lock()
			defer mu.Unlock()
			switch {
			case err == nil:
				taken++
			case !sandbox.HasCode(err, sandbox.CodeConflict):
				t.Error(err)
			}
		}
		for i := range 4 {
			all.Go(func() { _, err := m.SetToken(owning(t), key(fmt.Sprintf("s-%d", i)), shared); count(err) })
			all.Go(func() {
				r := sandbox.ClaimRequest{Key: key(fmt.Sprintf("c-%d", i)), Spec: sandbox.ClaimSpec{Pool: "pool"}, Token: shared}
				_, _, err := m.Claim(owning(t), r)
				count(err)
			})
		}
		all.Wait()
		if taken != 1 {
			t.Errorf("%d sandboxes have one token", taken)
		}
		a := claimFor(t, m, ownedClaim(func(r *sandbox.ClaimRequest) { r.Token = sandbox.HashToken("ars_a") }))
		f, _, err := m.Fork(t.Context(), sandbox.ForkRequest{Key: key("f"), Spec: sandbox.ForkSpec{Source: "a", Replicas: 1}})
		if err != nil {
			t.Fatal(err)
		}
		checkpoint(t, m, "c", "a")
		restored, _, err := m.Restore(t.Context(), sandbox.RestoreRequest{Key: key("r"), Checkpoint: "c"})
		if err != nil || restored.Owner != "" || restored.Token != "" {
			t.Fatalf("%+v, %v", restored, err)
		}
		child := wantState(t, m, "f-1", sandbox.Running)
		if child.Owner != "" || child.Token != "" {
			t.Errorf("%+v", child)
		}
		wantToken(t, m, hashed("ars_a"), a.ID)
		wantToken(t, m, sandbox.Token{Derived: f.Children[0].ID}, f.Children[0].ID)
	})
}

// TestTokenThatIsNotWritten: a token that could not be written is not good, and the one before
// is.
func TestTokenThatIsNotWritten(t *testing.T) {
	onDaemon(t, func(t *testing.T, m *Manager, _ *nodetest.Host) {
		a := claimFor(t, m, ownedClaim(func(r *sandbox.ClaimRequest) { r.Token = sandbox.HashToken("ars_a") }))
		if err := m.db.Close(); err != nil {
			t.Fatal(err)
		}
		if _, err := m.SetToken(owning(t), key("a"), sandbox.HashToken("ars_b")); err == nil {
			t.Error("it was written")
		}
		wantToken(t, m, hashed("ars_b"), "")
		wantToken(t, m, hashed("ars_a"), a.ID)
	})
}

// TestGivenValues: values that come with a claim are in the sandbox's environment and nowhere
// on disk in the clear. Only their giver can copy the sandbox, and they cannot be given again.
func TestGivenValues(t *testing.T) {
	onDaemon(t, func(t *testing.T, m *Manager, h *nodetest.Host) {
		alice := sandbox.WithPrincipal(owning(t), "alice")
		s, _, err := m.Claim(alice, ownedClaim(func(r *sandbox.ClaimRequest) { r.Values = sandbox.SecretData{"KEY": []byte(canary)} }))
		if err != nil || !s.HoldsSecrets() || s.SecretsBy != "alice" || len(s.Given) != 1 || s.Given[0] != "KEY" || s.Env["KEY"] != "" {
			t.Fatalf("%+v, %v", s, err)
		}
		fork := sandbox.ForkRequest{Key: key("f"), Spec: sandbox.ForkSpec{Source: "a", Replicas: 1}}
		if _, _, err := m.Fork(sandbox.WithPrincipal(owning(t), "bob"), fork); !sandbox.HasCode(err, sandbox.CodeDenied) {
			t.Errorf("bob forks it: %v", err)
		}
		if _, _, err := m.Fork(alice, fork); err != nil {
			t.Error(err)
		}
		if _, _, err := m.Checkpoint(alice, sandbox.CheckpointRequest{Key: key("c"), Source: "a"}); err != nil {
			t.Fatal(err)
		}
		if _, _, err := m.Restore(alice, sandbox.RestoreRequest{Key: key("r"), Checkpoint: "c", Spec: sandbox.RestoreSpec{Env: sandbox.Env{"A": "b"}}}); !sandbox.HasCode(err, sandbox.CodeConflict) || !strings.Contains(err.Error(), "KEY") {
			t.Errorf("restored with variables: %v", err)
		}
		if r, _, err := m.Restore(alice, sandbox.RestoreRequest{Key: key("r"), Checkpoint: "c"}); err != nil || !r.HoldsSecrets() {
			t.Errorf("%+v, %v", r, err)
		}
		if _, err := m.Hibernate(alice, key("a")); err != nil {
			t.Fatal(err)
		}
		if found := sealtest.FilesWith(t, m.cfg.Dir, canary); found != nil {
			t.Errorf("its values are in %v", found)
		}
		var b bytes.Buffer
		fmt.Fprintf(&b, "%v %+v %#v", ownedClaim(func(r *sandbox.ClaimRequest) { r.Values = sandbox.SecretData{"KEY": []byte(canary)} }), s, s)
		if strings.Contains(b.String(), canary) {
			t.Error("a claim is shown with its values")
		}
	})
}

// TestGivenValuesExec: programs have the values.
func TestGivenValuesExec(t *testing.T) {
	h := nodetest.NewHost(t)
	h.Execs = true
	m := daemon(t, t.TempDir(), h)
	defer func() { _ = m.Close() }()
	must(t, second(m.ApplyTemplate(t.Context(), key("python"), sandbox.TemplateSpec{Image: "one", MilliCPUs: 1000, Memory: 64 * mib})),
		second(m.ApplyPool(t.Context(), key("pool"), sandbox.PoolSpec{Template: "python"})), m.WaitPool(t.Context(), key("pool")))
	claimFor(t, m, ownedClaim(func(r *sandbox.ClaimRequest) {
		r.Values, r.Spec.Env = sandbox.SecretData{"KEY": []byte(canary)}, sandbox.Env{"PLAIN": "p"}
	}))
	u, err := m.Use(t.Context(), key("a"))
	if err != nil {
		t.Fatal(err)
	}
	defer u.Close()
	var out bytes.Buffer
	_, err = u.Agent().Run(t.Context(), guestrpc.ExecRequest{Argv: []string{"/bin/sh", "-c", "echo $KEY $PLAIN"}, Workdir: "/"}, nil, &out, io.Discard)
	if err != nil || out.String() != canary+" p\n" {
		t.Errorf("the program has %q: %v", out.String(), err)
	}
}

// TestNoKeyNoValues: a daemon without a key for images takes no values.
func TestNoKeyNoValues(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		m := daemon(t, t.TempDir(), nodetest.NewHost(t), func(c *Config) { c.Key = nil })
		defer func() { _ = m.Close() }()
		setUp(t, m, 0)
		if _, _, err := m.Claim(owning(t), ownedClaim(func(r *sandbox.ClaimRequest) { r.Values = sandbox.SecretData{"KEY": []byte("v")} })); !sandbox.HasCode(err, sandbox.CodeUnimplemented) {
			t.Errorf("%v", err)
		}
	})
}
