package stack

import (
	"bytes"
	"testing"

	"gvisor.dev/gvisor/pkg/buffer"
)

// TestTake: netstack gets the whole packet. The memory of the packet's headers
// contains nothing else, because netstack copies all of it.
func TestTake(t *testing.T) {
	const headers = 52
	for _, size := range []int{headers, headers + 1, 1500, keepPacket - 1, keepPacket, maxPacket} {
		in := newInput()
		packet := payload(3, size)
		copy(in.packets[2].AsSlice(), packet)
		read := &in.packets[2].AsSlice()[0]
		all := in.take(2, headers, size)
		if !bytes.Equal(all.Flatten(), packet) {
			t.Errorf("%d bytes: others came", size)
		}
		var sizes []int
		all.Apply(func(v *buffer.View) { sizes = append(sizes, v.Size()) })
		if len(sizes) != min(2, size-headers+1) || sizes[0] != headers {
			t.Errorf("%d bytes: they are in parts of %d", size, sizes)
		}
		kept := size >= keepPacket
		if now := &in.packets[2].AsSlice()[0]; (now != read) != kept {
			t.Errorf("%d bytes: the memory was given away: %v, want %v", size, now != read, kept)
		}
		all.Release()
		in.release()
	}
}
