package microvm

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"

	"agentrun.dev/internal/engine"
	"agentrun.dev/internal/layer"
	"agentrun.dev/internal/snapshot"
	"golang.org/x/sys/unix"
)

// folder is what a sandbox that outlives its parent is found by:
//
//	control       the vmm's socket
//	from/         the snapshot that it comes from, in hard links: the sandbox
//	              does not need the original
//	process.json  written last: which process it is
type folder string

func (f folder) control() string { return filepath.Join(string(f), "control") }
func (f folder) from() string    { return filepath.Join(string(f), "from") }
func (f folder) record() string  { return filepath.Join(string(f), "process.json") }

// processRecord is what process.json holds.
type processRecord struct {
	Process ProcessID `json:"process"`
	// BootID is the host's: process ids are good until it restarts.
	BootID   string `json:"boot_id"`
	Hostname string `json:"hostname"`
	// Generation is at least the sandbox's.
	Generation uint64 `json:"generation"`
	// Based says that memory and disks are those of the snapshot and what was
	// written since. Otherwise there are layers in between that only the process
	// has: who adopts it copies all of it with the next capture.
	Based bool `json:"based"`
}

// prepare makes the folder ready for a sandbox that is about to be started, and
// the sandbox independent of the snapshot that it comes from.
func (f folder) prepare(s *sandbox) (err error) {
	if s.parent == nil {
		return errors.New("a fork of a sandbox that was booted cannot outlive this process: snapshot it first, and fork the snapshot")
	}
	if s.parent, err = s.parent.Clone(f.from()); err != nil {
		return err
	}
	s.ownParent = true
	return nil
}

// write says which process the sandbox is.
func (f folder) write(s *sandbox, based bool) (err error) {
	r := processRecord{Hostname: s.hostname, Generation: s.generation.Load(), Based: based}
	if r.Process, err = identify(s.Pid()); err != nil {
		return err
	}
	if r.BootID, err = bootID(); err != nil {
		return err
	}
	return f.replace(r)
}

// change changes what is written down, unless there is no folder. What is
// written is so before it happens.
func (f folder) change(do func(*processRecord)) error {
	if f == "" {
		return nil
	}
	r, err := f.read()
	if err != nil {
		return err
	}
	old := r
	if do(&r); r == old {
		return nil
	}
	return f.replace(r)
}

func (f folder) replace(r processRecord) error {
	b, err := json.Marshal(r)
	if err != nil {
		return err
	}
	// A crash of the host ends the sandbox: nothing has to be durable.
	temp := f.record() + ".new"
	if err := os.WriteFile(temp, append(b, '\n'), 0o600); err != nil {
		return fmt.Errorf("write down the sandbox's process: %w", err)
	}
	if err := os.Rename(temp, f.record()); err != nil {
		return fmt.Errorf("write down the sandbox's process: %w", err)
	}
	return nil
}

func (f folder) read() (r processRecord, err error) {
	b, err := os.ReadFile(f.record())
	if err != nil {
		return r, fmt.Errorf("read which process the sandbox is: %w", err)
	}
	if err := json.Unmarshal(b, &r); err != nil {
		return r, fmt.Errorf("%s is damaged: %w", f.record(), err)
	}
	return r, nil
}

// alive returns the record of a process that runs.
func (f folder) alive() (processRecord, error) {
	r, err := f.read()
	if err != nil {
		return r, err
	}
	boot, err := bootID()
	if err == nil && r.BootID != boot {
		err = fmt.Errorf("%w when this machine restarted", engine.ErrEnded)
	}
	return r, err
}

// SnapshotOf is the snapshot that the sandbox in a folder comes from.
func SnapshotOf(dir string) string { return folder(dir).from() }

// ProcessOf is the process of the sandbox in a folder. One that is gone is
// ErrEnded.
func ProcessOf(dir string) (pid int, err error) {
	r, err := folder(dir).alive()
	if err == nil && !r.Process.Alive() {
		err = fmt.Errorf("%w: its process is gone", engine.ErrEnded)
	}
	return r.Process.PID, err
}

