// Package acpi writes the firmware tables of a hardware-reduced machine. They
// describe only hardware that the VMM provides: no legacy timers, PIC, RTC or
// PM registers. Guests find their processors (MADT), devices and interrupts
// (DSDT), the generation id (VMGENID) and the registers for power-off and reset
// (FADT) here. The package follows ACPI 6.5.
package acpi

import (
	"encoding/binary"
	"fmt"
)

// Ports of the fixed registers. The FADT tells the guest where they are.
const (
	// SleepControlPort receives sleep type and SLP_EN (§4.8.3.7).
	SleepControlPort = 0x600
	// SleepStatusPort holds WAK_STS.
	SleepStatusPort = 0x601
	// ResetPort resets the machine when ResetValue is written to it.
	ResetPort = 0x602
	// ResetValue is the value that the FADT tells the guest to write.
	ResetValue = 1
	// PanicPort is the pvpanic device: bit 0 says that the guest panicked.
	PanicPort = 0x505

	// sleepTypeS5 is the value of \_S5 for the sleep control register.
	sleepTypeS5 = 5
	// PowerOff is the value that the guest writes to SleepControlPort to power
	// off: sleep type 5 in bits 2–4 and SLP_EN, bit 5.
	PowerOff = sleepTypeS5<<2 | 1<<5
)

// Addresses fixed by the architecture.
const (
	LocalAPICBase = 0xFEE0_0000
	IOAPICBase    = 0xFEC0_0000
)

// VirtioDevice is a virtio-mmio window and its interrupt.
type VirtioDevice struct {
	Base uint32
	Size uint32
	GSI  uint32
}

// Hardware is the machine that the tables describe.
type Hardware struct {
	VCPUs  int
	Virtio []VirtioDevice
	// SerialPort and SerialGSI describe the console UART.
	SerialPort uint16
	SerialGSI  uint32
	// GenerationIDAddr is the address of the 16 bytes of the generation id.
	// EventGSI is the interrupt that announces a change of it.
	GenerationIDAddr uint64
	EventGSI         uint32
}

const (
	headerLen = 36
	rsdpLen   = 36
	fadtLen   = 276
)

// Tables lays out RSDP, XSDT, FADT, MADT and DSDT at base and returns their
// bytes; the RSDP is first. They take at most limit bytes.
func (h Hardware) Tables(base uint64, limit int) ([]byte, error) {
	dsdt := table("DSDT", 2, h.dsdt())
	madt := table("APIC", 5, h.madt())

	dsdtAt := align(base + rsdpLen)
	madtAt := align(dsdtAt + uint64(len(dsdt)))
	fadtAt := align(madtAt + uint64(len(madt)))
	xsdtAt := align(fadtAt + fadtLen)

	fadt := table("FACP", 6, fadt(dsdtAt))
	var entries []byte
	entries = binary.LittleEndian.AppendUint64(entries, fadtAt)
	entries = binary.LittleEndian.AppendUint64(entries, madtAt)
	xsdt := table("XSDT", 1, entries)

	size := xsdtAt + uint64(len(xsdt)) - base
	if size > uint64(limit) {
		return nil, fmt.Errorf("ACPI tables of %d bytes: room for %d", size, limit)
	}
	out := make([]byte, size)
	copy(out, rsdp(xsdtAt))
	copy(out[dsdtAt-base:], dsdt)
	copy(out[madtAt-base:], madt)
	copy(out[fadtAt-base:], fadt)
	copy(out[xsdtAt-base:], xsdt)
	return out, nil
}

func align(a uint64) uint64 { return (a + 15) &^ 15 }

func checksum(b []byte) byte {
	var sum byte
	for _, c := range b {
		sum += c
	}
	return -sum
}

// table puts the standard header (§5.2.6) before a body.
func table(signature string, revision byte, body []byte) []byte {
	b := make([]byte, headerLen, headerLen+len(body))
	copy(b, signature)
	binary.LittleEndian.PutUint32(b[4:], uint32(headerLen+len(body)))
	b[8] = revision
	copy(b[10:], "AGNRUN")
	copy(b[16:], "AGENTRUN")
	binary.LittleEndian.PutUint32(b[24:], 1)
	copy(b[28:], "AGRN")
	binary.LittleEndian.PutUint32(b[32:], 1)
	b = append(b, body...)
	b[9] = checksum(b)
	return b
}

