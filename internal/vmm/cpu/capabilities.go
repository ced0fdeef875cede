package cpu

import "agentrun.dev/internal/vmm/kvm"

// requiredCapabilities are the capabilities that a host's KVM must have.
var requiredCapabilities = []struct {
	cap  kvm.Capability
	name string
}{
	{kvm.CapUserMemory, "user memory"},
	{kvm.CapExtCPUID, "extended CPUID"},
	{kvm.CapXCRS, "extended control registers"},
	{kvm.CapMPState, "MP state"},
	{kvm.CapSignalMSI, "MSI injection"},
	{kvm.CapSplitIRQChip, "split irqchip"},
	{kvm.CapImmediateExit, "immediate exit"},
}

// MissingCapabilities names the capabilities that a machine needs and this
// host's KVM lacks.
func MissingCapabilities(sys *kvm.System) []string {
	var missing []string
	for _, c := range requiredCapabilities {
		if sys.CheckExtension(c.cap) == 0 {
			missing = append(missing, c.name)
		}
	}
	return missing
}
