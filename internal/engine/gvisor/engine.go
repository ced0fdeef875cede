// Package gvisor runs sandboxes on gVisor, for machines without usable KVM. Each
// sandbox has a kernel of its own, written in Go, which runs as a process and handles
// the system calls of the programs inside. See docs/design/gvisor.md.
package gvisor

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"sync"
	"time"

	"agentrun.dev/internal/engine"
	"agentrun.dev/internal/engine/folder"
	"agentrun.dev/internal/engine/gvisorctl"
	"agentrun.dev/internal/engine/identity"
	"agentrun.dev/internal/engine/programs"
	"agentrun.dev/internal/host/assets"
	"agentrun.dev/internal/host/jail"
	"agentrun.dev/internal/storage/layer"
	"agentrun.dev/internal/storage/seal"
	"agentrun.dev/internal/storage/snapshot"
	"agentrun.dev/internal/vmm/vmmctl"
)

// Name identifies this engine in the snapshots that it makes.
const Name = snapshot.EngineGVisor

// Config says where an Engine keeps its files.
type Config struct {
	// Resident is a folder on tmpfs for the pages that sandboxes are restored
	// from.
	Resident string
	// Helpers is a folder on a disk for the builds of gvisor-helper that have made
	// snapshots and sandboxes. If it is empty, no builds are kept.
	Helpers string
	// RunDir is a folder, on tmpfs, for gVisor's files of running sandboxes. If it is
	// empty, RunDir is /run/agentrun/gvisor. All engines of a machine share it.
	RunDir string
	// AllowUnlimited starts sandboxes without limits on a host without cgroups.
	AllowUnlimited bool
	// Precreate is how many sandboxes are made ahead for the snapshot that was forked
	// last. These have read its checkpoint, except for the pages of programs.
	Precreate int
	// Key opens the private snapshots that adopted sandboxes come from. With nil the
	// engine cannot open private snapshots.
	Key *seal.Key
}

// Engine runs sandboxes on gVisor.
type Engine struct {
	cfg      Config
	resident *layer.Resident
	helpers  helpers
	groups   func() (*jail.Groups, error)
	features func() (*processor, error)
	waiting  waiting
}

var _ engine.Engine = (*Engine)(nil)

// defaultRunDir is the folder of gVisor's files of running sandboxes.
const defaultRunDir = "/run/agentrun/gvisor"

// New makes an engine.
func New(cfg Config) (*Engine, error) {
	if os.Geteuid() != 0 {
		return nil, errors.New("open engine: gVisor needs root to build a sandbox's walls: run as root")
	}
	path, err := assets.Path(assets.GVisorHelper)
	if err != nil {
		return nil, err
	}
	if cfg.RunDir == "" {
		cfg.RunDir = defaultRunDir
	}
	if err := os.MkdirAll(cfg.RunDir, 0o700); err != nil {
		return nil, fmt.Errorf("open engine: %w", err)
	}
	var store *programs.Store
	if cfg.Helpers != "" {
		if store, err = programs.Open(cfg.Helpers, string(assets.GVisorHelper)); err != nil {
			return nil, fmt.Errorf("open engine: %w", err)
		}
	}
	resident, err := layer.OpenResident(cfg.Resident)
	if err != nil {
		return nil, fmt.Errorf("open engine: %w", err)
	}
	e := &Engine{cfg: cfg, resident: resident, helpers: helpers{path: path, store: store}}
	e.waiting.want = cfg.Precreate
	e.features = sync.OnceValues(hostProcessor)
	e.groups = sync.OnceValues(e.openGroups)
	return e, nil
}

// openGroups opens the cgroups of sandboxes, and frees the remains of sandboxes that
// ended while no process was watching.
func (e *Engine) openGroups() (*jail.Groups, error) {
	g, err := jail.OpenGroups()
	if err != nil {
		if e.cfg.AllowUnlimited {
			return nil, nil
		}
		return nil, fmt.Errorf("%w (agentrun doctor says what this host lacks; --allow-unlimited goes on without)", err)
	}
	_ = e.sweep(g) // remains that resist are harmless, and Sweep reports them
	return g, nil
}

// Name identifies this engine in the snapshots that it makes.
func (e *Engine) Name() string { return Name }

// Processor is the host's processor as sandboxes see it.
func (e *Engine) Processor() (engine.Processor, error) {
	p, err := e.features()
	if err != nil {
		return engine.Processor{}, err
	}
	return engine.Processor{Profile: p.cpu.Profile, Vendor: p.cpu.Vendor, Features: p.features}, nil
}

