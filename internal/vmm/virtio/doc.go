// Package virtio owns the devices that a guest sees: split virtqueues (virtio
// 1.2 §2.7), the virtio-mmio transport, version 2 (§4.2), and one file pair per
// device (the device, its state): blk (§5.2), net (§5.1), rng (§5.4), balloon
// (§5.5) and vsock (§5.10). It does not depend on KVM: the VMM routes MMIO
// exits to MMIO.Read and MMIO.Write, and gives each device a function that
// raises its edge-triggered interrupt.
//
// # Trust
//
// A hostile guest chose all data that arrives through a register, a ring or a
// buffer, and may change it at any time. So each descriptor is copied to host
// memory once, checked there, and used from there. If a guest breaks the rules
// of a ring, it gets DEVICE_NEEDS_RESET (§2.1.2), and the device stands still
// until it is reset. A malformed request gets an error status. No code panics
// or loops without bound, and no buffer grows without bound.
//
// # Threads and locks
//
// vCPU threads call MMIO.Read and MMIO.Write, several at once. The VMM calls
// Pause, Resume, Save, Restore and Close from its own goroutine.
//
//   - MMIO.mu protects the registers. It is held while the transport calls the
//     device's Activate, Reset, Pause, Resume, ReadConfig and WriteConfig, and
//     never on the notification path.
//   - core.mu, one per device, protects the device's queues and its own state. It
//     is held during each access to a ring or to the buffers that the ring names.
//     The order is MMIO.mu before core.mu. A device calls back into its transport
//     (interrupt, configuration change, failure) with core.mu held, so those
//     callbacks use only atomics and take no lock.
//
// A notification runs inline in the vCPU thread for vsock, rng and balloon: their
// work is short, and a switch to another thread would cost more. Net also sends
// some frames inline, as long as it does not have to wait. For all other work blk
// and net wake a worker goroutine that sleeps on a channel. A worker holds core.mu
// for one request at a time, and Pause takes core.mu to set a flag. So when Pause
// returns, the request in flight is finished, later ones are still in the ring,
// and the device does not access guest memory or a backing file until Resume.
// Reset does the same, and also ends the device's goroutines.
//
// # Save and restore
//
// Save: MMIO.Pause, then MMIO.Save and the device's Save. Restore: make the
// device, call its Restore, make the transport, call MMIO.Restore (which leaves
// the device paused), restore the vCPUs, then call MMIO.Resume. Resume scans
// every queue again and raises one interrupt: just before the capture the guest
// may have notified the device, or the device may have interrupted the guest,
// and either signal may have been lost.
package virtio
