package microvm

import (
	"context"
	"errors"
	"fmt"
	"os"
	"strconv"
	"time"

	"agentrun.dev/internal/engine"
	"agentrun.dev/internal/engine/identity"
	"agentrun.dev/internal/engine/microvm/process"
	"agentrun.dev/internal/guest/guestrpc"
	"agentrun.dev/internal/host/jail"
	"agentrun.dev/internal/storage/extent"
	"agentrun.dev/internal/storage/layer"
	"agentrun.dev/internal/storage/snapshot"
	"agentrun.dev/internal/vmm/vmmctl"
	"agentrun.dev/internal/vmm/vmstate"
)

// Snapshot captures the sandbox into a new folder. The sandbox runs on while the data
// is copied, hashed and stored.
func (s *sandbox) Snapshot(ctx context.Context, dir string, opts ...snapshot.Option) (_ *snapshot.Snapshot, err error) {
	if s.hasFiles {
		return nil, fmt.Errorf("snapshot: %w", engine.ErrFiles)
	}
	s.capture.Lock()
	defer s.capture.Unlock()
	snap, err := snapshot.Make(dir, func(b *snapshot.Builder) (*snapshot.Snapshot, error) { return s.build(ctx, b) }, opts...)
	if err != nil {
		return nil, fmt.Errorf("snapshot: %w", err)
	}
	return snap, nil
}

func (s *sandbox) build(ctx context.Context, b *snapshot.Builder) (*snapshot.Snapshot, error) {
	if err := b.Continues(s.parent); err != nil {
		return nil, err
	}
	if err := s.identifyBoot(); err != nil {
		return nil, err
	}
	s.openStandby(ctx, true)
	if (s.Paused() || b.Still()) && !s.filesOnly {
		return s.stream(ctx, b)
	}
	// The data of live layers is stored once more, since live layers have no digest.
	durable, save := s.durable()
	c, err := s.freeze(ctx, save)
	if err != nil {
		return nil, err
	}
	snap, err := durable.store(ctx, b, c)
	c.close()
	if errors.Is(err, errLie) {
		err = s.Condemn(err)
	}
	return snap, err
}

// durable returns a description of the sandbox without its live layers, and a Save
// that stores the data of those layers.
func (s *sandbox) durable() (*sandbox, *vmmctl.Save) {
	save := &vmmctl.Save{}
	d := &sandbox{
		engine: s.engine, kernel: s.kernel, self: identity.Self{Hostname: s.self.Hostname}, vcpus: s.vcpus,
		parent: s.parent, boot: s.boot, network: s.network,
	}
	d.self.Generation.Store(s.self.Generation.Load())
	d.memory, save.Memory = s.memory.Without(s.live.has)
	save.Memory = fewRuns(save.Memory, s.owed)
	for _, k := range s.disks {
		var runs []extent.Run
		k.stack, runs = k.stack.Without(s.live.has)
		if !k.readOnly {
			save.Disks = append(save.Disks, fewRuns(runs, k.owed))
		}
		d.disks = append(d.disks, k)
	}
	return d, save
}

// standbyPatience is how long a capture waits for the agent. A guest whose agent does
// not answer can still be captured.
const standbyPatience = 5 * time.Second

// openStandby opens a session with the agent that the forks will continue. A guest
// that stands still cannot open one, so its forks open their own. settle asks the
// agent to finish postponed work first; that is worth the time if many forks will
// follow.
func (s *sandbox) openStandby(ctx context.Context, settle bool) {
	if s.Paused() {
		return
	}
	ctx, cancel := context.WithTimeout(ctx, standbyPatience)
	defer cancel()
	if s.standby == nil {
		conn, err := s.DialStandby(ctx, guestrpc.AgentPort)
		if err != nil {
			return
		}
		if s.standby, err = guestrpc.OpenStandby(ctx, conn); err != nil {
			return
		}
	}
	if err := s.standby.Prepare(ctx, guestrpc.PrepareRequest{Settle: settle}); err != nil {
		_ = s.standby.Close() // the agent does not answer, or answers wrongly
		s.standby = nil
	}
}

// session returns the hellos of the standby, with which a fork continues it. It
// returns nothing if there is no standby; a fork then opens a session of its own.
func (s *sandbox) session(state *vmstate.State) []byte {
	switch {
	case s.standby == nil:
		return nil
	case state.Standby:
		return s.standby.Agreed()
	}
	_ = s.standby.Close() // the capture does not contain it: the next capture opens another
	s.standby = nil
	return nil
}

