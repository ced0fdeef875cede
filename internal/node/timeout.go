package node

import (
	"cmp"
	"errors"
	"time"

	"agentrun.dev/internal/sandbox"
)

// arm sets the timer for the sandbox's earliest timeout. The caller holds b.mu.
func (b *member) arm() {
	if b.timer != nil {
		b.timer.Stop()
		b.timer = nil
	}
	now := time.Now()
	switch {
	case b.record.State != sandbox.Running:
		b.used.Stop(now)
	case b.users > 0:
		b.used = sandbox.Clock{}
	default:
		b.used.Start(now)
	}
	if wait, limited := b.wait(now); limited && !b.detached {
		b.timer = time.AfterFunc(wait, b.expire)
	}
}

// wait returns the time until the timer is needed, if it ever is. The caller holds b.mu.
func (b *member) wait(now time.Time) (wait time.Duration, limited bool) {
	next, limited := b.next(now, b.expiring)
	if !b.record.Expires.IsZero() { // also if another timeout comes first
		next.left = min(next.left, clockEvery)
	}
	return max(next.left, b.patient.Sub(now)), limited
}

// clockEvery is how often the clock is checked at least for a sandbox with an end time:
// clocks are set, and timers stop while a host is suspended.
const clockEvery = time.Minute

// timeUp is one end of a sandbox's time: when, why, and the action.
type timeUp struct {
	left   time.Duration
	why    sandbox.Reason
	action sandbox.TimeoutAction
}

// cuts reports whether the timeout interrupts other work on the sandbox: such work does not
// prolong the sandbox's life. The sandbox is not idle during such work.
func (t timeUp) cuts() bool {
	return t.why == sandbox.ReasonTimeout && t.action == sandbox.TimeoutKill
}

// next returns the sandbox's earliest timeout, if it has one. With cuts it looks only at
// timeouts that cut. The caller holds b.mu.
func (b *member) next(now time.Time, cuts bool) (next timeUp, limited bool) {
	r := b.record
	if r.State == sandbox.Starting || r.State == sandbox.Ended {
		return next, false
	}
	sooner := func(t timeUp) {
		if (!limited || t.left < next.left) && (!cuts || t.cuts()) {
			next, limited = t, true
		}
	}
	if !r.Expires.IsZero() {
		sooner(timeUp{max(0, r.Expires.Sub(now)), sandbox.ReasonTimeout, sandbox.TimeoutKill})
	}
	if r.State != sandbox.Running {
		return next, limited
	}
	action := cmp.Or(r.OnTimeout, sandbox.TimeoutKill)
	if life, ok := r.Clock.Left(r.Timeout, now); ok {
		sooner(timeUp{life, sandbox.ReasonTimeout, action})
	}
	if b.users > 0 {
		return next, limited
	}
	if idle, ok := b.used.Left(r.IdleTimeout, now); ok {
		sooner(timeUp{idle, sandbox.ReasonIdle, action})
	}
	return next, limited
}

// due returns next, and whether that timeout must be acted upon now. The caller holds
// b.mu.
func (b *member) due(now time.Time, cuts bool) (next timeUp, due bool) {
	next, limited := b.next(now, cuts)
	return next, limited && next.left == 0 && !now.Before(b.patient)
}

// expire acts upon a timeout that has passed.
func (b *member) expire() {
	m := b.manager
	b.mu.Lock()
	up, due := b.due(time.Now(), b.expiring)
	if !due {
		b.arm() // only the clock had to be checked
	}
	lock := b.lock
	switch {
	case due && up.cuts():
		lock = b.lockToEnd
	case due:
		b.expiring = true
		b.arm() // it may wait longer than the sandbox lives
		defer b.expired()
	}
	b.mu.Unlock()
	if !due {
		return
	}
	if lock(m.ctx) != nil {
		return
	}
	defer b.unlock()
	b.mu.Lock()
	if b.record.State == sandbox.Ended {
		b.mu.Unlock()
		return
	}
	if !up.cuts() || !b.killed { // otherwise its machine has ended, and there is no way back
		up, due = b.due(time.Now(), up.cuts())
	}
	if !due {
		b.arm() // it was extended or used, or is tried later
	}
	b.mu.Unlock()
	if !due {
		return
	}
	ctx, done := b.untilKilled(m.ctx)
	defer done()
	var err error
	switch up.action {
	case sandbox.TimeoutPause:
		err = b.pause(ctx)
	case sandbox.TimeoutHibernate:
		err = b.hibernate(ctx, func() bool {
			b.mu.Lock()
			defer b.mu.Unlock()
			_, due := b.due(time.Now(), false)
			return due
		})
	default:
		err = b.ended(up.why, "")
	}
	if errors.Is(err, errNotDue) || ctx.Err() != nil { // the sandbox is in use, or is being ended
		b.mu.Lock()
		b.arm()
		b.mu.Unlock()
		return
	}
	if err == nil && up.action != sandbox.TimeoutKill {
		// Whoever resumes it wants the full timeout again.
		err = b.change(func(s *sandbox.Sandbox) { s.Clock = sandbox.Clock{} })
		b.mu.Lock()
		b.used = sandbox.Clock{}
		b.mu.Unlock()
	}
	if err != nil && m.ctx.Err() == nil {
		m.cfg.Log.Error("a sandbox's time is up", "sandbox", b.id, "action", up.action, "error", err)
		retry := retryExpiry
		if sandbox.HasCode(err, sandbox.CodeCapacity) {
			retry = retryRefused
		}
		// The attempt has set the timer again, to now.
		b.mu.Lock()
		b.patient = time.Now().Add(retry)
		b.arm()
		b.mu.Unlock()
	}
}

// expired marks the end of expire's work.
func (b *member) expired() {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.expiring = false; b.manager.ctx.Err() == nil {
		b.arm()
	}
}

// retryExpiry is the pause before a failed timeout is tried again. retryRefused
// is the pause after the quota had no room for the snapshot.
const (
	retryExpiry  = 5 * time.Second
	retryRefused = time.Minute
)
