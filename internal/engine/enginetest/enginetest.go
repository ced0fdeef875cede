// Package enginetest holds the tests that every engine must pass. An engine's
// own tests call Run.
package enginetest

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"agentrun.dev/internal/engine"
	"agentrun.dev/internal/guest/guestrpc"
	"agentrun.dev/internal/storage/seal"
	"agentrun.dev/internal/storage/snapshot"
)

// Target describes the engine under test.
type Target struct {
	// Engine is the engine under test.
	Engine engine.Engine
	// Spec describes the sandbox to boot. Its root filesystem has a POSIX
	// shell and the usual tools, and Scratch is not 0 if the engine has disks.
	Spec engine.Spec
	// Forks is how many forks are alive at once in testPrivate.
	Forks int
	// ScratchDevice is the path of the scratch disk in the guest; empty without one.
	ScratchDevice string
	// ChildEnv is the environment in which Orphan opens the same engine.
	ChildEnv []string
	// Key is the key that the engine was opened with.
	Key *seal.Key
	// Skip names the parts of the suite that are not to run.
	Skip []string
}

// patience ends a test that hangs. It measures nothing.
const patience = 5 * time.Minute

// suite is a booted and warmed-up sandbox that was captured once. The tests fork the
// capture.
type suite struct {
	Target
	caps   engine.Capabilities
	booted engine.Sandbox
	warm   *snapshot.Snapshot
	dir    string
	sleeper
}

// Run runs the suite.
func Run(t *testing.T, target Target) {
	s := &suite{Target: target, caps: target.Engine.Capabilities(), dir: t.TempDir()}
	if s.caps.Disks != (s.ScratchDevice != "") {
		t.Fatalf("the engine's disks: %t, the scratch disk: %q", s.caps.Disks, s.ScratchDevice)
	}
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	var err error
	if s.booted, err = target.Engine.Boot(ctx, target.Spec); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = s.booted.Close() })
	// The actions of a template: start a process, write a file, write to a disk.
	sh(t, s.booted, warmUp)
	if s.ScratchDevice != "" {
		sh(t, s.booted, "echo from the parent | dd of="+s.ScratchDevice+" bs=512 conv=fsync 2>/dev/null")
	}
	if s.warm, err = s.booted.Snapshot(ctx, filepath.Join(s.dir, "warm")); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = s.warm.Close() })

	t.Cleanup(s.sleeper.close)
	parts := []part{
		{"Exec", s.testExec},
		{"Dial", s.testDial},
		{"Ports", s.testPorts},
		{"SourceGoesOn", s.testSourceGoesOn},
		{"Hibernate", s.testHibernate},
		{"ForkContinues", s.testForkContinues},
		{"Identity", s.testIdentity},
		{"Private", s.testPrivate},
		{"ForkOfFork", s.testForkOfFork},
		{"LiveFork", s.testLiveFork},
		{"Turns", s.testTurns},
		{"Adopt", s.testAdopt},
		{"AdoptRefuses", s.testAdoptRefuses},
		{"Moved", s.testMoved},
		{"Pause", s.testPause},
		{"Clock", s.testClock},
		{"Park", s.testPark},
		{"Wake", s.testWake},
		{"Sealed", s.testSealed},
		{"Limits", s.testLimits},
		{"Disk", s.testDisk},
		{"Files", s.testFiles},
		{"Adoption", s.testAdoption},
		{"Network", s.testNetwork},
		{"Wire", s.testWire},
		{"NetworkRefuses", s.testNetworkRefuses},
		{"Stats", s.testStats},
		{"Close", s.testClose},
		{"Refuses", s.testRefuses},
		{"TimesOut", s.testTimesOut},
		{"Shutdown", s.testShutdown},
	}
	for _, name := range s.Skip {
		if !slices.ContainsFunc(parts, func(p part) bool { return p.name == name }) {
			t.Errorf("the suite has no part %q", name)
		}
	}
	for _, part := range parts {
		if !slices.Contains(s.Skip, part.name) {
			t.Run(part.name, part.test)
		}
	}
}

// part is one test of the suite.
type part struct {
	name string
	test func(*testing.T)
}

