package peers

import (
	"fmt"
	"io"
	"strings"
	"text/tabwriter"

	"agentrun.dev/bench"
)

// Report is the result of Run.
type Report struct {
	Memory uint64        `json:"memory_bytes"`
	VCPUs  int           `json:"vcpus"`
	Dirty  uint64        `json:"live_dirty_bytes"`
	Floor  bench.Summary `json:"floor"`
	// Columns begin with AgentRun's.
	Columns []Column `json:"columns"`
	// Noisy says that the floor varied too much for the numbers to be meaningful.
	Noisy bool `json:"noisy"`
}

// Column is a runtime and one of its ways to fork. Missing measurements have no
// samples.
type Column struct {
	Peer string `json:"peer"`
	Way  string `json:"way"`
	// Failed is why measurements are missing.
	Failed string `json:"failed,omitempty"`

	Boot bench.Summary `json:"boot_to_first_answer"`
	Ping bench.Summary `json:"warm_ping"`
	Exec bench.Summary `json:"warm_exec"`
	// Times from the call until the fork runs (microsandbox only reports when its
	// call returns), to the first answer of the agent inside, to the new identity
	// from our agent, and to the exit status of a program after that.
	Running  bench.Summary `json:"fork_running"`
	Answered bench.Summary `json:"fork_first_answer"`
	Renewed  bench.Summary `json:"fork_identity_renewed"`
	Executed bench.Summary `json:"fork_first_exec"`
	// Measurements of a running source that is forked: the longest time for which it
	// was not heard, the same without a fork, how long it stood still, when the fork
	// has answered, and how long the source then takes to write to the same memory
	// again.
	Silence bench.Summary `json:"live_fork_silence"`
	Quiet   bench.Summary `json:"live_silence_without_fork"`
	Pause   bench.Summary `json:"live_fork_pause"`
	Live    bench.Summary `json:"live_fork_first_answer"`
	Next    bench.Summary `json:"live_fork_next_pass"`
	// Pass is Next without a fork.
	Pass bench.Summary `json:"live_pass_without_fork"`
	// Own is the median of the fork's anonymous memory, in bytes.
	OwnAfterAnswer uint64 `json:"own_after_answer_bytes"`
	OwnAfterExec   uint64 `json:"own_after_exec_bytes"`
}

func (c Column) name() string { return c.Peer + ", " + c.Way }

// measure is a line of the table for every column that has the measurement.
type measure struct {
	name string
	of   func(Column) bench.Summary
	// ofSource says that the measurement does not depend on the way to fork.
	ofSource bool
}

// label names the measured runtime, and its way to fork.
func (m measure) label(c Column) string {
	if m.ofSource {
		return c.Peer
	}
	return c.name()
}

func (r Report) measures() []measure {
	live := fmt.Sprintf("live fork, %d MiB dirty: ", r.Dirty>>20)
	return []measure{
		{"boot to first answer", func(c Column) bench.Summary { return c.Boot }, true},
		{"warm ping", func(c Column) bench.Summary { return c.Ping }, true},
		{"warm exec", func(c Column) bench.Summary { return c.Exec }, true},
		{"fork: running", func(c Column) bench.Summary { return c.Running }, false},
		{"fork: first answer", func(c Column) bench.Summary { return c.Answered }, false},
		{"fork: identity renewed", func(c Column) bench.Summary { return c.Renewed }, false},
		{"fork: first exec done", func(c Column) bench.Summary { return c.Executed }, false},
		{live + "pause", func(c Column) bench.Summary { return c.Pause }, true},
		{live + "source silent", func(c Column) bench.Summary { return c.Silence }, true},
		{live + "silent without a fork", func(c Column) bench.Summary { return c.Quiet }, true},
		{live + "first answer", func(c Column) bench.Summary { return c.Live }, true},
		{live + "next pass", func(c Column) bench.Summary { return c.Next }, true},
		{live + "pass without a fork", func(c Column) bench.Summary { return c.Pass }, true},
	}
}

// ours is AgentRun's number to compare with: that of the same way to fork if AgentRun
// has it, otherwise that of its first way.
func (r Report) ours(m measure, way string) (s bench.Summary) {
	for _, c := range r.Columns {
		if x := m.of(c); c.Peer == AgentRun && x.N > 0 && (s.N == 0 || c.Way == way) {
			s = x
		}
	}
	return s
}

// ratio is the ratio of two medians; "" if one is missing.
func ratio(a, b float64) string {
	if a == 0 || b == 0 {
		return ""
	}
	return fmt.Sprintf("%.2f", a/b)
}

// Print writes the report as a table.
func (r Report) Print(w io.Writer) error {
	fmt.Fprintf(w, "microVMs of %d MiB and %d vCPU, taking turns; milliseconds\n", r.Memory>>20, r.VCPUs)
	t := tabwriter.NewWriter(w, 0, 0, 2, ' ', tabwriter.AlignRight)
	fmt.Fprintln(t, "\tn\tp10\tp50\tp90\tp99\tp50/floor\tp50/AgentRun\t")
	line := func(name string, s, ours bench.Summary) {
		fmt.Fprintf(t, "%s\t%d\t%.2f\t%.2f\t%.2f\t%.2f\t%s\t%s\t\n",
			name, s.N, s.P10, s.P50, s.P90, s.P99, ratio(s.P50, r.Floor.P50), ratio(s.P50, ours.P50))
	}
	line("floor", r.Floor, bench.Summary{})
	for _, m := range r.measures() {
		for _, c := range r.Columns {
			if s := m.of(c); s.N > 0 {
				line(m.name+": "+m.label(c), s, r.ours(m, c.Way))
			}
		}
	}
	if err := t.Flush(); err != nil {
		return err
	}
	fmt.Fprintln(w, "\nanonymous memory of a fork, KiB")
	t = tabwriter.NewWriter(w, 0, 0, 2, ' ', tabwriter.AlignRight)
	fmt.Fprintln(t, "\tafter its first answer\tafter a program\t")
	for _, c := range r.Columns {
		if c.OwnAfterAnswer > 0 {
			fmt.Fprintf(t, "%s\t%d\t%d\t\n", c.name(), c.OwnAfterAnswer>>10, c.OwnAfterExec>>10)
		}
	}
	if err := t.Flush(); err != nil {
		return err
	}
	told := map[string]bool{}
	for _, c := range r.Columns {
		if c.Failed != "" && !told[c.Peer] {
			told[c.Peer] = true
			fmt.Fprintf(w, "%s was not measured, or not to the end: %s\n", c.Peer, strings.ReplaceAll(c.Failed, "\n", "\n  "))
		}
	}
	if r.Noisy {
		fmt.Fprintln(w, bench.NoisyWarning)
	}
	return nil
}
