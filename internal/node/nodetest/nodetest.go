// Package nodetest provides an engine for tests. Its sandboxes are real guest
// agents in this process instead of machines, and use the host's files and
// programs. Like machines, they outlive the daemons that use them.
package nodetest

import (
	"bytes"
	"context"
	"crypto/rand"
	"errors"
	"maps"
	"net"
	"os"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"agentrun.dev/internal/engine"
	"agentrun.dev/internal/guest/agent"
	"agentrun.dev/internal/guest/guestrpc"
	"agentrun.dev/internal/storage/layer"
	"agentrun.dev/internal/storage/snapshot"
)

// Host plays an engine: a host whose processes outlive daemons.
type Host struct {
	engine.Engine // the methods that tests do not use

	// Step is called before and after each call, while no call is under way.
	Step func()
	// Execs lets the agents run programs. It does not work with synctest,
	// because the kernel reports the end of programs.
	Execs bool

	serving sync.WaitGroup // agents

	mu        sync.Mutex // protects all following fields
	processes map[string]*Process
	resident  map[string]engine.Held
	failNext  error
	failWrite error
	refused   map[string]error // adoptions
	build     string           // see Update
	lost      []string         // builds
	needed    map[string]bool  // builds that were last reported as needed
	hanging   chan struct{}    // closed when the first capture hangs
}

// Process is a running sandbox.
type Process struct {
	memory map[string]string
	paused bool
	done   chan struct{}
	cause  error
	agent  *agent.Server
}

// NewHost makes a host that ends with the test.
func NewHost(t testing.TB) *Host {
	h := &Host{processes: map[string]*Process{}, resident: map[string]engine.Held{}}
	t.Cleanup(func() {
		h.mu.Lock()
		folders := slices.Collect(maps.Keys(h.processes))
		h.mu.Unlock()
		for _, folder := range folders {
			h.End(folder, engine.ErrEnded)
		}
		h.serving.Wait() // for their calls that are under way
	})
	return h
}

// FailNext makes the next start of a process fail.
func (h *Host) FailNext(err error) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.failNext = err
}

// FailCapture makes the next capture of a process fail.
func (h *Host) FailCapture(err error) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.failWrite = err
}

// HangCaptures makes captures wait until their process has ended, like those of
// a machine that does not answer. asked is closed when the first capture waits.
func (h *Host) HangCaptures() (asked <-chan struct{}) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.hanging = make(chan struct{})
	return h.hanging
}

// hang waits if captures hang.
func (s *handle) hang() error {
	s.host.mu.Lock()
	hanging := s.host.hanging
	if hanging == nil {
		s.host.mu.Unlock()
		return nil
	}
	select {
	case <-hanging:
	default:
		close(hanging)
	}
	s.host.mu.Unlock()
	<-s.done
	return s.cause
}

// Memory returns the memory of a folder's process, nil if no process runs
// there.
func (h *Host) Memory(folder string) map[string]string {
	h.mu.Lock()
	defer h.mu.Unlock()
	if p := h.processes[folder]; p != nil {
		return p.memory
	}
	return nil
}

// Write changes the memory of a folder's process, if one runs there.
func (h *Host) Write(folder, key, value string) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if p := h.processes[folder]; p != nil {
		p.memory[key] = value
	}
}

// Put makes a process with a memory.
func (h *Host) Put(folder string, memory map[string]string) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.put(folder, memory)
}

func (h *Host) put(folder string, memory map[string]string) *Process {
	p := &Process{memory: memory, done: make(chan struct{}), agent: &agent.Server{Processes: &agent.Processes{}}}
	if h.Execs {
		p.agent.Processes = agent.NewProcesses(agent.Config{})
	}
	h.processes[folder] = p
	return p
}

// Folders returns the folders of the running processes.
func (h *Host) Folders() []string {
	h.mu.Lock()
	defer h.mu.Unlock()
	return slices.Sorted(maps.Keys(h.processes))
}

func (h *Host) hook() func() {
	if h.Step != nil {
		h.Step()
		return h.Step
	}
	return func() {}
}

func (h *Host) Name() string { return "fake" }
func (h *Host) Close() error { return nil }

// Reserve adds no overhead of its own.
func (h *Host) Reserve(ram, disk uint64) uint64 { return ram + disk }

// MaxDisk is the largest disk of a Host.
const MaxDisk = 1 << 40

// MaxDisk returns the constant MaxDisk.
func (h *Host) MaxDisk() (uint64, error) { return MaxDisk, nil }

// Capabilities are those of an engine whose forks share memory.
func (h *Host) Capabilities() engine.Capabilities { return engine.Capabilities{SharesMemory: true} }

