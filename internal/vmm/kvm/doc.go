// Package kvm is the kernel's virtualization interface, /dev/kvm, in Go:
// ioctl numbers, structures and capability checks. It holds no policy; what
// is booted, saved or refused is decided in package vmm.
//
// Every ioctl that may sleep or that can be interrupted goes through
// unix.Syscall, never RawSyscall: the garbage collector must be able to stop
// the world while a vCPU is inside KVM_RUN. Any ioctl may return EINTR
// because Go's scheduler sends signals (KVM_CREATE_VM does so in practice:
// mmu_notifier_register gives up on a pending signal), so all but KVM_RUN are
// retried here. KVM_RUN is not: there EINTR means that somebody asked the
// vCPU to leave the guest.
package kvm
