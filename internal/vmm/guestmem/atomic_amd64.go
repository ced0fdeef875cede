package guestmem

import "unsafe"

// load16 is an atomic load; on amd64 every aligned load has acquire ordering.
//
//go:noescape
func load16(p *uint16) uint16

// store16 is an atomic exchange whose old value is dropped: a store with a
// full barrier.
//
//go:noescape
func store16(p *uint16, v uint16)

// pointerTo16 views two checked, 2-aligned bytes of a mapping as a uint16.
// Invariant: b is inside a live mapping, which Memory.slice has checked.
func pointerTo16(b []byte) *uint16 { return (*uint16)(unsafe.Pointer(unsafe.SliceData(b))) }

// addressOf returns the address of a mapping. The garbage collector neither
// moves nor frees it, because mmap made it.
func addressOf(b []byte) uintptr { return uintptr(unsafe.Pointer(unsafe.SliceData(b))) }
