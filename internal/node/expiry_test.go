package node

import (
	"math"
	"testing"
	"testing/synctest"
	"time"

	"agentrun.dev/internal/node/nodetest"
	"agentrun.dev/internal/sandbox"
)

// until is a life with an end time.
func until(d time.Duration, action sandbox.TimeoutAction) sandbox.Lifetime {
	return sandbox.Lifetime{Expires: time.Now().Add(d), OnTimeout: action}
}

// TestExpires: a sandbox ends at its end time in every state, whatever its timeouts would do, and
// neither sooner nor because somebody extends its timeout.
func TestExpires(t *testing.T) {
	onDaemon(t, func(t *testing.T, m *Manager, h *nodetest.Host) {
		life := until(time.Hour, sandbox.TimeoutHibernate)
		for _, name := range []string{"runs", "stands", "sleeps", "used", "moved", "woken"} {
			claim(t, m, name, life)
		}
		must(t, second(m.Pause(t.Context(), key("stands"))), second(m.Hibernate(t.Context(), key("sleeps"))), second(m.Extend(t.Context(), key("runs"), 3*time.Hour)))
		u, err := m.Use(t.Context(), key("used"))
		if err != nil {
			t.Fatal(err)
		}
		must(t, second(m.SetExpiry(t.Context(), key("moved"), time.Now().Add(2*time.Hour))))
		must(t, second(m.Hibernate(t.Context(), key("woken"))), second(m.Resume(t.Context(), key("woken"))))
		time.Sleep(time.Hour - time.Second)
		synctest.Wait()
		for name, state := range map[string]sandbox.State{
			"runs": sandbox.Running, "stands": sandbox.Paused, "sleeps": sandbox.Hibernated, "used": sandbox.Running, "woken": sandbox.Running,
		} {
			wantState(t, m, name, state)
		}
		time.Sleep(2 * time.Second)
		synctest.Wait()
		for _, name := range []string{"runs", "stands", "sleeps", "used", "woken"} {
			wantEnded(t, m, name, sandbox.ReasonTimeout)
		}
		u.Close()
		wantState(t, m, "moved", sandbox.Running)
		time.Sleep(time.Hour)
		synctest.Wait()
		wantEnded(t, m, "moved", sandbox.ReasonTimeout)
		wantNothing(t, m, h)
	})
}

// TestExpiresOverRestarts: an end time is kept by the next daemon, also one that passed while no
// daemon ran.
func TestExpiresOverRestarts(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		dir, h := t.TempDir(), nodetest.NewHost(t)
		m := daemon(t, dir, h)
		defer func() { _ = m.Close() }()
		setUp(t, m, 0)
		for _, name := range []string{"runs", "stands", "sleeps"} {
			claim(t, m, name, until(time.Hour, sandbox.TimeoutPause))
			claim(t, m, "later-"+name, until(3*time.Hour, sandbox.TimeoutPause))
		}
		for _, prefix := range []string{"", "later-"} {
			must(t, second(m.Pause(t.Context(), key(prefix+"stands"))), second(m.Hibernate(t.Context(), key(prefix+"sleeps"))))
		}
		must(t, m.Close())
		time.Sleep(2 * time.Hour)
		m = daemon(t, dir, h)
		synctest.Wait()
		for _, name := range []string{"runs", "stands", "sleeps"} {
			wantEnded(t, m, name, sandbox.ReasonTimeout)
		}
		wantState(t, m, "later-runs", sandbox.Running)
		wantState(t, m, "later-stands", sandbox.Paused)
		wantState(t, m, "later-sleeps", sandbox.Hibernated)
		time.Sleep(time.Hour)
		synctest.Wait()
		for _, name := range []string{"later-runs", "later-stands", "later-sleeps"} {
			wantEnded(t, m, name, sandbox.ReasonTimeout)
		}
		wantNothing(t, m, h)
	})
}

// TestExpiryIsSooner: of an end time and a timeout the first one is acted upon.
func TestExpiryIsSooner(t *testing.T) {
	onDaemon(t, func(t *testing.T, m *Manager, _ *nodetest.Host) {
		life := until(time.Hour, sandbox.TimeoutPause)
		life.Timeout = time.Minute
		claim(t, m, "a", life)
		time.Sleep(2 * time.Minute)
		synctest.Wait()
		wantState(t, m, "a", sandbox.Paused)
		time.Sleep(time.Hour)
		synctest.Wait()
		wantEnded(t, m, "a", sandbox.ReasonTimeout)
	})
}

