package microvm

import (
	"context"
	"crypto/rand"
	"encoding/hex"
	"errors"
	"fmt"
	"net"
	"os"
	"time"

	"agentrun.dev/internal/assets"
	"agentrun.dev/internal/engine"
	"agentrun.dev/internal/guestrpc"
	"agentrun.dev/internal/jail"
	"agentrun.dev/internal/layer"
	"agentrun.dev/internal/procid"
	"agentrun.dev/internal/snapshot"
	"agentrun.dev/internal/vmmctl"
	"golang.org/x/sys/unix"
)

// Name is what snapshots of this engine carry.
const Name = snapshot.Engine

// Engine runs sandboxes as microVMs that fork.
type Engine struct {
	resident *layer.Resident
	scratch  string
	vmm      *jail.Jail
	touched  touched
}

var _ engine.Survivor = (*Engine)(nil)

// Config says where an Engine keeps what it needs.
type Config struct {
	// Resident is a folder on tmpfs for the memory layers that sandboxes map.
	Resident string
	// Scratch is a folder for what sandboxes write to their disks. Files there
	// have no name and vanish with their sandbox.
	Scratch string
	// Jail says what to do where sandboxes cannot be jailed or limited.
	Jail JailPolicy
}

// JailPolicy says what is accepted where walls cannot be built. The zero value
// refuses.
type JailPolicy struct {
	// AllowUnlimited starts sandboxes without limits by cgroups.
	AllowUnlimited bool
	// AllowUnjailed starts them with nothing but a system call filter.
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
	resident, err := layer.OpenResident(cfg.Resident)
	if err != nil {
		return nil, fmt.Errorf("open engine: %w", err)
	}
	return &Engine{resident: resident, scratch: cfg.Scratch, vmm: vmms}, nil
}

// Name is what snapshots of this engine carry.
func (e *Engine) Name() string { return Name }

// Capabilities say how this engine differs from others.
func (e *Engine) Capabilities() engine.Capabilities { return engine.Capabilities{Disks: true} }

// Close frees the engine; sandboxes live on.
func (e *Engine) Close() error { return errors.Join(e.resident.Close(), e.vmm.Close()) }

// Boot boots a sandbox and returns when its agent has answered.
func (e *Engine) Boot(ctx context.Context, spec engine.Spec) (engine.Sandbox, error) {
	kernel := spec.Kernel
	if kernel == nil {
		var err error
		if kernel, err = assets.Open(assets.Kernel); err != nil {
			return nil, err
		}
		defer func() { _ = kernel.Close() }()
	}
	s := &sandbox{
		engine: e, hostname: spec.Hostname, vcpus: spec.VCPUs, boot: &bootFiles{users: 1},
		memory: layer.Image{Size: spec.Memory},
		disks:  []disk{{id: "root", readOnly: true}},
	}
	var err error
	if s.boot.kernel, err = reopen(kernel); err != nil {
		return nil, err
	}
	if s.boot.root, err = reopen(spec.Root); err != nil {
		return nil, errors.Join(err, s.boot.kernel.Close())
	}
	low := Spec{
		Kernel: kernel, Root: spec.Root, Memory: spec.Memory, VCPUs: spec.VCPUs,
		Hostname: spec.Hostname, Cmdline: spec.Cmdline, Limits: spec.Limits,
	}
	if spec.Scratch > 0 {
		im := layer.Image{Size: spec.Scratch}
		top, err := e.top()
		if err != nil {
			return nil, errors.Join(err, s.release())
		}
		defer func() { _ = top.Close() }()
		low.Disks = append(low.Disks, Disk{File: top, ID: "scratch", Image: &im})
		s.disks = append(s.disks, disk{id: "scratch", image: im})
	}
	if s.Guest, err = Boot(ctx, e.vmm, low); err != nil {
		return nil, errors.Join(err, s.release())
	}
	return s, nil
}

// top makes a file without a name for what a disk's guest writes.
func (e *Engine) top() (*os.File, error) {
	f, err := os.CreateTemp(e.scratch, "disk-")
	if err != nil {
		return nil, fmt.Errorf("make a disk's writable layer: %w", err)
	}
	// Not O_TMPFILE: overlay filesystems have learnt it only in Linux 6.2.
	if err := os.Remove(f.Name()); err != nil {
		return nil, errors.Join(fmt.Errorf("make a disk's writable layer: %w", err), f.Close())
	}
	return f, nil
}

// Fork makes a sandbox that continues from a snapshot.
func (e *Engine) Fork(ctx context.Context, snap *snapshot.Snapshot, opts engine.ForkOptions) (engine.Sandbox, error) {
	m := snap.Manifest()
	if m.Engine != Name {
		return nil, fmt.Errorf("fork %s: %w: it is of engine %q, not %q", snap.ID(), engine.ErrMismatch, m.Engine, Name)
	}
	s, err := e.fork(ctx, snap, opts)
	if err != nil {
		return nil, fmt.Errorf("fork %s: %w", snap.ID(), err)
	}
	return s, nil
}

