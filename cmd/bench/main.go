// Command bench measures AgentRun on this machine, and the floor of KVM or
// runsc in the same run.
package main

import (
	"context"
	"fmt"
	"io"
	"os"

	"agentrun.dev/bench"
	"agentrun.dev/cmd/internal/cli"
	"github.com/spf13/cobra"
)

// version is set by the build (-ldflags -X main.version=…).
var version = "dev"

func main() {
	ctx, stop := cli.Start()
	err := run(ctx, os.Args[1:], os.Stdin, os.Stdout, os.Stderr)
	stop()
	if err != nil {
		fmt.Fprintln(os.Stderr, "bench:", err)
		os.Exit(1)
	}
}

func run(ctx context.Context, args []string, stdin io.Reader, stdout, stderr io.Writer) error {
	root := &cobra.Command{Use: "bench", Short: "Measure AgentRun on this machine, beside the floor that KVM or runsc sets", Version: version}
	root.AddCommand(newBootCommand(), newForkCommand(), newLiveCommand(), newClaimCommand(), newWakeCommand(), newFanoutCommand(),
		newExecCommand(), newDataPlaneCommand(), newNodeCommand(), newTenantsCommand(), newNetworkCommand(), newFetchCommand(), newPeersCommand(), newFloorCommand(), newLoadCommand())
	return cli.Execute(ctx, root, args, stdin, stdout, stderr)
}

// newFloorCommand is this program started again by package bench.
func newFloorCommand() *cobra.Command {
	return &cobra.Command{
		Use: bench.FloorCommand, Args: cobra.NoArgs, Hidden: true,
		RunE: func(cmd *cobra.Command, _ []string) error {
			return bench.ServeFloor(cmd.InOrStdin(), cmd.OutOrStdout())
		},
	}
}
