package snapshot

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"

	"agentrun.dev/internal/storage/layer"
)

// childEnv makes the test binary a process that dies while it makes a snapshot.
// Its value is "folder steps layer digest size".
const childEnv = "AGENTRUN_TEST_COMMIT"

func TestMain(m *testing.M) {
	if args := os.Getenv(childEnv); args != "" {
		fmt.Fprintln(os.Stderr, "not killed:", commitInPart(args))
		os.Exit(1)
	}
	os.Exit(m.Run())
}

// commitInPart does that many steps of a commit and then kills its process.
// Step -2 is before the layer is added, step -1 before the commit.
func commitInPart(args string) error {
	var dir, path, digest string
	var ref layer.Ref
	var n int
	if _, err := fmt.Sscan(args, &dir, &n, &path, &digest, &ref.Size); err != nil {
		return err
	}
	var err error
	if ref.Digest, err = layer.ParseDigest(digest); err != nil {
		return err
	}
	die := func() error { return syscall.Kill(os.Getpid(), syscall.SIGKILL) }
	b, err := NewBuilder(dir)
	if err != nil {
		return err
	}
	if n == -2 {
		return die()
	}
	src, err := os.Open(path)
	if err != nil {
		return err
	}
	if err := b.AddLayer(ref, src); err != nil {
		return err
	}
	steps, err := b.plan(manifest(ref, ref), state)
	if err != nil {
		return err
	}
	for i := range n {
		if err := steps[i].do(); err != nil {
			return err
		}
	}
	return die()
}

// TestKilled kills a process before each step of a commit and after the last
// one. Afterwards there is either no snapshot or a complete one.
func TestKilled(t *testing.T) {
	exe, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	ref, f := layerFile(t, 3, 10)
	move, steps := planned(t, ref, f)
	for n := -2; n <= steps; n++ {
		home := t.TempDir()
		dir := filepath.Join(home, "one")
		cmd := exec.CommandContext(t.Context(), exe)
		cmd.Env = append(os.Environ(), fmt.Sprintf("%s=%s %d %s %s %d", childEnv, dir, n, f.Name(), ref.Digest, ref.Size))
		out, err := cmd.CombinedOutput()
		var exit *exec.ExitError
		if !errors.As(err, &exit) || exit.Sys().(syscall.WaitStatus).Signal() != syscall.SIGKILL {
			t.Fatalf("%d steps: %v\n%s", n, err, out)
		}
		s, err := Open(dir)
		if err == nil {
			err = s.Close()
		}
		complete := n > move
		if complete != (err == nil) {
			t.Errorf("%d steps: opened with %v", n, err)
		}
		if !complete && !errors.Is(err, fs.ErrNotExist) {
			t.Errorf("%d steps left something: %v", n, err)
		}
		if left := names(t, home); len(left) != 1 {
			t.Errorf("%d steps left %v", n, left)
		}
		if err := CleanTemp(home); err != nil {
			t.Error(err)
		}
		if !complete {
			if left := names(t, home); left != nil {
				t.Errorf("%d steps, after the cleaning: %v", n, left)
			}
			continue
		}
		opened(t, dir)
	}
}

// planned returns the index of the move and the number of steps.
func planned(t *testing.T, ref layer.Ref, f *os.File) (move, steps int) {
	t.Helper()
	b, err := NewBuilder(filepath.Join(t.TempDir(), "one"))
	if err != nil {
		t.Fatal(err)
	}
	defer b.Abort()
	if err := b.AddLayer(ref, f); err != nil {
		t.Fatal(err)
	}
	list, err := b.plan(manifest(ref, ref), state)
	if err != nil {
		t.Fatal(err)
	}
	move = slices.IndexFunc(list, func(s step) bool { return s.name == "move into place" })
	if move < 0 {
		t.Fatal("no move in the plan")
	}
	return move, len(list)
}

func TestAddLayerRefuses(t *testing.T) {
	home := t.TempDir()
	b, err := NewBuilder(filepath.Join(home, "one"))
	if err != nil {
		t.Fatal(err)
	}
	ref, f := layerFile(t, 3, 10)
	wrong := layer.Ref{Digest: layer.Digest{1}, Size: ref.Size}
	wantError(t, b.AddLayer(wrong, f), "add layer "+wrong.Digest.String(), ref.Digest.String())
	short := layer.Ref{Digest: ref.Digest, Size: page}
	wantError(t, b.AddLayer(short, f), "40960", "4096 are expected")
	if got := names(t, filepath.Join(home, b.temp, layersName)); got != nil {
		t.Errorf("left are %v", got)
	}
	if err := b.AddLayer(ref, f); err != nil {
		t.Error(err)
	}
	wantError(t, b.AddLayer(short, f), "40960 bytes, not 4096")

	m := manifest(ref, ref)
	missing := m
	missing.Memory = stack(wrong)
	_, err = b.Commit(missing, state)
	wantError(t, err, "layer "+wrong.Digest.String(), "was not added")
	bad := m
	bad.VCPUs = 0
	_, err = b.Commit(bad, state)
	wantError(t, err, "commit snapshot", "vcpus")
	_, err = b.Commit(m, nil)
	wantError(t, err, "state")
	for range 2 {
		if err := b.Abort(); err != nil {
			t.Error(err)
		}
	}
	_, err = b.Commit(m, state)
	wantError(t, err, "aborted")
	wantError(t, b.AddLayer(ref, f), "aborted")
	if got := names(t, home); got != nil {
		t.Errorf("left are %v", got)
	}
}

