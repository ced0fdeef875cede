package guestmem

import (
	"math/bits"
	"sync/atomic"
	"time"
)

// Waits counts durations in classes: each octave is divided into four. Adding a
// duration allocates no memory and needs no lock.
type Waits struct {
	classes [waitClasses]atomic.Uint32
	longest atomic.Int64
}

const (
	// waitUnit is the width of the first classes. waitClasses is the number of
	// classes; the last begins at about an hour.
	waitUnit    = time.Microsecond
	waitParts   = 4
	waitClasses = waitParts * 32
)

// Add counts a duration.
func (w *Waits) Add(d time.Duration) {
	w.classes[waitClass(d)].Add(1)
	for {
		longest := w.longest.Load()
		if int64(d) <= longest || w.longest.CompareAndSwap(longest, int64(d)) {
			return
		}
	}
}

// waitClass is the class of a duration: a class per unit below waitParts units,
// then waitParts classes per octave.
func waitClass(d time.Duration) int {
	n := uint64(max(d, 0) / waitUnit)
	if n < waitParts {
		return int(n)
	}
	octave := bits.Len64(n) - 1 // at least 2
	return min(waitParts*(octave-1)+int(n>>(octave-2)&(waitParts-1)), waitClasses-1)
}

// waitLimit is the shortest duration above a class.
func waitLimit(class int) time.Duration {
	if class < waitParts {
		return time.Duration(class+1) * waitUnit
	}
	octave, part := class/waitParts+1, class%waitParts
	return time.Duration(waitParts+part+1) << (octave - 2) * waitUnit
}

// Count is the number of durations.
func (w *Waits) Count() (n uint64) {
	for i := range w.classes {
		n += uint64(w.classes[i].Load())
	}
	return n
}

// Longest is the longest duration, exactly.
func (w *Waits) Longest() time.Duration { return time.Duration(w.longest.Load()) }

// Quantile returns a duration that the fraction q of all durations does not
// exceed. It is at most a quarter too large. Without any durations it is 0.
func (w *Waits) Quantile(q float64) time.Duration {
	rank, seen := q*float64(w.Count()), uint64(0)
	for i := range w.classes {
		if seen += uint64(w.classes[i].Load()); seen > 0 && float64(seen) >= rank {
			return min(waitLimit(i), w.Longest())
		}
	}
	return 0
}
