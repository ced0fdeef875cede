package main

import (
	"errors"
	"fmt"
	"io"
	"os"
	"strings"
	"text/tabwriter"

	"agentrun.dev/api/rest"
	"agentrun.dev/internal/client"
	"github.com/spf13/cobra"
)

func newCACommand() *cobra.Command {
	cmd := &cobra.Command{
		Use:   "ca",
		Short: "The CA that sandboxes of a namespace can trust",
		Long: `The CA of a namespace is shown to its sandboxes in place of hosts whose requests get
values of secrets put in (inject in a claim's secrets). It is made for the first
template with trustNamespaceCA: true. Give it to all nodes of a cluster, or limit it to
the names of these hosts. Templates that trust it are built again when it changes;
sandboxes that trust the one before have no values put into their requests any more.`,
	}
	cmd.AddCommand(newCAShowCommand(), newCACreateCommand(), newCASetCommand())
	return cmd
}

func newCAShowCommand() *cobra.Command {
	var o daemonOptions
	var asJSON, asPEM bool
	cmd := &cobra.Command{
		Use:   "show",
		Short: "Show the CA of a namespace, never its key",
		Args:  cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			return o.with(func(c *client.Client) error {
				ca, err := c.CA(cmd.Context())
				switch {
				case err != nil:
					return err
				case asJSON:
					return printJSON(cmd.OutOrStdout(), ca)
				case asPEM:
					_, err := io.WriteString(cmd.OutOrStdout(), ca.Certificate)
					return err
				}
				return printCA(cmd.OutOrStdout(), ca)
			})
		},
	}
	o.flags(cmd.Flags())
	cmd.Flags().BoolVar(&asJSON, "json", false, "print JSON")
	cmd.Flags().BoolVar(&asPEM, "pem", false, "print the certificate")
	cmd.MarkFlagsMutuallyExclusive("json", "pem")
	return cmd
}

func newCACreateCommand() *cobra.Command {
	var names []string
	return putCACommand(&cobra.Command{
		Use:     "create",
		Short:   "Make a new CA for a namespace",
		Example: `  agentrun ca create -n team-a --name api.openai.com --name api.anthropic.com`,
		Args:    cobra.NoArgs,
	}, func(cmd *cobra.Command) {
		cmd.Flags().StringArrayVar(&names, "name", nil, "limit it to this name and what is below it; may be repeated")
	}, func() (rest.CASpec, error) { return rest.CASpec{Names: names}, nil })
}

func newCASetCommand() *cobra.Command {
	var certificate, key string
	return putCACommand(&cobra.Command{
		Use:     "set",
		Short:   "Give a namespace a CA that was made elsewhere",
		Example: `  agentrun ca set -n team-a --certificate ca.crt --key ca.key`,
		Args:    cobra.NoArgs,
	}, func(cmd *cobra.Command) {
		cmd.Flags().StringVar(&certificate, "certificate", "", "file with its certificate, in PEM")
		cmd.Flags().StringVar(&key, "key", "", "file with its key, in PEM and not encrypted")
		for _, flag := range []string{"certificate", "key"} {
			if err := cmd.MarkFlagRequired(flag); err != nil {
				panic(err) // it is defined just above
			}
		}
	}, func() (spec rest.CASpec, err error) {
		read := func(path string) string {
			b, readErr := os.ReadFile(path)
			err = errors.Join(err, readErr)
			return string(b)
		}
		spec = rest.CASpec{Certificate: read(certificate), Key: read(key)}
		return spec, err
	})
}

// putCACommand completes a command that gives a namespace another CA.
func putCACommand(cmd *cobra.Command, flags func(*cobra.Command), spec func() (rest.CASpec, error)) *cobra.Command {
	var o daemonOptions
	cmd.RunE = func(cmd *cobra.Command, _ []string) error {
		wanted, err := spec()
		if err != nil {
			return err
		}
		return o.with(func(c *client.Client) error {
			ca, err := c.PutCA(cmd.Context(), wanted)
			if err != nil {
				return err
			}
			return printCA(cmd.OutOrStdout(), ca)
		})
	}
	o.flags(cmd.Flags())
	flags(cmd)
	return cmd
}

func printCA(w io.Writer, ca rest.NamespaceCA) error {
	names := "all names"
	if len(ca.Names) > 0 {
		names = strings.Join(ca.Names, ", ") + " and below"
	}
	t := tabwriter.NewWriter(w, 0, 0, 3, ' ', 0)
	_, err := fmt.Fprintf(t, "NAMESPACE\t%s\nSUBJECT\t%s\nSHA-256\t%s\nLIMITED TO\t%s\nEXPIRES\t%s\n",
		ca.Namespace, ca.Subject, ca.Fingerprint, names, ca.Expires.Format("2006-01-02"))
	return errors.Join(err, t.Flush())
}
