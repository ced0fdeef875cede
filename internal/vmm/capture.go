package vmm

import (
	"fmt"
	"time"

	"agentrun.dev/internal/vmm/guestmem"
)

// Capture stores a machine's memory as of one instant.
type Capture struct {
	*guestmem.Capture
	vm *VM
}

// NewCapture prepares a capture while the guest runs. It waits until the
// previous capture is closed. The VM's memory stays mapped until this capture
// is closed.
func (vm *VM) NewCapture(cfg guestmem.CaptureConfig) (*Capture, error) {
	vm.capturing.Lock()
	vm.mu.Lock()
	defer vm.mu.Unlock()
	if vm.closed || !vm.started {
		vm.capturing.Unlock()
		return nil, fmt.Errorf("capture: %w", ErrEnded)
	}
	c := &Capture{vm.mem.NewCapture(cfg), vm}
	vm.capture.Store(c)
	return c, nil
}

// Arm does the part of the work that is possible while the guest runs. still is
// VM.Still or a wrapper of it. Arm returns how long the guest stood still.
func (c *Capture) Arm(still func(do func() error) (time.Duration, error)) (time.Duration, error) {
	if !c.Early() {
		return 0, nil
	}
	stood, err := still(c.Announce)
	if err != nil {
		return stood, err
	}
	if err := c.Capture.Arm(); err != nil {
		return stood, err
	}
	c.Expect(generationIDAddr, generationIDLen) // ChangeGenerationID
	return stood, nil
}

// Close ends the capture and removes all protection.
func (c *Capture) Close() error {
	err := c.Capture.Close()
	c.vm.capture.Store(nil)
	c.vm.capturing.Unlock()
	if err != nil {
		return fmt.Errorf("end capture: %w", err)
	}
	return nil
}

// Still runs do while the guest stands still. It returns how long the guest
// stood: from the moment when the first processor has left the guest until all
// are about to enter it again. If the guest was already paused, it stays paused,
// and Still returns 0.
func (vm *VM) Still(do func() error) (time.Duration, error) {
	if vm.Paused() {
		return 0, do()
	}
	if err := vm.Pause(); err != nil {
		return 0, err
	}
	err := do()
	if resumeErr := vm.Resume(); resumeErr != nil {
		return 0, resumeErr
	}
	return vm.gate.stood(), err
}
