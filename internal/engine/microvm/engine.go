// Package microvm runs sandboxes as microVMs, each in a vmm process of its own.
// Package process starts these processes and speaks with them.
package microvm

import (
	"context"
	"errors"
	"fmt"
	"os"
	"slices"
	"sync"
	"time"

	"agentrun.dev/internal/engine"
	"agentrun.dev/internal/engine/microvm/process"
	"agentrun.dev/internal/host/assets"
	"agentrun.dev/internal/host/jail"
	"agentrun.dev/internal/host/procid"
	"agentrun.dev/internal/storage/layer"
	"agentrun.dev/internal/storage/seal"
	"agentrun.dev/internal/storage/snapshot"
)

// Name identifies this engine in the snapshots that it makes.
const Name = snapshot.Engine

// Engine runs sandboxes as microVMs that fork.
type Engine struct {
	resident *layer.Resident
	scratch  *os.File // the folder of the disks' top files
	vmm      *jail.Jail
	touched  touched
	spares   spareSet
	cpu      hostCPU
	key      *seal.Key
	blanks   blanks
	lent     jail.Files // disk files lent to vmm processes; each process counts its own
	kernel   func() (string, error)
}

var _ engine.Engine = (*Engine)(nil)

// Config says where an Engine keeps its files, and how strict its jail is.
type Config struct {
	// Resident is a folder on tmpfs for the memory layers that sandboxes map.
	Resident string
	// Scratch is a folder for the data that sandboxes write to their disks. Files
	// there have no name and vanish with their sandbox.
	Scratch string
	// Jail says whether to go on where sandboxes cannot be jailed or limited.
	Jail JailPolicy
	// Key opens the private snapshots that adopted sandboxes come from. With nil the
	// engine cannot open private snapshots.
	Key *seal.Key
}

// JailPolicy says which walls may be missing where they cannot be built. The zero
// value accepts no missing wall.
type JailPolicy struct {
	// AllowUnlimited starts sandboxes without limits by cgroups.
	AllowUnlimited bool
	// AllowUnjailed starts sandboxes with only a system call filter.
	AllowUnjailed bool
}

// NewJail makes the jail for vmm processes.
func NewJail(policy JailPolicy) (*jail.Jail, error) {
	path, err := assets.Path(assets.VMM)
	if err != nil {
		return nil, err
	}
	return jail.New(jail.Config{Program: path, AllowUnlimited: policy.AllowUnlimited, AllowUnjailed: policy.AllowUnjailed}), nil
}

// New makes an engine.
func New(cfg Config) (*Engine, error) {
	vmms, err := NewJail(cfg.Jail)
	if err != nil {
		return nil, err
	}
	if err := os.MkdirAll(cfg.Scratch, 0o700); err != nil {
		return nil, fmt.Errorf("open engine: %w", err)
	}
	scratch, err := os.Open(cfg.Scratch)
	if err != nil {
		return nil, fmt.Errorf("open engine: %w", err)
	}
	resident, err := layer.OpenResident(cfg.Resident)
	if err != nil {
		return nil, errors.Join(fmt.Errorf("open engine: %w", err), scratch.Close())
	}
	return &Engine{resident: resident, scratch: scratch, vmm: vmms, key: cfg.Key, kernel: sync.OnceValues(kernelDigest)}, nil
}

// Name identifies this engine in the snapshots that it makes.
func (e *Engine) Name() string { return Name }

// Processor is the host's processor as sandboxes see it.
func (e *Engine) Processor() (engine.Processor, error) {
	cpu, err := e.cpu.get()
	if err != nil {
		return engine.Processor{}, err
	}
	p := engine.Processor{Profile: cpu.Profile, Vendor: cpu.Vendor}
	for word, bits := range cpu.Features {
		p.Features = append(p.Features, fmt.Sprintf("%s=%#x", word, bits))
	}
	slices.Sort(p.Features)
	return p, nil
}

// Capabilities say how this engine differs from others.
func (e *Engine) Capabilities() engine.Capabilities {
	return engine.Capabilities{Disks: true, SharesMemory: true}
}

// Close frees the engine and ends its spares. Sandboxes live on.
func (e *Engine) Close() error {
	return errors.Join(e.spares.close(), e.blanks.close(), e.resident.Close(), e.scratch.Close(), e.vmm.Close())
}

// top makes a file without a name for the writes of a disk's guest.
func (e *Engine) top() (*os.File, error) {
	f, err := os.CreateTemp(e.scratch.Name(), "disk-")
	if err != nil {
		return nil, fmt.Errorf("make a disk's writable layer: %w", err)
	}
	// O_TMPFILE is not used: overlay filesystems support it only since Linux 6.2.
	if err := os.Remove(f.Name()); err != nil {
		return nil, errors.Join(fmt.Errorf("make a disk's writable layer: %w", err), f.Close())
	}
	return f, nil
}

// Outdated says why a template's snapshot is to be made anew. The reason is that its
// guests run another kernel than this AgentRun would boot: a snapshot keeps its
// kernel for good.
func (e *Engine) Outdated(m snapshot.Manifest) (why string, err error) {
	ours, err := e.kernel()
	if err != nil || m.Kernel == ours {
		return "", err
	}
	return fmt.Sprintf("its guest kernel is another build (%.12s, this is %.12s)", m.Kernel, ours), nil
}

// kernelDigest is the digest of the guest kernel that comes with AgentRun.
func kernelDigest() (string, error) {
	f, err := assets.Open(assets.Kernel)
	if err != nil {
		return "", err
	}
	defer func() { _ = f.Close() }() // only read
	return fileDigest(f)
}

// Fork makes a sandbox that continues from a snapshot.
func (e *Engine) Fork(ctx context.Context, snap *snapshot.Snapshot, opts engine.ForkOptions) (engine.Sandbox, error) {
	return e.ForkRehearsed(ctx, snap, opts, nil)
}

// ForkRehearsed forks and rehearses. The pages that the rehearsals of the first two
// forks touch are mapped ahead in later forks.
func (e *Engine) ForkRehearsed(ctx context.Context, snap *snapshot.Snapshot, opts engine.ForkOptions, rehearse engine.Rehearsal) (engine.Sandbox, error) {
	if err := e.Fits(snap.Manifest()); err != nil {
		return nil, fmt.Errorf("fork %s: %w", snap.ID(), err)
	}
	s, err := e.fork(ctx, snap, opts, rehearse)
	if err != nil {
		return nil, fmt.Errorf("fork %s: %w", snap.ID(), err)
	}
	return s, nil
}

// Restored is the time from the call of Fork until the sandbox's processors ran.
func Restored(sb engine.Sandbox) time.Duration {
	if s, ok := sb.(*sandbox); ok {
		return s.restored
	}
	return 0
}

// FromSpare reports whether a sandbox was forked into a spare that had waited.
func FromSpare(sb engine.Sandbox) bool {
	s, ok := sb.(*sandbox)
	return ok && s.fromSpare
}

// ProcessOf is the vmm process of a sandbox; nil if the sandbox is no microVM.
func ProcessOf(sb engine.Sandbox) *process.Process {
	if s, ok := sb.(*sandbox); ok {
		return s.Process
	}
	return nil
}

// Identify returns the id by which a sandbox's process is found again.
func Identify(sb engine.Sandbox) (procid.ID, error) {
	s, ok := sb.(*sandbox)
	if !ok {
		return procid.ID{}, fmt.Errorf("identify: %T is no microVM", sb)
	}
	return procid.Of(s.Pid())
}
