package vmstate

import (
	"bytes"
	"testing"

	"agentrun.dev/internal/vmm/cpu"
)

// sample sets every field.
func sample() *State {
	part := func(size int) []byte { return bytes.Repeat([]byte{byte(size)}, size) }
	return &State{
		Profile: cpu.HostV1, Memory: 64 << 20, TSCKHz: 2_000_000, Standby: true,
		Clock: part(SizeClock), IOAPIC: part(SizeIOAPIC), Serial: part(SizeSerial),
		VCPUs: []VCPU{{
			Regs: part(SizeRegs), Sregs: part(SizeSregs), LAPIC: part(SizeLAPIC), Events: part(SizeEvents), DebugRegs: part(SizeDebugRegs),
			MPState: 3, XCR0: 7, XSave: part(576), MSRs: []MSR{{Index: 0x10, Data: 9}, {Index: 0xc0000080, Data: 1 << 63}},
		}},
		Devices: []Device{{MMIO: part(SizeMMIO), Own: []byte("own")}},
	}
}

// TestRefusesDamage: a state is refused if it is truncated, has a byte too many,
// is of another version, or has a part of another size.
func TestRefusesDamage(t *testing.T) {
	good := sample().Marshal()
	if s, err := Unmarshal(good); err != nil || !bytes.Equal(s.Marshal(), good) {
		t.Fatalf("%+v, %v", s, err)
	}
	for n := range good {
		if _, err := Unmarshal(good[:n]); err == nil {
			t.Fatalf("%d of %d bytes were accepted", n, len(good))
		}
	}
	newer := bytes.Clone(good)
	newer[len(magic)] = version + 1
	short := sample()
	short.VCPUs[0].Regs = short.VCPUs[0].Regs[1:]
	for name, b := range map[string][]byte{"longer": append(bytes.Clone(good), 0), "newer": newer, "a short part": short.Marshal()} {
		if _, err := Unmarshal(b); err == nil {
			t.Errorf("%s was accepted", name)
		}
	}
}

// FuzzUnmarshal: an accepted state has exactly one encoding.
func FuzzUnmarshal(f *testing.F) {
	f.Add(sample().Marshal())
	f.Add([]byte(magic))
	f.Fuzz(func(t *testing.T, b []byte) {
		if s, err := Unmarshal(b); err == nil && !bytes.Equal(s.Marshal(), b) {
			t.Fatal("decoded and encoded again it differs")
		}
	})
}
