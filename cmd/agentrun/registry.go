package main

import (
	"errors"
	"fmt"

	"agentrun.dev/api/rest"
	"agentrun.dev/internal/client"
	"github.com/spf13/cobra"
)

func newRegistryCommand() *cobra.Command {
	cmd := &cobra.Command{
		Use:   "registry",
		Short: "Keep credentials for registries, by which a namespace pulls images",
		Long: `Keep credentials of a namespace for registries in the daemon: builds of its templates
pull with them. They are sealed like secrets, and never shown again. agentrun image pull
has nothing to do with them: it is root's, and takes docker's.`,
	}
	cmd.AddCommand(newRegistryLoginCommand(), newRegistryLogoutCommand(), newRegistryListCommand())
	return cmd
}

func newRegistryLoginCommand() *cobra.Command {
	var o daemonOptions
	var user string
	var fromStdin bool
	cmd := &cobra.Command{
		Use:   "login HOST[:PORT] --username NAME --password-stdin",
		Short: "Give a namespace credentials for a registry",
		Long: `Give a namespace credentials for a registry, in place of those that it had. The password,
or token, is read from standard input: what is on the command line can be seen by other
users of this machine. Builds that begin later pull with them; a template whose build has
failed is built again when it is applied again.`,
		Example: `  agentrun registry login -n team-a registry.example.com --username ci --password-stdin < token`,
		Args:    cobra.ExactArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			if user == "" || !fromStdin {
				return errors.New("give --username NAME, and --password-stdin with the password on standard input")
			}
			password, err := readValue(cmd.InOrStdin())
			if err != nil {
				return fmt.Errorf("read the password: %w", err)
			}
			return o.with(func(c *client.Client) error {
				l, err := c.PutRegistryLogin(cmd.Context(), rest.RegistryCredentials{Registry: args[0], Username: user, Password: string(password)})
				if err != nil {
					return err
				}
				_, err = fmt.Fprintf(cmd.OutOrStdout(), "namespace %s pulls from %s as %s\n", l.Namespace, l.Registry, l.Username)
				return err
			})
		},
	}
	f := cmd.Flags()
	o.flags(f)
	f.StringVarP(&user, "username", "u", "", "name that the registry knows the namespace by")
	f.BoolVar(&fromStdin, "password-stdin", false, "read the password from standard input")
	return cmd
}

func newRegistryLogoutCommand() *cobra.Command {
	var o daemonOptions
	cmd := &cobra.Command{
		Use:   "logout HOST[:PORT]...",
		Short: "Delete a namespace's credentials for registries",
		Long: `Delete a namespace's credentials for registries. Images that were pulled with them stay
the namespace's for as long as its templates name them.`,
		Args: cobra.MinimumNArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			return o.with(func(c *client.Client) error {
				return each(args, func(host string) error { return c.DeleteRegistryLogin(cmd.Context(), host) })
			})
		},
	}
	o.flags(cmd.Flags())
	return cmd
}

func newRegistryListCommand() *cobra.Command {
	var o daemonOptions
	cmd := &cobra.Command{
		Use:     "list",
		Aliases: []string{"ls"},
		Short:   "List registries that a namespace has credentials for, never a password",
		Args:    cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			return o.with(func(c *client.Client) error {
				list, err := objects(c.RegistryLogins(cmd.Context()))(func(l rest.RegistryLogin) object {
					return object{l.Registry, []string{l.Username, age(l.Changed)}, l}
				})
				if err != nil {
					return err
				}
				return printObjects(cmd.OutOrStdout(), "REGISTRY\tUSERNAME\tAGE", list)
			})
		},
	}
	o.flags(cmd.Flags())
	return cmd
}