// Capabilities say how this engine differs from others.
func (e *Engine) Capabilities() engine.Capabilities {
	return engine.Capabilities{ClockCountsPauses: true, TCPPorts: true, CopiesInPause: true, EndsOutOfMemory: true}
}

// Close frees the engine. Sandboxes live on.
func (e *Engine) Close() error {
	defer e.helpers.close()
	return errors.Join(e.waiting.close(), e.resident.Close())
}

// Boot boots a sandbox and returns once its agent has answered.
func (e *Engine) Boot(ctx context.Context, spec engine.Spec) (engine.Sandbox, error) {
	if spec.Cmdline != "" {
		return nil, errors.New("boot: gVisor has no kernel command line")
	}
	if len(spec.Files) > 0 {
		return nil, fmt.Errorf("boot: attach files to a sandbox on gVisor: %w (microVMs have them)", engine.ErrNoDisks)
	}
	if spec.Limits.IO != (engine.IOLimits{}) {
		return nil, errors.New("boot: gVisor has no disks whose speed could be limited: its writable layer is memory")
	}
	if err := spec.CheckDisk(); err != nil {
		return nil, err
	}
	if spec.Network != nil {
		if err := spec.Network.Check(); err != nil {
			return nil, fmt.Errorf("boot: %w", err)
		}
	}
	root, err := reopen(spec.Root)
	if err != nil {
		return nil, fmt.Errorf("boot: %w", err)
	}
	s := &sandbox{
		engine: e, self: identity.Self{Hostname: spec.Hostname}, vcpus: spec.VCPUs, memory: spec.Memory, disk: diskSize(spec),
		root: newShared(root), network: spec.Network,
	}
	if s.self.Hostname == "" {
		s.self.Hostname = "sandbox"
	}
	var program *programs.Program
	if program, err = e.helpers.installed(); err == nil {
		s.build = program.Digest
		s.process, err = e.create(ctx, program, s.shape(), spec.Limits, root)
	}
	if err == nil {
		_, err = s.run(ctx, &gvisorctl.Message{Op: gvisorctl.OpStart}, nil, nil)
	}
	if err == nil {
		err = s.dialAgent(ctx)
	}
	if err != nil {
		return nil, errors.Join(s.abandon(ctx, fmt.Errorf("boot: %w", err)), s.release())
	}
	return s, nil
}

// diskSize is how far the root filesystem may grow: by the requested sizes, or by
// half of the memory, as in a microVM. A scratch disk counts as room in the root
// filesystem.
func diskSize(spec engine.Spec) uint64 {
	if n := spec.Disk + spec.Scratch; n > 0 {
		return n
	}
	return spec.Memory / 2
}

// Fork makes a sandbox that continues from a snapshot.
func (e *Engine) Fork(ctx context.Context, snap *snapshot.Snapshot, opts engine.ForkOptions) (engine.Sandbox, error) {
	s, err := e.fork(ctx, snap, opts)
	if err != nil {
		return nil, fmt.Errorf("fork %s: %w", snap.ID(), err)
	}
	return s, nil
}

func (e *Engine) fork(ctx context.Context, snap *snapshot.Snapshot, opts engine.ForkOptions) (_ *sandbox, err error) {
	release, err := opts.WaitTurn(ctx)
	if err != nil {
		return nil, err
	}
	defer release()
	if err := e.Fits(snap.Manifest()); err != nil {
		return nil, err
	}
	s, err := e.describe(snap, opts.Hostname)
	if err != nil {
		return nil, err
	}
	var files checkpoint
	ready := e.waiting.take(snap, opts.Limits)
	if ready == nil || !ready.loaded {
		if files, err = e.checkpointOf(ctx, snap); err != nil {
			if ready != nil {
				ready.kill()
			}
			return nil, errors.Join(err, s.release())
		}
		defer files.close() // the sandbox has its own copies
	}
	if err := s.restore(ctx, files, opts, ready); err != nil {
		return nil, err
	}
	e.waiting.refill(s, snap, opts.Limits, files)
	return s, nil
}

