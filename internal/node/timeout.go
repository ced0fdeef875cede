package node

import (
	"errors"
	"time"

	"agentrun.dev/internal/sandbox"
)

// arm sets the timer for the next of the sandbox's timeouts. The caller holds b.mu.
func (b *member) arm() {
	if b.timer != nil {
		b.timer.Stop()
		b.timer = nil
	}
	now := time.Now()
	if b.record.State != sandbox.Running {
		b.used.Stop(now)
		return
	}
	if b.users > 0 {
		b.used = sandbox.Clock{}
	} else {
		b.used.Start(now)
	}
	left, _, limited := b.next(now)
	if left = max(left, b.patient.Sub(now)); limited {
		b.timer = time.AfterFunc(left, b.expire)
	}
}

// next is how long it is until the next timeout, and why that is one.
func (b *member) next(now time.Time) (left time.Duration, why sandbox.Reason, limited bool) {
	if life, ok := b.record.Clock.Left(b.record.Timeout, now); ok {
		left, why, limited = life, sandbox.ReasonTimeout, true
	}
	if b.users > 0 {
		return left, why, limited
	}
	if idle, ok := b.used.Left(b.record.IdleTimeout, now); ok && (!limited || idle < left) {
		left, why, limited = idle, sandbox.ReasonIdle, true
	}
	return left, why, limited
}

// due is next, and whether that timeout is to be acted upon now. The caller holds b.mu.
func (b *member) due(now time.Time) (left time.Duration, why sandbox.Reason, due bool) {
	left, why, limited := b.next(now)
	return left, why, b.record.State == sandbox.Running && limited && left == 0 && !now.Before(b.patient)
}

// expire does what is to be done when a timeout is up.
func (b *member) expire() {
	m := b.manager
	b.mu.Lock()
	now := time.Now()
	_, why, due := b.due(now)
	// What is done with a sandbox does not make its life longer. It is not idle meanwhile.
	cut := due && why == sandbox.ReasonTimeout && (b.record.OnTimeout == sandbox.TimeoutKill || b.record.OnTimeout == "")
	b.mu.Unlock()
	lock := b.lock
	if cut {
		lock = b.lockToEnd
	}
	if lock(m.ctx) != nil {
		return
	}
	defer b.unlock()
	b.mu.Lock()
	action := b.record.OnTimeout
	if b.record.State == sandbox.Ended {
		b.mu.Unlock()
		return
	}
	if !cut {
		_, why, due = b.due(time.Now())
	}
	if !due {
		b.arm() // it was extended or used, or is to be tried later
	}
	b.mu.Unlock()
	if !due {
		return
	}
	ctx, done := b.untilKilled(m.ctx)
	defer done()
	var err error
	switch action {
	case sandbox.TimeoutPause:
		err = b.pause(ctx)
	case sandbox.TimeoutHibernate:
		err = b.hibernate(ctx, func() bool {
			b.mu.Lock()
			defer b.mu.Unlock()
			_, _, due := b.due(time.Now())
			return due
		})
	default:
		err = b.ended(why, "")
	}
	if errors.Is(err, errNotDue) || ctx.Err() != nil { // it is used, or being ended
		b.mu.Lock()
		b.arm()
		b.mu.Unlock()
		return
	}
	if err == nil && action != sandbox.TimeoutKill {
		// Who lets it go on wants it to run for as long again.
		err = b.change(func(s *sandbox.Sandbox) { s.Clock = sandbox.Clock{} })
		b.mu.Lock()
		b.used = sandbox.Clock{}
		b.mu.Unlock()
	}
	if err != nil && m.ctx.Err() == nil {
		m.cfg.Log.Error("a sandbox's time is up", "sandbox", b.id, "action", action, "error", err)
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

// retryExpiry is when a timeout is tried again that could not be acted upon, and
// retryRefused where the quota had no room for what was written.
const (
	retryExpiry  = 5 * time.Second
	retryRefused = time.Minute
)
