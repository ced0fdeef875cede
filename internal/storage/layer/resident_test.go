package layer_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"

	"golang.org/x/sys/unix"

	"agentrun.dev/internal/storage/layer"
	"agentrun.dev/internal/storage/layer/layertest"
)

// childEnv makes the test binary a loader process: "folder source digest size".
const childEnv = "AGENTRUN_TEST_LOADER"

func TestMain(m *testing.M) {
	if args := os.Getenv(childEnv); args != "" {
		if err := loader(args); err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1)
		}
		return
	}
	os.Exit(m.Run())
}

// loader loads one layer after it has read a byte from standard input. It
// writes "open" when it has to copy.
func loader(args string) error {
	var dir, source, digest string
	var want layer.Ref
	if _, err := fmt.Sscan(args, &dir, &source, &digest, &want.Size); err != nil {
		return err
	}
	var err error
	if want.Digest, err = layer.ParseDigest(digest); err != nil {
		return err
	}
	r, err := layer.OpenResident(dir)
	if err != nil {
		return err
	}
	fmt.Println("ready")
	if _, err := io.ReadFull(os.Stdin, make([]byte, 1)); err != nil {
		return err
	}
	f, err := r.Load(context.Background(), want, func() (io.ReadCloser, error) {
		fmt.Println("open")
		return os.Open(source)
	})
	if err != nil {
		return err
	}
	return f.Close()
}

// startLoader starts a loader process and waits until it is ready.
func startLoader(t *testing.T, dir, source string, r layer.Ref) (cmd *exec.Cmd, in io.WriteCloser, out *os.File) {
	t.Helper()
	exe, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	cmd = exec.CommandContext(t.Context(), exe)
	cmd.Env = append(os.Environ(), fmt.Sprintf("%s=%s %s %s %d", childEnv, dir, source, r.Digest, r.Size))
	cmd.Stderr = os.Stderr
	if in, err = cmd.StdinPipe(); err != nil {
		t.Fatal(err)
	}
	// Not StdoutPipe: the output is also read after Wait.
	out, w, err := os.Pipe()
	if err != nil {
		t.Fatal(err)
	}
	cmd.Stdout = w
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	if err := w.Close(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = out.Close() }) // it was only read
	expect(t, out, "ready\n")
	return cmd, in, out
}

func expect(t *testing.T, r io.Reader, line string) {
	t.Helper()
	p := make([]byte, len(line))
	if _, err := io.ReadFull(r, p); err != nil || string(p) != line {
		t.Fatalf("the loader says %q (%v), want %q", p, err, line)
	}
}

func newResident(t *testing.T) (*layer.Resident, string) {
	t.Helper()
	dir := filepath.Join(layertest.Shm(t), "layers")
	r, err := layer.OpenResident(dir)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := r.Close(); err != nil {
			t.Error(err)
		}
	})
	return r, dir
}

func readAll(t *testing.T, f *os.File) []byte {
	t.Helper()
	b, err := io.ReadAll(f)
	if err != nil {
		t.Fatal(err)
	}
	if err := f.Close(); err != nil {
		t.Fatal(err)
	}
	return b
}

// leftovers lists the names in a folder, without the lock.
func leftovers(t *testing.T, dir string) []string {
	t.Helper()
	entries, err := os.ReadDir(dir)
	if err != nil {
		t.Fatal(err)
	}
	var names []string
	for _, e := range entries {
		if e.Name() != layer.LockName {
			names = append(names, e.Name())
		}
	}
	return names
}

func TestResident(t *testing.T) {
	r, dir := newResident(t)
	s := layertest.NewStore(t)
	var refs []layer.Ref
	for i := range 3 {
		content := bytes.Repeat([]byte{byte(i + 1)}, (i+1)*layer.ChunkSize+layer.PageSize)
		l := s.Bytes(content)
		refs = append(refs, l)
		for range 2 {
			f, err := r.Load(t.Context(), l, func() (io.ReadCloser, error) { return s.Open(l) })
			if err != nil {
				t.Fatal(err)
			}
			layertest.SameBytes(t, "layer", readAll(t, f), content)
		}
	}
	info, err := os.Stat(filepath.Join(dir, refs[0].Digest.String()))
	if err != nil || info.Mode() != 0o400 {
		t.Errorf("mode %v, %v", info.Mode(), err)
	}
	total := refs[0].Size + refs[1].Size + refs[2].Size
	if files, n, err := r.Stats(); files != 3 || n != total || err != nil {
		t.Errorf("%d files, %d bytes, %v", files, n, err)
	}
	if n, err := r.Keep(func(d layer.Digest) bool { return d != refs[1].Digest }); n != 1 || err != nil {
		t.Errorf("%d removed, %v", n, err)
	}
	for range 2 { // the second time it is gone
		if err := r.Remove(refs[0].Digest); err != nil {
			t.Error(err)
		}
	}
	if got := leftovers(t, dir); !slices.Equal(got, []string{refs[2].Digest.String()}) {
		t.Errorf("left are %v", got)
	}
	again, err := layer.OpenResident(dir)
	if err != nil {
		t.Fatal(err)
	}
	if files, _, err := again.Stats(); files != 1 || err != nil {
		t.Errorf("%d files, %v", files, err)
	}
	if err := again.Close(); err != nil {
		t.Error(err)
	}
	if _, _, err := again.Stats(); err == nil {
		t.Error("statistics of a closed folder")
	}
	_, err = again.Load(t.Context(), refs[0], func() (io.ReadCloser, error) { return s.Open(refs[0]) })
	layertest.WantError(t, err, "closed")
	if _, err := again.Create(); err == nil {
		t.Error("a file in a closed folder")
	}
	layertest.WantError(t, again.Remove(refs[0].Digest), "closed")
}