func rsdp(xsdt uint64) []byte {
	b := make([]byte, rsdpLen)
	copy(b, "RSD PTR ")
	copy(b[9:], "AGNRUN")
	b[15] = 2
	binary.LittleEndian.PutUint32(b[20:], rsdpLen)
	binary.LittleEndian.PutUint64(b[24:], xsdt)
	b[8] = checksum(b[:20])
	b[32] = checksum(b)
	return b
}

// fadt is the body of the FADT (§5.2.9).
func fadt(dsdt uint64) []byte {
	const (
		flagPowerButton = 1 << 4 // no fixed-function power button
		flagSleepButton = 1 << 5
		flagReset       = 1 << 10
		flagHWReduced   = 1 << 20

		bootNoVGA = 1 << 2
		bootNoRTC = 1 << 5
	)
	full := make([]byte, fadtLen)
	put := func(off int, v uint64, size int) {
		for i := range size {
			full[off+i] = byte(v >> (8 * i))
		}
	}
	register := func(off int, port uint64) {
		full[off] = 1   // system I/O
		full[off+1] = 8 // bits
		full[off+3] = 1 // byte access
		put(off+4, port, 8)
	}
	put(109, bootNoVGA|bootNoRTC, 2)
	put(112, flagPowerButton|flagSleepButton|flagReset|flagHWReduced, 4)
	register(116, ResetPort)
	full[128] = ResetValue
	full[131] = 5 // minor version
	put(140, dsdt, 8)
	register(244, SleepControlPort)
	register(256, SleepStatusPort)
	copy(full[268:], "AGENTRUN")
	return full[headerLen:]
}

// madt is the body of the MADT (§5.2.12): one LAPIC per vCPU, one IOAPIC.
func (h Hardware) madt() []byte {
	b := binary.LittleEndian.AppendUint32(nil, LocalAPICBase)
	b = binary.LittleEndian.AppendUint32(b, 0) // no 8259s
	for i := range h.VCPUs {
		b = append(b, 0, 8, byte(i), byte(i), 1, 0, 0, 0)
	}
	b = append(b, 1, 12, 0, 0)
	b = binary.LittleEndian.AppendUint32(b, IOAPICBase)
	return binary.LittleEndian.AppendUint32(b, 0)
}

func (h Hardware) dsdt() []byte {
	devices := [][]byte{
		device("COM1",
			name("_HID", eisa("PNP0501")),
			name("_UID", integer(0)),
			name("_CRS", resources(ioPorts(h.SerialPort, 8), edgeInterrupt(h.SerialGSI))),
		),
		// The pvpanic device, as Linux' driver and QEMU name it.
		device("PVPN",
			name("_HID", text("QEMU0001")),
			name("_CRS", resources(ioPorts(PanicPort, 1))),
		),
		// Virtual Machine Generation ID (Microsoft's specification): ADDR
		// gives the address of the 16 bytes.
		device("VGEN",
			name("_HID", text("VMGENCTR")),
			name("_CID", text("VM_Gen_Counter")),
			name("_DDN", text("VM_Gen_Counter")),
			name("ADDR", pkg(integer(h.GenerationIDAddr&0xffff_ffff), integer(h.GenerationIDAddr>>32))),
		),
		// Hardware-reduced machines have no GPEs: the generic event device
		// (§5.6.9) turns an interrupt into a notification.
		device("GEVT",
			name("_HID", text("ACPI0013")),
			name("_CRS", resources(edgeInterrupt(h.EventGSI))),
			method("_EVT", 1|1<<3, // one argument, serialized
				ifEqual([]byte{opArg0}, integer(uint64(h.EventGSI)), notify("VGEN", 0x80)),
			),
		),
	}
	for i, v := range h.Virtio {
		devices = append(devices, device(fmt.Sprintf("VR%02X", i),
			name("_HID", text("LNRO0005")),
			name("_UID", integer(uint64(i))),
			name("_CCA", integer(1)),
			name("_CRS", resources(memory32(v.Base, v.Size), edgeInterrupt(v.GSI))),
		))
	}
	return join(
		name("_S5_", pkg(integer(sleepTypeS5), integer(0), integer(0), integer(0))),
		scope("_SB_", devices...),
	)
}
