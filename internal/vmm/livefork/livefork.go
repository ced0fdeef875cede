// Package livefork owns what is told of a live fork, from the memory that is
// captured to whoever asks what it cost.
package livefork

import "time"

// Stats is what a live fork cost its source.
type Stats struct {
	// Pause is for how long the source stood still.
	Pause time.Duration
	// Captured is the time from the call until the copy was complete and
	// children could be made of it. The engine measures it.
	Captured time.Duration
	// Waits counts the source's writes to memory that was not yet copied. Half
	// of them, and 99 of 100, were being served for no longer than MedianWait
	// and P99Wait.
	Waits                            uint64
	MedianWait, P99Wait, LongestWait time.Duration
	// Copied is the bytes of memory that were stored.
	Copied uint64
	// WhyCopiedInPause is empty if memory was copied beside the running source.
	// If it was copied in the pause, it says why.
	WhyCopiedInPause string
}
