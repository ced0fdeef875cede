package main

import (
	"errors"
	"fmt"
	"io"
	"os"

	"agentrun.dev/cmd/internal/cli"
	"agentrun.dev/internal/client/local"
	"agentrun.dev/internal/durable"
	"agentrun.dev/internal/storage/image"
	"agentrun.dev/internal/storage/pack"
	"agentrun.dev/internal/storage/snapshot"
	"github.com/spf13/cobra"
	"github.com/spf13/pflag"
	"golang.org/x/sys/unix"
	"golang.org/x/term"
)

// passwordEnv is the variable in which cosign looks for the password of its
// key.
const passwordEnv = "COSIGN_PASSWORD"

// packOptions are the flags of commands that pack snapshots.
type packOptions struct{ signKey string }

func (o *packOptions) flags(f *pflag.FlagSet) {
	f.StringVar(&o.signKey, "sign-key", "", "private key to sign with: cosign's (its password is asked, or in "+passwordEnv+"), or a plain PEM file")
}

func (o *packOptions) resolve(p *progressPrinter) (out pack.PackOptions, err error) {
	out.Progress = p.show
	if o.signKey != "" {
		if out.Key, err = pack.LoadSigner(o.signKey, askPassword); err != nil {
			return out, fmt.Errorf("--sign-key: %w", err)
		}
	}
	return out, nil
}

// askPassword finds the password of a key.
func askPassword() ([]byte, error) {
	if password, ok := os.LookupEnv(passwordEnv); ok {
		return []byte(password), nil
	}
	in := int(os.Stdin.Fd())
	if !term.IsTerminal(in) {
		return nil, fmt.Errorf("the key has a password: set %s", passwordEnv)
	}
	fmt.Fprint(os.Stderr, "Password of the key: ")
	defer fmt.Fprintln(os.Stderr)
	return term.ReadPassword(in)
}

// unpackOptions are the flags of commands that unpack snapshots.
type unpackOptions struct {
	verifyKey string
	maxSize   cli.ByteSize
	maxRatio  uint64
	anyHost   bool
}

func (o *unpackOptions) flags(f *pflag.FlagSet) {
	limits := pack.DefaultLimits()
	o.maxSize, o.maxRatio = cli.ByteSize(limits.Bytes), limits.Ratio
	f.StringVar(&o.verifyKey, "verify-key", "", "public key (PEM, as cosign's) that must have signed the snapshot")
	f.Var(&o.maxSize, "max-size", "refuse snapshots whose memory and disks are larger, all together")
	f.Uint64Var(&o.maxRatio, "max-ratio", o.maxRatio, "refuse snapshots that are this many times larger than their packed form, zeros not counted")
	f.BoolVar(&o.anyHost, "any-host", false, "keep a snapshot that this host cannot fork: one of another processor, engine or build")
}

func (o *unpackOptions) resolve(p *progressPrinter) (out pack.UnpackOptions, err error) {
	out.Progress, out.Limits = p.show, pack.DefaultLimits()
	if o.maxSize == 0 || o.maxSize > 1<<60 || o.maxRatio == 0 {
		return out, errors.New("--max-size and --max-ratio have to be larger than 0")
	}
	out.Limits.Bytes, out.Limits.Ratio = uint64(o.maxSize), o.maxRatio
	if o.verifyKey != "" {
		if out.Key, err = pack.LoadVerifier(o.verifyKey); err != nil {
			return out, fmt.Errorf("--verify-key: %w", err)
		}
	}
	if o.anyHost {
		out.Accept = func(snapshot.Manifest) error { return nil }
	}
	return out, nil
}