// warmUp leaves a background process that counts in memory and, on SIGUSR1,
// writes its count to a file; and a file in the root filesystem.
const warmUp = `
echo warmed up > /warm
mkdir -p /run/test
cat > /counter.sh <<'END'
n=0
trap 'echo $n > /run/test/count; echo done > /run/test/answer' USR1
echo ready > /run/test/ready
while :; do n=$((n+1)); usleep 200000; done
END
sh /counter.sh </dev/null >/dev/null 2>&1 &
echo $! > /run/test/pid
while ! [ -f /run/test/ready ]; do usleep 1000; done`

// askCounter makes the background process say its count.
const askCounter = `rm -f /run/test/answer; kill -USR1 $(cat /run/test/pid); while ! [ -f /run/test/answer ]; do usleep 1000; done; cat /run/test/count`

func (s *suite) fork(t *testing.T, from *snapshot.Snapshot, opts engine.ForkOptions) engine.Sandbox {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	sb, err := s.Engine.Fork(ctx, from, opts)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = sb.Close() })
	return sb
}

// sh runs a shell command that must succeed and returns what it printed.
func sh(t *testing.T, sb engine.Sandbox, script string) string {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	var stdout, stderr bytes.Buffer
	st, err := sb.Agent().Run(ctx, guestrpc.ExecRequest{Argv: []string{"sh", "-c", script}}, nil, &stdout, &stderr)
	if err != nil || st.Code != 0 {
		t.Fatalf("%s: %+v, %v\n%s%s", script, st, err, stdout.Bytes(), stderr.Bytes())
	}
	return strings.TrimSpace(stdout.String())
}

func (s *suite) testExec(t *testing.T) {
	sb := s.fork(t, s.warm, engine.ForkOptions{})
	var stdout, stderr bytes.Buffer
	st, err := sb.Agent().Run(t.Context(), guestrpc.ExecRequest{Argv: []string{"sh", "-c", "cat; echo err >&2; exit 3"}}, strings.NewReader("in"), &stdout, &stderr)
	if err != nil || st.Code != 3 || stdout.String() != "in" || stderr.String() != "err\n" {
		t.Errorf("%+v, %v, stdout %q, stderr %q", st, err, stdout.Bytes(), stderr.Bytes())
	}
}

func (s *suite) testDial(t *testing.T) {
	sb := s.fork(t, s.warm, engine.ForkOptions{})
	conn, err := sb.Dial(t.Context(), guestrpc.AgentPort)
	if err != nil {
		t.Fatal(err)
	}
	second, err := guestrpc.NewClient(t.Context(), conn)
	if err != nil {
		t.Fatal(err)
	}
	if err := second.Ping(t.Context()); err != nil {
		t.Error(err)
	}
	if err := second.Close(); err != nil && !errors.Is(err, io.EOF) {
		t.Error(err)
	}
	if _, err := sb.Dial(t.Context(), 9); err == nil {
		t.Error("nobody listens on port 9, and yet it was connected")
	}
	s.testDialTCP(t, sb)
}

func (s *suite) testSourceGoesOn(t *testing.T) {
	before := number(t, sh(t, s.booted, askCounter))
	if after := number(t, sh(t, s.booted, askCounter)); after < before {
		t.Errorf("the source counted %d, then %d", before, after)
	}
	if got := sh(t, s.booted, "cat /warm"); got != "warmed up" {
		t.Errorf("its file holds %q", got)
	}
}

// testForkContinues: the warmed-up process goes on in the fork from the instant of
// the capture.
func (s *suite) testForkContinues(t *testing.T) {
	a := s.fork(t, s.warm, engine.ForkOptions{})
	first := number(t, sh(t, a, askCounter))
	if first < 1 {
		t.Errorf("the fork's counter stands at %d", first)
	}
	if pid, was := sh(t, a, "cat /run/test/pid"), sh(t, s.booted, "cat /run/test/pid"); pid != was {
		t.Errorf("the process has pid %s, in the source %s", pid, was)
	}
	if got := sh(t, a, "cat /warm"); got != "warmed up" {
		t.Errorf("files: %q", got)
	}
	if s.ScratchDevice != "" {
		if got := sh(t, a, "head -c 15 "+s.ScratchDevice); got != "from the parent" {
			t.Errorf("the disk holds %q", got)
		}
	}
	// The counter still runs.
	for later := first; later == first; {
		later = number(t, sh(t, a, askCounter))
	}
}

