package main

import (
	"context"
	"fmt"
	"io"
	"slices"
	"strings"
	"text/tabwriter"
	"time"

	"agentrun.dev/api/rest"
	"agentrun.dev/internal/client"
	"agentrun.dev/internal/sandbox"
	"github.com/spf13/cobra"
)

func newTemplateCommand() *cobra.Command {
	cmd := &cobra.Command{
		Use:   "template",
		Short: "Look at templates, their builds and logs; build one again; delete them",
		Long: `Templates say what sandboxes are made of. agentrun apply -f makes and changes them;
they are built in the background.`,
		Args: cobra.NoArgs,
	}
	cmd.AddCommand(newTemplateListCommand(), newTemplateShowCommand(), newTemplateLogsCommand(), newTemplateBuildCommand(), newTemplateRemoveCommand())
	return cmd
}

func newTemplateListCommand() *cobra.Command {
	var o daemonOptions
	var asJSON bool
	cmd := &cobra.Command{
		Use: "list", Aliases: []string{"ls"}, Short: "List templates, as agentrun get templates does", Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			return o.list(cmd.Context(), cmd.OutOrStdout(), "templates", asJSON)
		},
	}
	o.flags(cmd.Flags())
	cmd.Flags().BoolVar(&asJSON, "json", false, "print JSON, with all that is known")
	return cmd
}

func newTemplateShowCommand() *cobra.Command {
	var o daemonOptions
	var asJSON bool
	cmd := &cobra.Command{
		Use: "show TEMPLATE", Short: "Show all that is known of a template, its builds included", Args: cobra.ExactArgs(1),
		ValidArgsFunction: o.complete(first, "templates"),
		RunE: func(cmd *cobra.Command, args []string) error {
			return o.with(func(c *client.Client) error {
				t, err := c.Template(cmd.Context(), args[0])
				if err != nil {
					return err
				}
				if asJSON {
					return printJSON(cmd.OutOrStdout(), t)
				}
				pools, err := c.Pools(cmd.Context())
				if err != nil {
					return err
				}
				return showTemplate(cmd.OutOrStdout(), t, pools)
			})
		},
	}
	o.flags(cmd.Flags())
	cmd.Flags().BoolVar(&asJSON, "json", false, "print JSON")
	return cmd
}

// showTemplate prints a template: its fields that are set, its pools, its builds.
func showTemplate(w io.Writer, t rest.Template, pools []rest.Pool) error {
	var b strings.Builder
	table := tabwriter.NewWriter(&b, 0, 8, 2, ' ', 0)
	field := func(name, format string, args ...any) {
		if text := fmt.Sprintf(format, args...); text != "" {
			fmt.Fprintf(table, "%s:\t%s\n", name, text)
		}
	}
	field("Name", "%s", t.Name)
	field("Namespace", "%s", t.Namespace)
	field("Status", "%s", t.Phase)
	field("Problem", "%s", t.Problem)
	field("Revision", "%s", t.Revision)
	field("Age", "%s", age(t.Created))
	field("Image", "%s", t.Spec.Image)
	field("Processors", "%g", float64(t.Spec.MilliCPUs)/1000)
	field("Memory", "%s", mebibytes(t.Spec.Memory))
	if t.Spec.Disk > 0 {
		field("Disk", "%s", mebibytes(t.Spec.Disk))
	}
	field("Workdir", "%s", t.Spec.Workdir)
	field("User", "%s", t.Spec.User)
	for _, v := range sandbox.Env(t.Spec.Env).Strings() {
		field("Env", "%s", v)
	}
	for _, command := range t.Spec.Init {
		field("Init", "%s", command)
	}
	field("Ready", "%s", readyText(t.Spec.Ready))
	if p := t.Spec.Warmup; p != nil {
		field("Warmup", "%s, %d bytes", p.Language, len(p.Text))
	}
	if t.Spec.Network != "" {
		field("Network", "%s", t.Spec.Network)
	}
	field("Network policy", "%s", policyText(t.Spec.NetworkPolicy))
	field("Build network", "%s", policyText(t.Spec.BuildNetwork))
	if t.Spec.TrustNamespaceCA {
		field("Trusts", "the CA of its namespace (agentrun ca show)")
	}
	if t.Spec.BuildTimeout != "" {
		field("Build timeout", "%s", t.Spec.BuildTimeout)
	}
	users := slices.DeleteFunc(slices.Clone(pools), func(p rest.Pool) bool { return p.Spec.Template != t.Name })
	for _, p := range users {
		field("Pool", "%s, %d of %d ready", p.Name, p.Ready, p.Spec.Replicas)
	}
	fmt.Fprintln(table, "\nSTAGE\tSTATUS\tAGE\tTOOK\tIMAGE\tPROBLEM")
	for _, build := range t.Builds {
		took := "-"
		if build.Finished != nil {
			took = build.Finished.Sub(build.Started).Round(10 * time.Millisecond).String()
		}
		fmt.Fprintf(table, "%s\t%s\t%s\t%s\t%s\t%s\n", build.Stage, build.Phase, age(build.Started), took, orDash(build.Image), orDash(build.Problem))
	}
	if err := table.Flush(); err != nil {
		return err
	}
	_, err := io.WriteString(w, b.String())
	return err
}

