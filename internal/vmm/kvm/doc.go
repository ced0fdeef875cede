// Package kvm is the kernel's virtualization interface, /dev/kvm, in Go: ioctl
// numbers, structures and capability checks. It holds no policy: package vmm
// decides which machines are booted, saved or refused.
//
// Every ioctl that may sleep or be interrupted goes through unix.Syscall, never
// RawSyscall: the garbage collector must be able to stop the world while a vCPU
// is inside KVM_RUN. Any ioctl may return EINTR because Go's scheduler sends
// signals (KVM_CREATE_VM does so in practice: mmu_notifier_register gives up on
// a pending signal). So this package retries all of them except KVM_RUN, where
// EINTR means that the vCPU was asked to leave the guest.
package kvm
