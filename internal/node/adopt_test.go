package node

import (
	"errors"
	"fmt"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"agentrun.dev/internal/node/nodetest"
	"agentrun.dev/internal/sandbox"
)

// restarted runs a test with a daemon that comes after another one, whose sandboxes a and
// b run; a machine is refused to it as refuse says.
func restarted(t *testing.T, life sandbox.Lifetime, refuse error, test func(t *testing.T, m *Manager, h *nodetest.Host, machine string)) {
	t.Helper()
	synctest.Test(t, func(t *testing.T) {
		h, dir := nodetest.NewHost(t), t.TempDir()
		before := daemon(t, dir, h)
		setUp(t, before, 0)
		claim(t, before, "a", life)
		claim(t, before, "b", sandbox.Lifetime{})
		machine := before.machineDir(wantState(t, before, "a", sandbox.Running).Machine)
		must(t, before.Close())
		h.RefuseAdoption(machine, refuse)
		begin := time.Now()
		m := daemon(t, dir, h)
		defer func() { _ = m.Close() }()
		if waited := time.Since(begin); waited > 0 {
			t.Errorf("the daemon has waited for %v", waited)
		}
		test(t, m, h, machine)
	})
}

// TestStartWaitsForNobody: a machine that does not answer does not delay others. Its
// sandbox has its name and its memory, says why it cannot be used, and can be ended.
func TestStartWaitsForNobody(t *testing.T) {
	for name, refuse := range map[string]error{"hangs": nodetest.ErrHangs, "fails": errors.New("another build")} {
		t.Run(name, func(t *testing.T) {
			restarted(t, sandbox.Lifetime{}, refuse, func(t *testing.T, m *Manager, h *nodetest.Host, machine string) {
				u, err := m.Use(t.Context(), key("b"))
				if err != nil {
					t.Fatal(err)
				}
				u.Close()
				if _, _, err := m.Claim(t.Context(), sandbox.ClaimRequest{Key: key("a"), Spec: sandbox.ClaimSpec{Pool: "pool"}}); !sandbox.HasCode(err, sandbox.CodeExists) {
					t.Errorf("its name was given away: %v", err)
				}
				<-m.adopted
				s := wantState(t, m, "a", sandbox.Running)
				list, err := m.Sandboxes(t.Context(), sandbox.SandboxesRequest{Namespace: s.Namespace})
				if err != nil || s.Unresponsive == "" || len(list) != 2 || list[0].Unresponsive != s.Unresponsive || list[1].Unresponsive != "" {
					t.Errorf("%q, %+v, %v", s.Unresponsive, list, err)
				}
				for what, do := range map[string]func() error{
					"use":       func() error { return second(m.Use(t.Context(), key("a"))) },
					"pause":     func() error { return second(m.Pause(t.Context(), key("a"))) },
					"hibernate": func() error { return second(m.Hibernate(t.Context(), key("a"))) },
					"checkpoint": func() error {
						return third(m.Checkpoint(t.Context(), sandbox.CheckpointRequest{Key: key("c"), Source: "a"}))
					},
					"fork": func() error {
						_, _, err := m.Fork(t.Context(), sandbox.ForkRequest{Key: key("f"), Spec: sandbox.ForkSpec{Source: "a", Replicas: 1}})
						return err
					},
				} {
					begin := time.Now()
					if err := do(); !sandbox.HasCode(err, sandbox.CodeNotReady) || !strings.Contains(err.Error(), "does not answer") {
						t.Errorf("%s: %v", what, err)
					}
					if waited := time.Since(begin); waited > 0 {
						t.Errorf("%s has waited for %v", what, waited)
					}
				}
				must(t, second(m.Extend(t.Context(), key("a"), time.Hour)))
				if _, err := m.Kill(t.Context(), key("a")); err != nil {
					t.Fatal(err)
				}
				wantEnded(t, m, "a", sandbox.ReasonKilled)
				if h.Memory(machine) != nil {
					t.Error("its machine runs")
				}
				must(t, m.WaitPool(t.Context(), key("pool")))
				claim(t, m, "a", sandbox.Lifetime{})
			})
		})
	}
}

// TestKillWhatIsAdopted: a kill does not wait until a machine has answered.
func TestKillWhatIsAdopted(t *testing.T) {
	restarted(t, sandbox.Lifetime{}, nodetest.ErrHangs, func(t *testing.T, m *Manager, _ *nodetest.Host, _ string) {
		synctest.Wait() // it is being adopted
		begin := time.Now()
		must(t, second(m.Kill(t.Context(), key("a"))))
		if waited := time.Since(begin); waited > 0 {
			t.Errorf("killed after %v", waited)
		}
		wantEnded(t, m, "a", sandbox.ReasonKilled)
	})
}

// TestAnswersLater: a sandbox whose machine answers in the end is as it was.
func TestAnswersLater(t *testing.T) {
	restarted(t, sandbox.Lifetime{}, nodetest.ErrHangs, func(t *testing.T, m *Manager, h *nodetest.Host, machine string) {
		<-m.adopted
		h.RefuseAdoption(machine, nil)
		time.Sleep(2 * adoptSeldom) // the test's own time
		synctest.Wait()
		if s := wantState(t, m, "a", sandbox.Running); s.Unresponsive != "" {
			t.Errorf("%q", s.Unresponsive)
		}
		u, err := m.Use(t.Context(), key("a"))
		if err != nil {
			t.Fatal(err)
		}
		u.Close()
	})
}

