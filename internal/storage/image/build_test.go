package image

import (
	"archive/zip"
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"agentrun.dev/internal/host/assets"
	"agentrun.dev/internal/storage/image/debian"
	"agentrun.dev/test/soak"
)

// TestBuild builds a small image with Python from this host's archives and
// index, and runs it.
func TestBuild(t *testing.T) {
	t.Parallel()
	s := builtBefore(t)
	recipe := debian.Recipe{Suite: "bookworm", Include: []string{"python3"}, Pip: []string{"six"}}
	var phases []Phase
	var log bytes.Buffer
	img, err := s.Build(t.Context(), recipe, BuildOptions{
		Names: []Reference{mustRef(t, "python:test")}, Log: &log,
		Progress: func(p Progress) { phases = append(phases, p.Phase) },
	})
	if err != nil {
		t.Fatalf("%v\n%s", err, log.String())
	}
	phases = slices.DeleteFunc(phases, func(p Phase) bool { return p == PhaseWait }) // for a test run beside this one
	if len(phases) > 1 && !slices.Equal(phases, []Phase{PhaseBootstrap, PhasePip, PhasePack, PhaseDone}) {
		t.Errorf("phases %v", phases)
	}
	t.Logf("%s of phases %v", img.Digest, phases)
	if err := s.Verify(t.Context(), img.Digest); err != nil {
		t.Fatal(err)
	}
	if got, err := s.Resolve("python:test"); err != nil || got.Digest != img.Digest || got.Config.Cmd[0] != "python3" {
		t.Errorf("%+v, %v", got, err)
	}
	root := extract(t, s, img.Digest)
	wantNoTraces(t, root)

	// Both commands are there, the wheel is installed and compiled, and pip
	// installs into the image as its user expects.
	for want, argv := range map[string][]string{
		"six\n":               {"python", "-c", "import six; print(six.__name__)"},
		"True\n":              {"python", "-c", "import six, os; print(os.path.exists(six.__cached__))"},
		"numbered 7\n":        {"sh", "-c", "pip install -q --no-index --no-compile /tmp/numbered-7-py3-none-any.whl && python -c 'import numbered; print(\"numbered\", numbered.value)'"},
		"pip at your service": {"sh", "-c", "pip --version >/dev/null && printf 'pip at your service'"},
	} {
		writeWheel(t, filepath.Join(root, "tmp", "numbered-7-py3-none-any.whl"))
		if got := runIn(t, root, argv...); got != want {
			t.Errorf("%q printed %q, want %q", argv, got, want)
		}
	}

	// The same recipe is not built again, whatever else it is to be called.
	phases = nil
	again, err := s.Build(t.Context(), recipe, BuildOptions{
		Names: []Reference{mustRef(t, "other")}, Progress: func(p Progress) { phases = append(phases, p.Phase) },
	})
	if err != nil || again.Digest != img.Digest || !slices.Equal(phases, []Phase{PhaseDone}) {
		t.Errorf("%v, %v, phases %v", again, err, phases)
	}
	if soak.On() {
		if again, err = s.Build(t.Context(), recipe, BuildOptions{NoCache: true}); err != nil || again.Digest != img.Digest {
			t.Errorf("built anew it is %v, %v; want %s", again, err, img.Digest)
		}
	}
}

// builtBefore is a store that is kept as long as the code that builds images
// stays the same: building one takes half a minute of a quiet machine.
func builtBefore(t *testing.T) *Store {
	t.Helper()
	files, err := filepath.Glob("debian/*.go")
	if err != nil {
		t.Fatal(err)
	}
	hash := sha256.New()
	for _, f := range append(files, "build.go", "dir.go") {
		b, err := os.ReadFile(f)
		if err != nil {
			t.Fatal(err)
		}
		hash.Write(b)
	}
	cache, err := assets.CacheFolder()
	if err != nil {
		t.Fatal(err)
	}
	folder := filepath.Join(cache, "test-images")
	now := time.Now()
	others, _ := os.ReadDir(folder) // the folder may not exist yet
	for _, o := range others {
		if info, err := o.Info(); err == nil && now.Sub(info.ModTime()) > 3*24*time.Hour {
			_ = os.RemoveAll(filepath.Join(folder, o.Name())) // of code that is gone
		}
	}
	s, err := OpenStore(filepath.Join(folder, hex.EncodeToString(hash.Sum(nil))))
	if err != nil {
		t.Fatal(err)
	}
	if err := os.Chtimes(s.dir, now, now); err != nil {
		t.Fatal(err)
	}
	return s
}

// extract unpacks an image with the tool of EROFS.
func extract(t *testing.T, s *Store, d Digest) string {
	t.Helper()
	root := filepath.Join(t.TempDir(), "root")
	out, err := exec.Command("fsck.erofs", "--extract="+root, filepath.Join(s.rootDir(d), rootName)).CombinedOutput()
	if err != nil {
		t.Fatalf("unpack the image: %v\n%s", err, out)
	}
	return root
}

