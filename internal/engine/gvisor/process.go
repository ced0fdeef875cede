package gvisor

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"agentrun.dev/internal/engine"
	"agentrun.dev/internal/engine/gvisorctl"
	"agentrun.dev/internal/engine/identity"
	"agentrun.dev/internal/engine/programs"
	"agentrun.dev/internal/host/assets"
	"agentrun.dev/internal/host/jail"
	"agentrun.dev/internal/host/procid"
	"agentrun.dev/internal/storage/layer"
	"agentrun.dev/internal/vmm/vmmctl"
	"golang.org/x/sys/unix"
)

// platform is gVisor's way of running programs. The other platforms are slower
// (ptrace), or hang on some machines that have a /dev/kvm (kvm).
const platform = "systrap"

// shape holds the settings that a sandbox is created with.
type shape struct {
	hostname     string
	memory, disk uint64
	vcpus        int
	dns          []netip.Addr
}

// overheadFixed and overheadPerRAM are the memory of a sandbox beyond its programs'
// memory and its disk. All of it is charged to the sandbox's cgroup: the helper,
// gVisor's kernel, and its records of each page.
const (
	overheadFixed  = 160 << 20
	overheadPerRAM = 16 // one byte of overhead for this many bytes of RAM
	// maxThreads is room for the threads of gVisor's kernel, and for one thread of
	// the host for each thread of the sandbox.
	maxThreads = 16 << 10
)

// Reserve is how much memory a sandbox is counted with that uses all of its RAM, and
// of its disk if it was given one. Its limit is higher. That leaves room for the
// files of sandboxes without a disk, and for surges of gVisor's kernel.
func (e *Engine) Reserve(ram, disk uint64) uint64 {
	return ram + disk + (ram+disk)/overheadPerRAM + usualOverhead
}

// MaxDisk is the size of the host's memory, since disks are in memory.
func (e *Engine) MaxDisk() (uint64, error) {
	var info unix.Sysinfo_t
	if err := unix.Sysinfo(&info); err != nil {
		return 0, fmt.Errorf("look at the host's memory: %w", err)
	}
	return info.Totalram * uint64(info.Unit), nil
}

// usualOverhead is the memory that helper and kernel of a sandbox usually use, with
// some room.
const usualOverhead = 64 << 20

func (s shape) limits(asked engine.Limits) jail.Limits {
	l := jail.Limits{
		Memory:    s.memory + s.disk + (s.memory+s.disk)/overheadPerRAM + overheadFixed,
		MilliCPUs: asked.MilliCPUs, Background: asked.Background, Threads: maxThreads,
	}
	if l.MilliCPUs == 0 {
		l.MilliCPUs = uint64(s.vcpus+1) * 1000
	}
	return l
}

// process is the helper of a sandbox.
type process struct {
	engine *Engine
	id     string // of the sandbox
	// protocol is the version of gvisorctl that the helper speaks.
	protocol int
	helper   int // process ids
	sentry   int
	child    *exec.Cmd      // nil if another process has started it
	held     *procid.Handle // nil for our own child
	group    *jail.Group    // nil without limits
	conn     gvisorctl.Conn
	loaded   bool     // whether it has loaded a checkpoint ahead of its restore
	host     *os.File // the host's end of the wire that came with the checkpoint, until the restore

	done        chan struct{} // closed when the helper has ended
	exit        string        // the reason; set before done is closed
	outOfMemory bool          // set before done is closed

	paused   atomic.Bool            // as far as this parent knows
	patience atomic.Int64           // how long an answer may take; set by expect
	left     atomic.Bool            // Detach has closed the socket here, and the helper goes on
	accused  atomic.Pointer[string] // why the helper was killed; nil unless this parent accused it

	mu      sync.Mutex        // protects all following fields
	program *programs.Program // the helper's program; nil if it is not kept, or if the helper has ended
	last    *gvisorctl.Exit
	nextID  uint64
	waiting map[uint64]pending // nil once the helper has ended
}

// idBytes is how many random bytes the id of a sandbox has.
const idBytes = 16

// groupName is the name of a sandbox's cgroup.
func groupName(id string) string { return "gvisor-" + id }

// createOf creates a sandbox with the helper of a build.
func (e *Engine) createOf(ctx context.Context, build layer.Digest, sh shape, asked engine.Limits, root *os.File) (*process, error) {
	program, err := e.helpers.of(build)
	if err != nil {
		return nil, err
	}
	return e.create(ctx, program, sh, asked, root)
}

