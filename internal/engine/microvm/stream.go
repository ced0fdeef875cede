package microvm

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"

	"agentrun.dev/internal/engine"
	"agentrun.dev/internal/engine/microvm/process"
	"agentrun.dev/internal/host/jail"
	"agentrun.dev/internal/storage/extent"
	"agentrun.dev/internal/storage/layer"
	"agentrun.dev/internal/storage/snapshot"
	"agentrun.dev/internal/vmm/vmmctl"
)

// streamed holds the layers that a vmm has written through pipes into the snapshot in
// the making. An empty layer has the zero Ref.
type streamed struct {
	memory layer.Ref
	disks  []layer.Ref // one per writable disk
}

// stream stores a sandbox that stands still. Its vmm writes memory and disks into
// pipes. On the way to the disk the data is hashed, and sealed if the snapshot is
// private. No copy of the memory exists anywhere. If stream fails, the sandbox is
// unchanged.
func (s *sandbox) stream(ctx context.Context, b *snapshot.Builder) (*snapshot.Snapshot, error) {
	for _, all := range []bool{false, true} {
		durable, save := s.durable()
		durable.storeCrowded(save, all)
		c, err := s.drain(ctx, b, durable, save)
		if err != nil {
			return nil, err
		}
		// Compacting many layers would take memory. Instead the vmm writes all of
		// them.
		if err := durable.fits(c); all || !errors.Is(err, layer.ErrNeedsCompaction) {
			snap, storeErr := durable.store(ctx, b, c)
			c.close()
			return snap, storeErr
		}
		c.close()
	}
	panic("unreachable: the second round returns")
}

// storeCrowded makes save store a stack in full if the stack has no room for another
// layer. With all set, every stack is stored in full.
func (s *sandbox) storeCrowded(save *vmmctl.Save, all bool) {
	whole := func(stack *layer.Stack, runs *[]extent.Run) {
		if all || len(stack.Layers) >= layer.MaxLayers {
			*runs = []extent.Run{{Length: stack.Size}}
			*stack = layer.Stack{Size: stack.Size}
		}
	}
	whole(&s.memory, &save.Memory)
	writable := 0
	for i := range s.disks {
		if k := &s.disks[i]; !k.readOnly {
			whole(&k.stack, &save.Disks[writable])
			writable++
		}
	}
}

// fits checks that the written layers can be laid over the stacks.
func (s *sandbox) fits(c *captured) error {
	_, err := layer.Overlay(s.memory, c.stored.memory, c.saved.Memory.Runs, c.saved.Memory.Zeros)
	writable := 0
	for _, k := range s.disks {
		if k.readOnly {
			continue
		}
		change := c.saved.Disks[writable]
		_, diskErr := layer.Overlay(k.stack, c.stored.disks[writable], change.Runs, change.Zeros)
		err = errors.Join(err, diskErr)
		writable++
	}
	return err
}

// drain lets the vmm write the sandbox into pipes, and makes layers from the data.
func (s *sandbox) drain(ctx context.Context, b *snapshot.Builder, durable *sandbox, save *vmmctl.Save) (_ *captured, err error) {
	if err := s.refuseLent(); err != nil {
		return nil, err
	}
	c := &captured{stored: &streamed{}}
	defer func() {
		if err != nil {
			c.close()
		}
	}()
	if c.state, err = process.MemoryFile("state", nil); err != nil {
		return nil, err
	}
	pagemap, err := jail.OpenPagemap(s.Pid())
	if err != nil {
		return nil, errors.Join(err, s.Stopped())
	}
	p := pipes{given: []*os.File{pagemap}}
	defer p.close()
	files := []*os.File{pagemap, c.state}
	sizes := []uint64{durable.memory.Size}
	for _, d := range durable.disks {
		if !d.readOnly {
			sizes = append(sizes, d.stack.Size)
		}
	}
	for i := range sizes {
		f, err := p.add(ctx)
		if err != nil {
			return nil, err
		}
		files = append(files, f)
		if i > 0 {
			top, err := s.lend()
			if err != nil {
				return nil, err
			}
			p.given = append(p.given, top)
			files = append(files, top)
		}
	}
	save.Stream = true
	s.expectCapture()
	reply, err := s.Post(func(id uint64) vmmctl.Message { save.ID = id; return save }, files...)
	p.passed()
	if err != nil {
		return nil, err
	}
	answer := make(chan *vmmctl.Reply, 1)
	go func() {
		select {
		case r := <-reply:
			for _, st := range p.streams {
				st.Answered()
			}
			answer <- r
		case <-s.Done(): // the process has ended, and its pipes are closed
		}
	}()
	refs := make([]layer.Ref, len(sizes))
	for i, size := range sizes {
		// A run is within its stack, and no run is written twice, so size bounds the
		// layer.
		if refs[i], err = b.StreamLayer(ctx, p.streams[i], size); err != nil {
			p.close() // the vmm's writes fail now, so it does not wait
			break
		}
	}
	c.stored.memory, c.stored.disks = refs[0], refs[1:]
	r, replyErr := s.Await(ctx, answer)
	if errors.Is(err, snapshot.ErrNoLayer) || errors.Is(err, engine.ErrUnfinished) {
		err = fmt.Errorf("%w: %w", errLie, err)
	}
	if err = errors.Join(replyErr, err); err == nil {
		err = c.verifyStreamed(r.Data, sizes[0], sizes[1:])
	}
	if errors.Is(err, errLie) {
		err = s.Condemn(err)
	}
	if err != nil {
		return nil, err
	}
	c.session = s.session(c.machine)
	return c, nil
}

// verifyStreamed checks the vmm's description of the layers that it wrote through its
// pipes. The error is errLie if the vmm is to blame.
func (c *captured) verifyStreamed(answer []byte, memory uint64, disks []uint64) error {
	if err := c.decode(answer, memory, disks); err != nil {
		return err
	}
	refs := append([]layer.Ref{c.stored.memory}, c.stored.disks...)
	for i, change := range append([]vmmctl.Change{c.saved.Memory}, c.saved.Disks...) {
		if told := extent.Total(change.Runs); told != refs[i].Size {
			return fmt.Errorf("%w: it speaks of %d bytes, and has written %d", errLie, told, refs[i].Size)
		}
	}
	return c.readState()
}

// pipes are the pipes that a vmm writes to, and the other files that it is given.
type pipes struct {
	streams []*engine.Stream
	stops   []func() bool
	given   []*os.File
}

// add makes a pipe, and returns the vmm's end.
func (p *pipes) add(ctx context.Context) (*os.File, error) {
	st, err := engine.NewStream()
	if err != nil {
		return nil, err
	}
	p.streams, p.stops = append(p.streams, st), append(p.stops, st.Until(ctx))
	return st.Theirs(), nil
}

// passed closes our copies of the files that the vmm has.
func (p *pipes) passed() {
	for _, st := range p.streams {
		_ = st.Passed() // nothing was written to it
	}
	for _, f := range p.given {
		_ = f.Close() // nothing was written to it
	}
	p.given = nil
}

// close closes all pipes and files. It may be called twice.
func (p *pipes) close() {
	p.passed()
	for i, st := range p.streams {
		p.stops[i]()
		st.Close()
	}
}

// runsOf reads the runs of a file one after the other. Each run is at its own offset
// in the file.
func runsOf(f io.ReaderAt, runs []extent.Run) io.Reader {
	parts := make([]io.Reader, len(runs))
	for i, r := range runs {
		parts[i] = io.NewSectionReader(f, int64(r.Start), int64(r.Length))
	}
	return io.MultiReader(parts...)
}
