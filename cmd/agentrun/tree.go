package main

import (
	"fmt"
	"io"
	"slices"
	"strings"

	"agentrun.dev/api/rest"
	"agentrun.dev/internal/client"
	"github.com/spf13/cobra"
)

func newTreeCommand() *cobra.Command {
	var o daemonOptions
	var all bool
	cmd := &cobra.Command{
		Use:   "tree",
		Short: "Draw which sandboxes continue from which",
		Args:  cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			return o.with(func(c *client.Client) error {
				list, err := c.Sandboxes(cmd.Context(), true)
				if err != nil {
					return err
				}
				return drawTree(cmd.OutOrStdout(), list, all)
			})
		},
	}
	f := cmd.Flags()
	o.flags(f)
	f.BoolVarP(&all, "all", "a", false, "draw families of which none lives any more, too")
	return cmd
}

// family is a sandbox with those that continue from it.
type family struct {
	rest.Sandbox
	children []*family
}

// lives reports whether any of the family has not ended.
func (f *family) lives() bool {
	return f.State != rest.SandboxStateEnded || slices.ContainsFunc(f.children, (*family).lives)
}

// drawTree draws families, oldest first. Those whose parent is forgotten begin
// a tree of their own.
func drawTree(w io.Writer, list []rest.Sandbox, all bool) error {
	slices.SortFunc(list, func(a, b rest.Sandbox) int { return a.Created.Compare(b.Created) })
	byID := map[string]*family{}
	for _, s := range list {
		byID[s.Id] = &family{Sandbox: s}
	}
	var roots []*family
	for _, s := range list {
		if parent := byID[s.Parent]; parent != nil {
			parent.children = append(parent.children, byID[s.Id])
		} else {
			roots = append(roots, byID[s.Id])
		}
	}
	var b strings.Builder
	for _, f := range roots {
		if all || f.lives() {
			f.draw(&b, "", "")
		}
	}
	_, err := io.WriteString(w, b.String())
	return err
}

func (f *family) draw(b *strings.Builder, first, rest string) {
	fmt.Fprintf(b, "%s%s  %s  %s", first, f.Name, sandboxStatus(f.Sandbox), age(f.Created))
	if f.Checkpoint != "" {
		fmt.Fprintf(b, "  (restored from %s)", f.Checkpoint)
	}
	b.WriteByte('\n')
	for i, c := range f.children {
		if i < len(f.children)-1 {
			c.draw(b, rest+"├── ", rest+"│   ")
		} else {
			c.draw(b, rest+"└── ", rest+"    ")
		}
	}
}
