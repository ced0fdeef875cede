package microvm

import (
	"context"
	"errors"
	"fmt"
	"os"

	"agentrun.dev/internal/engine"
	"agentrun.dev/internal/engine/folder"
	"agentrun.dev/internal/engine/identity"
	"agentrun.dev/internal/engine/microvm/process"
	"agentrun.dev/internal/guest/guestrpc"
	"agentrun.dev/internal/storage/extent"
	"agentrun.dev/internal/storage/layer"
	"agentrun.dev/internal/storage/snapshot"
	"agentrun.dev/internal/vmm/vmmctl"
	"golang.org/x/sys/unix"
)

// settleIn gives the sandbox its own copy of its source snapshot.
func (s *sandbox) settleIn() (err error) {
	if s.parent, err = s.self.Folder.Prepare(s.parent); err != nil {
		return err
	}
	s.ownParent = true
	return nil
}

// Adopt connects to a sandbox that was forked with a folder.
func (e *Engine) Adopt(_ context.Context, dir string) (engine.Sandbox, error) {
	s, err := e.adopt(folder.Folder(dir))
	if err != nil {
		return nil, fmt.Errorf("adopt the sandbox in %s: %w", dir, err)
	}
	return s, nil
}

func (e *Engine) adopt(f folder.Folder) (_ *sandbox, err error) {
	r, err := f.Read()
	if err != nil {
		return nil, err
	}
	snap, err := snapshot.Open(f.From(), snapshot.WithKey(e.key))
	if err != nil {
		return nil, err
	}
	defer func() {
		if err != nil {
			err = errors.Join(err, snap.Close())
		}
	}()
	s, err := e.describe(snap, r.Hostname)
	if err != nil {
		return nil, err
	}
	s.self.Folder, s.ownParent, s.filesOnly = f, true, r.Speaks() < vmmctl.SinceStream
	s.self.Generation.Store(r.Generation)
	if !r.Based {
		s.forget()
	}
	p, err := process.Attach(e.vmm, f.Control(), r.Process, s.memory.Size, r.Speaks())
	if errors.Is(err, unix.ESRCH) {
		err = fmt.Errorf("%w: its process is gone", engine.ErrEnded)
	}
	if err != nil {
		return nil, err
	}
	if err := e.restoreLimit(s, p); err != nil {
		return nil, errors.Join(err, p.Detach())
	}
	s.Guest = &Guest{Process: p}
	switch {
	case s.network == nil:
	case p.Protocol() >= vmmctl.SincePlug:
		s.FindWire(s.rewire)
	default:
		s.FindWire(func() (*os.File, error) { return nil, engine.ErrOldWire })
	}
	return s, nil
}

// restoreLimit lowers a memory limit that an earlier parent has raised for a capture.
// The limit stays while the vmm process maps files of such captures, since their
// pages are charged to it for that long.
func (e *Engine) restoreLimit(s *sandbox, p *process.Process) error {
	if len(p.Mapped()) > 0 {
		return nil
	}
	limits, err := e.limits(s, engine.Limits{})
	if err != nil {
		return err
	}
	return p.Cell().Restore(limits.Memory)
}

// forget discards the stacks of a sandbox whose stacks are not known to be right. The
// next capture then stores memory and disks in full.
func (s *sandbox) forget() {
	all := func(stack *layer.Stack) []extent.Run {
		*stack = layer.Stack{Size: stack.Size}
		return []extent.Run{{Length: stack.Size}}
	}
	memory := s.memory
	s.owed = all(&memory)
	s.setMemory(memory)
	for i := range s.disks {
		if d := &s.disks[i]; !d.readOnly {
			d.owed = all(&d.stack)
		}
	}
}

// Resume lets a paused sandbox go on and sets its wall clock. An adopted sandbox also
// gets a session with its agent. If the session or the clock fails, the sandbox is
// paused again.
func (s *sandbox) Resume(ctx context.Context) error {
	agent, paused := s.Agent(), s.Paused()
	if agent != nil && !paused {
		return s.Process.Resume(ctx)
	}
	wait, err := s.PostResume()
	if err != nil {
		return err
	}
	if agent == nil { // adopted: only the vmm knows whether the sandbox stands still
		// The wait ignores the end of ctx: Resume has to know whether the sandbox
		// stood still, so that it can pause it again.
		if paused, err = wait(context.WithoutCancel(ctx)); err == nil {
			agent, err = s.meetAgent(ctx)
		}
		if !paused {
			return err
		}
		if err == nil {
			err = identity.SetClock(ctx, agent)
		}
	} else {
		// The request is sent at once, and the agent finds it when it wakes up.
		err = identity.SetClock(ctx, agent)
		_, waitErr := wait(ctx)
		err = errors.Join(waitErr, err)
	}
	if err != nil {
		return errors.Join(err, s.Pause(context.WithoutCancel(ctx)))
	}
	return nil
}

// meetAgent opens a session with the agent of an adopted sandbox.
func (s *sandbox) meetAgent(ctx context.Context) (*guestrpc.Client, error) {
	g, err := dialAgent(ctx, s.Process)
	if err != nil {
		return nil, err
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.Guest.Agent != nil { // another call was faster
		return s.Guest.Agent, g.Agent.Close()
	}
	s.Guest.Agent = g.Agent
	return g.Agent, nil
}

// Detach releases the sandbox and lets it run. A sandbox that has ended is no error.
func (s *sandbox) Detach() error {
	if s.self.Folder == "" {
		return errors.New("detach: the sandbox has no folder to be found by: it can only be closed")
	}
	return errors.Join(s.closeAgent(), s.leave(), s.Process.Detach())
}

// Remove ends the machine of a folder and deletes the folder.
func (e *Engine) Remove(ctx context.Context, dir string) error {
	if err := folder.Folder(dir).Remove(ctx, process.StopListening); err != nil {
		return err
	}
	return e.vmm.Sweep()
}

// Inspect returns the process that runs in a folder, and its cost.
func (e *Engine) Inspect(dir string) (pid int, st engine.Stats, err error) {
	if pid, err = folder.Folder(dir).Process(); err == nil {
		st, err = ProcessStats(pid)
	}
	return pid, st, err
}

// Drop frees memory layers.
func (e *Engine) Drop(ids []string) error { return e.resident.Drop(ids) }

// Keep frees the memory layers that neither the sandboxes in these folders nor
// these snapshots use.
func (e *Engine) Keep(folders, snapshots []string) error {
	used := folder.Layers(folders, snapshots)
	_, err := e.resident.Keep(func(d layer.Digest) bool { return used[d] })
	return errors.Join(err, e.vmm.Sweep())
}
