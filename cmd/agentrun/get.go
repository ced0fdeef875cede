package main

import (
	"context"
	"fmt"
	"io"
	"slices"
	"strconv"
	"strings"
	"text/tabwriter"
	"time"

	"agentrun.dev/api/rest"
	"agentrun.dev/internal/client"
	"github.com/spf13/cobra"
)

// objectKind is a kind of object of the daemon, by the names people use.
type objectKind struct {
	names  []string
	header string
	list   func(context.Context, *client.Client, bool) ([]object, error)
	remove func(context.Context, *client.Client, string) error
}

// object is one entry of a list.
type object struct {
	name  string
	row   []string
	whole any // for --json
}

// ready is the word that people read for the state Running.
const ready = "Ready"

var objectKinds = []objectKind{
	{
		names: []string{"templates", "template", "sandboxtemplates", "sandboxtemplate"}, header: "NAME\tSTATUS\tREVISION\tAGE",
		list: func(ctx context.Context, c *client.Client, _ bool) ([]object, error) {
			return objects(c.Templates(ctx))(func(t rest.Template) object {
				return object{t.Name, []string{string(t.Phase), t.Revision, age(t.Created)}, t}
			})
		},
		remove: func(ctx context.Context, c *client.Client, name string) error { return c.DeleteTemplate(ctx, name) },
	},
	{
		names: []string{"pools", "pool", "sandboxpools", "sandboxpool"}, header: "NAME\tREADY\tSNAPSHOTS\tAGE",
		list: func(ctx context.Context, c *client.Client, _ bool) ([]object, error) {
			return objects(c.Pools(ctx))(func(p rest.Pool) object {
				return object{p.Name, []string{strconv.Itoa(p.Ready), strconv.Itoa(p.Snapshots), age(p.Created)}, p}
			})
		},
		remove: func(ctx context.Context, c *client.Client, name string) error { return c.DeletePool(ctx, name) },
	},
	{
		names:  []string{"claims", "claim", "sandboxclaims", "sandboxclaim", "sandboxes", "sandbox"},
		header: "NAME\tSTATUS\tENDPOINT\tAGE",
		list: func(ctx context.Context, c *client.Client, ended bool) ([]object, error) {
			v, err := c.Version(ctx)
			if err != nil {
				return nil, err
			}
			return objects(c.Sandboxes(ctx, ended))(func(s rest.Sandbox) object {
				return object{s.Name, []string{sandboxStatus(s), orDash(v.Endpoint), age(s.Created)}, s}
			})
		},
		remove: func(ctx context.Context, c *client.Client, name string) error {
			_, err := c.Kill(ctx, name)
			return err
		},
	},
	{
		names: []string{"forks", "fork", "sandboxforks", "sandboxfork"}, header: "NAME\tFORKS\tSTATUS\tAGE",
		list: func(ctx context.Context, c *client.Client, _ bool) ([]object, error) {
			return objects(c.Forks(ctx))(func(f rest.Fork) object {
				made := slices.DeleteFunc(slices.Clone(f.Children), func(o rest.ForkOutcome) bool { return o.Problem != "" })
				return object{f.Name, []string{strconv.Itoa(len(made)), string(f.Phase), age(f.Created)}, f}
			})
		},
		remove: func(ctx context.Context, c *client.Client, name string) error { return c.DeleteFork(ctx, name) },
	},
	secretKind,
	{
		names: []string{"checkpoints", "checkpoint"}, header: "NAME\tSOURCE\tTEMPLATE\tSIZE\tUNSHARED\tAGE",
		list: func(ctx context.Context, c *client.Client, _ bool) ([]object, error) {
			return objects(c.Checkpoints(ctx))(func(p rest.Checkpoint) object {
				return object{p.Name, []string{p.Source, p.Template, mebibytes(p.Size), mebibytes(p.Unshared), age(p.Created)}, p}
			})
		},
		remove: func(ctx context.Context, c *client.Client, name string) error { return c.DeleteCheckpoint(ctx, name) },
	},
}

// objects makes a list from the result of a call.
func objects[T any](list []T, err error) func(func(T) object) ([]object, error) {
	return func(show func(T) object) ([]object, error) {
		var out []object
		for _, x := range list {
			out = append(out, show(x))
		}
		return out, err
	}
}

