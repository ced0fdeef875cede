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
	// position is where it is in lists of its namespace.
	position string

	// turn holds one token while nobody changes what the sandbox is doing. It
	// is a mutex that can be waited for with a context.
	turn chan struct{}

	// token is the hash of the sandbox's token, empty for the derived one; until ends when
	// that is replaced, by revoke. Whoever uses the sandbox when it ends is told so. The
	// manager's mutex protects them.
	token  sandbox.TokenHash
	until  context.Context
	revoke context.CancelFunc

	mu      sync.Mutex       // protects all following fields
	record  *sandbox.Sandbox // as it is in the journal; it is replaced, never changed
	machine engine.Sandbox
	killed  bool // by request, while somebody else had the turn
	// silent is why the sandbox has no machine yet that an earlier daemon has started:
	// it does not answer. Empty is a sandbox that was not tried, or has its machine.
	silent   string
	detached bool               // no machine is attached any more
	cancel   context.CancelFunc // ends what whoever has the turn does; nil if nobody has
	users    int                // requests that are being served
	conns    int                // connections to its ports
	used     sandbox.Clock      // runs while it runs and nobody uses it
	timer    *time.Timer        // for whichever of its timeouts is next
	expiring bool               // expire waits to do what one of them says, or does it
	patient  time.Time          // before which none is acted upon: it was tried in vain
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

// now returns the record as it is now.
func (b *member) now() sandbox.Sandbox {
	b.mu.Lock()
	defer b.mu.Unlock()
	s := *b.record
	s.Unresponsive = b.silent
	return s
}

// latest is the record as it was written last, which nobody changes.
func (b *member) latest() *sandbox.Sandbox {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.record
}

// change writes a change of the record to the journal, and then makes it. The
// caller has the turn.
func (b *member) change(do func(*sandbox.Sandbox)) error { return b.changeAnd(do, nil) }

// changeAnd is change with what else belongs into the same transaction.
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

// wrote says that the record is in the journal as next.
func (b *member) wrote(next *sandbox.Sandbox) {
	b.mu.Lock()
	b.record = next
	b.arm()
	b.mu.Unlock()
	b.manager.noticeStatus()
}

// revert is change for what takes back an intent. The sandbox is what it is, also
// where the journal cannot be written: that has the intent then, of which the next
// daemon makes the same.
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
// has let go of the machines of its sandboxes already.
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

// died ends a sandbox whose machine has ended by itself. While that cannot be written it is
// tried again: nobody else would find out.
func (b *member) died(sb engine.Sandbox) {
	m := b.manager
	for pause := retryExpiry; b.lock(m.ctx) == nil; pause = min(2*pause, retryRefused) {
		err := b.endDead(sb)
		over := b.now().State == sandbox.Ended
		b.unlock()
		if err != nil && (over || pause == retryExpiry) { // said once
			m.cfg.Log.Error("end a sandbox that has died", "sandbox", b.id, "error", err)
		}
		if err == nil || over {
			return
		}
		select {
		case <-time.After(pause):
		case <-m.ctx.Done(): // the next daemon finds out
			return
		}
	}
}

// endDead is one attempt of died, by whoever has the turn.
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

// ended ends the sandbox in the journal, and then what is left of it: whoever
// is killed in between leaves what the next daemon sweeps. The caller has the
// turn.
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

// dropMachine ends the machine that the sandbox had as last says.
func (b *member) dropMachine(last sandbox.Sandbox) error {
	b.mu.Lock()
	sb := b.machine
	b.machine = nil
	b.arm() // one that is hibernated may have an end time
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

// detach lets the machine go.
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

// findFor is find, for a call that is for the sandbox that meets preconditions: it may have
// ended, and its name be another's by now. Whether the resource version is the one that is
// meant is to be seen when it is the caller's turn.
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

// endedAs is the sandbox of a name and an id that has ended, if it is remembered.
func (m *Manager) endedAs(k sandbox.Key, id sandbox.ID) (last sandbox.Sandbox, found bool, err error) {
	err = m.db.View(func(tx *journal.Tx) (err error) {
		last, found, err = ended.Get(tx, endedKey(sandbox.Sandbox{Key: k, ID: id}))
		return err
	})
	return last, found, err
}

// whyGone is the error for a sandbox that is not there: it has ended, or never
// was.
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
	case !found: // it was forgotten meanwhile
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
