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

// sandbox is a guest together with the files that it was made from, so that it can be
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
	parent    *snapshot.Snapshot // the snapshot whose layers it maps; nil after a boot
	boot      *bootFiles         // nil in a fork
	restored  time.Duration      // time from the call of Fork until the processors ran
	ownParent bool               // whether the sandbox closes parent
	fromSpare bool               // whether it was loaded into a spare made before the fork
	hasFiles  bool               // files are attached as disks: it cannot be captured
	filesOnly bool               // its vmm, of an older AgentRun, saves only to files and not to pipes

	capture sync.Mutex        // held during a capture; protects memory, the disks' stacks and all following fields
	standby *guestrpc.Standby // nil before the first capture
	live    liveLayers        // the layers of memory and disks that no snapshot contains
	owed    []extent.Run      // runs of memory that the vmm wrongly believes to be stored

	mu       sync.Mutex // protects all following fields, and Guest.Agent
	layers   int        // of memory
	mappings int
	lastFork engine.LiveForkStats
}

// bootFiles are the files that a sandbox and its live forks were booted from.
type bootFiles struct {
	kernel, root *os.File
	// blank is the layer that its disk started from; nil without a disk.
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

// isBlank reports whether a layer is the blank that the disk started from.
func (b *bootFiles) isBlank(ref layer.Ref) bool {
	return b.blank != nil && b.blank.stack.Layers[0] == ref
}

// layer is the file of a layer that the sandbox was booted from.
func (b *bootFiles) layer(ref layer.Ref) *os.File {
	if b.isBlank(ref) {
		return b.blank.file
	}
	return b.root
}

// identifyBoot hashes the boot files when their digests are first needed. A sandbox
// that is never captured does not pay for it.
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

// disk is a disk with the stack below its top.
type disk struct {
	id       string
	readOnly bool
	stack    layer.Stack
	owed     []extent.Run // runs of the disk, as in sandbox.owed
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

// release closes the files that a sandbox keeps for its captures.
func (s *sandbox) release() error { return s.end(liveLayers.release) }

// leave is release for a sandbox that lives on.
func (s *sandbox) leave() error { return s.end(liveLayers.leave) }

func (s *sandbox) end(live func(liveLayers) error) error {
	s.capture.Lock()
	defer s.capture.Unlock()
	if s.standby != nil {
		_ = s.standby.Close() // nothing was sent on it
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

// Stats reads the costs of the vmm process.
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

// setMemory changes the stack of the memory.
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
		case "Anonymous": // Private_* would also count shared layers that only one process happens to map
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

// fileRefOf hashes at most the first most bytes of a file.
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

// wholeOf reads a file from its beginning, and leaves the file's offset alone.
func wholeOf(f *os.File) io.Reader { return io.NewSectionReader(f, 0, 1<<62) }

// wholeFile is a stack that consists of one file.
func wholeFile(ref layer.Ref) layer.Stack {
	return layer.Stack{Size: ref.Size, Layers: []layer.Ref{ref}, Extents: []layer.Extent{{Length: ref.Size}}}
}

// reopen opens another descriptor of an open file.
func reopen(f *os.File) (*os.File, error) {
	g, err := os.Open("/proc/self/fd/" + strconv.Itoa(int(f.Fd())))
	if err != nil {
		return nil, fmt.Errorf("reopen %s: %w", f.Name(), err)
	}
	return g, nil
}
