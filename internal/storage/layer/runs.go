package layer

import (
	"fmt"

	"agentrun.dev/internal/storage/extent"
)

// CheckChange checks another process's description of a new layer for a stack of
// size bytes: the runs that the layer holds, and the runs that have become
// zeros. A page may be in only one of the two lists.
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
