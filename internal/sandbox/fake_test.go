package sandbox

import (
	"context"
	"errors"
	"io"
	"log/slog"
	"maps"
	"net"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"agentrun.dev/internal/engine"
	"agentrun.dev/internal/guest"
	"agentrun.dev/internal/guestrpc"
	"agentrun.dev/internal/layer"
	"agentrun.dev/internal/snapshot"
)

// host is a machine with processes that outlive daemons: it plays an engine.
type host struct {
	engine.Engine // what is not used
	// step is called before and after each call, when nothing is under way.
	step func()

	mu        sync.Mutex // protects all following fields
	processes map[string]*process
	failNext  error // of Fork
}

// process is a sandbox that runs; memory is what it holds.
type process struct {
	memory map[string]string
	paused bool
	done   chan struct{}
	cause  error
}

func newHost(t *testing.T) *host {
	h := &host{processes: map[string]*process{}}
	t.Cleanup(func() {
		for folder := range h.processes {
			h.end(folder, engine.ErrEnded)
		}
	})
	return h
}

func (h *host) hook() func() {
	if h.step != nil {
		h.step()
		return h.step
	}
	return func() {}
}

func (h *host) Name() string { return "fake" }
func (h *host) Close() error { return nil }

func (h *host) Keep([]string, []string) error { return nil }

func (h *host) Boot(context.Context, engine.Spec) (engine.Sandbox, error) {
	return nil, errors.New("not used")
}

func (h *host) start(folder string, memory map[string]string) (engine.Sandbox, error) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if err := h.failNext; err != nil {
		h.failNext = nil
		return nil, err
	}
	if _, err := os.Stat(folder); err != nil {
		return nil, err
	}
	p := &process{memory: maps.Clone(memory), done: make(chan struct{})}
	h.processes[folder] = p
	return h.hold(p, folder)
}

func (h *host) Fork(_ context.Context, snap *snapshot.Snapshot, o engine.ForkOptions) (engine.Sandbox, error) {
	defer h.hook()()
	return h.start(o.Folder, snap.Manifest().Labels)
}

func (h *host) Adopt(_ context.Context, folder string) (engine.Sandbox, error) {
	h.mu.Lock()
	defer h.mu.Unlock()
	p := h.processes[folder]
	if p == nil {
		return nil, engine.ErrEnded
	}
	return h.hold(p, folder)
}

// hold speaks to a process, through an agent that is real.
func (h *host) hold(p *process, folder string) (*handle, error) {
	ours, theirs := net.Pipe()
	go func() { _ = guestrpc.Serve(context.Background(), theirs, &guest.Server{Processes: &guest.Processes{}}) }()
	agent, err := guestrpc.NewClient(context.Background(), ours)
	if err != nil {
		return nil, err
	}
	go func() {
		<-p.done
		_ = agent.Close()
	}()
	return &handle{host: h, process: p, folder: folder, agent: agent}, nil
}

func (h *host) Remove(_ context.Context, folder string) error {
	defer h.hook()()
	h.end(folder, engine.ErrEnded)
	return os.RemoveAll(folder)
}

// end ends a process, if it is there.
func (h *host) end(folder string, cause error) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if p := h.processes[folder]; p != nil {
		delete(h.processes, folder)
		p.cause = cause
		close(p.done)
	}
}

// handle is a daemon's hold on a process.
type handle struct {
	engine.Sandbox // what is not used
	host           *host
	*process
	folder string
	agent  *guestrpc.Client
}

func (s *handle) Agent() *guestrpc.Client                    { return s.agent }
func (s *handle) Settle(context.Context) error               { return nil }
func (s *handle) Claim(_ context.Context, name string) error { return s.set("hostname", name) }
func (s *handle) Detach() error                              { return s.agent.Close() }
func (s *handle) Done() <-chan struct{}                      { return s.done }
func (s *handle) Wait() error                                { <-s.done; return s.cause }

func (s *handle) set(key, value string) error {
	s.host.mu.Lock()
	defer s.host.mu.Unlock()
	s.memory[key] = value
	s.paused = false
	return nil
}

func (s *handle) Pause(context.Context) error {
	defer s.host.hook()()
	s.host.mu.Lock()
	defer s.host.mu.Unlock()
	s.paused = true
	return nil
}

func (s *handle) Resume(context.Context) error {
	s.host.mu.Lock()
	defer s.host.mu.Unlock()
	s.paused = false
	return nil
}

