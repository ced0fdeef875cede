package vmm

import (
	"crypto/rand"
	"fmt"
)

// generationIDLen is the size of a VMGENID.
const generationIDLen = 16

// RenewGenerationID gives the guest a new generation id and notifies it: a
// guest that was copied learns that it is one of several and reseeds.
func (vm *VM) RenewGenerationID() error {
	vm.mu.Lock()
	defer vm.mu.Unlock()
	if vm.closed {
		return fmt.Errorf("renew generation id: %w", ErrEnded)
	}
	if err := vm.writeGenerationID(); err != nil {
		return err
	}
	return vm.announceGenerationID()
}

// ChangeGenerationID gives a machine that stands still a new generation id, for
// what it draws after a copy of it was taken: whoever has the copy could
// predict that. It is called after the capture's Begin, so that the copy does
// not have the id. The guest's kernel compares the id whenever it draws
// (guest/kernel/patches). It is not interrupted: the source is no copy, and
// would own more pages by it.
func (vm *VM) ChangeGenerationID() error {
	vm.mu.Lock()
	defer vm.mu.Unlock()
	if !vm.paused || vm.closed {
		return fmt.Errorf("change generation id: %w", errNotPaused)
	}
	return vm.writeGenerationID()
}

// announceGenerationID raises the ACPI event of VMGENID.
func (vm *VM) announceGenerationID() error {
	if err := vm.ioapic.raise(eventGSI); err != nil {
		return fmt.Errorf("announce generation id: %w", err)
	}
	return nil
}

// writeGenerationID puts a new id into the guest's memory. No vCPU runs
// meanwhile, or the guest is told after it, so that none acts on half an id.
// The id is drawn when it is written, never ahead: no two machines have it.
func (vm *VM) writeGenerationID() error {
	id := make([]byte, generationIDLen)
	if _, err := rand.Read(id); err != nil {
		return fmt.Errorf("make a generation id: %w", err)
	}
	if err := vm.mem.Write(generationIDAddr, id); err != nil {
		return fmt.Errorf("write generation id: %w", err)
	}
	return nil
}
