package guestmem

import (
	"errors"
	"io"

	"agentrun.dev/internal/storage/extent"
)

// Stream writes the content of the runs to w, one after the other, in the place
// of Copy. The guest stands still until it has returned, which is the case of
// captures without userfaultfd.
func (c *Capture) Stream(w io.Writer, runs []extent.Run) error {
	if c.uffd >= 0 {
		return errors.New("stream memory: the guest may run meanwhile")
	}
	return c.m.WriteRuns(w, runs)
}