func newSnapshotPackCommand() *cobra.Command {
	var o packOptions
	cmd := &cobra.Command{
		Use:   "pack NAME FILE",
		Short: "Write a snapshot into one file, for other machines",
		Long: `Write a snapshot into one file, with all that its forks need on another machine:
memory, state, disks and the root filesystem. The file is an OCI image layout in a
tar archive. A FILE of - is the standard output.

The digest of the pack is printed. A snapshot that holds secrets is refused.`,
		Example: `  agentrun snapshot pack py py.pack --sign-key cosign.key
  agentrun snapshot pack py - | ssh other agentrun snapshot unpack - py`,
		Args: cobra.ExactArgs(2),
		RunE: func(cmd *cobra.Command, args []string) error {
			name, err := local.ParseName(args[0])
			if err != nil {
				return err
			}
			p := newProgressPrinter(cmd.ErrOrStderr(), args[0])
			defer p.end()
			options, err := o.resolve(p)
			if err != nil {
				return err
			}
			return withStore(startsNothing, func(s *local.Store) error {
				if args[1] == "-" {
					_, err := s.Pack(cmd.Context(), name, cmd.OutOrStdout(), options)
					return err
				}
				return newFile(args[1], func(w io.Writer) error {
					digest, err := s.Pack(cmd.Context(), name, w, options)
					if err == nil {
						fmt.Fprintln(cmd.OutOrStdout(), digest)
					}
					return err
				})
			})
		},
	}
	o.flags(cmd.Flags())
	return cmd
}

// newFile makes a file that gets its name when all of it is on the disk. Only
// its owner may read it: it may contain anything that was in a memory.
func newFile(path string, fill func(io.Writer) error) error {
	if _, err := os.Lstat(path); err == nil {
		return fmt.Errorf("%s is there already: choose another name, or remove it", path)
	}
	return durable.Create(path, 0o600, func(f *os.File) error { return fill(f) })
}

func newSnapshotUnpackCommand() *cobra.Command {
	var o unpackOptions
	cmd := &cobra.Command{
		Use:   "unpack FILE NAME",
		Short: "Make a snapshot of a file that pack has written",
		Long: `Make a snapshot of a file that agentrun snapshot pack has written. Each part is
compared with its digest; the snapshot is there whole or not at all. With --verify-key
it must be signed. One that this host cannot fork is refused, with the reason.
A FILE of - is the standard input, which is copied to a file without a name in TMPDIR
first.`,
		Example: `  agentrun snapshot unpack py.pack py --verify-key cosign.pub`,
		Args:    cobra.ExactArgs(2),
		RunE: func(cmd *cobra.Command, args []string) (err error) {
			name, err := local.ParseName(args[1])
			if err != nil {
				return err
			}
			p := newProgressPrinter(cmd.ErrOrStderr(), args[1])
			defer p.end()
			options, err := o.resolve(p)
			if err != nil {
				return err
			}
			f, err := openPack(args[0], cmd.InOrStdin(), int64(o.maxSize))
			if err != nil {
				return err
			}
			defer func() { _ = f.Close() }() // only read
			info, err := f.Stat()
			if err != nil {
				return err
			}
			return withStore(startsNothing, func(s *local.Store) error {
				if err := s.Unpack(cmd.Context(), f, info.Size(), name, options); err != nil {
					return err
				}
				_, err := fmt.Fprintln(cmd.OutOrStdout(), name)
				return err
			})
		},
	}
	o.flags(cmd.Flags())
	return cmd
}

// openPack opens a file, or a copy of stdin, because the end of a pack is read
// first.
func openPack(path string, stdin io.Reader, limit int64) (*os.File, error) {
	if path != "-" {
		// Without O_NONBLOCK a FIFO would wait for a writer.
		f, err := os.OpenFile(path, os.O_RDONLY|unix.O_NONBLOCK, 0)
		if err != nil {
			return nil, err
		}
		if info, err := f.Stat(); err != nil || !info.Mode().IsRegular() {
			return nil, errors.Join(fmt.Errorf("%s is not a regular file: agentrun snapshot unpack - reads a stream", path), err, f.Close())
		}
		return f, nil
	}
	f, err := os.CreateTemp("", "agentrun-pack-")
	if err != nil {
		return nil, err
	}
	err = os.Remove(f.Name()) // an open file outlives its name
	if err == nil {
		var n int64
		n, err = io.Copy(f, io.LimitReader(stdin, limit+1))
		if n > limit {
			err = fmt.Errorf("more than %d bytes (--max-size allows more)", limit)
		}
	}
	if err != nil {
		return nil, errors.Join(fmt.Errorf("read the standard input: %w", err), f.Close())
	}
	return f, nil
}

