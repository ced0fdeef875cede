package vmm

import (
	"crypto/rand"
	"fmt"
)

// generationLen is the size of a VMGENID.
const generationLen = 16

// RenewGeneration gives the guest a new generation id and notifies it: a
// guest that was copied learns that it is one of several and reseeds.
func (vm *VM) RenewGeneration() error {
	vm.mu.Lock()
	defer vm.mu.Unlock()
	if vm.closed {
		return fmt.Errorf("renew generation id: %w", ErrEnded)
	}
	return vm.renewGeneration()
}

func (vm *VM) renewGeneration() error {
	if err := vm.writeGeneration(); err != nil {
		return err
	}
	if err := vm.ioapic.raise(eventGSI); err != nil {
		return fmt.Errorf("announce generation id: %w", err)
	}
	return nil
}

func (vm *VM) writeGeneration() error {
	id := make([]byte, generationLen)
	if _, err := rand.Read(id); err != nil {
		return fmt.Errorf("make a generation id: %w", err)
	}
	if err := vm.mem.Write(generationAddr, id); err != nil {
		return fmt.Errorf("write generation id: %w", err)
	}
	return nil
}
