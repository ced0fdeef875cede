package enginetest

import (
	"context"
	"path/filepath"
	"testing"
	"time"

	"agentrun.dev/internal/engine"
	"agentrun.dev/internal/guest/guestrpc"
	"agentrun.dev/internal/storage/snapshot"
)

// deadline is the timeout of an exec. Its sandbox is away for longer.
const deadline = 12 * time.Second

// sleeper is a sandbox that is written to disk while it stands still, ended, and
// forked again with its identity. Three parts of the suite make one test of it. The
// parts between them use up the time that it is away, and then the time that its exec
// has left. A part that runs alone first does the work of the parts before it.
type sleeper struct {
	who    string // its name and id
	left   time.Time
	asleep *snapshot.Snapshot
	awake  engine.Sandbox
}

const (
	sleeperExec = "long"
	sleeperWho  = "hostname; cat /etc/machine-id"
)

func (z *sleeper) close() {
	if z.awake != nil {
		_ = z.awake.Close()
	}
	if z.asleep != nil {
		_ = z.asleep.Close()
	}
}

// testHibernate: a sandbox that stands still is written to disk and ended while an
// exec runs in it.
func (s *suite) testHibernate(t *testing.T) {
	sb := s.fork(t, s.warm, engine.ForkOptions{Hostname: "sleeper"})
	s.who = sh(t, sb, sleeperWho)
	if _, err := sb.Agent().Exec(t.Context(), guestrpc.ExecRequest{ID: sleeperExec, Argv: []string{"sleep", "1000"}, Timeout: deadline}); err != nil {
		t.Fatal(err)
	}
	if err := sb.Pause(t.Context()); err != nil {
		t.Fatal(err)
	}
	asleep, err := sb.Snapshot(t.Context(), filepath.Join(s.dir, "asleep"))
	if err != nil {
		t.Fatal(err)
	}
	s.asleep = asleep
	if err := sb.Close(); err != nil {
		t.Fatal(err)
	}
	s.left = time.Now()
}

// testWake: a fork of that snapshot is the same sandbox. The timeout of its exec has
// not counted the time away.
func (s *suite) testWake(t *testing.T) {
	if s.asleep == nil {
		s.testHibernate(t)
	}
	time.Sleep(time.Until(s.left.Add(deadline + time.Second))) // time away from the host is the subject of this test
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	awake, err := s.Engine.Fork(ctx, s.asleep, engine.ForkOptions{KeepIdentity: true})
	if err != nil {
		t.Fatal(err)
	}
	s.awake = awake
	if now := sh(t, awake, sleeperWho); now != s.who {
		t.Errorf("it was %q and is %q", s.who, now)
	}
	execs, err := awake.Agent().ListExecs(ctx)
	if err != nil {
		t.Fatal(err)
	}
	for _, e := range execs {
		if e.ID == sleeperExec && !e.Running {
			t.Errorf("an exec with a timeout of %v has ended while its sandbox was away: %+v", deadline, e.Exit)
		}
	}
}

// testTimesOut: the exec still times out.
func (s *suite) testTimesOut(t *testing.T) {
	if s.awake == nil {
		s.testWake(t)
	}
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	again, err := s.awake.Agent().Attach(ctx, guestrpc.AttachRequest{ID: sleeperExec})
	if err != nil {
		t.Fatal(err)
	}
	if st, err := again.Wait(); err != nil || !st.TimedOut {
		t.Errorf("it still has a timeout, but ended with %+v, %v", st, err)
	}
}
