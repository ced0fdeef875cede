package guestmem

import (
	"os"
	"runtime"
	"slices"
	"unsafe"

	"agentrun.dev/internal/storage/extent"
	"golang.org/x/sys/unix"
)

// Of linux/uapi/linux/fs.h, since Linux 6.7.
const (
	pagemapScan   = 0xc060_6610 // PAGEMAP_SCAN
	pageIsFile    = 1 << 2      // PAGE_IS_FILE
	pageIsPresent = 1 << 3      // PAGE_IS_PRESENT
	pageIsSwapped = 1 << 4      // PAGE_IS_SWAPPED, also of a marker
)

type (
	// pageScan is struct pm_scan_arg.
	pageScan struct {
		size, flags, start, end, walkEnd    uint64
		regions, length, maxPages           uint64
		inverted, mask, anyOf, returnedMask uint64
	}
	// pageRegion is struct page_region.
	pageRegion struct{ start, end, categories uint64 }
)

// The kernel's ABI; a wrong size does not compile.
var (
	_ [96]byte = [unsafe.Sizeof(pageScan{})]byte{}
	_ [24]byte = [unsafe.Sizeof(pageRegion{})]byte{}
)

// firstPage returns the offset in b of the first page that is present or
// swapped out, or len(b) if all of b is empty.
func firstPage(pagemap *os.File, b []byte) (int, error) {
	var pin runtime.Pinner
	defer pin.Unpin()
	r := new(pageRegion)
	pin.Pin(r)
	start := uint64(addressOf(b))
	const there = pageIsPresent | pageIsSwapped
	a := pageScan{
		start: start, end: start + uint64(len(b)), regions: uint64(uintptr(unsafe.Pointer(r))), length: 1, maxPages: 1,
		anyOf: there, returnedMask: there,
	}
	n, err := a.scan(pagemap)
	if err != nil {
		return 0, err
	}
	if n == 0 {
		return len(b), nil
	}
	return int(r.start - start), nil
}

// scan returns how many regions it found. If regions has no room for more, walkEnd is
// where to continue.
// Invariant: the memory that regions points to is pinned.
func (a *pageScan) scan(pagemap *os.File) (int, error) {
	a.size = uint64(unsafe.Sizeof(*a))
	for {
		n, _, errno := unix.Syscall(unix.SYS_IOCTL, pagemap.Fd(), pagemapScan, uintptr(unsafe.Pointer(a)))
		switch errno {
		case unix.EINTR:
		case 0:
			return int(n), nil
		default:
			return 0, errno
		}
	}
}

// emptyPieces marks the empty pieces of anonymous RAM, each the size of a huge page.
// Protecting absent pages would allocate a page table, and with it the piece would get small
// pages for ever. So empty pieces are not protected. A page that is first touched there after
// the instant was zeros at the instant.
type emptyPieces []bool

// has reports whether a block is in an empty piece.
func (p emptyPieces) has(block uint64) bool { return p != nil && p[block/hugeBlocks] }

// strikeFilled removes the mark from pieces that have pages by now.
func (c *Capture) strikeFilled() {
	if !c.look(c.empty) {
		c.empty = nil
	}
}

// findEmpty finds the empty pieces for Arm. It returns nil if the kernel cannot
// list pages.
func (c *Capture) findEmpty() emptyPieces {
	empty := make(emptyPieces, (uint64(len(c.blocks))+hugeBlocks-1)/hugeBlocks)
	for i := range empty {
		s := extent.Run{Start: uint64(i) * hugeSize, Length: hugeSize}
		// A partial last piece is never empty.
		empty[i] = s.End() <= c.m.size && !slices.ContainsFunc(c.layout(s), func(p mapping) bool { return p.source != 0 })
	}
	if !c.look(empty) {
		return nil
	}
	return empty
}

// look removes the mark from pieces that have pages. It returns false if the kernel
// cannot list pages.
func (c *Capture) look(empty emptyPieces) bool {
	for i := 0; i < len(empty); i++ {
		n := 0
		for i+n < len(empty) && empty[i+n] {
			n++
		}
		if n == 0 {
			continue
		}
		piece := extent.Run{Start: uint64(i) * hugeSize, Length: uint64(n) * hugeSize}
		err := c.m.pieces(piece, func(r *Region, offset uint64, s extent.Run) error {
			for at := uint64(0); at < s.Length; {
				k, err := firstPage(c.pagemap, r.bytes[offset+at:offset+s.Length])
				if err != nil || at+uint64(k) == s.Length {
					return err
				}
				full := (s.Start + at + uint64(k)) / hugeSize
				empty[full] = false
				at = (full+1)*hugeSize - s.Start
			}
			return nil
		})
		if err != nil {
			return false
		}
		i += n
	}
	return true
}
