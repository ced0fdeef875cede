package vmm

import "agentrun.dev/internal/vmm/guestmem"

// Guest physical addresses of the data that the VMM writes before the first
// instruction. All but the kernel lie below 1 MiB; the e820 map keeps the
// guest's allocator away from the part above 0x9fc00.
const (
	gdtAddr          = 0x500
	bootParamsAddr   = 0x7000
	pageTableAddr    = 0x9000 // PML4, PDPT, four page directories: six pages
	rngSeedAddr      = 0x10000
	cmdlineAddr      = 0x20000
	cmdlineMax       = 2048 // COMMAND_LINE_SIZE of x86 Linux, with the final NUL
	lowMemoryEnd     = 0x9fc00
	acpiAddr         = 0xe0000
	acpiLimit        = 0x10000
	generationIDAddr = 0xf0000 // VMGENID, a page of its own
	highMemory       = 0x100000
)

// The device windows in the gap, and the interrupt lines of the IOAPIC.
const (
	virtioBase   = 0xd000_0000
	virtioWindow = 0x1000

	serialGSI      = 4
	eventGSI       = 9
	firstVirtioGSI = 10
	maxVirtio      = ioapicPins - firstVirtioGSI

	serialPort  = 0x3f8
	serialPorts = 8
)

// tssAddr is where Intel hosts may keep three pages for real mode: in the
// gap, just below the place where firmware would end.
const tssAddr = 0xfffb_d000

// Limits of a machine.
const (
	// MinMemory is the least RAM a Linux guest can boot with here.
	MinMemory = 64 << 20
	// MaxMemory is the most RAM a guest can have.
	MaxMemory = guestmem.MaxSize
)
