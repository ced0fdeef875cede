package vmm

import (
	"crypto/rand"
	"encoding/binary"
	"fmt"

	"agentrun.dev/internal/vmm/guestmem"
	"agentrun.dev/internal/vmm/kvm"
)

// Offsets in struct boot_params (Documentation/x86/zero-page.rst, boot.rst).
const (
	bpACPIRSDP     = 0x070
	bpE820Count    = 0x1e8
	bpBootFlag     = 0x1fe
	bpMagic        = 0x202
	bpVersion      = 0x206
	bpLoaderType   = 0x210
	bpLoadFlags    = 0x211
	bpRamdiskImage = 0x218
	bpRamdiskSize  = 0x21c
	bpCmdlinePtr   = 0x228
	bpCmdlineSize  = 0x238
	bpSetupData    = 0x250
	bpE820Table    = 0x2d0
	bpSize         = 0x1000

	e820RAM      = 1
	e820Reserved = 2
	e820ACPI     = 3

	setupRNGSeed = 9
	rngSeedLen   = 32
)

// bootInfo holds the boot parameters that differ between machines.
type bootInfo struct {
	cmdline                string
	initrdAddr, initrdSize uint64
}

// writeBootData writes all data that a 64-bit kernel expects at its entry: boot
// parameters, command line, a seed for its random number generator, page tables
// and descriptor table.
func writeBootData(mem *guestmem.Memory, info bootInfo) error {
	if len(info.cmdline) >= cmdlineMax {
		return fmt.Errorf("kernel command line of %d bytes: at most %d", len(info.cmdline), cmdlineMax-1)
	}
	seed := make([]byte, 16, 16+rngSeedLen) // struct setup_data: next, type, len
	binary.LittleEndian.PutUint32(seed[8:], setupRNGSeed)
	binary.LittleEndian.PutUint32(seed[12:], rngSeedLen)
	seed = seed[:16+rngSeedLen]
	if _, err := rand.Read(seed[16:]); err != nil {
		return fmt.Errorf("seed the guest's random number generator: %w", err)
	}
	for _, w := range []struct {
		gpa  uint64
		data []byte
	}{
		{bootParamsAddr, bootParams(mem, info)},
		{cmdlineAddr, append([]byte(info.cmdline), 0)},
		{rngSeedAddr, seed},
		{pageTableAddr, identityMap()},
		{gdtAddr, gdt()},
	} {
		if err := mem.Write(w.gpa, w.data); err != nil {
			return fmt.Errorf("write boot data: %w", err)
		}
	}
	return nil
}

func bootParams(mem *guestmem.Memory, info bootInfo) []byte {
	b := make([]byte, bpSize)
	le := binary.LittleEndian
	le.PutUint64(b[bpACPIRSDP:], acpiAddr)
	le.PutUint16(b[bpBootFlag:], 0xaa55)
	copy(b[bpMagic:], "HdrS")
	le.PutUint16(b[bpVersion:], 0x020f)
	b[bpLoaderType] = 0xff
	b[bpLoadFlags] = 1 // loaded high
	le.PutUint32(b[bpRamdiskImage:], uint32(info.initrdAddr))
	le.PutUint32(b[bpRamdiskSize:], uint32(info.initrdSize))
	le.PutUint32(b[bpCmdlinePtr:], cmdlineAddr)
	le.PutUint32(b[bpCmdlineSize:], uint32(len(info.cmdline)))
	le.PutUint64(b[bpSetupData:], rngSeedAddr)

	n := 0
	e820 := func(start, end uint64, kind uint32) {
		e := b[bpE820Table+20*n:]
		le.PutUint64(e, start)
		le.PutUint64(e[8:], end-start)
		le.PutUint32(e[16:], kind)
		n++
	}
	e820(0, lowMemoryEnd, e820RAM)
	e820(acpiAddr, acpiAddr+acpiLimit, e820ACPI)
	e820(generationIDAddr, highMemory, e820Reserved)
	for _, r := range mem.Regions() {
		e820(max(r.GPA, highMemory), r.GPA+r.Size(), e820RAM)
	}
	b[bpE820Count] = byte(n)
	return b
}

// identityMap maps the first 4 GiB with 2 MiB pages, as the 64-bit boot
// protocol requires of the loader.
func identityMap() []byte {
	const present, writable, large = 1, 2, 1 << 7
	b := make([]byte, 6*guestmem.PageSize)
	put := func(page, index int, v uint64) {
		binary.LittleEndian.PutUint64(b[page*guestmem.PageSize+8*index:], v)
	}
	put(0, 0, pageTableAddr+guestmem.PageSize|present|writable)
	for d := range 4 {
		put(1, d, uint64(pageTableAddr+(2+d)*guestmem.PageSize)|present|writable)
		for i := range 512 {
			put(2+d, i, uint64(d*512+i)<<21|present|writable|large)
		}
	}
	return b
}

// Selectors of the boot protocol: __BOOT_CS and __BOOT_DS.
const (
	bootCS = 0x10
	bootDS = 0x18
)

func gdt() []byte {
	b := make([]byte, 0x20)
	binary.LittleEndian.PutUint64(b[bootCS:], 0x00af_9b00_0000_ffff)
	binary.LittleEndian.PutUint64(b[bootDS:], 0x00cf_9300_0000_ffff)
	return b
}

// enterLongMode puts the first vCPU at the kernel's 64-bit entry point
// (Documentation/x86/boot.rst, "64-bit Boot Protocol").
func enterLongMode(c *kvm.VCPU, entry uint64) error {
	s, err := c.Sregs()
	if err != nil {
		return err
	}
	s.CS = kvm.Segment{Limit: 0xffff_ffff, Selector: bootCS, Type: 11, Present: 1, S: 1, L: 1, G: 1}
	ds := kvm.Segment{Limit: 0xffff_ffff, Selector: bootDS, Type: 3, Present: 1, S: 1, DB: 1, G: 1}
	s.DS, s.ES, s.SS, s.FS, s.GS = ds, ds, ds, ds, ds
	s.GDT = kvm.DescriptorTable{Base: gdtAddr, Limit: 0x1f}
	s.IDT = kvm.DescriptorTable{}
	const (
		cr0PE, cr0ET, cr0NE, cr0WP, cr0AM, cr0PG = 1 << 0, 1 << 4, 1 << 5, 1 << 16, 1 << 18, 1 << 31
		cr4PAE                                   = 1 << 5
		eferLME, eferLMA                         = 1 << 8, 1 << 10
	)
	s.CR0 = cr0PE | cr0ET | cr0NE | cr0WP | cr0AM | cr0PG
	s.CR3 = pageTableAddr
	s.CR4 = cr4PAE
	s.EFER = eferLME | eferLMA
	if err := c.SetSregs(s); err != nil {
		return err
	}
	const flagsReserved = 1 << 1
	return c.SetRegs(kvm.Regs{RIP: entry, RSI: bootParamsAddr, RFLAGS: flagsReserved})
}
