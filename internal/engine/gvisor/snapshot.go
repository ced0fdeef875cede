package gvisor

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"strconv"
	"time"

	"agentrun.dev/internal/codec"
	"agentrun.dev/internal/engine"
	"agentrun.dev/internal/engine/gvisorctl"
	"agentrun.dev/internal/engine/trust"
	"agentrun.dev/internal/guest/guestrpc"
	"agentrun.dev/internal/storage/layer"
	"agentrun.dev/internal/storage/snapshot"
	"golang.org/x/sys/unix"
)

// checkpoint holds the open files of a checkpoint.
type checkpoint struct {
	state, meta, pages *os.File
}

func (c checkpoint) list() []*os.File { return []*os.File{c.state, c.meta, c.pages} }

func (c checkpoint) close() {
	for _, f := range c.list() {
		if f != nil {
			_ = f.Close() // only read
		}
	}
}

// copy opens the same files again, for the caller to close. Of an empty checkpoint it
// returns an empty one.
func (c checkpoint) copy() (o checkpoint, err error) {
	if c.state == nil {
		return o, nil
	}
	for i, f := range []**os.File{&o.state, &o.meta, &o.pages} {
		if *f, err = reopen(c.list()[i]); err != nil {
			o.close()
			return checkpoint{}, err
		}
	}
	return o, nil
}

// size is how many bytes the files hold.
func (c checkpoint) size() (bytes uint64) {
	for _, f := range c.list() {
		if info, err := f.Stat(); err == nil {
			bytes += uint64(info.Size())
		}
	}
	return bytes
}

// take writes the sandbox at one instant to files without a name. The sandbox stands
// still until they are written.
func (s *sandbox) take(ctx context.Context) (_ checkpoint, pause time.Duration, err error) {
	if s.root == nil {
		<-s.done
		return checkpoint{}, 0, s.ended()
	}
	s.prepare(ctx)
	files, err := newCheckpoint()
	if err != nil {
		return checkpoint{}, 0, err
	}
	defer files.close()
	w, err := s.writeCheckpoint(ctx, files)
	if err != nil {
		return checkpoint{}, 0, err
	}
	defer func() { err = errors.Join(err, w.back()) }()
	if w.Took < 0 || w.Took > trust.Longest {
		err = fmt.Errorf("%w: a checkpoint took it %v", errLie, w.Took)
	}
	var c checkpoint
	if err == nil {
		c, err = files.seal(s.most())
	}
	if errors.Is(err, errLie) {
		err = s.condemn(err)
	}
	if err != nil {
		return checkpoint{}, 0, err
	}
	// From here on the limit is raised by the size of the files. Forks read them for
	// a while after the capture has closed them.
	if err := s.group.Charge(c.list()...); err != nil {
		c.close()
		return checkpoint{}, 0, err
	}
	return c, w.Took, nil
}

// written is a checkpoint in its files. The sandbox's limit is raised for it until
// back is called.
type written struct {
	*gvisorctl.Message
	back func() error
}

// writeCheckpoint lets the sandbox write its checkpoint to files in memory. These are
// charged to the sandbox's cgroup, and hold at most as many bytes as the cgroup may
// use.
func (s *sandbox) writeCheckpoint(ctx context.Context, files checkpoint) (w written, err error) {
	if w.back, err = s.group.Extend(s.most()); err != nil {
		return w, err
	}
	reply, err := s.post(&gvisorctl.Message{Op: gvisorctl.OpCheckpoint}, files.list()...)
	if err == nil {
		w.Message, err = s.await(ctx, reply)
	}
	switch {
	case err == nil:
		return w, nil
	case reply != nil && ctx.Err() != nil && errors.Is(err, ctx.Err()):
		// The sandbox goes on writing. At its original limit it would be killed.
		go func() {
			_, _ = s.await(context.WithoutCancel(ctx), reply) // nobody waits for the reply any more
			_ = w.back()                                      // the next change of the limit reports the error
		}()
		return w, err
	}
	return w, errors.Join(err, w.back())
}

