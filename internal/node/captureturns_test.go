package node

import (
	"context"
	"errors"
	"testing"
	"testing/synctest"
	"time"

	"agentrun.dev/internal/node/nodetest"
	"agentrun.dev/internal/sandbox"
)

// onTwoCaptures runs a test with a manager that captures two sandboxes at once, one of a
// namespace, and with a namespace beside the default one.
func onTwoCaptures(t *testing.T, test func(t *testing.T, m *Manager, h *nodetest.Host)) {
	t.Helper()
	synctest.Test(t, func(t *testing.T) {
		h := nodetest.NewHost(t)
		m := daemon(t, t.TempDir(), h, func(c *Config) { c.Captures = 2 })
		defer func() { _ = m.Close() }()
		setUp(t, m, 0)
		setUpOther(t, m)
		test(t, m, h)
	})
}

// other is a key of a namespace beside the default one.
func other(name string) sandbox.Key { return sandbox.Key{Namespace: "other", Name: sandbox.Name(name)} }

// setUpOther makes the other namespace's pool.
func setUpOther(t *testing.T, m *Manager) {
	t.Helper()
	must(t, second(m.ApplyTemplate(t.Context(), other("python"), sandbox.TemplateSpec{Image: "one", MilliCPUs: 1000, Memory: 64 * mib})),
		second(m.ApplyPool(t.Context(), other("pool"), sandbox.PoolSpec{Template: "python"})),
		m.WaitPool(t.Context(), other("pool")))
}

// wantCaptures checks how many captures have a turn and how many wait for one.
func wantCaptures(t *testing.T, m *Manager, held, waiting int) {
	t.Helper()
	synctest.Wait()
	if o := m.Overview().Turns[WorkCapture]; o.Held != held || o.Waiting != waiting {
		t.Fatalf("%d captures have a turn and %d wait, not %d and %d", o.Held, o.Waiting, held, waiting)
	}
}

// TestTurnsOfCaptures: a namespace that hibernates, checkpoints and forks has half of the
// turns and leaves the others to others. Whoever waits has changed nothing, and leaves the
// queue when the client goes or the sandbox is ended.
func TestTurnsOfCaptures(t *testing.T) {
	captures := map[string]func(context.Context, *Manager, sandbox.Key) error{
		"hibernate": func(ctx context.Context, m *Manager, k sandbox.Key) error { return second(m.Hibernate(ctx, k)) },
		"checkpoint": func(ctx context.Context, m *Manager, k sandbox.Key) error {
			return third(m.Checkpoint(ctx, sandbox.CheckpointRequest{Key: sandbox.Key{Namespace: k.Namespace, Name: "c-" + k.Name}, Source: k.Name}))
		},
		"fork": func(ctx context.Context, m *Manager, k sandbox.Key) error {
			return third(m.Fork(ctx, sandbox.ForkRequest{Key: sandbox.Key{Namespace: k.Namespace, Name: "f-" + k.Name}, Spec: sandbox.ForkSpec{Source: k.Name, Replicas: 1}}))
		},
	}
	for name, capture := range captures {
		t.Run(name, func(t *testing.T) {
			onTwoCaptures(t, func(t *testing.T, m *Manager, h *nodetest.Host) {
				for _, one := range []string{"slow", "a", "b", "c"} {
					claim(t, m, one, sandbox.Lifetime{})
				}
				must(t, third(m.Claim(t.Context(), sandbox.ClaimRequest{Key: other("x"), Spec: sandbox.ClaimSpec{Pool: "pool"}})))
				h.HangCaptures()
				begin := func(ctx context.Context, k sandbox.Key, do func(context.Context, *Manager, sandbox.Key) error) <-chan error {
					done := make(chan error, 1)
					go func() { done <- do(ctx, m, k) }()
					synctest.Wait()
					return done
				}
				ctx, leave := context.WithCancel(t.Context())
				slow := begin(t.Context(), key("slow"), captures["hibernate"])
				a, b := begin(ctx, key("a"), capture), begin(t.Context(), key("b"), capture)
				wantCaptures(t, m, 1, 2)
				reserved := m.capacity.reserved()
				wantState(t, m, "a", sandbox.Running)
				x := begin(t.Context(), other("x"), capture)
				wantCaptures(t, m, 2, 2)
				leave()
				if err := <-a; !errors.Is(err, context.Canceled) {
					t.Errorf("whoever has left: %v", err)
				}
				wantCaptures(t, m, 2, 1)
				must(t, second(m.Kill(t.Context(), key("b"))))
				if err := <-b; err == nil {
					t.Error("it was captured though it was ended")
				}
				wantCaptures(t, m, 2, 0)
				wantState(t, m, "a", sandbox.Running)
				// The next of the namespace has the turn once the one before gives it back.
				c := begin(t.Context(), key("c"), capture)
				wantCaptures(t, m, 2, 1)
				must(t, second(m.Kill(t.Context(), key("slow"))))
				<-slow
				wantCaptures(t, m, 2, 0)
				for _, k := range []sandbox.Key{key("c"), other("x")} {
					must(t, second(m.Kill(t.Context(), k)))
				}
				<-c
				<-x
				wantCaptures(t, m, 0, 0)
				if reserved == 0 || m.capacity.reserved() != 64*mib { // a
					t.Errorf("%d bytes were reserved, %d are", reserved, m.capacity.reserved())
				}
			})
		})
	}
}

// TestIdleWaitsForItsTurn: a sandbox that is used while it waits to hibernate keeps
// running. Ending it in the meantime does not wait.
func TestIdleWaitsForItsTurn(t *testing.T) {
	onTwoCaptures(t, func(t *testing.T, m *Manager, h *nodetest.Host) {
		claim(t, m, "slow", sandbox.Lifetime{})
		idle := sandbox.Lifetime{IdleTimeout: time.Minute, OnTimeout: sandbox.TimeoutHibernate}
		claim(t, m, "used", idle)
		claim(t, m, "ended", idle)
		h.HangCaptures()
		slow := make(chan error, 1)
		go func() { slow <- second(m.Hibernate(t.Context(), key("slow"))) }()
		time.Sleep(2 * time.Minute) // of the bubble
		wantCaptures(t, m, 1, 2)
		u, err := m.Use(t.Context(), key("used"))
		must(t, err)
		must(t, second(m.Kill(t.Context(), key("ended"))))
		wantCaptures(t, m, 1, 1)
		must(t, second(m.Kill(t.Context(), key("slow"))))
		<-slow
		wantCaptures(t, m, 0, 0)
		wantState(t, m, "used", sandbox.Running)
		u.Close()
		time.Sleep(2 * time.Minute)
		wantCaptures(t, m, 1, 0) // it is idle again
		must(t, second(m.Kill(t.Context(), key("used"))))
	})
}

// TestCloseEndsWaitingCaptures: a daemon that ends refuses those who wait.
func TestCloseEndsWaitingCaptures(t *testing.T) {
	onTwoCaptures(t, func(t *testing.T, m *Manager, h *nodetest.Host) {
		claim(t, m, "a", sandbox.Lifetime{})
		release, err := m.captureTurns.take(t.Context(), sandbox.DefaultNamespace)
		must(t, err)
		defer release()
		done := make(chan error, 1)
		go func() { done <- second(m.Hibernate(t.Context(), key("a"))) }()
		wantCaptures(t, m, 1, 1)
		must(t, m.Close())
		if err := <-done; !sandbox.HasCode(err, sandbox.CodeClosing) {
			t.Errorf("it was told: %v", err)
		}
	})
}
