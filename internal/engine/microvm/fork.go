package microvm

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"time"

	"agentrun.dev/internal/engine"
	"agentrun.dev/internal/engine/folder"
	"agentrun.dev/internal/engine/identity"
	"agentrun.dev/internal/engine/microvm/process"
	"agentrun.dev/internal/guest/guestrpc"
	"agentrun.dev/internal/host/jail"
	"agentrun.dev/internal/storage/layer"
	"agentrun.dev/internal/storage/snapshot"
	"agentrun.dev/internal/vmm/vmmctl"
)

// Fits refuses a snapshot of another engine or processor.
func (e *Engine) Fits(m snapshot.Manifest) error {
	if m.Engine != Name {
		return fmt.Errorf("%w: it is of engine %q, not %q", engine.ErrMismatch, m.Engine, Name)
	}
	return e.cpu.check(m)
}

// fork makes a fork, and rehearses it unless rehearse is nil.
func (e *Engine) fork(ctx context.Context, snap *snapshot.Snapshot, opts engine.ForkOptions, rehearse engine.Rehearsal) (*sandbox, error) {
	release, err := opts.WaitTurn(ctx)
	if err != nil {
		return nil, err
	}
	defer release()
	s, err := e.describe(snap, opts.Hostname)
	if err != nil {
		return nil, err
	}
	about := subject{snap.ID(), rehearse != nil}
	from := e.originOf(snap)
	touch, learn := e.touched.of(about)
	from.touch, from.watch = touch, learn && e.cpu.mapsAhead()
	if !from.watch { // a spare cannot be watched
		from.spare = func() (*process.Process, bool) { return e.spares.take(snap.ID()) }
	}
	defer e.spares.refill(snap.ID()) // only after the fork: making the next spare would slow this fork down
	if _, err = e.restore(ctx, s, opts, from); err == nil && rehearse != nil {
		err = rehearse(ctx, s)
	}
	switch {
	case !learn:
	case err != nil:
		e.touched.forget(about)
	// Ask now, before the fork is used: its later pages are not common to all forks.
	case e.touched.learn(ctx, about, s.Process):
		e.spares.renew(snap.ID())
	}
	if err != nil {
		return nil, errors.Join(err, s.release())
	}
	return s, nil
}

// origin says where a fork's parts come from. The fork closes the files.
type origin struct {
	profile string
	based   bool           // its stacks are its parent's
	session []byte         // hello of the standby; if empty, the fork opens a session
	touch   vmmctl.Touched // pages that the fork will need at once
	watch   bool           // whether the fork will be asked which pages it has touched
	state   func() (*os.File, error)
	memory  func(context.Context, layer.Ref) (*os.File, error)
	disk    func(*disk, layer.Ref) (*os.File, error)
	// spare takes a waiting spare that fits the fork. It is nil if such forks never
	// have spares.
	spare func() (*process.Process, bool)
}

// originOf is the origin of a snapshot's forks.
func (e *Engine) originOf(snap *snapshot.Snapshot) origin {
	m := snap.Manifest()
	return origin{
		profile: m.CPU.Profile, based: true, session: m.Session,
		state: func() (*os.File, error) { return process.MemoryFile("state", snap.State()) },
		memory: func(ctx context.Context, ref layer.Ref) (*os.File, error) {
			return e.resident.Load(ctx, ref, func() (io.ReadCloser, error) { return snap.ReadLayer(ref) })
		},
		disk: func(_ *disk, ref layer.Ref) (*os.File, error) { return snap.OpenLayer(ref) },
	}
}

// restore starts a fork that was described before.
func (e *Engine) restore(ctx context.Context, s *sandbox, opts engine.ForkOptions, from origin) (*sandbox, error) {
	begin := time.Now()
	l, err := e.prepareLoad(s, opts, from)
	if err != nil {
		return nil, err
	}
	defer l.Close()
	p, err := e.load(ctx, s, opts, from, l)
	if err != nil {
		if l.standby != nil {
			err = errors.Join(err, l.standby.Close())
		}
		return nil, err
	}
	s.restored, s.filesOnly = time.Since(begin), p.Protocol() < vmmctl.SinceStream
	if l.standby != nil {
		s.Guest = &Guest{Process: p}
		s.Guest.Agent, err = guestrpc.Resume(l.standby, from.session)
	} else {
		s.Guest, err = dialAgent(ctx, p)
	}
	if err == nil {
		err = s.self.Renew(ctx, s.Agent(), opts.KeepIdentity)
	}
	if err == nil {
		err = s.self.Write(s.Pid(), folder.Record{Based: from.based, Protocol: p.Protocol()})
	}
	if err != nil {
		return nil, abandon(ctx, p, err)
	}
	return s, nil
}

// loading is the message that turns a spare into a machine.
type loading struct {
	process.Message
	load    *vmmctl.Load
	standby net.Conn // nil without one
}

