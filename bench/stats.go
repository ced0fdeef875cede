// Package bench measures AgentRun on the machine that it runs on. Published numbers
// come from this package. Machines differ and are noisy, so each number is given
// beside the floor of the same run, the least time that KVM itself takes.
package bench

import (
	"slices"
	"time"
)

// Summary describes a sample of durations by its quantiles, in milliseconds.
type Summary struct {
	N   int     `json:"n"`
	P10 float64 `json:"p10_ms"`
	P50 float64 `json:"p50_ms"`
	P90 float64 `json:"p90_ms"`
	P99 float64 `json:"p99_ms"`
}

// Summarize sorts a sample and takes its quantiles.
func Summarize(sample []time.Duration) Summary {
	if len(sample) == 0 {
		return Summary{}
	}
	s := slices.Clone(sample)
	slices.Sort(s)
	at := func(q float64) float64 {
		return float64(s[int(q*float64(len(s)-1)+0.5)].Nanoseconds()) / 1e6
	}
	return Summary{N: len(s), P10: at(0.10), P50: at(0.50), P90: at(0.90), P99: at(0.99)}
}

// noisyRatio is the ratio of a floor's median to its tenth percentile from which on
// the floor was disturbed by other work on the machine.
const noisyRatio = 1.5

// Noisy reports whether a run's floor shows that its numbers are not meaningful.
func (s Summary) Noisy() bool { return s.P50 > noisyRatio*s.P10 }

// Median is the median; of two middle values it is the upper one.
func Median(sample []uint64) uint64 {
	if len(sample) == 0 {
		return 0
	}
	s := slices.Clone(sample)
	slices.Sort(s)
	return s[len(s)/2]
}

// Spread describes a few repetitions of one measurement.
type Spread struct {
	Min float64 `json:"min"`
	P50 float64 `json:"p50"`
	Max float64 `json:"max"`
}

// SpreadOf sorts the values. Of two middle values, its median is the upper one.
func SpreadOf(sample []float64) Spread {
	if len(sample) == 0 {
		return Spread{}
	}
	s := slices.Clone(sample)
	slices.Sort(s)
	return Spread{Min: s[0], P50: s[len(s)/2], Max: s[len(s)-1]}
}
