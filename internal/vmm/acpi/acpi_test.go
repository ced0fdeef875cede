package acpi

import (
	"bytes"
	"encoding/binary"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
)

func hardware() Hardware {
	h := Hardware{VCPUs: 8, SerialPort: 0x3f8, SerialGSI: 4, GenerationIDAddr: 0xf0000, EventGSI: 9}
	for i := range uint32(14) {
		h.Virtio = append(h.Virtio, VirtioDevice{Base: 0xd000_0000 + i*0x1000, Size: 0x1000, GSI: 10 + i})
	}
	return h
}

// findTable follows RSDP and XSDT as firmware consumers do.
func findTable(t *testing.T, all []byte, base uint64, signature string) []byte {
	t.Helper()
	if string(all[:8]) != "RSD PTR " {
		t.Fatalf("no RSDP at the start: %q", all[:8])
	}
	if checksum(all[:20]) != 0 || checksum(all[:rsdpLen]) != 0 {
		t.Error("RSDP checksums are wrong")
	}
	at := func(gpa uint64) []byte {
		b := all[gpa-base:]
		b = b[:binary.LittleEndian.Uint32(b[4:])]
		if checksum(b) != 0 {
			t.Errorf("%q: checksum is wrong", b[:4])
		}
		return b
	}
	xsdt := at(binary.LittleEndian.Uint64(all[24:]))
	for e := xsdt[headerLen:]; len(e) > 0; e = e[8:] {
		b := at(binary.LittleEndian.Uint64(e))
		if string(b[:4]) == signature {
			return b
		}
		if string(b[:4]) == "FACP" && signature == "DSDT" {
			return at(binary.LittleEndian.Uint64(b[140:]))
		}
	}
	t.Fatalf("no table %s", signature)
	return nil
}

func TestTables(t *testing.T) {
	const base = 0xe0000
	all, err := hardware().Tables(base, 0x10000)
	if err != nil {
		t.Fatal(err)
	}
	fadt := findTable(t, all, base, "FACP")
	if len(fadt) != fadtLen {
		t.Errorf("FADT has %d bytes, want %d", len(fadt), fadtLen)
	}
	if flags := binary.LittleEndian.Uint32(fadt[112:]); flags&(1<<20) == 0 || flags&(1<<10) == 0 {
		t.Errorf("FADT flags %#x: hardware-reduced and reset must be set", flags)
	}
	madt := findTable(t, all, base, "APIC")
	if got, want := len(madt), headerLen+8+8*8+12; got != want {
		t.Errorf("MADT has %d bytes, want %d", got, want)
	}
	if _, err := hardware().Tables(base, 128); err == nil {
		t.Error("tables beyond the limit were accepted")
	}
}

// TestDisassembly compiles the DSDT back with ACPICA's own compiler.
func TestDisassembly(t *testing.T) {
	iasl, err := exec.LookPath("iasl")
	if err != nil {
		t.Fatal("iasl is missing: apt-get install acpica-tools")
	}
	const base = 0xe0000
	all, err := hardware().Tables(base, 0x10000)
	if err != nil {
		t.Fatal(err)
	}
	dir := t.TempDir()
	if err := os.WriteFile(filepath.Join(dir, "dsdt.aml"), findTable(t, all, base, "DSDT"), 0o600); err != nil {
		t.Fatal(err)
	}
	for _, args := range [][]string{{"-d", "dsdt.aml"}, {"-f", "-ve", "dsdt.dsl"}} {
		cmd := exec.CommandContext(t.Context(), iasl, args...)
		cmd.Dir = dir
		if out, err := cmd.CombinedOutput(); err != nil {
			t.Fatalf("iasl %v: %v\n%s", args, err, out)
		}
	}
	dsl, err := os.ReadFile(filepath.Join(dir, "dsdt.dsl"))
	if err != nil {
		t.Fatal(err)
	}
	for _, want := range []string{
		`Name (_HID, "LNRO0005")`, "0xD000D000", "Interrupt (ResourceConsumer, Edge, ActiveHigh, Exclusive",
		`Name (_HID, EisaId ("PNP0501")`, `Name (_HID, "VMGENCTR")`, "Notify (VGEN, 0x80)", `Name (_HID, "ACPI0013"`,
		`Name (_HID, "QEMU0001")`, "Name (_S5",
	} {
		if !strings.Contains(string(dsl), want) {
			t.Errorf("disassembly lacks %q", want)
		}
	}
	if t.Failed() {
		t.Logf("%s", bytes.TrimSpace(dsl))
	}
}
