package gvisor

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"

	"agentrun.dev/internal/engine"
	"agentrun.dev/internal/engine/folder"
	"agentrun.dev/internal/engine/gvisorctl"
	"agentrun.dev/internal/engine/trust"
	"agentrun.dev/internal/host/jail"
	"agentrun.dev/internal/host/procid"
	"agentrun.dev/internal/storage/layer"
	"agentrun.dev/internal/storage/snapshot"
	"golang.org/x/sys/unix"
)

// lockName is the file that a living helper keeps locked.
const lockName = "lock"

// lockRunDir locks the folder of sandboxes against sweeping (LOCK_SH) or against
// making sandboxes (LOCK_EX).
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
	return func() { _ = f.Close() }, nil // nothing was written to it
}

// Sweep frees the remains of sandboxes that ended while no process was watching.
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
		// The processes of a sandbox that was killed just now are still ending. The
		// folder is deleted last, because the group is found through it.
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

// inUse reports whether a process holds the lock.
func inUse(path string) bool {
	f, err := os.Open(path)
	if err != nil {
		return false
	}
	defer func() { _ = f.Close() }() // nothing was written to it
	return errors.Is(unix.Flock(int(f.Fd()), unix.LOCK_EX|unix.LOCK_NB), unix.EWOULDBLOCK)
}

// Drop frees resident pages.
func (e *Engine) Drop(ids []string) error { return e.resident.Drop(ids) }

// Keep frees the resident pages that neither the sandboxes in these folders nor these
// snapshots use. It also frees the remains of sandboxes that ended while no process
// was watching.
func (e *Engine) Keep(folders, snapshots []string) error {
	used := folder.Layers(folders, snapshots)
	_, err := e.resident.Keep(func(d layer.Digest) bool { return used[d] })
	return errors.Join(err, e.Sweep())
}

// Inspect returns the helper that runs in a folder, and its cost.
func (e *Engine) Inspect(dir string) (pid int, st engine.Stats, err error) {
	if pid, err = folder.Folder(dir).Process(); err == nil {
		st, err = ProcessStats(pid)
	}
	return pid, st, err
}

// Identify returns the id of a sandbox's helper process.
func Identify(sb engine.Sandbox) (procid.ID, error) {
	s, ok := sb.(*sandbox)
	if !ok {
		return procid.ID{}, fmt.Errorf("identify: %T is no sandbox of gVisor", sb)
	}
	return procid.Of(s.helper)
}

// Remove ends the machine of a folder and deletes the folder.
func (e *Engine) Remove(ctx context.Context, dir string) error {
	if err := folder.Folder(dir).Remove(ctx, stopListening); err != nil {
		return err
	}
	return e.Sweep()
}

// Detach releases the sandbox and lets it run. A sandbox that has ended is no error.
func (s *sandbox) Detach() error {
	if s.self.Folder == "" {
		return errors.New("detach: the sandbox has no folder to be found by: it can only be closed")
	}
	return errors.Join(s.closeAgent(), s.release(), s.process.Detach())
}

// Detach releases the helper and lets it run. A helper that has ended is no error.
func (p *process) Detach() error {
	p.group.Leave()
	p.left.Store(true)
	p.dropProgram()
	if err := p.conn.Close(); !errors.Is(err, os.ErrClosed) {
		return err
	}
	return nil
}

// Adopt connects to a sandbox that was forked with a folder.
func (e *Engine) Adopt(ctx context.Context, dir string) (engine.Sandbox, error) {
	s, err := e.adopt(ctx, folder.Folder(dir))
	if err != nil {
		return nil, fmt.Errorf("adopt the sandbox in %s: %w", dir, err)
	}
	return s, nil
}

