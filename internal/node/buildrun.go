package node

import (
	"context"
	"errors"
	"fmt"
	"syscall"
	"time"

	"agentrun.dev/internal/engine"
	"agentrun.dev/internal/node/buildlog"
	"agentrun.dev/internal/node/journal"
	"agentrun.dev/internal/sandbox"
)

// A build that has failed for lack of capacity, or for a reason outside of its template,
// is tried again.
const (
	// retryFirst is the first pause before that, and retrySeldom the longest.
	retryFirst  = time.Second
	retrySeldom = time.Minute
	// maxInterruptions is how often in a row a build may be interrupted, other than by
	// the daemon's end, until it has failed. So a template that always ends its machine
	// is not built for ever.
	maxInterruptions = 5
)

// ErrInterrupted says that a build has failed for a reason outside of its template: the
// same build may succeed when it is tried again.
var ErrInterrupted = errors.New("interrupted")

// errReplaced says that a build is no longer wanted: its template was deleted, or has
// changed.
var errReplaced = errors.New("the template has changed")

// build is a build under way: it runs, waits for its turn, or waits to be tried again.
type build struct {
	key    buildKey
	spec   sandbox.TemplateSpec
	image  string // the digest of the image; empty is whichever image the name leads to
	cancel context.CancelFunc
	done   chan struct{}
	freed  chan struct{} // holds at most one notice that memory may be free
	begun  chan struct{} // closed when log is set
	log    *buildlog.Log

	// Of the attempts so far:
	interrupted int  // how many in a row were interrupted
	short       bool // the last attempt has failed for lack of capacity
}

// startBuild starts a build. The caller holds the mutex.
func (m *Manager) startBuild(k buildKey, t sandbox.Template) {
	ctx, cancel := context.WithCancel(m.ctx)
	run := &build{
		key: k, spec: t.Spec, image: t.Image, cancel: cancel,
		done: make(chan struct{}), freed: make(chan struct{}, 1), begun: make(chan struct{}),
	}
	m.builds[k] = run
	m.places.hold(k)
	m.work.Go(func() {
		defer cancel()
		if err := m.runBuild(ctx, run); err != nil && ctx.Err() == nil && !errors.Is(err, errReplaced) {
			m.cfg.Log.Error("build a template", "template", k.Template, "error", err)
		}
		m.mu.Lock()
		if m.builds[k] == run {
			delete(m.builds, k)
		}
		m.places.leave(k)
		m.mu.Unlock()
		close(run.done)
		m.noticePools()
	})
}

// notice tells a build that memory may be free.
func (b *build) notice() {
	select {
	case b.freed <- struct{}{}:
	default:
	}
}

// wait waits for the next attempt of a build.
func (b *build) wait(ctx context.Context, until time.Time) error {
	timer := time.NewTimer(time.Until(until))
	defer timer.Stop()
	var freed <-chan struct{}
	if b.short {
		freed = b.freed
		select { // many sandboxes may end at once, and each frees memory
		case <-time.After(retryFirst):
		case <-ctx.Done():
			return ctx.Err()
		}
	}
	select {
	case <-timer.C:
	case <-freed:
	case <-ctx.Done():
		return ctx.Err()
	}
	return nil
}

// runBuild runs a build until its end.
func (m *Manager) runBuild(ctx context.Context, run *build) error {
	b, err := m.beginBuild(ctx, run)
	if err != nil {
		return err
	}
	m.noticePools() // they show that it waits
	defer m.dropOrder(b)
	err = m.tryUntilOver(ctx, run, &b)
	closed := run.log.Close()
	switch {
	case err == nil:
		return errors.Join(closed, m.collectBuilds())
	case m.ctx.Err() != nil:
		return errors.Join(closed, m.leaveBuild(b))
	}
	// The build was already taken out of the journal.
	return errors.Join(err, closed, m.removeSnapshot(m.snapshotDir(b.Snapshot)), buildlog.Remove(m.logFile(b.Snapshot)))
}

// tryUntilOver tries a build until it is over, and writes its outcome.
func (m *Manager) tryUntilOver(ctx context.Context, run *build, b *sandbox.Build) error {
	fetched := b.Fetch != nil
	for {
		if err := run.wait(ctx, b.Next); err != nil {
			return err
		}
		err := m.try(ctx, run, b)
		if ctx.Err() != nil || errors.Is(err, errReplaced) {
			if err == nil {
				m.capacity.discard(b.Template.Namespace, b.Kept, b.Shares()...)
			}
			return errors.Join(err, ctx.Err())
		}
		run.judge(b, err)
		if b.Cause != "" {
			m.cfg.Log.Warn("an image was not pulled", "template", b.Template, "image", run.spec.Image, "cause", b.Cause)
		}
		if b.Phase == sandbox.PhaseFailed {
			if err := m.countFailed(b, run.spec.Image); err != nil {
				m.cfg.Log.Error("add up what a build has left", "template", b.Template, "error", err)
			}
		}
		if err := m.insist(ctx, "write what became of a build", func() error { return m.endBuild(b, fetched) }); err != nil {
			m.uncountBuild(*b)
			return err
		}
		if b.Over() {
			return nil
		}
		m.noticePools()
	}
}

