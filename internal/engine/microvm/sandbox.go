package microvm

import (
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"io"
	"os"
	"strconv"
	"strings"
	"sync"
	"time"

	"agentrun.dev/internal/engine"
	"agentrun.dev/internal/engine/identity"
	"agentrun.dev/internal/guest/guestrpc"
	"agentrun.dev/internal/host/procid"
	"agentrun.dev/internal/storage/extent"
	"agentrun.dev/internal/storage/layer"
	"agentrun.dev/internal/storage/snapshot"
	"agentrun.dev/internal/vmm/vmstate"
)

// sandbox is a guest that knows what it was made of, so that it can be
// captured.
type sandbox struct {
	*Guest
	engine.WireEnd
	engine    *Engine
	self      identity.Self
	kernel    string // digest
	vcpus     int
	memory    layer.Stack
	disks     []disk
	network   *engine.Network    // nil without an interface
	parent    *snapshot.Snapshot // whose layers it maps; nil after a boot
	boot      *bootFiles         // nil in a fork
	restored  time.Duration      // from the call of Fork until it ran
	ownParent bool               // parent is its own to close
	fromSpare bool               // which was made before that call
	hasFiles  bool               // as disks: it cannot be captured
	filesOnly bool               // its vmm, of an older AgentRun, saves to files and not to pipes

	capture sync.Mutex        // one capture at a time; protects memory, the disks' stacks and all following fields
	standby *guestrpc.Standby // nil before the first capture
	live    liveLayers        // those of memory and of the disks that are in no snapshot
	owed    []extent.Run      // of memory: the vmm believes them kept

	mu       sync.Mutex // protects all following fields, and Guest.Agent
	layers   int        // of memory
	mappings int
	lastFork engine.LiveForkStats
}

// bootFiles is what a sandbox and its live forks were booted from.
type bootFiles struct {
	kernel, root *os.File
	// blank is the layer that its disk began with; nil without a disk.
	blank *blank

	mu    sync.Mutex // protects users
	users int
}

func (b *bootFiles) use() {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.users++
}

func (b *bootFiles) release() error {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.users--; b.users > 0 {
		return nil
	}
	err := errors.Join(b.kernel.Close(), b.root.Close())
	if b.blank != nil {
		err = errors.Join(err, b.blank.file.Close())
	}
	return err
}

// isBlank reports whether a layer is the one that the disk began with.
func (b *bootFiles) isBlank(ref layer.Ref) bool {
	return b.blank != nil && b.blank.stack.Layers[0] == ref
}

// layer is the file of a layer that a sandbox was booted from.
func (b *bootFiles) layer(ref layer.Ref) *os.File {
	if b.isBlank(ref) {
		return b.blank.file
	}
	return b.root
}

// identifyBoot hashes what a sandbox was booted from, when that is first
// needed: a sandbox that is never captured does not pay for it.
func (s *sandbox) identifyBoot() (err error) {
	if s.boot == nil || s.kernel != "" {
		return nil
	}
	root, err := fileRef(s.boot.root)
	if err != nil {
		return fmt.Errorf("root filesystem: %w", err)
	}
	s.disks[0].stack = wholeFile(root)
	if s.kernel, err = fileDigest(s.boot.kernel); err != nil {
		return fmt.Errorf("kernel: %w", err)
	}
	return nil
}

// disk is a disk and the stack below it.
type disk struct {
	id       string
	readOnly bool
	stack    layer.Stack
	owed     []extent.Run // as the sandbox's
}

var _ engine.Sandbox = (*sandbox)(nil)

func (s *sandbox) Agent() *guestrpc.Client {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.Guest.Agent
}

// Wait returns how the VM ended.
func (s *sandbox) Wait() error {
	exit, _ := s.Guest.Wait()
	switch exit.Reason {
	case vmstate.OutOfMemory:
		return fmt.Errorf("%w: %w: %s", engine.ErrEnded, engine.ErrOutOfMemory, exit.Detail)
	case vmstate.PowerOff:
		return fmt.Errorf("%w: %w", engine.ErrEnded, engine.ErrPoweredOff)
	}
	return fmt.Errorf("%w: %v", engine.ErrEnded, exit)
}

// Close kills the VM.
func (s *sandbox) Close() error {
	s.Kill()
	return errors.Join(s.closeAgent(), s.release())
}

func (s *sandbox) closeAgent() error {
	if a := s.Agent(); a != nil {
		return a.Close()
	}
	return nil
}

