package microvm

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"io"
	"maps"
	"os"
	"runtime"
	"slices"
	"sync"
	"time"

	"agentrun.dev/internal/engine"
	"agentrun.dev/internal/engine/folder"
	"agentrun.dev/internal/engine/identity"
	"agentrun.dev/internal/storage/extent"
	"agentrun.dev/internal/storage/layer"
	"agentrun.dev/internal/vmm/vmmctl"
)

// liveLayer is a layer of a live fork. No snapshot contains it, and its name is
// random instead of a digest. It lives as long as a sandbox uses it.
type liveLayer struct {
	file  *os.File
	holds uint64 // bytes of data in the layer
	close func() error

	mu    sync.Mutex // protects users
	users int
}

func (l *liveLayer) use() {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.users++
}

func (l *liveLayer) release() error { return l.drop(l.close) }

// drop ends one use. After the last use it calls last.
func (l *liveLayer) drop(last func() error) error {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.users--; l.users > 0 {
		return nil
	}
	return last()
}

// liveLayers are the live layers that one sandbox uses.
type liveLayers map[layer.Digest]*liveLayer

func (l liveLayers) has(r layer.Ref) bool { return l[r.Digest] != nil }

func (l liveLayers) release() error {
	var errs []error
	for _, x := range l {
		errs = append(errs, x.release())
	}
	return errors.Join(errs...)
}

// leave ends the uses like release, for a sandbox that runs on and still maps the
// layers. Their pages stay in memory, and stay charged where they are.
func (l liveLayers) leave() error {
	var errs []error
	for _, x := range l {
		errs = append(errs, x.drop(x.file.Close))
	}
	return errors.Join(errs...)
}

// add registers a new layer with one user, and gives it a name.
func (l liveLayers) add(file *os.File, size uint64, runs []extent.Run, closeIt func() error) layer.Ref {
	r := layer.Ref{Size: size}
	_, _ = rand.Read(r.Digest[:]) // it never fails: crypto/rand ends the process instead
	l[r.Digest] = &liveLayer{file: file, close: closeIt, users: 1, holds: extent.Total(runs)}
	return r
}

// held lists the live layers of a memory. The layers of disks are on disk.
func (l liveLayers) held(memory layer.Stack) (list []engine.Held) {
	for _, r := range memory.Layers {
		if x := l[r.Digest]; x != nil {
			list = append(list, engine.Held{ID: "live-" + r.Digest.String(), Bytes: x.holds})
		}
	}
	return list
}

// leastUse is the inverse of the share of a layer that a stack must show. A layer of
// which a stack shows less is not worth its memory.
const leastUse = 4

// wasteful selects the live layers of which a stack shows little. All pages of such a
// layer stay in memory as long as any of them is used. Storing the few visible pages
// again frees them.
func (l liveLayers) wasteful(stack layer.Stack) func(layer.Ref) bool {
	shown := map[layer.Digest]uint64{}
	for _, e := range stack.Extents {
		shown[stack.Layers[e.Layer].Digest] += e.Length
	}
	return func(r layer.Ref) bool {
		x := l[r.Digest]
		return x != nil && leastUse*shown[r.Digest] < x.holds
	}
}

// usedBy lists the live layers that the stacks use, with one more use each.
func (l liveLayers) usedBy(stacks ...layer.Stack) liveLayers {
	out := liveLayers{}
	for _, stack := range stacks {
		for _, r := range stack.Layers {
			if x := l[r.Digest]; x != nil && out[r.Digest] == nil {
				x.use()
				out[r.Digest] = x
			}
		}
	}
	return out
}

// Fork makes sandboxes that continue from this one.
func (s *sandbox) Fork(ctx context.Context, opts []engine.ForkOptions) (*engine.LiveFork, error) {
	f, err := s.liveFork(ctx, opts)
	if err != nil {
		return f, fmt.Errorf("fork a running sandbox: %w", err)
	}
	return f, nil
}

func (s *sandbox) liveFork(ctx context.Context, opts []engine.ForkOptions) (*engine.LiveFork, error) {
	if s.hasFiles {
		return nil, engine.ErrFiles
	}
	begin := time.Now()
	m, saved, err := s.captureLive(ctx)
	if err != nil {
		return nil, err
	}
	defer func() { _ = m.release() }() // the children have their own shares
	if err := ctx.Err(); err != nil {
		return &engine.LiveFork{Source: m.live.held(m.memory)}, err
	}
	out := &engine.LiveFork{Forks: make([]engine.Sandbox, len(opts)), Errs: make([]error, len(opts))}
	out.Stats = saved.Stats
	out.Stats.Captured = time.Since(begin)
	out.Held = m.live.held(m.memory)
	out.Source = out.Held // the source shares the layers with the children
	s.mu.Lock()
	s.lastFork = out.Stats
	s.mu.Unlock()

	var wg sync.WaitGroup
	turn := make(chan struct{}, runtime.NumCPU())
	for i := range opts {
		wg.Go(func() {
			turn <- struct{}{}
			defer func() { <-turn }()
			child, err := m.child(ctx, opts[i])
			if err != nil {
				out.Errs[i] = err
				return
			}
			out.Forks[i] = child
		})
	}
	wg.Wait()
	return out, nil
}