// create starts a helper and lets it make a sandbox that waits. It takes over
// program.
func (e *Engine) create(ctx context.Context, program *programs.Program, sh shape, asked engine.Limits, root *os.File) (_ *process, err error) {
	p := &process{
		engine: e, id: identity.Hex(idBytes), program: program, nextID: 1,
		done: make(chan struct{}), waiting: map[uint64]pending{},
	}
	defer func() {
		if err != nil {
			p.dropProgram()
		}
	}()
	groups, err := e.groups()
	if err != nil {
		return nil, err
	}
	agent, err := assets.Open(assets.GuestAgent)
	if err != nil {
		return nil, err
	}
	defer func() { _ = agent.Close() }() // the helper has its own copy
	p.expect(sh.memory + sh.disk)
	if groups != nil {
		if p.group, err = groups.Create(groupName(p.id), sh.limits(asked)); err != nil {
			return nil, err
		}
	}
	if err := p.start(program.Path); err != nil {
		_, releaseErr := p.group.Release()
		return nil, errors.Join(err, releaseErr, os.RemoveAll(e.runDirOf(p.id)))
	}
	go p.receive()
	reply, err := p.request(ctx, &gvisorctl.Message{Op: gvisorctl.OpCreate, Create: &gvisorctl.Create{
		ID: p.id, RunDir: e.runDirOf(p.id), Platform: platform, Hostname: sh.hostname,
		Memory: sh.memory, Disk: sh.disk, VCPUs: sh.vcpus, DNS: sh.dns,
	}}, root, agent)
	if err != nil {
		p.kill()
		return nil, err
	}
	p.sentry, p.protocol = reply.SentryPID, max(1, reply.Protocol)
	return p, nil
}

// dropProgram releases the helper's program.
func (p *process) dropProgram() {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.program.Release()
	p.program = nil
}

// useProgram returns the helper's program with one more use. The program stays until
// that is released, even if the helper ends.
func (p *process) useProgram() *programs.Program {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.program.Again()
}

// start starts the helper. The helper holds a lock on its folder for as long as it
// lives, so that a later engine can recognise the folders of dead helpers.
func (p *process) start(program string) error {
	unlock, err := p.engine.lockRunDir(unix.LOCK_SH)
	if err != nil {
		return err
	}
	defer unlock()
	dir := p.engine.runDirOf(p.id)
	if err := os.Mkdir(dir, 0o700); err != nil {
		return fmt.Errorf("start gvisor-helper: %w", err)
	}
	lock, err := os.OpenFile(filepath.Join(dir, lockName), os.O_RDWR|os.O_CREATE, 0o600)
	if err != nil {
		return fmt.Errorf("start gvisor-helper: %w", err)
	}
	defer func() { _ = lock.Close() }() // the helper has its own copy
	if err := unix.Flock(int(lock.Fd()), unix.LOCK_EX); err != nil {
		return fmt.Errorf("start gvisor-helper: %w", err)
	}
	ours, theirs, err := vmmctl.Pair()
	if err != nil {
		return err
	}
	defer func() { _ = theirs.Close() }() // the helper has its own copy
	if p.conn, err = gvisorctl.NewConn(ours); err != nil {
		return errors.Join(err, ours.Close())
	}
	cmd := exec.Command(program, "serve")
	cmd.Env = []string{}
	cmd.Dir = "/"
	cmd.ExtraFiles = []*os.File{theirs, lock}
	cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true}
	if err := p.group.Start(cmd); err != nil {
		return errors.Join(fmt.Errorf("start gvisor-helper: %w", err), p.conn.Close())
	}
	p.child, p.helper = cmd, cmd.Process.Pid
	return nil
}

// finish reaps the helper, frees its resources, and wakes all waiters.
func (p *process) finish() {
	words := "gvisor-helper ended without a word"
	if p.child != nil {
		if err := p.child.Wait(); err != nil {
			words = "gvisor-helper: " + err.Error()
		}
	} else if err := errors.Join(p.held.Wait(), p.held.Close()); err != nil {
		words = "gvisor-helper: " + err.Error()
	}
	p.mu.Lock()
	for _, r := range p.waiting {
		r.stop()
	}
	p.waiting = nil
	if p.last != nil {
		words = p.last.Reason
		if p.last.Detail != "" {
			words += ": " + p.last.Detail
		}
	}
	id, group := p.id, p.group
	p.mu.Unlock()
	if why := p.accused.Load(); why != nil {
		words = "gvisor-helper was killed: " + *why + "; " + words
	}
	kills, err := group.Release()
	if kills > 0 {
		p.outOfMemory = true
		words = fmt.Sprintf("the kernel killed %d in the cgroup, whose limit was reached; %s", kills, words)
	}
	// Sweep finds the remaining resources by the folder. It does so even if the
	// folder's sandbox was not known here.
	if err == nil && id != "" {
		err = os.RemoveAll(p.engine.runDirOf(id))
	}
	if err != nil {
		words += "; " + err.Error()
	}
	p.exit = words
	p.dropProgram()
	close(p.done)
}

