package vmm

import (
	"bytes"
	"testing"

	"agentrun.dev/internal/vmm/kvm"
)

// sampleState has something in every field.
func sampleState() *State {
	s := &State{Profile: ProfileHostV1, Memory: 64 << 20, TSCKHz: 2_000_000, Clock: ClockState{Nanoseconds: 5, TSC: 7}}
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

// TestStateRefusesDamage: no truncation is taken for a state, and what follows
// one is noticed. Flipped bits are the business of the snapshot's digest.
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
	newer := bytes.Clone(good)
	newer[len(stateMagic)] = stateVersion + 1
	if _, err := UnmarshalState(newer); err == nil {
		t.Error("a newer version was accepted")
	}
}

// FuzzState: whatever is accepted has one encoding.
func FuzzState(f *testing.F) {
	f.Add(encodeState(f, sampleState()))
	f.Add([]byte(stateMagic))
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
