package node

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"agentrun.dev/internal/engine"
	"agentrun.dev/internal/node/nodetest"
	"agentrun.dev/internal/sandbox"
)

// failingBuilder makes templates, but for the first attempts.
type failingBuilder struct {
	builder
	fails func(attempt int64) error
	tries atomic.Int64
}

func (b *failingBuilder) Build(ctx context.Context, req BuildRequest) (sandbox.Built, error) {
	if err := b.fails(b.tries.Add(1)); err != nil {
		return sandbox.Built{}, err
	}
	return b.builder.Build(ctx, req)
}

func template(t *testing.T, m *Manager, k sandbox.Key, image string) sandbox.Template {
	t.Helper()
	made, err := m.ApplyTemplate(t.Context(), k, sandbox.TemplateSpec{Image: image, MilliCPUs: 1000, Memory: 64 * mib})
	must(t, err)
	return made
}

func buildOf(t *testing.T, m *Manager, of sandbox.Template) sandbox.Build {
	t.Helper()
	synctest.Wait()
	all, err := m.Builds(t.Context(), of)
	if err != nil || len(all) != 1 {
		t.Fatalf("%+v, %v", all, err)
	}
	return all[0]
}

// TestBuildIsTriedAgain: a build that was interrupted is tried again, after a while that
// doubles, and has failed when that was so five times in a row. One that lacks something of
// the host is tried for as long as it does. One that fails by itself has failed.
func TestBuildIsTriedAgain(t *testing.T) {
	interrupted := fmt.Errorf("pull: %w: the registry is away", ErrInterrupted)
	for name, c := range map[string]struct {
		fails    func(attempt int64) error
		attempts int
		phase    sandbox.Phase
	}{
		"interrupted":     {func(n int64) error { return unless(n > 3, interrupted) }, 4, sandbox.PhaseReady},
		"machine is lost": {func(n int64) error { return unless(n > 1, fmt.Errorf("exec: %w", engine.ErrEnded)) }, 2, sandbox.PhaseReady},
		"always":          {func(int64) error { return interrupted }, maxInterruptions, sandbox.PhaseFailed},
		"no memory": {func(n int64) error {
			return unless(n > 20, sandbox.Errorf(sandbox.CodeCapacity, "there is no room"))
		}, 21, sandbox.PhaseReady},
		"powers off":    {func(int64) error { return fmt.Errorf("%w: %w", engine.ErrEnded, engine.ErrPoweredOff) }, 1, sandbox.PhaseFailed},
		"out of memory": {func(int64) error { return fmt.Errorf("%w: %w", engine.ErrEnded, engine.ErrOutOfMemory) }, 1, sandbox.PhaseFailed},
		"by itself":     {func(int64) error { return errors.New("make: *** [all] Error 2") }, 1, sandbox.PhaseFailed},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				b := &failingBuilder{fails: c.fails}
				m := daemon(t, t.TempDir(), nodetest.NewHost(t), func(c *Config) { c.Builder = b })
				defer func() { _ = m.Close() }()
				of := template(t, m, key("python"), "one")
				if got := buildOf(t, m, of); c.attempts > 1 && (got.Phase != sandbox.PhasePending || got.Problem == "" || !got.Next.After(time.Now())) {
					t.Errorf("after the first attempt: %+v", got)
				}
				time.Sleep(time.Hour)
				if got := buildOf(t, m, of); got.Phase != c.phase || got.Attempts != c.attempts || b.tries.Load() != int64(c.attempts) {
					t.Errorf("after an hour: %+v, %d attempts", got, b.tries.Load())
				}
				var log strings.Builder
				must(t, m.CopyBuildLog(t.Context(), sandbox.BuildLogRequest{Key: of.Key, Stage: sandbox.AfterReady}, &log))
				if strings.Contains(log.String(), fmt.Sprintf("== attempt %d", c.attempts)) != (c.attempts > 1) {
					t.Errorf("the log: %q", log.String())
				}
			})
		})
	}
}

func unless(good bool, err error) error {
	if good {
		return nil
	}
	return err
}

