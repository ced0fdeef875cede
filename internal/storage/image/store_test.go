package image

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"

	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/random"
	"github.com/google/go-containerregistry/pkg/v1/types"
)

// envPull makes the test binary pull an image and do nothing else.
const envPull = "AGENTRUN_TEST_PULL"

// pullJob is the task of a process that pulls.
type pullJob struct {
	Store, Reference string
	Options          Registries
	// HangIn is the phase in which it stops for ever, after it has said so.
	HangIn Phase
}

func TestMain(m *testing.M) {
	if text := os.Getenv(envPull); text != "" {
		if err := pullInProcess(text); err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1)
		}
		os.Exit(0)
	}
	os.Exit(m.Run())
}

func pullInProcess(text string) error {
	var job pullJob
	if err := json.Unmarshal([]byte(text), &job); err != nil {
		return err
	}
	s, err := OpenStore(job.Store)
	if err != nil {
		return err
	}
	ref, err := ParseReference(job.Reference)
	if err != nil {
		return err
	}
	img, err := s.Pull(context.Background(), ref, PullOptions{Registries: job.Options, Progress: func(p Progress) {
		if p.Phase == job.HangIn && (p.Phase != PhaseDownload || p.Done > 0) {
			fmt.Println("hangs")
			select {}
		}
	}})
	if err == nil {
		fmt.Println(img.Digest)
	}
	return err
}

// start runs a job in a process of its own.
func (j pullJob) start(t *testing.T) (cmd *exec.Cmd, stdout io.Reader) {
	t.Helper()
	b, err := json.Marshal(j)
	if err != nil {
		t.Fatal(err)
	}
	exe, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	cmd = exec.Command(exe)
	cmd.Env = append(os.Environ(), envPull+"="+string(b))
	cmd.Stderr = os.Stderr
	if stdout, err = cmd.StdoutPipe(); err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	return cmd, stdout
}

func randomImage(t *testing.T, layers int) v1.Image {
	t.Helper()
	var all []v1.Layer
	for range layers {
		l, err := random.Layer(1<<20, types.OCILayer)
		if err != nil {
			t.Fatal(err)
		}
		all = append(all, l)
	}
	return imageOf(t, v1.Config{}, all...)
}

// TestKilledPull: a pull that is killed in any phase leaves nothing that is
// taken for an image; the next one clears up and succeeds.
func TestKilledPull(t *testing.T) {
	for _, phase := range []Phase{PhaseDownload, PhaseUnpack, PhasePack} {
		t.Run(string(phase), func(t *testing.T) {
			t.Parallel()
			r, s := newRegistry(t, withTLS), newStore(t)
			img := randomImage(t, 2)
			ref := r.push(t, "x", img)
			o := r.options(t)
			cmd, stdout := pullJob{Store: s.dir, Reference: ref.String(), Options: o.Registries, HangIn: phase}.start(t)
			said := make([]byte, len("hangs"))
			if _, err := io.ReadFull(stdout, said); err != nil {
				t.Fatal(err)
			}
			if left, err := os.ReadDir(s.path(workName)); err != nil || len(left) != 1 {
				t.Fatalf("while it works there is %v, %v", left, err)
			}
			// Its folder is in use, so it is not removed.
			if _, err := s.Prune(t.Context(), true); err != nil {
				t.Fatal(err)
			}
			left, err := os.ReadDir(s.path(workName))
			if err != nil || len(left) != 1 {
				t.Fatalf("pruning left %v, %v of what is at work", left, err)
			}
			if err := cmd.Process.Kill(); err != nil {
				t.Fatal(err)
			}
			_ = cmd.Wait() // it was killed
			if list, err := s.List(); err != nil || len(list) != 0 {
				t.Errorf("stored: %v, %v", list, err)
			}
			if _, err := s.Resolve(ref.String()); !errors.Is(err, ErrNotFound) {
				t.Errorf("got %v", err)
			}
			got, err := s.Pull(t.Context(), ref, o)
			if err != nil || got.Digest != digestOf(t, img) {
				t.Fatalf("the next pull: %v, %v", got, err)
			}
			wantTidy(t, s)
			if err := s.Verify(t.Context(), got.Digest); err != nil {
				t.Error(err)
			}
		})
	}
}

