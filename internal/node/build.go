package node

import (
	"context"
	"errors"
	"fmt"
	"time"

	"agentrun.dev/internal/node/buildlog"
	"agentrun.dev/internal/node/journal"
	"agentrun.dev/internal/sandbox"
)

// buildKey names a build.
type buildKey struct {
	Template sandbox.Key
	Revision string
	Stage    sandbox.Stage
	// Outdated is the snapshot of an outdated build, whose plain key belongs to the
	// build that replaces it; empty otherwise.
	Outdated sandbox.ID
}

func (k buildKey) String() string {
	s := k.Template.String() + "/" + k.Revision + "/" + string(k.Stage)
	if k.Outdated != "" {
		s += "/" + string(k.Outdated)
	}
	return s
}

func keyOf(b sandbox.Build) buildKey {
	k := buildKey{Template: b.Template, Revision: b.Revision, Stage: b.Stage}
	if b.Outdated != "" {
		k.Outdated = b.Snapshot
	}
	return k
}

// ApplyTemplate makes a template or changes it, for an owner if one is given. Its pools follow
// the change; claimed sandboxes stay unchanged. If the template has not changed but its build
// has failed, it is built again.
func (m *Manager) ApplyTemplate(ctx context.Context, k sandbox.Key, spec sandbox.TemplateSpec, owner ...sandbox.UID) (sandbox.Template, error) {
	if err := errors.Join(m.beginMaking(), sandbox.MayGive(ctx, oneOwner(owner))); err != nil {
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
	defer m.templateTurns.lock(k)()
	t := sandbox.Template{Key: k, Spec: spec, Created: time.Now().UTC()}
	if t.Image, err = m.imageOf(ctx, k, spec); err != nil {
		return sandbox.Template{}, fmt.Errorf("apply template %s: %w", k, err)
	}
	t.Revision = spec.RevisionWith(ca, t.Image)
	if err := m.writeTemplate(ctx, &t, oneOwner(owner), sandbox.AfterReady, nil); err != nil {
		return sandbox.Template{}, fmt.Errorf("apply template %s: %w", k, err)
	}
	return t, nil
}

// writeTemplate makes a template or changes it, and has its revision built. With order the
// revision is fetched instead, unless it is ready or being built. The caller has the turn of
// the template.
func (m *Manager) writeTemplate(ctx context.Context, t *sandbox.Template, owner sandbox.UID, stage sandbox.Stage, order *sandbox.Build) error {
	leave, err := m.admitTemplate(*t, stage)
	if err != nil {
		return err
	}
	defer leave()
	k := buildKey{Template: t.Key, Revision: t.Revision, Stage: stage}
	var dropped []sandbox.Build
	err = m.db.Update(func(tx *journal.Tx) error {
		old, found, err := templates.Get(tx, t.Key.String())
		if err != nil {
			return err
		}
		if found {
			t.Created = old.Created
		}
		old.Key = t.Key
		if t.Owner, err = give(ctx, old.Identity(), owner); err != nil {
			return err
		}
		dropped, err = dropBuilds(tx, t.Key, func(b sandbox.Build) bool {
			if b.Revision == t.Revision {
				replaced := order != nil && keyOf(b) == k && b.Fetch != nil && !b.Over()
				return b.Phase == sandbox.PhaseFailed || replaced
			}
			return !b.Over()
		})
		if err = errors.Join(err, templates.Write(tx, t.Key.String(), t)); err != nil || order == nil {
			return err
		}
		if _, found, err = builds.Get(tx, k.String()); err == nil && !found {
			err = builds.Put(tx, k.String(), *order)
		}
		return err
	})
	if err != nil {
		return err
	}
	if _, err := m.endDropped(dropped); err != nil {
		m.cfg.Log.Error("remove the logs of builds", "template", t.Key, "error", err)
	}
	if err := m.ensureBuild(*t, stage); err != nil {
		return err
	}
	m.noticePools()
	return nil
}

// lookups is how many registries are asked at once for the image of a name. Tenants choose the
// registries. Each of them may send as much as the node accepts into memory, and as late as the
// node waits.
const lookups = 8

// imageOf returns the digest of the image of a template that is applied. An unchanged spec
// keeps its image, and so its revision, unless its build has failed.
func (m *Manager) imageOf(ctx context.Context, k sandbox.Key, spec sandbox.TemplateSpec) (string, error) {
	r, ok := m.cfg.Builder.(ImageResolver)
	if !ok {
		return "", nil
	}
	var old sandbox.Template
	var built sandbox.Build
	err := m.db.View(func(tx *journal.Tx) (err error) {
		if old, _, err = templates.Get(tx, k.String()); err == nil {
			built, _, err = builds.Get(tx, buildKey{Template: k, Revision: old.Revision, Stage: sandbox.AfterReady}.String())
		}
		return err
	})
	if err != nil {
		return "", err
	}
	// An earlier version wrote templates without a digest. Such a template keeps only a build
	// that works.
	keep := built.Phase != sandbox.PhaseFailed && (old.Image != "" || built.Phase == sandbox.PhaseReady)
	if old.Revision != "" && old.Spec.Digest() == spec.Digest() && keep {
		return old.Image, nil
	}
	return r.ResolveImage(ctx, ImageQuestion{
		Namespace: k.Namespace, Name: spec.Image, Credentials: m.credentials(k.Namespace),
		Turn: func(ctx context.Context) (func(), error) { return m.lookupTurns.take(ctx, k.Namespace) },
	}), nil
}

// admitTemplate refuses a template that needs a build if there is no room for another
// build. The caller calls leave when the build has started.
func (m *Manager) admitTemplate(t sandbox.Template, stage sandbox.Stage) (leave func(), err error) {
	k := buildKey{Template: t.Key, Revision: t.Revision, Stage: stage}
	b, err := m.build(k)
	switch {
	case err == nil && b.Phase == sandbox.PhaseReady:
		return func() {}, nil
	case err != nil && !sandbox.HasCode(err, sandbox.CodeNotFound):
		return nil, err
	case err != nil: // the build reports an earlier failure itself, when it fails again
		if err := errors.Join(m.room.admit(), m.capacity.store(t.Namespace, 0)); err != nil {
			return nil, err
		}
	}
	return m.admitBuild(k)
}

// dropBuilds removes some builds of a template from the journal.
func dropBuilds(tx *journal.Tx, k sandbox.Key, unwanted func(sandbox.Build) bool) (dropped []sandbox.Build, err error) {
	err = builds.Each(tx, k.String()+"/", func(_ string, b sandbox.Build) error {
		if unwanted(b) {
			dropped = append(dropped, b)
		}
		return nil
	})
	for _, b := range dropped {
		err = errors.Join(err, builds.Delete(tx, keyOf(b).String()))
	}
	return dropped, err
}

// endDropped ends builds that have left the journal, and removes their logs. The caller
// has the turn of their template.
func (m *Manager) endDropped(dropped []sandbox.Build) (ended []*build, err error) {
	m.mu.Lock()
	for _, b := range dropped {
		if run := m.builds[keyOf(b)]; run != nil {
			run.cancel()
			delete(m.builds, keyOf(b)) // another build of the same key can be started at once
			ended = append(ended, run)
		}
		if b.Fetch != nil && !m.closed { // a fetch that has not begun never removes its order itself
			m.work.Go(func() { m.dropOrder(b) })
		}
	}
	m.mu.Unlock()
	for _, b := range dropped {
		err = errors.Join(err, buildlog.Remove(m.logFile(b.Snapshot)))
		m.uncountBuild(b)
	}
	return ended, err
}

// ensureBuild has a template's revision built. It refuses if the namespace has enough
// builds and k has no place.
func (m *Manager) ensureBuild(t sandbox.Template, stage sandbox.Stage) error {
	k := buildKey{Template: t.Key, Revision: t.Revision, Stage: stage}
	if b, err := m.build(k); err == nil && b.Over() {
		return nil
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.closed || m.builds[k] != nil {
		return nil
	}
	if m.places.full(k) {
		return errTooManyBuilds(t.Namespace)
	}
	m.startBuild(k, t)
	return nil
}

// recoverBuilds goes on with the builds that an earlier daemon had started or
// planned.
func (m *Manager) recoverBuilds() error {
	type wanted struct {
		sandbox.Template
		stage sandbox.Stage
	}
	var all []wanted
	err := m.db.View(func(tx *journal.Tx) error {
		return templates.Each(tx, "", func(_ string, t sandbox.Template) error {
			all = append(all, wanted{t, sandbox.AfterReady})
			// Only a pool asks for the other stage.
			_, found, err := builds.Get(tx, buildKey{Template: t.Key, Revision: t.Revision, Stage: sandbox.AfterInit}.String())
			if found {
				all = append(all, wanted{t, sandbox.AfterInit})
			}
			return err
		})
	})
	for _, w := range all {
		// They were admitted once, so they are not refused even if there are many
		// now.
		m.mu.Lock()
		leave := m.holdPlace(buildKey{Template: w.Key, Revision: w.Revision, Stage: w.stage})
		m.mu.Unlock()
		err = errors.Join(err, m.ensureBuild(w.Template, w.stage))
		leave()
	}
	return err
}

// build reads a build from the journal, to show it or its progress.
func (m *Manager) build(k buildKey) (b sandbox.Build, err error) {
	err = m.db.View(func(tx *journal.Tx) error {
		var found bool
		if b, found, err = builds.Get(tx, k.String()); err == nil && !found {
			err = sandbox.NotFound(sandbox.KindTemplate, k.Template)
		}
		return err
	})
	if b.Phase == sandbox.PhasePending && b.Problem == "" {
		turns, what := m.buildTurns, "builds are made"
		if b.Fetch != nil {
			turns, what = m.fetchTurns, "snapshots are fetched"
		}
		b.Problem = fmt.Sprintf("it waits for its turn: %d %s at once, at most %d of one namespace", turns.most, what, turns.each)
	}
	return b, err
}

// machineMemory is the memory that a machine of a template reserves.
func (m *Manager) machineMemory(spec sandbox.TemplateSpec) uint64 {
	return m.cfg.Engine.Reserve(spec.Memory, spec.Disk)
}

// reserve takes memory for a machine of a namespace, and for the shared memory
// that the machine holds.
func (m *Manager) reserve(n sandbox.Namespace, bytes uint64, held ...sandbox.Held) error {
	err := m.capacity.reserve(n, bytes, held...)
	if err != nil {
		m.observer.Refused()
	}
	return err
}

// collectBuilds deletes builds that will not be forked any more.
func (m *Manager) collectBuilds() error {
	used := m.usedBuilds()
	unused := func(tx *journal.Tx, b sandbox.Build) (bool, error) {
		t, found, err := templates.Get(tx, b.Template.String())
		return !used[keyOf(b)] && (!found || superseded(b, t)), err
	}
	var some []sandbox.Build
	err := m.db.View(func(tx *journal.Tx) error {
		return builds.Each(tx, "", func(_ string, b sandbox.Build) error {
			not, err := unused(tx, b)
			if not {
				some = append(some, b)
			}
			return err
		})
	})
	if err != nil || len(some) == 0 {
		return errors.Join(err, m.dropImages())
	}
	var dead []sandbox.Build
	err = m.db.Update(func(tx *journal.Tx) error {
		var errs []error
		for _, b := range some {
			// Since then the template may have gone back to this revision and have built it
			// again.
			now, found, err := builds.Get(tx, keyOf(b).String())
			if found = found && now.Snapshot == b.Snapshot; err == nil && found {
				found, err = unused(tx, now)
			}
			if err == nil && found {
				dead = append(dead, now)
				err = builds.Delete(tx, keyOf(b).String())
			}
			errs = append(errs, err)
		}
		return errors.Join(errs...)
	})
	if err != nil {
		return err
	}
	var errs []error
	for _, b := range dead {
		errs = append(errs, m.removeSnapshot(m.snapshotDir(b.Snapshot)), buildlog.Remove(m.logFile(b.Snapshot)))
		m.uncountBuild(b)
	}
	return errors.Join(append(errs, m.dropImages())...)
}

// collect is collectBuilds for callers that cannot return its error.
func (m *Manager) collect() {
	if err := m.collectBuilds(); err != nil && m.ctx.Err() == nil {
		m.cfg.Log.Error("delete builds that are not needed", "error", err)
	}
}

// usedBuilds returns the builds under way and those that pools fork.
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
