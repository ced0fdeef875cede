package node

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"time"

	"agentrun.dev/internal/engine"
	"agentrun.dev/internal/node/journal"
	"agentrun.dev/internal/sandbox"
)

// member is a sandbox that has not ended, with the machine that runs it.
type member struct {
	manager *Manager
	id      sandbox.ID
	key     sandbox.Key
	// position is its place in lists of its namespace.
	position string

	// turn holds one token, which is taken by the goroutine that changes the
	// state of the sandbox. It is a mutex that can be waited for with a
	// context.
	turn chan struct{}

	// token is the hash of the sandbox's token, empty for the derived one. When the token
	// is replaced, revoke ends until, and so tells the users of the sandbox. The manager's
	// mutex protects all three.
	token  sandbox.TokenHash
	until  context.Context
	revoke context.CancelFunc

	mu      sync.Mutex       // protects all following fields
	record  *sandbox.Sandbox // as it is in the journal; it is replaced, never changed
	machine engine.Sandbox
	killed  bool // by request, while another goroutine had the turn
	// silent says why the sandbox does not have its machine, which an earlier daemon
	// has started: it does not answer. It is empty if the machine was not tried yet,
	// or is attached.
	silent   string
	detached bool               // no machine may be attached any more
	cancel   context.CancelFunc // ends the operation of the turn's holder; nil if the turn is free
	users    int                // requests that are being served
	conns    int                // connections to its ports
	used     sandbox.Clock      // advances while the sandbox runs without a user
	timer    *time.Timer        // for the earliest of its timeouts
	expiring bool               // expire is acting upon a timeout, or waits for its turn to do so
	patient  time.Time          // no timeout is acted upon before this time: an attempt has failed
}

func (m *Manager) newMember(s sandbox.Sandbox) *member {
	b := &member{manager: m, id: s.ID, key: s.Key, position: s.Position(), record: &s, turn: make(chan struct{}, 1)}
	b.turn <- struct{}{}
	b.hold(s.Token)
	return b
}

// lock waits for the sandbox's turn.
func (b *member) lock(ctx context.Context) error {
	select {
	case <-b.turn:
		return nil
	case <-ctx.Done():
		return fmt.Errorf("sandbox %s: %w", b.id, ctx.Err())
	}
}

func (b *member) unlock() { b.turn <- struct{}{} }

// now returns a copy of the current record.
func (b *member) now() sandbox.Sandbox {
	b.mu.Lock()
	defer b.mu.Unlock()
	s := *b.record
	s.Unresponsive = b.silent
	return s
}

// latest returns the record as it was written last. It must not be changed.
func (b *member) latest() *sandbox.Sandbox {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.record
}

// change writes a change of the record to the journal, and then makes it. The
// caller has the turn.
func (b *member) change(do func(*sandbox.Sandbox)) error { return b.changeAnd(do, nil) }

// changeAnd is change, with further writes in the same transaction.
func (b *member) changeAnd(do func(*sandbox.Sandbox), also record[sandbox.Sandbox]) error {
	next := b.now()
	do(&next)
	written := func() {}
	if err := b.manager.db.Update(func(tx *journal.Tx) (err error) {
		written, err = b.manager.write(tx, &next)
		return errors.Join(err, also.write(tx, next))
	}); err != nil {
		return fmt.Errorf("sandbox %s: %w", b.id, err)
	}
	written()
	b.wrote(&next)
	return nil
}

// wrote makes next the record; it is in the journal already.
func (b *member) wrote(next *sandbox.Sandbox) {
	b.mu.Lock()
	b.record = next
	b.arm()
	b.mu.Unlock()
	b.manager.noticeStatus()
}

// revert is change for an operation that takes back an intent. The record in
// memory is right even if the journal cannot be written. The journal then still
// has the intent, from which the next daemon comes to the same state.
func (b *member) revert(do func(*sandbox.Sandbox)) error {
	err := b.change(do)
	if err != nil {
		b.mu.Lock()
		defer b.mu.Unlock()
		next := *b.record
		do(&next)
		b.record = &next
		b.arm()
	}
	return err
}

// attach gives the sandbox its machine and watches it. It reports false if the daemon
// has already let go of the machines of its sandboxes.
func (b *member) attach(sb engine.Sandbox) bool {
	b.mu.Lock()
	b.machine, b.killed, b.silent = sb, false, ""
	detached := b.detached
	b.arm()
	b.mu.Unlock()
	b.manager.work.Go(func() {
		select {
		case <-sb.Done():
			b.died(sb)
		case <-b.manager.ctx.Done():
		}
	})
	return !detached
}

// died ends a sandbox whose machine has ended by itself. If that cannot be written, it
// tries again: nothing else would notice the machine's end.
func (b *member) died(sb engine.Sandbox) {
	m := b.manager
	for pause := retryExpiry; b.lock(m.ctx) == nil; pause = min(2*pause, retryRefused) {
		err := b.endDead(sb)
		over := b.now().State == sandbox.Ended
		b.unlock()
		if err != nil && (over || pause == retryExpiry) { // logged only once
			m.cfg.Log.Error("end a sandbox that has died", "sandbox", b.id, "error", err)
		}
		if err == nil || over {
			return
		}
		select {
		case <-time.After(pause):
		case <-m.ctx.Done(): // the next daemon notices it
			return
		}
	}
}

