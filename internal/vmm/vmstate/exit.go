// Package vmstate defines the state of a machine at rest (State) and its end
// (Exit), in a form that the vmm process and its parent share.
package vmstate

import "fmt"

// Reason says why a guest ended.
type Reason string

// The reasons for which a guest ends.
const (
	// PowerOff: the guest powered itself off.
	PowerOff Reason = "power-off"
	// Reset: the guest asked for a reset (reboot).
	Reset Reason = "reset"
	// Panic: the guest's kernel panicked.
	Panic Reason = "panic"
	// TripleFault: the processor gave up on the guest's fault handlers.
	TripleFault Reason = "triple-fault"
	// InternalError: KVM could not continue (emulation failure, bad entry
	// state, or a failing ioctl).
	InternalError Reason = "internal-error"
	// Stopped: the host stopped the guest.
	Stopped Reason = "stopped"
	// Killed: the vmm process ended without a last message.
	Killed Reason = "killed"
	// OutOfMemory: the kernel killed the vmm process at its memory limit.
	OutOfMemory Reason = "out-of-memory"
)

// Exit says how a guest ended.
type Exit struct {
	Reason Reason
	// Detail is text for people: registers, KVM's suberror, a signal's name.
	Detail string
}

func (e Exit) String() string {
	if e.Detail == "" {
		return string(e.Reason)
	}
	return fmt.Sprintf("%s: %s", e.Reason, e.Detail)
}
