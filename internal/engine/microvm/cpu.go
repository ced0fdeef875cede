package microvm

import (
	"encoding/binary"
	"errors"
	"fmt"
	"strings"
	"sync"

	"agentrun.dev/internal/engine"
	"agentrun.dev/internal/engine/microvm/process"
	"agentrun.dev/internal/storage/snapshot"
	"agentrun.dev/internal/vmm/cpu"
	"agentrun.dev/internal/vmm/kvm"
)

// hostCPU caches facts about this host's processor and KVM. They do not change, and
// asking takes a while.
type hostCPU struct {
	mu    sync.Mutex // protects all following fields
	cpu   snapshot.CPU
	ahead bool // whether KVM can map memory before a guest touches it
}

func (h *hostCPU) get() (cpu snapshot.CPU, err error) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.cpu.Vendor == "" {
		f, err := process.OpenKVM()
		if err != nil {
			return cpu, err
		}
		defer func() { _ = f.Close() }() // only read
		sys, err := kvm.FromFile(f)
		if err != nil {
			return cpu, err
		}
		if cpu, err = readCPU(sys); err != nil {
			return cpu, err
		}
		h.cpu, h.ahead = cpu, sys.CheckExtension(kvm.CapPreFaultMemory) != 0
	}
	return h.cpu, nil
}

// mapsAhead reports whether KVM can map memory before a guest touches it.
func (h *hostCPU) mapsAhead() bool {
	if _, err := h.get(); err != nil {
		return false
	}
	h.mu.Lock()
	defer h.mu.Unlock()
	return h.ahead
}

// readCPU reads this host's processor and the features that guests find of it.
func readCPU(sys *kvm.System) (is snapshot.CPU, err error) {
	entries, err := sys.SupportedCPUID()
	if err != nil {
		return is, err
	}
	for _, e := range entries {
		switch e.Function {
		case 0:
			var name []byte
			for _, part := range []uint32{e.EBX, e.EDX, e.ECX} {
				name = binary.LittleEndian.AppendUint32(name, part)
			}
			is.Vendor = string(name)
		case 1:
			// Intel SDM vol. 2A, CPUID, figure 3-6.
			is.Family, is.Model, is.Stepping = int(e.EAX>>8&0xf), int(e.EAX>>4&0xf), int(e.EAX&0xf)
			if is.Family == 6 || is.Family == 15 {
				is.Model += int(e.EAX>>16&0xf) << 4
			}
			if is.Family == 15 {
				is.Family += int(e.EAX >> 20 & 0xff)
			}
		}
	}
	if is.Vendor == "" {
		return is, errors.New("KVM names no processor")
	}
	is.Profile = string(cpu.HostV1)
	is.Features, err = cpu.HostV1.Features(sys)
	return is, err
}

// check refuses a snapshot whose guest relies on a processor that this host does not
// have.
func (h *hostCPU) check(m snapshot.Manifest) error {
	host, err := h.get()
	if err != nil {
		return err
	}
	if why := differs(m.CPU, host); why != "" {
		return fmt.Errorf("%w: %s: fork it on the kind of host where it was made, or make it anew here", engine.ErrMismatch, why)
	}
	return nil
}

// differs says why a guest of one processor cannot go on with another; "" if it can.
// A different stepping and additional features make no difference.
func differs(was, is snapshot.CPU) string {
	kind := func(c snapshot.CPU) string { return fmt.Sprintf("%s family %d model %d", c.Vendor, c.Family, c.Model) }
	if kind(was) != kind(is) {
		return fmt.Sprintf("its processor was %s, this host's is %s", kind(was), kind(is))
	}
	if was.Profile != is.Profile {
		return fmt.Sprintf("its CPU profile is %q, this version has %q", was.Profile, is.Profile)
	}
	if missing := cpu.MissingFeatures(was.Features, is.Features); len(missing) > 0 {
		return "its processor had what this host or its KVM lacks: " + strings.Join(missing, ", ")
	}
	return ""
}