// prepareLoad opens the files that a fork has for itself.
func (e *Engine) prepareLoad(s *sandbox, opts engine.ForkOptions, from origin) (_ *loading, err error) {
	l := &loading{load: &vmmctl.Load{Devices: e.devices(s)}}
	l.Message.Message = l.load
	defer func() {
		if err != nil {
			l.Close()
		}
	}()
	state, openErr := from.state()
	l.Add(&err, state, openErr)
	for i := range s.disks {
		d, sent := &s.disks[i], &l.load.Devices.Disks[i]
		sent.BytesPerSecond, sent.OpsPerSecond = opts.Limits.IO.BytesPerSecond, opts.Limits.IO.OpsPerSecond
		refs := d.stack.Layers
		if d.readOnly && len(refs) == 0 {
			refs = []layer.Ref{{}} // the files that a sandbox was booted from have no digest until a capture
		}
		for _, ref := range refs {
			f, openErr := from.disk(d, ref)
			l.Add(&err, f, openErr)
		}
		if !d.readOnly {
			f, openErr := e.top()
			l.Add(&err, f, openErr)
		}
	}
	if err == nil {
		var wire *os.File
		if wire, err = s.wire(); wire != nil {
			l.Add(&err, wire, nil)
		}
	}
	if s.self.Folder = folder.Folder(opts.Folder); err == nil && s.self.Folder != "" {
		if err = s.settleIn(); err == nil {
			l.load.Devices.Listen = true
			f, openErr := vmmctl.Listen(s.self.Folder.Control())
			l.Add(&err, f, openErr)
		}
	}
	if err == nil && len(from.session) > 0 {
		var theirs *os.File
		l.standby, theirs, err = process.StreamPair()
		l.load.Devices.Standby = true
		l.Add(&err, theirs, err)
	}
	return l, err
}

// devices describes the devices of a fork.
func (e *Engine) devices(s *sandbox) vmmctl.Devices {
	out := vmmctl.Devices{ReadyPort: guestrpc.AgentPort}
	var sizes []uint64
	for i := range s.disks {
		d := &s.disks[i]
		sent := vmmctl.Disk{ReadOnly: d.readOnly, ID: d.id}
		if !d.readOnly {
			sent.Stack = &d.stack
			sizes = append(sizes, d.stack.Size)
		}
		out.Disks = append(out.Disks, sent)
	}
	out.MaxFile = maxFile(s.memory.Size, sizes)
	if n := s.network; n != nil {
		out.Nets = []vmmctl.Net{{MAC: n.MAC, MTU: uint16(n.MTU)}}
	}
	return out
}

// load loads a fork into a waiting spare, or into a new one if no spare waits.
func (e *Engine) load(ctx context.Context, s *sandbox, opts engine.ForkOptions, from origin, l *loading) (*process.Process, error) {
	limits, err := e.limits(s, opts.Limits)
	if err != nil {
		return nil, err
	}
	for from.spare != nil {
		p, ok := from.spare()
		if !ok {
			break
		}
		err := p.Limit(limits) // the spare was made with other limits
		if err == nil {
			_, err = p.Request(context.Background(), l.with, l.Files...)
		}
		if err == nil {
			s.fromSpare = true
			return p, nil
		}
		p.Kill()
		if no := process.Refusal(""); errors.As(err, &no) { // other spares would refuse, too; the death of a waiting spare says nothing about others
			return nil, fmt.Errorf("start microVM: %w", err)
		}
	}
	first, err := e.prepareSpare(ctx, s, from)
	if err != nil {
		return nil, err
	}
	defer first.Close()
	p, made, err := process.Open(e.vmm, limits, first)
	if err != nil {
		return nil, err
	}
	// Both messages are sent before any reply, so that the vmm never waits.
	loaded, postErr := p.Post(l.with, l.Files...)
	if err = p.Made(made); err == nil {
		err = postErr
	}
	if err == nil {
		_, err = p.Await(context.Background(), loaded)
	}
	if err != nil {
		p.Kill()
		return nil, fmt.Errorf("start microVM: %w", err)
	}
	return p, nil
}

// with returns the message with an id.
func (l *loading) with(id uint64) vmmctl.Message {
	l.load.ID = id
	return l.load
}

// prepareSpare opens the files that all forks of an origin share.
func (e *Engine) prepareSpare(ctx context.Context, s *sandbox, from origin) (_ *process.Message, err error) {
	spare := &vmmctl.Spare{Memory: s.memory, Profile: from.profile, VCPUs: uint64(s.vcpus), Touch: from.touch, Watch: from.watch}
	m := &process.Message{Message: spare}
	for _, ref := range s.memory.Layers {
		f, openErr := from.memory(ctx, ref)
		m.Add(&err, f, openErr)
	}
	if err != nil {
		m.Close()
	}
	return m, err
}

// limits are the limits of a fork's process.
func (e *Engine) limits(s *sandbox, asked engine.Limits) (jail.Limits, error) {
	devices := e.devices(s)
	tops := make([]*os.File, len(devices.Disks))
	for i := range tops {
		tops[i] = e.scratch // the top files will be in this folder
	}
	return machineLimits(s.memory.Size, uint64(s.vcpus), &devices, tops, asked)
}

// describe describes the parts of a fork of a snapshot.
func (e *Engine) describe(snap *snapshot.Snapshot, hostname string) (*sandbox, error) {
	m := snap.Manifest()
	generation, err := engine.NextGeneration(m)
	if err != nil {
		return nil, err
	}
	network, err := engine.NetworkOf(m)
	if err != nil {
		return nil, err
	}
	if hostname == "" {
		hostname = identity.Hostname()
	}
	s := &sandbox{
		engine: e, kernel: m.Kernel, self: identity.Self{Hostname: hostname}, vcpus: m.VCPUs,
		parent: snap, network: network,
	}
	s.self.Generation.Store(generation)
	s.setMemory(m.Memory.Layer())
	for _, d := range m.Disks {
		s.disks = append(s.disks, disk{id: d.ID, readOnly: d.ReadOnly, stack: d.Stack.Layer()})
	}
	return s, nil
}
