package vmmctl

import (
	"fmt"
	"time"

	"agentrun.dev/internal/storage/extent"
	"agentrun.dev/internal/storage/layer"
)

// A vmm process may be under the control of its guest. So its data is checked
// before it is used.

// longest is longer than any request takes: a vmm cannot report a longer
// duration.
const longest = 24 * time.Hour

// Check checks the data that a vmm returned for a Save of a machine with that
// much memory and writable disks of these sizes.
func (s *Saved) Check(memory uint64, disks []uint64) error {
	if err := layer.CheckChange(s.Memory.Runs, s.Memory.Zeros, memory); err != nil {
		return fmt.Errorf("saved memory: %w", err)
	}
	if len(s.Disks) != len(disks) {
		return fmt.Errorf("%d disks were saved, not %d", len(s.Disks), len(disks))
	}
	for i, d := range s.Disks {
		if err := layer.CheckChange(d.Runs, d.Zeros, disks[i]); err != nil {
			return fmt.Errorf("saved disk %d: %w", i, err)
		}
	}
	for _, d := range []time.Duration{s.Pause, s.MedianWait, s.P99Wait, s.LongestWait} {
		if d < 0 || d > longest {
			return fmt.Errorf("a duration of %d ns was told, not one of at most %v", d, longest)
		}
	}
	// A page may be stored twice: by the copier, and for a write that waits.
	if s.Copied > 2*memory {
		return fmt.Errorf("%d bytes of %d were copied, it says", s.Copied, memory)
	}
	return nil
}

// Check checks the pages that a vmm returned for a machine with that much
// memory.
func (t *Touched) Check(memory uint64) error {
	if err := extent.Check(t.Written, memory, MaxTouched); err != nil {
		return fmt.Errorf("written pages: %w", err)
	}
	if err := extent.Check(t.Read, memory, MaxTouched); err != nil {
		return fmt.Errorf("read pages: %w", err)
	}
	return nil
}
