package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"
	"text/tabwriter"
	"time"

	"agentrun.dev/cmd/internal/cli"
	"agentrun.dev/internal/client/local"
	"agentrun.dev/internal/storage/image"
	"agentrun.dev/internal/storage/image/debian"
	"agentrun.dev/internal/storage/image/tree"
	"github.com/spf13/cobra"
	"github.com/spf13/pflag"
)

// registryOptions are the flags of commands that speak to registries.
type registryOptions struct {
	caFiles   []string
	plainHTTP []string
	config    string
}

// limitOptions are the flags of commands that unpack images.
type limitOptions struct {
	maxSize       cli.ByteSize
	maxRatio      int64
	absoluteNames bool
}

func (o *limitOptions) flags(f *pflag.FlagSet) {
	limits := tree.DefaultLimits()
	o.maxSize, o.maxRatio = cli.ByteSize(limits.Bytes), limits.Ratio
	f.Var(&o.maxSize, "max-size", "refuse images whose files are larger, all together")
	f.Int64Var(&o.maxRatio, "max-ratio", o.maxRatio, "refuse layers that are this many times larger than their compressed form")
	f.BoolVar(&o.absoluteNames, "absolute-names", false, "take names from / in layers as meant from the image's root, instead of refusing them")
}

func (o *limitOptions) limits() (tree.Limits, error) {
	limits := tree.DefaultLimits()
	if o.maxSize == 0 || o.maxSize > 1<<60 || o.maxRatio < 1 {
		return limits, errors.New("--max-size and --max-ratio have to be larger than 0")
	}
	limits.Bytes, limits.Ratio, limits.AbsoluteNames = int64(o.maxSize), o.maxRatio, o.absoluteNames
	return limits, nil
}

func (o *registryOptions) flags(f *pflag.FlagSet) {
	f.StringArrayVar(&o.caFiles, "ca-file", nil, "PEM file of a certificate authority to trust beside the system's (repeatable)")
	f.StringArrayVar(&o.plainHTTP, "plain-http", nil, "HOST[:PORT] of a registry to be spoken to without TLS (repeatable); never guessed")
	f.StringVar(&o.config, "registries", "", "JSON file of settings of registries: TLS, and what builds of namespaces may reach (default: registries.json in $XDG_CONFIG_HOME/agentrun, or in /etc/agentrun)")
}

// pullOptions are the flags of agentrun image pull.
type pullOptions struct {
	platform string
	registryOptions
	limitOptions
}

func (o *pullOptions) resolve(progress func(image.Progress)) (p image.PullOptions, err error) {
	if p.Platform, err = image.ParsePlatform(o.platform); err != nil {
		return p, fmt.Errorf("--platform: %w", err)
	}
	if p.Limits, err = o.limits(); err != nil {
		return p, err
	}
	if p.Registries, err = o.registries(); err != nil {
		return p, err
	}
	p.Progress = progress
	return p, nil
}

// registries are the file's settings and the flags'.
func (o *registryOptions) registries() (r image.Registries, err error) {
	path := o.config
	if path == "" {
		path = defaultFile("registries.json")
	} else if _, err := os.Stat(path); err != nil {
		return r, fmt.Errorf("--registries: %w", err)
	}
	if r, err = image.LoadRegistries(path); err != nil {
		return r, err
	}
	r.CAFiles = append(r.CAFiles, o.caFiles...)
	for _, host := range o.plainHTTP {
		if r.Hosts == nil {
			r.Hosts = map[string]image.Registry{}
		}
		host = strings.ToLower(host)
		settings := r.Hosts[host]
		settings.PlainHTTP = true
		r.Hosts[host] = settings
	}
	if err := r.Validate(); err != nil {
		return r, fmt.Errorf("--plain-http: %w", err)
	}
	return r, nil
}

// defaultFile is the path of a file of settings: the user's own, or the
// machine's.
func defaultFile(name string) string {
	if dir, err := os.UserConfigDir(); err == nil {
		path := filepath.Join(dir, "agentrun", name)
		if _, err := os.Stat(path); err == nil {
			return path
		}
	}
	return filepath.Join("/etc/agentrun", name)
}

