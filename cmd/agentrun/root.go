package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"

	"agentrun.dev/cmd/internal/cli"
	"agentrun.dev/internal/client/local"
	"agentrun.dev/internal/engine/pick"
	"agentrun.dev/internal/storage/image"
	"github.com/spf13/cobra"
	"github.com/spf13/pflag"
)

// rootOptions are the flags of commands that boot a root filesystem.
type rootOptions struct {
	rootfs string
	image  string
	pull   string
	registryOptions
}

// When an image is pulled (--pull).
const (
	pullMissing = "missing"
	pullAlways  = "always"
	pullNever   = "never"
)

func (o *rootOptions) flags(f *pflag.FlagSet) {
	f.StringVar(&o.image, "image", "", "image to boot, by its name or digest")
	f.StringVar(&o.rootfs, "rootfs", "", "folder with the root filesystem, or an EROFS image of one")
	f.StringVar(&o.pull, "pull", pullMissing, "when to ask the image's registry: missing, always or never")
	o.registryOptions.flags(f)
}

// imageFlags apply to images only.
var imageFlags = []string{"image", "pull", "ca-file", "plain-http", "registries"}

// exclusive rejects flags of one kind of root that are given with another.
func (o *rootOptions) exclusive(cmd *cobra.Command, more ...string) {
	for _, flag := range append(imageFlags, more...) {
		cmd.MarkFlagsMutuallyExclusive("rootfs", flag)
	}
}

// openRoot opens a root filesystem for a guest. It returns the settings of its
// image, too.
func (o *rootOptions) openRoot(ctx context.Context, kind pick.Kind, stderr io.Writer) (*os.File, image.Config, error) {
	if o.image != "" {
		return o.openImage(ctx, kind, stderr)
	}
	f, err := cli.OpenRoot(ctx, o.rootfs, kind, stderr)
	return f, image.Config{}, err
}

func (o *rootOptions) openImage(ctx context.Context, kind pick.Kind, stderr io.Writer) (_ *os.File, config image.Config, err error) {
	store, err := local.OpenImages()
	if err != nil {
		return nil, config, err
	}
	img, err := o.findImage(ctx, store, stderr)
	if err != nil {
		return nil, config, fmt.Errorf("--image: %w", err)
	}
	if img.Platform != image.DefaultPlatform {
		return nil, config, fmt.Errorf("--image: %s is for %s, sandboxes run %s: agentrun image pull %s fetches that", o.image, img.Platform, image.DefaultPlatform, o.image)
	}
	h, err := store.Open(ctx, img.Digest)
	if err != nil {
		return nil, config, fmt.Errorf("--image: %w", err)
	}
	// An open file outlives its name.
	defer func() { err = errors.Join(err, h.Close()) }()
	if kind != pick.GVisor {
		f, err := h.Root()
		return f, h.Image.Config, err
	}
	if err := cli.WarnLost(stderr, h.Image.Capabilities); err != nil {
		return nil, config, err
	}
	f, err := h.PlainRoot()
	return f, h.Image.Config, err
}

// findImage looks for the image in the store before it asks a registry.
func (o *rootOptions) findImage(ctx context.Context, store *image.Store, stderr io.Writer) (*image.Image, error) {
	switch o.pull {
	case pullMissing, pullNever:
		img, err := store.Resolve(o.image)
		if err == nil || o.pull == pullNever || !errors.Is(err, image.ErrNotFound) {
			return img, err
		}
	case pullAlways:
	default:
		return nil, fmt.Errorf("--pull %q: write %s, %s or %s", o.pull, pullMissing, pullAlways, pullNever)
	}
	ref, err := image.ParseReference(o.image)
	if err != nil {
		return nil, err
	}
	p := pullOptions{platform: image.DefaultPlatform, registryOptions: o.registryOptions}
	p.limitOptions.flags(pflag.NewFlagSet("", pflag.ContinueOnError)) // their defaults
	return p.pull(ctx, store, ref, stderr)
}

// apply applies the image's settings unless flags override them.
func (o *execOptions) apply(c image.Config) {
	o.env = c.Environ(o.env)
	if o.user == "" {
		o.user = c.User
	}
	if o.workdir == "" {
		o.workdir = c.WorkingDir
	}
}

// optionalString is a flag that may be set to the empty string.
type optionalString struct {
	value string
	set   bool
}

func (s *optionalString) String() string { return s.value }
func (s *optionalString) Type() string   { return "string" }

func (s *optionalString) Set(v string) error {
	s.value, s.set = v, true
	return nil
}
