package bench

import (
	"time"

	"agentrun.dev/internal/vmm/guestmem"
)

// Stalls describes how long a source's writes had to wait during a fork. Of the
// writes that had to wait, P50 is the median, P99 the 99th percentile, and Longest
// the maximum. Each fork is one sample.
type Stalls struct {
	P50     Summary `json:"p50"`
	P99     Summary `json:"p99"`
	Longest Summary `json:"longest"`
}

// stallSamples are the samples of a Stalls.
type stallSamples struct{ p50, p99, longest []time.Duration }

func (s *stallSamples) add(p50, p99, longest time.Duration) {
	s.p50, s.p99, s.longest = append(s.p50, p50), append(s.p99, p99), append(s.longest, longest)
}

// capture adds the statistics of a capture.
func (s *stallSamples) capture(st guestmem.CaptureStats) {
	if st.Waits > 0 {
		s.add(st.MedianWait, st.P99Wait, st.LongestWait)
	}
}

func (s *stallSamples) summarize() Stalls {
	return Stalls{Summarize(s.p50), Summarize(s.p99), Summarize(s.longest)}
}

func (s Stalls) rows(name, indent string) []row {
	return []row{{indent + name + ", p50", s.P50}, {indent + "p99", s.P99}, {indent + "longest", s.Longest}}
}

// writeClasses is how many classes the bare guest sorts the durations of its writes
// into (guest/testguest/testguest.c).
const writeClasses = 128

// writes are the writes of a bare guest's pass over its memory.
type writes struct {
	longest time.Duration
	classes [writeClasses]uint32
	khz     uint64 // of the TSC
}

// slowest is the duration that the given part of the n slowest writes does not
// exceed: the upper bound of a class.
func (w *writes) slowest(n uint64, part float64) time.Duration {
	beyond := uint64((1 - part) * float64(n)) // how many writes are slower
	for class := writeClasses - 1; class >= 0; class-- {
		k := uint64(w.classes[class])
		if k <= beyond {
			beyond -= k
			continue
		}
		octave, quarter := class/4, class%4
		ticks := uint64(4+quarter+1) << octave
		return min(inTime(ticks, w.khz), w.longest)
	}
	return 0
}

// inTime converts ticks of a TSC to a duration.
func inTime(ticks, khz uint64) time.Duration {
	if khz == 0 {
		return 0
	}
	return time.Duration(float64(ticks) * 1e6 / float64(khz))
}
