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

// helpers finds the program of a helper. Only the build that has written a checkpoint
// can read it.
type helpers struct {
	path  string          // the installed program
	store *programs.Store // nil: only the installed program is available

	mu      sync.Mutex // protects current
	current *programs.Program
}

// installed returns the build that comes with this AgentRun, with one more use. The
// file is examined once, so installing another AgentRun does not affect this process.
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

// digest is the digest of the installed build.
func (h *helpers) digest() (layer.Digest, error) {
	p, err := h.installed()
	if err != nil {
		return layer.Digest{}, err
	}
	defer p.Release()
	return p.Digest, nil
}

// of returns a build, with one more use. The error is ErrMismatch if the build is not
// here.
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

// check reports the error that of would return for a missing build, without verifying
// or using the build.
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

// adopt returns the build of a running sandbox. If the build is not kept, since an
// AgentRun without a store has started the sandbox, adopt copies it from the
// sandbox's process.
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

// KeepPrograms deletes the builds that neither a running sandbox nor a listed
// snapshot needs.
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
		if p, err := programs.Outside(e.helpers.path); err == nil { // new sandboxes will use it
			needed[p.Digest] = true
		}
		for _, dir := range dirs {
			m, err := snapshot.ReadManifest(dir)
			switch {
			case errors.Is(err, fs.ErrNotExist): // the snapshot is being made or removed
				continue
			case err != nil: // its program is unknown, so nothing may be deleted
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

// Outdated says why a template's snapshot is to be made anew. The helper of an older
// build is kept for it, but gets no improvements.
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
