package vmm

import (
	"bytes"
	"encoding/binary"
	"encoding/hex"
	"os"
	"strings"
	"testing"

	"agentrun.dev/internal/vmm/cpu"
	"agentrun.dev/internal/vmm/kvm"
	"agentrun.dev/internal/vmm/virtio"
	"agentrun.dev/internal/vmm/vmstate"
)

// sampleState sets every field.
func sampleState() *State {
	s := &State{Profile: cpu.HostV1, Memory: 64 << 20, TSCKHz: 2_000_000, Clock: ClockState{Nanoseconds: 5, TSC: 7}}
	s.VCPUs = []VCPUState{{
		Regs: kvm.Regs{RIP: 1}, XCR0: 7, XSave: bytes.Repeat([]byte{1}, kvm.MinXSaveSize),
		MSRs: []kvm.MSREntry{{Index: 0x10, Data: 9}, {Index: 0xc0000080, Data: 1 << 63}},
	}}
	s.Devices = []DeviceState{{Own: []byte("own")}}
	return s
}

func encodeState(t testing.TB, s *State) []byte {
	t.Helper()
	b, err := s.Marshal()
	if err != nil {
		t.Fatal(err)
	}
	return b
}

// TestStateRefusesDamage: no truncated state is accepted, and trailing bytes
// are noticed. The digest of the snapshot catches flipped bits.
func TestStateRefusesDamage(t *testing.T) {
	good := encodeState(t, sampleState())
	if _, err := UnmarshalState(good); err != nil {
		t.Fatal(err)
	}
	for n := range good {
		if _, err := UnmarshalState(good[:n]); err == nil {
			t.Fatalf("%d of %d bytes were accepted", n, len(good))
		}
	}
	if _, err := UnmarshalState(append(bytes.Clone(good), 0)); err == nil {
		t.Error("a byte too many was accepted")
	}
}

// TestStateParts: the sizes of the encoded parts match the constants of package
// vmstate.
func TestStateParts(t *testing.T) {
	for what, sizes := range map[string][2]int{
		"clock":     {binary.Size(ClockState{}), vmstate.SizeClock},
		"IOAPIC":    {binary.Size(IOAPICState{}), vmstate.SizeIOAPIC},
		"serial":    {binary.Size(SerialState{}), vmstate.SizeSerial},
		"regs":      {binary.Size(kvm.Regs{}), vmstate.SizeRegs},
		"sregs":     {binary.Size(kvm.Sregs{}), vmstate.SizeSregs},
		"LAPIC":     {binary.Size(kvm.LAPIC{}), vmstate.SizeLAPIC},
		"events":    {len(kvm.Events{}), vmstate.SizeEvents},
		"debugregs": {len(kvm.DebugRegs{}), vmstate.SizeDebugRegs},
		"MMIO":      {binary.Size(virtio.MMIOState{}), vmstate.SizeMMIO},
		"devices":   {maxVirtio, vmstate.MaxDevices},
	} {
		if sizes[0] != sizes[1] {
			t.Errorf("%s: %d, not %d", what, sizes[0], sizes[1])
		}
	}
}

// TestStateStays: snapshots of earlier versions can still be restored.
func TestStateStays(t *testing.T) {
	b, err := os.ReadFile("testdata/state.hex")
	if err != nil {
		t.Fatal(err)
	}
	s := sampleState()
	s.Standby = true
	if got := hex.EncodeToString(encodeState(t, s)); got != strings.TrimSpace(string(b)) {
		t.Errorf("it is encoded as\n%s, want\n%s", got, b)
	}
}

// FuzzState: an accepted state has exactly one encoding.
func FuzzState(f *testing.F) {
	f.Add(encodeState(f, sampleState()))
	f.Add([]byte("AGRSTATE"))
	f.Add([]byte{})
	f.Fuzz(func(t *testing.T, b []byte) {
		s, err := UnmarshalState(b)
		if err != nil {
			return
		}
		again := encodeState(t, s)
		if s2, err := UnmarshalState(again); err != nil || !bytes.Equal(encodeState(t, s2), again) {
			t.Fatalf("decoded and encoded again it differs: %v", err)
		}
	})
}
