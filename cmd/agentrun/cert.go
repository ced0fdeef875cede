package main

import (
	"errors"
	"fmt"
	"path/filepath"
	"time"

	"agentrun.dev/internal/access"
	"agentrun.dev/internal/client/local"
	"github.com/spf13/cobra"
)

func newCertCommand() *cobra.Command {
	cmd := &cobra.Command{
		Use:   "cert",
		Short: "Certificates for the gRPC API of nodes (agentrun up --node-listen)",
	}
	cmd.AddCommand(newCertIssueCommand())
	return cmd
}

// defaultLifetime is that of certificates that are not renewed automatically.
const defaultLifetime = 90 * 24 * time.Hour

func newCertIssueCommand() *cobra.Command {
	var role, authority, out string
	var hosts []string
	var lifetime time.Duration
	cmd := &cobra.Command{
		Use:   "issue NAME",
		Short: "Make a certificate that gives a role, and its key",
		Long: `Make a certificate for the gRPC API of nodes, and its key: NAME.crt and NAME.key. What
it may is said by its role (docs/security.md): a controller or a gateway acts for others, a
node serves the API, and asks other nodes.

The certificates are of an authority of this machine, which is made for the first one; each
machine needs its ca.pem, for --node-ca. Where Kubernetes, cert-manager or another CA makes
certificates this command is not needed: theirs need the URI
spiffe://agentrun.dev/ROLE/NAME.`,
		Example: `  agentrun cert issue --role node n1 --host 10.0.0.5
  agentrun cert issue --role gateway main
  agentrun up --node-listen 10.0.0.5:7071 --node-cert n1.crt --node-key n1.key --node-ca ca.pem`,
		Args: cobra.ExactArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			c, err := access.ParseComponent(role, args[0])
			if err != nil {
				return err
			}
			if c.Role == access.RoleNode && len(hosts) == 0 {
				return errors.New("a node's certificate needs a --host: what others reach it by")
			}
			if authority == "" {
				dir, err := local.DefaultFolder()
				if err != nil {
					return err
				}
				authority = filepath.Join(dir, "node-ca")
			}
			a, err := access.OpenAuthority(authority)
			if err != nil {
				return err
			}
			crt, key := filepath.Join(out, c.Name+".crt"), filepath.Join(out, c.Name+".key")
			until, err := a.Issue(c, hosts, lifetime, crt, key)
			if err != nil {
				return err
			}
			_, err = fmt.Fprintf(cmd.OutOrStdout(), "%s, valid until %s: %s, %s; its CA is %s\n", c, until.Format(time.DateOnly), crt, key, a.File)
			return err
		},
	}
	f := cmd.Flags()
	f.StringVar(&role, "role", "", "controller, gateway or node")
	f.StringSliceVar(&hosts, "host", nil, "host name or address that others reach a node by; may be repeated")
	f.DurationVar(&lifetime, "lifetime", defaultLifetime, "how long it is valid")
	f.StringVar(&authority, "authority", "", "folder of the authority; made if missing (default: node-ca in the state folder)")
	f.StringVar(&out, "out", ".", "folder that the files are written to")
	if err := cmd.MarkFlagRequired("role"); err != nil {
		panic(err) // it is defined just above
	}
	return cmd
}
