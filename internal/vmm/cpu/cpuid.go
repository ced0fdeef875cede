// Package cpu owns the features of the host's processor and of KVM: those that
// a guest sees, and those that a machine needs.
package cpu

import (
	"fmt"
	"math/bits"

	"agentrun.dev/internal/vmm/kvm"
)

// MaxVCPUs is the most processors that a guest can have.
const MaxVCPUs = 8

// Profile names a set of CPU features that a guest sees. It is part of a
// guest's identity: a snapshot taken under one profile is restored under the
// same profile.
type Profile string

// HostV1 offers the features of the host's CPU and KVM, except those that a
// forked guest must not depend on:
//
//   - nested virtualization (VMX, SVM) and SGX: not offered to sandboxes;
//   - AMX, whose 8 KiB of tile state need a permission of their own;
//   - performance counters and processor trace: host-wide state;
//   - asynchronous page faults: they hang with userfaultfd and when a
//     snapshot's pages come in late;
//   - the invariant TSC, so that Linux picks kvm-clock, whose value can be
//     set at restore;
//   - MONITOR/MWAIT and TOPOEXT, which describe the host's own cores.
const HostV1 Profile = "host-v1"

// Leaves and bits, named as in Intel's SDM vol. 2A (CPUID), AMD's APM vol. 3
// appendix E and Documentation/virt/kvm/x86/cpuid.rst.
const (
	leafFeatures     = 0x1
	leafCache        = 0x4
	leafExtFeatures  = 0x7
	leafPMU          = 0xa
	leafTopology     = 0xb
	leafXState       = 0xd
	leafSGX          = 0x12
	leafTrace        = 0x14
	leafTile         = 0x1d
	leafTMUL         = 0x1e
	leafTopologyV2   = 0x1f
	leafKVMFeatures  = 0x4000_0001
	leafAMDFeatures  = 0x8000_0001
	leafAMDPower     = 0x8000_0007
	leafAMDAddress   = 0x8000_0008
	leafAMDSVM       = 0x8000_000a
	leafAMDCacheTopo = 0x8000_001d
	leafAMDTopology  = 0x8000_001e
	leafAMDPerf      = 0x8000_0022

	featMonitor     = 1 << 3
	featVMX         = 1 << 5
	featPDCM        = 1 << 15
	featX2APIC      = 1 << 21
	featTSCDeadline = 1 << 24
	featHypervisor  = 1 << 31
	featHTT         = 1 << 28 // EDX

	extSGX       = 1 << 2  // EBX
	extPT        = 1 << 25 // EBX
	extSGXLC     = 1 << 30 // ECX
	extAMXBF16   = 1 << 22 // EDX
	extAMXTile   = 1 << 24
	extAMXInt8   = 1 << 25
	ext1AMXFP16  = 1 << 21 // subleaf 1, EAX
	ext1AMXCmplx = 1 << 8  // subleaf 1, EDX
	xstateTiles  = 1<<17 | 1<<18

	amdCmpLegacy = 1 << 1
	amdSVM       = 1 << 2
	amdTopoExt   = 1 << 22
	amdPerfCore  = 1 << 23
	amdPerfNB    = 1 << 24
	amdPerfL2    = 1 << 28

	powerInvariantTSC = 1 << 8
)

// kvmFeatures is the list of paravirtual features offered: clocks, no I/O
// delay, steal time, paravirtual EOI, unhalt, TLB flush, IPIs, poll control,
// yield and the stable-clock bit. Asynchronous page faults (4, 10, 14) and
// migration control (17) are not in it.
const kvmFeatures = 1<<0 | 1<<1 | 1<<3 | 1<<5 | 1<<6 | 1<<7 | 1<<9 | 1<<11 | 1<<12 | 1<<13 | 1<<24

