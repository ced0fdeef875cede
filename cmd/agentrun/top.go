package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"slices"
	"strings"
	"time"

	"agentrun.dev/api/rest"
	"agentrun.dev/internal/client"
	"github.com/spf13/cobra"
	"golang.org/x/term"
)

// topOptions are the flags of agentrun top.
type topOptions struct {
	daemonOptions
	once     bool
	json     bool
	interval time.Duration
	sort     string
}

// Orders of agentrun top, for the flag --sort.
const (
	sortCPU     = "cpu"
	sortMemory  = "memory"
	sortNetwork = "network"
	sortName    = "name"
)

func newTopCommand() *cobra.Command {
	var o topOptions
	cmd := &cobra.Command{
		Use:   "top",
		Short: "Show what sandboxes cost: processor time, memory of their own and shared, network",
		Long: `Show what the daemon's sandboxes cost, again and again until Ctrl-C:

  CPU%      processor time since the last look, in hundredths of a processor
  CPU TIME  processor time since its machine was made
  OWN       memory that it alone has
  SHARED    its part of the memory that it has in common with others
  RESERVED  memory that is set aside for it
  SENT/S    bytes that it has sent each second since the last look; RECV/S are those
            that it has received
  CONNS     its connections that are open

Looking wakes none: a hibernated sandbox costs nothing of these.`,
		Example: `  agentrun top
  agentrun top --once --sort memory
  agentrun top --once --json`,
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if !slices.Contains([]string{sortCPU, sortMemory, sortNetwork, sortName}, o.sort) {
				return fmt.Errorf("--sort %q: write %s, %s, %s or %s", o.sort, sortCPU, sortMemory, sortNetwork, sortName)
			}
			if o.interval < 100*time.Millisecond {
				return fmt.Errorf("--interval %v: at least 100ms", o.interval)
			}
			return o.with(func(c *client.Client) error { return o.run(cmd.Context(), c, cmd.OutOrStdout()) })
		},
	}
	f := cmd.Flags()
	o.flags(f)
	f.BoolVar(&o.once, "once", false, "look once, over one interval, and end")
	f.BoolVar(&o.json, "json", false, "print JSON, one object for each look")
	f.DurationVar(&o.interval, "interval", 2*time.Second, "time between two looks")
	f.StringVar(&o.sort, "sort", sortCPU, "what comes first: cpu, memory, network or name")
	return cmd
}

// look is the state of the node and its sandboxes at an instant.
type look struct {
	Node      rest.Node  `json:"node"`
	Sandboxes []costLine `json:"sandboxes"`
}

// costLine is one sandbox in a look.
type costLine struct {
	rest.SandboxStats
	// CPUPercent, and the bytes per second, are nil for a sandbox that was not in the
	// previous look.
	CPUPercent        *float64 `json:"cpuPercent,omitempty"`
	SentPerSecond     *float64 `json:"sentPerSecond,omitempty"`
	ReceivedPerSecond *float64 `json:"receivedPerSecond,omitempty"`
}

func (o *topOptions) run(ctx context.Context, c *client.Client, w io.Writer) error {
	f, isFile := w.(*os.File)
	screen := isFile && term.IsTerminal(int(f.Fd())) && !o.json && !o.once
	before, err := takeLook(ctx, c, look{})
	for err == nil {
		select {
		case <-time.After(o.interval):
		case <-ctx.Done():
			return nil
		}
		var now look
		if now, err = takeLook(ctx, c, before); err != nil {
			break
		}
		before = now
		if err = o.show(w, now, screen); err != nil || o.once {
			return err
		}
	}
	if errors.Is(err, context.Canceled) {
		return nil // by Ctrl-C
	}
	return err
}

// takeLook asks the daemon, and compares the answer with the previous look.
func takeLook(ctx context.Context, c *client.Client, before look) (now look, err error) {
	if now.Node, err = c.Node(ctx); err != nil {
		return now, err
	}
	list, err := c.Stats(ctx)
	now.Sandboxes = make([]costLine, 0, len(list))
	for _, s := range list {
		now.Sandboxes = append(now.Sandboxes, compareCost(before, s))
	}
	return now, err
}