// captured is a sandbox as it was at one instant.
type captured struct {
	saved   *vmmctl.Saved
	state   *os.File
	machine *vmstate.State   // the decoded state
	encoded []byte           // the encoded state
	session []byte           // of the standby; empty without one
	memory  *process.Charged // a sealed memfd, each page at its offset in RAM
	held    uint64           // bytes of data in memory, without holes
	disks   []*os.File       // one per writable disk
	stored  *streamed        // set if memory and disks were stored as layers already; they are nil then
}

func (c *captured) close() {
	if c.memory != nil {
		_ = c.memory.Close() // its data was read, or the capture failed
	}
	for _, f := range append([]*os.File{c.state}, c.disks...) {
		if f != nil {
			_ = f.Close()
		}
	}
}

// freeze saves the sandbox at one instant.
func (s *sandbox) freeze(ctx context.Context, save *vmmctl.Save) (_ *captured, err error) {
	if err := s.refuseLent(); err != nil {
		return nil, err
	}
	c := &captured{}
	var tops []*os.File
	defer func() {
		for _, f := range tops {
			_ = f.Close() // the vmm has its own copies
		}
		if err != nil {
			c.close()
		}
	}()
	if c.state, err = process.MemoryFile("state", nil); err != nil {
		return nil, err
	}
	if c.memory, err = s.NewCharged(s.memory.Size); err != nil {
		return nil, err
	}
	pagemap, err := jail.OpenPagemap(s.Pid())
	if err != nil {
		return nil, errors.Join(err, s.Stopped())
	}
	defer func() { _ = pagemap.Close() }() // the vmm has its own copy
	files := []*os.File{pagemap, c.state, c.memory.File}
	for _, d := range s.disks {
		if d.readOnly {
			continue
		}
		for _, list := range []*[]*os.File{&c.disks, &tops} {
			f, err := s.lend()
			if err != nil {
				return nil, err
			}
			*list = append(*list, f)
			files = append(files, f)
		}
	}
	s.expectCapture()
	if save.Rebase {
		// A vmm that received a Save with Rebase carries it out, even if the caller
		// stops waiting.
		ctx = context.WithoutCancel(ctx)
	}
	reply, err := s.Request(ctx, func(id uint64) vmmctl.Message { save.ID = id; return save }, files...)
	if err != nil {
		return nil, err
	}
	err = c.verify(reply.Data, s.memory.Size, s.writable())
	if errors.Is(err, errLie) {
		return nil, s.Condemn(err)
	}
	if err == nil {
		err = c.memory.Holds(min(c.held, s.memory.Size))
	}
	if err != nil {
		if save.Rebase {
			s.owe(c.saved)
		}
		return nil, err
	}
	c.session = s.session(c.machine)
	return c, nil
}

// store makes a snapshot folder from a capture.
func (s *sandbox) store(ctx context.Context, b *snapshot.Builder, c *captured) (*snapshot.Snapshot, error) {
	st := &storing{Builder: b, sandbox: s, stored: map[layer.Digest]bool{}}
	memory, err := st.layMemory(ctx, c)
	if err != nil {
		return nil, err
	}
	cpu, err := s.engine.cpu.get()
	if err != nil {
		return nil, err
	}
	if string(c.machine.Profile) != cpu.Profile {
		return nil, fmt.Errorf("the machine has CPU profile %q, not %q", c.machine.Profile, cpu.Profile)
	}
	m := snapshot.Manifest{
		Created: time.Now().UTC().Truncate(time.Second), Kernel: s.kernel,
		CPU: cpu, TSCKHz: uint64(c.machine.TSCKHz), VCPUs: s.vcpus,
		Memory: snapshot.StackOf(memory), Nets: s.network.Nets(), Hostname: s.self.Hostname, Session: c.session,
		Labels: map[string]string{engine.GenerationLabel: strconv.FormatUint(s.self.Generation.Load(), 10)},
	}
	if s.parent != nil {
		m.Parent = s.parent.ID().String()
	}
	writable := 0
	for _, d := range s.disks {
		stack := d.stack
		if d.readOnly {
			err = st.keep(stack)
		} else {
			if c.stored != nil {
				stack, err = st.lay(ctx, stack, c.stored.disks[writable], nil, c.saved.Disks[writable])
			} else {
				stack, err = st.layDisk(ctx, stack, c.disks[writable], c.saved.Disks[writable])
			}
			writable++
		}
		if err != nil {
			return nil, err
		}
		m.Disks = append(m.Disks, snapshot.Disk{ID: d.id, ReadOnly: d.readOnly, Stack: snapshot.StackOf(stack)})
	}
	return st.Commit(m, c.encoded)
}

