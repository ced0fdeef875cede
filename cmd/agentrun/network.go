package main

import (
	"errors"
	"fmt"
	"io"
	"os"
	"strings"

	"agentrun.dev/api/rest"
	"agentrun.dev/internal/client"
	"agentrun.dev/internal/client/manifest"
	"agentrun.dev/internal/convert/restconv"
	"agentrun.dev/internal/network/policy"
	"github.com/spf13/cobra"
	"github.com/spf13/pflag"
	"sigs.k8s.io/yaml"
)

func newNetworkCommand() *cobra.Command {
	cmd := &cobra.Command{
		Use:   "network",
		Short: "Say what a sandbox may connect to, and see what it has connected to",
		Long: `Say what a sandbox of the daemon may connect to, and see what it has connected to.

A template's networkPolicy bounds what its sandboxes may reach; without one they reach
nothing. A claim, a fork and agentrun network set can narrow that for one sandbox. A
connection must be allowed by every one of these policies. docs/network.md has the
syntax of rules and which of them decides.`,
	}
	cmd.AddCommand(newNetworkSetCommand(), newNetworkGetCommand(), newNetworkDeleteCommand(), newNetworkLogCommand())
	return cmd
}

// policyOptions are the flags that make a network policy.
type policyOptions struct {
	egress      string
	allow, deny []string
	file        string
}

func (o *policyOptions) flags(f *pflag.FlagSet) {
	f.StringVar(&o.egress, "egress", "", "what holds where no rule matches: deny or allow (default: deny)")
	f.StringArrayVar(&o.allow, "allow", nil, "rule that allows, such as api.example.org:443 (repeatable)")
	f.StringArrayVar(&o.deny, "deny", nil, "rule that denies, such as evil.example.com (repeatable)")
	f.StringVarP(&o.file, "file", "f", "", "YAML file with egress, allow and deny instead; - is standard input")
}

// read makes the policy.
func (o *policyOptions) read(stdin io.Reader) (policy.Policy, error) {
	given := o.egress != "" || len(o.allow) > 0 || len(o.deny) > 0
	switch {
	case given && o.file != "":
		return policy.Policy{}, errors.New("--file: it has the whole policy; leave --egress, --allow and --deny out")
	case given:
		p, err := policy.Parse(o.egress, o.allow, o.deny)
		if err != nil {
			return p, fmt.Errorf("--%w", err) // it names the flag
		}
		return p, nil
	case o.file == "":
		return policy.Policy{}, errors.New("give --egress, --allow, --deny or --file: they replace the whole policy; agentrun network delete removes it")
	}
	p, err := readPolicy(o.file, stdin)
	if err != nil {
		return p, fmt.Errorf("--file: %w", err)
	}
	return p, nil
}

// maxPolicyFile bounds the size of a policy's file: the largest policy is far
// smaller.
const maxPolicyFile = 1 << 20

// readPolicy reads a policy from a YAML file; - is stdin, unless that is nil.
func readPolicy(path string, stdin io.Reader) (p policy.Policy, err error) {
	in := stdin
	if path != "-" || stdin == nil {
		f, err := os.Open(path)
		if err != nil {
			return p, err
		}
		defer func() { _ = f.Close() }() // only read
		in = f
	}
	b, err := io.ReadAll(io.LimitReader(in, maxPolicyFile+1))
	switch {
	case err != nil:
		return p, fmt.Errorf("read %s: %w", path, err)
	case len(b) > maxPolicyFile:
		return p, fmt.Errorf("%s is larger than %d bytes", path, maxPolicyFile)
	}
	type form struct {
		Egress string   `json:"egress"`
		Allow  []string `json:"allow"`
		Deny   []string `json:"deny"`
	}
	given, err := manifest.Unmarshal[*form](b)
	if err != nil {
		return p, fmt.Errorf("%s: %w", path, err)
	}
	if given == nil {
		return p, fmt.Errorf("%s is empty: write egress, allow or deny", path)
	}
	if p, err = policy.Parse(given.Egress, given.Allow, given.Deny); err != nil {
		return p, fmt.Errorf("%s: %w", path, err)
	}
	return p, nil
}

