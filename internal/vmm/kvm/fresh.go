package kvm

import (
	"slices"
	"sync"
)

// freshVCPU holds the initial registers of vCPUs, as far as they were read.
// They do not change, and are the same for all vCPUs with the same CPUID.
type freshVCPU struct {
	mu      sync.Mutex // protects all following fields
	tscKHz  int        // 0: not asked
	indices []uint32
	msrs    []MSREntry
}

// FreshTSCFrequency is the TSC frequency in kHz of c, which is new.
func (v *VM) FreshTSCFrequency(c *VCPU) (_ int, err error) {
	f := &v.sys.fresh
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.tscKHz == 0 {
		fd := c.fd
		if v.sys.CheckExtension(CapVMTSCControl) != 0 {
			fd = v.fd // since Linux 5.16 the VM knows it, too, and answers faster
		}
		f.tscKHz, err = tscFrequency(fd)
	}
	return f.tscKHz, err
}

// FreshMSRs is MSRs of c, which is new.
func (v *VM) FreshMSRs(c *VCPU, indices []uint32) (_ []MSREntry, err error) {
	f := &v.sys.fresh
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.msrs == nil || !slices.Equal(f.indices, indices) {
		f.indices = slices.Clone(indices)
		f.msrs, err = c.MSRs(indices)
	}
	return f.msrs, err
}
