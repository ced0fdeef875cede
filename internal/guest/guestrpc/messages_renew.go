package guestrpc

import (
	"strconv"
	"time"
)

// Limits of RenewRequest.
const (
	MinEntropy   = 32 // bytes: the key size of the kernel's generator
	MaxEntropy   = 1024
	maxMachineID = 32
)

// RenewRequest gives a fork an identity of its own. Formatting it or writing
// it as text never shows the entropy.
type RenewRequest struct {
	Entropy    []byte    // for the kernel's generator; MinEntropy to MaxEntropy bytes, a secret
	WallClock  time.Time // to the nanosecond, after 1970; zero leaves the clock alone
	Hostname   string    // empty keeps it
	MachineID  string    // 32 lower-case hexadecimal digits; empty keeps it
	Generation uint64    // higher than Info.Generation
}

func (m *RenewRequest) visit(c *visitor) {
	c.data("entropy", &m.Entropy, MaxEntropy)
	c.clock(&m.WallClock)
	c.str("hostname", &m.Hostname, maxShort)
	c.str("machine id", &m.MachineID, maxMachineID)
	c.u64(&m.Generation)
}

// String shows every field but the entropy.
func (m RenewRequest) String() string {
	clock := ""
	if !m.WallClock.IsZero() {
		clock = m.WallClock.UTC().Format(time.RFC3339Nano)
	}
	return "RenewRequest{Entropy: " + strconv.Itoa(len(m.Entropy)) + " bytes, WallClock: " + clock +
		", Hostname: " + strconv.Quote(m.Hostname) + ", MachineID: " + strconv.Quote(m.MachineID) +
		", Generation: " + strconv.FormatUint(m.Generation, 10) + "}"
}

// GoString is what %#v prints.
func (m RenewRequest) GoString() string { return m.String() }

// MarshalText is what encoders and structured loggers print.
func (m RenewRequest) MarshalText() ([]byte, error) { return []byte(m.String()), nil }

// PrepareRequest makes a guest ready to be captured.
type PrepareRequest struct {
	// Settle waits until the guest's kernel has finished its postponed work, so that
	// the forks need not do it. That takes some ten milliseconds.
	Settle bool
}

func (m *PrepareRequest) visit(c *visitor) { c.bool(&m.Settle) }

// SetClockRequest sets the wall clock of a guest that stood still and keeps its
// identity. A renewal would change the identity.
type SetClockRequest struct {
	WallClock time.Time // to the nanosecond, after 1970
}

func (m *SetClockRequest) visit(c *visitor) { c.clock(&m.WallClock) }

// CanSetClock is the capability of an agent that supports SetClock. The agent of a
// template that an older AgentRun has built does not have it.
const CanSetClock = "set-clock"

// RenewReply is the result of a renewal.
type RenewReply struct {
	Generation uint64        // the guest's generation from now on
	ClockStep  time.Duration // the change of the wall clock
}

func (m *RenewReply) visit(c *visitor) {
	c.u64(&m.Generation)
	c.dur(&m.ClockStep)
}
