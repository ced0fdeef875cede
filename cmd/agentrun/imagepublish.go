package main

import (
	"fmt"
	"slices"
	"strings"

	"agentrun.dev/api/rest"
	"agentrun.dev/internal/client"
	"agentrun.dev/internal/storage/image"
	"github.com/spf13/cobra"
)

func newImagePublishCommand() *cobra.Command {
	var o daemonOptions
	var names []string
	cmd := &cobra.Command{
		Use:   "publish IMAGE [--tag NAME...]",
		Short: "Let all namespaces use an image that a namespace has pulled",
		Long: `Let all namespaces of the daemon use an image, without asking its registry. Names of the
namespace (--namespace) are looked at first. It takes an admin's key for all namespaces.

Images that agentrun image pull, import, build or tag name on the node are published.`,
		Example: `  agentrun image publish -n team-a registry.example.com/team/app:1 --tag app:1`,
		Args:    cobra.ExactArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			return o.with(func(c *client.Client) error {
				img, err := c.PublishImage(cmd.Context(), rest.ImagePublish{Image: args[0], Namespace: o.namespace, Names: names})
				if err != nil {
					return err
				}
				_, err = fmt.Fprintf(cmd.OutOrStdout(), "published %s\n", img.Digest)
				return err
			})
		},
	}
	o.flags(cmd.Flags())
	cmd.Flags().StringArrayVarP(&names, "tag", "t", nil, "name for all namespaces (repeatable; default: the name that it was found by)")
	return cmd
}

func newImageUnpublishCommand() *cobra.Command {
	var o daemonOptions
	cmd := &cobra.Command{
		Use:   "unpublish IMAGE...",
		Short: "Take published names away from images",
		Long: `Take published names away from images; by its digest an image loses all of them. The
images stay on the node, for root and for namespaces that have pulled them; agentrun
image prune removes what has no name at all. Snapshots of templates stay as they are.`,
		Args: cobra.MinimumNArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			return o.with(func(c *client.Client) error {
				return each(args, func(name string) error { return c.UnpublishImage(cmd.Context(), name) })
			})
		},
	}
	o.serverFlag(cmd.Flags())
	return cmd
}

func newImageAvailableCommand() *cobra.Command {
	var o daemonOptions
	var asJSON bool
	cmd := &cobra.Command{
		Use:   "available",
		Short: "List the images that a namespace's templates can be made of without a pull",
		Long: `List the images that templates of a namespace can be made of without a pull: those that
the namespace has pulled, and those that are published. The daemon is asked;
agentrun image ls lists all images of this machine.`,
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			return o.with(func(c *client.Client) error {
				all, err := c.Images(cmd.Context())
				if err != nil {
					return err
				}
				if asJSON {
					return printJSON(cmd.OutOrStdout(), all)
				}
				var list []object
				for _, img := range all {
					names := img.Names
					if len(names) == 0 {
						names = []string{"-"}
					}
					for _, n := range names {
						published := "no"
						if img.Published {
							published = "yes"
						}
						list = append(list, object{shortImage(n), []string{digestOf(img), published, mebibytes(img.Size), age(img.Stored)}, img})
					}
				}
				return printObjects(cmd.OutOrStdout(), "NAME\tDIGEST\tPUBLISHED\tSIZE\tAGE", list)
			})
		},
	}
	o.flags(cmd.Flags())
	cmd.Flags().BoolVar(&asJSON, "json", false, "print JSON")
	return cmd
}

// shortImage is a name of an image in the form that people write.
func shortImage(name string) string { return strings.TrimPrefix(name, "index.docker.io/library/") }

func digestOf(img rest.Image) string {
	d, err := image.ParseDigest(img.Digest)
	if err != nil {
		return img.Digest
	}
	return d.Short()
}

// imageRow is one line about an image in root's list: a name, and the users of that name,
// which are a namespace, all of them, or root.
type imageRow struct{ name, of string }

func imageRows(e image.Entry) (rows []imageRow) {
	for _, n := range e.Names {
		rows = append(rows, imageRow{shortImage(n), "all"})
	}
	if len(rows) == 0 && e.Published {
		rows = append(rows, imageRow{"-", "all"})
	}
	var spaces []string
	for n := range e.Namespaces {
		spaces = append(spaces, n)
	}
	slices.Sort(spaces)
	for _, space := range spaces {
		for _, n := range e.Namespaces[space] {
			rows = append(rows, imageRow{shortImage(n), space})
		}
	}
	if len(rows) == 0 {
		rows = append(rows, imageRow{"-", "root"})
	}
	return rows
}