// Inspect reports for every process 3 MiB of its own and 5 MiB that it shares.
func (h *Host) Inspect(folder string) (int, engine.Stats, error) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.processes[folder] == nil {
		return 0, engine.Stats{}, engine.ErrEnded
	}
	return 1, engine.Stats{Own: 3 << 20, Proportional: 8 << 20}, nil
}

func (h *Host) Keep([]string, []string) error { return nil }

// Drop frees layers that forks have loaded.
func (h *Host) Drop(ids []string) error {
	h.mu.Lock()
	defer h.mu.Unlock()
	for _, id := range ids {
		delete(h.resident, id)
	}
	return nil
}

// Resident is the size of the memory layers that are loaded.
func (h *Host) Resident() uint64 {
	h.mu.Lock()
	defer h.mu.Unlock()
	return engine.HeldBytes(slices.Collect(maps.Values(h.resident)))
}

func (h *Host) Boot(context.Context, engine.Spec) (engine.Sandbox, error) {
	return nil, errors.New("not used")
}

func (h *Host) start(folder string, memory map[string]string) (engine.Sandbox, error) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if err := h.failNext; err != nil {
		h.failNext = nil
		return nil, err
	}
	if _, err := os.Stat(folder); err != nil {
		return nil, err
	}
	return h.hold(h.put(folder, maps.Clone(memory)), folder)
}

func (h *Host) Fork(ctx context.Context, snap *snapshot.Snapshot, o engine.ForkOptions) (engine.Sandbox, error) {
	release, err := o.WaitTurn(ctx)
	if err != nil {
		return nil, err
	}
	defer release()
	defer h.hook()()
	held, err := engine.HeldBy(snap, o.Folder)
	if err != nil {
		return nil, err
	}
	h.mu.Lock()
	for _, l := range held {
		h.resident[l.ID] = l
	}
	h.mu.Unlock()
	return h.start(o.Folder, snap.Manifest().Labels)
}

// RefuseAdoption makes a folder's process refuse adoptions until it is called with a nil
// error. With ErrHangs an adoption fails only when its caller gives up, otherwise with
// err at once.
func (h *Host) RefuseAdoption(folder string, err error) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.refused == nil {
		h.refused = map[string]error{}
	}
	h.refused[folder] = err
}

// ErrHangs is an error for RefuseAdoption.
var ErrHangs = errors.New("it hangs")

func (h *Host) Adopt(ctx context.Context, folder string) (engine.Sandbox, error) {
	h.mu.Lock()
	err := h.refused[folder]
	h.mu.Unlock()
	if errors.Is(err, ErrHangs) {
		<-ctx.Done()
		return nil, ctx.Err()
	}
	if err != nil {
		return nil, err
	}
	h.mu.Lock()
	defer h.mu.Unlock()
	p := h.processes[folder]
	if p == nil {
		return nil, engine.ErrEnded
	}
	return h.hold(p, folder)
}

// hold connects to a process, through a real agent.
func (h *Host) hold(p *Process, folder string) (*handle, error) {
	ours, theirs := net.Pipe()
	h.serving.Go(func() { _ = guestrpc.Serve(context.Background(), theirs, p.agent) })
	agent, err := guestrpc.NewClient(context.Background(), ours)
	if err != nil {
		return nil, err
	}
	go func() {
		<-p.done
		_ = agent.Close()
	}()
	return &handle{host: h, Process: p, folder: folder, agent: agent}, nil
}

func (h *Host) Remove(_ context.Context, folder string) error {
	defer h.hook()()
	h.End(folder, engine.ErrEnded)
	return os.RemoveAll(folder)
}

// End ends a process, if it runs.
func (h *Host) End(folder string, cause error) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if p := h.processes[folder]; p != nil {
		delete(h.processes, folder)
		p.cause = cause
		close(p.done)
		if h.Execs {
			p.agent.Processes.Close()
		}
	}
}

// handle is a daemon's hold on a process.
type handle struct {
	engine.Sandbox // the methods that tests do not use
	host           *Host
	*Process
	folder string
	agent  *guestrpc.Client
}

func (s *handle) Agent() *guestrpc.Client                    { return s.agent }
func (s *handle) Settle(context.Context) error               { return nil }
func (s *handle) Claim(_ context.Context, name string) error { return s.set("hostname", name) }
func (s *handle) Detach() error                              { return s.agent.Close() }
func (s *handle) Done() <-chan struct{}                      { return s.done }
func (s *handle) Wait() error                                { <-s.done; return s.cause }

