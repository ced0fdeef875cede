package bench

import (
	"fmt"
	"io"
	"text/tabwriter"
)

// Print writes the report as tables.
func (r NetworkReport) Print(w io.Writer) error {
	fmt.Fprintf(w, "TCP from a sandbox on %s, %d MiB, %d vCPU, through netd, beside plain loopback\n", r.Engine, r.Memory>>20, r.VCPUs)
	fmt.Fprintf(w, "\n10⁶ bytes per second, least, median and most of %d times %.1f s, in turns\n", r.Rounds, r.For)
	t := tabwriter.NewWriter(w, 0, 0, 2, ' ', tabwriter.AlignRight)
	fmt.Fprintln(t, "\tloopback\tsandbox\tratio\t1/ratio\tbytes in a frame\t")
	for _, p := range r.Throughput {
		fmt.Fprintf(t, "%s\t%s\t%s\t%s\t%.1f\t%.0f\t\n",
			p.name(), p.Loopback.format(0), p.Sandbox.format(0), p.Ratio.format(2), 1/p.Ratio.P50, p.Frame.P50)
	}
	if err := t.Flush(); err != nil {
		return err
	}
	fmt.Fprintln(w, "\nprocessor seconds for 10⁹ bytes, medians")
	t = tabwriter.NewWriter(w, 0, 0, 2, ' ', tabwriter.AlignRight)
	fmt.Fprintln(t, "\tloopback, both ends\tsandbox\tnetd\tsandbox and netd\tserver\t")
	for _, p := range r.Throughput {
		fmt.Fprintf(t, "%s\t%.2f\t%.2f\t%.2f\t%.2f\t%.2f\t\n", p.name(), p.CPU.P50, p.Inside.P50, p.Netd.P50, p.Both.P50, p.Server.P50)
	}
	if err := t.Flush(); err != nil {
		return err
	}
	for _, p := range []struct {
		name string
		LoadPair
	}{{"round trip of a byte", r.RoundTrip}, {"opening a connection", r.Connect}} {
		fmt.Fprintf(w, "\n%s; milliseconds\n", p.name)
		if err := printTable(w, p.Loopback, []row{{"floor: loopback", p.Loopback}, {"sandbox", p.Sandbox}}); err != nil {
			return err
		}
	}
	if i := r.Idle; i != nil {
		fmt.Fprintf(w, "\n%d idle wires: each %d bytes of netd's memory, %d of the kernel's (the %s's); attached in %.2f ms (median)\n",
			i.Wires, i.Anonymous, i.Kernel, i.KernelFrom, i.Attach.P50)
	}
	if r.Noisy {
		fmt.Fprintln(w, "too noisy: the median of plain loopback is more than 1.5 times its least")
	}
	return nil
}

func (t Throughput) name() string {
	return fmt.Sprintf("%s, %d connections", t.Direction, t.Connections)
}

func (s Spread) format(digits int) string {
	return fmt.Sprintf("%.*f %.*f %.*f", digits, s.Min, digits, s.P50, digits, s.Max)
}