// moment is a running sandbox as it was at one instant. Children are made from it.
type moment struct {
	sandbox // never runs; its stacks and live layers are those of the instant
	state   *os.File
	profile string
	session []byte
}

func (m *moment) release() error { return errors.Join(m.sandbox.release(), m.state.Close()) }

// captureLive captures the sandbox. From then on the sandbox shares the captured
// layers with its children.
func (s *sandbox) captureLive(ctx context.Context) (*moment, *vmmctl.Saved, error) {
	s.capture.Lock()
	defer s.capture.Unlock()
	if s.boot == nil && s.parent == nil {
		return nil, nil, engine.ErrEnded
	}
	s.openStandby(ctx, false)
	for effort := s.leastEffort(); ; effort++ {
		save := s.include(effort)
		save.Rebase = true
		if err := s.self.Folder.Change(func(r *folder.Record) { r.Based = false }); err != nil {
			return nil, nil, err
		}
		c, err := s.freeze(ctx, save)
		if err != nil {
			return nil, nil, err
		}
		m, err := s.lay(c)
		c.close()
		if err == nil {
			return m, c.saved, nil
		}
		if m != nil { // old layers could not be released
			err = errors.Join(err, m.release())
		}
		if errors.Is(err, errLie) {
			return nil, nil, s.Condemn(err)
		}
		s.owe(c.saved)
		if !errors.Is(err, layer.ErrNeedsCompaction) || effort == storeAll {
			return nil, nil, err
		}
	}
}

// Efforts: how much a capture stores again, beyond the changes, to keep stacks small.
const (
	storeChanged = iota // only the changes
	storeLive           // also the data of live layers, which then become superfluous
	storeAll            // everything: the stack becomes one layer
)

// leastEffort is the least effort that may keep the stacks within their limits.
func (s *sandbox) leastEffort() int {
	stacks := []layer.Stack{s.memory}
	for _, d := range s.disks {
		if !d.readOnly {
			stacks = append(stacks, d.stack)
		}
	}
	for _, stack := range stacks {
		if len(stack.Layers) >= layer.MaxLayers || len(stack.Extents) > layer.MaxExtents-layer.MaxRuns {
			return storeLive
		}
	}
	return storeChanged
}

// include returns a Save that stores, beyond the changes, the runs that an effort
// requires.
func (s *sandbox) include(effort int) *vmmctl.Save {
	pick := func(stack layer.Stack, owed []extent.Run) []extent.Run {
		wasteful := s.live.wasteful(stack)
		_, runs := stack.Without(func(r layer.Ref) bool {
			return effort == storeAll || effort == storeLive && s.live.has(r) || wasteful(r)
		})
		return fewRuns(runs, owed)
	}
	save := &vmmctl.Save{Memory: pick(s.memory, s.owed)}
	for i := range s.disks {
		if d := &s.disks[i]; !d.readOnly {
			save.Disks = append(save.Disks, pick(d.stack, d.owed))
		}
	}
	return save
}

// writable returns the sizes of the disks that a capture stores.
func (s *sandbox) writable() (sizes []uint64) {
	for _, d := range s.disks {
		if !d.readOnly {
			sizes = append(sizes, d.stack.Size)
		}
	}
	return sizes
}

// owe records runs that the vmm believes to be stored although the capture failed.
// The next capture stores them.
func (s *sandbox) owe(saved *vmmctl.Saved) {
	s.owed = fewRuns(s.owed, saved.Memory.Runs, saved.Memory.Zeros)
	writable := 0
	for i := range s.disks {
		if d := &s.disks[i]; !d.readOnly {
			d.owed = fewRuns(d.owed, saved.Disks[writable].Runs, saved.Disks[writable].Zeros)
			writable++
		}
	}
}

// fewRuns unites lists into few enough runs for a message.
func fewRuns(lists ...[]extent.Run) []extent.Run {
	return extent.Coalesce(extent.Unite(lists...), layer.MaxExtents)
}

// lay makes a moment from a capture, and rebases the sandbox on the capture, as the
// vmm already is.
func (s *sandbox) lay(c *captured) (_ *moment, err error) {
	fresh := liveLayers{}
	defer func() { err = errors.Join(err, fresh.release()) }() // by then each user has its own share
	m := &moment{profile: string(c.machine.Profile), session: c.session}
	stacks, err := s.overlay(c, fresh)
	if err != nil {
		return nil, err
	}
	all := maps.Clone(fresh)
	maps.Copy(all, s.live)
	old := s.live
	s.live = all.usedBy(stacks...)
	err = old.release()
	s.setStacks(stacks)
	m.engine, m.kernel, m.vcpus, m.parent, m.network = s.engine, s.kernel, s.vcpus, s.parent, s.network
	m.self.Generation.Store(s.self.Generation.Load())
	m.disks, m.live = slices.Clone(s.disks), all.usedBy(stacks...)
	m.setStacks(stacks)
	if m.boot = s.boot; m.boot != nil {
		m.boot.use()
	}
	m.state, c.state = c.state, nil
	return m, err
}

