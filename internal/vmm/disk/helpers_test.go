package disk

import (
	"bytes"

	"agentrun.dev/internal/storage/layer"
	"agentrun.dev/internal/storage/layer/layertest"
)

// pages makes a layer of n pages filled with nines.
func pages(s layertest.Store, n int) layer.Ref {
	s.Helper()
	return s.Bytes(bytes.Repeat([]byte{9}, n*blockSize))
}

// ext is an extent in pages of a stack's first layer.
func ext(start, length uint64) layer.Extent {
	return layer.Extent{Start: start * blockSize, Length: length * blockSize}
}
