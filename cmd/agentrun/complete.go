package main

import (
	"context"
	"slices"
	"time"

	"agentrun.dev/internal/client"
	"github.com/spf13/cobra"
)

// which says which arguments of a command are names.
type which int

const (
	first which = iota // the first alone
	all                // all of them
)

// completionPatience is the time that a shell waits for names.
const completionPatience = 2 * time.Second

// completion completes the arguments of a command.
type completion = func(cmd *cobra.Command, args []string, typed string) ([]string, cobra.ShellCompDirective)

// complete offers the names of the daemon's objects of a kind.
func (o *daemonOptions) complete(w which, kind string) completion {
	return func(cmd *cobra.Command, args []string, _ string) ([]string, cobra.ShellCompDirective) {
		if w == first && len(args) > 0 {
			return nil, cobra.ShellCompDirectiveNoFileComp
		}
		return o.names(cmd.Context(), kind, args), cobra.ShellCompDirectiveNoFileComp
	}
}

// completeKind offers kinds, and then names of that kind.
func (o *daemonOptions) completeKind(cmd *cobra.Command, args []string, _ string) ([]string, cobra.ShellCompDirective) {
	if len(args) > 0 {
		return o.names(cmd.Context(), args[0], args[1:]), cobra.ShellCompDirectiveNoFileComp
	}
	var kinds []string
	for _, k := range objectKinds {
		kinds = append(kinds, k.names[0])
	}
	return kinds, cobra.ShellCompDirectiveNoFileComp
}

// names returns the names of a kind that are not given already. Without a
// daemon it returns no names: a shell has no use for the reason.
func (o *daemonOptions) names(ctx context.Context, kind string, given []string) (out []string) {
	k, err := findKind(kind)
	if err != nil {
		return nil
	}
	if ctx == nil { // cobra completes without one
		ctx = context.Background()
	}
	ctx, cancel := context.WithTimeout(ctx, completionPatience)
	defer cancel()
	_ = o.with(func(c *client.Client) error {
		list, err := k.list(ctx, c, false)
		for _, object := range list {
			if !slices.Contains(given, object.name) {
				out = append(out, object.name)
			}
		}
		return err
	})
	return out
}
