package vmm

import "sync"

// SerialState is the complete state of a UART.
type SerialState struct {
	InterruptEnable uint8
	LineControl     uint8
	ModemControl    uint8
	Scratch         uint8
	Divisor         uint16
	// TransmitEmpty says that a transmitter-empty interrupt is pending.
	TransmitEmpty bool
}

// serial is an output-only 16550 on COM1. The guest's output goes to the
// console log. The host never sends to the guest, so the receiver is empty.
type serial struct {
	console *consoleLog
	raise   func() error

	mu    sync.Mutex // protects state
	state SerialState
}

// Register offsets and bits (PC16550D data sheet).
const (
	uartData = iota
	uartInterruptEnable
	uartInterruptID
	uartLineControl
	uartModemControl
	uartLineStatus
	uartModemStatus
	uartScratch

	ierTransmitEmpty = 1 << 1
	lcrDivisorLatch  = 1 << 7
	iirNone          = 0x01
	iirTransmitEmpty = 0x02
	iirFIFO          = 0xc0
	lsrIdle          = 0x60 // transmitter and holding register empty
	msrConnected     = 0xb0 // carrier, data set ready, clear to send
)

func newSerial(console *consoleLog, raise func() error) *serial {
	return &serial{console: console, raise: raise}
}

func (s *serial) write(reg uint16, data []byte) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, v := range data {
		if err := s.writeByte(reg, v); err != nil {
			return err
		}
	}
	return nil
}

func (s *serial) writeByte(reg uint16, v byte) error {
	st := &s.state
	latch := st.LineControl&lcrDivisorLatch != 0
	switch reg {
	case uartData:
		if latch {
			st.Divisor = st.Divisor&0xff00 | uint16(v)
			return nil
		}
		s.console.append(v)
		// Raise one edge, and the next only after the driver has read the
		// cause.
		if st.InterruptEnable&ierTransmitEmpty != 0 && !st.TransmitEmpty {
			st.TransmitEmpty = true
			return s.raise()
		}
	case uartInterruptEnable:
		if latch {
			st.Divisor = st.Divisor&0xff | uint16(v)<<8
			return nil
		}
		enabled := v&ierTransmitEmpty != 0
		rising := enabled && st.InterruptEnable&ierTransmitEmpty == 0
		st.InterruptEnable = v & 0x0f
		st.TransmitEmpty = enabled && (st.TransmitEmpty || rising)
		if rising {
			return s.raise()
		}
	case uartLineControl:
		st.LineControl = v
	case uartModemControl:
		st.ModemControl = v
	case uartScratch:
		st.Scratch = v
	}
	return nil
}

func (s *serial) read(reg uint16, data []byte) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for i := range data {
		data[i] = s.readByte(reg)
	}
}

func (s *serial) readByte(reg uint16) byte {
	st := &s.state
	latch := st.LineControl&lcrDivisorLatch != 0
	switch reg {
	case uartData:
		if latch {
			return byte(st.Divisor)
		}
	case uartInterruptEnable:
		if latch {
			return byte(st.Divisor >> 8)
		}
		return st.InterruptEnable
	case uartInterruptID:
		if st.TransmitEmpty {
			st.TransmitEmpty = false // reading the cause acknowledges it
			return iirFIFO | iirTransmitEmpty
		}
		return iirFIFO | iirNone
	case uartLineControl:
		return st.LineControl
	case uartModemControl:
		return st.ModemControl
	case uartLineStatus:
		return lsrIdle
	case uartModemStatus:
		return msrConnected
	case uartScratch:
		return st.Scratch
	}
	return 0
}

// save returns the UART's state.
func (s *serial) save() SerialState {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.state
}

// restore sets a saved state.
func (s *serial) restore(st SerialState) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.state = st
}