// try is one attempt: to fetch, if a fetch was ordered, or else to build. If it returns no
// error, the snapshot is there.
func (m *Manager) try(ctx context.Context, run *build, b *sandbox.Build) error {
	if b.Fetch != nil {
		return m.tryFetch(ctx, run, b)
	}
	return m.tryBuild(ctx, run, b)
}

// insist repeats an operation until it succeeds. Only the node's disk can make the
// operation fail.
func (m *Manager) insist(ctx context.Context, what string, do func() error) error {
	for pause := retryFirst; ; pause = min(2*pause, retrySeldom) {
		err := do()
		if err == nil || errors.Is(err, errReplaced) {
			return err
		}
		if ctx.Err() == nil {
			m.cfg.Log.Error(what, "error", err)
		}
		select {
		case <-time.After(pause):
		case <-ctx.Done():
			return ctx.Err()
		}
	}
}

// beginBuild begins a build, or continues one of an earlier daemon. Afterwards the build
// is in the journal, and has a log.
func (m *Manager) beginBuild(ctx context.Context, run *build) (b sandbox.Build, err error) {
	id := sandbox.NewID()
	err = m.insist(ctx, "begin a build", func() (err error) {
		if b, err = m.enlistBuild(run.key, id); err != nil {
			return err
		}
		run.log, err = buildlog.Append(m.logFile(b.Snapshot))
		return err
	})
	if err == nil {
		close(run.begun)
	}
	return b, err
}

// enlistBuild writes the intent of a build, unless the build is no longer
// needed.
func (m *Manager) enlistBuild(k buildKey, id sandbox.ID) (b sandbox.Build, err error) {
	now := time.Now().UTC()
	err = m.db.Update(func(tx *journal.Tx) error {
		t, found, err := templates.Get(tx, k.Template.String())
		if err != nil {
			return err
		}
		if !found || t.Revision != k.Revision {
			return errReplaced
		}
		if b, found, err = builds.Get(tx, k.String()); err != nil {
			return err
		}
		switch {
		case !found:
			b = sandbox.Build{Template: k.Template, Revision: k.Revision, Stage: k.Stage, Started: now, Snapshot: id}
		case b.Over():
			return errReplaced
		case b.Phase == sandbox.PhaseBuilding:
			b.Problem, b.Next = "the daemon has ended while it was being built", now.Add(backoff(b.Attempts))
		}
		b.Phase = sandbox.PhasePending
		return builds.Put(tx, k.String(), b)
	})
	return b, err
}

// backoff is the pause after that many attempts.
func backoff(attempts int) time.Duration {
	pause := retryFirst
	for ; attempts > 1 && pause < retrySeldom; attempts-- {
		pause *= 2
	}
	return min(pause, retrySeldom)
}

// leaveBuild leaves a build to the next daemon, which tries it at once.
func (m *Manager) leaveBuild(b sandbox.Build) error {
	if b.Phase != sandbox.PhaseBuilding {
		return nil
	}
	b.Phase, b.Attempts = sandbox.PhasePending, b.Attempts-1
	return m.putBuild(b)
}

// putBuild writes a build, if it is still in the journal.
func (m *Manager) putBuild(b sandbox.Build) error {
	return m.db.Update(func(tx *journal.Tx) error {
		old, found, err := builds.Get(tx, keyOf(b).String())
		if err != nil {
			return err
		}
		if !found || old.Snapshot != b.Snapshot {
			return errReplaced
		}
		return builds.Put(tx, keyOf(b).String(), b)
	})
}

// endBuild writes the outcome of a build. If the image was unknown when the template was
// applied, the image now becomes a part of the template's revision: other nodes could have
// built another image for the same revision. A fetched snapshot keeps the revision of the node
// that has built it.
func (m *Manager) endBuild(b *sandbox.Build, fetched bool) error {
	if _, ok := m.cfg.Builder.(ImageResolver); !ok || fetched || b.Phase != sandbox.PhaseReady || b.Stage != sandbox.AfterReady {
		return m.putBuild(*b)
	}
	defer m.templateTurns.lock(b.Template)()
	ended := *b
	err := m.db.Update(func(tx *journal.Tx) error {
		old, found, err := builds.Get(tx, keyOf(*b).String())
		if err != nil {
			return err
		}
		if !found || old.Snapshot != b.Snapshot {
			return errReplaced
		}
		t, found, err := templates.Get(tx, b.Template.String())
		if err != nil {
			return err
		}
		if found && t.Image == "" && t.Revision == b.Revision && t.Revision == t.Spec.RevisionWith(b.TrustedCA, "") {
			t.Image = b.Image
			t.Revision = t.Spec.RevisionWith(b.TrustedCA, t.Image)
			ended.Revision = t.Revision
			err = errors.Join(templates.Write(tx, b.Template.String(), &t), builds.Delete(tx, keyOf(*b).String()))
		}
		return errors.Join(err, builds.Put(tx, keyOf(ended).String(), ended))
	})
	if err == nil {
		*b = ended
	}
	return err
}