// preparePatience is how long a capture waits for the agent. A sandbox whose agent
// does not answer can still be captured.
const preparePatience = 5 * time.Second

// prepare lets the agent rehearse a renewal, which makes the renewals of the forks
// quick: the files that a renewal changes are then open.
func (s *sandbox) prepare(ctx context.Context) {
	if s.paused.Load() {
		return
	}
	ctx, cancel := context.WithTimeout(ctx, preparePatience)
	defer cancel()
	conn, err := s.Dial(ctx, guestrpc.AgentPort)
	if err != nil {
		return
	}
	standby, err := guestrpc.OpenStandby(ctx, conn)
	if err != nil {
		return
	}
	_ = standby.Prepare(ctx, guestrpc.PrepareRequest{}) // forks work without it
	_ = standby.Close()                                 // nothing more is sent on it
}

// Snapshot captures the sandbox into a new folder.
func (s *sandbox) Snapshot(ctx context.Context, dir string, opts ...snapshot.Option) (*snapshot.Snapshot, error) {
	s.capture.Lock()
	defer s.capture.Unlock()
	// Once the snapshot is complete, it records that it needs the program. The
	// sandbox may have ended by then.
	defer s.useProgram().Release()
	snap, err := snapshot.Make(dir, func(b *snapshot.Builder) (*snapshot.Snapshot, error) { return s.commit(ctx, b) }, opts...)
	if err != nil {
		return nil, fmt.Errorf("snapshot: %w", err)
	}
	return snap, nil
}

func (s *sandbox) commit(ctx context.Context, b *snapshot.Builder) (*snapshot.Snapshot, error) {
	if err := b.Continues(s.parent); err != nil {
		return nil, err
	}
	cpu, err := s.engine.features()
	if err != nil {
		return nil, err
	}
	state, pages, err := s.write(ctx, b)
	if err != nil {
		return nil, err
	}
	root, err := s.storeRoot(b)
	if err != nil {
		return nil, err
	}
	m := snapshot.Manifest{
		Engine: Name, Created: time.Now().UTC().Truncate(time.Second),
		CPU: cpu.cpu, VCPUs: s.vcpus, Memory: snapshot.Stack{Size: s.memory}, Hostname: s.self.Hostname,
		Disks:  []snapshot.Disk{{ID: "root", ReadOnly: true, Stack: snapshot.StackOf(wholeFile(root))}},
		Nets:   s.network.Nets(),
		Labels: map[string]string{engine.GenerationLabel: strconv.FormatUint(s.self.Generation.Load(), 10)},
		GVisor: &snapshot.GVisor{Helper: s.build.String(), Platform: platform, CPUFeatures: cpu.features, Disk: s.disk, Pages: snapshot.Blob(pages)},
	}
	if s.parent != nil {
		m.Parent = s.parent.ID().String()
	}
	return b.Commit(m, state)
}

// write captures the sandbox, and makes a layer from its pages. A sandbox that stands
// still is written to the disk at once. A running sandbox is stopped as briefly as
// possible: until its checkpoint is in memory.
func (s *sandbox) write(ctx context.Context, b *snapshot.Builder) (state []byte, pages layer.Ref, err error) {
	if (s.paused.Load() || b.Still()) && s.protocol >= gvisorctl.SinceStream {
		return s.stream(ctx, b)
	}
	c, _, err := s.take(ctx)
	if err != nil {
		return nil, pages, err
	}
	defer c.close()
	if state, err = encodeState(c); err == nil {
		pages, err = b.StreamLayer(ctx, c.pages, s.shape().limits(engine.Limits{}).Memory)
	}
	return state, pages, err
}

