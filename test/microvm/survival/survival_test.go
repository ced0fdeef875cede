// Package survival kills the parent of sandboxes again and again, in the middle
// of everything, and looks at what another parent finds.
package survival

import (
	"bufio"
	"bytes"
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"agentrun.dev/internal/engine"
	"agentrun.dev/internal/engine/microvm"
	"agentrun.dev/internal/engine/pick"
	"agentrun.dev/internal/guestrpc"
	"agentrun.dev/internal/image"
	"agentrun.dev/internal/local"
	"agentrun.dev/internal/snapshot"
)

// parentEnv makes this program a parent that works until it is killed.
const parentEnv = "AGENTRUN_TEST_PARENT"

const (
	base    = local.Name("base")
	mib     = 1 << 20
	started = "working"
)

func count(n, reduced int) int {
	soak := os.Getenv("AGENTRUN_SOAK")
	if soak == "" {
		return reduced
	}
	if most, err := strconv.Atoi(soak); err == nil && most > 1 {
		n = max(reduced, min(n, most))
	}
	return n
}

func TestMain(m *testing.M) {
	if dir := os.Getenv(parentEnv); dir != "" {
		if err := work(dir); err != nil {
			fmt.Fprintln(os.Stderr, err)
		}
		os.Exit(1) // it should have been killed
	}
	os.Exit(m.Run())
}

// work runs many operations at once, for ever.
func work(dir string) error {
	s, err := local.Open(dir, microvm.JailPolicy{})
	if err != nil {
		return err
	}
	fmt.Println(started)
	errs := make(chan error)
	for i := range workers() {
		go func() { errs <- live(s, "w"+strconv.Itoa(i)) }()
	}
	return <-errs
}

func workers() int { return count(50, 4) }

// live makes a sandbox, uses it, captures it, lets it sleep and wake, forks it
// and removes it all, again and again. It returns the first error.
func live(s *local.Store, name string) error {
	ctx := context.Background()
	box, kept, child, twin := local.Name(name), local.Name(name+"-kept"), local.Name(name+"-child"), local.Name(name+"-twin")
	for {
		for _, step := range []func() error{
			func() error { return fork(s, base, box) },
			func() error { return say(s, box, "hello") },
			func() error { return fork(s, box, twin) }, // of one that runs
			func() error { return say(s, twin, "hello") },
			func() error { return s.Capture(ctx, box, kept) },
			func() error { return s.Hibernate(ctx, box) },
			func() error { return fork(s, kept, child) },
			func() error { return s.Resume(ctx, box) },
			func() error { return s.Pause(ctx, child) },
			func() error { return say(s, child, "hello") },
			func() error { return errors.Join(s.Remove(ctx, child), s.Remove(ctx, twin)) },
			func() error { return errors.Join(s.Remove(ctx, box), s.Remove(ctx, kept)) },
		} {
			if err := step(); err != nil {
				return fmt.Errorf("%s: %w", name, err)
			}
			fmt.Println(started)
		}
	}
}

func fork(s *local.Store, from, to local.Name) error {
	f, err := s.Fork(context.Background(), from, []local.Name{to}, engine.Limits{})
	if err != nil {
		return err
	}
	return errors.Join(f.Errs...)
}

// say has a sandbox repeat a word.
func say(s *local.Store, name local.Name, word string) (err error) {
	ctx := context.Background()
	sb, err := s.Attach(ctx, name)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, sb.Detach()) }()
	var out bytes.Buffer
	st, err := sb.Agent().Run(ctx, guestrpc.ExecRequest{Argv: []string{"echo", word}}, nil, &out, nil)
	if err == nil && (st.Code != 0 || strings.TrimSpace(out.String()) != word) {
		err = fmt.Errorf("%s said %q with exit code %d", name, out.String(), st.Code)
	}
	return err
}

