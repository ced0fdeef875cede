// Package cli is the common part of the command lines of agentrun and bench: the
// start of the program, and flags with the things that they name: sizes, engines,
// jails, root filesystems.
package cli

import (
	"context"
	"io"
	"os"
	"os/signal"
	"time"

	"agentrun.dev/internal/engine/microvm"
	"agentrun.dev/internal/engine/pick"
	"agentrun.dev/internal/host/goruntime"
	"github.com/spf13/cobra"
	"github.com/spf13/pflag"
	"golang.org/x/sys/unix"
)

// monitorSlack bounds how long a thread that blocks in a system call keeps
// other goroutines from running when all Ps are taken.
const monitorSlack = time.Millisecond

// Start prepares the process. An interrupt or SIGTERM cancels the returned ctx.
func Start() (context.Context, context.CancelFunc) {
	// This only affects speed, and users without privileges may not do it.
	_ = goruntime.SlowMonitor(monitorSlack)
	return signal.NotifyContext(context.Background(), os.Interrupt, unix.SIGTERM)
}

// Execute runs the command of a root command that args name. The caller prints the
// error: cobra prints neither the error nor the usage.
func Execute(ctx context.Context, root *cobra.Command, args []string, stdin io.Reader, stdout, stderr io.Writer) error {
	root.SilenceErrors, root.SilenceUsage = true, true
	root.SetArgs(args)
	root.SetIn(stdin)
	root.SetOut(stdout)
	root.SetErr(stderr)
	return root.ExecuteContext(ctx)
}

// EngineFlag is for commands that begin with a root filesystem. Snapshots and
// sandboxes made of it record their engine.
func EngineFlag(f *pflag.FlagSet, k *pick.Kind) {
	*k = pick.Auto
	f.Var(k, "engine", "microvm, gvisor, or auto: microVMs on hardware KVM, gVisor elsewhere")
}

// PolicyFlags are for commands that start microVMs.
func PolicyFlags(f *pflag.FlagSet, p *microvm.JailPolicy) {
	f.BoolVar(&p.AllowUnlimited, "allow-unlimited", false, "go on where limits of memory, processors and threads cannot be set")
	f.BoolVar(&p.AllowUnjailed, "allow-unjailed", false, "go on where the microVM's process cannot be jailed, as without root: only its system calls are filtered then")
}
