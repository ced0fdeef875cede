package microvm

import (
	"context"
	"errors"
	"fmt"
	"os"
	"strings"

	"agentrun.dev/internal/engine"
	"agentrun.dev/internal/engine/identity"
	"agentrun.dev/internal/engine/microvm/process"
	"agentrun.dev/internal/guest/guestrpc"
	"agentrun.dev/internal/host/assets"
	"agentrun.dev/internal/host/jail"
	"agentrun.dev/internal/storage/layer"
	"agentrun.dev/internal/vmm/vmmctl"
)

// Boot boots a sandbox and returns when its agent has answered.
func (e *Engine) Boot(ctx context.Context, spec engine.Spec) (engine.Sandbox, error) {
	if err := spec.CheckDisk(); err != nil {
		return nil, err
	}
	kernel := spec.Kernel
	if kernel == nil {
		var err error
		if kernel, err = assets.Open(assets.Kernel); err != nil {
			return nil, err
		}
		defer func() { _ = kernel.Close() }()
	}
	s := &sandbox{
		engine: e, self: identity.Self{Hostname: spec.Hostname}, vcpus: spec.VCPUs, boot: &bootFiles{users: 1},
		memory:   layer.Stack{Size: spec.Memory},
		disks:    []disk{{id: "root", readOnly: true}},
		hasFiles: len(spec.Files) > 0,
	}
	var err error
	if s.boot.kernel, err = reopen(kernel); err != nil {
		return nil, err
	}
	if s.boot.root, err = reopen(spec.Root); err != nil {
		return nil, errors.Join(err, s.boot.kernel.Close())
	}
	b := newBoot(spec.Memory, spec.VCPUs, kernel)
	defer b.close()
	if err = s.describeBoot(ctx, b, spec); err == nil {
		s.Guest, err = b.run(ctx, e.vmm, spec.Limits)
		s.filesOnly = err == nil && s.Protocol() < vmmctl.SinceStream
	}
	if err != nil {
		return nil, errors.Join(err, s.release())
	}
	// A starting kernel counts ticks of its timer until it reads kvm-clock. Those that a busy
	// host delivered late are missing from its wall clock.
	if err := identity.SetClock(ctx, s.Agent()); err != nil {
		return nil, errors.Join(err, s.Close())
	}
	return s, nil
}

// kernelCmdline is what every guest boots with: a quiet console, no search for
// a PCI bus, no module loading, and a reset (which the VMM sees) on a panic.
const kernelCmdline = "console=ttyS0 quiet panic=-1 pci=off 8250.nr_uarts=1 sysctl.kernel.modules_disabled=1" +
	// An idle guest should sleep: without these its kernel compares its clocks
	// twice a second, looks as often whether memory is worth compacting ahead of
	// need, and adds up its statistics every second. There is no driver to wait for
	// some seconds after boot, when it may have been captured.
	// norandmaps is for the agent alone, which switches it off for all others.
	// The driver for dummy interfaces makes one unasked; programs see those alone that
	// the sandbox was given.
	" norandmaps dummy.numdummies=0 tsc=nowatchdog deferred_probe_timeout=0 sysctl.vm.compaction_proactiveness=0 sysctl.vm.stat_interval=60"

// describeBoot says what a Linux guest is booted with: the agent as its first
// program, the root filesystem as /dev/vda, and what else was asked for.
func (s *sandbox) describeBoot(ctx context.Context, b *bootMessage, spec engine.Spec) error {
	agent, err := assets.Open(assets.GuestAgent)
	if err != nil {
		return err
	}
	defer func() { _ = agent.Close() }()
	initrd, err := Initramfs(agent)
	if err != nil {
		return err
	}
	b.addInitrd(b.owned(initrd))
	words := []string{kernelCmdline, "agentrun.root=/dev/vda"}
	b.addDisk(vmmctl.Disk{ReadOnly: true, ID: "root"}, spec.Root)
	for _, f := range spec.Files {
		b.addDisk(vmmctl.Disk{ReadOnly: f.ReadOnly, ID: f.ID}, f.File)
	}
	if spec.Scratch > 0 {
		stack := layer.Stack{Size: spec.Scratch}
		top, err := s.engine.top()
		if err != nil {
			return err
		}
		b.addDisk(vmmctl.Disk{ID: "scratch", Stack: &stack}, b.owned(top))
		s.disks = append(s.disks, disk{id: "scratch", stack: stack})
	}
	if spec.Disk > 0 {
		if err := s.attachDisk(ctx, b, spec.Disk); err != nil {
			return err
		}
		words = append(words, b.overlay())
	}
	if spec.Hostname != "" {
		words = append(words, "agentrun.hostname="+spec.Hostname)
	}
	if spec.Network != nil {
		if err := s.plugIn(b, spec.Network); err != nil {
			return err
		}
		words = append(words, addressOf(spec.Network))
	}
	if spec.Cmdline != "" {
		words = append(words, spec.Cmdline)
	}
	b.boot.Cmdline = strings.Join(words, " ")
	return nil
}

