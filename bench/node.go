package bench

import (
	"context"
	"errors"
	"log/slog"
	"os"
	"path/filepath"
	"time"

	"agentrun.dev/internal/engine"
	"agentrun.dev/internal/engine/folder"
	"agentrun.dev/internal/engine/microvm"
	"agentrun.dev/internal/engine/pick"
	"agentrun.dev/internal/node"
	"agentrun.dev/internal/node/journal"
	"agentrun.dev/internal/node/template"
	"agentrun.dev/internal/sandbox"
	"agentrun.dev/internal/storage/image"
)

// nodeConfig describes a node with one pool.
type nodeConfig struct {
	// Image is an image in Images.
	Image  string
	Images *image.Store
	// Root is a root filesystem that replaces the image.
	Root   *rootTemplate
	Memory uint64
	Folder string
	Engine pick.Kind
	Jail   microvm.JailPolicy
	// Opened is an engine that is open already; the caller keeps and closes it.
	Opened engine.Engine
	// Warmup may be nil.
	Warmup *sandbox.Program
	// Observer may be nil, and Starts 0.
	Observer sandbox.Observer
	Starts   int
	// Cost is the cost of the journal's commits.
	Cost journal.Cost
	// Reserve is how much of the disk is kept free of what tenants store.
	Reserve uint64
}

func (cfg nodeConfig) builder(e engine.Engine) node.Builder {
	if _, free := e.(*freeEngine); free {
		return freeBuilder{}
	}
	if cfg.Root != nil {
		return &rootBuilder{rootTemplate: *cfg.Root, engine: e}
	}
	return &template.Builder{Engine: e, Images: cfg.Images, PlainRoots: cfg.Engine == pick.GVisor}
}

// rootTemplate is a template made from a root filesystem, without an image.
type rootTemplate struct{ ForkConfig }

// rootBuilder builds such a template.
type rootBuilder struct {
	rootTemplate
	engine engine.Engine
}

func (b *rootBuilder) Build(ctx context.Context, req node.BuildRequest) (built sandbox.Built, err error) {
	source, err := bootWarm(ctx, b.engine, b.ForkConfig)
	if err != nil {
		return built, err
	}
	defer func() { err = errors.Join(err, source.Close()) }()
	snap, err := source.Snapshot(ctx, req.Dir)
	if err != nil {
		return built, err
	}
	return sandbox.Built{Image: b.Root, Workdir: sandbox.DefaultWorkdir}, snap.Close()
}

// Finish does nothing: the template has no ready check and no warm-up code.
func (b *rootBuilder) Finish(context.Context, sandbox.TemplateSpec, sandbox.Built, engine.Sandbox) error {
	return nil
}

// DropImage implements node.Builder.
func (*rootBuilder) DropImage(context.Context, sandbox.Namespace, string) (bool, error) {
	return true, nil
}

// Rehearse does nothing, because the template has no interpreter that its user will
// speak to.
func (b *rootBuilder) Rehearse(context.Context, sandbox.TemplateSpec, engine.Sandbox) error {
	return nil
}

// benchNode is a daemon without its server: a manager with a pool, in which no
// sandbox waits at first.
type benchNode struct {
	manager *node.Manager
	folder  string // for sockets and logs
	undo    []func() error
}

// benchPool is the name of the pool and of its template.
const benchPool = "bench"

func benchKey(name string) sandbox.Key {
	return sandbox.Key{Namespace: sandbox.DefaultNamespace, Name: sandbox.Name(name)}
}

// newNode makes a node and waits for its pool. The caller closes it, also after an
// error.
func newNode(ctx context.Context, cfg nodeConfig) (*benchNode, error) {
	n := &benchNode{}
	if err := n.open(ctx, cfg); err != nil {
		return n, err
	}
	spec := sandbox.TemplateSpec{Image: cfg.Image, MilliCPUs: sandbox.DefaultMilliCPUs, Memory: cfg.Memory, Warmup: cfg.Warmup}
	if _, err := n.manager.ApplyTemplate(ctx, benchKey(benchPool), spec); err != nil {
		return n, err
	}
	return n, n.keep(ctx, 0)
}

// open opens the manager of a state folder, which may contain sandboxes.
func (n *benchNode) open(ctx context.Context, cfg nodeConfig) error {
	e, err := n.openEngine(cfg)
	if err != nil {
		return err
	}
	boot, err := folder.BootID()
	if err != nil {
		return err
	}
	n.manager, err = node.Open(ctx, node.Config{
		Dir: filepath.Join(cfg.Folder, "state"), Engine: e, Boot: boot, Capacity: 1 << 62,
		Builder: cfg.builder(e), Observer: cfg.Observer, Starts: cfg.Starts, Commits: cfg.Cost, StorageReserve: cfg.Reserve, Log: slog.New(slog.DiscardHandler),
	})
	if err != nil {
		return err
	}
	n.undo = append(n.undo, n.manager.Close)
	return nil
}

func (n *benchNode) openEngine(cfg nodeConfig) (engine.Engine, error) {
	if cfg.Opened != nil {
		return cfg.Opened, nil
	}
	resident, err := os.MkdirTemp("/dev/shm", "agentrun-bench-")
	if err != nil {
		return nil, err
	}
	n.undo = append(n.undo, func() error { return os.RemoveAll(resident) })
	e, err := pick.Open(cfg.Engine, pick.Config{Resident: resident, Scratch: filepath.Join(cfg.Folder, "scratch"), Jail: cfg.Jail})
	if err != nil {
		return nil, err
	}
	n.undo = append(n.undo, e.Close)
	return e, nil
}

// keep lets count sandboxes wait in the pool, and returns once they do.
func (n *benchNode) keep(ctx context.Context, count int) error {
	if _, err := n.manager.ApplyPool(ctx, benchKey(benchPool), sandbox.PoolSpec{Template: benchPool, Replicas: count, Stage: sandbox.AfterReady}); err != nil {
		return err
	}
	if err := n.manager.WaitPool(ctx, benchKey(benchPool)); err != nil {
		return err
	}
	for {
		_, st, err := n.manager.Pool(ctx, benchKey(benchPool))
		switch {
		case err != nil || st.Ready == count:
			return err
		case st.Problem != "":
			return errors.New(st.Problem)
		}
		select {
		case <-time.After(10 * time.Millisecond): // there is no event to wait for
		case <-ctx.Done():
			return ctx.Err()
		}
	}
}

func (n *benchNode) close() error { return undoAll(n.undo) }

// use claims a fork and does something in it. took does not include the claim.
func (n *benchNode) use(ctx context.Context, name string, do func(sandbox.Session) error) (took time.Duration, err error) {
	if _, _, err := n.manager.Claim(ctx, sandbox.ClaimRequest{Key: benchKey(name), Spec: sandbox.ClaimSpec{Pool: benchPool}}); err != nil {
		return 0, err
	}
	u, err := n.manager.Use(ctx, benchKey(name))
	if err != nil {
		return 0, err
	}
	defer u.Close()
	begin := time.Now()
	err = do(u)
	return time.Since(begin), err
}

// one is use of a fork that ends afterwards.
func (n *benchNode) one(ctx context.Context, name string, do func(sandbox.Session) error) (time.Duration, error) {
	took, err := n.use(ctx, name, do)
	_, killErr := n.manager.Kill(ctx, benchKey(name))
	return took, errors.Join(err, killErr)
}
