// Command vmm runs one microVM. It is started by a parent that speaks
// package vmmctl with it over descriptor 3, and it opens nothing by path
// but its own page map.
package main

import (
	"fmt"
	"os"
	"runtime/debug"
	"time"

	"agentrun.dev/internal/gomonitor"
	"agentrun.dev/internal/vmmctl"
	"agentrun.dev/internal/vmmserver"
)

// controlFD is where the parent leaves the control socket.
const controlFD = 3

// gcPercent trades CPU for memory: the heap of a vmm is a few hundred KiB,
// and there is one per sandbox.
const gcPercent = 50

// monitorSlack can be long: vmmserver makes a P for each vCPU, which spends
// its life in a system call, and two for the rest.
const monitorSlack = 10 * time.Millisecond

func main() {
	if err := run(); err != nil {
		fmt.Fprintln(os.Stderr, "vmm:", err)
		os.Exit(1)
	}
}

func run() error {
	debug.SetGCPercent(gcPercent)
	if err := gomonitor.Slow(monitorSlack); err != nil {
		fmt.Fprintln(os.Stderr, "vmm:", err) // it works all the same, only slower
	}
	conn, err := vmmctl.NewConn(os.NewFile(controlFD, "vmm control"))
	if err != nil {
		return fmt.Errorf("%w (vmm is started by agentrun, not by hand)", err)
	}
	pagemap, err := os.Open("/proc/self/pagemap")
	if err != nil {
		return err
	}
	return vmmserver.Serve(conn, pagemap)
}