func newNetworkSetCommand() *cobra.Command {
	var o daemonOptions
	var p policyOptions
	var asJSON bool
	cmd := &cobra.Command{
		Use:   "set SANDBOX [--egress deny|allow] [--allow RULE]... [--deny RULE]... | -f FILE",
		Short: "Replace what a running sandbox may connect to",
		Long: `Replace the network policy of a sandbox, as a whole. Connections that are not allowed
any more end at once. It never reaches more than its template allows, nor more than the
sandbox that it was forked from did.

A rule is [tcp://|udp://]HOST[:PORT]. HOST is a name, a wildcard such as *.example.org,
an address or a range of addresses.`,
		Example: `  agentrun network set agent-session-1 --allow api.openai.com:443 --allow '*.example-index.org:443'
  agentrun network set agent-session-1 --egress allow --deny evil.example.com
  agentrun network set agent-session-1 --egress deny
  agentrun network set agent-session-1 -f policy.yaml`,
		Args:              cobra.ExactArgs(1),
		ValidArgsFunction: o.complete(first, "sandboxes"),
		RunE: func(cmd *cobra.Command, args []string) error {
			own, err := p.read(cmd.InOrStdin())
			if err != nil {
				return err
			}
			return o.with(func(c *client.Client) error {
				s, err := c.SetNetworkPolicy(cmd.Context(), args[0], restconv.FromNetworkPolicy(own))
				if err != nil {
					return err
				}
				return printPolicies(cmd.OutOrStdout(), s, asJSON)
			})
		},
	}
	o.flags(cmd.Flags())
	p.flags(cmd.Flags())
	cmd.Flags().BoolVar(&asJSON, "json", false, "print JSON")
	return cmd
}

func newNetworkGetCommand() *cobra.Command {
	var o daemonOptions
	var asJSON bool
	cmd := &cobra.Command{
		Use:   "get SANDBOX",
		Short: "Show what a sandbox may connect to: its own policy and its bounds",
		Long: `Show the network policies of a sandbox: its own, which a claim, a fork or agentrun
network set gave it, and its bounds, which are those of its template and of the
sandboxes that it was forked from. Each of them must allow a connection.`,
		Example:           `  agentrun network get agent-session-1`,
		Args:              cobra.ExactArgs(1),
		ValidArgsFunction: o.complete(first, "sandboxes"),
		RunE: func(cmd *cobra.Command, args []string) error {
			return o.with(func(c *client.Client) error {
				s, err := c.Sandbox(cmd.Context(), args[0])
				if err != nil {
					return err
				}
				return printPolicies(cmd.OutOrStdout(), s, asJSON)
			})
		},
	}
	o.flags(cmd.Flags())
	cmd.Flags().BoolVar(&asJSON, "json", false, "print JSON")
	return cmd
}

func newNetworkDeleteCommand() *cobra.Command {
	var o daemonOptions
	cmd := &cobra.Command{
		Use:               "delete SANDBOX",
		Short:             "Remove a sandbox's own network policy; its bounds alone hold then",
		Example:           `  agentrun network delete agent-session-1`,
		Args:              cobra.ExactArgs(1),
		ValidArgsFunction: o.complete(first, "sandboxes"),
		RunE: func(cmd *cobra.Command, args []string) error {
			return o.with(func(c *client.Client) error {
				s, err := c.DeleteNetworkPolicy(cmd.Context(), args[0])
				if err != nil {
					return err
				}
				return printPolicies(cmd.OutOrStdout(), s, false)
			})
		},
	}
	o.flags(cmd.Flags())
	return cmd
}

// policies is the output of agentrun network get.
type policies struct {
	NetworkPolicy *rest.NetworkPolicy  `json:"networkPolicy,omitempty"`
	NetworkBounds []rest.NetworkPolicy `json:"networkBounds"`
}

// printPolicies prints them as YAML, which people can read and use again.
func printPolicies(w io.Writer, s rest.Sandbox, asJSON bool) error {
	p := policies{s.NetworkPolicy, s.NetworkBounds}
	if asJSON {
		return printJSON(w, p)
	}
	text, err := yaml.Marshal(p)
	if err != nil {
		return err
	}
	head := "# Each of these policies must allow a connection.\n"
	if p.NetworkPolicy == nil {
		head = "# The sandbox has no policy of its own: what its bounds allow, it may.\n"
	}
	_, err = io.WriteString(w, head+string(text))
	return err
}

// policyText is a policy on one line; a missing policy is empty.
func policyText(p *rest.NetworkPolicy) string {
	if p == nil {
		return ""
	}
	text := "egress " + string(p.Egress)
	if len(p.Allow) > 0 {
		text += "; allow " + strings.Join(p.Allow, ", ")
	}
	if len(p.Deny) > 0 {
		text += "; deny " + strings.Join(p.Deny, ", ")
	}
	return text
}
