package node

import (
	"context"
	"io"
	"log/slog"
	"maps"
	"os"
	"path/filepath"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"

	"agentrun.dev/internal/engine"
	"agentrun.dev/internal/node/nodetest"
	"agentrun.dev/internal/sandbox"
	"agentrun.dev/internal/storage/seal"
)

// builder makes templates without an image.
type builder struct {
	fail error
	// pages is how large the layer of a template's memory is.
	pages string
	gate  chan struct{}     // a build waits for it, if there is one
	extra map[string]string // also in the memory

	rehearsed atomic.Int32 // sandboxes
	unable    error        // why that fails
}

func (b *builder) Build(ctx context.Context, req BuildRequest) (sandbox.Built, error) {
	if b.gate != nil {
		select {
		case <-b.gate:
		case <-ctx.Done():
			return sandbox.Built{}, ctx.Err()
		}
	}
	if b.fail != nil {
		_, _ = io.WriteString(req.Log, "it fails\n")
		return sandbox.Built{}, b.fail
	}
	memory := map[string]string{"image": req.Spec.Image, nodetest.LayerKey: b.pages}
	maps.Copy(memory, b.extra)
	snap, err := nodetest.Capture(req.Dir, memory)
	if err != nil {
		return sandbox.Built{}, err
	}
	return sandbox.Built{Image: "sha256:0", Workdir: sandbox.DefaultWorkdir, Env: sandbox.Env{"FROM": "image"}}, snap.Close()
}

func (b *builder) Finish(context.Context, sandbox.TemplateSpec, sandbox.Built, engine.Sandbox) error {
	return nil
}

func (*builder) DropImage(context.Context, sandbox.Namespace, string) (bool, error) { return true, nil }

func (b *builder) Rehearse(context.Context, sandbox.TemplateSpec, engine.Sandbox) error {
	b.rehearsed.Add(1)
	return b.unable
}

// testKey is one for all daemons of the tests.
var testKey = sync.OnceValue(func() *seal.Key {
	k, err := seal.Generate()
	if err != nil {
		panic(err)
	}
	return k
})

// daemon opens a manager on a state folder.
func daemon(t *testing.T, dir string, h *nodetest.Host, change ...func(*Config)) *Manager {
	t.Helper()
	cfg := Config{
		Dir: dir, Engine: h, Builder: &builder{}, Capacity: 1 << 40, Boot: "this", Key: testKey(),
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

// onDaemon runs a test in time of its own, with a daemon whose pool makes sandboxes when
// they are claimed.
func onDaemon(t *testing.T, test func(t *testing.T, m *Manager, h *nodetest.Host)) {
	t.Helper()
	synctest.Test(t, func(t *testing.T) {
		h := nodetest.NewHost(t)
		m := daemon(t, t.TempDir(), h)
		defer func() { _ = m.Close() }()
		setUp(t, m, 0)
		test(t, m, h)
	})
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
	for _, d := range []string{machinesDir, imagesDir, snapshotsDir, checkpointsDir} {
		if err := os.Chmod(filepath.Join(to, d), 0o700); err != nil {
			t.Fatal(err)
		}
	}
}