func newSnapshotPushCommand() *cobra.Command {
	var o packOptions
	var registries registryOptions
	cmd := &cobra.Command{
		Use:   "push NAME REFERENCE",
		Short: "Put a snapshot into a registry, for other machines",
		Long: `Put a snapshot into an OCI registry, with all that its forks need on another machine.
Parts that the registry has are not sent again: those of snapshots that share a base,
and those of a push that was interrupted. With --sign-key a signature is put beside it,
where cosign verify finds it. Credentials come from docker's configuration.

The digest of the pack is printed. A snapshot that holds secrets is refused.`,
		Example: `  agentrun snapshot push py registry.example.com/team/py:warm --sign-key cosign.key`,
		Args:    cobra.ExactArgs(2),
		RunE: func(cmd *cobra.Command, args []string) error {
			return travel(cmd, trip{name: args[0], ref: args[1]}, &registries, o.resolve,
				func(s *local.Store, t parsedTrip, options pack.PackOptions) (any, error) {
					return s.Push(cmd.Context(), t.name, t.ref, t.at, options)
				})
		},
	}
	o.flags(cmd.Flags())
	registries.flags(cmd.Flags())
	return cmd
}

func newSnapshotPullCommand() *cobra.Command {
	var o unpackOptions
	var registries registryOptions
	cmd := &cobra.Command{
		Use:   "pull REFERENCE NAME",
		Short: "Make a snapshot of one that push has put into a registry",
		Long: `Make a snapshot of one that agentrun snapshot push has put into a registry, by tag or
by digest. Layers that another snapshot here has are not fetched. Each part is compared
with its digest; the snapshot is there whole or not at all. With --verify-key it must
be signed. One that this host cannot fork is refused before it is fetched.`,
		Example: `  agentrun snapshot pull registry.example.com/team/py:warm py --verify-key cosign.pub`,
		Args:    cobra.ExactArgs(2),
		RunE: func(cmd *cobra.Command, args []string) error {
			return travel(cmd, trip{name: args[1], ref: args[0]}, &registries, o.resolve,
				func(s *local.Store, t parsedTrip, options pack.UnpackOptions) (any, error) {
					return t.name, s.Pull(cmd.Context(), t.ref, t.name, t.at, options)
				})
		},
	}
	o.flags(cmd.Flags())
	registries.flags(cmd.Flags())
	return cmd
}

// trip is the name of a snapshot, with the reference in a registry that it comes
// from or goes to.
type trip struct{ name, ref string }

// parsedTrip is a valid trip.
type parsedTrip struct {
	name local.Name
	ref  image.Reference
	at   image.Registries
}

func (t trip) parse(registries *registryOptions) (out parsedTrip, err error) {
	if out.name, err = local.ParseName(t.name); err != nil {
		return out, err
	}
	if out.ref, err = image.ParseReference(t.ref); err != nil {
		return out, err
	}
	out.at, err = registries.registries()
	return out, err
}

// travel moves a snapshot, shows the progress, and prints the result of move.
func travel[O any](cmd *cobra.Command, t trip, registries *registryOptions, resolve func(*progressPrinter) (O, error),
	move func(*local.Store, parsedTrip, O) (any, error),
) error {
	parsed, err := t.parse(registries)
	if err != nil {
		return err
	}
	p := newProgressPrinter(cmd.ErrOrStderr(), parsed.ref.String())
	defer p.end()
	options, err := resolve(p)
	if err != nil {
		return err
	}
	return withStore(startsNothing, func(s *local.Store) error {
		moved, err := move(s, parsed, options)
		if err != nil {
			return err
		}
		_, err = fmt.Fprintln(cmd.OutOrStdout(), moved)
		return err
	})
}
