// Command vmm runs one microVM. It is started by a parent that speaks
// package vmmctl with it over descriptor 3, and it opens nothing by path
// but its own page map.
package main

import (
	"fmt"
	"os"
	"time"

	"agentrun.dev/internal/gomonitor"
	"agentrun.dev/internal/lowmem"
	"agentrun.dev/internal/vmmctl"
	"agentrun.dev/internal/vmmserver"
)

// controlFD is where the parent leaves the control socket.
const controlFD = 3

// headroom is how much garbage may pile up before it is collected, at least.
const headroom = 2 << 20

// monitorSlack can be long: vmmserver makes a P for each vCPU, which spends
// its life in a system call, and one for the rest.
const monitorSlack = 10 * time.Millisecond

func main() {
	if err := run(); err != nil {
		fmt.Fprintln(os.Stderr, "vmm:", err)
		os.Exit(1)
	}
}

func run() error {
	lowmem.Keep(headroom)
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
