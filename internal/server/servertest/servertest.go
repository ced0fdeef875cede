// Package servertest holds the tests that every server.Service must pass, wherever its
// sandboxes are. Tests of a service call Run.
package servertest

import (
	"context"
	"io"
	"slices"
	"testing"
	"time"

	"agentrun.dev/internal/sandbox"
	"agentrun.dev/internal/server"
)

// Part is a part of the contract that a service may lack for now.
type Part string

// The parts.
const (
	ByID     Part = "sandboxes by id"
	Sessions Part = "sessions"
	Logs     Part = "logs of builds"
	Secrets  Part = "secrets"
	Quotas   Part = "quotas"
	Identity Part = "identity of requests"
	Tokens   Part = "sandboxes by token"
)

// Target is what the suite needs of a service.
type Target struct {
	Service server.Service
	// Template is that of the sandboxes. They have a POSIX shell.
	Template sandbox.TemplateSpec
	// Owns says that the suite may give owners.
	Owns bool
	// Without are the parts that the service has not. Each must be refused with
	// sandbox.CodeUnimplemented, so that none stays here that it has.
	Without []Part
}

// patience ends a test that hangs; nothing is measured with it.
const patience = time.Minute

// suite is the service in one namespace, which a test has for itself.
type suite struct {
	*testing.T
	Target
	ctx       context.Context
	namespace sandbox.Namespace
}

// Run runs the suite.
func Run(t *testing.T, target Target) {
	for _, part := range []struct {
		name  string
		needs Part
		test  func(*suite)
	}{
		{"templates", "", (*suite).templates},
		{"pools", "", (*suite).pools},
		{"sandboxes", "", (*suite).sandboxes},
		{"lists", "", (*suite).lists},
		{"forks", "", (*suite).forks},
		{"checkpoints", "", (*suite).checkpoints},
		{"costs", "", (*suite).costs},
		{"watch", "", (*suite).watch},
		{"cordon", "", (*suite).cordon},
		{"network", "", (*suite).network},
		{"authorities", "", (*suite).authorities},
		{"images", "", (*suite).images},
		{"registries", "", (*suite).registries},
		{"by-id", ByID, (*suite).byID},
		{"sessions", Sessions, (*suite).sessions},
		{"logs", Logs, (*suite).logs},
		{"secrets", Secrets, (*suite).secrets},
		{"quotas", Quotas, (*suite).quotas},
		{"identity", Identity, (*suite).identity},
		{"preconditions", "", (*suite).preconditions},
		{"end-times", "", (*suite).endTimes},
		{"owners", "", (*suite).owners},
		{"many-forks", "", (*suite).manyForks},
		{"tokens", Tokens, (*suite).tokens},
	} {
		t.Run(part.name, func(t *testing.T) {
			ctx, cancel := context.WithTimeout(t.Context(), patience)
			defer cancel()
			if target.Owns {
				ctx = sandbox.WithOwning(ctx)
			}
			s := &suite{T: t, Target: target, ctx: ctx, namespace: sandbox.Namespace("suite-" + part.name)}
			if slices.Contains(target.Without, part.needs) {
				s.refused("a part that it has not", s.probe(part.needs), sandbox.CodeUnimplemented)
				return
			}
			part.test(s)
		})
	}
}

// probe asks for the least of a part.
func (s *suite) probe(p Part) error {
	var err error
	switch p {
	case Tokens:
		_, _, err = s.Service.SandboxOfToken(s.ctx, sandbox.Token{Derived: sandbox.NewID()})
	case ByID:
		_, err = s.Service.SandboxByID(s.ctx, sandbox.NewID())
	case Sessions:
		_, err = s.Service.Use(s.ctx, s.key("a"))
	case Logs:
		err = s.Service.CopyBuildLog(s.ctx, sandbox.BuildLogRequest{Key: s.key("a"), Stage: sandbox.AfterReady}, io.Discard)
	case Secrets:
		_, err = s.Service.Secrets(s.ctx, s.namespace, sandbox.Page{})
	case Quotas:
		_, err = s.Service.QuotaOf(s.ctx, s.namespace)
	case Identity:
		_, _, err = s.Service.Claim(s.ctx, sandbox.ClaimRequest{Key: s.key("a"), Spec: sandbox.ClaimSpec{Pool: "pool"}, Once: new(s.once("a"))})
	}
	return err
}

func (s *suite) key(name sandbox.Name) sandbox.Key {
	return sandbox.Key{Namespace: s.namespace, Name: name}
}

// once is the identity of a request with a body.
func (s *suite) once(body string) sandbox.Once {
	return sandbox.NewOnce("suite", string(s.namespace), "key", []byte(body))
}

// must ends the test with an error.
func (s *suite) must(err error) {
	s.Helper()
	if err != nil {
		s.Fatal(err)
	}
}

// refused requires an error with a code.
func (s *suite) refused(what string, err error, code sandbox.Code) {
	s.Helper()
	if !sandbox.HasCode(err, code) {
		s.Errorf("%s: %v, not %s", what, err, code)
	}
}

// missing requires that an object does not exist.
func (s *suite) missing(what string, err error) {
	s.Helper()
	s.refused(what, err, sandbox.CodeNotFound)
}

// eventually waits for what no event tells.
func (s *suite) eventually(is func() bool) {
	s.Helper()
	tick := time.NewTicker(5 * time.Millisecond)
	defer tick.Stop()
	for !is() {
		select {
		case <-tick.C:
		case <-s.ctx.Done():
			s.Fatal("it never was")
		}
	}
}

// setUp makes a template and a pool of it that is ready.
func (s *suite) setUp() {
	s.Helper()
	_, err := s.Service.ApplyTemplate(s.ctx, s.key("template"), s.Template)
	s.must(err)
	_, err = s.Service.ApplyPool(s.ctx, s.key("pool"), sandbox.PoolSpec{Template: "template", Replicas: 1})
	s.must(err)
	s.eventually(func() bool {
		_, status, err := s.Service.Pool(s.ctx, s.key("pool"))
		s.must(err)
		return status.Ready == 1 && status.Phase == sandbox.PhaseReady
	})
}

// claim makes a sandbox.
func (s *suite) claim(name sandbox.Name) sandbox.Sandbox {
	s.Helper()
	made, replayed, err := s.Service.Claim(s.ctx, sandbox.ClaimRequest{Key: s.key(name), Spec: sandbox.ClaimSpec{Pool: "pool"}})
	s.must(err)
	if replayed || made.Key != s.key(name) || made.State != sandbox.Running || made.ID == "" {
		s.Errorf("%+v, replayed %t", made, replayed)
	}
	return made
}

// state requires that of a sandbox.
func (s *suite) state(got sandbox.Sandbox, err error, want sandbox.State) {
	s.Helper()
	s.must(err)
	if got.State != want {
		s.Errorf("sandbox %s is %s, not %s", got.Name, got.State, want)
	}
}

// names are those of objects.
func names[T any](s *suite, of func(T) sandbox.Name) func([]T, error) []sandbox.Name {
	return func(all []T, err error) (out []sandbox.Name) {
		s.Helper()
		s.must(err)
		for _, one := range all {
			out = append(out, of(one))
		}
		return out
	}
}

// listed requires names, in order.
func (s *suite) listed(what string, got []sandbox.Name, want ...sandbox.Name) {
	s.Helper()
	if !slices.Equal(got, want) {
		s.Errorf("%s: %v, not %v", what, got, want)
	}
}
