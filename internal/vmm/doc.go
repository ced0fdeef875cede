// Package vmm is the virtual machine monitor: it runs one Linux (or bare test)
// guest on KVM. It owns the machine's shape — memory layout, firmware tables,
// interrupt controller, processors, device windows — and its life: boot, run,
// pause, end. Callers pass it open files and sockets; it never opens a path.
//
// # Threads
//
// Each vCPU has a goroutine locked to its thread, which is inside KVM_RUN
// most of the time. Exits are handled on that thread: a device that answers
// inline (vsock, rng, balloon) does so there, without a hand-over; blk and
// net wake their own worker. A vCPU leaves KVM_RUN when its immediate_exit
// flag is set and a signal arrives (SIGURG, which Go's runtime handles
// already); it parks only after KVM_RUN returned EINTR, because only then has
// KVM finished the port or memory access that the last exit began.
//
// # Time
//
// Guests use kvm-clock: the CPU profile hides the invariant TSC, so that Linux
// does not prefer the TSC. kvm-clock can be set when a guest is restored, so
// that its monotonic time does not include the time between save and restore.
// The TSC of a guest cannot be set that way on every host.
//
// # Ends
//
// A guest ends by powering off (ACPI sleep register), by resetting (ACPI
// reset register or keyboard controller), by a kernel panic (pvpanic port,
// then a reset), by a triple fault (KVM_EXIT_SHUTDOWN), by an error of KVM,
// or because it was stopped. Exit tells them apart.
package vmm
