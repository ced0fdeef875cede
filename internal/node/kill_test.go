package node

import (
	"context"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"agentrun.dev/internal/engine"
	"agentrun.dev/internal/node/journal"
	"agentrun.dev/internal/node/nodetest"
	"agentrun.dev/internal/sandbox"
)

// TestKillWhatHangs: a sandbox whose machine does not answer can be ended, while
// somebody waits for that machine, and so can a fork that it is a child of.
func TestKillWhatHangs(t *testing.T) {
	for name, capture := range map[string]func(context.Context, *Manager) error{
		"fork": func(ctx context.Context, m *Manager) error {
			_, _, err := m.Fork(ctx, sandbox.ForkRequest{Key: key("f"), Spec: sandbox.ForkSpec{Source: "a", Replicas: 2}})
			return err
		},
		"checkpoint": func(ctx context.Context, m *Manager) error {
			_, _, err := m.Checkpoint(ctx, sandbox.CheckpointRequest{Key: key("c"), Source: "a"})
			return err
		},
		"hibernate": func(ctx context.Context, m *Manager) error { _, err := m.Hibernate(ctx, key("a")); return err },
	} {
		t.Run(name, func(t *testing.T) {
			onDaemon(t, func(t *testing.T, m *Manager, h *nodetest.Host) {
				claim(t, m, "a", sandbox.Lifetime{})
				asked := h.HangCaptures()
				captured := make(chan error, 1)
				go func() { captured <- capture(t.Context(), m) }()
				<-asked
				ctx, cancel := context.WithTimeout(t.Context(), time.Hour)
				defer cancel()
				s, err := m.Kill(ctx, key("a"))
				if err != nil || s.State != sandbox.Ended || s.Reason != sandbox.ReasonKilled || s.Detail != "" {
					t.Fatalf("%+v, %v", s, err)
				}
				if err := <-captured; err == nil {
					t.Error("it was captured")
				}
				if _, err := m.Kill(ctx, key("a")); !sandbox.HasCode(err, sandbox.CodeEnded) {
					t.Errorf("killed twice: %v", err)
				}
				if left := h.Folders(); len(left) > 0 {
					t.Errorf("machines are left: %q", left)
				}
				// Its name can be used again.
				claim(t, m, "a", sandbox.Lifetime{})
			})
		})
	}
}

// TestKillWaits: even if the caller stops waiting for the end of the present
// operation, the sandbox is killed.
func TestKillWaits(t *testing.T) {
	onDaemon(t, func(t *testing.T, m *Manager, _ *nodetest.Host) {
		claim(t, m, "a", sandbox.Lifetime{})
		b, err := m.find(key("a"))
		if err != nil {
			t.Fatal(err)
		}
		if err := b.lock(t.Context()); err != nil {
			t.Fatal(err)
		}
		ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
		defer cancel()
		if _, err := m.Kill(ctx, key("a")); err == nil {
			t.Error("killed while it was somebody else's turn")
		}
		b.unlock()
		synctest.Wait()
		if s := b.now(); s.State != sandbox.Ended || s.Reason != sandbox.ReasonKilled {
			t.Errorf("%+v", s)
		}
	})
}

// TestKillIsForgotten: a sandbox that hibernated before a kill reached it, whose
// caller gave up, ends later for a reason of its own.
func TestKillIsForgotten(t *testing.T) {
	onDaemon(t, func(t *testing.T, m *Manager, h *nodetest.Host) {
		claim(t, m, "a", sandbox.Lifetime{})
		gone, giveUp := context.WithCancel(t.Context())
		giveUp()
		h.Step = sync.OnceFunc(func() { _, _ = m.Kill(gone, key("a")) })
		must(t, second(m.Hibernate(t.Context(), key("a"))))
		must(t, second(m.Resume(t.Context(), key("a"))))
		h.End(m.machineDir(wantState(t, m, "a", sandbox.Running).Machine), engine.ErrOutOfMemory)
		synctest.Wait()
		wantEnded(t, m, "a", sandbox.ReasonOutOfMemory)
	})
}

// TestKillWhatWakes: a kill does not wait for a machine that is being made.
func TestKillWhatWakes(t *testing.T) {
	onDaemon(t, func(t *testing.T, m *Manager, _ *nodetest.Host) {
		claim(t, m, "a", sandbox.Lifetime{})
		must(t, second(m.Hibernate(t.Context(), key("a"))))
		for range m.cfg.Starts { // no machine is started any more
			release, err := m.turns.take(t.Context(), sandbox.DefaultNamespace)
			if err != nil {
				t.Fatal(err)
			}
			defer release()
		}
		woken := make(chan error, 1)
		go func() { woken <- second(m.Resume(t.Context(), key("a"))) }()
		synctest.Wait()
		ctx, cancel := context.WithTimeout(t.Context(), time.Hour)
		defer cancel()
		must(t, second(m.Kill(ctx, key("a"))))
		if err := <-woken; err == nil {
			t.Error("it was woken")
		}
		wantEnded(t, m, "a", sandbox.ReasonKilled)
	})
}

// TestDeadWhileNothingIsWritten: a sandbox whose machine ends while that cannot be written ends
// once it can.
func TestDeadWhileNothingIsWritten(t *testing.T) {
	onDaemon(t, func(t *testing.T, m *Manager, h *nodetest.Host) {
		made := claimFor(t, m, ownedClaim())
		at := ownerKey(made.Namespace, uid)
		var good ownerRecord
		must(t, m.db.Update(func(tx *journal.Tx) (err error) {
			if good, _, err = owners.Get(tx, at); err != nil {
				return err
			}
			return journal.Collection[int](owners).Put(tx, at, 1) // which is no record
		}))
		h.End(m.machineDir(made.Machine), engine.ErrOutOfMemory)
		synctest.Wait()
		wantState(t, m, "a", sandbox.Running)
		must(t, m.db.Update(func(tx *journal.Tx) error { return owners.Put(tx, at, good) }))
		time.Sleep(retryExpiry)
		synctest.Wait()
		wantEnded(t, m, "a", sandbox.ReasonOutOfMemory)
		wantNothing(t, m, h)
	})
}
