// Command vmm runs one microVM. It is started by package jail for a parent that
// speaks package vmmctl with it over descriptor 3. It opens nothing by path, and
// locks itself down before it reads the first message.
package main

import (
	"fmt"
	"os"

	"agentrun.dev/internal/host/goruntime"
	"agentrun.dev/internal/vmm/kvm"
	"agentrun.dev/internal/vmm/lockdown"

	"agentrun.dev/internal/vmm/vmmctl"
	"agentrun.dev/internal/vmm/vmmserver"
)

// controlFD is where the parent leaves the control socket.
const controlFD = 3

// headroom is how much garbage may pile up before it is collected, at least.
const headroom = 2 << 20

// package jail starts it with the timer slack of a slow monitor.
func init() { goruntime.OnlyMonitor() }

func main() {
	if err := run(); err != nil {
		fmt.Fprintln(os.Stderr, "vmm:", err)
		os.Exit(1)
	}
}

func run() error {
	goruntime.CollectRarely(headroom)
	if err := lockdown.Enter(append(kvm.Requests(), lockdown.Userfaultfd...)); err != nil {
		return fmt.Errorf("lock the process down: %w", err)
	}
	conn, err := vmmctl.NewConn(os.NewFile(controlFD, "vmm control"))
	if err != nil {
		return fmt.Errorf("%w (vmm is started by agentrun, not by hand)", err)
	}
	return vmmserver.Serve(conn, lockdown.LimitFileSize)
}