func newImageCommand() *cobra.Command {
	cmd := &cobra.Command{
		Use:   "image",
		Short: "Pull, import, build, list and remove images",
		Long: `Images are root filesystems with the settings that came with them. They come from
registries, from archives, or are built of Debian packages, and are kept as EROFS
files that sandboxes share. A name that is known here means the image here; a
registry is asked by agentrun image pull alone, or when a name is not known.

What these commands name is published: templates of all namespaces can be made of it.
An image that the daemon has pulled for a template belongs to the template's namespace,
until agentrun image publish.`,
	}
	cmd.AddCommand(newImagePullCommand(), newImageImportCommand(), newImageBuildCommand(), newImageListCommand(),
		newImageRemoveCommand(), newImageInspectCommand(), newImagePruneCommand(), newImageTagCommand(),
		newImagePublishCommand(), newImageUnpublishCommand(), newImageAvailableCommand())
	return cmd
}

func newImagePullCommand() *cobra.Command {
	var o pullOptions
	cmd := &cobra.Command{
		Use:   "pull REFERENCE...",
		Short: "Fetch images from their registries",
		Long: `Fetch images from their registries, by tag or by digest. Credentials come from
docker's configuration (docker login, DOCKER_CONFIG). Registries are spoken to with
TLS; --plain-http names those that have none.

Each image's digest is printed when it is here.`,
		Example: `  agentrun image pull python:3.12-slim
  agentrun image pull --ca-file ca.pem registry.example.com/team/app@sha256:…`,
		Args: cobra.MinimumNArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			store, err := local.OpenImages()
			if err != nil {
				return err
			}
			for _, a := range args {
				ref, err := image.ParseReference(a)
				if err != nil {
					return err
				}
				img, err := o.pull(cmd.Context(), store, ref, cmd.ErrOrStderr())
				if err != nil {
					return err
				}
				fmt.Fprintln(cmd.OutOrStdout(), img.Digest)
			}
			return nil
		},
	}
	f := cmd.Flags()
	f.StringVar(&o.platform, "platform", image.DefaultPlatform, "platform to choose from images for several")
	o.registryOptions.flags(f)
	o.limitOptions.flags(f)
	return cmd
}

func (o *pullOptions) pull(ctx context.Context, store *image.Store, ref image.Reference, stderr io.Writer) (*image.Image, error) {
	p := newProgressPrinter(stderr, ref.String())
	defer p.end()
	options, err := o.resolve(p.show)
	if err != nil {
		return nil, err
	}
	return store.Pull(ctx, ref, options)
}

func newImageImportCommand() *cobra.Command {
	var limits limitOptions
	var name, platform string
	cmd := &cobra.Command{
		Use:   "import PATH [-t NAME]",
		Short: "Take images from an OCI layout or from what docker save has written",
		Long: `Take images from an OCI layout, a folder or a tar archive, or from what docker save
has written, compressed or not. Images keep the names that the archive gives them;
-t names the one that it holds.`,
		Example: `  docker save app:1 | gzip > app.tgz; agentrun image import app.tgz
  agentrun image import ./layout -t app:1`,
		Args: cobra.ExactArgs(1),
		RunE: func(cmd *cobra.Command, args []string) (err error) {
			p := newProgressPrinter(cmd.ErrOrStderr(), args[0])
			defer p.end()
			o := image.ImportOptions{Progress: p.show}
			if o.Limits, err = limits.limits(); err != nil {
				return err
			}
			if o.Platform, err = image.ParsePlatform(platform); err != nil {
				return fmt.Errorf("--platform: %w", err)
			}
			if name != "" {
				ref, err := image.ParseReference(name)
				if err != nil {
					return err
				}
				o.Name = &ref
			}
			store, err := local.OpenImages()
			if err != nil {
				return err
			}
			imgs, err := store.Import(cmd.Context(), args[0], o)
			for _, img := range imgs {
				fmt.Fprintln(cmd.OutOrStdout(), img.Digest)
			}
			return err
		},
	}
	f := cmd.Flags()
	f.StringVarP(&name, "tag", "t", "", "name for the image")
	f.StringVar(&platform, "platform", image.DefaultPlatform, "platform to choose from images for several")
	limits.flags(f)
	return cmd
}

