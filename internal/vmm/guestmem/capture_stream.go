package guestmem

import (
	"errors"
	"io"

	"agentrun.dev/internal/storage/extent"
)

// Stream writes the content of the runs to w, one after the other. It takes the
// place of Copy for captures without userfaultfd. The guest stands still until
// Stream has returned.
func (c *Capture) Stream(w io.Writer, runs []extent.Run) error {
	if c.uffd >= 0 {
		return errors.New("stream memory: the guest may run meanwhile")
	}
	return c.m.WriteRuns(w, runs)
}