// TestBuildWaitsForRoom: a build that was refused for want of memory is made when some is
// free, long before it would be tried again.
func TestBuildWaitsForRoom(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		m := daemon(t, t.TempDir(), nodetest.NewHost(t), func(c *Config) { c.Capacity = 2 * 64 * mib })
		defer func() { _ = m.Close() }()
		setUp(t, m, 0)
		claim(t, m, "a", sandbox.Lifetime{})
		claim(t, m, "b", sandbox.Lifetime{})
		other := sandbox.Key{Namespace: "other", Name: "theirs"}
		of := template(t, m, other, "x")
		must(t, second(m.ApplyPool(t.Context(), other, sandbox.PoolSpec{Template: "theirs", Replicas: 1})))
		time.Sleep(24 * time.Hour)
		got := buildOf(t, m, of)
		_, st, err := m.Pool(t.Context(), other)
		if got.Phase != sandbox.PhasePending || !strings.Contains(got.Problem, "no room") || err != nil || !strings.Contains(st.Problem, "no room") {
			t.Errorf("without room: %+v; the pool: %+v, %v", got, st, err)
		}
		must(t, second(m.Kill(t.Context(), key("a"))))
		time.Sleep(2 * retryFirst)
		if got := buildOf(t, m, of); got.Phase != sandbox.PhaseReady {
			t.Errorf("with room: %+v", got)
		}
	})
}

// TestBuildGoesOn: a build that the end of the daemon has cut off is made by the next one, with
// a pool or without one.
func TestBuildGoesOn(t *testing.T) {
	for name, end := range map[string]func(*Manager) error{
		"closed": (*Manager).Close,
		"killed": func(m *Manager) error { m.crash(); return nil },
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				dir, h := t.TempDir(), nodetest.NewHost(t)
				m := daemon(t, dir, h, func(c *Config) { c.Builder = &builder{gate: make(chan struct{})} })
				of := template(t, m, key("python"), "one")
				if got := buildOf(t, m, of); got.Phase != sandbox.PhaseBuilding {
					t.Fatalf("%+v", got)
				}
				must(t, end(m))
				m = daemon(t, dir, h)
				defer func() { _ = m.Close() }()
				time.Sleep(2 * retryFirst)
				if got := buildOf(t, m, of); got.Phase != sandbox.PhaseReady {
					t.Errorf("%+v", got)
				}
				wantFolders(t, m, snapshotsDir, 1)
			})
		})
	}
}

// TestBuildTimeoutIsNoRevision: a template's timeout can change without a build.
func TestBuildTimeoutIsNoRevision(t *testing.T) {
	onDaemon(t, func(t *testing.T, m *Manager, _ *nodetest.Host) {
		before, err := m.Template(t.Context(), key("python"))
		must(t, err)
		spec := before.Spec
		spec.BuildTimeout = time.Hour
		after, err := m.ApplyTemplate(t.Context(), key("python"), spec)
		if err != nil || after.Revision != before.Revision {
			t.Errorf("revision %s becomes %s, %v", before.Revision, after.Revision, err)
		}
		if got := buildOf(t, m, after); got.Phase != sandbox.PhaseReady {
			t.Errorf("%+v", got)
		}
		for _, wrong := range []time.Duration{-1, 25 * time.Hour} {
			spec.BuildTimeout = wrong
			if _, err := m.ApplyTemplate(t.Context(), key("python"), spec); !sandbox.HasCode(err, sandbox.CodeInvalid) {
				t.Errorf("%v: %v", wrong, err)
			}
		}
	})
}

// TestBuildsOfOthers: a namespace whose builds do not end leaves half of the turns to others.
func TestBuildsOfOthers(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := &hangingBuilder{hang: "never"}
		m := daemon(t, t.TempDir(), nodetest.NewHost(t), func(c *Config) { c.Builder, c.Builds = b, 4 })
		defer func() { _ = m.Close() }()
		for i := range 10 {
			template(t, m, key(fmt.Sprintf("t%d", i)), "never")
		}
		quiet := template(t, m, sandbox.Key{Namespace: "other", Name: "python"}, "one")
		if got := buildOf(t, m, quiet); got.Phase != sandbox.PhaseReady {
			t.Errorf("%+v", got)
		}
		last, err := m.Template(t.Context(), key("t9"))
		must(t, err)
		if got := buildOf(t, m, last); got.Phase != sandbox.PhasePending || !strings.Contains(got.Problem, "waits for its turn") {
			t.Errorf("%+v", got)
		}
		must(t, m.DeleteTemplate(t.Context(), key("t0"))) // it is under way
	})
}

// hangingBuilder never builds an image.
type hangingBuilder struct {
	builder
	hang string
}

func (b *hangingBuilder) Build(ctx context.Context, req BuildRequest) (sandbox.Built, error) {
	if req.Spec.Image == b.hang {
		<-ctx.Done()
		return sandbox.Built{}, ctx.Err()
	}
	return b.builder.Build(ctx, req)
}