// testIdentity: forks differ in everything that must be unique.
func (s *suite) testIdentity(t *testing.T) {
	const who = `hostname; cat /etc/machine-id; head -c 16 /dev/urandom | od -An -tx1; cat /proc/sys/kernel/random/uuid; cat /run/agentrun/generation; date +%s`
	a := s.fork(t, s.warm, engine.ForkOptions{Hostname: "left"})
	b := s.fork(t, s.warm, engine.ForkOptions{})
	la, lb := strings.Split(sh(t, a, who), "\n"), strings.Split(sh(t, b, who), "\n")
	for i, what := range []string{"host name", "machine id", "random bytes", "uuid"} {
		if la[i] == "" || la[i] == lb[i] {
			t.Errorf("%s: %q and %q", what, la[i], lb[i])
		}
	}
	if la[0] != "left" {
		t.Errorf("host name %q was asked for, it is %q", "left", la[0])
	}
	if la[4] != "1" || lb[4] != "1" {
		t.Errorf("generations %s and %s of first forks", la[4], lb[4])
	}
	now := time.Now().Unix()
	if clock := int64(number(t, la[5])); clock < now-patienceForClock || clock > now+patienceForClock {
		t.Errorf("the fork's clock says %d, ours %d", clock, now)
	}
}

// patienceForClock is how many seconds a fork's wall clock may be from ours when we
// look. The look itself takes time on a slow machine.
const patienceForClock = 60

// testMoved: a snapshot's folder works at another path.
func (s *suite) testMoved(t *testing.T) {
	source := s.fork(t, s.warm, engine.ForkOptions{})
	here, there := filepath.Join(s.dir, "here"), filepath.Join(t.TempDir(), "there")
	snap, err := source.Snapshot(t.Context(), here)
	if err != nil {
		t.Fatal(err)
	}
	id := snap.ID()
	if err := snap.Close(); err != nil {
		t.Fatal(err)
	}
	if err := os.Rename(here, there); err != nil {
		t.Fatal(err)
	}
	moved, err := snapshot.Open(there)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = moved.Close() }()
	if moved.ID() != id {
		t.Errorf("id %s became %s", id, moved.ID())
	}
	m := moved.Manifest()
	if err := s.Engine.Fits(m); err != nil {
		t.Errorf("it does not fit: %v", err)
	}
	m.Engine = "other/1"
	if err := s.Engine.Fits(m); !errors.Is(err, engine.ErrMismatch) {
		t.Errorf("another engine's fits: %v", err)
	}
	if got := sh(t, s.fork(t, moved, engine.ForkOptions{}), "cat /warm"); got != "warmed up" {
		t.Errorf("%q", got)
	}
}

// testPause: a paused sandbox answers nothing. Its monotonic clock counts the pause
// exactly if the engine says that it does.
func (s *suite) testPause(t *testing.T) {
	sb := s.fork(t, s.warm, engine.ForkOptions{})
	// uptime reads the guest's clock, at some time between from and to.
	uptime := func() (now time.Duration, from, to time.Time) {
		from = time.Now()
		f, err := strconv.ParseFloat(strings.Fields(sh(t, sb, "cat /proc/uptime"))[0], 64)
		if err != nil {
			t.Fatal(err)
		}
		return time.Duration(f * float64(time.Second)), from, time.Now()
	}
	clock := setBack(t, sb)
	begin, earliest, latest := uptime()
	if err := sb.Pause(t.Context()); err != nil {
		t.Fatal(err)
	}
	paused := time.Now()
	const pause = 3 * time.Second
	ctx, cancel := context.WithTimeout(t.Context(), pause)
	defer cancel()
	if err := sb.Agent().Ping(ctx); err == nil {
		t.Error("a paused sandbox answered")
	}
	<-ctx.Done()
	gap := time.Since(paused)
	if err := sb.Resume(t.Context()); err != nil {
		t.Fatal(err)
	}
	clock(t)
	end, from, to := uptime()
	// A busy host runs programs late, so the time that has passed is known only
	// within these bounds.
	passed, least, most := end-begin, from.Sub(latest), to.Sub(earliest)
	if s.caps.ClockCountsPauses && passed < least-time.Second || !s.caps.ClockCountsPauses && passed > most-gap+time.Second {
		t.Errorf("the guest counted %v of %v to %v, of which %v were paused; the engine says that it counts pauses: %t", passed, least, most, gap, s.caps.ClockCountsPauses)
	}
	if err := sb.Agent().Ping(t.Context()); err != nil {
		t.Error(err)
	}
}

