package main

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"strings"

	"agentrun.dev/api/rest"
	"agentrun.dev/internal/client"
	"agentrun.dev/internal/convert/restconv"
	"github.com/spf13/cobra"
)

func newSecretCommand() *cobra.Command {
	cmd := &cobra.Command{
		Use:   "secret",
		Short: "Keep secrets for sandboxes: claims get them as environment variables",
		Long: `Keep secrets of a namespace in the daemon. A claim that names a key of one
(secrets: [{name: SECRET, key: KEY}]) has its value in the environment variable KEY.
Values are never shown again: neither in lists nor in logs, nor in what is written to
disk. docs/design/secrets.md says what that protects against.`,
	}
	cmd.AddCommand(newSecretSetCommand(), newSecretListCommand(), newSecretDeleteCommand())
	return cmd
}

func newSecretSetCommand() *cobra.Command {
	var o daemonOptions
	cmd := &cobra.Command{
		Use:   "set SECRET KEY=VALUE...",
		Short: "Set values of a secret; other keys of it stay",
		Long: `Set values of a secret, which is made if it is not there. Keys that are not named stay
as they are, and so do sandboxes that were claimed before.

KEY=- reads the value from standard input, KEY=@FILE from a file, and KEY from the
environment variable of that name: what is on the command line can be seen by other
users of this machine, and stays in the shell's history. A line break at the end of
what is read is left out.`,
		Example: `  agentrun secret set llm OPENAI_API_KEY=-  < key.txt
  agentrun secret set db PASSWORD=@/run/secrets/db USER=app
  agentrun secret set llm OPENAI_API_KEY`,
		Args: cobra.MinimumNArgs(2),
		RunE: func(cmd *cobra.Command, args []string) error {
			values, err := readValues(args[1:], cmd.InOrStdin())
			if err != nil {
				return err
			}
			return o.with(func(c *client.Client) error {
				s, err := c.SetSecret(cmd.Context(), args[0], restconv.FromSecretData(values))
				if err != nil {
					return err
				}
				_, err = fmt.Fprintf(cmd.OutOrStdout(), "secret/%s set: it has %s\n", s.Name, strings.Join(s.Keys, ", "))
				return err
			})
		},
	}
	o.flags(cmd.Flags())
	return cmd
}

// readValues reads the values of arguments of the forms KEY=VALUE, KEY=-,
// KEY=@FILE and KEY. Its errors never show a value.
func readValues(args []string, stdin io.Reader) (map[string][]byte, error) {
	values := map[string][]byte{}
	fromStdin := false
	for i, a := range args {
		key, value, given := strings.Cut(a, "=")
		if _, twice := values[key]; twice || key == "" {
			return nil, fmt.Errorf("value %d: it is KEY=VALUE, KEY=-, KEY=@FILE or KEY, and each key comes once", i+1)
		}
		var read []byte
		var err error
		file, isFile := strings.CutPrefix(value, "@")
		switch {
		case !given:
			text, set := os.LookupEnv(key)
			if !set {
				return nil, fmt.Errorf("%s: there is no such environment variable: set it, or give KEY=VALUE, KEY=- or KEY=@FILE", key)
			}
			read = []byte(text)
		case value == "-":
			if fromStdin {
				return nil, errors.New("standard input is read for one key only")
			}
			fromStdin = true
			read, err = readValue(stdin)
		case isFile:
			read, err = readFileValue(file)
		default:
			read = []byte(value)
		}
		if err != nil {
			return nil, fmt.Errorf("%s: %w", key, err)
		}
		values[key] = read
	}
	return values, nil
}

func readFileValue(path string) ([]byte, error) {
	f, err := os.Open(path)
	if err != nil {
		return nil, err
	}
	defer func() { _ = f.Close() }() // only read
	return readValue(f)
}

// readValue reads a value and leaves out the line break at its end.
func readValue(r io.Reader) ([]byte, error) {
	const most = 1 << 20 // the daemon enforces the exact bound
	b, err := io.ReadAll(io.LimitReader(r, most))
	if err != nil {
		return nil, err
	}
	if rest, ok := bytes.CutSuffix(b, []byte("\n")); ok {
		b = bytes.TrimSuffix(rest, []byte("\r"))
	}
	return b, nil
}

// secretKind says how secrets are listed and deleted.
var secretKind = objectKind{
	names: []string{"secrets", "secret"}, header: "NAME\tKEYS\tAGE",
	list: func(ctx context.Context, c *client.Client, _ bool) ([]object, error) {
		return objects(c.Secrets(ctx))(func(s rest.Secret) object {
			return object{s.Name, []string{strings.Join(s.Keys, ","), age(s.Created)}, s}
		})
	},
	remove: func(ctx context.Context, c *client.Client, name string) error { return c.DeleteSecret(ctx, name) },
}

func newSecretListCommand() *cobra.Command {
	var o daemonOptions
	cmd := &cobra.Command{
		Use:     "list",
		Aliases: []string{"ls"},
		Short:   "List secrets and their keys, never a value",
		Args:    cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			return o.with(func(c *client.Client) error {
				list, err := secretKind.list(cmd.Context(), c, false)
				if err != nil {
					return err
				}
				return printObjects(cmd.OutOrStdout(), secretKind.header, list)
			})
		},
	}
	o.flags(cmd.Flags())
	return cmd
}

func newSecretDeleteCommand() *cobra.Command {
	var o daemonOptions
	cmd := &cobra.Command{
		Use:     "delete SECRET...",
		Aliases: []string{"rm"},
		Short:   "Delete secrets; sandboxes that were claimed keep what they have",
		Args:    cobra.MinimumNArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			return o.with(func(c *client.Client) error {
				return each(args, func(name string) error { return c.DeleteSecret(cmd.Context(), name) })
			})
		},
	}
	o.flags(cmd.Flags())
	return cmd
}
