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

// Boot boots a sandbox and returns once its agent has answered.
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

// kernelCmdline is the command line that every guest boots with: a quiet console, no
// search for a PCI bus, no module loading, and a reset on a panic, which the VMM
// sees.
const kernelCmdline = "console=ttyS0 quiet panic=-1 pci=off 8250.nr_uarts=1 sysctl.kernel.modules_disabled=1" +
	// An idle guest should sleep. Without these settings its kernel compares its
	// clocks twice a second, checks as often whether to compact memory ahead of need,
	// and adds up its statistics every second. No driver is worth a wait of some
	// seconds after boot, when the guest may already be captured. norandmaps is for
	// the agent alone, which turns randomisation on again for all other programs. By
	// default the driver for dummy interfaces makes one; programs are to see only the
	// interfaces that the sandbox was given.
	" norandmaps dummy.numdummies=0 tsc=nowatchdog deferred_probe_timeout=0 sysctl.vm.compaction_proactiveness=0 sysctl.vm.stat_interval=60"

// describeBoot describes the boot of a Linux guest: the agent as its first program,
// the root filesystem as /dev/vda, and the other parts of the spec.
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

// bootMessage is a Boot message in the making. The files are in the message's order,
// which starts with the kernel.
type bootMessage struct {
	boot  *vmmctl.Boot
	files []*os.File
	own   []*os.File // the files that are closed with the message
}

// newBoot begins a message. The caller keeps the kernel's file and closes it.
func newBoot(memory uint64, vcpus int, kernel *os.File) *bootMessage {
	return &bootMessage{
		boot:  &vmmctl.Boot{Memory: memory, VCPUs: uint64(vcpus), Devices: vmmctl.Devices{ReadyPort: guestrpc.AgentPort}},
		files: []*os.File{kernel},
	}
}

// owned marks a file to be closed with the message, when the vmm has its own copy.
func (b *bootMessage) owned(f *os.File) *os.File {
	b.own = append(b.own, f)
	return f
}

func (b *bootMessage) close() {
	for _, f := range b.own {
		_ = f.Close() // the vmm has its own copy
	}
}

// addInitrd adds the initramfs. It has to come before all devices.
func (b *bootMessage) addInitrd(f *os.File) {
	b.boot.HasInitrd = true
	b.files = append(b.files, f)
}

// addDisk adds a disk. Without a stack the file is the disk. With a stack the file is
// the disk's writable top, and layers are the stack's files. Disks come before nets.
func (b *bootMessage) addDisk(d vmmctl.Disk, file *os.File, layers ...*os.File) {
	b.boot.Devices.Disks = append(b.boot.Devices.Disks, d)
	b.files = append(append(b.files, layers...), file)
}

// overlay is the command line argument that makes the guest write to the last disk
// instead of a layer in memory.
func (b *bootMessage) overlay() string {
	return "agentrun.overlay=/dev/vd" + string(rune('a'+len(b.boot.Devices.Disks)-1))
}

// addNet adds an interface. Its frames go to and come from a socket, one frame per
// message.
func (b *bootMessage) addNet(n vmmctl.Net, socket *os.File) {
	b.boot.Devices.Nets = append(b.boot.Devices.Nets, n)
	b.files = append(b.files, socket)
}

// tops are the top files of the disks, which the guest writes to.
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

// start starts a vmm process in a jail and boots the machine. It returns once the
// guest's processors run. WaitReady waits until its agent listens.
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

// run starts the machine and returns once its agent has answered.
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

// abandon kills a guest that did not come up, and adds the tail of its console to the
// error.
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
