package node

import (
	"context"
	"errors"
	"fmt"
	"os"
	"time"

	"agentrun.dev/internal/engine"
	"agentrun.dev/internal/node/journal"
	"agentrun.dev/internal/sandbox"
)

// buildKey names a build.
type buildKey struct {
	Template sandbox.Key
	Revision string
	Stage    sandbox.Stage
}

func (k buildKey) String() string {
	return k.Template.String() + "/" + k.Revision + "/" + string(k.Stage)
}

func keyOf(b sandbox.Build) buildKey { return buildKey{b.Template, b.Revision, b.Stage} }

// build is a build under way.
type build struct {
	cancel context.CancelFunc
	done   chan struct{}
	log    buildLog
}

// ApplyTemplate makes a template or changes it. Pools of it follow; sandboxes
// that were claimed stay as they are. A template that has not changed and whose
// build failed is built again.
func (m *Manager) ApplyTemplate(_ context.Context, k sandbox.Key, spec sandbox.TemplateSpec) (sandbox.Template, error) {
	if err := m.begin(); err != nil {
		return sandbox.Template{}, err
	}
	if err := spec.Validate(); err != nil {
		return sandbox.Template{}, err
	}
	if err := m.checkDisk(spec); err != nil {
		return sandbox.Template{}, err
	}
	_, ca, err := m.templateCA(k.Namespace, spec)
	if err != nil {
		return sandbox.Template{}, fmt.Errorf("apply template %s: %w", k, err)
	}
	t := sandbox.Template{Key: k, Spec: spec, Revision: spec.RevisionWith(ca), Created: time.Now().UTC()}
	err = m.db.Update(func(tx *journal.Tx) error {
		old, found, err := templates.Get(tx, k.String())
		if err != nil {
			return err
		}
		if found {
			t.Created = old.Created
		}
		for _, stage := range []sandbox.Stage{sandbox.AfterInit, sandbox.AfterReady} {
			bk := buildKey{k, t.Revision, stage}
			if b, found, err := builds.Get(tx, bk.String()); err != nil {
				return err
			} else if found && b.Phase == sandbox.PhaseFailed {
				if err := builds.Delete(tx, bk.String()); err != nil {
					return err
				}
			}
		}
		return templates.Put(tx, k.String(), t)
	})
	if err != nil {
		return sandbox.Template{}, fmt.Errorf("apply template %s: %w", k, err)
	}
	m.ensureBuild(t, sandbox.AfterReady)
	m.refill()
	return t, nil
}

// ensureBuild sees to it that a template's revision is built.
func (m *Manager) ensureBuild(t sandbox.Template, stage sandbox.Stage) {
	k := buildKey{t.Key, t.Revision, stage}
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.closed || m.builds[k] != nil {
		return
	}
	if b, err := m.build(k); err == nil && (b.Phase == sandbox.PhaseReady || b.Phase == sandbox.PhaseFailed) {
		return
	}
	ctx, cancel := context.WithCancel(m.ctx)
	run := &build{cancel: cancel, done: make(chan struct{}), log: newBuildLog()}
	m.builds[k] = run
	m.work.Go(func() {
		defer cancel()
		err := m.runBuild(ctx, k, t.Spec, &run.log)
		if err != nil && ctx.Err() == nil {
			m.cfg.Log.Error("build a template", "template", t.Key, "error", err)
		}
		m.mu.Lock()
		delete(m.builds, k)
		m.mu.Unlock()
		close(run.done)
		m.refill()
	})
}

// build reads a build from the journal.
func (m *Manager) build(k buildKey) (b sandbox.Build, err error) {
	err = m.db.View(func(tx *journal.Tx) error {
		var found bool
		if b, found, err = builds.Get(tx, k.String()); err == nil && !found {
			err = sandbox.NotFound(sandbox.KindTemplate, k.Template)
		}
		return err
	})
	return b, err
}

func (m *Manager) putBuild(b sandbox.Build) error {
	return m.db.Update(func(tx *journal.Tx) error { return builds.Put(tx, keyOf(b).String(), b) })
}