// storing is a snapshot in the making.
type storing struct {
	*snapshot.Builder
	sandbox *sandbox
	stored  map[layer.Digest]bool
}

// layMemory stores the captured memory. The first fork loads it from there: memory
// that no sandbox uses would be charged to nobody.
func (st *storing) layMemory(ctx context.Context, c *captured) (layer.Stack, error) {
	below := st.sandbox.memory
	if c.stored != nil {
		return st.lay(ctx, below, c.stored.memory, nil, c.saved.Memory)
	}
	runs := c.saved.Memory.Runs
	if len(runs) == 0 {
		return st.lay(ctx, below, layer.Ref{}, nil, c.saved.Memory)
	}
	if err := layer.CheckChange(runs, c.saved.Memory.Zeros, below.Size); err != nil {
		return below, err
	}
	ref, err := st.StreamLayer(ctx, runsOf(c.memory, runs), below.Size)
	if err != nil {
		return below, err
	}
	return st.lay(ctx, below, ref, nil, c.saved.Memory)
}

// layDisk stores the captured changes of a disk.
func (st *storing) layDisk(ctx context.Context, below layer.Stack, f *os.File, c vmmctl.Change) (layer.Stack, error) {
	var ref layer.Ref
	if len(c.Runs) > 0 {
		var err error
		if ref, err = fileRefOf(f, extent.Total(c.Runs)); err != nil {
			return below, err
		}
		// The vmm may change the file meanwhile, so the stored copy is hashed as
		// well.
		if err = st.add(ref, f); errors.Is(err, layer.ErrDamaged) {
			err = fmt.Errorf("%w: %w", errLie, err)
		}
		if err != nil {
			return below, err
		}
	}
	return st.lay(ctx, below, ref, f, c)
}

// lay stores a layer if the capture changed anything, and puts it over the stack
// below.
func (st *storing) lay(ctx context.Context, below layer.Stack, ref layer.Ref, f *os.File, c vmmctl.Change) (stack layer.Stack, err error) {
	if len(c.Runs) > 0 {
		if err := st.add(ref, f); err != nil {
			return stack, err
		}
	}
	stack, err = layer.Overlay(below, ref, c.Runs, c.Zeros)
	if errors.Is(err, layer.ErrNeedsCompaction) {
		if below, err = st.compact(ctx, below); err != nil {
			return stack, err
		}
		stack, err = layer.Overlay(below, ref, c.Runs, c.Zeros)
	}
	if err != nil {
		return stack, err
	}
	return stack, st.keep(stack)
}

// compact rewrites a stack with too many layers as one layer.
func (st *storing) compact(ctx context.Context, stack layer.Stack) (layer.Stack, error) {
	newFile := st.sandbox.engine.top
	if st.Private() { // secrets are never on a disk unencrypted
		newFile = st.sandbox.engine.resident.Create
	}
	f, err := newFile()
	if err != nil {
		return stack, err
	}
	defer func() { _ = f.Close() }() // the snapshot has a copy
	out, err := layer.Compact(ctx, stack, st.sandbox.parent.OpenLayer, f)
	if err != nil {
		return stack, err
	}
	for _, ref := range out.Layers {
		if err := st.add(ref, f); err != nil {
			return stack, err
		}
	}
	return out, nil
}

func (st *storing) add(ref layer.Ref, f *os.File) error {
	st.stored[ref.Digest] = true
	return st.AddLayer(ref, f)
}

// keep stores the layers that a stack still lacks: it links layers of the parent, and
// copies the files that the sandbox was booted from.
func (st *storing) keep(stack layer.Stack) error {
	for _, ref := range stack.Layers {
		if st.stored[ref.Digest] {
			continue
		}
		st.stored[ref.Digest] = true
		var err error
		if st.sandbox.parent != nil {
			err = st.LinkLayer(ref, st.sandbox.parent)
		} else {
			err = st.AddLayer(ref, st.sandbox.boot.layer(ref))
		}
		if err != nil {
			return err
		}
	}
	return nil
}
