package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"strings"
	"time"
	"unicode"

	"agentrun.dev/api/rest"
	"agentrun.dev/internal/client"
	"github.com/spf13/cobra"
)

// networkLogOptions are the flags of agentrun network log.
type networkLogOptions struct {
	daemonOptions
	follow, refused, json bool
}

func newNetworkLogCommand() *cobra.Command {
	var o networkLogOptions
	cmd := &cobra.Command{
		Use:   "log SANDBOX [-f] [--refused] [--json]",
		Short: "Show the connections of a sandbox, and those that were refused",
		Long: `Show the connections of a sandbox, and those that were refused, the oldest first; then
those that are open. The log is kept in memory while the sandbox runs, its last entries
only.

  OUTCOME   how it ended: closed, reset by remote, reset by sandbox, refused, failed
            (nobody answered) or cut (by a change of the policy); or that it is open
  NAME      the name that the sandbox connected to, if that is known
  SENT      bytes from the sandbox; RECEIVED are those to it
  RULE      the rule that decided

With --json, each entry is an object on a line.`,
		Example: `  agentrun network log agent-session-1
  agentrun network log agent-session-1 -f --refused`,
		Args:              cobra.ExactArgs(1),
		ValidArgsFunction: o.complete(first, "sandboxes"),
		RunE: func(cmd *cobra.Command, args []string) error {
			return o.with(func(c *client.Client) error {
				return o.run(cmd.Context(), c, args[0], cmd.OutOrStdout(), cmd.ErrOrStderr())
			})
		},
	}
	f := cmd.Flags()
	o.flags(f)
	f.BoolVarP(&o.follow, "follow", "f", false, "go on until the sandbox ends, or Ctrl-C")
	f.BoolVar(&o.refused, "refused", false, "only what was refused")
	f.BoolVar(&o.json, "json", false, "print JSON, one object on each line")
	return cmd
}

// Bounds of one request.
const (
	logPage = 1000
	logWait = 30 * time.Second
)

func (o *networkLogOptions) run(ctx context.Context, c *client.Client, name string, w, stderr io.Writer) error {
	if !o.json {
		if _, err := fmt.Fprintf(w, logLine, "TIME", "OUTCOME", "PROTOCOL", "NAME", "ADDRESS", "SENT", "RECEIVED", "RULE", "REASON"); err != nil {
			return err
		}
	}
	followed := false
	for from := int64(1); ; followed = true {
		ask := client.NetworkLogRequest{From: from, Limit: logPage, Open: !o.follow && !o.refused}
		if o.follow {
			ask.Wait = logWait
		}
		page, err := c.NetworkLog(ctx, name, ask)
		if o.follow && (canceled(ctx) || followed && hasEnded(err)) {
			return nil // by Ctrl-C, or with the sandbox
		}
		if err != nil {
			return err
		}
		if page.Lost > 0 {
			if _, err := fmt.Fprintf(stderr, "agentrun: %d older entries are lost: the log keeps the last ones only\n", page.Lost); err != nil {
				return err
			}
		}
		if err := o.print(w, page.Items); err != nil {
			return err
		}
		if !o.follow && len(page.Items) == 0 {
			return o.print(w, page.Open)
		}
		from = page.Next
	}
}

func canceled(ctx context.Context) bool { return ctx.Err() != nil }

// hasEnded reports whether an error says that the sandbox has.
func hasEnded(err error) bool {
	var told *client.Error
	return errors.As(err, &told) && told.Code == rest.ErrorCodeEnded
}

const logLine = "%-23s  %-16s  %-8s  %-32s  %-24s  %10s  %10s  %-28s  %s\n"

func (o *networkLogOptions) print(w io.Writer, entries []rest.NetworkLogEntry) error {
	for _, e := range entries {
		if o.refused && e.Outcome != "refused" {
			continue
		}
		var err error
		if o.json {
			err = json.NewEncoder(w).Encode(e)
		} else {
			_, err = fmt.Fprintf(w, logLine, e.Time.Local().Format("2006-01-02 15:04:05.000"), printable(outcome(e)), printable(e.Protocol),
				orDash(printable(e.Name)), orDash(printable(e.Address)), fmt.Sprint(e.Sent), fmt.Sprint(e.Received), orDash(printable(e.Rule)), printable(e.Reason))
		}
		if err != nil {
			return err
		}
	}
	return nil
}

// outcome is the outcome with its number of repetitions.
func outcome(e rest.NetworkLogEntry) string {
	if e.Repeated == 0 {
		return e.Outcome
	}
	return fmt.Sprintf("%s x%d", e.Outcome, e.Repeated+1)
}

// printable replaces characters that could control a terminal in text that a sandbox has
// chosen, such as a name.
func printable(s string) string {
	return strings.Map(func(r rune) rune {
		if unicode.IsPrint(r) {
			return r
		}
		return '?'
	}, s)
}
