package main

import "unsafe"

// pinned keeps what system calls are given addresses of; the heap does not
// move.
var pinned []*byte

func pin(p *byte) uintptr {
	pinned = append(pinned, p)
	return uintptr(unsafe.Pointer(p))
}
