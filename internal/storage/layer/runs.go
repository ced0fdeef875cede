package layer

import (
	"fmt"

	"agentrun.dev/internal/storage/extent"
)

// CheckChange checks what another process says about a new layer of a stack of
// size bytes: the runs that the layer holds, and those that have become zeros. A
// page is in one of the two lists at most.
func CheckChange(runs, zeros []extent.Run, size uint64) error {
	if err := extent.Check(runs, size, MaxRuns); err != nil {
		return err
	}
	if err := extent.Check(zeros, size, MaxRuns); err != nil {
		return fmt.Errorf("zeros: %w", err)
	}
	if both := extent.Intersect(runs, zeros); len(both) > 0 {
		return fmt.Errorf("runs and zeros overlap at %#x+%#x", both[0].Start, both[0].Length)
	}
	return nil
}