func sandboxStatus(s rest.Sandbox) string {
	switch {
	case s.Unresponsive != "":
		return string(s.State) + " (Unresponsive)"
	case s.State == rest.SandboxStateRunning:
		return ready
	case s.Reason != "":
		return string(s.State) + " (" + string(s.Reason) + ")"
	}
	return string(s.State)
}

func orDash(s string) string {
	if s == "" {
		return "-"
	}
	return s
}

// age is the time since t, in one unit.
func age(t time.Time) string {
	switch d := time.Since(t); {
	case d < 2*time.Minute:
		return fmt.Sprintf("%ds", int(max(0, d).Seconds()))
	case d < 2*time.Hour:
		return fmt.Sprintf("%dm", int(d.Minutes()))
	case d < 48*time.Hour:
		return fmt.Sprintf("%dh", int(d.Hours()))
	default:
		return fmt.Sprintf("%dd", int(d.Hours()/24))
	}
}

func findKind(name string) (objectKind, error) {
	var known []string
	for _, k := range objectKinds {
		if slices.Contains(k.names, strings.ToLower(name)) {
			return k, nil
		}
		known = append(known, k.names[0])
	}
	return objectKind{}, fmt.Errorf("%q is none of %s", name, strings.Join(known, ", "))
}

func newGetCommand() *cobra.Command {
	var o daemonOptions
	var asJSON, all bool
	cmd := &cobra.Command{
		Use:   "get KIND [NAME...]",
		Short: "List templates, pools, claims, forks, checkpoints or secrets of the daemon",
		Example: `  agentrun get pools
  agentrun get claim agent-session-1`,
		Args:              cobra.MinimumNArgs(1),
		ValidArgsFunction: o.completeKind,
		RunE: func(cmd *cobra.Command, args []string) error {
			kind, err := findKind(args[0])
			if err != nil {
				return err
			}
			return o.with(func(c *client.Client) error {
				list, err := kind.list(cmd.Context(), c, all)
				if err != nil {
					return err
				}
				if list, err = pickNames(list, args[0], args[1:]); err != nil {
					return err
				}
				if asJSON {
					return printJSON(cmd.OutOrStdout(), wholes(list))
				}
				return printObjects(cmd.OutOrStdout(), kind.header, list)
			})
		},
	}
	f := cmd.Flags()
	o.flags(f)
	f.BoolVar(&asJSON, "json", false, "print JSON, with all that is known")
	f.BoolVarP(&all, "all", "a", false, "list sandboxes that have ended, too")
	return cmd
}

// pickNames keeps the objects with the given names.
func pickNames(list []object, kind string, names []string) ([]object, error) {
	if len(names) == 0 {
		return list, nil
	}
	var out []object
	for _, n := range names {
		i := slices.IndexFunc(list, func(o object) bool { return o.name == n })
		if i < 0 {
			return nil, fmt.Errorf("there is no %s %s", strings.TrimSuffix(kind, "s"), n)
		}
		out = append(out, list[i])
	}
	return out, nil
}

// wholes returns the complete objects, for --json.
func wholes(list []object) []any {
	all := make([]any, 0, len(list))
	for _, o := range list {
		all = append(all, o.whole)
	}
	return all
}

func printObjects(w io.Writer, header string, list []object) error {
	t := tabwriter.NewWriter(w, 0, 8, 3, ' ', 0)
	if _, err := fmt.Fprintln(t, header); err != nil {
		return err
	}
	for _, o := range list {
		if _, err := fmt.Fprintln(t, o.name+"\t"+strings.Join(o.row, "\t")); err != nil {
			return err
		}
	}
	return t.Flush()
}

func newDeleteCommand() *cobra.Command {
	var o daemonOptions
	cmd := &cobra.Command{
		Use:     "delete KIND NAME...",
		Short:   "Delete templates, pools, forks, checkpoints or secrets of the daemon, end sandboxes",
		Example: `  agentrun delete claim agent-session-1`,
		Args:    cobra.MinimumNArgs(2),

		ValidArgsFunction: o.completeKind,
		RunE: func(cmd *cobra.Command, args []string) error {
			kind, err := findKind(args[0])
			if err != nil {
				return err
			}
			return o.with(func(c *client.Client) error {
				for _, name := range args[1:] {
					if err := kind.remove(cmd.Context(), c, name); err != nil {
						return err
					}
				}
				return nil
			})
		},
	}
	o.flags(cmd.Flags())
	return cmd
}