// endDead is one attempt of died. The caller has the turn.
func (b *member) endDead(sb engine.Sandbox) error {
	b.mu.Lock()
	mine := b.machine == sb
	b.mu.Unlock()
	if !mine {
		return nil // it was hibernated, or killed by request
	}
	cause := sb.Wait()
	reason, detail := sandbox.ReasonCrashed, cause.Error()
	switch {
	case b.wasKilled():
		reason, detail = sandbox.ReasonKilled, ""
	case errors.Is(cause, engine.ErrOutOfMemory):
		reason = sandbox.ReasonOutOfMemory
	case errors.Is(cause, engine.ErrPoweredOff):
		reason = sandbox.ReasonExited
	}
	return b.ended(reason, detail)
}

// ended ends the sandbox in the journal, and only then removes its machine and
// files. If the daemon is killed in between, the next one sweeps them. The
// caller has the turn.
func (b *member) ended(reason sandbox.Reason, detail string) error {
	m, last := b.manager, b.now()
	if err := b.change(func(s *sandbox.Sandbox) { s.End(reason, detail, time.Now()) }); err != nil {
		return err
	}
	m.observer.Ended(last.PoolKey(), reason)
	m.mu.Lock()
	m.roster.remove(b)
	m.mu.Unlock()
	var errs []error
	if last.Asleep != "" {
		errs = append(errs, m.removeSnapshot(m.asleepDir(last.Asleep)))
		m.capacity.discard(last.Namespace, last.Kept)
	}
	errs = append(errs, b.dropMachine(last))
	return errors.Join(errs...)
}

// dropMachine ends the machine that the sandbox had; last is its record from
// before.
func (b *member) dropMachine(last sandbox.Sandbox) error {
	b.mu.Lock()
	sb := b.machine
	b.machine = nil
	b.arm() // a hibernated sandbox may have an end time
	b.mu.Unlock()
	if last.Machine == "" {
		return nil
	}
	var errs []error
	if sb != nil {
		errs = append(errs, sb.Close())
	}
	m := b.manager
	errs = append(errs, m.cfg.Engine.Remove(m.ctx, m.machineDir(last.Machine)))
	m.capacity.release(last.Namespace, last.Memory, last.Holds()...)
	m.removed()
	m.refill()
	return errors.Join(errs...)
}

// detach lets the machine go, without ending it.
func (b *member) detach() error {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.detached = true
	if b.timer != nil {
		b.timer.Stop()
	}
	if b.machine == nil {
		return nil
	}
	return b.machine.Detach()
}

// find returns the sandbox of a name.
func (m *Manager) find(k sandbox.Key) (*member, error) {
	m.mu.Lock()
	b := m.roster.get(k)
	m.mu.Unlock()
	if b == nil {
		return nil, m.whyGone(k)
	}
	return b, nil
}

// findFor is find for a call with preconditions on the sandbox. That sandbox may have
// ended, and another may have its name by now. A resource version can only be compared
// later, when the caller has the turn.
func (m *Manager) findFor(k sandbox.Key, when []sandbox.Precondition) (*member, error) {
	b, err := m.find(k)
	if err != nil {
		return nil, err
	}
	for _, p := range when {
		if p.ID != "" && p.ID != b.id {
			last, found, err := m.endedAs(k, p.ID)
			if err == nil && found {
				err = errEnded(last)
			}
			if err != nil {
				return nil, err
			}
		}
		p.Version = 0
		if err := b.now().Identity().Meets(p); err != nil {
			return nil, err
		}
	}
	return b, nil
}

// endedAs returns the ended sandbox of a name and an id, if it is remembered.
func (m *Manager) endedAs(k sandbox.Key, id sandbox.ID) (last sandbox.Sandbox, found bool, err error) {
	err = m.db.View(func(tx *journal.Tx) (err error) {
		last, found, err = ended.Get(tx, endedKey(sandbox.Sandbox{Key: k, ID: id}))
		return err
	})
	return last, found, err
}

// whyGone is the error for a sandbox that is not there: it has ended, or never
// existed.
func (m *Manager) whyGone(k sandbox.Key) error {
	of, found := m.history.lastOf(k)
	if !found {
		return sandbox.NotFound(sandbox.KindSandbox, k)
	}
	var last sandbox.Sandbox
	err := m.db.View(func(tx *journal.Tx) (err error) {
		last, found, err = ended.Get(tx, of.String())
		return err
	})
	switch {
	case err != nil:
		return err
	case !found: // it was forgotten in the meantime
		return sandbox.NotFound(sandbox.KindSandbox, k)
	}
	return errEnded(last)
}

// errEnded is the error for a sandbox that has ended.
func errEnded(last sandbox.Sandbox) error {
	e := sandbox.Errorf(sandbox.CodeEnded, "sandbox %s has ended (%s)", last.Name, last.Reason)
	if last.Detail != "" {
		e = e.Because("%s", last.Detail)
	}
	return e.Try("Claim a new one")
}