func (e *Engine) adopt(ctx context.Context, f folder.Folder) (_ *sandbox, err error) {
	r, err := f.Read()
	if err != nil {
		return nil, err
	}
	snap, err := snapshot.Open(f.From(), snapshot.WithKey(e.cfg.Key))
	if err != nil {
		return nil, err
	}
	s, err := e.describe(snap, r.Hostname)
	if err != nil {
		return nil, errors.Join(err, snap.Close())
	}
	s.self.Folder, s.ownParent = f, true
	s.self.Generation.Store(r.Generation)
	if s.process, err = e.attach(ctx, f.Control(), r.Process); err != nil {
		return nil, errors.Join(err, s.release())
	}
	s.process.adoptProgram(s.build)
	s.expect(s.memory + s.disk)
	s.paused.Store(true) // it may be paused
	if err := s.group.Restore(s.shape().limits(engine.Limits{}).Memory); err != nil {
		return nil, errors.Join(err, s.release(), s.process.Detach())
	}
	if s.protocol == 0 { // a helper of an older AgentRun does not report its version
		s.protocol = r.Speaks()
	}
	switch {
	case s.network == nil:
	case s.protocol >= gvisorctl.SinceWire:
		s.FindWire(s.askWire)
	default:
		s.FindWire(func() (*os.File, error) { return nil, engine.ErrOldWire })
	}
	return s, nil
}

// askWire gets the host's end of the wire from the helper. A helper that sends any
// other descriptor is killed.
func (p *process) askWire() (*os.File, error) {
	reply, err := p.request(context.Background(), &gvisorctl.Message{Op: gvisorctl.OpWire})
	if err != nil {
		return nil, fmt.Errorf("ask for the sandbox's wire: %w", err)
	}
	if reply.Wire == nil {
		return nil, p.condemn(errors.New("it has answered without the wire that it was asked for"))
	}
	if err := jail.CheckWire(reply.Wire); err != nil {
		_ = reply.Wire.Close() // it is not a wire
		return nil, p.condemn(fmt.Errorf("it has sent something else than a wire: %w", err))
	}
	return reply.Wire, nil
}

// Resume lets a paused sandbox go on. Its wall clock is the host's, which has not
// stopped. An adopted sandbox also gets a session with its agent.
func (s *sandbox) Resume(ctx context.Context) error {
	if err := s.process.Resume(ctx); err != nil || s.Agent() != nil {
		return err
	}
	return s.dialAgent(ctx)
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
		if !id.Alive() { // it has ended, but was not reaped yet
			err = fmt.Errorf("%w: its process is gone", engine.ErrEnded)
		}
		return nil, errors.Join(err, held.Close())
	}
	p := &process{
		engine: e, helper: id.PID, held: held, conn: conn, nextID: 1,
		done: make(chan struct{}), waiting: map[uint64]pending{},
	}
	p.expect(0)
	go p.receive()
	reply, err := p.request(ctx, &gvisorctl.Message{Op: gvisorctl.OpDescribe})
	if err != nil {
		return nil, errors.Join(err, p.Detach())
	}
	if reply.Create == nil {
		reply.Create = &gvisorctl.Create{}
	}
	if err := checkID(reply.Create.ID); err != nil {
		return nil, p.condemn(fmt.Errorf("it has described what cannot be: %w", err))
	}
	groups, err := e.groups()
	var group *jail.Group
	if err == nil && groups != nil {
		group, err = groups.Open(groupName(reply.Create.ID))
	}
	if err == nil && group != nil {
		// The helper may name a neighbour's sandbox. Then the neighbour's limit would
		// be changed, and its folder would be removed when this helper ends.
		var its bool
		if its, err = group.Has(id.PID); err == nil && !its {
			return nil, p.condemn(fmt.Errorf("it has described what cannot be: it is not in the group of sandbox %s", reply.Create.ID))
		}
	}
	if err != nil {
		return nil, errors.Join(err, p.Detach())
	}
	p.mu.Lock() // finish, which reaps the helper, removes the resources that these fields name
	p.id, p.group = reply.Create.ID, group
	p.mu.Unlock()
	p.sentry, p.protocol = reply.SentryPID, reply.Protocol
	return p, nil
}

// adoptProgram keeps the program of an adopted helper. If that fails, the sandbox
// goes on, and forks of it fail with the reason.
func (p *process) adoptProgram(build layer.Digest) {
	program, err := p.engine.helpers.adopt(build, p.helper)
	if err != nil {
		return
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.waiting == nil { // the helper has ended meanwhile
		program.Release()
		return
	}
	p.program = program
}

// stopListening ends a helper of which only the socket is known. If no process
// listens there, that is no error.
func stopListening(ctx context.Context, socket string) error {
	conn, err := gvisorctl.Dial(socket)
	if trust.Nobody(err) {
		return nil
	}
	if err != nil {
		return err
	}
	return trust.Stop(ctx, conn, &gvisorctl.Message{Op: gvisorctl.OpStop, ID: 1})
}
