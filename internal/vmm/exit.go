package vmm

import "fmt"

// Reason says how a guest came to its end.
type Reason string

// The ends a guest can come to.
const (
	// ReasonPowerOff: the guest powered itself off.
	ReasonPowerOff Reason = "power-off"
	// ReasonReset: the guest asked for a reset (reboot).
	ReasonReset Reason = "reset"
	// ReasonPanic: the guest's kernel panicked.
	ReasonPanic Reason = "panic"
	// ReasonTripleFault: the processor gave up on the guest's fault handlers.
	ReasonTripleFault Reason = "triple-fault"
	// ReasonInternalError: KVM could not go on (emulation failure, bad entry
	// state, or a failing ioctl).
	ReasonInternalError Reason = "internal-error"
	// ReasonStopped: the host stopped the guest.
	ReasonStopped Reason = "stopped"
	// ReasonKilled: the VMM process ended without a last word.
	ReasonKilled Reason = "killed"
	// ReasonOutOfMemory: the VMM process was killed because it reached the limit
	// of its memory.
	ReasonOutOfMemory Reason = "out-of-memory"
)

// Exit is how a guest ended.
type Exit struct {
	Reason Reason
	// Detail is for people: registers, KVM's suberror, a signal's name.
	Detail string
}

func (e Exit) String() string {
	if e.Detail == "" {
		return string(e.Reason)
	}
	return fmt.Sprintf("%s: %s", e.Reason, e.Detail)
}