func bootID() (string, error) {
	b, err := os.ReadFile("/proc/sys/kernel/random/boot_id")
	if err != nil {
		return "", fmt.Errorf("read this machine's boot id: %w", err)
	}
	return strings.TrimSpace(string(b)), nil
}

// Adopt connects to a sandbox that was forked with a folder.
func (e *Engine) Adopt(_ context.Context, dir string) (engine.Sandbox, error) {
	s, err := e.adopt(folder(dir))
	if err != nil {
		return nil, fmt.Errorf("adopt the sandbox in %s: %w", dir, err)
	}
	return s, nil
}

func (e *Engine) adopt(f folder) (_ *sandbox, err error) {
	r, err := f.alive()
	if err != nil {
		return nil, err
	}
	snap, err := snapshot.Open(f.from())
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
	s.folder, s.ownParent = f, true
	s.generation.Store(r.Generation)
	if !r.Based {
		s.forget()
	}
	p, err := attach(e.vmm, f.control(), r.Process)
	if errors.Is(err, unix.ESRCH) {
		err = fmt.Errorf("%w: its process is gone", engine.ErrEnded)
	}
	if err != nil {
		return nil, err
	}
	p.paused.Store(true) // it may be
	s.Guest = &Guest{Process: p}
	return s, nil
}

// forget is for a sandbox of whose images nothing is known: all of it is stored
// with the next capture.
func (s *sandbox) forget() {
	all := func(im *layer.Image) []layer.Run {
		*im = layer.Image{Size: im.Size}
		return []layer.Run{{Length: im.Size}}
	}
	memory := s.memory
	s.owed = all(&memory)
	s.setMemory(memory)
	for i := range s.disks {
		if d := &s.disks[i]; !d.readOnly {
			d.owed = all(&d.image)
		}
	}
}

// Resume lets a paused sandbox go on. One that was adopted gets a session with
// its agent.
func (s *sandbox) Resume(ctx context.Context) error {
	if err := s.Process.Resume(ctx); err != nil || s.Agent() != nil {
		return err
	}
	g, err := dialAgent(ctx, s.Process)
	if err != nil {
		return err
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.Guest.Agent != nil { // somebody else was faster
		return g.Agent.Close()
	}
	s.Guest.Agent = g.Agent
	return nil
}

// Detach leaves the sandbox to itself; one that has ended is fine.
func (s *sandbox) Detach() error {
	if s.folder == "" {
		return errors.New("detach: the sandbox has no folder to be found by: it can only be closed")
	}
	return errors.Join(s.closeAgent(), s.leave(), s.Process.Detach())
}

// Detach leaves the process alone; one that has ended is fine.
func (p *Process) Detach() error {
	if err := p.conn.Close(); !errors.Is(err, os.ErrClosed) {
		return err
	}
	return nil
}

// Remove ends what runs in a folder and deletes it.
func (e *Engine) Remove(ctx context.Context, dir string) error {
	f := folder(dir)
	r, err := f.alive()
	if err == nil {
		err = r.Process.Kill(ctx)
	} else {
		// Nothing is written down, but it may have been started.
		err = StopListening(ctx, f.control())
	}
	if err == nil {
		err = os.RemoveAll(dir)
	}
	if err != nil {
		return fmt.Errorf("remove the sandbox in %s: %w", dir, err)
	}
	return e.vmm.Sweep()
}

// Keep frees the memory layers that neither the sandboxes in these folders nor
// these snapshots use, and what sandboxes left that ended while nobody watched.
// What runs keeps what it has mapped.
func (e *Engine) Keep(folders, snapshots []string) error {
	used := map[layer.Digest]bool{}
	for _, f := range folders {
		snapshots = append(snapshots, folder(f).from())
	}
	for _, dir := range snapshots {
		snap, err := snapshot.Open(dir)
		if err != nil {
			continue // it is being made, or being removed
		}
		for _, ref := range snap.Manifest().Layers() {
			used[ref.Digest] = true
		}
		_ = snap.Close() // only read
	}
	_, err := e.resident.Keep(func(d layer.Digest) bool { return used[d] })
	return errors.Join(err, e.vmm.Sweep())
}
