package vmm

import (
	"errors"
	"fmt"
	"os"

	"agentrun.dev/internal/vmm/cpu"
	"agentrun.dev/internal/vmm/kvm"
	"agentrun.dev/internal/vmm/virtio"
)

// Config describes a machine to boot.
type Config struct {
	Devices
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
	// Profile names the CPU features; empty means cpu.HostV1.
	Profile cpu.Profile
}

// Devices lists the devices of a machine. The VM takes over the files in it: it
// closes them when it is closed, or when Boot or Load fails.
type Devices struct {
	// Disks become /dev/vda, /dev/vdb, … in this order.
	Disks []Disk
	// Nets become eth0, eth1, … in this order.
	Nets []Net
	// Vsock gives the guest a virtio socket device when it is not nil.
	Vsock *Vsock
	// Marker answers the ports of the bare test guest; nil for Linux.
	Marker Marker
}

// Disk is a block device and its storage.
type Disk struct {
	Backend virtio.Disk
	// ID is the disk's serial number for the guest (≤ 20 bytes).
	ID   string
	Rate virtio.Rate
	// Close is called when the VM has ended.
	Close func() error
}

// FileDisk makes a disk of a file, which the VM takes over.
func FileDisk(f *os.File, readOnly bool, id string) (Disk, error) {
	backend, err := virtio.OpenFileDisk(f, readOnly)
	return Disk{Backend: backend, ID: id, Close: f.Close}, err
}

// Net is a network interface. Its frames go over a socket, as package wire
// describes.
type Net struct {
	Socket *os.File
	MAC    [6]byte
	MTU    uint16
}

// Vsock configures connections between host and guest.
type Vsock struct {
	// Accept is called when the guest dials the host. It returns the host's end
	// of the connection, or false to refuse. It runs on a vCPU thread and must
	// not block.
	Accept func(port uint32) (*os.File, bool)
	// Standby is the host's end of the connection that a restored guest
	// continues (State.Standby). If it is nil, that connection ends, too.
	Standby *os.File
}

func (c *Config) validate() error {
	switch {
	case c.KVM == nil:
		return errors.New("no KVM handle given")
	case c.Kernel == nil:
		return errors.New("no kernel given")
	}
	return c.Devices.validate()
}

func validateSize(memory uint64, vcpus int) error {
	switch {
	case vcpus < 1 || vcpus > cpu.MaxVCPUs:
		return fmt.Errorf("%d vCPUs: between 1 and %d are possible", vcpus, cpu.MaxVCPUs)
	case memory < MinMemory || memory > MaxMemory:
		return fmt.Errorf("%d MiB of memory: between %d MiB and %d GiB are possible", memory>>20, MinMemory>>20, uint64(MaxMemory)>>30)
	}
	return nil
}

func (d *Devices) validate() error {
	if n := d.count(); n > maxVirtio {
		return fmt.Errorf("%d virtio devices: at most %d are possible", n, maxVirtio)
	}
	return nil
}

// count includes the entropy source and the balloon, which every guest has.
func (d *Devices) count() int {
	n := 2 + len(d.Disks) + len(d.Nets)
	if d.Vsock != nil {
		n++
	}
	return n
}

// close closes the files that the VM has taken over.
func (d *Devices) close() error {
	var errs []error
	for _, disk := range d.Disks {
		errs = append(errs, disk.Close())
	}
	for _, n := range d.Nets {
		errs = append(errs, n.Socket.Close())
	}
	if d.Vsock != nil && d.Vsock.Standby != nil {
		errs = append(errs, d.Vsock.Standby.Close())
	}
	return errors.Join(errs...)
}