func newImageBuildCommand() *cobra.Command {
	var recipe debian.Recipe
	var names []string
	var noCache, verbose bool
	cmd := &cobra.Command{
		Use:   "build --debian SUITE [--include PACKAGE,...] [--pip WHEEL...] -t NAME",
		Short: "Build an image of Debian packages and Python wheels, without a registry",
		Long: `Build an image of Debian packages and Python wheels. Packages come from where this
host's apt gets its own, or from --mirror; wheels from where its pip does. With
python3 among the packages, or with wheels, the image has pip and a command named
python. Nothing of this host's settings stays in the image.

The same recipe is built once; --no-cache builds it again, with the packages of
today. With SOURCE_DATE_EPOCH set, or from the same packages, the same image comes
out.`,
		Example: `  agentrun image build --debian bookworm --include python3,python3-numpy --pip requests -t python:3.12-slim`,
		Args:    cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			p := newProgressPrinter(cmd.ErrOrStderr(), "debian "+recipe.Suite)
			defer p.end()
			o := image.BuildOptions{NoCache: noCache, Progress: p.show}
			if verbose {
				o.Log = cmd.ErrOrStderr()
			}
			for _, n := range names {
				ref, err := image.ParseReference(n)
				if err != nil {
					return err
				}
				o.Names = append(o.Names, ref)
			}
			store, err := local.OpenImages()
			if err != nil {
				return err
			}
			img, err := store.Build(cmd.Context(), recipe, o)
			if err != nil {
				return err
			}
			fmt.Fprintln(cmd.OutOrStdout(), img.Digest)
			return nil
		},
	}
	f := cmd.Flags()
	f.StringVar(&recipe.Suite, "debian", "", "Debian release, by its code name (required)")
	f.StringSliceVar(&recipe.Include, "include", nil, "packages to install, separated by commas (repeatable)")
	f.StringArrayVar(&recipe.Pip, "pip", nil, "wheel to install, as pip install takes it (repeatable)")
	f.StringVar(&recipe.Mirror, "mirror", "", "URL of a Debian archive (default: where this host's packages come from)")
	f.StringArrayVarP(&names, "tag", "t", nil, "name for the image (repeatable)")
	f.BoolVar(&noCache, "no-cache", false, "build even if the same recipe was built before")
	f.BoolVarP(&verbose, "verbose", "v", false, "print what the programs say that build it")
	if err := cmd.MarkFlagRequired("debian"); err != nil {
		panic(err) // the flag was defined above
	}
	return cmd
}

func newImageListCommand() *cobra.Command {
	var asJSON bool
	cmd := &cobra.Command{
		Use:   "ls",
		Short: "List the images of this machine, and for whom they are",
		Args:  cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			store, err := local.OpenImages()
			if err != nil {
				return err
			}
			list, err := store.List()
			if err != nil {
				return err
			}
			if asJSON {
				if list == nil {
					list = []image.Entry{}
				}
				return printJSON(cmd.OutOrStdout(), list)
			}
			return printImages(cmd.OutOrStdout(), list)
		},
	}
	cmd.Flags().BoolVar(&asJSON, "json", false, "print JSON")
	return cmd
}

func printJSON(w io.Writer, v any) error {
	e := json.NewEncoder(w)
	e.SetIndent("", "  ")
	return e.Encode(v)
}

