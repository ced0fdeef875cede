// Package netproc starts netds, finds netds again that an earlier daemon has started,
// and sweeps the remains of ended ones. It is the daemon's side, and handles no
// traffic.
//
// A netd is found through the folder of its namespace:
//
//	control       the socket that it listens on
//	process.json  written when it was started: which process it is
//	stderr        the last words of the one that runs, or ran last
//
// A netd is started before its record is written. If the daemon is killed in between,
// no daemon ever connects to that netd, and it ends by itself (package netd).
package netproc

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"sync"

	"agentrun.dev/internal/durable"
	"agentrun.dev/internal/host/assets"
	"agentrun.dev/internal/host/jail"
	"agentrun.dev/internal/host/procid"
	"agentrun.dev/internal/network/netctl"
	"golang.org/x/sys/unix"
)

// ErrNone says that the folder has no running netd.
var ErrNone = errors.New("no netd runs here")

// Config says where a netd has its folder, and which limits it has.
type Config struct {
	// Folder is the folder of the namespace. Start restricts it to root, or to the
	// user who starts netds.
	Folder string
	// Jail is a jail of kind jail.Netd. All namespaces may share it.
	Jail *jail.Jail
	// Limits are the limits of the process. A limit that is 0 is replaced by that of
	// DefaultLimits.
	Limits jail.Limits
}

// DefaultLimits allow a netd to serve hundreds of busy sandboxes.
var DefaultLimits = jail.Limits{Memory: 1 << 30, MilliCPUs: 4000, Threads: 128}

// NewJail makes the jail of netds. cfg overrides the defaults.
func NewJail(cfg jail.Config) (*jail.Jail, error) {
	if cfg.Program == "" {
		program, err := assets.Path(assets.Netd)
		if err != nil {
			return nil, err
		}
		cfg.Program = program
	}
	cfg.Kind = jail.Netd
	return jail.New(cfg), nil
}

func (c Config) control() string { return filepath.Join(c.Folder, "control") }
func (c Config) record() string  { return filepath.Join(c.Folder, "process.json") }
func (c Config) stderr() string  { return filepath.Join(c.Folder, "stderr") }

func (c Config) limits() jail.Limits {
	l := c.Limits
	if l.Memory == 0 {
		l.Memory = DefaultLimits.Memory
	}
	if l.MilliCPUs == 0 {
		l.MilliCPUs = DefaultLimits.MilliCPUs
	}
	if l.Threads == 0 {
		l.Threads = DefaultLimits.Threads
	}
	return l
}

// record is the content of process.json.
type record struct {
	Process procid.ID `json:"process"`
	// BootID is the id of the host's boot, since process ids are valid until the host
	// restarts.
	BootID string `json:"boot_id"`
}

// Process is a running netd, or one that has ended.
type Process struct {
	cfg    Config
	id     procid.ID
	handle *procid.Handle
	child  *os.Process // nil if another process has started it
	cell   *jail.Cell

	done chan struct{} // closed once end is set
	end  error         // why the process ended

	mu   sync.Mutex // protects all following fields
	left bool       // Leave was called
	over bool       // the process has ended, and its cell is free
}

