package microvm

import (
	"encoding/binary"
	"fmt"

	"agentrun.dev/internal/kvm"
	"agentrun.dev/internal/snapshot"
)

// hostCPU names this host's processor, so that a person who moves a snapshot
// to another kind can be told so.
func hostCPU() (cpu snapshot.CPU, err error) {
	f, err := openKVM()
	if err != nil {
		return cpu, err
	}
	defer func() { _ = f.Close() }() // only asked
	sys, err := kvm.FromFile(f)
	if err != nil {
		return cpu, err
	}
	entries, err := sys.SupportedCPUID()
	if err != nil {
		return cpu, err
	}
	for _, e := range entries {
		switch e.Function {
		case 0:
			var name []byte
			for _, part := range []uint32{e.EBX, e.EDX, e.ECX} {
				name = binary.LittleEndian.AppendUint32(name, part)
			}
			cpu.Vendor = string(name)
		case 1:
			// Intel SDM vol. 2A, CPUID, figure 3-6.
			cpu.Family, cpu.Model, cpu.Stepping = int(e.EAX>>8&0xf), int(e.EAX>>4&0xf), int(e.EAX&0xf)
			if cpu.Family == 6 || cpu.Family == 15 {
				cpu.Model += int(e.EAX>>16&0xf) << 4
			}
			if cpu.Family == 15 {
				cpu.Family += int(e.EAX >> 20 & 0xff)
			}
		}
	}
	if cpu.Vendor == "" {
		return cpu, fmt.Errorf("KVM names no processor")
	}
	return cpu, nil
}
