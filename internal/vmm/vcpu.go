package vmm

import (
	"errors"
	"fmt"
	"os"
	"runtime"
	"sync/atomic"

	"agentrun.dev/internal/vmm/kvm"
	"agentrun.dev/internal/vmm/vmstate"
	"golang.org/x/sys/unix"
)

// kickSignal interrupts KVM_RUN. Go's runtime handles SIGURG on every thread
// for its own preemption, and ignores those that it did not send.
const kickSignal = unix.SIGURG

// vcpu is one processor and the thread that runs it.
type vcpu struct {
	id  int
	vm  *VM
	kvm *kvm.VCPU
	tid atomic.Int32
	// xcr0 is the XCR0 of a vCPU that has not run; 0 if it was not set.
	xcr0 uint64
	// clockless says that it does not use kvm-clock and has not run yet.
	clockless bool
}

// run is the main function of the vCPU's thread. It waits until the gate is
// open and then enters the guest until the VM ends.
func (c *vcpu) run() {
	// The thread is never unlocked, so it ends with the goroutine: no other
	// goroutine gets a thread that is being kicked.
	runtime.LockOSThread()
	c.tid.Store(int32(unix.Gettid()))
	if !c.vm.gate.pass(c) {
		return
	}
	for {
		err := c.kvm.Run()
		switch {
		case errors.Is(err, unix.EINTR), errors.Is(err, unix.EAGAIN):
			if !c.vm.gate.pass(c) {
				return
			}
			continue
		case err != nil:
			c.vm.end(vmstate.Exit{Reason: vmstate.InternalError, Detail: fmt.Sprintf("vCPU %d: run: %v", c.id, err)})
		default:
			if exit, ended := c.handle(); ended {
				c.vm.end(exit)
			}
		}
	}
}

// kick makes the vCPU leave KVM_RUN, now or as soon as it enters it.
func (c *vcpu) kick() {
	c.kvm.SetImmediateExit(true)
	if tid := c.tid.Load(); tid != 0 {
		// ESRCH means that the thread has ended, so it has left the guest.
		_ = unix.Tgkill(os.Getpid(), int(tid), kickSignal)
	}
}

// handle serves one exit. It returns true if the exit ends the VM.
func (c *vcpu) handle() (vmstate.Exit, bool) {
	switch reason := c.kvm.ExitReason(); reason {
	case kvm.ExitIO:
		return c.vm.ports.access(c.kvm.IO())
	case kvm.ExitMMIO:
		if err := c.vm.windows.access(c.kvm.MMIO()); err != nil {
			return vmstate.Exit{Reason: vmstate.InternalError, Detail: fmt.Sprintf("vCPU %d: %v", c.id, err)}, true
		}
	case kvm.ExitIntr, kvm.ExitIRQWindow, kvm.ExitIOAPICEOI:
		// No action needed: KVM only informs user space.
	case kvm.ExitShutdown:
		return vmstate.Exit{Reason: vmstate.TripleFault, Detail: c.where()}, true
	case kvm.ExitInternalError:
		e := c.kvm.InternalError()
		return vmstate.Exit{Reason: vmstate.InternalError, Detail: fmt.Sprintf("KVM suberror %d %#x, %s", e.Suberror, e.Data, c.where())}, true
	case kvm.ExitFailEntry:
		return vmstate.Exit{Reason: vmstate.InternalError, Detail: fmt.Sprintf("VM entry failed, hardware reason %#x, %s", c.kvm.FailEntryReason(), c.where())}, true
	default:
		return vmstate.Exit{Reason: vmstate.InternalError, Detail: fmt.Sprintf("unexpected KVM exit %d, %s", reason, c.where())}, true
	}
	return vmstate.Exit{}, false
}

// where describes where the processor was, for the person who reads the exit.
func (c *vcpu) where() string {
	r, err := c.kvm.Regs()
	if err != nil {
		return fmt.Sprintf("vCPU %d", c.id)
	}
	return fmt.Sprintf("vCPU %d at %#x", c.id, r.RIP)
}