// overlay lays the captured data over the stacks of memory and disks. It adds the new
// layers to fresh.
func (s *sandbox) overlay(c *captured, fresh liveLayers) (stacks []layer.Stack, err error) {
	var ref layer.Ref
	if len(c.saved.Memory.Runs) > 0 {
		ref = fresh.add(c.memory.File, s.memory.Size, c.saved.Memory.Runs, c.memory.Close)
		c.memory = nil
	}
	stack, err := layer.OverlayInPlace(s.memory, ref, c.saved.Memory.Runs, c.saved.Memory.Zeros)
	if err != nil {
		return nil, err
	}
	stacks = append(stacks, stack)
	for i := range s.disks {
		d := &s.disks[i]
		if d.readOnly {
			continue
		}
		k := len(stacks) - 1
		change, ref := c.saved.Disks[k], layer.Ref{}
		if len(change.Runs) > 0 {
			size := extent.Total(change.Runs)
			f, err := s.engine.privateCopy(c.disks[k], size)
			if err != nil {
				return nil, err
			}
			ref = fresh.add(f, size, change.Runs, f.Close)
		}
		if stack, err = layer.Overlay(d.stack, ref, change.Runs, change.Zeros); err != nil {
			return nil, err
		}
		stacks = append(stacks, stack)
	}
	return stacks, nil
}

// setStacks sets the stacks that overlay returned: the memory's, then one for each
// writable disk. It clears all owed runs.
func (s *sandbox) setStacks(stacks []layer.Stack) {
	s.setMemory(stacks[0])
	s.owed = nil
	next := 1
	for i := range s.disks {
		if d := &s.disks[i]; !d.readOnly {
			d.stack, d.owed = stacks[next], nil
			next++
		}
	}
}

// privateCopy copies a file that the vmm has written into a file that the vmm cannot
// write. It copies exactly size bytes, since the vmm may change the file and its
// offset meanwhile.
func (e *Engine) privateCopy(from *os.File, size uint64) (_ *os.File, err error) {
	own, err := reopen(from)
	if err != nil {
		return nil, err
	}
	defer func() { _ = own.Close() }() // only read
	to, err := e.top()
	if err != nil {
		return nil, err
	}
	_, err = io.CopyN(to, own, int64(size))
	if errors.Is(err, io.EOF) {
		err = fmt.Errorf("%w: it has become shorter than the %d bytes that it had", errLie, size)
	}
	if err != nil {
		return nil, errors.Join(fmt.Errorf("copy a disk's layer: %w", err), to.Close())
	}
	return to, nil
}

// child starts a sandbox that continues from the moment.
func (m *moment) child(ctx context.Context, opts engine.ForkOptions) (*sandbox, error) {
	release, err := opts.WaitTurn(ctx)
	if err != nil {
		return nil, err
	}
	defer release()
	stacks := []layer.Stack{m.memory}
	for _, d := range m.disks {
		stacks = append(stacks, d.stack)
	}
	s := &sandbox{
		engine: m.engine, kernel: m.kernel, self: identity.Self{Hostname: opts.Hostname}, vcpus: m.vcpus, parent: m.parent,
		disks: slices.Clone(m.disks), live: m.live.usedBy(stacks...), boot: m.boot, network: m.network,
	}
	s.self.Generation.Store(m.self.Generation.Load() + 1)
	if s.boot != nil {
		s.boot.use()
	}
	if s.self.Hostname == "" {
		s.self.Hostname = identity.Hostname()
	}
	s.setMemory(m.memory)
	child, err := m.engine.restore(ctx, s, opts, origin{
		profile: m.profile, session: m.session,
		state: func() (*os.File, error) { return reopen(m.state) },
		memory: func(ctx context.Context, ref layer.Ref) (*os.File, error) {
			if l := s.live[ref.Digest]; l != nil {
				return reopen(l.file)
			}
			return m.engine.resident.Load(ctx, ref, func() (io.ReadCloser, error) { return m.parent.ReadLayer(ref) })
		},
		disk: func(d *disk, ref layer.Ref) (*os.File, error) {
			switch l := s.live[ref.Digest]; {
			case l != nil:
				return reopen(l.file)
			case m.parent != nil:
				return m.parent.OpenLayer(ref)
			case d.readOnly || m.boot.isBlank(ref):
				return reopen(m.boot.layer(ref))
			}
			// Layers that a live fork opens are not hashed.
			return nil, fmt.Errorf("disk %s: layer %s is nowhere", d.id, ref.Digest)
		},
	})
	if err != nil {
		return nil, errors.Join(err, s.release())
	}
	return child, nil
}