// TestSilentTimesOut: the time of a sandbox that does not answer is up as that of any.
func TestSilentTimesOut(t *testing.T) {
	restarted(t, sandbox.Lifetime{Timeout: time.Hour}, nodetest.ErrHangs, func(t *testing.T, m *Manager, _ *nodetest.Host, _ string) {
		time.Sleep(2 * time.Hour) // the test's own time
		synctest.Wait()
		wantEnded(t, m, "a", sandbox.ReasonTimeout)
	})
}

// TestTimeoutCutsOff: a timeout does not wait for a fork that hangs.
func TestTimeoutCutsOff(t *testing.T) {
	onDaemon(t, func(t *testing.T, m *Manager, h *nodetest.Host) {
		claim(t, m, "a", sandbox.Lifetime{Timeout: time.Hour})
		asked := h.HangCaptures()
		forked := make(chan error, 1)
		go func() {
			_, _, err := m.Fork(t.Context(), sandbox.ForkRequest{Key: key("f"), Spec: sandbox.ForkSpec{Source: "a", Replicas: 1}})
			forked <- err
		}()
		<-asked
		select {
		case err := <-forked:
			if err == nil {
				t.Error("it was forked")
			}
		case <-time.After(2 * time.Hour):
			t.Error("the timeout waits for the fork")
			must(t, second(m.Kill(t.Context(), key("a"))))
			<-forked
		}
		synctest.Wait()
		wantEnded(t, m, "a", sandbox.ReasonTimeout)
	})
}

// TestStartWithManySilent: those that answer are adopted beside those that do not.
func TestStartWithManySilent(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		h, dir := nodetest.NewHost(t), t.TempDir()
		before := daemon(t, dir, h)
		setUp(t, before, 0)
		var silent []string
		for i := range 50 {
			s := claim(t, before, fmt.Sprintf("s%d", i), sandbox.Lifetime{})
			if i%5 == 0 {
				silent = append(silent, before.machineDir(s.Machine))
			}
		}
		must(t, before.Close())
		for _, machine := range silent {
			h.RefuseAdoption(machine, nodetest.ErrHangs)
		}
		begin := time.Now()
		m := daemon(t, dir, h)
		defer func() { _ = m.Close() }()
		for i := range 50 {
			if i%5 == 0 {
				continue
			}
			u, err := m.Use(t.Context(), key(fmt.Sprintf("s%d", i)))
			if err != nil {
				t.Fatal(err)
			}
			u.Close()
		}
		if waited := time.Since(begin); waited > 0 {
			t.Errorf("the others were there after %v", waited)
		}
	})
}

// TestSilentNeighbours: however many machines of one namespace do not answer, those of
// another are adopted at once, and their sandboxes can be used.
func TestSilentNeighbours(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		h, dir := nodetest.NewHost(t), t.TempDir()
		before := daemon(t, dir, h)
		setUp(t, before, 0)
		for i := range 3 * adoptions {
			s := claim(t, before, fmt.Sprintf("s%d", i), sandbox.Lifetime{})
			h.RefuseAdoption(before.machineDir(s.Machine), nodetest.ErrHangs)
		}
		other := sandbox.Key{Namespace: "quiet", Name: "python"}
		template(t, before, other, "one")
		must(t, second(before.ApplyPool(t.Context(), other, sandbox.PoolSpec{Template: other.Name})))
		must(t, before.WaitPool(t.Context(), other))
		must(t, second2(before.Claim(t.Context(), sandbox.ClaimRequest{Key: other, Spec: sandbox.ClaimSpec{Pool: other.Name}})))
		must(t, before.Close())
		begin := time.Now()
		m := daemon(t, dir, h)
		defer func() { _ = m.Close() }()
		u, err := m.Use(t.Context(), other)
		if err != nil {
			t.Fatal(err)
		}
		u.Close()
		if waited := time.Since(begin); waited > 0 {
			t.Errorf("it was there after %v", waited)
		}
	})
}

// TestClaimAtOnce: a claim is served by a daemon that has just begun to serve, before its
// pools have looked for their snapshots.
func TestClaimAtOnce(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		dir, h := t.TempDir(), nodetest.NewHost(t)
		m := daemon(t, dir, h)
		setUp(t, m, 1)
		must(t, m.Close())
		for i := range 20 {
			func() {
				m := daemon(t, dir, h)
				defer func() { must(t, m.Close()) }()
				claim(t, m, fmt.Sprintf("at-once-%d", i), sandbox.Lifetime{})
			}()
		}
	})
}

// TestOtherEngine: a daemon with another engine does not take running sandboxes for lost: it
// does not start. Hibernated sandboxes do not prevent it from starting.
func TestOtherEngine(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		h, dir := nodetest.NewHost(t), t.TempDir()
		m := daemon(t, dir, h)
		setUp(t, m, 0)
		claim(t, m, "a", sandbox.Lifetime{})
		claim(t, m, "b", sandbox.Lifetime{})
		must(t, second(m.Hibernate(t.Context(), key("b"))))
		cfg := m.cfg
		must(t, m.Close())
		cfg.Engine = renamed{h}
		_, err := Open(t.Context(), cfg)
		if !sandbox.HasCode(err, sandbox.CodeConflict) || !strings.Contains(err.Error(), "1 sandboxes of its state folder run with the engine fake") {
			t.Errorf("it started: %v", err)
		}
		m = daemon(t, dir, h)
		synctest.Wait()
		wantState(t, m, "a", sandbox.Running)
		must(t, second(m.Hibernate(t.Context(), key("a"))))
		must(t, m.Close())
		m, err = Open(t.Context(), cfg)
		must(t, err)
		wantState(t, m, "a", sandbox.Hibernated)
		must(t, m.Close())
		m = daemon(t, dir, h)
		defer func() { _ = m.Close() }()
		must(t, second(m.Resume(t.Context(), key("a"))))
	})
}
