// Command netd is the network of one namespace's sandboxes. Package netproc starts
// it, in a jail of package jail, for daemons that speak package netctl with it. It
// listens on the socket that is its descriptor 3 and opens nothing by path. It locks
// itself down before it accepts the first connection.
package main

import (
	"context"
	"fmt"
	"io"
	"log"
	"log/slog"
	"net"
	"os"
	"runtime/debug"
	"time"

	"agentrun.dev/internal/host/goruntime"
	"agentrun.dev/internal/network/addresses"
	"agentrun.dev/internal/network/netd"
	"agentrun.dev/internal/vmm/lockdown"
)

// version is set by the linker.
var version = "dev"

// listenerFD is the descriptor of the listening socket, which the parent passes.
const listenerFD = 3

// patience is how long netd goes on with neither a wire nor a daemon.
const patience = 30 * time.Second

// memoryGoal is the limit that the garbage collector aims at. The cgroup's limit is 1
// GiB.
const memoryGoal = 800 << 20

// Package jail starts netd with the timer slack of a slow monitor.
func init() { goruntime.OnlyMonitor() }

func main() {
	if err := run(context.Background()); err != nil {
		fmt.Fprintln(os.Stderr, "netd:", err)
		os.Exit(1)
	}
}

func run(ctx context.Context) error {
	// net/http logs unsolicited bytes from a server, and only to the standard logger.
	// The bytes may echo a credential, and any server could fill the file of last
	// words with them.
	log.SetOutput(io.Discard)
	debug.SetMemoryLimit(memoryGoal)
	file := os.NewFile(listenerFD, "control")
	l, err := net.FileListener(file)
	if err != nil {
		return fmt.Errorf("take over the control socket: %w (netd is started by agentrun, not by hand)", err)
	}
	listener, ok := l.(*net.UnixListener)
	if !ok {
		return fmt.Errorf("descriptor %d is no unix socket (netd is started by agentrun, not by hand)", listenerFD)
	}
	if err := file.Close(); err != nil {
		return fmt.Errorf("close what was copied: %w", err)
	}
	routes, err := addresses.OpenRoutes()
	if err != nil {
		return err
	}
	descriptors, err := lockdown.EnterNetwork()
	if err != nil {
		return fmt.Errorf("lock the process down: %w", err)
	}
	server, err := netd.New(netd.Config{
		Host: routes, Version: version, Patience: patience, Descriptors: descriptors, Log: slog.New(slog.NewTextHandler(os.Stderr, nil)),
	})
	if err != nil {
		return err
	}
	return server.Serve(ctx, listener)
}
