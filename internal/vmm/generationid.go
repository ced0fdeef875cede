package vmm

import (
	"crypto/rand"
	"fmt"
)

// generationIDLen is the size of a VMGENID.
const generationIDLen = 16

// RenewGenerationID gives the guest a new generation id and notifies it: a
// guest that was copied learns that copies exist and reseeds its random number
// generator.
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

// ChangeGenerationID gives a paused machine a new generation id after a copy of
// it was taken. Without it, the holder of the copy could predict the random
// numbers that the source draws next. It is called after the capture's Begin,
// so that the copy does not contain the id. The guest's kernel compares the id
// whenever it draws (guest/kernel/patches). The guest is not interrupted: the
// source is not a copy, and the interrupt would make it write to more pages.
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

// writeGenerationID writes a new id into the guest's memory. Either no vCPU
// runs meanwhile, or the guest is notified afterwards, so that it never acts on
// half an id. The id is drawn only when it is written, so no two machines share
// one.
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
