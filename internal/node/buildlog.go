package node

import (
	"context"
	"errors"
	"io"
	"io/fs"
	"math"

	"agentrun.dev/internal/node/buildlog"
	"agentrun.dev/internal/sandbox"
)

// CopyBuildLog writes the present log of a template's build to w. With Follow
// it continues until the build has ended.
func (m *Manager) CopyBuildLog(ctx context.Context, r sandbox.BuildLogRequest, w io.Writer) error {
	if err := r.Validate(); err != nil {
		return err
	}
	t, err := m.Template(ctx, r.Key)
	if err != nil {
		return err
	}
	log, run, err := m.buildLog(ctx, buildKey{Template: t.Key, Revision: t.Revision, Stage: r.Stage})
	if err != nil {
		return err
	}
	at := r.Offset
	if r.Tail != nil {
		if at, err = log.LastLines(*r.Tail); err != nil {
			return err
		}
	}
	end := log.End()
	if r.Begun != nil {
		r.Begun(end)
	}
	from := log.ReadFrom(at)
	if run == nil || !r.Follow {
		return from.CopyTo(w, end)
	}
	for ended := false; ; {
		grown := log.Grown()
		if err := from.CopyTo(w, math.MaxInt64); err != nil || ended {
			return err
		}
		select {
		case <-grown:
		case <-run.done:
			ended = true // its last output still has to be read
		case <-ctx.Done():
			return ctx.Err()
		}
	}
}

// buildLog returns the log of a build, and the build if it is under way.
func (m *Manager) buildLog(ctx context.Context, k buildKey) (*buildlog.Log, *build, error) {
	m.mu.Lock()
	run := m.builds[k]
	m.mu.Unlock()
	if run != nil {
		select {
		case <-run.begun:
			return run.log, run, nil
		case <-run.done:
		case <-ctx.Done():
			return nil, nil, ctx.Err()
		}
	}
	b, err := m.build(k)
	missing := sandbox.HasCode(err, sandbox.CodeNotFound)
	var log *buildlog.Log
	if err == nil {
		log, err = buildlog.Open(m.logFile(b.Snapshot))
		missing = errors.Is(err, fs.ErrNotExist) // it was replaced in the meantime
	}
	if missing && b.Phase == sandbox.PhaseFailed {
		return nil, nil, sandbox.Errorf(sandbox.CodeNotReady, "there is no log of the build of template %s", k.Template.Name).Because("%s", b.Problem).
			Try("Make room in the quota of disk of namespace %s, and apply the template again", k.Template.Namespace)
	}
	if missing {
		return nil, nil, sandbox.Errorf(sandbox.CodeNotReady, "template %s has no %s build", k.Template.Name, k.Stage).Try("Ask for the log of another stage")
	}
	return log, nil, err
}

// Builds returns the builds of a template's current revision.
func (m *Manager) Builds(ctx context.Context, t sandbox.Template) (found []sandbox.Build, err error) {
	for _, stage := range []sandbox.Stage{sandbox.AfterReady, sandbox.AfterInit} {
		b, err := m.build(buildKey{Template: t.Key, Revision: t.Revision, Stage: stage})
		if sandbox.HasCode(err, sandbox.CodeNotFound) {
			continue
		}
		if err != nil {
			return nil, err
		}
		if !sandbox.Administers(ctx) {
			b.Cause = ""
		}
		found = append(found, b)
	}
	return found, nil
}