// TestPruneClearsUp: the files of a killed process are removed without another
// pull, too.
func TestPruneClearsUp(t *testing.T) {
	s := newStore(t)
	if err := os.MkdirAll(s.path(workName, "image-left", "root", "etc"), 0o700); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(s.path(makingName, "left.lock"), nil, 0o600); err != nil {
		t.Fatal(err)
	}
	if _, err := s.Prune(t.Context(), false); err != nil {
		t.Fatal(err)
	}
	wantTidy(t, s)
	if left, err := os.ReadDir(s.path(makingName)); err != nil || len(left) != 0 {
		t.Errorf("locks: %v, %v", left, err)
	}
}

// TestPullsAtOnce: however many pull an image at the same time, in this process
// and others, each layer is fetched once.
func TestPullsAtOnce(t *testing.T) {
	r, s := newRegistry(t, withTLS), newStore(t)
	img := randomImage(t, 3)
	ref := r.push(t, "x", img)
	o := r.options(t)
	// All have started before the first gets a layer.
	const processes, goroutines = 3, 4
	var asked sync.WaitGroup
	asked.Add(processes + goroutines)
	r.set(func(_ http.ResponseWriter, req *http.Request) bool {
		config, _ := img.ConfigName()
		switch {
		case req.Method != http.MethodGet:
		case strings.HasSuffix(req.URL.Path, "/blobs/"+config.String()):
			asked.Done()
		case strings.Contains(req.URL.Path, "/blobs/"):
			asked.Wait()
		}
		return false
	})
	var done sync.WaitGroup
	for range processes {
		cmd, stdout := pullJob{Store: s.dir, Reference: ref.String(), Options: o.Registries}.start(t)
		done.Go(func() {
			said, readErr := io.ReadAll(stdout)
			if err := errors.Join(readErr, cmd.Wait()); err != nil || strings.TrimSpace(string(said)) != string(digestOf(t, img)) {
				t.Errorf("a process: %q, %v", said, err)
			}
		})
	}
	for range goroutines {
		done.Go(func() {
			if got, err := s.Pull(t.Context(), ref, o); err != nil || got.Digest != digestOf(t, img) {
				t.Errorf("got %v, %v", got, err)
			}
		})
	}
	done.Wait()
	layers, err := img.Layers()
	if err != nil {
		t.Fatal(err)
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	for _, l := range layers {
		d, _ := l.Digest()
		if n := r.gets["/v2/x/blobs/"+d.String()]; n != 1 {
			t.Errorf("layer %v was fetched %d times", d, n)
		}
	}
	wantTidy(t, s)
}

// TestWaitIsCancelled: a caller that waits for another process's pull can stop
// waiting.
func TestWaitIsCancelled(t *testing.T) {
	s := newStore(t)
	held, err := s.lockMaking(t.Context(), "key", func() { t.Error("waited") })
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	if _, err := s.lockMaking(ctx, "key", cancel); !errors.Is(err, context.Canceled) {
		t.Errorf("got %v", err)
	}
	if err := held.Close(); err != nil {
		t.Fatal(err)
	}
	again, err := s.lockMaking(t.Context(), "key", func() {})
	if err != nil {
		t.Fatal(err)
	}
	if err := again.Close(); err != nil {
		t.Fatal(err)
	}
}

// TestPruneDuringPull: collection in any phase of a pull does not harm it.
func TestPruneDuringPull(t *testing.T) {
	r, s := newRegistry(t, withTLS), newStore(t)
	img := randomImage(t, 2)
	ref := r.push(t, "x", img)
	o := r.options(t)
	seen := map[Phase]bool{}
	o.Progress = func(p Progress) {
		if seen[p.Phase] || p.Phase == PhaseDone {
			return
		}
		seen[p.Phase] = true
		if _, err := s.Prune(t.Context(), true); err != nil {
			t.Errorf("prune in phase %s: %v", p.Phase, err)
		}
	}
	got, err := s.Pull(t.Context(), ref, o)
	if err != nil {
		t.Fatal(err)
	}
	if err := s.Verify(t.Context(), got.Digest); err != nil {
		t.Error(err)
	}
	if !seen[PhaseDownload] || !seen[PhasePack] {
		t.Errorf("seen: %v", seen)
	}
}

// stored puts an image of one file into the store.
func stored(t *testing.T, s *Store, r *testRegistry, name, content string) *Image {
	t.Helper()
	img, err := s.Pull(t.Context(), r.push(t, name, imageOf(t, v1.Config{}, layerOf(t, tarOf(t, map[string]string{"f": content})))), r.options(t))
	if err != nil {
		t.Fatal(err)
	}
	return img
}

// TestNames: a name is of one image, the last that it was given to.
func TestNames(t *testing.T) {
	r, s := newRegistry(t, withTLS), newStore(t)
	a, b := stored(t, s, r, "x:1", "a"), stored(t, s, r, "x:2", "b")
	for _, name := range []string{"mine", "docker.io/library/mine:latest"} {
		if err := s.Tag(t.Context(), mustRef(t, name), a.Digest); err != nil {
			t.Fatal(err)
		}
		if img, err := s.Resolve("mine:latest"); err != nil || img.Digest != a.Digest {
			t.Errorf("%v, %v", img, err)
		}
	}
	if err := s.Tag(t.Context(), mustRef(t, "mine"), b.Digest); err != nil {
		t.Fatal(err)
	}
	if img, err := s.Resolve("mine"); err != nil || img.Digest != b.Digest || len(img.Names) != 2 {
		t.Errorf("%+v, %v", img, err)
	}
	if err := s.Tag(t.Context(), mustRef(t, "other"), Digest("sha256:"+strings.Repeat("0", 64))); !errors.Is(err, ErrNotFound) {
		t.Errorf("got %v", err)
	}
	for _, text := range []string{"nobody", "sha256:" + strings.Repeat("0", 64), strings.Repeat("0", 12)} {
		if _, err := s.Resolve(text); !errors.Is(err, ErrNotFound) {
			t.Errorf("%s: %v", text, err)
		}
	}
	if _, err := s.Resolve("No Name"); err == nil {
		t.Error("a name that is none was found")
	}
	if list, err := s.List(); err != nil || len(list) != 2 {
		t.Errorf("%v, %v", list, err)
	}
}

// TestRemove: names first, the image with the last of them, and never an image
// in use.
func TestRemove(t *testing.T) {
	r, s := newRegistry(t, withTLS), newStore(t)
	img := stored(t, s, r, "x", "a")
	name := img.Source
	if err := s.Tag(t.Context(), mustRef(t, "second"), img.Digest); err != nil {
		t.Fatal(err)
	}
	if got, err := s.Remove(t.Context(), "second"); err != nil || got.Deleted || got.Untagged == "" {
		t.Errorf("%+v, %v", got, err)
	}
	holder, err := ParseHolder("template", "base.1")
	if err != nil {
		t.Fatal(err)
	}
	for range 2 {
		if err := s.Hold(t.Context(), img.Digest, holder); err != nil {
			t.Fatal(err)
		}
	}
	_, err = s.Remove(t.Context(), name)
	wantError(t, err, "template base.1")
	if !errors.Is(err, ErrInUse) {
		t.Errorf("got %v", err)
	}
	h, err := s.Open(t.Context(), img.Digest)
	if err != nil {
		t.Fatal(err)
	}
	if err := s.Release(t.Context(), img.Digest, holder); err != nil {
		t.Fatal(err)
	}
	if _, err := s.Remove(t.Context(), string(img.Digest)); !errors.Is(err, ErrInUse) {
		t.Errorf("got %v", err)
	}
	if _, err := s.Resolve(name); err != nil {
		t.Errorf("after what was refused: %v", err)
	}
	root, err := h.Root()
	if err != nil {
		t.Fatal(err)
	}
	defer root.Close()
	if err := h.Close(); err != nil {
		t.Fatal(err)
	}
	if got, err := s.Remove(t.Context(), img.Digest.Short()); err != nil || !got.Deleted {
		t.Errorf("%+v, %v", got, err)
	}
	if _, err := s.Resolve(name); !errors.Is(err, ErrNotFound) {
		t.Errorf("got %v", err)
	}
	// The open file stays readable.
	if n, err := io.Copy(io.Discard, root); err != nil || n != img.Root.Size {
		t.Errorf("read %d bytes, %v", n, err)
	}
	wantTidy(t, s)
	for _, bad := range [][2]string{{"template", "../x"}, {"a/b", "x"}, {"template", ""}, {"", "x"}, {"template", "a b"}} {
		if _, err := ParseHolder(bad[0], bad[1]); err == nil {
			t.Errorf("holder %q was taken", bad)
		}
	}
}

// TestPrune: without names and users an image goes, otherwise it stays.
func TestPrune(t *testing.T) {
	r, s := newRegistry(t, withTLS), newStore(t)
	named, held, open, nameless := stored(t, s, r, "x:1", "1"), stored(t, s, r, "x:2", "2"), stored(t, s, r, "x:3", "3"), stored(t, s, r, "x:4", "4")
	if err := s.locked(t.Context(), func() error {
		return s.changeNames(func(n map[string]Digest) {
			for name, d := range n {
				if d != named.Digest {
					delete(n, name)
				}
			}
		})
	}); err != nil {
		t.Fatal(err)
	}
	holder, err := ParseHolder("sandbox", "a")
	if err != nil {
		t.Fatal(err)
	}
	if err := s.Hold(t.Context(), held.Digest, holder); err != nil {
		t.Fatal(err)
	}
	h, err := s.Open(t.Context(), open.Digest)
	if err != nil {
		t.Fatal(err)
	}
	p, err := s.Prune(t.Context(), false)
	if err != nil || !slices.Equal(p.Images, []Digest{nameless.Digest}) || p.Freed != nameless.Root.Size {
		t.Errorf("%+v, %v", p, err)
	}
	if p, err = s.Prune(t.Context(), true); err != nil || !slices.Equal(p.Images, []Digest{named.Digest}) {
		t.Errorf("%+v, %v", p, err)
	}
	if err := errors.Join(h.Close(), s.Release(t.Context(), held.Digest, holder), s.Release(t.Context(), held.Digest, holder)); err != nil {
		t.Fatal(err)
	}
	if p, err = s.Prune(t.Context(), false); err != nil || len(p.Images) != 2 {
		t.Errorf("%+v, %v", p, err)
	}
	if list, err := s.List(); err != nil || len(list) != 0 {
		t.Errorf("%v, %v", list, err)
	}
	wantTidy(t, s)
}

// TestDamage: damage of stored files is noticed, and pulling again repairs it.
func TestDamage(t *testing.T) {
	r, s := newRegistry(t, withTLS), newStore(t)
	img := stored(t, s, r, "x", "a")
	root := filepath.Join(s.rootDir(img.Digest), rootName)
	b, err := os.ReadFile(root)
	if err != nil {
		t.Fatal(err)
	}
	b[len(b)-1] ^= 1
	if err := os.WriteFile(root, b, 0o600); err != nil {
		t.Fatal(err)
	}
	wantError(t, s.Verify(t.Context(), img.Digest), "damaged", rootName)
	if err := os.Truncate(root, 100); err != nil {
		t.Fatal(err)
	}
	_, err = s.Open(t.Context(), img.Digest)
	wantError(t, err, "damaged", "100 bytes")
	if _, err := s.Pull(t.Context(), mustRef(t, img.Source), r.options(t)); err != nil {
		t.Fatal(err)
	}
	if err := s.Verify(t.Context(), img.Digest); err != nil {
		t.Error(err)
	}
	metadata := filepath.Join(s.rootDir(img.Digest), metadataName)
	for text, says := range map[string]string{
		`{"schema": 99}`: "newer", `{"schema": 1, "digest": "sha256:0"}`: "describes", `not json`: metadata, `{}`: "schema 0",
	} {
		if err := os.WriteFile(metadata, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
		_, err := s.Resolve(img.Source)
		wantError(t, err, "damaged", says)
		if list, err := s.List(); err != nil || len(list) != 1 || list[0].Damaged == "" {
			t.Errorf("%v, %v", list, err)
		}
	}
	for _, text := range []string{"not json", `{"schema": 9}`, `{"schema": 1, "names": {"x": "../.."}}`} {
		if err := os.WriteFile(s.path(namesName), []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
		_, err := s.Resolve(img.Source)
		wantError(t, err, namesName)
	}
}
