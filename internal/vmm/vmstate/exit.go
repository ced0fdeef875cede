// Package vmstate owns how a machine stands, in words that its vmm process and the
// parent of that share: at rest (State) and at its end (Exit).
package vmstate

import "fmt"

// Reason says how a guest came to its end.
type Reason string

// The ends a guest can come to.
const (
	// PowerOff: the guest powered itself off.
	PowerOff Reason = "power-off"
	// Reset: the guest asked for a reset (reboot).
	Reset Reason = "reset"
	// Panic: the guest's kernel panicked.
	Panic Reason = "panic"
	// TripleFault: the processor gave up on the guest's fault handlers.
	TripleFault Reason = "triple-fault"
	// InternalError: KVM could not go on (emulation failure, bad entry
	// state, or a failing ioctl).
	InternalError Reason = "internal-error"
	// Stopped: the host stopped the guest.
	Stopped Reason = "stopped"
	// Killed: the VMM process ended without a last word.
	Killed Reason = "killed"
	// OutOfMemory: the VMM process was killed because it reached the limit
	// of its memory.
	OutOfMemory Reason = "out-of-memory"
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