// compareCost computes the use of a processor by a sandbox since a look, and its bytes
// per second on the network. The counters of a new machine have begun at 0: their rates
// are nil if they are lower than before.
func compareCost(before look, now rest.SandboxStats) costLine {
	l := costLine{SandboxStats: now}
	i := slices.IndexFunc(before.Sandboxes, func(l costLine) bool { return l.Id == now.Id })
	if i < 0 {
		return l
	}
	old := before.Sandboxes[i]
	passed := now.Time.Sub(old.Time)
	rate := func(from, to int64, unit time.Duration) *float64 {
		if passed <= 0 || to < from {
			return nil
		}
		r := float64(to-from) * float64(unit) / float64(passed)
		return &r
	}
	l.CPUPercent = rate(old.Cpu, now.Cpu, 100) // of nanoseconds
	l.SentPerSecond = rate(old.NetworkSent, now.NetworkSent, time.Second)
	l.ReceivedPerSecond = rate(old.NetworkReceived, now.NetworkReceived, time.Second)
	return l
}

// network is the number of bytes that a sandbox sends and receives per second.
func (l costLine) network() (sum float64) {
	for _, r := range []*float64{l.SentPerSecond, l.ReceivedPerSecond} {
		if r != nil {
			sum += *r
		}
	}
	return sum
}

// sorted orders a look's sandboxes.
func (l look) sorted(by string) []costLine {
	lines := slices.Clone(l.Sandboxes) // by name
	value := func(l costLine) float64 {
		switch {
		case by == sortMemory:
			return float64(l.Own)
		case by == sortNetwork:
			return l.network()
		case by == sortCPU && l.CPUPercent != nil:
			return *l.CPUPercent
		}
		return 0
	}
	slices.SortStableFunc(lines, func(a, b costLine) int {
		switch va, vb := value(a), value(b); {
		case va > vb:
			return -1
		case va < vb:
			return 1
		}
		return 0
	})
	return lines
}

// perSecond formats bytes per second.
func perSecond(rate *float64) string {
	switch {
	case rate == nil:
		return "-"
	case *rate < 1<<10:
		return fmt.Sprintf("%.0f B", *rate)
	case *rate < 1<<20:
		return fmt.Sprintf("%.1f KiB", *rate/(1<<10))
	}
	return fmt.Sprintf("%.1f MiB", *rate/(1<<20))
}

// clearScreen moves to the top left corner and clears everything below it.
const clearScreen = "\x1b[H\x1b[J"

func (o *topOptions) show(w io.Writer, l look, screen bool) error {
	if o.json {
		l.Sandboxes = l.sorted(o.sort)
		return printJSON(w, l)
	}
	var b strings.Builder
	if screen {
		b.WriteString(clearScreen)
	}
	n := l.Node
	fmt.Fprintf(&b, "%s: %d sandboxes, %d of them hibernated; %s of %s reserved; %d checkpoints, %s\n\n", n.Engine,
		n.Sandboxes, n.Hibernated, mebibytes(n.Reserved), mebibytes(n.Capacity), n.Checkpoints, mebibytes(n.CheckpointBytes))
	var rows []object
	for _, s := range l.sorted(o.sort) {
		percent := "-"
		if s.CPUPercent != nil {
			percent = fmt.Sprintf("%.1f", *s.CPUPercent)
		}
		rows = append(rows, object{name: s.Name, row: []string{
			sandboxStatus(rest.Sandbox{State: s.State}), percent, time.Duration(s.Cpu).Round(10 * time.Millisecond).String(),
			mebibytes(s.Own), mebibytes(s.Shared), mebibytes(s.Reserved),
			perSecond(s.SentPerSecond), perSecond(s.ReceivedPerSecond), fmt.Sprint(s.NetworkConnections),
		}})
	}
	if err := printObjects(&b, "NAME\tSTATUS\tCPU%\tCPU TIME\tOWN\tSHARED\tRESERVED\tSENT/S\tRECV/S\tCONNS", rows); err != nil {
		return err
	}
	if !screen && !o.once {
		b.WriteByte('\n') // between two looks
	}
	_, err := io.WriteString(w, b.String())
	return err
}
