package vmm

import (
	"encoding/binary"
	"testing"

	"agentrun.dev/internal/vmm/kvm"
)

type msiLog []kvm.MSI

func (l *msiLog) signal(m kvm.MSI) error { *l = append(*l, m); return nil }

func writeIOAPIC(t *testing.T, a *ioapic, reg, v uint32) {
	t.Helper()
	for _, w := range []struct {
		off uint64
		v   uint32
	}{{ioapicRegSelect, reg}, {ioapicRegWindow, v}} {
		var b [4]byte
		binary.LittleEndian.PutUint32(b[:], w.v)
		if err := a.write(w.off, b[:]); err != nil {
			t.Fatal(err)
		}
	}
}

func readIOAPIC(t *testing.T, a *ioapic, reg uint32) uint32 {
	t.Helper()
	var b [4]byte
	binary.LittleEndian.PutUint32(b[:], reg)
	if err := a.write(ioapicRegSelect, b[:]); err != nil {
		t.Fatal(err)
	}
	a.read(ioapicRegWindow, b[:])
	return binary.LittleEndian.Uint32(b[:])
}

func TestIOAPIC(t *testing.T) {
	var log msiLog
	a := newIOAPIC(log.signal)
	if v := readIOAPIC(t, a, ioapicVersion); v != 0x11|(ioapicPins-1)<<16 {
		t.Errorf("version register is %#x", v)
	}

	const pin, vector, dest = 10, 0x31, 2
	if err := a.raise(pin); err != nil {
		t.Fatal(err)
	}
	if len(log) != 0 {
		t.Fatal("a masked pin delivered")
	}
	// Logical destination 2: the mode bit must reach the message.
	writeIOAPIC(t, a, ioapicTable+2*pin+1, dest<<24)
	writeIOAPIC(t, a, ioapicTable+2*pin, vector|1<<11)
	want := kvm.MSI{AddressLo: 0xfee0_0000 | dest<<12 | 1<<2, Data: vector | 1<<11&0x7ff}
	if len(log) != 1 || log[0] != want {
		t.Fatalf("an edge that came while masked gives %+v when unmasked, want one %+v", log, want)
	}
	if err := a.raise(pin); err != nil {
		t.Fatal(err)
	}
	if len(log) != 2 {
		t.Fatal("an unmasked pin did not deliver")
	}

	// A guest that asks for a level-triggered interrupt still gets edges, and
	// read-only bits do not change.
	writeIOAPIC(t, a, ioapicTable+2*pin, vector|1<<15|redirReadOnly)
	if v := readIOAPIC(t, a, ioapicTable+2*pin); v != vector|1<<15 {
		t.Errorf("redirection entry reads %#x", v)
	}
	if err := a.raise(pin); err != nil {
		t.Fatal(err)
	}
	if got := log[len(log)-1].Data; got != vector {
		t.Errorf("message data is %#x, want an edge with vector %#x", got, vector)
	}
}

func TestIOAPICSavesPending(t *testing.T) {
	var log msiLog
	a := newIOAPIC(log.signal)
	if err := a.raise(7); err != nil {
		t.Fatal(err)
	}
	b := newIOAPIC(log.signal)
	b.restore(a.save())
	writeIOAPIC(t, b, ioapicTable+2*7, 0x40)
	if len(log) != 1 {
		t.Fatal("an interrupt that was pending at the save is lost")
	}
}

// FuzzIOAPIC makes arbitrary register accesses and edges.
func FuzzIOAPIC(f *testing.F) {
	f.Add([]byte{0, 0, 0x10, 0, 0, 0, 1, 0x10, 0x31, 0, 0, 0, 2, 0})
	f.Add([]byte{0, 0, 0x3f, 0, 0, 0, 1, 0x10, 0xff, 0xff, 0xff, 0xff})
	f.Fuzz(func(t *testing.T, in []byte) {
		var log msiLog
		a := newIOAPIC(log.signal)
		for len(in) >= 6 {
			op, off, data := in[0], uint64(in[1]), in[2:6]
			in = in[6:]
			switch op % 4 {
			case 0, 1:
				if err := a.write(off, data); err != nil {
					t.Fatal(err)
				}
			case 2:
				if err := a.raise(uint32(op>>2) % ioapicPins); err != nil {
					t.Fatal(err)
				}
			case 3:
				buf := make([]byte, 1+op>>2%8)
				a.read(off, buf)
				if err := a.write(off, buf); err != nil {
					t.Fatal(err)
				}
			}
		}
		b := newIOAPIC(log.signal)
		b.restore(a.save())
		if a.save() != b.save() {
			t.Fatal("state changes by saving and restoring it")
		}
	})
}
