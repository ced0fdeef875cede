package microvm

import (
	"context"
	"errors"
	"fmt"
	"os"
	"strings"
	"time"

	"agentrun.dev/internal/engine"
	"agentrun.dev/internal/guest/guestrpc"
	"agentrun.dev/internal/host/assets"
	"agentrun.dev/internal/host/jail"
	"agentrun.dev/internal/vmm/vmstate"
)

// Spec describes a Linux guest to boot.
type Spec struct {
	// Kernel is a vmlinux; nil takes the one that comes with AgentRun.
	Kernel *os.File
	// Root is the image of the root filesystem, an EROFS file; guests share
	// it and write to a layer of their own, in memory or on a disk.
	Root *os.File
	// Disks become /dev/vdb, /dev/vdc, …
	Disks []Disk
	// Overlay is the one of Disks, from 1 on, that the guest writes to instead
	// of a layer in memory, an ext4 file system; 0 is none.
	Overlay int
	// Nets become eth0, …
	Nets     []Net
	Memory   uint64
	VCPUs    int
	Hostname string
	// Cmdline is appended to the kernel's command line.
	Cmdline string
	Limits  engine.Limits
}

// kernelCmdline is what every guest boots with: a quiet console, no search for
// a PCI bus, no module loading, and a reset (which the VMM sees) on a panic.
const kernelCmdline = "console=ttyS0 quiet panic=-1 pci=off 8250.nr_uarts=1 sysctl.kernel.modules_disabled=1" +
	// An idle guest should sleep: without these its kernel compares its clocks
	// twice a second, looks as often whether memory is worth compacting ahead of
	// need, and adds up its statistics every second. There is no driver to wait for
	// some seconds after boot, when it may have been captured.
	// norandmaps is for the agent alone, which switches it off for all others.
	" norandmaps tsc=nowatchdog deferred_probe_timeout=0 sysctl.vm.compaction_proactiveness=0 sysctl.vm.stat_interval=60"

// Guest is a booted Linux guest whose agent has answered.
type Guest struct {
	*Process
	// Agent is a session with the guest's agent.
	Agent *guestrpc.Client
}

// Boot boots a guest and returns when its agent has answered.
func Boot(ctx context.Context, j *jail.Jail, spec Spec) (_ *Guest, err error) {
	agent, err := assets.Open(assets.GuestAgent)
	if err != nil {
		return nil, err
	}
	defer func() { _ = agent.Close() }()
	kernel := spec.Kernel
	if kernel == nil {
		if kernel, err = assets.Open(assets.Kernel); err != nil {
			return nil, err
		}
		defer func() { _ = kernel.Close() }()
	}
	initrd, err := Initramfs(agent)
	if err != nil {
		return nil, err
	}
	defer func() { _ = initrd.Close() }()
	p, err := Start(j, Machine{
		Kernel: kernel, Initrd: initrd, Cmdline: spec.cmdline(), Memory: spec.Memory, VCPUs: spec.VCPUs,
		Disks: append([]Disk{{File: spec.Root, ReadOnly: true, ID: "root"}}, spec.Disks...),
		Nets:  spec.Nets, Limits: spec.Limits,
	})
	if err != nil {
		return nil, err
	}
	err = p.WaitReady(ctx)
	var g *Guest
	if err == nil {
		g, err = dialAgent(ctx, p)
	}
	if err != nil {
		return nil, abandon(ctx, p, err)
	}
	return g, nil
}

// abandon kills a guest that did not come up and adds to the error what its
// console says.
func abandon(ctx context.Context, p *Process, err error) error {
	console, _ := p.Console(context.WithoutCancel(ctx)) // the process may be gone
	p.Kill()
	if _, tail := p.Wait(); len(console) == 0 {
		console = tail
	}
	if len(console) > 0 {
		err = fmt.Errorf("%w\nthe guest's console ended with:\n%s", err, lastLines(console, 20))
	}
	return err
}

func (s *Spec) cmdline() string {
	parts := []string{kernelCmdline, "agentrun.root=/dev/vda"}
	if s.Overlay > 0 {
		parts = append(parts, "agentrun.overlay=/dev/vd"+string(rune('a'+s.Overlay)))
	}
	if s.Hostname != "" {
		parts = append(parts, "agentrun.hostname="+s.Hostname)
	}
	if s.Cmdline != "" {
		parts = append(parts, s.Cmdline)
	}
	return strings.Join(parts, " ")
}

// dialAgent opens a session with the agent of a guest.
func dialAgent(ctx context.Context, p *Process) (*Guest, error) {
	conn, err := p.Dial(ctx, guestrpc.AgentPort)
	if err != nil {
		return nil, err
	}
	client, err := guestrpc.NewClient(ctx, conn)
	if err != nil {
		return nil, err
	}
	return &Guest{Process: p, Agent: client}, nil
}

// lastLines is the end of a text.
func lastLines(text []byte, n int) string {
	lines := strings.Split(strings.TrimRight(string(text), "\r\n"), "\n")
	return strings.Join(lines[max(0, len(lines)-n):], "\n")
}

// Shutdown powers the guest off from inside: its processes get grace to end,
// its disks are synced. A guest that is still there some time after the grace
// is stopped.
func (g *Guest) Shutdown(ctx context.Context, grace time.Duration) (vmstate.Exit, error) {
	ctx, cancel := context.WithTimeout(ctx, grace+shutdownMargin)
	defer cancel()
	err := g.Agent.Shutdown(ctx, guestrpc.ShutdownRequest{Mode: guestrpc.PowerOff, Grace: grace})
	if err == nil {
		select {
		case <-g.Done():
		case <-ctx.Done():
			err = fmt.Errorf("shut down: %w", ctx.Err())
		}
	}
	if err != nil {
		g.Kill()
	}
	exit, _ := g.Wait()
	return exit, errors.Join(err, g.Agent.Close())
}

// shutdownMargin is what a guest gets beyond the grace of its processes, to
// sync its disks and power off.
const shutdownMargin = 30 * time.Second