// TestDescriptor: the descriptor that Load returns cannot be written, and a
// mapping outlives the file.
func TestDescriptor(t *testing.T) {
	r, _ := newResident(t)
	s := layertest.NewStore(t)
	content := bytes.Repeat([]byte{5}, 4*layer.PageSize)
	l := s.Bytes(content)
	f, err := r.Load(t.Context(), l, func() (io.ReadCloser, error) { return s.Open(l) })
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	if _, err := f.WriteAt([]byte{1}, 0); !errors.Is(err, unix.EBADF) {
		t.Errorf("write: %v", err)
	}
	if err := f.Truncate(0); err == nil {
		t.Error("truncated")
	}
	if _, err := unix.Mmap(int(f.Fd()), 0, layer.PageSize, unix.PROT_WRITE, unix.MAP_SHARED); !errors.Is(err, unix.EACCES) {
		t.Errorf("shared writable mapping: %v", err)
	}
	m, err := unix.Mmap(int(f.Fd()), 0, len(content), unix.PROT_READ|unix.PROT_WRITE, unix.MAP_PRIVATE)
	if err != nil {
		t.Fatal(err)
	}
	if err := r.Remove(l.Digest); err != nil {
		t.Fatal(err)
	}
	m[0] = 77
	layertest.SameBytes(t, "mapping", m[1:], content[1:])
	layertest.SameBytes(t, "file", readAll(t, f), content)
	if err := unix.Munmap(m); err != nil {
		t.Error(err)
	}
}

func TestLoadRefuses(t *testing.T) {
	r, dir := newResident(t)
	s := layertest.NewStore(t)
	content := bytes.Repeat([]byte{5}, 2*layer.ChunkSize)
	l := s.Bytes(content)
	flipped := slices.Clone(content)
	flipped[len(flipped)-1] ^= 1
	for _, c := range []struct {
		name    string
		content []byte
		say     []string
	}{
		{"corrupted", flipped, []string{"damaged", l.Digest.String(), "expected"}},
		{"truncated", content[:len(content)-1], []string{"524287", "524288"}},
		{"empty", nil, []string{"has 0 bytes", "524288"}},
		{"longer", append(slices.Clone(content), 1), []string{"524289", "524288"}},
	} {
		t.Run(c.name, func(t *testing.T) {
			path := filepath.Join(t.TempDir(), "layer")
			if err := os.WriteFile(path, c.content, 0o600); err != nil {
				t.Fatal(err)
			}
			_, err := r.Load(t.Context(), l, func() (io.ReadCloser, error) { return os.Open(path) })
			layertest.WantError(t, err, append(c.say, "load layer "+l.Digest.String(), path)...)

			// The same through a pipe, whose size is unknown.
			_, err = r.Load(t.Context(), l, func() (io.ReadCloser, error) { return pipe(t, c.content), nil })
			layertest.WantError(t, err, "load layer "+l.Digest.String(), "expected")
		})
	}
	_, err := r.Load(t.Context(), l, func() (io.ReadCloser, error) { return nil, fs.ErrPermission })
	if !errors.Is(err, fs.ErrPermission) {
		t.Errorf("a source that cannot be opened: %v", err)
	}
	_, err = r.Load(t.Context(), l, func() (io.ReadCloser, error) { return os.Open(dir) })
	layertest.WantError(t, err, "copy "+dir)
	_, err = r.Load(t.Context(), layer.Ref{}, nil)
	layertest.WantError(t, err, "of 0 bytes")
	ctx, cancel := context.WithCancel(t.Context())
	_, err = r.Load(ctx, l, func() (io.ReadCloser, error) { cancel(); return s.Open(l) })
	if !errors.Is(err, context.Canceled) {
		t.Errorf("after the end of the context: %v", err)
	}
	if got := leftovers(t, dir); got != nil {
		t.Errorf("left are %v", got)
	}
	f, err := r.Load(t.Context(), l, func() (io.ReadCloser, error) { return pipe(t, content), nil })
	if err != nil {
		t.Fatal(err)
	}
	layertest.SameBytes(t, "layer", readAll(t, f), content)
	_, err = r.Load(t.Context(), layer.Ref{l.Digest, layer.PageSize}, nil)
	layertest.WantError(t, err, "has 524288 bytes, 4096 are expected")
}