// Start starts the netd of a folder that has no running one.
func Start(ctx context.Context, cfg Config) (_ *Process, err error) {
	fail := func(err error) (*Process, error) {
		return nil, fmt.Errorf("start the netd in %s: %w", cfg.Folder, err)
	}
	if found, err := Find(cfg); err == nil {
		return fail(errors.Join(fmt.Errorf("process %d runs there already: find it, or kill it first", found.PID()), found.Leave()))
	} else if !errors.Is(err, ErrNone) {
		return fail(err)
	}
	if err := os.MkdirAll(cfg.Folder, 0o700); err != nil {
		return fail(err)
	}
	// Remove the remains of an earlier netd. Without its socket, a netd that no
	// record names is unreachable.
	for _, path := range []string{cfg.record(), cfg.control()} {
		if err := os.Remove(path); err != nil && !errors.Is(err, fs.ErrNotExist) {
			return fail(err)
		}
	}
	listener, err := netctl.Listen(cfg.control())
	if err != nil {
		return fail(err)
	}
	defer func() { _ = listener.Close() }() // the process has its own copy
	stderr, err := os.OpenFile(cfg.stderr(), os.O_WRONLY|os.O_CREATE|os.O_TRUNC|os.O_APPEND, 0o600)
	if err != nil {
		return fail(err)
	}
	defer func() { _ = stderr.Close() }() // the process has its own copy
	started, err := cfg.Jail.Start(cfg.limits(), listener, stderr)
	if err != nil {
		return fail(err)
	}
	p := &Process{cfg: cfg, child: started.Process, cell: started.Cell, done: make(chan struct{})}
	if err := p.hold(); err != nil {
		return fail(errors.Join(err, p.discard()))
	}
	go p.watch()
	if err := p.answers(ctx); err != nil {
		return fail(errors.Join(err, p.Kill(ctx)))
	}
	return p, nil
}

// hold opens a handle of a child that was just started, and records its process.
func (p *Process) hold() (err error) {
	if p.id, err = procid.Of(p.child.Pid); err != nil {
		return err
	}
	if p.handle, err = procid.Adopt(p.id); err != nil {
		return err
	}
	return p.cfg.write(p.id)
}

// discard ends a child without a handle.
func (p *Process) discard() error {
	err := p.child.Kill()
	_, waitErr := p.child.Wait()
	_, releaseErr := p.cell.Release()
	if p.handle != nil {
		err = errors.Join(err, p.handle.Close())
	}
	return errors.Join(err, waitErr, releaseErr)
}

// answers checks that the process serves. The first connection also tells the process
// that a daemon knows of it.
func (p *Process) answers(ctx context.Context) error {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	go func() {
		select {
		case <-p.done: // the process will never accept
			cancel()
		case <-ctx.Done():
		}
	}()
	c, err := netctl.Dial(ctx, p.cfg.control())
	if err != nil {
		if why := p.Ended(); why != nil {
			return why
		}
		return err
	}
	return c.Close()
}

func (c Config) write(id procid.ID) error {
	boot, err := procid.BootID()
	if err != nil {
		return err
	}
	b, err := json.Marshal(record{id, boot})
	if err != nil {
		return err
	}
	// A crash of the host ends the netd, so the record need not be durable.
	if err := durable.ReplaceVolatile(c.record(), append(b, '\n'), 0o600); err != nil {
		return fmt.Errorf("write down the process of netd: %w", err)
	}
	return nil
}

// Find opens the netd that runs in a folder. If no netd runs there, the error is
// ErrNone.
func Find(cfg Config) (*Process, error) {
	fail := func(err error) (*Process, error) {
		return nil, fmt.Errorf("find the netd in %s: %w", cfg.Folder, err)
	}
	b, err := os.ReadFile(cfg.record())
	if errors.Is(err, fs.ErrNotExist) {
		return fail(ErrNone)
	}
	if err != nil {
		return fail(err)
	}
	var r record
	if err := json.Unmarshal(b, &r); err != nil {
		return fail(fmt.Errorf("%s is damaged: %w: remove the folder if no netd runs", cfg.record(), err))
	}
	boot, err := procid.BootID()
	if err != nil {
		return fail(err)
	}
	if r.BootID != boot || !r.Process.Alive() {
		return fail(ErrNone)
	}
	p := &Process{cfg: cfg, id: r.Process, done: make(chan struct{})}
	if p.handle, err = procid.Adopt(r.Process); errors.Is(err, unix.ESRCH) {
		return fail(ErrNone)
	} else if err != nil {
		return fail(err)
	}
	if p.cell, err = cfg.Jail.Find(r.Process.PID); err != nil {
		closeErr := p.handle.Close()
		if !r.Process.Alive() {
			err = ErrNone
		}
		return fail(errors.Join(err, closeErr))
	}
	go p.watch()
	return p, nil
}