// storeRoot stores the root filesystem as a layer. The layer is a link to that of the
// snapshot that the sandbox was forked from, or a copy of the image.
func (s *sandbox) storeRoot(b *snapshot.Builder) (layer.Ref, error) {
	s.root.mu.Lock()
	defer s.root.mu.Unlock()
	if s.root.ref == (layer.Ref{}) {
		w := layer.NewWriter(io.Discard)
		if _, err := io.Copy(w, io.NewSectionReader(s.root.file, 0, 1<<62)); err != nil {
			return layer.Ref{}, fmt.Errorf("hash the root filesystem: %w", err)
		}
		s.root.ref = w.Ref()
	}
	ref := s.root.ref
	if ref.Size == 0 || ref.Size%layer.PageSize != 0 {
		return ref, fmt.Errorf("the root filesystem has %d bytes, which is not a multiple of %d: build it with agentrun or pad it", ref.Size, layer.PageSize)
	}
	if s.parent != nil {
		return ref, b.LinkLayer(ref, s.parent)
	}
	return ref, b.AddLayer(ref, s.root.file)
}

func wholeFile(ref layer.Ref) layer.Stack {
	return layer.Stack{Size: ref.Size, Layers: []layer.Ref{ref}, Extents: []layer.Extent{{Length: ref.Size}}}
}

// stateVersion is the version of the encoding that holds the two small files in a
// snapshot's state.
const stateVersion = 1

// encodeState packs the small files of a checkpoint.
func encodeState(c checkpoint) ([]byte, error) {
	var parts [2][]byte
	for i, f := range []*os.File{c.state, c.meta} {
		var err error
		if parts[i], err = io.ReadAll(io.LimitReader(f, snapshot.MaxState+1)); err != nil {
			return nil, fmt.Errorf("read checkpoint: %w", err)
		}
	}
	return encodeParts(parts[:]...)
}

// encodeParts packs the contents of the small files.
func encodeParts(parts ...[]byte) ([]byte, error) {
	e := codec.NewEncoder(nil)
	e.Version(stateVersion)
	for _, p := range parts {
		e.Data(p)
	}
	if e.Len() > snapshot.MaxState {
		return nil, errTooLarge(e.Len())
	}
	return e.Bytes(), nil
}

func errTooLarge(size int) error {
	return fmt.Errorf("the state of gVisor's kernel has %d bytes, more than %d: fewer processes and open files make it smaller", size, snapshot.MaxState)
}

// checkpointOf opens a snapshot's checkpoint. The pages are in memory. The first call
// copies them there and verifies them.
func (e *Engine) checkpointOf(ctx context.Context, snap *snapshot.Snapshot) (c checkpoint, err error) {
	d := codec.NewDecoder(snap.State())
	d.Version(stateVersion)
	state, meta := d.View(snapshot.MaxState), d.View(snapshot.MaxState)
	if err := d.Finish(); err != nil {
		return c, fmt.Errorf("state: %w", err)
	}
	if c.state, err = memoryFile("checkpoint", state); err != nil {
		return c, err
	}
	if c.meta, err = memoryFile("pages_meta", meta); err == nil {
		ref := layer.Ref(snap.Manifest().GVisor.Pages)
		c.pages, err = e.resident.Load(ctx, ref, func() (io.ReadCloser, error) { return snap.ReadLayer(ref) })
	}
	if err != nil {
		c.close()
		return checkpoint{}, err
	}
	return c, nil
}

// memoryFile makes a file in memory with this content.
func memoryFile(name string, content []byte) (*os.File, error) {
	fd, err := unix.MemfdCreate(name, unix.MFD_CLOEXEC)
	if err != nil {
		return nil, fmt.Errorf("make memfd: %w", err)
	}
	f := os.NewFile(uintptr(fd), name)
	if _, err := f.WriteAt(content, 0); err != nil {
		return nil, errors.Join(fmt.Errorf("fill memfd: %w", err), f.Close())
	}
	return f, nil
}
