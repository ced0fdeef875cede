// Command vmm runs one microVM. Package jail starts it for a parent that speaks
// package vmmctl with it over descriptor 3. It opens nothing by path, and locks
// itself down before it reads the first message.
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

// controlFD is the descriptor of the control socket, which the parent passes.
const controlFD = 3

// headroom is the minimum amount of garbage before a collection.
const headroom = 2 << 20

// Package jail starts vmm with the timer slack of a slow monitor.
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