func (p *process) ended() error {
	if p.outOfMemory {
		return fmt.Errorf("%w: %w: %s", engine.ErrEnded, engine.ErrOutOfMemory, p.exit)
	}
	return fmt.Errorf("%w: %s", engine.ErrEnded, p.exit)
}

// request sends a message and waits for its reply.
func (p *process) request(ctx context.Context, m *gvisorctl.Message, files ...*os.File) (*gvisorctl.Message, error) {
	reply, err := p.post(m, files...)
	if err != nil {
		return nil, err
	}
	return p.await(ctx, reply)
}

// post sends a message and returns the channel of its reply, for await.
func (p *process) post(m *gvisorctl.Message, files ...*os.File) (<-chan *gvisorctl.Message, error) {
	p.mu.Lock()
	if p.waiting == nil {
		p.mu.Unlock()
		<-p.done
		return nil, p.ended()
	}
	m.ID = p.nextID
	p.nextID++
	reply := p.enlist(m)
	p.mu.Unlock()
	// A helper must read its messages even while its sandbox does not answer.
	op, after := m.Op, time.Duration(p.patience.Load())
	taken := time.AfterFunc(after, func() { p.overdue(op, after) })
	err := p.conn.Send(m, files...)
	taken.Stop()
	// receive notices that a helper has gone.
	if err != nil && !errors.Is(err, unix.EPIPE) && !errors.Is(err, io.ErrClosedPipe) && !errors.Is(err, os.ErrClosed) {
		p.mu.Lock()
		p.waiting[m.ID].stop()
		delete(p.waiting, m.ID)
		p.mu.Unlock()
		return nil, err
	}
	return reply, nil
}

func (p *process) await(ctx context.Context, reply <-chan *gvisorctl.Message) (*gvisorctl.Message, error) {
	select {
	case r := <-reply:
		if r.Error != "" {
			return nil, errors.New(r.Error)
		}
		return r, nil
	case <-p.done:
		return nil, p.ended()
	case <-ctx.Done():
		return nil, ctx.Err()
	}
}

// Dial opens a stream to a port inside: the agent's, or a TCP port of the
// sandbox's loopback.
func (p *process) Dial(ctx context.Context, port uint32) (net.Conn, error) {
	fds, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC|unix.SOCK_NONBLOCK, 0)
	if err != nil {
		return nil, fmt.Errorf("dial port %d: %w", port, err)
	}
	f, theirs := os.NewFile(uintptr(fds[0]), "stream"), os.NewFile(uintptr(fds[1]), "stream")
	ours, err := net.FileConn(f)
	if err = errors.Join(err, f.Close()); err != nil {
		return nil, errors.Join(fmt.Errorf("dial port %d: %w", port, err), theirs.Close())
	}
	// The sandbox decides when it answers, so a helper is not blamed if the sandbox
	// never does.
	ctx, cancel := context.WithTimeout(ctx, time.Duration(p.patience.Load()))
	defer cancel()
	_, err = p.request(ctx, &gvisorctl.Message{Op: gvisorctl.OpDial, Port: port}, theirs)
	if err = errors.Join(err, theirs.Close()); err != nil {
		return nil, errors.Join(fmt.Errorf("dial port %d: %w", port, err), ours.Close())
	}
	return ours, nil
}

// Pause stops the sandbox's programs.
func (p *process) Pause(ctx context.Context) error {
	p.paused.Store(true)
	_, err := p.request(ctx, &gvisorctl.Message{Op: gvisorctl.OpPause})
	return err
}

// Resume lets a paused sandbox go on.
func (p *process) Resume(ctx context.Context) error {
	p.paused.Store(false)
	_, err := p.request(ctx, &gvisorctl.Message{Op: gvisorctl.OpResume})
	return err
}

// Console returns the tail of the agent's output.
func (p *process) Console(ctx context.Context) ([]byte, error) {
	r, err := p.request(ctx, &gvisorctl.Message{Op: gvisorctl.OpConsole})
	if err != nil {
		return nil, fmt.Errorf("read console: %w", err)
	}
	return r.Data, nil
}

// Done is closed when the sandbox has ended.
func (p *process) Done() <-chan struct{} { return p.done }