func printImages(w io.Writer, list []image.Entry) error {
	t := tabwriter.NewWriter(w, 0, 8, 2, ' ', 0)
	fmt.Fprintln(t, "NAME\tDIGEST\tPLATFORM\tSTORED\tSIZE\tFOR\tUSED BY")
	for _, e := range list {
		var holders []string
		for _, h := range e.Holders {
			holders = append(holders, h.String())
		}
		used := "-"
		if len(holders) > 0 {
			used = strings.Join(holders, ", ")
		}
		if e.Damaged != "" {
			used = e.Damaged
		}
		for _, r := range imageRows(e) {
			fmt.Fprintf(t, "%s\t%s\t%s\t%s\t%.1f MiB\t%s\t%s\n", r.name, e.Digest.Short(), e.Platform,
				e.Stored.Local().Format(time.DateTime), float64(e.Size())/(1<<20), r.of, used)
		}
	}
	return t.Flush()
}

func newImageRemoveCommand() *cobra.Command {
	return &cobra.Command{
		Use:   "rm IMAGE...",
		Short: "Take names away from images; delete those without any",
		Long: `Take a name away from an image, and delete the image if that was its last. By its
digest an image is deleted with all names. An image that a template, a snapshot, a
sandbox or a running command uses stays as it is.`,
		Args: cobra.MinimumNArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			store, err := local.OpenImages()
			if err != nil {
				return err
			}
			var errs []error
			for _, a := range args {
				r, err := store.Remove(cmd.Context(), a)
				errs = append(errs, err)
				if err != nil {
					continue
				}
				if r.Untagged != "" {
					fmt.Fprintln(cmd.OutOrStdout(), "untagged", r.Untagged)
				}
				if r.Deleted {
					fmt.Fprintln(cmd.OutOrStdout(), "deleted", r.Digest)
				}
			}
			return errors.Join(errs...)
		},
	}
}

func newImageInspectCommand() *cobra.Command {
	var verify bool
	cmd := &cobra.Command{
		Use:   "inspect IMAGE...",
		Short: "Print what is known of images, as JSON",
		Args:  cobra.MinimumNArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			store, err := local.OpenImages()
			if err != nil {
				return err
			}
			var out []*image.Image
			for _, a := range args {
				img, err := store.Resolve(a)
				if err != nil {
					return err
				}
				if verify {
					if err := store.Verify(cmd.Context(), img.Digest); err != nil {
						return err
					}
				}
				out = append(out, img)
			}
			return printJSON(cmd.OutOrStdout(), out)
		},
	}
	cmd.Flags().BoolVar(&verify, "verify", false, "read the images' files and compare their digests")
	return cmd
}

func newImagePruneCommand() *cobra.Command {
	var all, asJSON bool
	cmd := &cobra.Command{
		Use:   "prune",
		Short: "Delete images that have no name and that nothing uses",
		Long: `Delete images that have no name and that no template, snapshot, sandbox or running
command uses, and what killed pulls and builds have left. --all deletes those with
names, too. Pulls and builds that go on meanwhile are left alone.`,
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			store, err := local.OpenImages()
			if err != nil {
				return err
			}
			p, err := store.Prune(cmd.Context(), all)
			if err != nil {
				return err
			}
			if asJSON {
				return printJSON(cmd.OutOrStdout(), p)
			}
			for _, d := range p.Images {
				fmt.Fprintln(cmd.OutOrStdout(), "deleted", d)
			}
			fmt.Fprintf(cmd.OutOrStdout(), "freed %.1f MiB\n", float64(p.Freed)/(1<<20))
			return nil
		},
	}
	cmd.Flags().BoolVarP(&all, "all", "a", false, "delete images with names, too, unless something uses them")
	cmd.Flags().BoolVar(&asJSON, "json", false, "print JSON")
	return cmd
}

func newImageTagCommand() *cobra.Command {
	return &cobra.Command{
		Use:   "tag IMAGE NAME",
		Short: "Give an image that is here another name, for all namespaces",
		Args:  cobra.ExactArgs(2),
		RunE: func(cmd *cobra.Command, args []string) error {
			store, err := local.OpenImages()
			if err != nil {
				return err
			}
			img, err := store.Resolve(args[0])
			if err != nil {
				return err
			}
			ref, err := image.ParseReference(args[1])
			if err != nil {
				return err
			}
			return store.Tag(cmd.Context(), ref, img.Digest)
		},
	}
}