// describe describes the parts of a fork of a snapshot.
func (e *Engine) describe(snap *snapshot.Snapshot, hostname string) (*sandbox, error) {
	m := snap.Manifest()
	if m.Engine != Name {
		return nil, fmt.Errorf("%w: it is of engine %q, not %q", engine.ErrMismatch, m.Engine, Name)
	}
	generation, err := engine.NextGeneration(m)
	if err != nil {
		return nil, err
	}
	if len(m.Disks) != 1 || len(m.Disks[0].Stack.Layers) != 1 {
		return nil, fmt.Errorf("%w: it has no root filesystem in one piece", engine.ErrMismatch)
	}
	network, err := engine.NetworkOf(m)
	if err != nil {
		return nil, err
	}
	build, err := layer.ParseDigest(m.GVisor.Helper)
	if err != nil {
		return nil, err
	}
	ref := layer.Ref(m.Disks[0].Stack.Layers[0])
	root, err := snap.OpenLayer(ref)
	if err != nil {
		return nil, err
	}
	if hostname == "" {
		hostname = identity.Hostname()
	}
	s := &sandbox{
		engine: e, self: identity.Self{Hostname: hostname}, vcpus: m.VCPUs, memory: m.Memory.Size, disk: m.GVisor.Disk,
		root: newShared(root), parent: snap, network: network, build: build,
	}
	s.root.ref = ref
	s.self.Generation.Store(generation)
	return s, nil
}

// Fits refuses a snapshot of another engine. It also refuses a snapshot that no
// helper here can restore, or that this machine's processor cannot run.
func (e *Engine) Fits(m snapshot.Manifest) error {
	if m.Engine != Name {
		return fmt.Errorf("%w: it is of engine %q, not %q", engine.ErrMismatch, m.Engine, Name)
	}
	g := m.GVisor
	build, err := layer.ParseDigest(g.Helper)
	if err != nil {
		return err
	}
	if err := e.helpers.check(build); err != nil {
		return err
	}
	cpu, err := e.features()
	if err != nil {
		return err
	}
	switch missing := cpu.lacks(g.CPUFeatures); {
	case g.Platform != platform:
		return fmt.Errorf("%w: it was made on gVisor's platform %q, this is %q", engine.ErrMismatch, g.Platform, platform)
	case len(missing) > 0:
		return fmt.Errorf("%w: this processor lacks %v, which programs in it may use", engine.ErrMismatch, missing)
	}
	return nil
}

// restore starts a fork that was described before. ready is a sandbox that waits for
// the fork, or nil.
func (s *sandbox) restore(ctx context.Context, files checkpoint, opts engine.ForkOptions, ready *process) (err error) {
	begin := time.Now()
	m := &gvisorctl.Message{Op: gvisorctl.OpRestore}
	var listener *os.File
	if s.self.Folder = folder.Folder(opts.Folder); s.self.Folder != "" {
		own, err := s.self.Folder.Prepare(s.parent)
		if err != nil {
			return errors.Join(err, s.release())
		}
		s.parent, s.ownParent = own, true
		if listener, err = vmmctl.Listen(s.self.Folder.Control()); err != nil {
			return errors.Join(err, s.release())
		}
		defer func() { _ = listener.Close() }() // the helper has its own copy
	}
	if s.process = ready; ready == nil {
		if opts.Limits.IO != (engine.IOLimits{}) {
			err = errors.New("gVisor has no disks whose speed could be limited")
		} else {
			s.process, err = s.engine.createOf(ctx, s.build, s.shape(), opts.Limits, s.root.file)
		}
	}
	if err == nil {
		first := files.list()
		if s.loaded {
			first = nil
		}
		_, err = s.run(ctx, m, first, listener)
	}
	s.restored = time.Since(begin)
	if err == nil {
		err = s.dialAgent(ctx)
	}
	if err == nil {
		err = s.self.Renew(ctx, s.Agent(), opts.KeepIdentity)
	}
	if err == nil {
		err = s.self.Write(s.helper, folder.Record{Protocol: s.protocol})
	}
	if err != nil {
		return errors.Join(s.abandon(ctx, err), s.release())
	}
	return nil
}

// Restored is the time from the call of Fork until the sandbox's processors ran.
func Restored(sb engine.Sandbox) time.Duration {
	if s, ok := sb.(*sandbox); ok {
		return s.restored
	}
	return 0
}

// reopen opens another descriptor of an open file.
func reopen(f *os.File) (*os.File, error) {
	g, err := os.Open("/proc/self/fd/" + strconv.Itoa(int(f.Fd())))
	if err != nil {
		return nil, fmt.Errorf("reopen %s: %w", f.Name(), err)
	}
	return g, nil
}

// runDirOf is the folder of gVisor's files of a sandbox.
func (e *Engine) runDirOf(id string) string { return filepath.Join(e.cfg.RunDir, id) }
