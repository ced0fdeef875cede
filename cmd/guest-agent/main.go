// Command guest-agent is PID 1 of a sandbox. It sets the guest up, listens
// on vsock port 1024 for the host (CID 2), tells the host that it is ready by
// dialing the host's port 1024, and serves until the guest goes down.
//
//	guest-agent                        as PID 1 of a microVM
//	guest-agent --enter-container …    as PID 1 of a container: runs the next
//	guest-agent --container [--dns=ADDRESS]…   as PID 1 of a container (gVisor)
//	guest-agent --listen-unix PATH     on a host, for tests: no mounts, no vsock
package main

import (
	"context"
	"errors"
	"os"
	"slices"
	"time"

	"golang.org/x/sys/unix"

	"agentrun.dev/internal/guest/agent"
	"agentrun.dev/internal/guest/guestrpc"
	"agentrun.dev/internal/host/goruntime"
)

// monitorSlack bounds how long a goroutine that blocks in a system call can delay the
// others, since there is one P.
const monitorSlack = 2 * time.Millisecond

// version is set by the linker: -X main.version=…
var version = "dev"

func main() {
	err := run(os.Args[1:])
	if err == nil {
		return
	}
	log(err.Error())
	if os.Getpid() != 1 {
		os.Exit(1)
	}
	if slices.Contains(os.Args, "--container") || slices.Contains(os.Args, "--enter-container") {
		os.Exit(1)
	}
	// PID 1 must not return: the kernel would panic and tell the host less.
	unix.Sync()
	if err := unix.Reboot(unix.LINUX_REBOOT_CMD_POWER_OFF); err != nil {
		log("power off: " + err.Error())
	}
	select {}
}

func run(args []string) error {
	keepSmall()
	switch {
	case len(args) == 2 && args[0] == "--listen-unix":
		return runOnHost(args[1])
	case os.Getpid() == 1 && len(args) > 0 && args[0] == "--enter-container":
		return agent.EnterContainer(append([]string{"--container"}, args[1:]...)...)
	case os.Getpid() == 1 && len(args) > 0 && args[0] == "--container":
		return runInContainer(args[1:])
	case os.Getpid() == 1:
		return runAsInit()
	}
	return errors.New("guest-agent runs as PID 1 of a sandbox; elsewhere use: guest-agent --listen-unix PATH")
}

// runAsInit serves a sandbox. Arguments are ignored, because the kernel passes
// unknown words of its command line to PID 1.
func runAsInit() error {
	system, err := agent.Boot(log)
	if err != nil {
		return err
	}
	if err := goruntime.SlowMonitor(monitorSlack); err != nil {
		log(err.Error()) // the agent works without it, only slower
	}
	ps := agent.NewProcesses(agent.Config{Log: log, Orphans: true})
	server := &agent.Server{
		Processes: ps,
		Version:   version,
		Log:       log,
		Down: func(action agent.Action, grace time.Duration) error {
			return agent.Shutdown(ps, system, action, grace)
		},
		Renewer: agent.NewRenewer(),
	}
	l, err := agent.ListenVsock(guestrpc.AgentPort)
	if err != nil {
		return err
	}
	if err := agent.SayReady(guestrpc.AgentPort); err != nil {
		log(err.Error()) // a host that does not wait for the message may still connect
	}
	return server.Serve(context.Background(), l)
}

// runInContainer serves a sandbox whose kernel is gVisor's. Its host sends everything
// else over the channel.
func runInContainer(args []string) error {
	dns, err := agent.ParseContainer(args)
	if err != nil {
		return err
	}
	if err := agent.BootContainer(dns, log); err != nil {
		return err
	}
	ps := agent.NewProcesses(agent.Config{Log: log, Orphans: true, ClockJumps: true})
	server := &agent.Server{
		Processes: ps,
		Version:   version,
		Log:       log,
		Down: func(action agent.Action, grace time.Duration) error {
			if action != agent.PowerOff {
				return errors.New("a container cannot be rebooted: fork its snapshot again")
			}
			return agent.ShutdownContainer(ps, grace)
		},
		Renewer: agent.NewContainerRenewer(),
	}
	channel, err := agent.ContainerChannel()
	if err != nil {
		return err
	}
	return server.ServeChannel(context.Background(), channel)
}

// runOnHost serves a unix socket with the rights of the caller.
func runOnHost(path string) error {
	l, err := agent.ListenUnix(path)
	if err != nil {
		return err
	}
	defer l.Close()
	ps := agent.NewProcesses(agent.Config{Log: log})
	defer ps.Close()
	server := &agent.Server{Processes: ps, Version: version, Log: log}
	return server.Serve(context.Background(), l)
}

// log writes to the console, which shows the sandbox's boot.
func log(msg string) {
	// There is nowhere to report that writing to the console failed.
	_, _ = os.Stderr.WriteString("guest-agent: " + msg + "\n")
}
