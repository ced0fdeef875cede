package sandbox

import "time"

// Clock counts the time that a sandbox has run. It is saved with it.
type Clock struct {
	// Ran is the time until it last stood still.
	Ran time.Duration `json:"ran,omitempty"`
	// Since is when it went on; zero while it stands still.
	Since time.Time `json:"since,omitzero"`
}

// Elapsed is how long the sandbox has run.
func (c Clock) Elapsed(now time.Time) time.Duration {
	if c.Since.IsZero() {
		return c.Ran
	}
	// A wall clock that was set back must not make time that has run come back.
	return c.Ran + max(0, now.Sub(c.Since))
}

// Start lets the clock run on.
func (c *Clock) Start(now time.Time) {
	if c.Since.IsZero() {
		c.Since = now
	}
}

// Stop makes the clock stand still.
func (c *Clock) Stop(now time.Time) {
	c.Ran = c.Elapsed(now)
	c.Since = time.Time{}
}

// Left is how much of limit is left, never negative; it is false if there is no
// limit.
func (c Clock) Left(limit time.Duration, now time.Time) (time.Duration, bool) {
	if limit == 0 {
		return 0, false
	}
	return max(0, limit-c.Elapsed(now)), true
}
