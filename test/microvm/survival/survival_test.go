// Package survival repeatedly kills the parent of sandboxes during its work,
// and checks what the next parent finds.
package survival

import (
	"bufio"
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"maps"
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

	"agentrun.dev/internal/client/local"
	"agentrun.dev/internal/engine"
	"agentrun.dev/internal/engine/microvm"
	"agentrun.dev/internal/engine/pick"
	"agentrun.dev/internal/storage/image"
	"agentrun.dev/internal/storage/layer"
	"agentrun.dev/internal/storage/snapshot"
	"agentrun.dev/test/soak"
	"golang.org/x/sys/unix"
)

// parentEnv makes this program a parent that works until it is killed.
const parentEnv = "AGENTRUN_TEST_PARENT"

const (
	base = local.Name("base")
	mib  = 1 << 20
)

func TestMain(m *testing.M) {
	if dir := os.Getenv(parentEnv); dir != "" {
		if err := work(dir); err != nil {
			fmt.Fprintln(os.Stderr, err)
		}
		os.Exit(1) // the parent should have been killed
	}
	os.Exit(m.Run())
}

// TestParentKilled: a parent may be killed during any operation. Another parent
// then finds every VM that lives, and each continues, or is known as half made
// and can be removed. Every snapshot is complete. The next parent can use
// everything, and no sandbox or vmm process is left after it has removed everything.
func TestParentKilled(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "state")
	s, err := local.Open(dir, microvm.JailPolicy{})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = s.Close() })
	template(t, s)
	before := vmms(t)
	var good layers
	for range soak.Count(20, 3) {
		kill(t, dir)
		adopt(t, s, &good)
		if t.Failed() {
			return
		}
		known := list(t, s)
		for _, pid := range vmms(t) {
			if !slices.Contains(before, pid) && !slices.ContainsFunc(known, func(e local.Entry) bool { return e.PID == pid }) {
				t.Fatalf("vmm process %d is nobody's", pid)
			}
		}
	}
	if err := fork(s, base, "last"); err != nil {
		t.Fatal(err)
	}
	if err := say(s, "last", "good"); err != nil {
		t.Fatal(err)
	}
	for _, e := range list(t, s) {
		if err := s.Remove(t.Context(), e.Name); err != nil {
			t.Error(err)
		}
	}
	if left := list(t, s); len(left) > 0 {
		t.Errorf("left: %+v", left)
	}
	if left := slices.DeleteFunc(vmms(t), func(pid int) bool { return slices.Contains(before, pid) }); len(left) > 0 {
		t.Errorf("vmm processes %v are left", left)
	}
}

func list(t *testing.T, s *local.Store) []local.Entry {
	t.Helper()
	entries, err := s.List()
	if err != nil {
		t.Fatal(err)
	}
	return entries
}

// template makes the snapshot that all sandboxes are forked from.
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

// kill starts a parent and kills it at a random moment.
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
	// The kill comes after some steps, during the next one.
	lines := bufio.NewScanner(out)
	steps, going, done := 1+rand.IntN(max(20, workers())), map[string]int{}, map[string]int{}
	note := func() bool {
		what := lines.Text()
		if op, ok := strings.CutPrefix(what, ended); ok {
			done[op]++
			going[op]--
			return true
		}
		going[strings.TrimPrefix(what, begins)]++
		return false
	}
	for left := steps; left > 0 && lines.Scan(); {
		if note() {
			left--
		}
	}
	time.Sleep(time.Duration(rand.IntN(100)) * time.Millisecond)
	_ = cmd.Process.Kill() // it may have ended by itself
	for lines.Scan() {
		note()
	}
	_ = cmd.Wait()
	if stderr.Len() > 0 {
		t.Fatalf("the parent said: %s", stderr.String())
	}
	maps.DeleteFunc(going, func(_ string, n int) bool { return n == 0 })
	t.Logf("%s: did %v, killed in the middle of %v", time.Now().Format(time.TimeOnly), done, going)
}

// adopt checks everything that a dead parent has left, and removes sandboxes that
// are half made. It leaves the rest paused for the next parent, because fifty
// waiting sandboxes would take all the time of an emulated machine.
func adopt(t *testing.T, s *local.Store, good *layers) {
	t.Helper()
	found := map[string]int{}
	var all sync.WaitGroup
	for _, e := range list(t, s) {
		whole := true
		if e.Status == local.StatusRunning || e.Status == local.StatusPaused || e.Status == local.StatusAsleep || e.Kind == local.KindSnapshot {
			found[e.Kind+" "+e.Status]++
		} else {
			whole = false
			found["other"]++
			t.Logf("%s %s: %s", e.Kind, e.Name, e.Status)
		}
		all.Go(func() {
			err := check(s, e, good)
			switch {
			case !whole:
				err = errors.Join(err, s.Remove(context.Background(), e.Name))
			case err == nil && e.Kind == local.KindSandbox:
				err = s.Pause(context.Background(), e.Name)
			}
			if err != nil {
				t.Errorf("%s %s (%s): %v", e.Kind, e.Name, e.Status, err)
			}
		})
	}
	all.Wait()
	t.Logf("%s: found %v", time.Now().Format(time.TimeOnly), found)
}

// layers are the files of layers that were verified. Snapshots share them.
type layers struct{ files sync.Map }

// verify reads those layers of a snapshot that were not verified before.
func (l *layers) verify(ctx context.Context, snap *snapshot.Snapshot) error {
	for _, ref := range snap.Manifest().Layers() {
		if err := l.read(ctx, snap, ref); err != nil {
			return fmt.Errorf("layer %s: %w", ref.Digest, err)
		}
	}
	return nil
}

func (l *layers) read(ctx context.Context, snap *snapshot.Snapshot, ref layer.Ref) error {
	f, err := snap.OpenLayer(ref)
	if err != nil {
		return err
	}
	defer func() { _ = f.Close() }() // only read from
	var st unix.Stat_t
	if err := unix.Fstat(int(f.Fd()), &st); err != nil {
		return err
	}
	file := fmt.Sprint(st.Dev, st.Ino, st.Mtim, ref.Digest)
	if _, known := l.files.Load(file); known {
		return nil
	}
	if err := layer.Copy(ctx, io.Discard, f, ref); err != nil {
		return err
	}
	l.files.Store(file, true)
	return nil
}

func check(s *local.Store, e local.Entry, good *layers) error {
	switch {
	case e.Kind == local.KindSnapshot:
		snap, err := snapshot.Open(s.SnapshotFolder(e.Name))
		if err != nil {
			return err
		}
		return errors.Join(good.verify(context.Background(), snap), snap.Close())
	case e.Status == local.StatusRunning, e.Status == local.StatusPaused, e.Status == local.StatusAsleep:
		return say(s, e.Name, "adopted")
	case strings.Contains(e.Status, "half made"):
		return nil
	}
	return errors.New("it is neither there nor half made")
}

// vmms lists the vmm processes.
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
