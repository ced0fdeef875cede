package vmmserver

import (
	"errors"
	"fmt"
	"io"
	"os"

	"agentrun.dev/internal/storage/extent"
	"agentrun.dev/internal/vmm"
	"agentrun.dev/internal/vmm/cpu"
	"agentrun.dev/internal/vmm/disk"
	"agentrun.dev/internal/vmm/guestmem"
	"agentrun.dev/internal/vmm/kvm"
	"agentrun.dev/internal/vmm/virtio"
	"agentrun.dev/internal/vmm/vmmctl"
)

// take returns the next n descriptors of the first message.
func (s *server) take(n int) []*os.File {
	files := s.files[:n:n]
	s.files = s.files[n:]
	return files
}

// begin checks the number of descriptors and takes the first ones: KVM and, if
// it came, the userfaultfd device.
func (s *server) begin(want int, userfaultfd bool) (err error) {
	if userfaultfd {
		want++
	}
	if len(s.files) != want {
		return fmt.Errorf("the message came with %d files, not %d", len(s.files), want)
	}
	s.sys, err = kvm.FromFile(s.take(1)[0])
	if userfaultfd {
		s.userfaultfd = s.take(1)[0]
	}
	return err
}

// boot hands the descriptors to the VM in the order that Boot documents.
func (s *server) boot(b *vmmctl.Boot) error {
	own := 2
	if b.HasInitrd {
		own++
	}
	if err := s.begin(own+b.Devices.Files(), b.HasUserfaultfd); err != nil {
		return err
	}
	cfg := vmm.Config{
		KVM: s.sys, Kernel: s.take(1)[0], Cmdline: b.Cmdline,
		Memory: b.Memory, VCPUs: int(b.VCPUs), Profile: cpu.Profile(b.Profile),
	}
	defer func() { _ = cfg.Kernel.Close() }() // only read
	if b.HasInitrd {
		cfg.Initrd = s.take(1)[0]
		defer func() { _ = cfg.Initrd.Close() }()
	}
	var err error
	if cfg.Devices, err = s.devices(&b.Devices); err != nil {
		return err
	}
	s.vm, err = vmm.Boot(cfg)
	return err
}

// maxState bounds a saved state. Eight vCPUs with all their registers need far
// less.
const maxState = 1 << 20

// spare makes a spare from the descriptors of a Spare message.
func (s *server) spare(m *vmmctl.Spare) (*vmm.Spare, error) {
	if err := s.begin(1+len(m.Memory.Layers), m.HasUserfaultfd); err != nil {
		return nil, err
	}
	layers := s.take(len(m.Memory.Layers))
	cfg := vmm.SpareConfig{KVM: s.sys, Memory: m.Memory.Size, VCPUs: int(m.VCPUs), Profile: cpu.Profile(m.Profile)}
	for _, e := range m.Memory.Extents {
		cfg.Layers = append(cfg.Layers, guestmem.Mapping{
			Run: extent.Run{Start: e.Start, Length: e.Length}, File: layers[e.Layer], Offset: e.Offset,
		})
	}
	cfg.Written, cfg.Read = m.Touch.Written, m.Touch.Read
	if m.Watch {
		cfg.Watch = s.userfaultfd
	}
	spare, err := vmm.NewSpare(cfg)
	if err := errors.Join(err, closeAll(layers)); err != nil { // a mapping needs no descriptor
		return nil, err
	}
	return spare, nil
}

// load continues a machine in a spare. From here on the spare belongs to load,
// which closes it if it fails.
func (s *server) load(spare *vmm.Spare, m *vmmctl.Load) error {
	if want := 1 + m.Devices.Files(); len(s.files) != want {
		return errors.Join(fmt.Errorf("the message came with %d files, not %d", len(s.files), want), spare.Close())
	}
	state, err := readState(s.take(1)[0])
	if err != nil {
		return errors.Join(err, spare.Close())
	}
	devices, err := s.devices(&m.Devices)
	if err != nil {
		return errors.Join(err, spare.Close())
	}
	s.vm, err = spare.Load(state, devices)
	return err
}

func readState(f *os.File) (*vmm.State, error) {
	defer func() { _ = f.Close() }() // only read
	size, err := f.Seek(0, io.SeekEnd)
	if err != nil {
		return nil, fmt.Errorf("read the machine's state: %w", err)
	}
	if size > maxState {
		return nil, fmt.Errorf("the machine's state has more than %d bytes", maxState)
	}
	b := make([]byte, size)
	if _, err := f.ReadAt(b, 0); err != nil {
		return nil, fmt.Errorf("read the machine's state: %w", err)
	}
	return vmm.UnmarshalState(b)
}

// devices takes the descriptors of the disks and nets. First it limits the size
// of the files that the process can write, so that the guest cannot exceed the
// size in the message.
func (s *server) devices(d *vmmctl.Devices) (out vmm.Devices, err error) {
	if err := s.limitFiles(d.MaxFile); err != nil {
		return out, err
	}
	s.readyPort = d.ReadyPort
	out.Vsock = &vmm.Vsock{Accept: s.dialed}
	for i := range d.Disks {
		k := &d.Disks[i]
		files := s.take(k.Files())
		var d vmm.Disk
		if k.Stack == nil {
			d, err = vmm.FileDisk(files[0], k.ReadOnly, k.ID)
		} else {
			d, err = s.layered(k, files)
		}
		if err != nil {
			return out, fmt.Errorf("disk %d: %w", i, err)
		}
		d.Rate = virtio.Rate{Bytes: k.BytesPerSecond, Ops: k.OpsPerSecond}
		out.Disks = append(out.Disks, d)
	}
	for _, n := range d.Nets {
		out.Nets = append(out.Nets, vmm.Net{Socket: s.take(1)[0], MAC: n.MAC, MTU: n.MTU})
	}
	if d.Listen {
		s.listener = s.take(1)[0]
	}
	if d.Standby {
		out.Vsock.Standby = s.take(1)[0]
	}
	return out, nil
}

func (s *server) layered(k *vmmctl.Disk, files []*os.File) (vmm.Disk, error) {
	last := len(files) - 1
	d, err := disk.New(*k.Stack, files[:last], files[last])
	if err != nil {
		return vmm.Disk{}, err
	}
	s.disks = append(s.disks, d)
	return vmm.Disk{Backend: d, ID: k.ID, Close: d.Close}, nil
}
