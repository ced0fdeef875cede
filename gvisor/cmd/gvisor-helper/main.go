// Command gvisor-helper runs one sandbox on gVisor. It embeds runsc, gVisor's
// runtime, and is started by AgentRun's engine; runsc starts it again as the
// sandbox's kernel.
//
//	gvisor-helper serve              descriptor 3 is the control socket (gvisorctl)
//	gvisor-helper [FLAGS] boot …     gVisor's kernel, started by the above
//	gvisor-helper [FLAGS] restore …  runsc's own commands, to compare with
package main

import (
	"fmt"
	"os"

	"agentrun.dev/gvisor/internal/filters"
	"agentrun.dev/gvisor/internal/helper"
	"gvisor.dev/gvisor/runsc/cli"
	"gvisor.dev/gvisor/runsc/cmd"
	"gvisor.dev/gvisor/runsc/cmd/sentry/sentrycmd"
	"gvisor.dev/gvisor/runsc/cmd/util"
)

// control is the descriptor of the control socket.
const control = 3

func main() {
	if len(os.Args) == 2 && os.Args[1] == "serve" {
		if err := helper.Serve(control); err != nil {
			fmt.Fprintln(os.Stderr, "gvisor-helper:", err)
			os.Exit(1)
		}
		return
	}
	// Every other command line is for plain runsc, which the benchmarks compare with.
	if helper.IsOurs(os.Args) {
		helper.LazyGC()
		if err := filters.Use(); err != nil {
			fmt.Fprintln(os.Stderr, "gvisor-helper:", err)
			os.Exit(1)
		}
		os.Args = helper.BootArgs(os.Args)
	}
	const group = ""
	cli.Run(nil, map[util.SubCommand]string{
		new(sentrycmd.Boot): group, new(sentrycmd.Umount): group,
		new(cmd.Run): group, new(cmd.Checkpoint): group, new(cmd.Restore): group, new(cmd.Delete): group,
	}, nil)
}