// watch waits for the end of the process, and frees its resources.
func (p *Process) watch() {
	defer close(p.done)
	err := p.handle.Wait()
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.left {
		p.end = errLeft
		return
	}
	p.over = true
	p.end = fmt.Errorf("netd (process %d) has ended%s", p.id.PID, p.reap())
	if err != nil {
		p.end = errors.Join(p.end, err)
	}
	if closeErr := p.handle.Close(); closeErr != nil {
		p.end = errors.Join(p.end, closeErr)
	}
}

var errLeft = errors.New("netd is left to others")

// reap frees the cell, and says how the process has ended.
func (p *Process) reap() string {
	how := ""
	if p.child != nil {
		if state, err := p.child.Wait(); err == nil {
			how += ": " + state.String()
		}
	}
	kills, err := p.cell.Release()
	if kills > 0 {
		how += ": the kernel has killed it for want of memory"
	}
	if err != nil {
		how += fmt.Sprintf(": what it occupied is not free: %v", err)
	}
	if words := p.lastWords(); words != "" {
		how += ": " + words
	}
	return how
}

// maxWords bounds how much of a netd's last words is quoted in an error.
const maxWords = 2 << 10

// lastWords returns the beginning of a stack trace, which contains the reason, or
// else the end of the log.
func (p *Process) lastWords() string {
	b, err := os.ReadFile(p.cfg.stderr()) // netd cannot write more than 1 MiB
	if err != nil {
		return ""
	}
	words := strings.TrimSpace(strings.ToValidUTF8(string(b), "�"))
	for _, trace := range []string{"\npanic: ", "\nfatal error: "} {
		if at := strings.Index("\n"+words, trace); at >= 0 {
			return words[at:min(len(words), at+maxWords)]
		}
	}
	return words[max(0, len(words)-maxWords):]
}

// PID is the number of the process.
func (p *Process) PID() int { return p.id.PID }

// Dial connects to the process.
func (p *Process) Dial(ctx context.Context) (*netctl.Client, error) {
	return netctl.Dial(ctx, p.cfg.control())
}

// Done is closed when the process has ended and its user id and cgroup are free. It
// is also closed by Leave.
func (p *Process) Done() <-chan struct{} { return p.done }

// Ended says how the process has ended; nil while it runs.
func (p *Process) Ended() error {
	select {
	case <-p.done:
		return p.end
	default:
		return nil
	}
}

// Kill ends the process at once, and waits until its resources are free. A process
// that has ended is no error.
func (p *Process) Kill(ctx context.Context) error {
	p.handle.Kill()
	select {
	case <-p.done:
		return nil
	case <-ctx.Done():
		return fmt.Errorf("kill netd (process %d): %w", p.id.PID, ctx.Err())
	}
}

// Leave releases the process, which runs on, as if this daemon had ended.
func (p *Process) Leave() error {
	p.mu.Lock()
	if p.over || p.left {
		p.mu.Unlock()
		return nil
	}
	p.left = true
	err := p.handle.Close()
	p.mu.Unlock()
	<-p.done
	if p.child != nil {
		err = errors.Join(err, p.child.Release())
	}
	return errors.Join(err, p.cell.Disown())
}

// Remove ends the netd of a folder, if one runs, and deletes the folder.
func Remove(ctx context.Context, cfg Config) error {
	p, err := Find(cfg)
	if err == nil {
		err = p.Kill(ctx)
	} else if errors.Is(err, ErrNone) {
		err = cfg.Jail.Sweep() // frees a netd that has ended while no daemon was watching
	}
	if err == nil {
		err = os.RemoveAll(cfg.Folder)
	}
	if err != nil {
		return fmt.Errorf("remove the netd in %s: %w", cfg.Folder, err)
	}
	return nil
}
