package gvisor

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"

	"agentrun.dev/internal/engine"
	"agentrun.dev/internal/gvisorctl"
	"agentrun.dev/internal/jail"
	"agentrun.dev/internal/layer"
	"agentrun.dev/internal/procid"
	"agentrun.dev/internal/snapshot"
	"golang.org/x/sys/unix"
)

// lockName is the file that a living helper has locked.
const lockName = "lock"

// lockRunDir keeps others from sweeping, or from making sandboxes meanwhile.
func (e *Engine) lockRunDir(how int) (unlock func(), err error) {
	f, err := os.OpenFile(filepath.Join(e.cfg.RunDir, "."+lockName), os.O_RDWR|os.O_CREATE, 0o600)
	if err != nil {
		return nil, fmt.Errorf("lock the folder of sandboxes: %w", err)
	}
	for {
		if err = unix.Flock(int(f.Fd()), how); !errors.Is(err, unix.EINTR) {
			break
		}
	}
	if err != nil {
		return nil, errors.Join(fmt.Errorf("lock the folder of sandboxes: %w", err), f.Close())
	}
	return func() { _ = f.Close() }, nil // only a lock
}

// Sweep frees what sandboxes have left that ended while nobody watched.
func (e *Engine) Sweep() error {
	groups, err := e.groups()
	if err != nil {
		return err
	}
	return e.sweep(groups)
}

func (e *Engine) sweep(groups *jail.Groups) error {
	unlock, err := e.lockRunDir(unix.LOCK_EX)
	if err != nil {
		return err
	}
	defer unlock()
	entries, err := os.ReadDir(e.cfg.RunDir)
	if err != nil {
		return fmt.Errorf("sweep: %w", err)
	}
	var errs []error
	for _, d := range entries {
		if !d.IsDir() || inUse(filepath.Join(e.cfg.RunDir, d.Name(), lockName)) {
			continue
		}
		// The processes of one that was killed just now are still ending. The
		// folder goes last: without it nobody would find the group.
		if groups != nil {
			g, err := groups.Open(groupName(d.Name()))
			if err == nil {
				_, err = g.Release()
			}
			if err != nil && !errors.Is(err, fs.ErrNotExist) {
				errs = append(errs, err)
				continue
			}
		}
		errs = append(errs, os.RemoveAll(e.runDirOf(d.Name())))
	}
	return errors.Join(errs...)
}

// inUse reports whether somebody holds the lock.
func inUse(path string) bool {
	f, err := os.Open(path)
	if err != nil {
		return false
	}
	defer func() { _ = f.Close() }() // only a lock
	return errors.Is(unix.Flock(int(f.Fd()), unix.LOCK_EX|unix.LOCK_NB), unix.EWOULDBLOCK)
}

// KeepResident frees the resident pages that are not used, and checkpoints that
// were never finished.
func (e *Engine) KeepResident(used func(layer.Digest) bool) (removed int, err error) {
	removed, err = e.resident.Keep(used)
	return removed, errors.Join(err, e.removeCheckpoints())
}

// ProcessStats reads the memory of a sandbox by its helper.
func (e *Engine) ProcessStats(pid int) (engine.Stats, error) { return ProcessStats(pid) }

// Identify says by which process a sandbox is found again.
func (e *Engine) Identify(sb engine.Sandbox) (procid.ID, error) {
	s, err := own(sb)
	if err != nil {
		return procid.ID{}, err
	}
	return procid.Of(s.helper)
}

// Detach leaves a sandbox that was forked with a Socket to itself.
func (e *Engine) Detach(sb engine.Sandbox) error {
	s, err := own(sb)
	if err != nil {
		return err
	}
	return errors.Join(s.agent.Close(), s.release(), s.process.Detach())
}

func own(sb engine.Sandbox) (*sandbox, error) {
	switch s := sb.(type) {
	case *sandbox:
		return s, nil
	case *attached:
		return s.sandbox, nil
	}
	return nil, fmt.Errorf("%T is no sandbox of gVisor", sb)
}

// Detach leaves the process alone; one that has ended is fine.
func (p *process) Detach() error {
	if err := p.conn.Close(); !errors.Is(err, os.ErrClosed) {
		return err
	}
	return nil
}