// runIn runs a program of the image, as a process of this machine.
func runIn(t *testing.T, root string, argv ...string) string {
	t.Helper()
	cmd := exec.Command("/usr/bin/env", argv...)
	cmd.Env = []string{"PATH=/usr/local/bin:/usr/bin:/bin", "HOME=/root"}
	cmd.SysProcAttr = &syscall.SysProcAttr{Chroot: root}
	cmd.Dir = "/"
	out, err := cmd.CombinedOutput()
	if err != nil {
		t.Errorf("%q: %v\n%s", argv, err, out)
	}
	return string(out)
}

// wantNoTraces: nothing of the host and of the build is in the image.
func wantNoTraces(t *testing.T, root string) {
	t.Helper()
	for name, want := range map[string]string{"etc/hostname": "localhost\n", "etc/machine-id": "", "etc/resolv.conf": ""} {
		if got, err := os.ReadFile(filepath.Join(root, name)); err != nil || string(got) != want {
			t.Errorf("%s holds %q, %v", name, got, err)
		}
	}
	for _, name := range []string{"etc/apt/apt.conf.d/99mmdebstrap", "root/.cache", "root/.config", "root/.netrc", "run/build", "var/log/dpkg.log"} {
		if _, err := os.Lstat(filepath.Join(root, name)); !errors.Is(err, os.ErrNotExist) {
			t.Errorf("%s: %v", name, err)
		}
	}
	for _, dir := range []string{"tmp", "run", "var/lib/apt/lists", "var/cache/apt"} {
		if left, err := os.ReadDir(filepath.Join(root, dir)); err != nil || len(left) != 0 {
			t.Errorf("left in %s: %v, %v", dir, left, err)
		}
	}
	pip, err := os.ReadFile(filepath.Join(root, "etc/pip.conf"))
	if err != nil || strings.Contains(string(pip), "index") || strings.Contains(string(pip), "cert") {
		t.Errorf("etc/pip.conf: %q, %v", pip, err)
	}
}

// writeWheel makes the smallest wheel (PEP 427).
func writeWheel(t *testing.T, path string) {
	t.Helper()
	var b bytes.Buffer
	w := zip.NewWriter(&b)
	for _, f := range [][2]string{
		{"numbered.py", "value = 7\n"},
		{"numbered-7.dist-info/METADATA", "Metadata-Version: 2.1\nName: numbered\nVersion: 7\n"},
		{"numbered-7.dist-info/WHEEL", "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n"},
		{"numbered-7.dist-info/RECORD", ""},
	} {
		// Zip files know no time before 1980.
		out, err := w.CreateHeader(&zip.FileHeader{Name: f[0], Modified: time.Date(2000, 1, 1, 0, 0, 0, 0, time.UTC)})
		if err != nil {
			t.Fatal(err)
		}
		if _, err := out.Write([]byte(f[1])); err != nil {
			t.Fatal(err)
		}
	}
	if err := errors.Join(w.Close(), os.WriteFile(path, b.Bytes(), 0o600)); err != nil {
		t.Fatal(err)
	}
}

// TestBuildErrors: they name what failed, and leave nothing.
func TestBuildErrors(t *testing.T) {
	t.Run("recipe", func(t *testing.T) {
		_, err := newStore(t).Build(t.Context(), debian.Recipe{Suite: "../x"}, BuildOptions{})
		wantError(t, err, "../x", "bookworm")
	})
	t.Run("archive that cannot be reached", func(t *testing.T) {
		s := newStore(t)
		_, err := s.Build(t.Context(), debian.Recipe{Suite: "bookworm", Mirror: "http://bob:secret@127.0.0.1:1/debian"}, BuildOptions{})
		wantError(t, err, "mmdebstrap", "127.0.0.1")
		if strings.Contains(err.Error(), "secret") {
			t.Errorf("the error has the password in it: %v", err)
		}
		wantTidy(t, s)
	})
	t.Run("time", func(t *testing.T) {
		t.Setenv("SOURCE_DATE_EPOCH", "yesterday")
		_, err := newStore(t).Build(t.Context(), debian.Recipe{Suite: "bookworm"}, BuildOptions{})
		wantError(t, err, "SOURCE_DATE_EPOCH", "yesterday")
	})
	t.Run("stopped", func(t *testing.T) {
		s := newStore(t)
		ctx, cancel := context.WithCancel(t.Context())
		_, err := s.Build(ctx, debian.Recipe{Suite: "bookworm"}, BuildOptions{Progress: func(p Progress) {
			if p.Phase == PhaseBootstrap {
				cancel()
			}
		}})
		if !errors.Is(err, context.Canceled) {
			t.Errorf("got %v", err)
		}
		wantTidy(t, s)
	})
}
