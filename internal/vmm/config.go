package vmm

import (
	"errors"
	"fmt"
	"os"

	"agentrun.dev/internal/kvm"
)

// Config describes a machine to boot. The VMM takes over the files it names:
// they are closed when the VM is, or when Boot fails.
type Config struct {
	// KVM is the open virtualization interface. The caller keeps it.
	KVM *kvm.System
	// Kernel is an uncompressed x86-64 ELF vmlinux. The caller keeps it.
	Kernel *os.File
	// Initrd is an initial ramdisk, or nil. The caller keeps it.
	Initrd *os.File
	// Cmdline is the kernel command line.
	Cmdline string
	// Memory is the RAM in bytes, VCPUs the number of processors.
	Memory uint64
	VCPUs  int
	// Profile names the CPU features; empty means ProfileHostV1.
	Profile Profile
	// Disks become /dev/vda, /dev/vdb, … in this order.
	Disks []Disk
	// Nets become eth0, eth1, … in this order.
	Nets []Net
	// Vsock gives the guest a virtio socket device when it is not nil.
	Vsock *Vsock
	// Marker answers the ports of the bare test guest; nil for Linux.
	Marker Marker
}

// Disk is a block device backed by a file.
type Disk struct {
	File     *os.File
	ReadOnly bool
	// ID is what the guest reads as the disk's serial number (≤ 20 bytes).
	ID string
}

// Net is a network interface whose frames go to and come from a socket, one
// frame per message.
type Net struct {
	Socket *os.File
	MAC    [6]byte
	MTU    uint16
}

// Vsock is the guest's end of host connections.
type Vsock struct {
	// Accept is asked when the guest dials the host: it returns the host's
	// end of the connection, or false to refuse. It runs on a vCPU thread
	// and must not block.
	Accept func(port uint32) (*os.File, bool)
}

func (c *Config) validate() error {
	switch {
	case c.KVM == nil:
		return errors.New("no KVM handle given")
	case c.Kernel == nil:
		return errors.New("no kernel given")
	case c.VCPUs < 1 || c.VCPUs > MaxVCPUs:
		return fmt.Errorf("%d vCPUs: between 1 and %d are possible", c.VCPUs, MaxVCPUs)
	case c.Memory < MinMemory || c.Memory > MaxMemory:
		return fmt.Errorf("%d MiB of memory: between %d MiB and %d GiB are possible", c.Memory>>20, MinMemory>>20, uint64(MaxMemory)>>30)
	case c.deviceCount() > maxVirtio:
		return fmt.Errorf("%d virtio devices: at most %d are possible", c.deviceCount(), maxVirtio)
	}
	return nil
}

// deviceCount includes the entropy source and the balloon that every guest
// has.
func (c *Config) deviceCount() int {
	n := 2 + len(c.Disks) + len(c.Nets)
	if c.Vsock != nil {
		n++
	}
	return n
}

// closeFiles closes what the VM would have taken over.
func (c *Config) closeFiles() error {
	var errs []error
	for _, d := range c.Disks {
		errs = append(errs, d.File.Close())
	}
	for _, n := range c.Nets {
		errs = append(errs, n.Socket.Close())
	}
	return errors.Join(errs...)
}
