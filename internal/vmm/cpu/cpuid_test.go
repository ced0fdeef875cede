package cpu

import (
	"testing"

	"agentrun.dev/internal/vmm/kvm"
)

// find returns an entry of a CPUID table.
func find(entries []kvm.CPUIDEntry, function, index uint32) (kvm.CPUIDEntry, bool) {
	for _, e := range entries {
		if e.Function == function && e.Index == index {
			return e, true
		}
	}
	return kvm.CPUIDEntry{}, false
}

// TestProfileHides applies the profile to a CPU that has all features.
func TestProfileHides(t *testing.T) {
	const all = 0xffff_ffff
	var host []kvm.CPUIDEntry
	for _, f := range []uint32{
		leafFeatures, leafCache, leafExtFeatures, leafPMU, leafTopology, leafXState, leafSGX, leafTrace, leafTile,
		leafTMUL, leafTopologyV2, leafKVMFeatures, leafAMDFeatures, leafAMDPower, leafAMDAddress, leafAMDSVM,
		leafAMDCacheTopo, leafAMDTopology, leafAMDPerf,
	} {
		for index := range uint32(20) {
			host = append(host, kvm.CPUIDEntry{Function: f, Index: index, EAX: all, EBX: all, ECX: all, EDX: all})
		}
	}
	common, err := HostV1.Apply(host, true)
	if err != nil {
		t.Fatal(err)
	}
	guest := ForVCPU(common, 1, 2)
	get := func(function, index uint32) kvm.CPUIDEntry {
		e, _ := find(guest, function, index) // missing entries are zeros
		return e
	}
	for _, e := range guest {
		if e.EAX|e.EBX|e.ECX|e.EDX == 0 {
			t.Errorf("leaf %#x.%d says nothing", e.Function, e.Index)
		}
	}
	for _, c := range []struct {
		what   string
		set    uint32
		wanted uint32
	}{
		{"VMX, MONITOR, PDCM", get(leafFeatures, 0).ECX & (featVMX | featMonitor | featPDCM), 0},
		{"hypervisor and TSC deadline", get(leafFeatures, 0).ECX & (featHypervisor | featTSCDeadline), featHypervisor | featTSCDeadline},
		{"APIC id", get(leafFeatures, 0).EBX >> 24, 1},
		{"SVM, TOPOEXT", get(leafAMDFeatures, 0).ECX & (amdSVM | amdTopoExt), 0},
		{"invariant TSC", get(leafAMDPower, 0).EDX & powerInvariantTSC, 0},
		{"AMX", get(leafExtFeatures, 0).EDX & (extAMXBF16 | extAMXInt8 | extAMXTile), 0},
		{"AMX (subleaf 1)", get(leafExtFeatures, 1).EAX & ext1AMXFP16, 0},
		{"tile state", get(leafXState, 0).EAX & xstateTiles, 0},
		{"SGX, PT", get(leafExtFeatures, 0).EBX & (extSGX | extPT), 0},
		{"PMU", get(leafPMU, 0).EAX, 0},
		{"SVM leaf", get(leafAMDSVM, 0).EAX, 0},
		{"asynchronous page faults", get(leafKVMFeatures, 0).EAX & (1<<4 | 1<<10 | 1<<14), 0},
		{"kvm-clock", get(leafKVMFeatures, 0).EAX & (1<<3 | 1<<24), 1<<3 | 1<<24},
		{"x2APIC id", get(leafTopology, 0).EDX, 1},
		{"cores", get(leafTopology, 1).EBX, 2},
	} {
		if c.set != c.wanted {
			t.Errorf("%s: %#x, want %#x", c.what, c.set, c.wanted)
		}
	}
	for _, absent := range []struct{ function, index uint32 }{
		{leafXState, 17}, {leafXState, 18}, {leafAMDTopology, 0}, {leafTopologyV2, 0},
	} {
		if _, ok := find(guest, absent.function, absent.index); ok {
			t.Errorf("leaf %#x.%d is there", absent.function, absent.index)
		}
	}
	if m := XStateMask(guest); m != all<<32|all&^xstateTiles {
		t.Errorf("extended state mask is %#x", m)
	}
	without, err := HostV1.Apply(host, false)
	if err != nil {
		t.Fatal(err)
	}
	if e, _ := find(without, leafFeatures, 0); e.ECX&featTSCDeadline != 0 {
		t.Error("a TSC deadline timer is offered that KVM lacks")
	}
}