// TestExtendedForEver: the longest timeout that can be is long, and no negative one, which no
// client of the node's API could read.
func TestExtendedForEver(t *testing.T) {
	onDaemon(t, func(t *testing.T, m *Manager, _ *nodetest.Host) {
		claim(t, m, "a", sandbox.Lifetime{Timeout: time.Hour})
		time.Sleep(time.Minute)
		if s, err := m.Extend(t.Context(), key("a"), math.MaxInt64); err != nil || s.Timeout != math.MaxInt64 {
			t.Errorf("%v, %v", s.Timeout, err)
		}
		time.Sleep(1000 * time.Hour)
		synctest.Wait()
		wantState(t, m, "a", sandbox.Running)
	})
}

// TestExpiryThatHasPassed is refused, and makes nothing.
func TestExpiryThatHasPassed(t *testing.T) {
	onDaemon(t, func(t *testing.T, m *Manager, _ *nodetest.Host) {
		past := sandbox.Lifetime{Expires: time.Now()}
		_, _, err := m.Claim(t.Context(), sandbox.ClaimRequest{Key: key("a"), Spec: sandbox.ClaimSpec{Pool: "pool", Lifetime: past}})
		wantInvalid(t, err)
		claim(t, m, "a", until(time.Minute, ""))
		wantInvalid(t, second(m.SetExpiry(t.Context(), key("a"), time.Now().Add(-time.Second))))
		wantInvalid(t, second(m.SetExpiry(t.Context(), key("a"), time.Time{})))
		checkpoint(t, m, "c", "a")
		_, _, err = m.Restore(t.Context(), sandbox.RestoreRequest{Key: key("r"), Checkpoint: "c", Spec: sandbox.RestoreSpec{Lifetime: past}})
		wantInvalid(t, err)
		wantState(t, m, "a", sandbox.Running)
	})
}

func wantInvalid(t *testing.T, err error) {
	t.Helper()
	if !sandbox.HasCode(err, sandbox.CodeInvalid) {
		t.Errorf("%v", err)
	}
}

// TestExpiresWhileATimeoutWaits: a timeout that waits for an operation on the sandbox does not
// delay the sandbox's end time.
func TestExpiresWhileATimeoutWaits(t *testing.T) {
	for _, action := range []sandbox.TimeoutAction{sandbox.TimeoutPause, sandbox.TimeoutHibernate} {
		onDaemon(t, func(t *testing.T, m *Manager, h *nodetest.Host) {
			life := until(time.Hour, action)
			life.Timeout = time.Minute
			claim(t, m, "a", life)
			asked := h.HangCaptures()
			captured := make(chan error, 1)
			go func() {
				_, _, err := m.Checkpoint(t.Context(), sandbox.CheckpointRequest{Key: key("c"), Source: "a"})
				captured <- err
			}()
			<-asked
			time.Sleep(time.Hour + time.Second)
			synctest.Wait()
			select {
			case err := <-captured:
				if err == nil {
					t.Error("it was captured")
				}
			default:
				t.Error("it lives on")
				must(t, second(m.Kill(t.Context(), key("a"))))
				<-captured
				return
			}
			wantEnded(t, m, "a", sandbox.ReasonTimeout)
		})
	}
}

// TestClockIsLookedAt: of a sandbox with an end time, also where its timeout is the next: a timer
// stands still while the host is suspended, and the clock does not.
func TestClockIsLookedAt(t *testing.T) {
	onDaemon(t, func(t *testing.T, m *Manager, _ *nodetest.Host) {
		for _, life := range []sandbox.Lifetime{until(10*time.Hour, ""), until(10*time.Hour, sandbox.TimeoutPause)} {
			life.Timeout = time.Hour
			claim(t, m, "a", life)
			b, err := m.find(key("a"))
			must(t, err)
			b.mu.Lock()
			wait, limited := b.wait(time.Now())
			b.mu.Unlock()
			if !limited || wait > clockEvery {
				t.Errorf("it is not looked at for %v", wait)
			}
			must(t, second(m.Kill(t.Context(), key("a"))))
		}
	})
}

// TestExtendedAtTheEnd: whoever was told that a sandbox lives longer finds it alive.
func TestExtendedAtTheEnd(t *testing.T) {
	onDaemon(t, func(t *testing.T, m *Manager, _ *nodetest.Host) {
		claim(t, m, "a", until(time.Hour, ""))
		b, err := m.find(key("a"))
		must(t, err)
		must(t, second(m.Hibernate(t.Context(), key("a"))), b.lock(t.Context()))
		time.Sleep(time.Hour)
		synctest.Wait() // expire waits for its turn
		must(t, b.change(func(s *sandbox.Sandbox) { s.Expires = s.Expires.Add(time.Hour) }))
		b.unlock()
		synctest.Wait()
		wantState(t, m, "a", sandbox.Hibernated)
		time.Sleep(time.Hour + time.Second)
		synctest.Wait()
		wantEnded(t, m, "a", sandbox.ReasonTimeout)
	})
}