// pipe returns a pipe from which content can be read.
func pipe(t *testing.T, content []byte) *os.File {
	t.Helper()
	out, in, err := os.Pipe()
	if err != nil {
		t.Fatal(err)
	}
	go func() {
		_, _ = in.Write(content) // the reader may stop early
		_ = in.Close()
	}()
	return out
}

func TestLoadOnceInOneProcess(t *testing.T) {
	r, _ := newResident(t)
	s := layertest.NewStore(t)
	content := bytes.Repeat([]byte{5}, 1<<20)
	l := s.Bytes(content)
	var opened atomic.Int32
	var wg sync.WaitGroup
	for range 16 {
		wg.Go(func() {
			f, err := r.Load(t.Context(), l, func() (io.ReadCloser, error) {
				opened.Add(1)
				return s.Open(l)
			})
			if err != nil {
				t.Error(err)
				return
			}
			got, err := io.ReadAll(f)
			if err := errors.Join(err, f.Close()); err != nil || !bytes.Equal(got, content) {
				t.Errorf("%d bytes, %v", len(got), err)
			}
		})
	}
	wg.Wait()
	if opened.Load() != 1 {
		t.Errorf("loaded %d times", opened.Load())
	}
}

func TestLoadOnceInManyProcesses(t *testing.T) {
	_, dir := newResident(t)
	s := layertest.NewStore(t)
	l := s.Bytes(bytes.Repeat([]byte{5}, 8<<20))
	var all []*exec.Cmd
	var ins []io.WriteCloser
	var outs []*os.File
	for range 4 {
		cmd, in, out := startLoader(t, dir, s.Path(l), l)
		all, ins, outs = append(all, cmd), append(ins, in), append(outs, out)
	}
	for _, in := range ins {
		if _, err := in.Write([]byte{1}); err != nil {
			t.Fatal(err)
		}
	}
	var said strings.Builder
	for i, cmd := range all {
		if _, err := io.Copy(&said, outs[i]); err != nil {
			t.Error(err)
		}
		if err := cmd.Wait(); err != nil {
			t.Error(err)
		}
	}
	if said.String() != "open\n" {
		t.Errorf("the loaders said %q", said.String())
	}
}

// TestKilledLoader kills a process in the middle of a copy: the source is a
// FIFO that delivers half of the layer.
func TestKilledLoader(t *testing.T) {
	r, dir := newResident(t)
	s := layertest.NewStore(t)
	content := bytes.Repeat([]byte{5}, 2*layer.ChunkSize)
	l := s.Bytes(content)
	fifo := filepath.Join(t.TempDir(), "fifo")
	if err := unix.Mkfifo(fifo, 0o600); err != nil {
		t.Fatal(err)
	}
	cmd, in, out := startLoader(t, dir, fifo, l)
	if _, err := in.Write([]byte{1}); err != nil {
		t.Fatal(err)
	}
	expect(t, out, "open\n")
	half, err := os.OpenFile(fifo, os.O_WRONLY, 0)
	if err != nil {
		t.Fatal(err)
	}
	// This is more than a FIFO holds: when the write returns, the copy has
	// begun.
	if _, err := half.Write(content[:layer.ChunkSize+layer.PageSize]); err != nil {
		t.Fatal(err)
	}
	source := func() (io.ReadCloser, error) { return s.Open(l) }
	ctx, cancel := context.WithCancel(t.Context())
	waiting := make(chan error)
	go func() { // a caller that gives up before the loader ends
		_, err := r.Load(ctx, l, source)
		waiting <- err
	}()
	cancel()
	if err := <-waiting; !errors.Is(err, context.Canceled) {
		t.Errorf("waiting for another process: %v", err)
	}
	if got := leftovers(t, dir); got != nil {
		t.Errorf("during the copy there are %v", got)
	}
	if err := cmd.Process.Kill(); err != nil {
		t.Fatal(err)
	}
	if err := cmd.Wait(); err == nil {
		t.Error("the loader was not killed")
	}
	if err := half.Close(); err != nil {
		t.Error(err)
	}
	if got := leftovers(t, dir); got != nil {
		t.Errorf("the killed loader left %v", got)
	}
	f, err := r.Load(t.Context(), l, source)
	if err != nil {
		t.Fatal(err)
	}
	layertest.SameBytes(t, "layer", readAll(t, f), content)
}

