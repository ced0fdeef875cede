package kvm

import (
	"errors"
	"fmt"
	"runtime"
	"unsafe"

	"golang.org/x/sys/unix"
)

// Events is struct kvm_vcpu_events: exceptions and interrupts in progress. Only
// KVM interprets it.
type Events [64]byte

// eventFlags is the offset of the flags in Events that say which parts are
// valid.
const eventFlags = 20

// None reports whether no event is in progress, as in a vCPU that has not run.
func (e Events) None() bool {
	clear(e[eventFlags : eventFlags+4])
	return e == Events{}
}

// DebugRegs is struct kvm_debugregs. Only KVM interprets it.
type DebugRegs [128]byte

// ResetDebugRegs is the initial value of a processor: DR6 and DR7 have bits that
// are always set.
var ResetDebugRegs = DebugRegs{
	32: 0xf0, 33: 0x0f, 34: 0xff, 35: 0xff,
	41: 0x04,
}

// MinXSaveSize is the size of struct kvm_xsave; larger states need XSAVE2.
const MinXSaveSize = 4096

// tscCtrl and tscOffset are the vCPU attribute KVM_VCPU_TSC_OFFSET.
const (
	tscCtrl   = 0
	tscOffset = 0
)

type deviceAttr struct {
	flags, group uint32
	attr         uint64
	addr         uint64
}

var (
	_ [24]byte = [unsafe.Sizeof(deviceAttr{})]byte{}

	reqGetEvents    = request(ioRead, 0x9f, unsafe.Sizeof(Events{}))
	reqSetEvents    = request(ioWrite, 0xa0, unsafe.Sizeof(Events{}))
	reqGetDebugRegs = request(ioRead, 0xa1, unsafe.Sizeof(DebugRegs{}))
	reqSetDebugRegs = request(ioWrite, 0xa2, unsafe.Sizeof(DebugRegs{}))
	reqSetTSCKHz    = request(ioNone, 0xa2, 0)
	reqGetXSave     = request(ioRead, 0xa4, MinXSaveSize)
	reqSetXSave     = request(ioWrite, 0xa5, MinXSaveSize)
	reqGetXCRs      = request(ioRead, 0xa6, unsafe.Sizeof(xcrs{}))
	reqClockCtrl    = request(ioNone, 0xad, 0)
	reqGetXSave2    = request(ioRead, 0xcf, MinXSaveSize)
	reqSetAttr      = request(ioWrite, 0xe1, unsafe.Sizeof(deviceAttr{}))
	reqGetAttr      = request(ioWrite, 0xe2, unsafe.Sizeof(deviceAttr{}))
)

// syncArea is the place from which the next run loads the registers that dirty
// names.
type syncArea struct {
	dirty uint64
	regs  Regs
	sregs Sregs
}

var _ [offSyncRegs - offDirtyRegs]byte = [unsafe.Offsetof(syncArea{}.regs)]byte{}

// staged returns the vCPU's area.
func (c *VCPU) staged() *syncArea {
	// Invariant: run is a live, page-aligned mapping of at least runAreaMin bytes.
	return (*syncArea)(unsafe.Pointer(&c.run[offDirtyRegs]))
}

// StagesRegs reports whether vCPUs of this VM have StageRegs.
func (v *VM) StagesRegs() bool {
	const all = syncRegs | syncSregs
	return v.sys.CheckExtension(CapSyncRegs)&all == all
}

// StageRegs makes the processor load these registers when it runs next, or when
// they are read. That saves two calls. No events may be in progress, and the
// processor must not wait for its start-up message.
func (c *VCPU) StageRegs(r Regs, s Sregs) {
	*c.staged() = syncArea{syncRegs | syncSregs, r, s}
}

// settle sets the staged registers now.
func (c *VCPU) settle() error {
	a := c.staged()
	if a.dirty == 0 {
		return nil
	}
	a.dirty = 0
	return errors.Join(c.SetSregs(a.sregs), c.SetRegs(a.regs))
}

// Events reads the events that are being delivered to the processor.
func (c *VCPU) Events() (e Events, err error) {
	return e, c.get("get vCPU events", reqGetEvents, unsafe.Pointer(&e))
}

// SetEvents sets saved events.
func (c *VCPU) SetEvents(e *Events) error {
	return c.get("set vCPU events", reqSetEvents, unsafe.Pointer(e))
}

// DebugRegs reads the debug registers.
func (c *VCPU) DebugRegs() (r DebugRegs, err error) {
	return r, c.get("get debug registers", reqGetDebugRegs, unsafe.Pointer(&r))
}

