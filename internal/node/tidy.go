package node

import (
	"path/filepath"
	"time"

	"agentrun.dev/internal/engine"
)

// tidyUp frees memory, some time after objects were removed.
func (m *Manager) tidyUp() {
	const quiet = time.Second // many may be removed at once
	for {
		select {
		case <-m.dirty:
		case <-m.ctx.Done():
			return
		}
		select {
		case <-time.After(quiet):
		case <-m.ctx.Done():
			return
		}
		if err := m.keep(machinesDir, snapshotsDir); err != nil {
			m.cfg.Log.Error("free memory that is not used", "error", err)
		}
		m.keepPrograms()
	}
}

// removed is called when an object was removed that may have used memory.
func (m *Manager) removed() {
	select {
	case m.dirty <- struct{}{}:
	default:
	}
}

// keep tells the engine that the contents of some folders are in use. Images of
// hibernated sandboxes and checkpoints are not in use: they are on disk, and are
// read when a machine is made of one. Snapshots of templates are in use once there
// are pools.
func (m *Manager) keep(dirs ...string) error {
	found := map[string][]string{}
	for _, dir := range dirs {
		var err error
		if found[dir], err = filepath.Glob(filepath.Join(m.cfg.Dir, dir, "*")); err != nil {
			return err
		}
	}
	return m.cfg.Engine.Keep(found[machinesDir], found[snapshotsDir])
}

// keepPrograms makes the engine delete the programs of other versions of AgentRun, unless a
// machine or a snapshot of this node was made by them.
func (m *Manager) keepPrograms() {
	err := engine.KeepPrograms(m.cfg.Engine, func() (all []string, err error) {
		for _, pattern := range []string{
			filepath.Join(machinesDir, "*", "from"), filepath.Join(imagesDir, "*"),
			filepath.Join(snapshotsDir, "*"), filepath.Join(checkpointsDir, "*"),
		} {
			found, err := filepath.Glob(filepath.Join(m.cfg.Dir, pattern))
			if err != nil {
				return nil, err
			}
			all = append(all, found...)
		}
		return all, nil
	})
	if err != nil {
		m.cfg.Log.Error("delete programs that are not used", "error", err)
	}
}