// runBuild builds, and writes down what came of it.
func (m *Manager) runBuild(ctx context.Context, k buildKey, spec sandbox.TemplateSpec, log *buildLog) (err error) {
	ctx, end := m.observer.Begin(ctx, sandbox.Work{Op: sandbox.OpBuild, Template: k.Template, Stage: k.Stage})
	failed := error(nil)
	defer func() { end(sandbox.Outcome{Err: errors.Join(err, failed)}) }()
	b := sandbox.Build{Template: k.Template, Revision: k.Revision, Stage: k.Stage, Phase: sandbox.PhaseBuilding, Started: time.Now().UTC(), Snapshot: sandbox.NewID()}
	if err := m.putBuild(b); err != nil {
		return err
	}
	if err := log.open(m.logFile(b.Snapshot)); err != nil {
		return fmt.Errorf("write a build's log: %w", err)
	}
	defer func() { err = errors.Join(err, log.Close()) }()
	dir := m.snapshotDir(b.Snapshot)
	memory := m.machineMemory(spec)
	certificate, fingerprint, err := m.templateCA(k.Template.Namespace, spec)
	if err == nil {
		err = m.reserve(k.Template.Namespace, memory)
	}
	if err == nil {
		var machine engine.Sandbox
		b.Built, err = m.cfg.Builder.Build(ctx, BuildRequest{
			Spec: spec, Stage: k.Stage, Dir: dir, Log: log, TrustCA: certificate,
			Join: func(ctx context.Context, sb engine.Sandbox) (_ engine.Sandbox, err error) {
				machine, err = m.joinBuild(ctx, k.Template.Namespace, spec, sb)
				return machine, err
			},
		})
		b.Lineage, b.TrustedCA = captured(machine), fingerprint
		m.capacity.release(k.Template.Namespace, memory)
	}
	if ctx.Err() != nil { // the next daemon builds it
		return errors.Join(err, m.removeSnapshot(dir))
	}
	b.Finished = time.Now().UTC()
	b.Phase = sandbox.PhaseReady
	if err != nil {
		failed = err
		b.Phase, b.Problem = sandbox.PhaseFailed, err.Error()
		if _, werr := fmt.Fprintf(log, "the template is not built: %v\n", err); werr != nil {
			return werr
		}
		return errors.Join(m.putBuild(b), m.removeSnapshot(dir))
	}
	return m.putBuild(b)
}

// machineMemory is what a machine of a template reserves.
func (m *Manager) machineMemory(spec sandbox.TemplateSpec) uint64 {
	return m.cfg.Engine.Reserve(spec.Memory, spec.Disk)
}

// reserve takes memory for a machine of a namespace, and for what it holds.
func (m *Manager) reserve(n sandbox.Namespace, bytes uint64, held ...sandbox.Held) error {
	err := m.capacity.reserve(n, bytes, held...)
	if err != nil {
		m.observer.Refused()
	}
	return err
}

// collectBuilds deletes builds that nobody will fork any more.
func (m *Manager) collectBuilds() error {
	used := m.usedBuilds()
	var dead []sandbox.Build
	unused := func(tx *journal.Tx) error {
		dead = nil
		return builds.Each(tx, "", func(_ string, b sandbox.Build) error {
			t, found, err := templates.Get(tx, b.Template.String())
			if err == nil && !used[keyOf(b)] && (!found || t.Revision != b.Revision) {
				dead = append(dead, b)
			}
			return err
		})
	}
	if err := m.db.View(unused); err != nil || len(dead) == 0 {
		return err
	}
	// The template may have gone back to a revision since.
	err := m.db.Update(func(tx *journal.Tx) error {
		err := unused(tx)
		for _, b := range dead {
			err = errors.Join(err, builds.Delete(tx, keyOf(b).String()))
		}
		return err
	})
	if err != nil {
		return err
	}
	var errs []error
	for _, b := range dead {
		errs = append(errs, m.removeSnapshot(m.snapshotDir(b.Snapshot)))
		if err := os.Remove(m.logFile(b.Snapshot)); !errors.Is(err, os.ErrNotExist) {
			errs = append(errs, err)
		}
	}
	return errors.Join(errs...)
}

// usedBuilds are those under way and those that pools fork.
func (m *Manager) usedBuilds() map[buildKey]bool {
	m.mu.Lock()
	defer m.mu.Unlock()
	used := map[buildKey]bool{}
	for k := range m.builds {
		used[k] = true
	}
	for _, p := range m.pools {
		p.uses(used)
	}
	return used
}
