package doctor

import (
	"bufio"
	"errors"
	"fmt"
	"io/fs"
	"strings"
)

// cpuInfo is the data of /proc/cpuinfo about the first processor.
type cpuInfo struct {
	vendor, model string
	count         int
	flags         map[string]bool
}

func readCPU(files fs.FS) cpuInfo {
	var cpu cpuInfo
	data, err := fs.ReadFile(files, "proc/cpuinfo")
	if err != nil {
		return cpu // checkCPU reports it
	}
	lines := bufio.NewScanner(strings.NewReader(string(data)))
	lines.Buffer(nil, 1<<20)
	for lines.Scan() {
		key, value, ok := strings.Cut(lines.Text(), ":")
		if !ok {
			continue
		}
		value = strings.TrimSpace(value)
		switch strings.TrimSpace(key) {
		case "processor":
			cpu.count++
		case "vendor_id":
			cpu.vendor = value
		case "model name":
			cpu.model = value
		case "flags":
			if cpu.flags == nil {
				cpu.flags = map[string]bool{}
				for f := range strings.FieldsSeq(value) {
					cpu.flags[f] = true
				}
			}
		}
	}
	return cpu
}

// extension is the processor's virtualization extension, or "".
func (c cpuInfo) extension() string {
	switch {
	case c.flags["vmx"]:
		return "VMX"
	case c.flags["svm"]:
		return "SVM"
	}
	return ""
}

// virtual reports whether the host is itself a guest.
func (c cpuInfo) virtual() bool { return c.flags["hypervisor"] }

// HardwareKVM reports whether this host has a KVM that hardware supports, so
// that microVMs run well. detail describes the KVM.
func HardwareKVM() (ok bool, detail string) {
	var cfg Config
	cfg.fill()
	_, err := cfg.Probes.KVM()
	kind := kvmKind(&host{Config: cfg, cpu: readCPU(cfg.Files)}, err)
	return kind.Status != Fail, kind.Detail
}

const (
	useTestbed  = "in a checkout, use the testbed (make demo, build/testbed shell)"
	useHardware = "use a host with VMX or SVM"
)

// checkKVM finds out which kind of KVM the host has and which capabilities it
// lacks.
func checkKVM(h *host) []Check {
	missing, err := h.Probes.KVM()
	kind := kvmKind(h, err)
	kind.Name = CheckKVM
	if err != nil {
		return []Check{kind}
	}
	caps := Check{Name: CheckCapabilities, Status: OK, Detail: "all that a microVM needs"}
	if len(missing) > 0 {
		caps.Status = Fail
		caps.Detail = "missing: " + strings.Join(missing, ", ")
		caps.Fix = "boot a newer kernel: Linux 4.19 and later have them"
	}
	return []Check{kind, caps}
}

func kvmKind(h *host, openErr error) Check {
	switch {
	// kvm-pvm answers every call like hardware, so this case comes first.
	case h.exists("sys/module/kvm_pvm"):
		return Check{
			Status: Fail,
			Detail: "kvm-pvm: the supervisor is emulated, a guest's kernel runs about a thousand times slower than on hardware",
			Fix:    useTestbed + ", or " + useHardware,
		}
	case errors.Is(openErr, fs.ErrNotExist):
		return missingKVM(h.cpu)
	case errors.Is(openErr, fs.ErrPermission):
		return Check{
			Status: Fail,
			Detail: "/dev/kvm may not be opened by this user",
			Fix:    "add the user to its group (sudo usermod -aG kvm $USER) and log in again",
		}
	case openErr != nil:
		return Check{
			Status: Fail,
			Detail: fmt.Sprintf("/dev/kvm does not work: %v", openErr),
			Fix:    "see dmesg; " + useTestbed,
		}
	case h.cpu.extension() == "":
		return Check{
			Status: Fail,
			Detail: "/dev/kvm is there, but the processor shows neither VMX nor SVM: this is not hardware virtualization",
			Fix:    useTestbed + ", or " + useHardware,
		}
	case h.cpu.virtual():
		return Check{
			Status: Warn,
			Detail: fmt.Sprintf("hardware virtualization (%s), nested: this host is itself a virtual machine", h.cpu.extension()),
			Fix:    "for full speed run on bare metal: exits are slower here",
		}
	}
	return Check{Status: OK, Detail: fmt.Sprintf("hardware virtualization (%s)", h.cpu.extension())}
}

// missingKVM explains why there is no /dev/kvm.
func missingKVM(cpu cpuInfo) Check {
	c := Check{Status: Fail}
	switch ext := cpu.extension(); {
	case ext == "VMX":
		c.Detail, c.Fix = "no /dev/kvm, though the processor has VMX", "sudo modprobe kvm_intel (in a container: pass /dev/kvm in)"
	case ext == "SVM":
		c.Detail, c.Fix = "no /dev/kvm, though the processor has SVM", "sudo modprobe kvm_amd (in a container: pass /dev/kvm in)"
	case cpu.virtual():
		c.Detail = "no /dev/kvm: this host is a virtual machine without nested virtualization"
		c.Fix = "switch nested virtualization on where this machine is defined, or " + useTestbed
	default:
		c.Detail = "no /dev/kvm: the processor shows neither VMX nor SVM"
		c.Fix = "switch virtualization on in the firmware, or " + useTestbed
	}
	return c
}
