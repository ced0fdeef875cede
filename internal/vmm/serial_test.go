package vmm

import (
	"bytes"
	"testing"
)

func TestSerial(t *testing.T) {
	var console consoleLog
	raised := 0
	s := newSerial(&console, func() error { raised++; return nil })
	out := func(reg uint16, v ...byte) {
		t.Helper()
		if err := s.write(reg, v); err != nil {
			t.Fatal(err)
		}
	}
	in := func(reg uint16) byte {
		b := []byte{0xff}
		s.read(reg, b)
		return b[0]
	}
	// Divisor latch, as a driver sets the baud rate: not printed.
	out(uartLineControl, lcrDivisorLatch)
	out(uartData, 0x01)
	out(uartInterruptEnable, 0x02)
	if in(uartData) != 0x01 || in(uartInterruptEnable) != 0x02 {
		t.Error("the divisor does not read back")
	}
	out(uartLineControl, 0x03)
	out(uartData, 'h')
	out(uartData, []byte("i\n")...)
	if got := console.snapshot(); string(got.Tail) != "hi\n" || got.Total != 3 {
		t.Errorf("console has %+v", got)
	}
	if raised != 0 {
		t.Error("an interrupt came that nobody enabled")
	}
	out(uartInterruptEnable, ierTransmitEmpty)
	if raised != 1 {
		t.Error("enabling the transmitter interrupt while it is empty must raise it")
	}
	if id := in(uartInterruptID); id != iirFIFO|iirTransmitEmpty {
		t.Errorf("interrupt id is %#x", id)
	}
	if id := in(uartInterruptID); id != iirFIFO|iirNone {
		t.Errorf("interrupt id is %#x after it was read", id)
	}
	out(uartData, 'x')
	if raised != 2 {
		t.Error("no interrupt after a byte was sent")
	}
	if in(uartLineStatus) != lsrIdle {
		t.Error("the transmitter is never busy")
	}
	other := newSerial(&console, func() error { return nil })
	other.restore(s.save())
	if other.save() != s.save() {
		t.Error("state changes by saving and restoring it")
	}
}

func TestConsoleIsBounded(t *testing.T) {
	var c consoleLog
	var want bytes.Buffer
	for i := range 3*consoleLimit + 17 {
		b := byte(i * 7)
		c.append(b)
		want.WriteByte(b)
	}
	got := c.snapshot()
	if got.Total != uint64(want.Len()) {
		t.Errorf("total is %d, want %d", got.Total, want.Len())
	}
	if !bytes.Equal(got.Tail, want.Bytes()[want.Len()-consoleLimit:]) {
		t.Errorf("the tail of %d bytes is not the last of what was printed", len(got.Tail))
	}
}
