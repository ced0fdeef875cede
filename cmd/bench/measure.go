package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"

	"agentrun.dev/bench"
	"agentrun.dev/cmd/internal/cli"
	"agentrun.dev/internal/engine/pick"
	"github.com/spf13/cobra"
	"github.com/spf13/pflag"
)

// options are the flags that benchmarks have in common.
type options struct {
	rootfs string
	memory cli.ByteSize
	json   bool
}

func (o *options) flags(f *pflag.FlagSet) {
	f.Var(&o.memory, "memory", "RAM of a sandbox")
	f.BoolVar(&o.json, "json", false, "print JSON")
}

// rootFlags are for benchmarks of root filesystems. what is the help text about
// the required content of the root filesystem.
func (o *options) rootFlags(f *pflag.FlagSet, guest *bench.Guest, what string) {
	f.StringVar(&o.rootfs, "rootfs", "", "folder with a root filesystem"+what+", or an EROFS image of one")
	f.IntVar(&guest.VCPUs, "cpus", guest.VCPUs, "processors of a sandbox")
}

// engineFlags are for benchmarks of sandboxes on either engine.
func engineFlags(f *pflag.FlagSet, guest *bench.Guest) {
	cli.EngineFlag(f, &guest.Engine)
	cli.PolicyFlags(f, &guest.Jail)
}

// guestFlag is for benchmarks that know the bare guest.
func guestFlag(f *pflag.FlagSet, guest *string) {
	f.StringVar(guest, "guest", bench.GuestLinux, "linux, or test for the bare guest")
}

// checkGuest checks --guest; Linux needs --rootfs, the bare guest ignores it.
func (o *options) checkGuest(guest string) error {
	switch {
	case guest == bench.GuestTest:
		o.rootfs = ""
	case guest != bench.GuestLinux:
		return fmt.Errorf("--guest %q: linux or test", guest)
	case o.rootfs == "":
		return errors.New("--rootfs is missing: a folder with a root filesystem, or an EROFS image of one")
	}
	return nil
}

// report is the result of a benchmark.
type report interface{ Print(io.Writer) error }

// measure completes a guest by the flags, runs a benchmark with it and prints its
// report.
func (o *options) measure(cmd *cobra.Command, guest *bench.Guest, run func(context.Context) (report, error)) (err error) {
	guest.Engine, _ = pick.Choose(guest.Engine)
	guest.Memory = uint64(o.memory)
	if o.rootfs != "" {
		var cleanup func() error
		if guest.Root, cleanup, err = cli.RootPath(cmd.Context(), o.rootfs, guest.Engine, cmd.ErrOrStderr()); err != nil {
			return err
		}
		defer func() { err = errors.Join(err, cleanup()) }()
	}
	if guest.Folder, err = os.MkdirTemp("", "agentrun-bench-"); err != nil {
		return err
	}
	defer func() { err = errors.Join(err, os.RemoveAll(guest.Folder)) }()
	r, err := run(cmd.Context())
	if err != nil {
		return err
	}
	return o.print(cmd.OutOrStdout(), r)
}

func (o *options) print(w io.Writer, r report) error {
	if !o.json {
		return r.Print(w)
	}
	e := json.NewEncoder(w)
	e.SetIndent("", "  ")
	return e.Encode(r)
}

// require makes a flag required, and says so in its help.
func require(cmd *cobra.Command, flag string) {
	if err := cmd.MarkFlagRequired(flag); err != nil {
		panic(err) // the caller has defined the flag
	}
	cmd.Flag(flag).Usage += " (required)"
}
