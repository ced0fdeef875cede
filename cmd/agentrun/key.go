package main

import (
	"fmt"
	"strings"
	"time"

	"agentrun.dev/api/rest"
	"agentrun.dev/internal/client"
	"agentrun.dev/internal/convert/restconv"
	"github.com/spf13/cobra"
)

func newKeyCommand() *cobra.Command {
	cmd := &cobra.Command{
		Use:   "key",
		Short: "Make, list and revoke API keys of the daemon",
		Long: `Make, list and revoke the API keys that clients of the daemon need over TCP. On the
machine of the daemon its user and root may always do so, elsewhere those with the key
of an admin.

A viewer looks at objects, a user makes, uses and ends them, both in the namespaces of
their key; an admin does all that everywhere, and makes keys.`,
	}
	cmd.AddCommand(newKeyCreateCommand(), newKeyListCommand(), newKeyRevokeCommand())
	return cmd
}

func newKeyCreateCommand() *cobra.Command {
	var o daemonOptions
	var role string
	var namespaces []string
	var lifetime time.Duration
	cmd := &cobra.Command{
		Use:   "create NAME",
		Short: "Make an API key and print it, once",
		Example: `  agentrun key create ci --role user --namespaces team-a --lifetime 720h
  agentrun key create dashboard --role viewer --namespaces '*'`,
		Args: cobra.ExactArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			if role == "admin" && !cmd.Flags().Changed("namespaces") {
				namespaces = nil // all of them
			}
			return o.with(func(c *client.Client) error {
				made, err := c.CreateKey(cmd.Context(), rest.KeyCreate{
					Name: args[0], Role: rest.Role(role), Namespaces: namespaces, Lifetime: restconv.FromDuration(lifetime),
				})
				if err != nil {
					return err
				}
				fmt.Fprintf(cmd.ErrOrStderr(), "agentrun: key %s, %s in %s, expires %s; it is shown once:\n",
					made.Key.Id, made.Key.Role, strings.Join(made.Key.Namespaces, ","), expiry(made.Key))
				_, err = fmt.Fprintln(cmd.OutOrStdout(), made.Text)
				return err
			})
		},
	}
	f := cmd.Flags()
	o.serverFlag(f)
	f.StringVar(&role, "role", "user", "admin, user or viewer")
	f.StringSliceVar(&namespaces, "namespaces", []string{"default"}, "namespaces that it is for, * for all; an admin's is for all")
	f.DurationVar(&lifetime, "lifetime", 0, "how long it is valid (default: until it is revoked)")
	return cmd
}

func newKeyListCommand() *cobra.Command {
	var o daemonOptions
	var asJSON bool
	cmd := &cobra.Command{
		Use:   "list",
		Short: "List API keys, without their secrets",
		Args:  cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			return o.with(func(c *client.Client) error {
				keys, err := c.Keys(cmd.Context())
				if err != nil {
					return err
				}
				if asJSON {
					return printJSON(cmd.OutOrStdout(), keys)
				}
				var list []object
				for _, k := range keys {
					list = append(list, object{name: k.Id, row: []string{k.Name, string(k.Role), strings.Join(k.Namespaces, ","), age(k.Created), expiry(k)}})
				}
				return printObjects(cmd.OutOrStdout(), "ID\tNAME\tROLE\tNAMESPACES\tAGE\tEXPIRES", list)
			})
		},
	}
	o.serverFlag(cmd.Flags())
	cmd.Flags().BoolVar(&asJSON, "json", false, "print JSON")
	return cmd
}

func newKeyRevokeCommand() *cobra.Command {
	var o daemonOptions
	cmd := &cobra.Command{
		Use:   "revoke ID...",
		Short: "Revoke API keys; what they are used for at the moment is cut off",
		Args:  cobra.MinimumNArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			return o.with(func(c *client.Client) error {
				return each(args, func(id string) error { return c.RevokeKey(cmd.Context(), id) })
			})
		},
	}
	o.serverFlag(cmd.Flags())
	return cmd
}

// expiry is the time at which a key ends, for people.
func expiry(k rest.Key) string {
	switch {
	case k.Expires == nil:
		return "never"
	case time.Now().After(*k.Expires):
		return "expired"
	}
	return k.Expires.Format(time.RFC3339)
}