// TestWaiter: a caller gives up while another goroutine loads.
func TestWaiter(t *testing.T) {
	r, _ := newResident(t)
	s := layertest.NewStore(t)
	l := s.Bytes(bytes.Repeat([]byte{5}, layer.PageSize))
	ctx, cancel := context.WithCancel(t.Context())
	f, err := r.Load(t.Context(), l, func() (io.ReadCloser, error) {
		cancel()
		if _, err := r.Load(ctx, l, nil); !errors.Is(err, context.Canceled) {
			t.Errorf("waiting for another goroutine: %v", err)
		}
		return s.Open(l)
	})
	if err != nil {
		t.Fatal(err)
	}
	if err := f.Close(); err != nil {
		t.Error(err)
	}
}

func TestAdopt(t *testing.T) {
	r, dir := newResident(t)
	content := bytes.Repeat([]byte{6}, 3*layer.PageSize)
	for range 2 { // the second time it is already there
		f, err := r.Create()
		if err != nil {
			t.Fatal(err)
		}
		w := layer.NewWriter(f)
		if _, err := w.Write(content); err != nil {
			t.Fatal(err)
		}
		if got := leftovers(t, dir); len(got) > 1 {
			t.Errorf("before Adopt there are %v", got)
		}
		layertest.WantError(t, r.Adopt(t.Context(), f, layer.Ref{layer.Digest{1}, layer.PageSize}), "12288 bytes, 4096")
		layertest.WantError(t, r.Adopt(t.Context(), f, layer.Ref{}), "of 0 bytes")
		ctx, cancel := context.WithCancel(t.Context())
		cancel()
		if err := r.Adopt(ctx, f, w.Ref()); !errors.Is(err, context.Canceled) {
			t.Errorf("after the end of the context: %v", err)
		}
		if err := r.Adopt(t.Context(), f, w.Ref()); err != nil {
			t.Fatal(err)
		}
		if err := f.Close(); err != nil {
			t.Fatal(err)
		}
		layertest.WantError(t, r.Adopt(t.Context(), f, w.Ref()), "adopt layer", "closed")
		got, err := r.Load(t.Context(), w.Ref(), nil)
		if err != nil {
			t.Fatal(err)
		}
		layertest.SameBytes(t, "layer", readAll(t, got), content)
	}
	// A file of another file system cannot be linked into the folder.
	f, err := os.Create(filepath.Join(t.TempDir(), "other"))
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	w := layer.NewWriter(f)
	if _, err := w.Write(content[:layer.PageSize]); err != nil {
		t.Fatal(err)
	}
	layertest.WantError(t, r.Adopt(t.Context(), f, w.Ref()), "adopt layer "+w.Ref().Digest.String())
}

func TestOpenResidentRefuses(t *testing.T) {
	dir := layertest.Shm(t)
	link, file := filepath.Join(dir, "link"), filepath.Join(dir, "file")
	if err := os.Symlink(dir, link); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(file, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	open := filepath.Join(dir, "open")
	if err := os.Mkdir(open, 0o700); err != nil {
		t.Fatal(err)
	}
	for _, c := range []struct{ name, dir, say string }{
		{"symbolic link", link, "not a directory"},
		{"file", file, "not a directory"},
		{"no parent", filepath.Join(dir, "a", "b"), "mount a tmpfs on " + filepath.Join(dir, "a")},
		{"not on tmpfs", "/proc/self/fd", "not on tmpfs"},
	} {
		t.Run(c.name, func(t *testing.T) {
			_, err := layer.OpenResident(c.dir)
			layertest.WantError(t, err, c.dir, c.say)
		})
	}
	for _, mode := range []os.FileMode{0o701, 0o710, 0o720, 0o755, 0o777} {
		if err := os.Chmod(open, mode); err != nil {
			t.Fatal(err)
		}
		_, err := layer.OpenResident(open)
		layertest.WantError(t, err, open, "chmod 700")
	}
	if os.Geteuid() == 0 {
		if err := errors.Join(os.Chmod(open, 0o700), os.Chown(open, 12345, 12345)); err != nil {
			t.Fatal(err)
		}
		_, err := layer.OpenResident(open)
		layertest.WantError(t, err, open, "another user")
	}
}