func (s *suite) testStats(t *testing.T) {
	sb := s.fork(t, s.warm, engine.ForkOptions{})
	before, err := sb.Stats(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	if (before.Layers > 0) != s.caps.SharesMemory {
		t.Errorf("its memory is made of %d layers; the engine says that forks share memory: %t", before.Layers, s.caps.SharesMemory)
	}
	const size = 32 << 20
	sh(t, sb, fmt.Sprintf("dd if=/dev/urandom of=/dev/shm/big bs=1048576 count=%d 2>/dev/null || { mkdir -p /big && mount -t tmpfs none /big && dd if=/dev/urandom of=/big/big bs=1048576 count=%d; }", size>>20, size>>20))
	after, err := sb.Stats(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	if before.Own == 0 || before.Proportional < before.Own || after.Own < before.Own+size || before.Generation != 1 || after.CPU <= before.CPU {
		t.Errorf("before %+v, after writing %d MiB %+v", before, size>>20, after)
	}
}

func (s *suite) testClose(t *testing.T) {
	sb := s.fork(t, s.warm, engine.ForkOptions{})
	if err := sb.Close(); err != nil {
		t.Fatal(err)
	}
	select {
	case <-sb.Done():
	default:
		t.Error("Done is not closed after Close")
	}
	for what, err := range map[string]error{
		"wait": sb.Wait(), "pause": sb.Pause(t.Context()), "resume": sb.Resume(t.Context()),
		"stats": second(sb.Stats(t.Context())), "snapshot": second(sb.Snapshot(t.Context(), filepath.Join(s.dir, "late"))),
		"dial": second(sb.Dial(t.Context(), guestrpc.AgentPort)),
	} {
		if !errors.Is(err, engine.ErrEnded) {
			t.Errorf("%s of a closed sandbox: %v, not %v", what, err, engine.ErrEnded)
		}
	}
	if _, err := os.Stat(filepath.Join(s.dir, "late")); err == nil {
		t.Error("a snapshot of a closed sandbox was left behind")
	}
}

func (s *suite) testRefuses(t *testing.T) {
	sb := s.fork(t, s.warm, engine.ForkOptions{})
	if _, err := sb.Snapshot(t.Context(), filepath.Join(s.dir, "warm")); err == nil {
		t.Error("a snapshot was overwritten")
	}
	if _, err := sb.Snapshot(t.Context(), filepath.Join(s.dir, "missing", "folder")); err == nil {
		t.Error("a snapshot was made in a folder that is not there")
	}
	if got := sh(t, sb, "echo still here"); got != "still here" {
		t.Errorf("after refusals: %q", got)
	}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if left, err := s.Engine.Fork(ctx, s.warm, engine.ForkOptions{}); err == nil {
		t.Error("a fork succeeded after its context was cancelled")
		_ = left.Close()
	}
}

func (s *suite) testShutdown(t *testing.T) {
	sb := s.fork(t, s.warm, engine.ForkOptions{})
	if err := sb.Shutdown(t.Context(), 2*time.Second); err != nil {
		t.Error(err)
	}
	<-sb.Done()
}

func number(t *testing.T, s string) int {
	t.Helper()
	n, err := strconv.Atoi(strings.TrimSpace(s))
	if err != nil {
		t.Fatalf("%q is no number", s)
	}
	return n
}

// second is the error of a call with one other result.
func second[T any](_ T, err error) error { return err }
