// Package servertest holds the tests that every server.Service must pass, wherever its
// sandboxes are. Tests of a service call Run.
package servertest

import (
	"context"
	"slices"
	"testing"
	"time"

	"agentrun.dev/internal/sandbox"
	"agentrun.dev/internal/server"
)

// Target is the service under test, with the settings that the suite needs.
type Target struct {
	Service server.Service
	// Template is the template of the sandboxes. They have a POSIX shell.
	Template sandbox.TemplateSpec
	// Owns says that the suite may give owners.
	Owns bool
}

// patience ends a test that hangs; it measures nothing.
const patience = time.Minute

// suite is the service in one namespace, which no other test uses.
type suite struct {
	*testing.T
	Target
	ctx       context.Context
	namespace sandbox.Namespace
}

// Run runs the suite.
func Run(t *testing.T, target Target) {
	for _, part := range []struct {
		name string
		test func(*suite)
	}{
		{"templates", (*suite).templates},
		{"pools", (*suite).pools},
		{"sandboxes", (*suite).sandboxes},
		{"lists", (*suite).lists},
		{"forks", (*suite).forks},
		{"checkpoints", (*suite).checkpoints},
		{"costs", (*suite).costs},
		{"watch", (*suite).watch},
		{"cordon", (*suite).cordon},
		{"network", (*suite).network},
		{"authorities", (*suite).authorities},
		{"images", (*suite).images},
		{"registries", (*suite).registries},
		{"by-id", (*suite).byID},
		{"sessions", (*suite).sessions},
		{"logs", (*suite).logs},
		{"secrets", (*suite).secrets},
		{"quotas", (*suite).quotas},
		{"identity", (*suite).identity},
		{"preconditions", (*suite).preconditions},
		{"end-times", (*suite).endTimes},
		{"owners", (*suite).owners},
		{"many-forks", (*suite).manyForks},
		{"tokens", (*suite).tokens},
	} {
		t.Run(part.name, func(t *testing.T) {
			ctx, cancel := context.WithTimeout(t.Context(), patience)
			defer cancel()
			if target.Owns {
				ctx = sandbox.WithOwning(ctx)
			}
			s := &suite{T: t, Target: target, ctx: ctx, namespace: sandbox.Namespace("suite-" + part.name)}
			part.test(s)
		})
	}
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

// eventually waits for a condition that no event reports.
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

// state requires that a sandbox has a state.
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