// attached is a sandbox that lives on when its connection ends.
type attached struct{ *sandbox }

// Prepare has nothing to do: a checkpoint needs no help from the agent.
func (a *attached) Prepare(ctx context.Context) error { return ctx.Err() }

// Detach leaves the sandbox alone.
func (a *attached) Detach() error {
	return errors.Join(a.agent.Close(), a.release(), a.process.Detach(), a.parent.Close())
}

// Attach connects to a sandbox that was forked from snap with a Socket.
func (e *Engine) Attach(ctx context.Context, snap *snapshot.Snapshot, opts engine.ForkOptions, id procid.ID) (engine.Attached, error) {
	s, err := e.describe(snap, opts.Hostname)
	if err != nil {
		return nil, err
	}
	s.attachable = true
	if s.process, err = e.attach(ctx, opts.Socket, id); err != nil {
		return nil, errors.Join(err, s.root.release())
	}
	err = s.dialAgent(ctx)
	if err == nil {
		// One that was claimed after it was forked has a higher generation.
		info, infoErr := s.agent.Info(ctx)
		s.generation.Store(info.Generation)
		err = infoErr
	}
	if err != nil {
		return nil, errors.Join(err, s.process.Detach(), s.root.release())
	}
	return &attached{s}, nil
}

// AttachProcess connects to the process of a sandbox, which may stand still.
func (e *Engine) AttachProcess(ctx context.Context, socket string, id procid.ID) (engine.Process, error) {
	return e.attach(ctx, socket, id)
}

func (e *Engine) attach(ctx context.Context, socket string, id procid.ID) (*process, error) {
	held, err := procid.Adopt(id)
	if errors.Is(err, unix.ESRCH) {
		return nil, fmt.Errorf("%w: its process is gone", engine.ErrEnded)
	}
	if err != nil {
		return nil, err
	}
	conn, err := gvisorctl.Dial(socket)
	if err != nil {
		if !id.Alive() { // and nobody has reaped it
			err = fmt.Errorf("%w: its process is gone", engine.ErrEnded)
		}
		return nil, errors.Join(err, held.Close())
	}
	p := &process{
		engine: e, helper: id.PID, held: held, conn: conn, nextID: 1,
		done: make(chan struct{}), waiting: map[uint64]chan *gvisorctl.Message{},
	}
	go p.receive()
	reply, err := p.request(ctx, &gvisorctl.Message{Op: gvisorctl.OpDescribe})
	if err != nil {
		return nil, errors.Join(err, p.Detach())
	}
	p.id, p.sentry = reply.Create.ID, reply.SentryPID
	groups, err := e.groups()
	if err == nil && groups != nil {
		p.group, err = groups.Open(groupName(p.id))
	}
	if err != nil {
		return nil, errors.Join(err, p.Detach())
	}
	return p, nil
}

// StopListening ends a helper of which only its socket is known. Nobody there
// is fine.
func (e *Engine) StopListening(ctx context.Context, socket string) error {
	conn, err := gvisorctl.Dial(socket)
	if errors.Is(err, unix.ECONNREFUSED) || errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err != nil {
		return err
	}
	stop := context.AfterFunc(ctx, func() { _ = conn.Close() })
	defer stop()
	if err := conn.Send(&gvisorctl.Message{Op: gvisorctl.OpStop, ID: 1}); err != nil {
		return errors.Join(err, conn.Close())
	}
	for {
		if _, _, err := conn.Receive(); err != nil {
			return errors.Join(ctx.Err(), conn.Close()) // it has gone
		}
	}
}

// removeCheckpoints deletes the folders of checkpoints that killed processes
// have left.
func (e *Engine) removeCheckpoints() error {
	entries, err := os.ReadDir(e.cfg.Resident)
	if err != nil {
		return err
	}
	var errs []error
	for _, d := range entries {
		dir := filepath.Join(e.cfg.Resident, d.Name())
		if d.IsDir() && strings.HasPrefix(d.Name(), checkpointPrefix) && !inUse(dir) {
			errs = append(errs, os.RemoveAll(dir))
		}
	}
	return errors.Join(errs...)
}
