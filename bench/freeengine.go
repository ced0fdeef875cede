package bench

import (
	"bytes"
	"context"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"time"

	"agentrun.dev/internal/engine"
	"agentrun.dev/internal/node"
	"agentrun.dev/internal/sandbox"
	"agentrun.dev/internal/storage/layer"
	"agentrun.dev/internal/storage/snapshot"
)

// freeEngine is an engine that costs nothing. Its sandboxes are entries of a map, in
// which nothing runs. The remaining cost is the daemon's.
type freeEngine struct {
	engine.Engine // nil: its methods are not called

	mu      sync.Mutex // protects all following fields
	running map[string]*freeSandbox
	// slow are folders whose sandboxes take a while to be adopted. silent are folders
	// whose sandboxes never answer.
	slow, silent map[string]bool
	took         time.Duration // time of the adoption of a slow one
}

// freeName is the name of the engine in reports.
const freeName = "free of cost"

func newFreeEngine() *freeEngine { return &freeEngine{running: map[string]*freeSandbox{}} }

func (e *freeEngine) Name() string                              { return "free" }
func (e *freeEngine) Capabilities() engine.Capabilities         { return engine.Capabilities{} }
func (e *freeEngine) Reserve(ram, disk uint64) uint64           { return ram + disk }
func (e *freeEngine) MaxDisk() (uint64, error)                  { return engine.LargestDisk, nil }
func (e *freeEngine) Fits(snapshot.Manifest) error              { return nil }
func (e *freeEngine) Keep(folders, snapshots []string) error    { return nil }
func (e *freeEngine) Drop([]string) error                       { return nil }
func (e *freeEngine) Close() error                              { return nil }
func (e *freeEngine) Inspect(string) (int, engine.Stats, error) { return 0, engine.Stats{}, nil }

func (e *freeEngine) Fork(ctx context.Context, _ *snapshot.Snapshot, o engine.ForkOptions) (engine.Sandbox, error) {
	release, err := o.WaitTurn(ctx)
	if err != nil {
		return nil, err
	}
	defer release()
	s := &freeSandbox{engine: e, folder: o.Folder, done: make(chan struct{})}
	e.mu.Lock()
	defer e.mu.Unlock()
	e.running[o.Folder] = s
	return s, nil
}

func (e *freeEngine) Adopt(ctx context.Context, folder string) (engine.Sandbox, error) {
	e.mu.Lock()
	s, slow, silent, took := e.running[folder], e.slow[folder], e.silent[folder], e.took
	e.mu.Unlock()
	if s == nil {
		return nil, engine.ErrEnded
	}
	var answer <-chan time.Time
	switch {
	case slow:
		answer = time.After(took)
	case !silent:
		return s, nil
	}
	select {
	case <-answer:
		return s, nil
	case <-ctx.Done():
		return nil, ctx.Err()
	}
}

func (e *freeEngine) Remove(_ context.Context, folder string) error {
	e.end(folder)
	return os.RemoveAll(folder)
}

func (e *freeEngine) end(folder string) {
	e.mu.Lock()
	defer e.mu.Unlock()
	if s := e.running[folder]; s != nil {
		delete(e.running, folder)
		close(s.done)
	}
}

// delay slows down the adoption of some machines, and makes others never answer, from
// now on.
func (e *freeEngine) delay(slow []sandbox.ID, took time.Duration, silent []sandbox.ID, machines string) {
	in := func(ids []sandbox.ID) map[string]bool {
		out := map[string]bool{}
		for _, id := range ids {
			out[filepath.Join(machines, string(id))] = true
		}
		return out
	}
	e.mu.Lock()
	defer e.mu.Unlock()
	e.slow, e.silent, e.took = in(slow), in(silent), took
}

// freeSandbox is a sandbox of a freeEngine.
type freeSandbox struct {
	engine.Sandbox // nil: its methods are not called
	engine         *freeEngine
	folder         string
	done           chan struct{}
}

func (s *freeSandbox) Resume(context.Context) error        { return nil }
func (s *freeSandbox) Claim(context.Context, string) error { return nil }
func (s *freeSandbox) Detach() error                       { return nil }
func (s *freeSandbox) Done() <-chan struct{}               { return s.done }
func (s *freeSandbox) Wait() error                         { <-s.done; return engine.ErrEnded }
func (s *freeSandbox) Close() error                        { s.engine.end(s.folder); return nil }

// Snapshot makes one that has nothing of the sandbox.
func (s *freeSandbox) Snapshot(ctx context.Context, dir string, _ ...snapshot.Option) (*snapshot.Snapshot, error) {
	return freeSnapshot(ctx, dir)
}

// freeBuilder makes templates without contents.
type freeBuilder struct{}

// Build makes a snapshot of a page of zeros.
func (freeBuilder) Build(ctx context.Context, req node.BuildRequest) (sandbox.Built, error) {
	snap, err := freeSnapshot(ctx, req.Dir)
	if err != nil {
		return sandbox.Built{}, err
	}
	return sandbox.Built{Image: "none", Workdir: sandbox.DefaultWorkdir}, snap.Close()
}

// freeSnapshot makes a snapshot of a page of zeros.
func freeSnapshot(ctx context.Context, dir string) (*snapshot.Snapshot, error) {
	return snapshot.Make(dir, func(b *snapshot.Builder) (*snapshot.Snapshot, error) {
		page, err := b.StreamLayer(ctx, bytes.NewReader(make([]byte, layer.PageSize)), layer.PageSize)
		if err != nil {
			return nil, err
		}
		root := layer.Stack{Size: page.Size, Layers: []layer.Ref{page}, Extents: []layer.Extent{{Length: page.Size}}}
		return b.Commit(snapshot.Manifest{
			Created: time.Now().UTC().Truncate(time.Second), Kernel: strings.Repeat("0", 64), TSCKHz: 1, VCPUs: 1,
			Memory: snapshot.StackOf(layer.Stack{Size: layer.PageSize}),
			Disks:  []snapshot.Disk{{ID: "root", ReadOnly: true, Stack: snapshot.StackOf(root)}},
			CPU:    snapshot.CPU{Profile: "none", Vendor: "none", Family: 1},
		}, []byte("none"))
	})
}

// Finish does nothing, because nothing runs in these sandboxes.
func (freeBuilder) Finish(context.Context, sandbox.TemplateSpec, sandbox.Built, engine.Sandbox) error {
	return nil
}

// DropImage implements node.Builder.
func (freeBuilder) DropImage(context.Context, sandbox.Namespace, string) (bool, error) {
	return true, nil
}

// Rehearse does nothing, because nothing runs in these sandboxes.
func (freeBuilder) Rehearse(context.Context, sandbox.TemplateSpec, engine.Sandbox) error { return nil }