func (e *Engine) fork(ctx context.Context, snap *snapshot.Snapshot, opts engine.ForkOptions) (*sandbox, error) {
	s, err := e.describe(snap, opts.Hostname)
	if err != nil {
		return nil, err
	}
	m := snap.Manifest()
	populate, learn := e.touched.of(snap.ID())
	from := origin{
		profile: m.CPU.Profile, session: m.Session, populate: populate,
		state: func() (*os.File, error) { return memoryFile("state", snap.State()) },
		memory: func(ctx context.Context, ref layer.Ref) (*os.File, error) {
			return e.resident.Load(ctx, ref, func() (*os.File, error) { return snap.OpenLayer(ref) })
		},
		disk: func(_ *disk, ref layer.Ref) (*os.File, error) { return snap.OpenLayer(ref) },
	}
	if s, err = e.restore(ctx, s, opts, from); err == nil && learn {
		go e.touched.learn(context.WithoutCancel(ctx), snap.ID(), s.Process)
	}
	return s, err
}

// origin is where a fork's parts come from. The files are the fork's to close.
type origin struct {
	profile  string
	session  []byte      // of the standby; empty: the fork opens one
	populate []layer.Run // what the fork will write to at once
	state    func() (*os.File, error)
	memory   func(context.Context, layer.Ref) (*os.File, error)
	disk     func(*disk, layer.Ref) (*os.File, error)
}

// restore starts a fork that was described.
func (e *Engine) restore(ctx context.Context, s *sandbox, opts engine.ForkOptions, from origin) (_ *sandbox, err error) {
	begin := time.Now()
	restore := &vmmctl.Restore{
		Memory: s.memory, Profile: from.profile, VCPUs: uint64(s.vcpus), Populate: from.populate,
		Devices: vmmctl.Devices{ReadyPort: guestrpc.AgentPort},
	}
	var files []*os.File
	defer func() {
		for _, f := range files {
			_ = f.Close() // the vmm has its own copies
		}
	}()
	add := func(f *os.File, openErr error) {
		if err == nil {
			err = openErr
		}
		if openErr == nil {
			files = append(files, f)
		}
	}
	add(openKVM())
	if uffd := openUserfaultfd(); uffd != nil {
		restore.HasUserfaultfd = true
		add(uffd, nil)
	}
	add(from.state())
	for _, ref := range s.memory.Layers {
		add(from.memory(ctx, ref))
	}
	for i := range s.disks {
		d := &s.disks[i]
		refs := d.image.Layers
		if d.readOnly && len(refs) == 0 {
			refs = []layer.Ref{{}} // what a sandbox was booted from has no digest until it is captured
		}
		for _, ref := range refs {
			add(from.disk(d, ref))
		}
		wire := vmmctl.Disk{ReadOnly: d.readOnly, ID: d.id}
		if !d.readOnly {
			wire.Image = &d.image
			add(e.top())
		}
		restore.Devices.Disks = append(restore.Devices.Disks, wire)
	}
	s.attachable = opts.Socket != ""
	if s.attachable {
		restore.Devices.Listen = true
		add(vmmctl.Listen(opts.Socket))
	}
	var standby net.Conn
	if err == nil && len(from.session) > 0 {
		var theirs *os.File
		standby, theirs, err = streamPair()
		restore.Devices.Standby = true
		add(theirs, err)
	}
	if err != nil {
		return nil, err
	}
	p, err := launch(e.vmm, restore, files, opts.Limits)
	if err != nil {
		if standby != nil {
			err = errors.Join(err, standby.Close())
		}
		return nil, err
	}
	s.restored = time.Since(begin)
	if standby != nil {
		s.Guest = &Guest{Process: p}
		s.Guest.Agent, err = guestrpc.Resume(standby, from.session)
	} else {
		s.Guest, err = dialAgent(ctx, p)
	}
	if err == nil {
		err = s.renew(ctx, opts.KeepIdentity)
	}
	if err != nil {
		return nil, abandon(ctx, p, err)
	}
	return s, nil
}

// describe says what a fork of a snapshot is made of.
func (e *Engine) describe(snap *snapshot.Snapshot, hostname string) (*sandbox, error) {
	m := snap.Manifest()
	generation, err := engine.NextGeneration(m)
	if err != nil {
		return nil, err
	}
	if hostname == "" {
		hostname = "sandbox-" + randomHex(4)
	}
	s := &sandbox{
		engine: e, kernel: m.Kernel, hostname: hostname, vcpus: m.VCPUs,
		parent: snap,
	}
	s.generation.Store(generation)
	s.setMemory(m.Memory.Layer())
	for _, d := range m.Disks {
		s.disks = append(s.disks, disk{id: d.ID, readOnly: d.ReadOnly, image: d.Image.Layer()})
	}
	return s, nil
}

