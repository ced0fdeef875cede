package vmm

import "agentrun.dev/internal/vmm/kvm"

// MissingCapabilities names what Boot needs and this host's KVM lacks.
func MissingCapabilities(sys *kvm.System) []string {
	var missing []string
	for _, c := range requiredCapabilities {
		if sys.CheckExtension(c.cap) == 0 {
			missing = append(missing, c.name)
		}
	}
	return missing
}
