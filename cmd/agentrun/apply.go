package main

import (
	"context"
	"fmt"
	"io"
	"os"
	"strings"
	"time"

	"agentrun.dev/api/rest"
	"agentrun.dev/internal/client"
	"agentrun.dev/internal/client/manifest"
	"agentrun.dev/internal/convert/restconv"
	"agentrun.dev/internal/sandbox"
	"github.com/spf13/cobra"
)

// applyOptions are the flags of agentrun apply.
type applyOptions struct {
	daemonOptions
	files   []string
	timeout time.Duration
}

func newApplyCommand() *cobra.Command {
	var o applyOptions
	cmd := &cobra.Command{
		Use:   "apply -f FILE",
		Short: "Make what a YAML file describes: templates, pools, claims, forks, secrets",
		Long: `Make or change what YAML documents describe: SandboxTemplate, SandboxPool,
SandboxClaim and SandboxFork of agentrun.dev/v1alpha1, and Secret of v1, one after the
other. A claim waits until its pool has a sandbox. A claim or fork that is there already is left
alone. Fields that are not known are refused.`,
		Example: `  agentrun apply -f pool.yaml
  agentrun apply -f - < claim.yaml`,
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			return o.run(cmd.Context(), cmd.InOrStdin(), cmd.OutOrStdout())
		},
	}
	f := cmd.Flags()
	o.flags(f)
	f.StringArrayVarP(&o.files, "filename", "f", nil, "file to read, - for standard input (repeatable)")
	f.DurationVar(&o.timeout, "timeout", 10*time.Minute, "how long a claim waits for its pool")
	_ = cmd.MarkFlagRequired("filename") // it exists
	return cmd
}

func (o *applyOptions) run(ctx context.Context, stdin io.Reader, stdout io.Writer) error {
	var objects []manifest.Object
	for _, name := range o.files {
		list, err := o.read(name, stdin)
		if err != nil {
			return fmt.Errorf("%s: %w", name, err)
		}
		objects = append(objects, list...)
	}
	for _, object := range objects {
		what := strings.ToLower(object.Kind()) + "/" + string(object.Name)
		in := daemonOptions{namespace: string(object.Namespace), server: o.server}
		var done string
		err := in.with(func(c *client.Client) (err error) {
			done, err = o.apply(ctx, c, object)
			return err
		})
		if err != nil {
			return fmt.Errorf("%s: %w", what, err)
		}
		if _, err := fmt.Fprintf(stdout, "%s %s\n", what, done); err != nil {
			return err
		}
	}
	return nil
}

func (o *applyOptions) read(name string, stdin io.Reader) ([]manifest.Object, error) {
	namespace, err := sandbox.ParseNamespace(o.namespace)
	if err != nil {
		return nil, err
	}
	if name == "-" {
		return manifest.Read(stdin, namespace)
	}
	f, err := os.Open(name)
	if err != nil {
		return nil, err
	}
	defer func() { _ = f.Close() }() // only read
	return manifest.Read(f, namespace)
}

// apply makes one object and prints the outcome.
func (o *applyOptions) apply(ctx context.Context, c *client.Client, object manifest.Object) (done string, err error) {
	name := string(object.Name)
	switch {
	case object.Template != nil:
		_, err = c.PutTemplate(ctx, name, restconv.FromTemplateSpec(*object.Template))
		return "applied", err
	case object.Pool != nil:
		_, err = c.PutPool(ctx, name, restconv.FromPoolSpec(*object.Pool))
		return "applied", err
	case object.Secret != nil:
		_, err = c.PutSecret(ctx, name, restconv.FromSecretData(object.Secret))
		return "applied", err
	case object.Claim != nil:
		err = o.claim(ctx, c, name, *object.Claim)
	default:
		fork := restconv.FromForkSpec(*object.Fork)
		fork.Name = name
		_, err = c.Fork(ctx, string(object.Fork.Source), fork, "")
	}
	if client.HasCode(err, rest.ErrorCode(sandbox.CodeExists)) {
		return "exists", nil
	}
	return "created", err
}

// claim waits for a pool that has no machines yet.
func (o *applyOptions) claim(ctx context.Context, c *client.Client, name string, spec sandbox.ClaimSpec) error {
	ctx, cancel := context.WithTimeout(ctx, o.timeout)
	defer cancel()
	create := restconv.FromClaimSpec(spec)
	create.Name = name
	for {
		_, err := c.CreateSandbox(ctx, create, "")
		if !client.HasCode(err, rest.ErrorCode(sandbox.CodeNotReady)) {
			return err
		}
		if err := waitForPool(ctx, c, string(spec.Pool)); err != nil {
			return err
		}
	}
}

// waitForPool waits until a pool has a template that is built.
func waitForPool(ctx context.Context, c *client.Client, name string) error {
	there, phase := false, rest.PhasePending
	err := c.WatchObjects(ctx, "pools", func(e rest.ObjectEvent) (more bool, err error) {
		missing := fmt.Errorf("there is no pool %s", name)
		switch p := e.Pool; {
		case e.Type == rest.ObjectEventTypeSynced && !there:
			return false, missing
		case p == nil || p.Name != name:
			return true, nil
		case e.Type == rest.ObjectEventTypeDeleted:
			return false, missing
		case p.Phase == rest.PhaseFailed:
			return false, fmt.Errorf("pool %s: %s", name, p.Problem)
		default:
			there, phase = true, p.Phase
			return phase != rest.PhaseReady, nil
		}
	})
	if ctx.Err() != nil {
		return fmt.Errorf("wait for pool %s, which is %s: %w", name, phase, err)
	}
	return err
}
