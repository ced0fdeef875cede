package main

import (
	"fmt"
	"os"
	"strings"

	"golang.org/x/sys/unix"
)

// check prints which KVM this host's tests should use, and why.
func check() error {
	kind, reason := "hardware", "/dev/kvm is backed by this processor"
	if why := whyNoHardware(); why != "" {
		kind, reason = "testbed", why
	}
	fmt.Fprintf(os.Stderr, "testbed: %s\n", reason)
	fmt.Println(kind)
	return nil
}

// whyNoHardware says why this host's KVM cannot be used; empty if it can.
func whyNoHardware() string {
	// Software KVMs (kvm_pvm) answer the same calls, with quirks of their own.
	if exists("/sys/module/kvm_pvm") {
		return "this host's KVM is kvm_pvm, which is not hardware-backed"
	}
	if !exists("/sys/module/kvm_intel") && !exists("/sys/module/kvm_amd") {
		return "neither kvm_intel nor kvm_amd is loaded"
	}
	info, err := os.ReadFile("/proc/cpuinfo")
	if err != nil {
		return err.Error()
	}
	if !hasVirtualization(string(info)) {
		return "the processor shows neither vmx nor svm"
	}
	f, err := os.OpenFile("/dev/kvm", os.O_RDWR, 0)
	if err != nil {
		return fmt.Sprintf("/dev/kvm is not usable: %v", err)
	}
	defer f.Close()
	const kvmGetAPIVersion = 0xae00
	if v, err := unix.IoctlRetInt(int(f.Fd()), kvmGetAPIVersion); err != nil || v != 12 {
		return fmt.Sprintf("/dev/kvm answers with API version %d (%v), not 12", v, err)
	}
	return ""
}

func hasVirtualization(cpuinfo string) bool {
	for line := range strings.Lines(cpuinfo) {
		if name, flags, ok := strings.Cut(line, ":"); ok && strings.TrimSpace(name) == "flags" {
			flags = " " + strings.TrimSpace(flags) + " "
			return strings.Contains(flags, " vmx ") || strings.Contains(flags, " svm ")
		}
	}
	return false
}

func exists(path string) bool {
	_, err := os.Stat(path)
	return err == nil
}
