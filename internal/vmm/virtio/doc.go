// Package virtio owns the devices a guest sees: split virtqueues (virtio 1.2
// §2.7), the virtio-mmio transport, version 2 (§4.2), and one file pair per
// device (the device, its state): blk (§5.2), net (§5.1), rng (§5.4), balloon
// (§5.5) and vsock (§5.10). It knows nothing of KVM: the VMM routes MMIO exits
// to MMIO.Read and MMIO.Write and gives each device a function that raises its
// edge-triggered interrupt.
//
// # Trust
//
// Everything that arrives through a register, a ring or a buffer was chosen by
// a hostile guest, and it may change while it is looked at. Each descriptor is
// copied to host memory once, checked there, and used from there. A guest that
// breaks the rules of a ring gets DEVICE_NEEDS_RESET (§2.1.2) and a device that
// stands still until it is reset; a malformed request gets an error status.
// Nothing panics, nothing loops without bound, no buffer grows without bound.
//
// # Threads and locks
//
// vCPU threads call MMIO.Read and MMIO.Write, several at once. The VMM calls
// Pause, Resume, Save, Restore and Close from its own goroutine.
//
//   - MMIO.mu protects the registers. It is held while the transport calls the
//     device's Activate, Reset, Pause, Resume, ReadConfig and WriteConfig, and
//     never on the notification path.
//   - core.mu, one per device, protects the device's queues and its own state.
//     Whoever touches a ring or the buffers it names holds it. The order is
//     MMIO.mu before core.mu: a device calls back into its transport (interrupt,
//     configuration change, failure) with core.mu held, so those callbacks use
//     atomics only and take no lock.
//
// A notification runs inline in the vCPU thread for vsock, rng and balloon,
// whose work is short: a thread hop would cost more than the work. The same
// goes for some frames of net, as long as nothing has to be waited for. blk, and
// net else, hand it to a worker goroutine that sleeps on a channel. A worker holds
// core.mu for one request at a time; Pause takes core.mu to set a flag, so when
// it returns the request in flight is finished, those not begun are still in
// the ring, and nothing touches guest memory or a backing file until Resume.
// Reset does the same, and also ends the device's goroutines.
//
// # Save and restore
//
// Save: MMIO.Pause, then MMIO.Save and the device's Save. Restore: make the
// device, call its Restore, make the transport, call MMIO.Restore (which leaves
// the device paused), put the vCPUs back, then MMIO.Resume. Resume scans every
// queue again and raises one interrupt: the guest may have notified, and the
// device may have interrupted, just before the capture, and either may have
// been lost.
package virtio