func readyText(r *rest.ReadyCheck) string {
	switch {
	case r == nil:
		return ""
	case r.Command != "":
		return "when `" + r.Command + "` succeeds"
	case r.Port != 0:
		return fmt.Sprintf("when port %d listens", r.Port)
	}
	return "after " + r.Delay
}

// logFlags select a template's log.
type logFlags struct {
	daemonOptions
	follow bool
	stage  string
	tail   int
	offset int64
}

func (o *logFlags) add(cmd *cobra.Command) {
	f := cmd.Flags()
	o.flags(f)
	f.BoolVarP(&o.follow, "follow", "f", false, "go on until the build has ended")
	f.StringVar(&o.stage, "stage", string(rest.StageReady), "which of its snapshots: Init or Ready")
	f.IntVar(&o.tail, "tail", -1, "begin with the last so many lines; -1 is all")
	f.Int64Var(&o.offset, "offset", 0, "begin at this byte of the log")
}

func (o *logFlags) print(ctx context.Context, template string, w io.Writer) error {
	q := rest.GetTemplateLogParams{Stage: rest.Stage(o.stage), Follow: &o.follow}
	if o.tail >= 0 {
		q.Tail = &o.tail
	}
	if o.offset != 0 {
		q.Offset = &o.offset
	}
	return o.with(func(c *client.Client) error { return c.TemplateLog(ctx, template, q, w) })
}

func newTemplateLogsCommand() *cobra.Command {
	var o logFlags
	cmd := &cobra.Command{
		Use: "logs TEMPLATE", Short: "Print what happened when a template was built, as agentrun logs does", Args: cobra.ExactArgs(1),
		ValidArgsFunction: o.complete(first, "templates"),
		RunE: func(cmd *cobra.Command, args []string) error {
			return o.print(cmd.Context(), args[0], cmd.OutOrStdout())
		},
	}
	o.add(cmd)
	return cmd
}

func newTemplateBuildCommand() *cobra.Command {
	var o daemonOptions
	cmd := &cobra.Command{
		Use:   "build TEMPLATE",
		Short: "Build a template whose build has failed again, and print its log",
		Long: `Build a template whose build has failed again, and print the log until that has
ended. The exit code is 125 if it fails. One that is being built is followed, and one
that is built is left alone: a template that has changed is built when it is applied.`,
		Args:              cobra.ExactArgs(1),
		ValidArgsFunction: o.complete(first, "templates"),
		RunE: func(cmd *cobra.Command, args []string) error {
			return o.with(func(c *client.Client) error { return buildTemplate(cmd.Context(), c, args[0], cmd.OutOrStdout()) })
		},
	}
	o.flags(cmd.Flags())
	return cmd
}

func buildTemplate(ctx context.Context, c *client.Client, name string, w io.Writer) error {
	t, err := c.Template(ctx, name)
	if err != nil {
		return err
	}
	// An unchanged template is built if its build has failed, and left alone
	// otherwise.
	if _, err := c.PutTemplate(ctx, name, t.Spec); err != nil {
		return err
	}
	if err := c.TemplateLog(ctx, name, rest.GetTemplateLogParams{Stage: rest.StageReady, Follow: new(true)}, w); err != nil {
		return err
	}
	if t, err = c.Template(ctx, name); err == nil && t.Phase != rest.PhaseReady {
		err = fmt.Errorf("template %s is %s: %s", name, t.Phase, t.Problem)
	}
	return err
}

func newTemplateRemoveCommand() *cobra.Command {
	var o daemonOptions
	cmd := &cobra.Command{
		Use: "rm TEMPLATE...", Short: "Delete templates that no pool uses", Args: cobra.MinimumNArgs(1),
		ValidArgsFunction: o.complete(all, "templates"),
		RunE: func(cmd *cobra.Command, args []string) error {
			return o.with(func(c *client.Client) error {
				return each(args, func(name string) error { return c.DeleteTemplate(cmd.Context(), name) })
			})
		},
	}
	o.flags(cmd.Flags())
	return cmd
}
