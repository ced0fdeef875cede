package sandbox

import "time"

// rearm sets the timer for the next of the sandbox's timeouts.
func (b *member) rearm() {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.arm()
}

// arm is rearm for who has the mutex.
func (b *member) arm() {
	if b.timer != nil {
		b.timer.Stop()
		b.timer = nil
	}
	now := time.Now()
	if b.record.State != Running {
		b.used.stop(now)
		return
	}
	if b.users > 0 {
		b.used = Clock{}
	} else {
		b.used.start(now)
	}
	left, _, limited := b.next(now)
	if limited {
		b.timer = time.AfterFunc(left, b.expire)
	}
}

// next is how long it is until the next timeout, and why that is one.
func (b *member) next(now time.Time) (left time.Duration, why Reason, limited bool) {
	if life, ok := b.record.Clock.left(b.record.Timeout, now); ok {
		left, why, limited = life, ReasonTimeout, true
	}
	if b.users > 0 {
		return left, why, limited
	}
	if idle, ok := b.used.left(b.record.IdleTimeout, now); ok && (!limited || idle < left) {
		left, why, limited = idle, ReasonIdle, true
	}
	return left, why, limited
}

// expire does what is to be done when a timeout is up.
func (b *member) expire() {
	m := b.manager
	if b.lock(m.ctx) != nil {
		return
	}
	defer b.unlock()
	b.mu.Lock()
	left, why, limited := b.next(time.Now())
	due := b.record.State == Running && limited && left == 0
	action := b.record.OnTimeout
	if !due {
		b.arm() // it was extended, or used
	}
	b.mu.Unlock()
	if !due {
		return
	}
	var err error
	switch action {
	case TimeoutPause:
		err = b.pause(m.ctx)
	case TimeoutHibernate:
		err = b.hibernate(m.ctx)
	default:
		err = b.ended(why, "")
	}
	if err == nil && action != TimeoutKill {
		// Who lets it go on wants it to run for as long again.
		err = b.change(func(s *Sandbox) { s.Clock = Clock{} })
		b.mu.Lock()
		b.used = Clock{}
		b.mu.Unlock()
	}
	if err != nil && m.ctx.Err() == nil {
		m.cfg.Log.Error("a sandbox's time is up", "sandbox", b.id, "action", action, "error", err)
		time.AfterFunc(retryExpiry, b.rearm)
	}
}

// retryExpiry is when a timeout is tried again that could not be acted upon.
const retryExpiry = 5 * time.Second
