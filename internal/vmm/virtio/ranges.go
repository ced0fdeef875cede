package virtio

import "agentrun.dev/internal/vmm/guestmem"

// The functions below treat a list of ranges as one string of bytes, because a
// device must not depend on how the driver cut a buffer into descriptors
// (§2.7.4.1).

// size is the number of bytes in the ranges; Queue.Pop bounds it to 32 bits.
func size(ranges []guestmem.Range) uint64 {
	var n uint64
	for _, r := range ranges {
		n += uint64(r.Len)
	}
	return n
}

// gather copies the first bytes of the ranges into p and returns their number.
func gather(mem *guestmem.Memory, ranges []guestmem.Range, p []byte) (int, error) {
	n := 0
	for _, r := range ranges {
		if n == len(p) {
			break
		}
		k := min(int(r.Len), len(p)-n)
		if err := mem.Read(r.GPA, p[n:n+k]); err != nil {
			return n, err
		}
		n += k
	}
	return n, nil
}

// scatter copies p to the start of the ranges and returns the number of bytes
// copied.
func scatter(mem *guestmem.Memory, ranges []guestmem.Range, p []byte) (int, error) {
	n := 0
	for _, r := range ranges {
		if n == len(p) {
			break
		}
		k := min(int(r.Len), len(p)-n)
		if err := mem.Write(r.GPA, p[n:n+k]); err != nil {
			return n, err
		}
		n += k
	}
	return n, nil
}

// skip drops the first n bytes, in place.
func skip(ranges []guestmem.Range, n uint64) []guestmem.Range {
	for len(ranges) > 0 && n >= uint64(ranges[0].Len) {
		n -= uint64(ranges[0].Len)
		ranges = ranges[1:]
	}
	if len(ranges) > 0 {
		ranges[0].GPA += n
		ranges[0].Len -= uint32(n)
	}
	return ranges
}

// cutLast drops the last byte, in place, and returns its address. The ranges
// hold at least one byte; Queue.Pop returns no empty ranges.
func cutLast(ranges []guestmem.Range) (uint64, []guestmem.Range) {
	last := &ranges[len(ranges)-1]
	last.Len--
	addr := last.GPA + uint64(last.Len)
	if last.Len == 0 {
		ranges = ranges[:len(ranges)-1]
	}
	return addr, ranges
}
