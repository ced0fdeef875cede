package vmm

import (
	"fmt"
	"time"

	"agentrun.dev/internal/vmm/guestmem"
)

// Capture is a machine's memory as it was at one instant, being stored.
type Capture struct {
	*guestmem.Capture
	vm *VM
}

// NewCapture prepares a capture while the guest runs. It waits for the one
// before to be closed, and keeps the VM's memory until it is closed itself.
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

// Arm does ahead what can be done while the guest runs; still is VM.Still, or
// does what that does. It returns for how long the guest stood still.
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

// Close ends the capture: nothing is protected any more.
func (c *Capture) Close() error {
	err := c.Capture.Close()
	c.vm.capture.Store(nil)
	c.vm.capturing.Unlock()
	if err != nil {
		return fmt.Errorf("end capture: %w", err)
	}
	return nil
}

// Still does something while the guest stands still, and says for how long it
// stood: from when a processor has left the guest until all are about to enter it
// again. A guest that was paused before stays so, and 0 is returned.
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
