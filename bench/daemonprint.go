package bench

import (
	"fmt"
	"io"
	"text/tabwriter"
)

// Goals of a daemon with 10,000 records and an engine that costs nothing.
const (
	goalGet      = 1.0  // ms, p99, in process
	goalRatio    = 1.5  // with REST, relative to an empty journal
	goalPage     = 10.0 // ms
	goalChurn    = 1000 // per second
	goalUnsynced = 0.6  // relative to the rate without fsync
	goalSlow     = 500  // per second
	goalAnswer   = 2000 // ms
	goalAdopted  = 10000
)

// Print writes the report as tables.
func (r DaemonReport) Print(w io.Writer) error {
	fmt.Fprintf(w, "a daemon whose engine is %s, with %d live sandboxes of %d bytes of metadata each; milliseconds\n\n", r.Engine, r.Records, r.RecordBytes)
	t := tabwriter.NewWriter(w, 0, 0, 2, ' ', tabwriter.AlignRight)
	fmt.Fprintln(t, "\tn\tp10\tp50\tp90\tp99\t")
	line := func(name string, s Summary) {
		fmt.Fprintf(t, "%s\t%d\t%.3f\t%.3f\t%.3f\t%.3f\t\n", name, s.N, s.P10, s.P50, s.P90, s.P99)
	}
	line("look up, in process, 1 record", r.Get.Process.Empty)
	line("look up, in process, all", r.Get.Process.Full)
	line("look up, REST, 1 record", r.Get.REST.Empty)
	line("look up, REST, all", r.Get.REST.Full)
	line("page of 100, in process", r.Page.Process)
	line("page of 100, REST", r.Page.REST)
	if st := r.Status; st != nil {
		line("the node's status, in process, 1 record", st.Process.Empty)
		line("the node's status, in process, all", st.Process.Full)
		line("the node's status, REST, 1 record", st.REST.Empty)
		line("the node's status, REST, all", st.REST.Full)
	}
	for _, c := range r.Churn {
		line(fmt.Sprintf("claim, %s", c), c.Claim)
		line(fmt.Sprintf("kill, %s", c), c.Kill)
		line(fmt.Sprintf("look up beside it, %s", c), c.Get)
	}
	if j := r.Journal; j != nil {
		line("commit, new journal", j.New)
		line(fmt.Sprintf("commit, journal of %d MiB", j.LargeBytes>>20), j.Large)
		line(fmt.Sprintf("commit, compacted to %d KiB", j.CompactedBytes>>10), j.Compacted)
	}
	if err := t.Flush(); err != nil {
		return err
	}
	fmt.Fprintf(w, "\nlook-ups beside %d others that ask for what is not there: in process p99 %.3f ms%s; REST with all records takes %.2f times as long as with one at p50, %.2f times at p99%s\n",
		r.Get.Others, r.Get.Process.Full.P99, r.goal("%.0f", goalGet), r.Get.REST.RatioP50(), r.Get.REST.RatioP99(), r.goal("%.1f", goalRatio))
	fmt.Fprintf(w, "a page of 100: p99 %.2f ms in process, %.2f ms by REST%s\n", r.Page.Process.P99, r.Page.REST.P99, r.goal("%.0f", goalPage))
	if st := r.Status; st != nil {
		fmt.Fprintf(w, "the node's status with all sandboxes, %d templates and %d checkpoints: p99 %.2f ms in process, %.2f ms by REST; the first one %.0f ms\n",
			st.Templates, st.Checkpoints, st.Process.Full.P99, st.REST.Full.P99, st.First)
	}
	r.printChurn(w)
	s := r.Start
	fmt.Fprintf(w, "start with a journal of %d MiB, %d adoptions of %.0f ms and %d that never answer: first answer after %.0f ms%s, the rest adopted after %.0f ms%s\n",
		s.Journal>>20, s.Slow, s.Adoption, s.Silent, s.FirstAnswer, r.goal("%d", goalAnswer), s.Adopted, r.goal("%d", goalAdopted))
	if j := r.Journal; j != nil {
		fmt.Fprintf(w, "a commit in a journal that was once %d MiB takes %.2f times as long as in a new one; it was compacted in %.0f ms, writers waited %.1f ms of them\n",
			j.LargeBytes>>20, j.Compacted.P50/j.New.P50, j.Compaction, j.Held)
	}
	return nil
}

// goal is the goal of a figure, for comparison; empty with a real engine, which has
// costs of its own.
func (r DaemonReport) goal(format string, goal any) string {
	if r.Engine != freeName {
		return ""
	}
	return fmt.Sprintf(" (goal "+format+")", goal)
}

// String describes the clients.
func (c DaemonChurn) String() string {
	how := fmt.Sprintf("%d clients", c.Clients)
	if !c.Synced {
		how += ", no fsync"
	}
	if c.Added > 0 {
		how += fmt.Sprintf(", %.0f ms more", c.Added)
	}
	return how
}

func (r DaemonReport) printChurn(w io.Writer) {
	for _, c := range r.Churn {
		fmt.Fprintf(w, "claim and kill through gRPC, %s: %.0f/s", c, c.PerSecond)
		switch {
		case !c.Synced:
			fmt.Fprintf(w, "; with fsync %.0f %% of it%s", 100*r.Churn[0].PerSecond/c.PerSecond, r.goal("%.0f %%", 100*goalUnsynced))
		case c.Added > 0:
			fmt.Fprint(w, r.goal("%d", goalSlow))
		default:
			fmt.Fprint(w, r.goal("%d", goalChurn))
		}
		fmt.Fprintln(w)
	}
}
