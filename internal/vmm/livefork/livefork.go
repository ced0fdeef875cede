// Package livefork defines the measurements of a live fork, from the captured
// memory up to the API.
package livefork

import "time"

// Stats says how much a live fork cost its source.
type Stats struct {
	// Pause is how long the source stood still.
	Pause time.Duration
	// Captured is the time from the call until the copy was complete and could
	// be used for children. The engine measures it.
	Captured time.Duration
	// Waits counts the source's writes to memory that was not yet copied. Half
	// of them were served within MedianWait, 99 of 100 within P99Wait.
	Waits                            uint64
	MedianWait, P99Wait, LongestWait time.Duration
	// Copied is the bytes of memory that were stored.
	Copied uint64
	// WhyCopiedInPause is empty if memory was copied while the source was
	// running. If memory was copied in the pause, it is the reason.
	WhyCopiedInPause string
}