func (s *sandbox) Shutdown(ctx context.Context, grace time.Duration) error {
	_, err := s.Guest.Shutdown(ctx, grace)
	return errors.Join(err, s.release())
}

// release closes what a sandbox keeps for its captures.
func (s *sandbox) release() error { return s.end(liveLayers.release) }

// leave is release for a sandbox that lives on.
func (s *sandbox) leave() error { return s.end(liveLayers.leave) }

func (s *sandbox) end(live func(liveLayers) error) error {
	s.capture.Lock()
	defer s.capture.Unlock()
	if s.standby != nil {
		_ = s.standby.Close() // nothing was sent
		s.standby = nil
	}
	err := errors.Join(live(s.live), s.CloseWire())
	s.live = nil
	if s.ownParent {
		err = errors.Join(err, s.parent.Close())
		s.ownParent = false
	}
	if s.boot == nil {
		return err
	}
	b := s.boot
	s.boot = nil
	return errors.Join(err, b.release())
}

// Stats reads what the vmm process costs.
func (s *sandbox) Stats(context.Context) (engine.Stats, error) {
	st, err := ProcessStats(s.Pid())
	if err == nil {
		if st.Disk, err = diskUse(s.Pid()); err != nil {
			err = errors.Join(err, s.Stopped())
		}
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	st.Layers, st.Mappings, st.Generation, st.LastFork = s.layers, s.mappings, s.self.Generation.Load(), s.lastFork
	return st, err
}

// setMemory changes what the memory is made of.
func (s *sandbox) setMemory(stack layer.Stack) {
	s.memory = stack
	s.mu.Lock()
	defer s.mu.Unlock()
	s.layers, s.mappings = len(stack.Layers), len(stack.Extents)
}

// ProcessStats reads the memory and processor time of a vmm process.
func ProcessStats(pid int) (st engine.Stats, err error) {
	b, err := os.ReadFile("/proc/" + strconv.Itoa(pid) + "/smaps_rollup")
	if err != nil {
		return st, fmt.Errorf("read the memory of the vmm process: %w", errors.Join(engine.ErrEnded, err))
	}
	for line := range strings.Lines(string(b)) {
		name, rest, _ := strings.Cut(line, ":")
		kib, err := strconv.ParseUint(strings.TrimSuffix(strings.TrimSpace(rest), " kB"), 10, 64)
		if err != nil {
			continue // the first line is a range of addresses
		}
		switch name {
		case "Anonymous": // private pages would be those of a layer that only one happens to map, too
			st.Own = kib << 10
		case "Pss":
			st.Proportional = kib << 10
		}
	}
	st.CPU, err = procid.CPUTime(pid)
	return st, err
}

// fileRef hashes a file whose size is a multiple of the page size.
func fileRef(f *os.File) (layer.Ref, error) { return fileRefOf(f, 1<<62) }

// fileRefOf does so with a file of which at most so much is read.
func fileRefOf(f *os.File, most uint64) (layer.Ref, error) {
	w := layer.NewWriter(io.Discard)
	if _, err := io.Copy(w, io.NewSectionReader(f, 0, int64(most))); err != nil {
		return layer.Ref{}, fmt.Errorf("hash %s: %w", f.Name(), err)
	}
	ref := w.Ref()
	if ref.Size == 0 || ref.Size%layer.PageSize != 0 {
		return ref, fmt.Errorf("%s has %d bytes, which is not a multiple of %d: build it with agentrun or pad it", f.Name(), ref.Size, layer.PageSize)
	}
	return ref, nil
}

func fileDigest(f *os.File) (string, error) {
	h := sha256.New()
	if _, err := io.Copy(h, wholeOf(f)); err != nil {
		return "", fmt.Errorf("hash %s: %w", f.Name(), err)
	}
	return layer.Digest(h.Sum(nil)).String(), nil
}

// wholeOf reads a file from its beginning, wherever others are in it.
func wholeOf(f *os.File) io.Reader { return io.NewSectionReader(f, 0, 1<<62) }

// wholeFile is the stack that is one file.
func wholeFile(ref layer.Ref) layer.Stack {
	return layer.Stack{Size: ref.Size, Layers: []layer.Ref{ref}, Extents: []layer.Extent{{Length: ref.Size}}}
}

// reopen is another descriptor of an open file.
func reopen(f *os.File) (*os.File, error) {
	g, err := os.Open("/proc/self/fd/" + strconv.Itoa(int(f.Fd())))
	if err != nil {
		return nil, fmt.Errorf("reopen %s: %w", f.Name(), err)
	}
	return g, nil
}
