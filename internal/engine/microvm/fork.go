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

// fork makes a fork, which is rehearsed unless rehearse is nil.
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
	if !from.watch { // what waits is not watched
		from.spare = func() (*process.Process, bool) { return e.spares.take(snap.ID()) }
	}
	defer e.spares.refill(snap.ID()) // not before: to make the next one would slow this one down
	if _, err = e.restore(ctx, s, opts, from); err == nil && rehearse != nil {
		err = rehearse(ctx, s)
	}
	switch {
	case !learn:
	case err != nil:
		e.touched.forget(about)
	// Now, before anybody uses it: what it does later is not what all do.
	case e.touched.learn(ctx, about, s.Process):
		e.spares.renew(snap.ID())
	}
	if err != nil {
		return nil, errors.Join(err, s.release())
	}
	return s, nil
}

// origin is where a fork's parts come from. The files are the fork's to close.
type origin struct {
	profile string
	based   bool           // its stacks are those of its parent
	session []byte         // of the standby; empty: the fork opens one
	touch   vmmctl.Touched // what the fork will need at once
	watch   bool           // the fork will be asked for what it has touched
	state   func() (*os.File, error)
	memory  func(context.Context, layer.Ref) (*os.File, error)
	disk    func(*disk, layer.Ref) (*os.File, error)
	// spare takes one that waits for a fork like this; nil where there never is
	// any.
	spare func() (*process.Process, bool)
}

// originOf is that of a snapshot's forks.
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

// restore starts a fork that was described.
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

// loading is what makes a machine of a spare.
type loading struct {
	process.Message
	load    *vmmctl.Load
	standby net.Conn // nil without one
}

// prepareLoad opens what a fork has for itself.
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
			refs = []layer.Ref{{}} // what a sandbox was booted from has no digest until it is captured
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

// devices describes those of a fork.
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

// load puts a fork into a spare that waits, or into one of its own.
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
		err := p.Limit(limits) // it was made with others
		if err == nil {
			_, err = p.Request(context.Background(), l.with, l.Files...)
		}
		if err == nil {
			s.fromSpare = true
			return p, nil
		}
		p.Kill()
		if no := process.Refusal(""); errors.As(err, &no) { // others would, too; one that has died while it waited says nothing
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
	// Both messages go at once.
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

// with is the message under an id.
func (l *loading) with(id uint64) vmmctl.Message {
	l.load.ID = id
	return l.load
}

// prepareSpare opens what all forks of an origin share.
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

// limits is what a fork's process may take.
func (e *Engine) limits(s *sandbox, asked engine.Limits) (jail.Limits, error) {
	devices := e.devices(s)
	tops := make([]*os.File, len(devices.Disks))
	for i := range tops {
		tops[i] = e.scratch // where they will be
	}
	return machineLimits(s.memory.Size, uint64(s.vcpus), &devices, tops, asked)
}

// describe says what a fork of a snapshot is made of.
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
