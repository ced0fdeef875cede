package local

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"

	"agentrun.dev/internal/engine"
	"agentrun.dev/internal/engine/pick"
	"agentrun.dev/internal/snapshot"
)

// Pause stops a sandbox's processors. It keeps its memory.
func (s *Store) Pause(ctx context.Context, name Name) error {
	return s.still(ctx, name, func(p engine.Process, r *record) error {
		r.Paused = true
		return p.Pause(ctx)
	})
}

// still changes whether a sandbox runs, and writes that down.
func (s *Store) still(ctx context.Context, name Name, change func(engine.Process, *record) error) (err error) {
	r, err := s.record(name)
	if err != nil {
		return err
	}
	if r.Hibernated {
		return fmt.Errorf("sandbox %s is hibernated: agentrun resume %s wakes it", name, name)
	}
	e, err := s.engine(r.engine())
	if err != nil {
		return err
	}
	p, err := e.AttachProcess(ctx, filepath.Join(s.sandboxDir(name), controlName), r.Process)
	if err != nil {
		return fmt.Errorf("sandbox %s: %w", name, err)
	}
	defer func() { err = errors.Join(err, p.Detach()) }()
	if err := change(p, &r); err != nil {
		return fmt.Errorf("sandbox %s: %w", name, err)
	}
	return s.write(name, r)
}

// Resume lets a sandbox go on that was paused or hibernated; one that runs is
// left alone. A sandbox that wakes is still itself: its host name and machine
// id stay, its clock is set and its random numbers are reseeded.
func (s *Store) Resume(ctx context.Context, name Name) error {
	r, err := s.record(name)
	switch {
	case err != nil:
		return err
	case r.Hibernated:
		return s.wake(ctx, name, r)
	case !r.Paused:
		return nil
	}
	return s.still(ctx, name, func(p engine.Process, r *record) error {
		r.Paused = false
		return p.Resume(ctx)
	})
}

// Hibernate writes a sandbox to disk and frees its memory. It stands still from
// the moment of the capture on, so nothing is lost when this is interrupted.
func (s *Store) Hibernate(ctx context.Context, name Name) (err error) {
	r, err := s.record(name)
	if err != nil {
		return err
	}
	if r.Hibernated {
		return nil
	}
	if r.Paused { // its agent has to prepare the capture
		if err := s.Resume(ctx, name); err != nil {
			return err
		}
		r.Paused = false
	}
	sb, err := s.Attach(ctx, name)
	if err != nil {
		return err
	}
	detach := sb.Detach
	defer func() { err = errors.Join(err, detach()) }()
	next := nextFrom(r.From)
	dir := filepath.Join(s.sandboxDir(name), next)
	// Of an attempt that was interrupted.
	if err := errors.Join(os.RemoveAll(dir), snapshot.CleanTemp(s.sandboxDir(name))); err != nil {
		return fmt.Errorf("hibernate %s: %w", name, err)
	}
	if err := sb.Prepare(ctx); err != nil {
		return fmt.Errorf("hibernate %s: %w", name, err)
	}
	if err := sb.Pause(ctx); err != nil {
		return fmt.Errorf("hibernate %s: %w", name, err)
	}
	if err := s.capture(ctx, sb, dir); err != nil {
		return errors.Join(fmt.Errorf("hibernate %s: %w", name, err), sb.Resume(ctx))
	}
	old, process := r.From, r.Process
	r.From, r.Hibernated = next, true
	if err := s.write(name, r); err != nil {
		return errors.Join(err, sb.Resume(ctx))
	}
	if err := process.Kill(ctx); err != nil {
		return fmt.Errorf("hibernate %s: %w", name, err)
	}
	return errors.Join(os.RemoveAll(filepath.Join(s.sandboxDir(name), old)), s.tidy())
}

// wake forks a sandbox from what was written when it was hibernated.
func (s *Store) wake(ctx context.Context, name Name, r record) (err error) {
	dir := s.sandboxDir(name)
	control := filepath.Join(dir, controlName)
	// Whoever was interrupted may have left a process: the one that was
	// captured, or one that woke and that nobody knows of.
	e, err := s.engine(r.engine())
	if err != nil {
		return fmt.Errorf("resume %s: %w", name, err)
	}
	if err := errors.Join(r.Process.Kill(ctx), e.StopListening(ctx, control), removeIfThere(control)); err != nil {
		return fmt.Errorf("resume %s: %w", name, err)
	}
	snap, err := snapshot.Open(filepath.Join(dir, r.From))
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, snap.Close()) }()
	sb, err := e.Fork(ctx, snap, engine.ForkOptions{
		Hostname: string(name), Socket: control, KeepIdentity: true, Limits: r.Limits,
	})
	if err != nil {
		return fmt.Errorf("resume %s: %w", name, err)
	}
	r.Hibernated, r.Snapshot = false, snap.ID().String()
	if err := s.leave(e, sb, name, r); err != nil {
		return errors.Join(err, sb.Close())
	}
	return nil
}

// nextFrom names the folder after the one that a sandbox was forked from.
func nextFrom(from string) string {
	n, _ := strconv.Atoi(strings.TrimPrefix(from, fromName+"-")) // the first has no number
	return fromName + "-" + strconv.Itoa(n+1)
}

// write replaces a sandbox's record.
func (s *Store) write(name Name, r record) error {
	b, err := json.MarshalIndent(r, "", "  ")
	if err != nil {
		return err
	}
	path := filepath.Join(s.sandboxDir(name), recordName)
	if err := os.WriteFile(path+".tmp", append(b, '\n'), 0o600); err != nil {
		return fmt.Errorf("sandbox %s: %w", name, err)
	}
	if err := os.Rename(path+".tmp", path); err != nil {
		return fmt.Errorf("sandbox %s: %w", name, err)
	}
	return nil
}

// leave writes down which process a sandbox is, and lets it go.
func (s *Store) leave(e engine.Survivor, sb engine.Sandbox, name Name, r record) (err error) {
	if r.BootID, err = bootID(); err != nil {
		return err
	}
	if r.Process, err = e.Identify(sb); err != nil {
		return err
	}
	if r.Engine, err = pick.Of(e.Name()); err != nil {
		return err
	}
	if err := s.write(name, r); err != nil {
		return err
	}
	return e.Detach(sb)
}

func removeIfThere(path string) error {
	if err := os.Remove(path); err != nil && !errors.Is(err, os.ErrNotExist) {
		return err
	}
	return nil
}
