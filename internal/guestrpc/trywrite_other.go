//go:build !linux

package guestrpc

import "io"

// newNonblockingWriter has no portable implementation; frames that must not
// wait are then written by a goroutine.
func newNonblockingWriter(io.Writer) nonblockingWriter { return nil }