// bootMessage is a Boot message in the making. The files, from the kernel on, are in
// its order.
type bootMessage struct {
	boot  *vmmctl.Boot
	files []*os.File
	own   []*os.File // those of the files that are closed with it
}

// newBoot begins a message. The kernel stays the caller's.
func newBoot(memory uint64, vcpus int, kernel *os.File) *bootMessage {
	return &bootMessage{
		boot:  &vmmctl.Boot{Memory: memory, VCPUs: uint64(vcpus), Devices: vmmctl.Devices{ReadyPort: guestrpc.AgentPort}},
		files: []*os.File{kernel},
	}
}

// owned has a file closed with the message: the vmm has its own copy by then.
func (b *bootMessage) owned(f *os.File) *os.File {
	b.own = append(b.own, f)
	return f
}

func (b *bootMessage) close() {
	for _, f := range b.own {
		_ = f.Close() // only passed on
	}
}

// addInitrd comes before all devices.
func (b *bootMessage) addInitrd(f *os.File) {
	b.boot.HasInitrd = true
	b.files = append(b.files, f)
}

// addDisk adds a disk in a file, or with a stack: then the file is its top, and it
// comes with the files of its layers. Disks come before nets.
func (b *bootMessage) addDisk(d vmmctl.Disk, file *os.File, layers ...*os.File) {
	b.boot.Devices.Disks = append(b.boot.Devices.Disks, d)
	b.files = append(append(b.files, layers...), file)
}

// overlay tells the guest that the last disk is what it writes to in place of a
// layer in memory.
func (b *bootMessage) overlay() string {
	return "agentrun.overlay=/dev/vd" + string(rune('a'+len(b.boot.Devices.Disks)-1))
}

// addNet adds an interface whose frames go to and come from a socket, one frame per
// message.
func (b *bootMessage) addNet(n vmmctl.Net, socket *os.File) {
	b.boot.Devices.Nets = append(b.boot.Devices.Nets, n)
	b.files = append(b.files, socket)
}

// tops are the disks' files that are written to.
func (b *bootMessage) tops() (tops []*os.File) {
	at := 1
	if b.boot.HasInitrd {
		at++
	}
	for i := range b.boot.Devices.Disks {
		at += b.boot.Devices.Disks[i].Files()
		tops = append(tops, b.files[at-1])
	}
	return tops
}

// start starts a vmm process in a jail and boots the machine. It returns when
// the guest's processors run; WaitReady tells when its agent listens.
func (b *bootMessage) start(j *jail.Jail, asked engine.Limits) (*process.Process, error) {
	devices, tops := &b.boot.Devices, b.tops()
	var sizes []uint64
	for i := range devices.Disks {
		d := &devices.Disks[i]
		d.BytesPerSecond, d.OpsPerSecond = asked.IO.BytesPerSecond, asked.IO.OpsPerSecond
		size, err := writableSize(d, tops[i])
		if err != nil {
			return nil, err
		}
		sizes = append(sizes, size)
	}
	devices.MaxFile = maxFile(b.boot.Memory, sizes)
	limits, err := machineLimits(b.boot.Memory, b.boot.VCPUs, devices, tops, asked)
	if err != nil {
		return nil, err
	}
	return process.Begin(j, limits, &process.Message{Message: b.boot, Files: b.files})
}

// run starts the machine and returns when its agent has answered.
func (b *bootMessage) run(ctx context.Context, j *jail.Jail, asked engine.Limits) (*Guest, error) {
	p, err := b.start(j, asked)
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
func abandon(ctx context.Context, p *process.Process, err error) error {
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

// lastLines is the end of a text.
func lastLines(text []byte, n int) string {
	lines := strings.Split(strings.TrimRight(string(text), "\r\n"), "\n")
	return strings.Join(lines[max(0, len(lines)-n):], "\n")
}
