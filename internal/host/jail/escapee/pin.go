package main

import (
	"unsafe"

	"golang.org/x/sys/unix"
)

// pinned keeps the memory alive whose address is passed to system calls. It
// does not move, because Go's heap does not move.
var pinned []*byte

func pin(p *byte) uintptr {
	pinned = append(pinned, p)
	return uintptr(unsafe.Pointer(p))
}

// page is the address of an aligned page of memory.
func page() uintptr {
	const size = 4096
	return (pin(&make([]byte, 2*size)[0]) + size - 1) &^ (size - 1)
}

// limits is the address of a struct rlimit.
func limits(bytes uint64) uintptr {
	l := unix.Rlimit{Cur: bytes, Max: bytes}
	return pin(&append([]byte(nil), unsafe.Slice((*byte)(unsafe.Pointer(&l)), unsafe.Sizeof(l))...)[0])
}
