package node

import (
	"context"
	"errors"
	"slices"
	"sync"
	"time"

	"agentrun.dev/internal/engine"
	"agentrun.dev/internal/node/journal"
	"agentrun.dev/internal/sandbox"
)

// A daemon serves as soon as it starts. The sandboxes of an earlier daemon keep their
// names and their memory from the journal. Their machines are taken over in the
// background. Until its machine answers, a sandbox is Unresponsive: it can be looked
// at and ended, but calls that need its machine are refused.
const (
	// adoptions is how many machines are taken over at once, at most half of
	// them of one namespace. An adoption mostly waits.
	adoptions = 64
	// adoptPatience bounds the time of one attempt.
	adoptPatience = 30 * time.Second
	// adoptAgain is the first pause before another attempt, and adoptSeldom the
	// longest.
	adoptAgain  = time.Second
	adoptSeldom = time.Minute
)

// register makes a sandbox of an earlier daemon known, before the first claim is
// admitted. If the sandbox has a machine, its turn is held for its adoption.
func (m *Manager) register(s sandbox.Sandbox) {
	b := m.newMember(s)
	m.mu.Lock()
	m.roster.add(b)
	m.mu.Unlock()
	if s.State == sandbox.Hibernated {
		m.capacity.keep(s.Namespace, s.Kept)
		return
	}
	m.capacity.take(s.Namespace, s.Memory, s.Holds()...)
	<-b.turn
}

// checkEngine refuses to start if another engine has running sandboxes: this engine would
// not find their machines, and would take them for lost.
func (m *Manager) checkEngine() error {
	others, engine := 0, ""
	err := m.db.View(func(tx *journal.Tx) error {
		return sandboxes.Each(tx, "", func(_ string, s sandbox.Sandbox) error {
			if s.Machine != "" && s.Boot == m.cfg.Boot && s.Engine != "" && s.Engine != m.cfg.Engine.Name() {
				others, engine = others+1, s.Engine
			}
			return nil
		})
	})
	if err != nil || others == 0 {
		return err
	}
	return sandbox.Errorf(sandbox.CodeConflict, "the daemon cannot run with the engine %s", m.cfg.Engine.Name()).
		Because("%d sandboxes of its state folder run with the engine %s", others, engine).
		Try("Start the daemon with `--engine` as it was; for another engine hibernate or end them first")
}

// adoptAll takes over the machines of all registered sandboxes.
func (m *Manager) adoptAll() {
	waiting := slices.DeleteFunc(m.members(), func(b *member) bool {
		s := b.now()
		if s.State == sandbox.Running || s.State == sandbox.Paused {
			return false
		}
		b.mu.Lock()
		b.arm() // it may have an end time
		b.mu.Unlock()
		return true
	})
	var first sync.WaitGroup // the first attempts
	for _, b := range waiting {
		// This comes first, so that a kill that comes now finds it.
		ctx, done := b.untilKilled(m.ctx)
		b.mu.Lock()
		b.arm()
		b.mu.Unlock()
		first.Add(1)
		m.work.Go(func() {
			b.adopt(ctx, done, sync.OnceFunc(first.Done))
		})
	}
	m.work.Go(func() {
		defer close(m.adopted)
		first.Wait()
		if m.cfg.Network == nil {
			return
		}
		// A machine that was not taken over by now is joined again when it is.
		if err := m.cfg.Network.Keep(m.ctx); err != nil && m.ctx.Err() == nil {
			m.cfg.Log.Error("forget the networks of machines that are gone", "error", err)
		}
	})
}

// adopt takes over the sandbox's machine, and tries as often as necessary. It begins
// with the sandbox's turn, and gives it back between attempts. ctx and done belong to
// the first turn; tried is called after the first attempt.
func (b *member) adopt(ctx context.Context, done func(), tried func()) {
	m := b.manager
	defer tried()
	var sb engine.Sandbox // adopted, but not attached
	defer func() {
		if sb != nil {
			_ = sb.Detach() // the sandbox was killed, or the next daemon adopts it
		}
	}()
	for pause := adoptAgain; ; pause = min(2*pause, adoptSeldom) {
		finished := ctx.Err() != nil || b.now().State == sandbox.Ended
		if !finished {
			sb, finished = b.tryToAdopt(ctx, sb)
		}
		done()
		b.unlock()
		tried()
		if finished {
			return
		}
		var gone <-chan struct{}
		if sb != nil {
			gone = sb.Done()
		}
		select {
		case <-time.After(pause):
		case <-gone:
		case <-m.ctx.Done():
			return
		}
		if b.lock(m.ctx) != nil {
			return
		}
		ctx, done = b.untilKilled(m.ctx)
	}
}

// tryToAdopt is one attempt. sb is the machine that an earlier attempt has adopted but
// not attached, if any. It returns that machine for the next attempt. finished says
// that no further attempt is needed.
func (b *member) tryToAdopt(ctx context.Context, sb engine.Sandbox) (_ engine.Sandbox, finished bool) {
	m, s := b.manager, b.now()
	release, err := m.adoptTurns.take(ctx, s.Namespace)
	if err != nil {
		return sb, true
	}
	defer release()
	attempt, cancel := context.WithTimeoutCause(ctx, adoptPatience, errSilent)
	defer cancel()
	if sb == nil {
		sb, err = m.cfg.Engine.Adopt(attempt, m.machineDir(s.Machine))
	}
	if err == nil && s.State == sandbox.Running {
		// A pause or a capture may have been interrupted by the daemon's end.
		err = sb.Resume(attempt)
	}
	switch {
	case err == nil:
		if !b.attach(m.rejoin(attempt, s, sb)) {
			return sb, true
		}
		b.tellSilence()
		return nil, true
	case ctx.Err() != nil: // the sandbox was killed, or the daemon ends
		return sb, true
	case errors.Is(err, engine.ErrEnded):
		m.cfg.Log.Warn("a sandbox is gone", "sandbox", s.ID, "error", err)
		if err := b.ended(sandbox.ReasonLost, err.Error()); err != nil {
			m.cfg.Log.Error("end a sandbox that is gone", "sandbox", s.ID, "error", err)
		}
		return sb, true
	}
	if errors.Is(context.Cause(attempt), errSilent) {
		err = errors.Join(errSilent, err)
	}
	m.cfg.Log.Warn("a sandbox does not answer", "sandbox", s.ID, "error", err)
	b.mu.Lock()
	b.silent = err.Error()
	b.mu.Unlock()
	b.tellSilence()
	return sb, false
}

// tellSilence writes to the journal, for watchers, why the sandbox's machine does not
// answer, or that it answers again. The caller has the turn.
func (b *member) tellSilence() {
	if b.now().Unresponsive == b.latest().Unresponsive {
		return
	}
	if err := b.change(func(*sandbox.Sandbox) {}); err != nil && b.manager.ctx.Err() == nil {
		b.manager.cfg.Log.Error("write whether a sandbox answers", "sandbox", b.id, "error", err)
	}
}

// errSilent says that a machine has not answered in time.
var errSilent = errors.New("it has not answered within " + adoptPatience.String())

// answers refuses a call that needs the machine of a sandbox, while the machine is
// not attached. The caller has the turn.
func (b *member) answers() error {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.machine != nil || b.record.Machine == "" {
		return nil
	}
	return sandbox.Errorf(sandbox.CodeNotReady, "sandbox %s does not answer", b.record.Name).Because("%s", b.silent).
		Try("Try again later, or end it with `agentrun kill %s`", b.record.Name)
}