// Apply turns the features that the host supports into those that every vCPU of
// a guest sees.
func (p Profile) Apply(supported []kvm.CPUIDEntry, tscDeadline bool) ([]kvm.CPUIDEntry, error) {
	if p != HostV1 {
		return nil, fmt.Errorf("CPU profile %q is unknown: use %q", p, HostV1)
	}
	out := make([]kvm.CPUIDEntry, 0, len(supported))
	for _, e := range supported {
		switch e.Function {
		case leafFeatures:
			e.ECX &^= featMonitor | featVMX | featPDCM | featTSCDeadline
			e.ECX |= featHypervisor | featX2APIC
			if tscDeadline {
				e.ECX |= featTSCDeadline
			}
		case leafExtFeatures:
			switch e.Index {
			case 0:
				e.EBX &^= extSGX | extPT
				e.ECX &^= extSGXLC
				e.EDX &^= extAMXBF16 | extAMXTile | extAMXInt8
			case 1:
				e.EAX &^= ext1AMXFP16
				e.EDX &^= ext1AMXCmplx
			}
		case leafXState:
			if e.Index == 0 {
				e.EAX &^= xstateTiles
			} else if e.Index == 17 || e.Index == 18 {
				continue
			}
		case leafPMU, leafSGX, leafTrace, leafTile, leafTMUL, leafAMDSVM, leafAMDPerf:
			e.EAX, e.EBX, e.ECX, e.EDX = 0, 0, 0, 0
		case leafKVMFeatures:
			e.EAX &= kvmFeatures
		case leafAMDFeatures:
			e.ECX &^= amdSVM | amdTopoExt | amdPerfCore | amdPerfNB | amdPerfL2
		case leafAMDCacheTopo, leafAMDTopology:
			continue // part of TOPOEXT
		case leafTopology, leafTopologyV2:
			continue // written per vCPU
		case leafAMDPower:
			e.EDX &^= powerInvariantTSC
		}
		if e.EAX|e.EBX|e.ECX|e.EDX == 0 {
			continue // a missing leaf also reads as zeros, and a shorter list is faster for KVM
		}
		out = append(out, e)
	}
	return out, nil
}

// XStateMask is the set of all parts of the extended state that the guest can
// enable, 0 without XSAVE. The processors start with all of them enabled, as
// firmware leaves them: the sizes that CPUID reports follow XCR0, and a KVM that
// cannot trap XSETBV (as in QEMU 7.2's emulated SVM) would report the sizes of
// XCR0 = 1 for ever.
func XStateMask(entries []kvm.CPUIDEntry) uint64 {
	for _, e := range entries {
		if e.Function == leafXState && e.Index == 0 {
			return uint64(e.EDX)<<32 | uint64(e.EAX)
		}
	}
	return 0
}

// ForVCPU adds the entries that differ between the processors: ids and a flat
// topology of one socket with one thread per core.
func ForVCPU(common []kvm.CPUIDEntry, id, count int) []kvm.CPUIDEntry {
	shift := uint32(bits.Len(uint(count - 1)))
	out := make([]kvm.CPUIDEntry, 0, len(common)+2)
	for _, e := range common {
		switch e.Function {
		case leafFeatures:
			e.EBX = e.EBX&0xffff | uint32(count)<<16 | uint32(id)<<24
			e.EDX &^= featHTT
			if count > 1 {
				e.EDX |= featHTT
			}
		case leafCache:
			// Caches are private to a core; the package has count cores.
			e.EAX = e.EAX&0x0000_3fff | uint32(count-1)<<26
		case leafAMDFeatures:
			e.ECX &^= amdCmpLegacy
			if count > 1 {
				e.ECX |= amdCmpLegacy
			}
		case leafAMDAddress:
			e.ECX = e.ECX&^0xf0ff | uint32(count-1) | shift<<12
		}
		out = append(out, e)
	}
	level := func(index, shift, count, kind uint32) kvm.CPUIDEntry {
		return kvm.CPUIDEntry{
			Function: leafTopology, Index: index, Flags: kvm.CPUIDSignificantIndex,
			EAX: shift, EBX: count, ECX: index | kind<<8, EDX: uint32(id),
		}
	}
	const thread, core = 1, 2
	return append(out, level(0, 0, 1, thread), level(1, shift, uint32(count), core))
}
