package node

import (
	"context"
	"io"
	"os"
	"sync"

	"agentrun.dev/internal/sandbox"
)

// buildLog is the log of a build under way, which can be followed.
type buildLog struct {
	opened chan struct{} // closed when the file is there
	file   *os.File

	mu    sync.Mutex    // protects all following fields
	grown chan struct{} // closed when the file has grown
}

func newBuildLog() buildLog {
	return buildLog{opened: make(chan struct{}), grown: make(chan struct{})}
}

func (l *buildLog) open(path string) (err error) {
	l.file, err = os.OpenFile(path, os.O_CREATE|os.O_EXCL|os.O_WRONLY|os.O_APPEND, 0o600)
	if err == nil {
		close(l.opened)
	}
	return err
}

func (l *buildLog) Write(p []byte) (int, error) {
	n, err := l.file.Write(p)
	l.mu.Lock()
	defer l.mu.Unlock()
	close(l.grown)
	l.grown = make(chan struct{})
	return n, err
}

func (l *buildLog) Close() error { return l.file.Close() }

// growth returns a channel that is closed when the file grows from now on.
func (l *buildLog) growth() <-chan struct{} {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.grown
}

// CopyBuildLog writes the log of a template's build to w: what is there, and
// with Follow what comes until the build has ended.
func (m *Manager) CopyBuildLog(ctx context.Context, r sandbox.BuildLogRequest, w io.Writer) error {
	t, err := m.Template(ctx, r.Key)
	if err != nil {
		return err
	}
	bk := buildKey{t.Key, t.Revision, r.Stage}
	m.mu.Lock()
	run := m.builds[bk]
	m.mu.Unlock()
	if run != nil {
		select {
		case <-run.log.opened:
		case <-run.done:
		case <-ctx.Done():
			return ctx.Err()
		}
	}
	b, err := m.build(bk)
	if sandbox.HasCode(err, sandbox.CodeNotFound) {
		return sandbox.Errorf(sandbox.CodeNotReady, "template %s has no %s build", r.Name, r.Stage).Try("Ask for the log of another stage")
	}
	if err != nil {
		return err
	}
	file, err := os.Open(m.logFile(b.Snapshot))
	if err != nil {
		return err
	}
	defer file.Close()
	for ended := run == nil || !r.Follow; ; {
		var grown <-chan struct{}
		if run != nil {
			grown = run.log.growth()
		}
		if _, err := io.Copy(w, file); err != nil || ended {
			return err
		}
		select {
		case <-grown:
		case <-run.done:
			ended = true // what came last is still to be read
		case <-ctx.Done():
			return ctx.Err()
		}
	}
}

// Builds are what became of a template's current revision.
func (m *Manager) Builds(_ context.Context, t sandbox.Template) (found []sandbox.Build, err error) {
	for _, stage := range []sandbox.Stage{sandbox.AfterReady, sandbox.AfterInit} {
		b, err := m.build(buildKey{t.Key, t.Revision, stage})
		if sandbox.HasCode(err, sandbox.CodeNotFound) {
			continue
		}
		if err != nil {
			return nil, err
		}
		found = append(found, b)
	}
	return found, nil
}
