package node

import (
	"errors"
	"io/fs"

	"agentrun.dev/internal/engine"
	"agentrun.dev/internal/node/buildlog"
	"agentrun.dev/internal/node/journal"
	"agentrun.dev/internal/sandbox"
	"agentrun.dev/internal/storage/snapshot"
)

// AgentRun may have been updated since an earlier daemon has built the templates. A
// snapshot that this AgentRun would make differently is made again. Until then the old one
// serves the pools, if the engine can still restore it. The pools roll the new one out
// like a new revision.

// recoverSnapshots finds outdated builds before pools are started, and gives up their places
// to the builds that will replace them.
func (m *Manager) recoverSnapshots() error {
	var ready, unusable []sandbox.Build
	err := m.db.View(func(tx *journal.Tx) error {
		return builds.Each(tx, "", func(_ string, b sandbox.Build) error {
			if b.Phase == sandbox.PhaseReady {
				ready = append(ready, b)
			}
			return nil
		})
	})
	if err != nil {
		return err
	}
	outdated := map[buildKey]sandbox.Build{} // by the keys that they had
	for _, b := range ready {
		why, fits := m.outdated(b)
		switch {
		case !fits:
			m.cfg.Log.Warn("a template's snapshot cannot be used; it is made anew", "template", b.Template, "reason", why)
			unusable = append(unusable, b)
		case why != "" && b.Outdated == "":
			m.cfg.Log.Info("a template's snapshot is made anew", "template", b.Template, "reason", why)
			had := keyOf(b)
			b.Outdated = why
			outdated[had] = b
		}
	}
	if len(outdated)+len(unusable) == 0 {
		return nil
	}
	err = m.db.Update(func(tx *journal.Tx) (err error) {
		for _, b := range unusable {
			err = errors.Join(err, builds.Delete(tx, keyOf(b).String()))
		}
		for had, b := range outdated {
			err = errors.Join(err, builds.Delete(tx, had.String()), builds.Put(tx, keyOf(b).String(), b))
		}
		return err
	})
	if err != nil {
		return err
	}
	for _, b := range outdated {
		b.Outdated = ""
		m.uncountBuild(b)
	}
	for _, b := range unusable {
		err = errors.Join(err, m.removeSnapshot(m.snapshotDir(b.Snapshot)), buildlog.Remove(m.logFile(b.Snapshot)))
		m.uncountBuild(b)
	}
	return err
}

// outdated says why the snapshot of a build must be made again, and whether it can be used
// until then. If that is unknown, the build stays unchanged: forking it will show.
func (m *Manager) outdated(b sandbox.Build) (why string, fits bool) {
	manifest, err := snapshot.ReadManifest(m.snapshotDir(b.Snapshot))
	if errors.Is(err, fs.ErrNotExist) {
		return err.Error(), false
	}
	if err == nil {
		err = m.cfg.Engine.Fits(manifest)
	}
	if errors.Is(err, engine.ErrMismatch) {
		return err.Error(), false
	}
	if err == nil {
		why, err = engine.Outdated(m.cfg.Engine, manifest)
	}
	if err != nil {
		m.cfg.Log.Warn("look at a template's snapshot", "template", b.Template, "error", err)
	}
	return why, true
}

// superseded reports whether a template wants another build than this one.
func superseded(b sandbox.Build, t sandbox.Template) bool {
	return b.Revision != t.Revision || b.Outdated != ""
}
