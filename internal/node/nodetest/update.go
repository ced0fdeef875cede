package nodetest

import (
	"fmt"
	"slices"

	"agentrun.dev/internal/engine"
	"agentrun.dev/internal/storage/snapshot"
)

// BuildKey is the memory's key for the AgentRun build that has made a snapshot.
const BuildKey = "build"

// Update plays an update of AgentRun: snapshots of other builds become outdated, and those
// of the lost builds no longer fit. It is called while no daemon runs.
func (h *Host) Update(build string, lost ...string) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.build, h.lost = build, lost
}

// Build returns the build that is played.
func (h *Host) Build() string {
	h.mu.Lock()
	defer h.mu.Unlock()
	return h.build
}

// Fits refuses snapshots of lost builds.
func (h *Host) Fits(m snapshot.Manifest) error {
	h.mu.Lock()
	defer h.mu.Unlock()
	if build := m.Labels[BuildKey]; slices.Contains(h.lost, build) {
		return fmt.Errorf("%w: build %s is lost", engine.ErrMismatch, build)
	}
	return nil
}

// Outdated returns a reason for snapshots of other builds.
func (h *Host) Outdated(m snapshot.Manifest) (why string, err error) {
	if build := m.Labels[BuildKey]; build != h.Build() {
		return "build " + build + " has made it", nil
	}
	return "", nil
}

// KeepPrograms records which builds are needed.
func (h *Host) KeepPrograms(list func() ([]string, error)) error {
	dirs, err := list()
	needed := map[string]bool{}
	for _, dir := range dirs {
		if m, err := snapshot.ReadManifest(dir); err == nil {
			needed[m.Labels[BuildKey]] = true
		}
	}
	h.mu.Lock()
	defer h.mu.Unlock()
	h.needed = needed
	return err
}

// Needs reports whether the daemon's last call has named a build as needed.
func (h *Host) Needs(build string) bool {
	h.mu.Lock()
	defer h.mu.Unlock()
	return h.needed[build]
}
