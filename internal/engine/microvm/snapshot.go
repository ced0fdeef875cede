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

// Snapshot captures the sandbox into a new folder. Copying, hashing and storing
// goes on beside it.
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
	// What live layers hold is stored once more: they have no digest.
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

// durable describes the sandbox without its live layers, and a Save that
// stores what they hold.
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

// standbyPatience is how long a capture waits for a guest whose agent does not
// answer, though it may well be captured.
const standbyPatience = 5 * time.Second

// openStandby has a session with the agent ready for the forks to go on with.
// A guest that stands still has no agent to open one with: its forks will.
// settle is worth its time for a capture that many are forked from.
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
		_ = s.standby.Close() // its guest does not answer, or not as it should
		s.standby = nil
	}
}

// session is what a fork of the captured sandbox needs to go on with the
// standby, or nothing: then it opens a session of its own.
func (s *sandbox) session(state *vmstate.State) []byte {
	switch {
	case s.standby == nil:
		return nil
	case state.Standby:
		return s.standby.Agreed()
	}
	_ = s.standby.Close() // it is of no use: the next capture opens another
	s.standby = nil
	return nil
}

// captured is a sandbox as it was at one instant.
type captured struct {
	saved   *vmmctl.Saved
	state   *os.File
	machine *vmstate.State   // what is in it
	encoded []byte           // likewise
	session []byte           // of the standby; empty without one
	memory  *process.Charged // a sealed memfd, each page at its offset in RAM
	held    uint64           // bytes that are there of the memory
	disks   []*os.File       // one per writable disk
	stored  *streamed        // set if memory and disks are layers already; they are nil then
}

func (c *captured) close() {
	if c.memory != nil {
		_ = c.memory.Close() // read or abandoned
	}
	for _, f := range append([]*os.File{c.state}, c.disks...) {
		if f != nil {
			_ = f.Close()
		}
	}
}

// freeze saves the sandbox as it is at one instant.
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
		// A vmm that was asked to rebase does so, whether anybody waits or not.
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

// store makes a snapshot folder of what was captured.
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

// layMemory stores the captured memory. It is loaded from there by the first
// fork: what is in memory and no sandbox uses nobody would be charged for.
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

// layDisk stores what was captured of a disk.
func (st *storing) layDisk(ctx context.Context, below layer.Stack, f *os.File, c vmmctl.Change) (layer.Stack, error) {
	var ref layer.Ref
	if len(c.Runs) > 0 {
		var err error
		if ref, err = fileRefOf(f, extent.Total(c.Runs)); err != nil {
			return below, err
		}
		// The vmm may change the file meanwhile: what is stored is hashed as well.
		if err = st.add(ref, f); errors.Is(err, layer.ErrDamaged) {
			err = fmt.Errorf("%w: %w", errLie, err)
		}
		if err != nil {
			return below, err
		}
	}
	return st.lay(ctx, below, ref, f, c)
}

// lay stores a layer, if anything was captured, and puts it over the stack
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

// compact makes one layer of a stack that has too many.
func (st *storing) compact(ctx context.Context, stack layer.Stack) (layer.Stack, error) {
	newFile := st.sandbox.engine.top
	if st.Private() { // what holds secrets is on no disk in the clear
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

// keep stores what a stack still lacks: layers of the parent, which are
// linked, or what a sandbox was booted from.
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