// Attach connects to a sandbox that was forked from snap with a Socket.
func (e *Engine) Attach(ctx context.Context, snap *snapshot.Snapshot, opts engine.ForkOptions, id procid.ID) (engine.Attached, error) {
	s, err := e.describe(snap, opts.Hostname)
	if err != nil {
		return nil, err
	}
	s.attachable = true
	p, err := e.attachProcess(opts.Socket, id)
	if err != nil {
		return nil, err
	}
	if s.Guest, err = dialAgent(ctx, p); err != nil {
		return nil, errors.Join(err, p.conn.Close())
	}
	// One that was claimed after it was forked has a higher one.
	info, err := s.Agent().Info(ctx)
	if err != nil {
		return nil, errors.Join(err, s.Agent().Close(), p.conn.Close())
	}
	s.generation.Store(info.Generation)
	return &Attached{s}, nil
}

// AttachProcess connects to the process of a sandbox, whose guest may stand
// still.
func (e *Engine) AttachProcess(_ context.Context, socket string, id procid.ID) (engine.Process, error) {
	return e.attachProcess(socket, id)
}

func (e *Engine) attachProcess(socket string, id procid.ID) (*Process, error) {
	p, err := attach(e.vmm, socket, id)
	if err != nil && !id.Alive() {
		err = fmt.Errorf("%w: its process is gone", engine.ErrEnded)
	}
	return p, err
}

// Detach leaves the process alone; one that has ended is fine.
func (p *Process) Detach() error {
	if err := p.conn.Close(); !errors.Is(err, os.ErrClosed) {
		return err
	}
	return nil
}

// Attached is a sandbox that lives on when its connection ends.
type Attached struct{ *sandbox }

// Prepare makes the sandbox ready to be captured after it was paused.
func (a *Attached) Prepare(ctx context.Context) error {
	a.capture.Lock()
	defer a.capture.Unlock()
	a.openStandby(ctx, true)
	return ctx.Err()
}

// Detach leaves the sandbox alone.
func (a *Attached) Detach() error {
	return errors.Join(a.Guest.Agent.Close(), a.release(), a.Process.Detach(), a.parent.Close())
}

// Restored is how long after the call to Fork a sandbox's processors ran.
func Restored(sb engine.Sandbox) time.Duration {
	if s, ok := sb.(*sandbox); ok {
		return s.restored
	}
	return 0
}

// Identify says by which process a sandbox is found again.
func (e *Engine) Identify(sb engine.Sandbox) (procid.ID, error) { return Identify(sb) }

// Identify says by which process a microVM is found again.
func Identify(sb engine.Sandbox) (procid.ID, error) {
	s, ok := sb.(*sandbox)
	if !ok {
		return procid.ID{}, fmt.Errorf("identify: %T is no microVM", sb)
	}
	return procid.Of(s.Pid())
}

// Detach leaves a sandbox that was forked with a Socket to itself.
func (e *Engine) Detach(sb engine.Sandbox) error {
	s, ok := sb.(*sandbox)
	if !ok {
		return fmt.Errorf("detach: %T is no microVM", sb)
	}
	return errors.Join(s.Guest.Agent.Close(), s.release(), s.Process.Detach())
}

// StopListening ends a vmm of which only its socket is known. Nobody there is
// fine.
func (e *Engine) StopListening(ctx context.Context, socket string) error {
	return stopListening(ctx, socket)
}

// ProcessStats reads the memory of a vmm process.
func (e *Engine) ProcessStats(pid int) (engine.Stats, error) { return ProcessStats(pid) }

// Sweep frees the user ids and cgroups of sandboxes that ended while nobody
// watched.
func (e *Engine) Sweep() error { return e.vmm.Sweep() }

// KeepResident frees the resident memory layers that are not used. VMs that
// map them are not disturbed.
func (e *Engine) KeepResident(used func(layer.Digest) bool) (removed int, err error) {
	return e.resident.Keep(used)
}

func randomHex(n int) string {
	b := make([]byte, n)
	_, _ = rand.Read(b) // it never fails: crypto/rand ends the process instead
	return hex.EncodeToString(b)
}

func openKVM() (*os.File, error) {
	f, err := os.OpenFile("/dev/kvm", os.O_RDWR, 0)
	if err != nil {
		return nil, fmt.Errorf("open KVM: %w (agentrun doctor says what this host lacks)", err)
	}
	return f, nil
}

// openUserfaultfd opens the device that live forks without copying need, or
// returns nil where there is none: then memory is copied in the pause.
func openUserfaultfd() *os.File {
	f, err := os.OpenFile("/dev/userfaultfd", os.O_RDWR, 0)
	if err != nil {
		return nil
	}
	return f
}

// memoryFile is a file in memory with some content.
func memoryFile(name string, content []byte) (*os.File, error) {
	fd, err := unix.MemfdCreate(name, unix.MFD_CLOEXEC|unix.MFD_ALLOW_SEALING)
	if err != nil {
		return nil, fmt.Errorf("make memfd: %w", err)
	}
	f := os.NewFile(uintptr(fd), name)
	if _, err := f.WriteAt(content, 0); err != nil {
		return nil, errors.Join(fmt.Errorf("fill memfd: %w", err), f.Close())
	}
	return f, nil
}