// TestParentKilled: whatever a parent was doing when it was killed, every VM
// that lives is found by another parent and goes on, or is known as half made
// and can be removed; no snapshot is there in part; and when all are removed
// nothing is left.
func TestParentKilled(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "state")
	s, err := local.Open(dir, microvm.JailPolicy{})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = s.Close() })
	template(t, s)
	before := vmms(t)
	for range count(20, 2) {
		kill(t, dir)
		adopt(t, s)
		if left := slices.DeleteFunc(vmms(t), func(pid int) bool { return slices.Contains(before, pid) }); len(left) > 0 {
			t.Fatalf("vmm processes %v are left", left)
		}
	}
	if err := fork(s, base, "last"); err != nil {
		t.Fatal(err)
	}
	if err := errors.Join(say(s, "last", "good"), s.Remove(t.Context(), "last"), s.Remove(t.Context(), base)); err != nil {
		t.Fatal(err)
	}
}

// template makes what all sandboxes are forked from.
func template(t *testing.T, s *local.Store) {
	t.Helper()
	tmp := t.TempDir()
	root := filepath.Join(tmp, "root")
	if out, err := exec.Command("../../../guest/rootfs/busybox.sh", root).CombinedOutput(); err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	file := filepath.Join(tmp, "root.erofs")
	if err := image.FromDir(t.Context(), root, file); err != nil {
		t.Fatal(err)
	}
	f, err := os.Open(file)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = f.Close() }()
	spec := engine.Spec{Root: f, Memory: 64 * mib, VCPUs: 1, Scratch: 8 * mib, Hostname: "base"}
	if err := s.Template(t.Context(), base, pick.MicroVM, spec, func(engine.Sandbox) error { return nil }); err != nil {
		t.Fatal(err)
	}
}

// kill starts a parent and kills it at some moment.
func kill(t *testing.T, dir string) {
	t.Helper()
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	cmd := exec.Command(self)
	cmd.Env = append(os.Environ(), parentEnv+"="+dir)
	var stderr bytes.Buffer
	cmd.Stderr = &stderr
	out, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	// After some steps, and then in the middle of whatever comes next.
	lines := bufio.NewScanner(out)
	steps := 1 + rand.IntN(12*workers())
	for range steps {
		if !lines.Scan() {
			break
		}
	}
	time.Sleep(time.Duration(rand.IntN(100)) * time.Millisecond)
	_ = cmd.Process.Kill() // it may have ended by itself
	_ = cmd.Wait()
	if stderr.Len() > 0 {
		t.Fatalf("the parent said: %s", stderr.String())
	}
	t.Logf("killed after %d steps", steps)
}

// adopt looks at everything that a dead parent has left, and removes it.
func adopt(t *testing.T, s *local.Store) {
	t.Helper()
	entries, err := s.List()
	if err != nil {
		t.Fatal(err)
	}
	var all sync.WaitGroup
	for _, e := range entries {
		t.Logf("%s %s: %s", e.Kind, e.Name, e.Status)
		all.Go(func() {
			if err := check(s, e); err != nil {
				t.Errorf("%s %s (%s): %v", e.Kind, e.Name, e.Status, err)
			}
			if e.Name != base {
				if err := s.Remove(context.Background(), e.Name); err != nil {
					t.Error(err)
				}
			}
		})
	}
	all.Wait()
	left, err := s.List()
	if err != nil || len(left) != 1 {
		t.Errorf("left: %+v, %v", left, err)
	}
}

func check(s *local.Store, e local.Entry) error {
	switch {
	case e.Kind == local.KindSnapshot:
		snap, err := snapshot.Open(s.SnapshotFolder(e.Name))
		if err != nil {
			return err
		}
		return errors.Join(snap.Verify(context.Background()), snap.Close())
	case e.Status == local.StatusRunning, e.Status == local.StatusPaused, e.Status == local.StatusAsleep:
		return say(s, e.Name, "adopted")
	case strings.Contains(e.Status, "half made"):
		return nil
	}
	return errors.New("it is neither there nor half made")
}

// vmms lists the processes that run a VM.
func vmms(t *testing.T) (pids []int) {
	t.Helper()
	names, err := filepath.Glob("/proc/[0-9]*/comm")
	if err != nil {
		t.Fatal(err)
	}
	for _, path := range names {
		b, err := os.ReadFile(path)
		if err == nil && strings.TrimSpace(string(b)) == "vmm" {
			pid, err := strconv.Atoi(filepath.Base(filepath.Dir(path)))
			if err != nil {
				t.Fatal(err)
			}
			pids = append(pids, pid)
		}
	}
	return pids
}
