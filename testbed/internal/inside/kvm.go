package inside

import (
	"fmt"

	"agentrun.dev/internal/vmm/kvm"
)

// holdKVM keeps one VM, which never runs, for as long as the process lives.
//
// KVM patches the kernel's text when the first VM comes and when the last one goes
// (preempt_notifier_key), and likewise for the first processor whose LAPIC is
// disabled (apic_sw_disabled). QEMU's TCG now and then misses such a patch. A
// processor of the testbed then still runs the breakpoint that is no longer there,
// kprobe_int3_handler sends it back to the same instruction, and it hangs for good.
// The VM held here keeps these keys from ever changing again. A busy host is in the
// same state, because it always has VMs.
func holdKVM() (*kvm.VCPU, error) {
	sys, err := kvm.Open()
	if err != nil {
		return nil, err
	}
	vm, err := sys.CreateVM()
	if err != nil {
		return nil, fmt.Errorf("hold a VM: %w", err)
	}
	if err := vm.EnableSplitIRQChip(24); err != nil {
		return nil, fmt.Errorf("hold a VM: %w", err)
	}
	c, err := vm.CreateVCPU(0)
	if err != nil {
		return nil, fmt.Errorf("hold a VM: %w", err)
	}
	return c, nil
}