// Stats are made up, except for the number of the memory's keys.
func (s *handle) Stats(context.Context) (engine.Stats, error) {
	s.host.mu.Lock()
	defer s.host.mu.Unlock()
	if s.cause != nil {
		return engine.Stats{}, s.cause
	}
	own := uint64(len(s.memory)) << 20
	return engine.Stats{Own: own, Proportional: own + 1<<19, CPU: 3 * time.Second, Generation: 2, Disk: 5 << 20}, nil
}

func (s *handle) set(key, value string) error {
	s.host.mu.Lock()
	defer s.host.mu.Unlock()
	s.memory[key] = value
	s.paused = false
	return nil
}

func (s *handle) Park(ctx context.Context) error { return s.Pause(ctx) }

func (s *handle) Pause(context.Context) error {
	defer s.host.hook()()
	s.host.mu.Lock()
	defer s.host.mu.Unlock()
	s.paused = true
	return nil
}

func (s *handle) Resume(context.Context) error {
	s.host.mu.Lock()
	defer s.host.mu.Unlock()
	s.paused = false
	return nil
}

func (s *handle) Snapshot(_ context.Context, dir string, opts ...snapshot.Option) (*snapshot.Snapshot, error) {
	defer s.host.hook()()
	if err := s.hang(); err != nil {
		return nil, err
	}
	s.host.mu.Lock()
	defer s.host.mu.Unlock()
	if err := s.host.failWrite; err != nil {
		s.host.failWrite = nil
		return nil, err
	}
	return Capture(dir, s.memory, opts...)
}

func (s *handle) Fork(ctx context.Context, opts []engine.ForkOptions) (*engine.LiveFork, error) {
	defer s.host.hook()()
	if err := s.hang(); err != nil {
		return nil, err
	}
	f := &engine.LiveFork{Forks: make([]engine.Sandbox, len(opts)), Errs: make([]error, len(opts))}
	for i, o := range opts {
		if n, err := strconv.Atoi(s.memory[LiveKey]); err == nil {
			f.Held = []engine.Held{{ID: "live-" + strconv.Itoa(n), Bytes: uint64(n)}}
			f.Source = f.Held
		}
		release, err := o.WaitTurn(ctx)
		if err != nil {
			f.Errs[i] = err
			continue
		}
		f.Forks[i], f.Errs[i] = s.host.start(o.Folder, s.memory)
		release()
		if s.host.Step != nil {
			s.host.Step()
		}
	}
	return f, nil
}

func (s *handle) Close() error {
	defer s.host.hook()()
	s.host.End(s.folder, engine.ErrEnded)
	return nil
}

func (s *handle) Shutdown(context.Context, time.Duration) error { return s.Close() }

// LiveKey is the memory's key for the number of bytes that a live fork leaves
// in memory.
const LiveKey = "live"

// LayerKey is the memory's key for the number of pages of a capture's layer.
// Without the key the capture has no layer.
const LayerKey = "layer"

// Capture makes a snapshot with the memory as its labels.
func Capture(dir string, memory map[string]string, opts ...snapshot.Option) (*snapshot.Snapshot, error) {
	return snapshot.Make(dir, func(b *snapshot.Builder) (*snapshot.Snapshot, error) {
		root, err := b.StreamLayer(context.Background(), bytes.NewReader(make([]byte, layer.PageSize)), layer.PageSize)
		if err != nil {
			return nil, err
		}
		ram := layer.Stack{Size: layer.PageSize}
		if pages, err := strconv.Atoi(memory[LayerKey]); err == nil {
			content := make([]byte, pages*layer.PageSize)
			_, _ = rand.Read(content) // it never fails; all layers differ
			ref, err := b.StreamLayer(context.Background(), bytes.NewReader(content), uint64(len(content)))
			if err != nil {
				return nil, err
			}
			ram = whole(ref)
		}
		return b.Commit(snapshot.Manifest{
			Created: time.Unix(0, 0).UTC(), Kernel: strings.Repeat("ab", 32), TSCKHz: 1, VCPUs: 1, Memory: snapshot.StackOf(ram),
			Disks: []snapshot.Disk{{ID: "root", ReadOnly: true, Stack: snapshot.StackOf(whole(root))}},
			CPU:   snapshot.CPU{Profile: "x", Vendor: "y", Family: 1}, Labels: memory,
		}, []byte("state"))
	}, opts...)
}

func whole(ref layer.Ref) layer.Stack {
	return layer.Stack{Size: ref.Size, Layers: []layer.Ref{ref}, Extents: []layer.Extent{{Length: ref.Size}}}
}