func (s *handle) Snapshot(_ context.Context, dir string) (*snapshot.Snapshot, error) {
	defer s.host.hook()()
	s.host.mu.Lock()
	defer s.host.mu.Unlock()
	return capture(dir, s.memory)
}

func (s *handle) Fork(_ context.Context, opts []engine.ForkOptions) (*engine.LiveFork, error) {
	defer s.host.hook()()
	f := &engine.LiveFork{Forks: make([]engine.Sandbox, len(opts)), Errs: make([]error, len(opts))}
	for i, o := range opts {
		f.Forks[i], f.Errs[i] = s.host.start(o.Folder, s.memory)
		if s.host.step != nil {
			s.host.step()
		}
	}
	return f, nil
}

func (s *handle) Close() error {
	defer s.host.hook()()
	s.host.end(s.folder, engine.ErrEnded)
	return nil
}

func (s *handle) Shutdown(context.Context, time.Duration) error { return s.Close() }

// capture makes a snapshot whose labels are the memory.
func capture(dir string, memory map[string]string) (*snapshot.Snapshot, error) {
	b, err := snapshot.NewBuilder(dir)
	if err != nil {
		return nil, err
	}
	page := make([]byte, layer.PageSize)
	f, err := os.CreateTemp("", "page")
	if err != nil {
		return nil, err
	}
	defer func() { _ = f.Close(); _ = os.Remove(f.Name()) }()
	w := layer.NewWriter(f)
	if _, err := w.Write(page); err != nil {
		return nil, err
	}
	ref := w.Ref()
	if err := b.AddLayer(ref, f); err != nil {
		return nil, errors.Join(err, b.Abort())
	}
	im := snapshot.ImageOf(layer.Image{Size: ref.Size, Layers: []layer.Ref{ref}, Extents: []layer.Extent{{Length: ref.Size}}})
	return b.Commit(snapshot.Manifest{
		Created: time.Unix(0, 0).UTC(), Kernel: strings.Repeat("ab", 32), TSCKHz: 1, VCPUs: 1, Memory: im,
		CPU: snapshot.CPU{Profile: "x", Vendor: "y", Family: 1}, Labels: memory,
	}, []byte("state"))
}

// builder makes templates of nothing.
type builder struct {
	fail error
	gate chan struct{} // a build waits for it, if there is one
}

func (b *builder) Build(ctx context.Context, spec TemplateSpec, _ Stage, dir string, log io.Writer) (Built, error) {
	if b.gate != nil {
		select {
		case <-b.gate:
		case <-ctx.Done():
			return Built{}, ctx.Err()
		}
	}
	if b.fail != nil {
		_, _ = io.WriteString(log, "it fails\n")
		return Built{}, b.fail
	}
	snap, err := capture(dir, map[string]string{"image": spec.Image})
	if err != nil {
		return Built{}, err
	}
	return Built{Image: "sha256:0", Workdir: DefaultWorkdir, Env: Env{"FROM": "image"}}, snap.Close()
}

func (b *builder) Finish(context.Context, TemplateSpec, engine.Sandbox) error { return nil }

// daemon opens a manager on a state folder.
func daemon(t *testing.T, dir string, h *host, change ...func(*Config)) *Manager {
	t.Helper()
	cfg := Config{
		Dir: dir, Engine: h, Builder: &builder{}, Capacity: 1 << 40, Boot: "this",
		Log: slog.New(slog.NewTextHandler(io.Discard, nil)),
	}
	for _, c := range change {
		c(&cfg)
	}
	m, err := Open(context.Background(), cfg)
	if err != nil {
		t.Fatal(err)
	}
	return m
}

// crash ends a daemon without a word. Its pools are empty.
func (m *Manager) crash() {
	m.cancel()
	_ = m.db.Close()
	for _, p := range m.pools {
		_ = p.close()
	}
}

// copyState copies a state folder as a killed daemon would leave it.
func copyState(t *testing.T, from, to string) {
	t.Helper()
	if err := os.CopyFS(to, os.DirFS(from)); err != nil {
		t.Fatal(err)
	}
	// os.CopyFS makes folders that others can read.
	for _, d := range []string{machinesDir, imagesDir, snapshotsDir} {
		if err := os.Chmod(filepath.Join(to, d), 0o700); err != nil {
			t.Fatal(err)
		}
	}
}
