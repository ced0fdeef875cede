package local

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"

	"agentrun.dev/internal/durable"
	"agentrun.dev/internal/engine"
	"agentrun.dev/internal/storage/snapshot"
)

// Pause stops a sandbox's vCPUs. Its memory stays.
func (s *Store) Pause(ctx context.Context, name Name) (err error) {
	r, err := s.record(name)
	if err != nil {
		return err
	}
	if r.Hibernated {
		return fmt.Errorf("sandbox %s is hibernated: agentrun resume %s wakes it", name, name)
	}
	sb, err := s.adopt(ctx, name, r)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, sb.Detach()) }()
	if err := sb.Pause(ctx); err != nil {
		return fmt.Errorf("sandbox %s: %w", name, err)
	}
	r.Paused = true
	return s.write(name, r)
}

// Resume lets a paused or hibernated sandbox continue; it does nothing to a
// running one. A sandbox that wakes is the same sandbox: it keeps its host name
// and machine id. Its clock is set and its random numbers are reseeded.
func (s *Store) Resume(ctx context.Context, name Name) error {
	r, err := s.record(name)
	if err != nil || !r.Hibernated && !r.Paused {
		return err
	}
	sb, err := s.Attach(ctx, name)
	if err != nil {
		return err
	}
	return sb.Detach()
}

// Hibernate writes a sandbox to disk and frees its memory. The sandbox stays
// paused from the capture on, so an interrupted Hibernate loses nothing.
func (s *Store) Hibernate(ctx context.Context, name Name) error {
	r, err := s.record(name)
	if err != nil || r.Hibernated {
		return err
	}
	sb, err := s.Attach(ctx, name)
	if err != nil {
		return err
	}
	asleep := s.asleepDir(name, r.Life)
	// Leftovers of an interrupted attempt.
	err = errors.Join(os.RemoveAll(asleep), snapshot.CleanTemp(s.sandboxDir(name)))
	if err == nil {
		err = sb.Pause(ctx)
	}
	if err == nil {
		err = s.capture(ctx, sb, asleep)
	}
	if err == nil {
		r.Hibernated, r.Paused = true, false
		err = s.write(name, r)
	}
	if err != nil {
		return errors.Join(fmt.Errorf("hibernate %s: %w", name, err), sb.Resume(context.WithoutCancel(ctx)), sb.Detach())
	}
	if err := errors.Join(sb.Close(), s.removeMachine(ctx, s.machineDir(name, r.Life))); err != nil {
		return fmt.Errorf("hibernate %s: %w", name, err)
	}
	return s.tidy()
}

// wake forks a sandbox from the snapshot that Hibernate wrote.
func (s *Store) wake(ctx context.Context, name Name, r record) (_ engine.Sandbox, err error) {
	asleep, machine := s.asleepDir(name, r.Life), s.machineDir(name, r.Life+1)
	// An interrupted process may have left a machine: the captured one, or one
	// that was woken but is in no record.
	for _, left := range []string{s.machineDir(name, r.Life), machine} {
		if err := s.removeMachine(ctx, left); err != nil {
			return nil, fmt.Errorf("resume %s: %w", name, err)
		}
	}
	if err := os.Mkdir(machine, 0o700); err != nil {
		return nil, fmt.Errorf("resume %s: %w", name, err)
	}
	snap, err := snapshot.Open(asleep)
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, snap.Close()) }()
	e, err := s.engineOf(snap)
	if err != nil {
		return nil, fmt.Errorf("resume %s: %w", name, err)
	}
	sb, err := e.Fork(ctx, snap, engine.ForkOptions{
		Hostname: string(name), Folder: machine, KeepIdentity: true, Limits: r.Limits,
	})
	if err != nil {
		return nil, fmt.Errorf("resume %s: %w", name, err)
	}
	r.Life++
	r.Hibernated, r.Snapshot = false, snap.ID().String()
	if err := s.write(name, r); err != nil {
		return nil, errors.Join(err, sb.Close())
	}
	if err := snapshot.Remove(asleep); err != nil { // its machine has links to the files
		return nil, errors.Join(fmt.Errorf("resume %s: %w", name, err), sb.Detach())
	}
	return sb, nil
}

// write replaces a sandbox's record.
func (s *Store) write(name Name, r record) error {
	b, err := json.MarshalIndent(r, "", "  ")
	if err != nil {
		return err
	}
	path := filepath.Join(s.sandboxDir(name), recordName)
	if err := durable.WriteFile(path, append(b, '\n'), 0o600); err != nil {
		return fmt.Errorf("sandbox %s: %w", name, err)
	}
	return nil
}

// leave writes the record of a new sandbox and detaches from it.
func (s *Store) leave(sb engine.Sandbox, name Name, r record) error {
	if err := s.write(name, r); err != nil {
		return errors.Join(err, sb.Close())
	}
	return sb.Detach()
}
