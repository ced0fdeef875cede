//go:build !linux

package guestrpc

import (
	"errors"
	"io"
)

// socketWriter has no portable implementation. Frames that must not wait are then
// written by a goroutine.
type socketWriter struct{}

func (*socketWriter) init(io.Writer) bool { return false }

func (*socketWriter) tryWrite(_, _ []byte) (int, error) { return 0, errors.ErrUnsupported }
