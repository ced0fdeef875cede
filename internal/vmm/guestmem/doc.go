// Package guestmem owns guest physical memory: it is the only place in the
// host process that reads, writes or discards it.
//
// # Memory map
//
//	0x0_0000_0000 ┌──────────────────────────────┐
//	              │ RAM below the gap (≤ 3 GiB)  │  boot structures in the first MiB,
//	              │                              │  the kernel at 16 MiB
//	0x0_C000_0000 ├──────────────────────────────┤
//	              │ the gap: virtio-mmio windows │  never backed by RAM
//	              │ 0xD000_0000, IOAPIC          │
//	              │ 0xFEC0_0000, LAPIC 0xFEE0_0000│
//	0x1_0000_0000 ├──────────────────────────────┤
//	              │ RAM above the gap            │
//	              └──────────────────────────────┘
//
// Every address that arrives here was chosen by the guest. Each call checks the
// whole range before it touches a byte, and returns ErrRange for a range
// outside of RAM; no call panics. Callers copy the bytes that they need out of
// guest memory once, check the copy and use the copy: the guest may change the
// original at any time.
//
// The host writes to guest memory only through this package. So one place knows
// which pages were written, discarded or protected.
package guestmem