// SetDebugRegs writes the debug registers.
func (c *VCPU) SetDebugRegs(r *DebugRegs) error {
	return c.get("set debug registers", reqSetDebugRegs, unsafe.Pointer(r))
}

// XCR0 reads which parts of the extended state are enabled.
func (c *VCPU) XCR0() (uint64, error) {
	var x xcrs
	if err := c.get("get XCRs", reqGetXCRs, unsafe.Pointer(&x)); err != nil {
		return 0, err
	}
	for _, e := range x.entries[:min(x.n, uint32(len(x.entries)))] {
		if e.index == 0 {
			return e.value, nil
		}
	}
	return 0, errors.New("get XCRs: KVM did not name XCR0")
}

// XSaveSize is how large the extended state of a vCPU of this VM is.
func (v *VM) XSaveSize() int {
	return max(v.sys.CheckExtension(CapXSave2), MinXSaveSize)
}

// XSave reads the extended state into a buffer of XSaveSize bytes.
func (c *VCPU) XSave(b []byte) error {
	req := reqGetXSave
	if len(b) > MinXSaveSize {
		req = reqGetXSave2
	} else if len(b) < MinXSaveSize {
		return fmt.Errorf("get extended state: buffer of %d bytes, at least %d", len(b), MinXSaveSize)
	}
	return c.get("get extended state", req, unsafe.Pointer(unsafe.SliceData(b)))
}

// SetXSave writes the extended state, of XSaveSize bytes.
func (c *VCPU) SetXSave(b []byte) error {
	if len(b) < MinXSaveSize {
		return fmt.Errorf("set extended state: %d bytes, at least %d", len(b), MinXSaveSize)
	}
	return c.get("set extended state", reqSetXSave, unsafe.Pointer(unsafe.SliceData(b)))
}

// MSRs reads the values of the given registers. The result leaves out registers
// that this vCPU does not have.
func (c *VCPU) MSRs(indices []uint32) ([]MSREntry, error) {
	out := make([]MSREntry, 0, len(indices))
	for len(indices) > 0 {
		t := &msrTable{}
		for _, index := range indices[:min(len(indices), maxMSRs)] {
			t.entries[t.n].Index = index
			t.n++
		}
		n, err := ioctlPtr(c.fd, reqGetMSRs, unsafe.Pointer(t))
		if err != nil {
			return nil, fmt.Errorf("get MSRs: %w", err)
		}
		out = append(out, t.entries[:n]...)
		if n < int(t.n) {
			n++ // KVM stopped at a register that it does not know
		}
		indices = indices[n:]
	}
	return out, nil
}

// SetTSCFrequency sets the TSC frequency in kHz that the guest already knows.
func (c *VCPU) SetTSCFrequency(khz int) error {
	if _, err := ioctl(c.fd, reqSetTSCKHz, uintptr(khz)); err != nil {
		return fmt.Errorf("set TSC frequency of %d kHz: %w", khz, err)
	}
	return nil
}

// SetTSCOffset makes the guest's TSC the host's plus offset. Unlike a write of
// the TSC it is exact, so that all vCPUs of a VM agree. The error is
// unix.ENXIO on kernels before 5.16.
func (c *VCPU) SetTSCOffset(offset uint64) error {
	if err := c.tscOffset(reqSetAttr, &offset); err != nil {
		return fmt.Errorf("set TSC offset: %w", err)
	}
	return nil
}

// TSCOffset is the guest's TSC minus the host's.
func (c *VCPU) TSCOffset() (uint64, error) {
	var offset uint64
	if err := c.tscOffset(reqGetAttr, &offset); err != nil {
		return 0, fmt.Errorf("get TSC offset: %w", err)
	}
	return offset, nil
}

func (c *VCPU) tscOffset(req uintptr, value *uint64) error {
	var pin runtime.Pinner
	pin.Pin(value)
	defer pin.Unpin()
	a := deviceAttr{group: tscCtrl, attr: tscOffset, addr: uint64(uintptr(unsafe.Pointer(value)))}
	_, err := ioctlPtr(c.fd, req, unsafe.Pointer(&a))
	return err
}

// ClockStopped tells the guest's watchdogs that it stood still. For a guest
// that does not use kvm-clock it does nothing.
func (c *VCPU) ClockStopped() error {
	if _, err := ioctl(c.fd, reqClockCtrl, 0); err != nil && !errors.Is(err, unix.EINVAL) {
		return fmt.Errorf("mark the guest's clock as stopped: %w", err)
	}
	return nil
}