// TestCommitRefuses: Commit does not replace a folder that has appeared at its
// place.
func TestCommitRefuses(t *testing.T) {
	home := t.TempDir()
	dir := filepath.Join(home, "one")
	b, err := NewBuilder(dir)
	if err != nil {
		t.Fatal(err)
	}
	ref, f := layerFile(t, 3, 10)
	if err := b.AddLayer(ref, f); err != nil {
		t.Fatal(err)
	}
	if err := os.Mkdir(dir, 0o700); err != nil {
		t.Fatal(err)
	}
	_, err = b.Commit(manifest(ref, ref), state)
	if !errors.Is(err, fs.ErrExist) {
		t.Errorf("commit over a folder: %v", err)
	}
	if err := b.Abort(); err != nil {
		t.Error(err)
	}
	if got := names(t, home); !slices.Equal(got, []string{"one"}) {
		t.Errorf("left are %v", got)
	}
	_, err = NewBuilder(dir)
	wantError(t, err, dir, "there already")
}

func TestNewBuilderRefuses(t *testing.T) {
	home := t.TempDir()
	for _, c := range []struct{ dir, say string }{
		{"", "no name"},
		{"/", "no name"},
		{home + "/..", "already"},
		{"..", "no name"},
		{filepath.Join(home, tempPrefix+"x"), "no name"},
		{filepath.Join(home, "a", "b"), "no such file"},
		{filepath.Join(home, strings.Repeat("x", 300)), "too long"},
	} {
		_, err := NewBuilder(c.dir)
		wantError(t, err, "make snapshot", c.say)
	}
	if got := names(t, home); got != nil {
		t.Errorf("left are %v", got)
	}
}

// TestCleanTemp: folders in use and folders of other programs stay.
func TestCleanTemp(t *testing.T) {
	home := t.TempDir()
	b, err := NewBuilder(filepath.Join(home, "one"))
	if err != nil {
		t.Fatal(err)
	}
	dead := filepath.Join(home, tempPrefix+"dead", layersName)
	foreign := filepath.Join(home, ".tmp-other")
	for _, dir := range []string{dead, foreign} {
		if err := os.MkdirAll(dir, 0o700); err != nil {
			t.Fatal(err)
		}
	}
	file := filepath.Join(home, tempPrefix+"file")
	if err := os.WriteFile(file, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	if err := CleanTemp(home); err != nil {
		t.Fatal(err)
	}
	want := []string{".tmp-other", b.temp, filepath.Base(file)}
	slices.Sort(want)
	if got := names(t, home); !slices.Equal(got, want) {
		t.Errorf("left are %v, want %v", got, want)
	}
	ref, f := layerFile(t, 3, 10)
	if err := b.AddLayer(ref, f); err != nil {
		t.Fatal(err)
	}
	s, err := b.Commit(manifest(ref, ref), state)
	if err != nil {
		t.Fatal(err)
	}
	if err := s.Close(); err != nil {
		t.Error(err)
	}
	wantError(t, CleanTemp(filepath.Join(home, "none")), "clean up snapshots")
	wantError(t, CleanTemp(file), "clean up snapshots")
}

// TestCleanTempRaces: builders lose nothing if they begin and end during a
// cleanup.
func TestCleanTempRaces(t *testing.T) {
	home := t.TempDir()
	ref, f := layerFile(t, 3, 1)
	stop := make(chan struct{})
	var cleaner, builders sync.WaitGroup
	cleaner.Go(func() {
		for {
			select {
			case <-stop:
				return
			default:
			}
			if err := CleanTemp(home); err != nil {
				t.Error(err)
			}
		}
	})
	for i := range 4 {
		builders.Go(func() {
			for j := range 25 {
				if err := commitAndRemove(filepath.Join(home, fmt.Sprint(i, "-", j)), ref, f); err != nil {
					t.Error(err)
				}
			}
		})
	}
	builders.Wait()
	close(stop)
	cleaner.Wait()
	if got := names(t, home); got != nil {
		t.Errorf("left are %v", got)
	}
}

func commitAndRemove(dir string, ref layer.Ref, f *os.File) error {
	b, err := NewBuilder(dir)
	if err != nil {
		return err
	}
	if err := b.AddLayer(ref, f); err != nil {
		return errors.Join(err, b.Abort())
	}
	s, err := b.Commit(manifest(ref, ref), state)
	if err != nil {
		return errors.Join(err, b.Abort())
	}
	return errors.Join(s.Close(), Remove(dir))
}

func TestRemove(t *testing.T) {
	home := t.TempDir()
	dir := filepath.Join(home, "one")
	s := build(t, dir)
	link, other := filepath.Join(home, "link"), filepath.Join(home, "other")
	if err := errors.Join(os.Symlink(dir, link), os.Mkdir(other, 0o700)); err != nil {
		t.Fatal(err)
	}
	wantError(t, Remove(link), link, "not a folder")
	wantError(t, Remove(other), other, "does not look like a snapshot")
	wantError(t, Remove("/"), "no name")
	if err := Remove(filepath.Join(home, "none")); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("remove what is not there: %v", err)
	}
	opened(t, dir)
	// A damaged snapshot can be removed, too.
	if err := os.Remove(filepath.Join(dir, stateName)); err != nil {
		t.Fatal(err)
	}
	if err := Remove(dir); err != nil {
		t.Fatal(err)
	}
	if got := names(t, home); !slices.Equal(got, []string{"link", "other"}) {
		t.Errorf("left are %v", got)
	}
	if err := s.Verify(t.Context()); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("verify a removed snapshot: %v", err)
	}
}
