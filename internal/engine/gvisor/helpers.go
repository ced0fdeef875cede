package gvisor

import (
	"errors"
	"fmt"
	"io/fs"
	"sync"

	"agentrun.dev/internal/engine"
	"agentrun.dev/internal/engine/programs"
	"agentrun.dev/internal/storage/layer"
	"agentrun.dev/internal/storage/snapshot"
)

// helpers finds the program of a helper. Each checkpoint is read by the build that has
// written it, and by no other.
type helpers struct {
	path  string          // where AgentRun is installed
	store *programs.Store // nil: only what is installed is there

	mu      sync.Mutex // protects current
	current *programs.Program
}

// installed is the build that comes with this AgentRun, for another user. It is looked at
// once: whoever installs another AgentRun meanwhile changes nothing for this process.
func (h *helpers) installed() (*programs.Program, error) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.current == nil {
		var err error
		if h.store != nil {
			h.current, err = h.store.Keep(h.path)
		} else {
			h.current, err = programs.Outside(h.path)
		}
		if err != nil {
			return nil, err
		}
	}
	return h.current.Again(), nil
}

// digest is that of the installed build.
func (h *helpers) digest() (layer.Digest, error) {
	p, err := h.installed()
	if err != nil {
		return layer.Digest{}, err
	}
	defer p.Release()
	return p.Digest, nil
}

// of is a build, for another user: ErrMismatch if it is not there.
func (h *helpers) of(build layer.Digest) (*programs.Program, error) {
	p, err := h.installed()
	if err != nil || p.Digest == build {
		return p, err
	}
	defer p.Release()
	if h.store == nil {
		return nil, errAnother(build, p.Digest)
	}
	other, err := h.store.Use(build)
	switch {
	case errors.Is(err, programs.ErrNotKept):
		return nil, errAnother(build, p.Digest)
	case err != nil:
		return nil, fmt.Errorf("%w: its gvisor-helper: %w", engine.ErrMismatch, err)
	}
	return other, nil
}

// check is of for whoever only wants to know.
func (h *helpers) check(build layer.Digest) error {
	ours, err := h.digest()
	if err != nil || ours == build || h.store != nil && h.store.Has(build) {
		return err
	}
	return errAnother(build, ours)
}

func errAnother(build, ours layer.Digest) error {
	return fmt.Errorf("%w: it was made by another build of gvisor-helper (%.12s, this is %.12s), which is not kept here: use the AgentRun that has that build, or make it anew", engine.ErrMismatch, build, ours)
}

// adopt is of for a sandbox that runs. The program of one that an AgentRun has started
// which kept none is that of its process.
func (h *helpers) adopt(build layer.Digest, pid int) (*programs.Program, error) {
	p, err := h.of(build)
	if err == nil || h.store == nil {
		return p, err
	}
	if p, keepErr := h.store.KeepAs(build, fmt.Sprintf("/proc/%d/exe", pid)); keepErr == nil {
		return p, nil
	}
	return nil, err
}

func (h *helpers) close() {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.current.Release()
	h.current = nil
}

// KeepPrograms deletes the builds that neither a sandbox that runs nor one of these
// snapshots needs.
func (e *Engine) KeepPrograms(list func() (snapshots []string, err error)) error {
	if e.helpers.store == nil {
		return nil
	}
	return e.helpers.store.Collect(func() (map[layer.Digest]bool, error) {
		dirs, err := list()
		if err != nil {
			return nil, err
		}
		needed := map[layer.Digest]bool{}
		if p, err := programs.Outside(e.helpers.path); err == nil { // it will be used
			needed[p.Digest] = true
		}
		for _, dir := range dirs {
			m, err := snapshot.ReadManifest(dir)
			switch {
			case errors.Is(err, fs.ErrNotExist): // it is being made or removed
				continue
			case err != nil: // nobody knows what it needs
				return nil, err
			case m.GVisor == nil:
				continue
			}
			d, err := layer.ParseDigest(m.GVisor.Helper)
			if err != nil {
				return nil, err
			}
			needed[d] = true
		}
		return needed, nil
	})
}

// Outdated says why a template's snapshot is to be made anew: helpers of other builds are
// kept for it, but get no improvements.
func (e *Engine) Outdated(m snapshot.Manifest) (why string, err error) {
	if err := e.Fits(m); err != nil {
		if errors.Is(err, engine.ErrMismatch) {
			return err.Error(), nil
		}
		return "", err
	}
	ours, err := e.helpers.digest()
	if err != nil || m.GVisor.Helper == ours.String() {
		return "", err
	}
	return fmt.Sprintf("it was made by another build of gvisor-helper (%.12s, this is %.12s)", m.GVisor.Helper, ours), nil
}
