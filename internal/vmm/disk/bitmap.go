package disk

import "math/bits"

const (
	chunkWords  = 128
	chunkBlocks = chunkWords * 64 // 32 MiB of disk in 1 KiB
)

type bitmapChunk [chunkWords]uint64

// fullChunk stands for each chunk whose bits are all set, so that the bitmap of
// a huge disk that the guest discards needs no memory. Bits are never cleared.
var fullChunk = func() *bitmapChunk {
	c := new(bitmapChunk)
	for i := range c {
		c[i] = ^uint64(0)
	}
	return c
}()

// bitmap is a set of block numbers. An empty chunk is nil.
type bitmap struct{ chunks []*bitmapChunk }

func newBitmap(blocks uint64) bitmap {
	return bitmap{make([]*bitmapChunk, (blocks+chunkBlocks-1)/chunkBlocks)}
}

// set adds the blocks [first, end).
func (b *bitmap) set(first, end uint64) {
	for first < end {
		c, at := first/chunkBlocks, first%chunkBlocks
		n := min(chunkBlocks-at, end-first)
		switch {
		case b.chunks[c] == fullChunk:
		case n == chunkBlocks:
			b.chunks[c] = fullChunk
		default:
			if b.chunks[c] == nil {
				b.chunks[c] = new(bitmapChunk)
			}
			b.chunks[c].set(at, at+n)
		}
		first += n
	}
}

func (c *bitmapChunk) set(first, end uint64) {
	for first < end {
		bit := first % 64
		n := min(64-bit, end-first)
		c[first/64] |= (^uint64(0) >> (64 - n)) << bit
		first += n
	}
}

// has reports whether block is in the set.
func (b *bitmap) has(block uint64) bool {
	c := b.chunks[block/chunkBlocks]
	return c != nil && c[block%chunkBlocks/64]>>(block%64)&1 != 0
}

// span finds how far, up to end, the blocks from first on are all in the set or
// all outside of it.
func (b *bitmap) span(first, end uint64) (in bool, next uint64) {
	in = b.has(first)
	for next = first; next < end; {
		c, at := b.chunks[next/chunkBlocks], next%chunkBlocks
		if c == nil || c == fullChunk {
			if in != (c == fullChunk) {
				break
			}
			next += chunkBlocks - at
			continue
		}
		word := c[at/64]
		if in {
			word = ^word
		}
		// word has a bit for each block of the other kind.
		word >>= at % 64
		if word != 0 {
			next += uint64(bits.TrailingZeros64(word))
			break
		}
		next += 64 - at%64
	}
	return in, min(next, end)
}

// add adds all blocks of another set of the same size.
func (b *bitmap) add(other *bitmap) {
	for i, c := range other.chunks {
		switch {
		case c == nil || b.chunks[i] == fullChunk:
		case c == fullChunk:
			b.chunks[i] = fullChunk
		default:
			if b.chunks[i] == nil {
				b.chunks[i] = new(bitmapChunk)
			}
			for k, word := range c {
				b.chunks[i][k] |= word
			}
		}
	}
}
