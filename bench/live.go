package bench

import (
	"fmt"
	"io"
	"slices"
	"time"
)

// LiveConfig configures Live and LiveBare.
type LiveConfig struct {
	// Guest of Linux contains the program touch-pages in its root filesystem.
	Guest
	// Dirty is how many bytes the source has written before each fork, in pages that
	// are Stride apart.
	Dirty  uint64
	Stride int
	// Count is how many forks are measured.
	Count int
	// Patience is how long the bare guest's captures yield to it.
	Patience time.Duration
}

// LiveReport is the result of Live and LiveBare. Each fork is of a busy source that
// has written Dirty bytes.
type LiveReport struct {
	Engine string `json:"engine"`
	Guest  string `json:"guest"`
	Memory uint64 `json:"memory_bytes"`
	VCPUs  int    `json:"vcpus"`
	Dirty  uint64 `json:"dirty_bytes"`
	Stride int    `json:"stride_pages"`
	Count  int    `json:"count"`
	// WhyCopiedInPause says why memory was copied during the pause; empty if it was
	// not.
	WhyCopiedInPause string  `json:"stood_still,omitempty"`
	Floor            Summary `json:"floor"`
	// Pause is how long the source stood still, measured on the host. Gap is the
	// longest gap between two readings of the TSC that the guest saw around the fork.
	// QuietGap is the same without a fork, which is the effect of the host's other
	// work. If KVM can stop the guest's TSC, the TSC does not count a pause, and the
	// gap is meaningless.
	Pause    Summary `json:"pause"`
	Gap      Summary `json:"guest_gap"`
	QuietGap Summary `json:"guest_gap_without_fork"`
	// Writes is the 99th percentile of all writes in the source's first pass over its
	// dirty memory, by the guest's TSC. The pass begins when the fork is called.
	// QuietWrites is the same without a fork. Stalls are the writes of that pass that
	// had to wait. QuietStalls are as many of the slowest writes without a fork. Of a
	// Linux guest only the longest is known. Served is how long the host took to
	// answer the writes.
	Writes      Summary `json:"write_p99"`
	QuietWrites Summary `json:"write_p99_without_fork"`
	Stalls      Stalls  `json:"stalls"`
	QuietStalls Stalls  `json:"slowest_writes_without_fork"`
	Served      Stalls  `json:"stalls_served"`
	// Pass is how long that pass took. Next is the first pass after the fork's copy
	// is complete. QuietPass is a pass without a fork.
	Pass      Summary `json:"pass_during_fork"`
	Next      Summary `json:"next_pass"`
	QuietPass Summary `json:"pass_without_fork"`
	// Silence is the longest time for which a program in a Linux source that prints
	// every 2 ms was not heard outside, during a fork of one child. QuietSilence is
	// the same without a fork.
	Silence      Summary `json:"silence"`
	QuietSilence Summary `json:"silence_without_fork"`
	// Captured is the time from the call until the copy is complete. One is the time
	// until a single child has answered, and Ten until the last of ten children has.
	Captured Summary `json:"captured"`
	One      Summary `json:"first_answer_of_one"`
	Ten      Summary `json:"first_answer_of_ten"`
	Copied   uint64  `json:"copied_bytes"`
	Noisy    bool    `json:"noisy"`
}

func newLiveReport(guest string, cfg LiveConfig) LiveReport {
	return LiveReport{
		Engine: string(cfg.engine()), Guest: guest, Memory: cfg.Memory, VCPUs: cfg.VCPUs, Dirty: cfg.Dirty, Stride: cfg.Stride, Count: cfg.Count,
	}
}

// liveSamples are the samples of a LiveReport.
type liveSamples struct {
	floor, pause, gap, quietGap, pass, next, quietPass, silence, quietSilence, captured, one, ten []time.Duration

	writes, quietWrites         []time.Duration
	stalls, quietStalls, served stallSamples
}

func (s *liveSamples) summarize(r *LiveReport) {
	r.Floor, r.Pause, r.Gap, r.QuietGap = Summarize(s.floor), Summarize(s.pause), Summarize(s.gap), Summarize(s.quietGap)
	r.Writes, r.QuietWrites = Summarize(s.writes), Summarize(s.quietWrites)
	r.Stalls, r.QuietStalls, r.Served = s.stalls.summarize(), s.quietStalls.summarize(), s.served.summarize()
	r.Pass, r.Next, r.QuietPass = Summarize(s.pass), Summarize(s.next), Summarize(s.quietPass)
	r.QuietSilence = Summarize(s.quietSilence)
	r.Silence, r.Captured, r.One, r.Ten = Summarize(s.silence), Summarize(s.captured), Summarize(s.one), Summarize(s.ten)
	r.Noisy = r.Floor.Noisy()
}

// Print writes the report as a table.
func (r LiveReport) Print(w io.Writer) error {
	fmt.Fprintf(w, "%d live forks of a %s guest on %s, %d MiB, %d vCPU, %d MiB written, every page of %d; milliseconds\n",
		r.Count, r.Guest, r.Engine, r.Memory>>20, r.VCPUs, r.Dirty>>20, r.Stride)
	rows := []row{
		{"floor", r.Floor}, {"pause", r.Pause}, {"longest gap in the guest's TSC", r.Gap},
		{"  the same without a fork", r.QuietGap},
		{"all writes during a fork, p99", r.Writes}, {"  the same without a fork", r.QuietWrites},
	}
	rows = append(rows, r.Stalls.rows("those that waited", "  ")...)
	rows = append(rows, r.QuietStalls.rows("as many without a fork", "  ")...)
	rows = append(rows, r.Served.rows("answered by the host", "  ")...)
	rows = append(rows, []row{
		{"pass over memory during a fork", r.Pass},
		{"  the first pass after a fork", r.Next}, {"  a pass without a fork", r.QuietPass},
		{"longest silence of the source", r.Silence}, {"  the same without a fork", r.QuietSilence}, {"copy complete", r.Captured}, {"first answer of one child", r.One}, {"last first answer of ten", r.Ten},
	}...)
	rows = slices.DeleteFunc(rows, func(r row) bool { return r.s.N == 0 })
	if err := printTable(w, r.Floor, rows); err != nil {
		return err
	}
	fmt.Fprintf(w, "the last fork copied %d MiB\n", r.Copied>>20)
	if r.WhyCopiedInPause != "" {
		fmt.Fprintln(w, "memory was copied in the pause:", r.WhyCopiedInPause)
	}
	if r.Noisy {
		fmt.Fprintln(w, NoisyWarning)
	}
	return nil
}
