// Command agentrun runs sandboxes for AI agents on this machine.
package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"

	"agentrun.dev/cmd/internal/cli"
	"github.com/spf13/cobra"
)

// version is set by the build (-ldflags -X main.version=…).
var version = "dev"

func main() {
	ctx, stop := cli.Start()
	err := run(ctx, os.Args[1:], os.Stdin, os.Stdout, os.Stderr)
	stop()
	var code exitCode
	switch {
	case errors.As(err, &code):
		os.Exit(int(code))
	case err != nil:
		fmt.Fprintln(os.Stderr, "agentrun:", err)
		os.Exit(exitFailure)
	}
}

// Exit codes of agentrun itself, apart from those of commands in a sandbox (as
// in docker run).
const exitFailure = 125

// exitCode is the result of a command that ran correctly: it is passed on, and
// not reported as an error.
type exitCode int

func (c exitCode) Error() string { return fmt.Sprintf("exit code %d", int(c)) }

func run(ctx context.Context, args []string, stdin io.Reader, stdout, stderr io.Writer) error {
	return cli.Execute(ctx, newRootCommand(), args, stdin, stdout, stderr)
}

func newRootCommand() *cobra.Command {
	root := &cobra.Command{Use: "agentrun", Short: "Isolated computers for AI agents", Version: version}
	root.AddCommand(newRunCommand(), newSnapshotCommand(), newForkCommand(), newExecCommand(), newListCommand(), newRemoveCommand(), newKillCommand(),
		newPauseCommand(), newResumeCommand(), newHibernateCommand(), newImageCommand(), newUpCommand(), newDownCommand(),
		newApplyCommand(), newGetCommand(), newDeleteCommand(), newLogsCommand(), newCodeCommand(), newCopyCommand(), newPortForwardCommand(), newTreeCommand(),
		newKeyCommand(), newCertCommand(), newSecretCommand(), newRegistryCommand(), newQuotaCommand(), newCACommand(), newNetworkCommand(), newCheckpointCommand(), newTopCommand(), newTemplateCommand(),
		newCordonCommand(), newDrainCommand(), newUncordonCommand(),
		newDoctorCommand(), newManCommand())
	return root
}