// tryBuild is one attempt to build. If it returns no error, the snapshot is
// there.
func (m *Manager) tryBuild(ctx context.Context, run *build, b *sandbox.Build) (err error) {
	namespace, memory := b.Template.Namespace, m.machineMemory(run.spec)
	release, err := m.buildTurns.take(ctx, namespace)
	if err != nil {
		return err
	}
	defer release()
	ctx, end := m.observer.Begin(ctx, sandbox.Work{Op: sandbox.OpBuild, Template: b.Template, Stage: b.Stage})
	defer func() { end(sandbox.Outcome{Err: err}) }()
	b.Attempts++
	if err := errors.Join(m.room.admit(), m.capacity.store(namespace, 0)); err != nil {
		return err
	}
	if err := m.reserve(namespace, memory); err != nil {
		return err
	}
	defer func() {
		m.capacity.release(namespace, memory)
		m.refill()
		select { // that notice was its own
		case <-run.freed:
		default:
		}
	}()
	b.Phase, b.Problem, b.Cause, b.Started, b.Next = sandbox.PhaseBuilding, "", "", time.Now().UTC(), time.Time{}
	if err := m.putBuild(*b); err != nil {
		return err
	}
	m.noticePools()
	dir := m.snapshotDir(b.Snapshot)
	if err := m.removeSnapshot(dir); err != nil { // left by a daemon that was killed
		return err
	}
	if b.Attempts > 1 {
		_, _ = fmt.Fprintf(run.log, "== attempt %d\n", b.Attempts) // only people read the log
	}
	certificate, fingerprint, err := m.templateCA(namespace, run.spec)
	if err != nil {
		return err
	}
	storing, stop := m.room.watch(ctx)
	defer stop()
	var machine engine.Sandbox
	b.Built, err = m.cfg.Builder.Build(storing, BuildRequest{
		Namespace: namespace, Spec: run.spec, Image: run.image, Stage: b.Stage, Dir: dir, Log: run.log, TrustCA: certificate,
		Pull:        func() error { return m.notePull(namespace, run.spec.Image) },
		Credentials: m.credentials(namespace),
		Join: func(ctx context.Context, sb engine.Sandbox) (_ engine.Sandbox, err error) {
			machine, err = m.joinBuild(ctx, namespace, run.spec, sb)
			return machine, err
		},
	})
	if err = whyNot(storing, err); err != nil {
		return errors.Join(err, m.removeSnapshot(dir))
	}
	if err := m.countBuild(b, run.spec.Image); err != nil {
		return errors.Join(err, m.removeSnapshot(dir), m.dropRefused(*b, run.spec.Image))
	}
	b.Spec, b.Lineage, b.TrustedCA = &run.spec, captured(machine), fingerprint
	return nil
}

// judge decides the state of a build after an attempt.
func (b *build) judge(of *sandbox.Build, err error) {
	now := time.Now().UTC()
	var hides interface{ ForAdmins() string }
	if of.Cause = ""; errors.As(err, &hides) {
		of.Cause = hides.ForAdmins()
	}
	b.short = lacksRoom(err)
	switch {
	case b.short:
		b.interrupted = 0
	case wasInterrupted(err):
		b.interrupted++
	}
	switch {
	case err == nil:
		of.Phase, of.Finished, of.Fetch = sandbox.PhaseReady, now, nil
	case b.short || wasInterrupted(err) && b.interrupted < maxInterruptions:
		pause := backoff(of.Attempts)
		of.Kept, of.Pulled = 0, 0
		of.Phase, of.Problem, of.Next = sandbox.PhasePending, err.Error(), now.Add(pause)
		_, _ = fmt.Fprintf(b.log, "== it is tried again in %v: %v\n", pause, err) // only people read the log
	default:
		if wasInterrupted(err) {
			err = fmt.Errorf("it was interrupted %d times in a row, the last time: %w", b.interrupted, err)
		}
		of.Phase, of.Problem, of.Finished, of.Fetch = sandbox.PhaseFailed, err.Error(), now, nil
		_, _ = fmt.Fprintf(b.log, "the template is not built: %v\n", err) // likewise
	}
}

// lacksRoom reports whether an attempt has failed for lack of memory, of room on the disk or
// of another limited resource of the host.
func lacksRoom(err error) bool {
	for _, short := range []error{syscall.ENOSPC, syscall.EDQUOT, syscall.ENOMEM, syscall.EMFILE, syscall.ENFILE} {
		if errors.Is(err, short) {
			return true
		}
	}
	return sandbox.HasCode(err, sandbox.CodeCapacity)
}

// wasInterrupted reports whether an attempt has failed because its machine has ended for a
// reason outside of the template, or because of another such reason.
func wasInterrupted(err error) bool {
	ended := errors.Is(err, engine.ErrEnded) && !errors.Is(err, engine.ErrOutOfMemory) && !errors.Is(err, engine.ErrPoweredOff)
	return ended || errors.Is(err, ErrInterrupted)
}
