package guestmem

import (
	"errors"
	"fmt"
	"os"
	"runtime"
	"time"
	"unsafe"

	"agentrun.dev/internal/storage/extent"
	"golang.org/x/sys/unix"
)

// Which pages are the process's own
//
// The layer of a capture has to hold the pages that were the process's own at the
// instant: private pages, as opposed to pages of a file and absent pages. The page
// map tells them apart only for pages that are present. An entry that is not present,
// that does not say "file" and that is write-protected is one of three:
//
//   - a marker: the kernel leaves one where it protects an absent page;
//   - an own page that is swapped out;
//   - an own page that the kernel is moving (compaction, NUMA balancing, a huge page
//     that is being split). Such an entry keeps the protection of the page, and
//     becomes protected if the page is protected meanwhile.
//
// Markers exist only in protected memory. So each block is looked at before it is
// protected: at that time an entry that says "swapped" and not "file" is an own page
// for certain. block.before records the own pages of that look. For a block that is
// not released these rules decide (isOwn):
//
//   - not protected: the page was first touched after the instant. The kernel keeps the
//     protection of a page that it swaps out, moves or splits, and the host discards
//     pages only of blocks that it has released. Only a page that is merged with others
//     (KSM) loses it: package lockdown forbids that.
//   - present: the file bit decides. (If a vCPU waits to write to a page of a file, it
//     has its copy already, which counts as own. Storing too much is harmless.)
//   - swapped, and of a file: not own. The kernel is moving a page of the file.
//   - swapped, and own before: own.
//   - swapped, not own before, and the block is known: a marker, not own.
//   - swapped, and the block is not known: isOwn reads the page, which waits until the
//     kernel has moved it, and looks again. If it still cannot tell, the page is own.
//
// A block is known if no page of it became own between the look and the protection.
// After that no page can become own until the block is released, because the
// capture notices a write first.
//
//   - Begin looks and protects while the guest stands still: the block is known.
//     Looking has a budget of time there (lookTime); a block beyond it is not known.
//   - Arm looks and protects 4 MiB at a time while the guest runs and host writes wait
//     (Capture.writers). In the microseconds between the two a vCPU may write to a page
//     for the first time. The kernel cannot look and protect at once, so Arm looks again
//     when all blocks are protected (lookAgain). If a page is present and own by now, but
//     was not before, it is added to before, and the blocks of its 2 MiB are not known
//     any more: other pages there may have been written in that time, too. List also
//     sees such a page as soon as the kernel has moved it. One case remains: a vCPU wrote
//     to a page for the first time in these microseconds and not again until the instant
//     (which would release the block), it is the only such page of its 2 MiB, and the
//     kernel began to move it at once and is still moving it when List comes.
//   - A block that was written to after that was released. Arm protects it once more, and
//     then Begin, each after a new look.
//
// Kernels before 6.4 leave no markers in anonymous memory: there a page that is not
// present, but protected, is own. Mappings of files have markers on all kernels that
// can protect them.
//
// Close removes all protection, and with it all markers, so the next capture meets
// no old ones. It would take a marker for an own page, and store too much.

// Flags of an entry of /proc/self/pagemap (Documentation/admin-guide/mm/pagemap.rst).
const (
	pagemapProtected = 1 << 57
	pagemapFile      = 1 << 61
	pagemapSwapped   = 1 << 62
	pagemapPresent   = 1 << 63
	pagemapEntry     = 8
)

// lookTime is how long Begin looks at blocks before it protects them; the guest
// stands still meanwhile. The remaining blocks are looked at after the pause. That
// needs reads of their pages, which take a hundred times as long.
const lookTime = 150 * time.Microsecond

// lookBlocks is how many blocks Begin looks at before it looks at the clock.
const lookBlocks = hugeBlocks / 2

// entries reads the page map of part of a region.
func (c *Capture) entries(b []byte, into []uint64) error { return readEntries(c.pagemap, b, into) }

func readEntries(pagemap *os.File, b []byte, into []uint64) error {
	into = into[:len(b)/PageSize]
	// Invariant: the bytes are those of into.
	raw := unsafe.Slice((*byte)(unsafe.Pointer(unsafe.SliceData(into))), len(into)*pagemapEntry)
	if _, err := pagemap.ReadAt(raw, int64(addressOf(b)/PageSize*pagemapEntry)); err != nil {
		return fmt.Errorf("read the page map: %w", err)
	}
	return nil
}

// isOwn decides from its entry whether page k of a block was the process's own at the
// instant. The block must not change meanwhile. b is nil without userfaultfd: then no
// page is protected, and there are no markers.
func (c *Capture) isOwn(b *block, k int, entry uint64, page []byte) (bool, error) {
	switch {
	case b != nil && entry&pagemapProtected == 0:
		return false, nil // it was first touched later, or is still absent
	case entry&(pagemapPresent|pagemapSwapped) == 0 || entry&pagemapFile != 0:
		return false, nil
	case entry&pagemapPresent != 0 || b == nil || b.before>>k&1 != 0:
		return true, nil
	case b.known:
		return false, nil // a marker
	}
	_ = isZero(page) // waits until the kernel has moved the page; swaps it in if necessary
	var again [1]uint64
	if err := c.entries(page, again[:]); err != nil {
		return false, err
	}
	return again[0]&pagemapFile == 0, nil
}

// protected returns which pages of a block are still protected. For a block that is
// not released, the other pages were absent at the instant.
func (c *Capture) protected(entry []uint64) (still uint16) {
	for k, e := range entry {
		if e&pagemapProtected != 0 {
			still |= 1 << k
		}
	}
	return still
}

// ownOf returns which pages of a block were the process's own at the instant. The
// block must not change meanwhile.
func (c *Capture) ownOf(b *block, bytes []byte, entry []uint64) (own uint16, err error) {
	if b != nil && !b.known {
		if err := c.bringIn(b, bytes, entry); err != nil {
			return 0, err
		}
	}
	for k, e := range entry {
		is, err := c.isOwn(b, k, e, bytes[k*PageSize:(k+1)*PageSize])
		if err != nil {
			return 0, err
		}
		if is {
			own |= 1 << k
		}
	}
	return own, nil
}

// bringIn reads the pages of a block that isOwn would have to read, all at once, and
// then reads their entries again. Reading them one by one takes many times as long.
func (c *Capture) bringIn(b *block, bytes []byte, entry []uint64) error {
	var unsure uint16
	for k, e := range entry {
		const flags = pagemapProtected | pagemapFile | pagemapSwapped | pagemapPresent
		if e&flags == pagemapProtected|pagemapSwapped && b.before>>k&1 == 0 {
			unsure |= 1 << k
		}
	}
	if unsure == 0 {
		return nil
	}
	_ = eachRun(unsure, func(first, n int) error {
		// isOwn itself reads the pages that this misses.
		_ = unix.Madvise(bytes[first*PageSize:(first+n)*PageSize], unix.MADV_POPULATE_READ)
		return nil
	})
	return c.entries(bytes, entry)
}

// lookBefore notes which pages of n blocks are own, just before they are protected.
// No page of them is protected yet.
func (c *Capture) lookBefore(i, n uint64) error {
	for k := i; k < i+n; k++ {
		c.blocks[k].before, c.blocks[k].known = 0, true
	}
	return c.eachOwn(c.runOf(i, n), pageIsPresent|pageIsSwapped, func(k uint64, pages uint16) { c.blocks[k].before |= pages })
}

// lookAgain looks for pages that became own while Arm was about to protect them.
func (c *Capture) lookAgain(armed []extent.Run) error {
	grown := make(map[uint64]bool) // pieces of a huge page
	for _, blocks := range armed {
		err := c.eachOwn(c.runOf(blocks.Start, blocks.Length), pageIsPresent, func(k uint64, pages uint16) {
			b := &c.blocks[k]
			b.mu.Lock()
			defer b.mu.Unlock()
			if !b.released.Load() && pages&^b.before != 0 {
				b.before |= pages
				grown[k/hugeBlocks] = true
			}
		})
		if err != nil {
			return err
		}
	}
	for piece := range grown {
		first := piece * hugeBlocks
		for k := first; k < min(first+hugeBlocks, uint64(len(c.blocks))); k++ {
			c.blocks[k].mu.Lock()
			c.blocks[k].known = false
			c.blocks[k].mu.Unlock()
		}
	}
	return nil
}

// lookStill is lookBefore for Begin, while the guest waits. Blocks beyond the time
// budget are not known. If such a block was armed before, the pages that were own then
// are likely to be own still.
func (c *Capture) lookStill(i, n uint64) error {
	for end := i + n; i < end; {
		k := min(lookBlocks, end-i)
		switch {
		case !c.leavesMarkers(c.runOf(i, k)):
			c.allOwn(i, k)
		case c.lookLeft <= 0:
			c.unknown(i, k)
		default:
			began := time.Now()
			if err := c.lookBefore(i, k); err != nil {
				return err
			}
			c.lookLeft -= time.Since(began)
		}
		i += k
	}
	return nil
}

// leavesMarkers reports whether protecting a run may leave markers in it.
func (c *Capture) leavesMarkers(s extent.Run) bool {
	if c.markers {
		return true
	}
	for _, p := range c.layout(s) {
		if p.source != 0 {
			return true
		}
	}
	return false
}

// allOwn notes that in n blocks all pages that are protected, but not present,
// are own.
func (c *Capture) allOwn(i, n uint64) {
	for k := i; k < i+n; k++ {
		c.blocks[k].before, c.blocks[k].known = ^uint16(0), true
	}
}

func (c *Capture) unknown(i, n uint64) {
	for k := i; k < i+n; k++ {
		c.blocks[k].known = false
	}
}

// eachOwn calls do for each block in a run with the pages that are in one of the
// given states (pageIsPresent, pageIsSwapped) and do not belong to a file. It may
// call do for a block more than once.
func (c *Capture) eachOwn(s extent.Run, states uint64, do func(block uint64, pages uint16)) error {
	return c.m.pieces(s, func(r *Region, offset uint64, piece extent.Run) error {
		b := r.bytes[offset : offset+piece.Length]
		if !c.cannotScan {
			err := c.scanOwn(b, piece.Start, states, do)
			if !errors.Is(err, unix.ENOTTY) && !errors.Is(err, unix.EINVAL) {
				return err
			}
			c.cannotScan = true
		}
		return c.readOwn(b, piece.Start, states, do)
	})
}

// readOwn is eachOwn by reading the page map, which has an entry for each page.
func (c *Capture) readOwn(b []byte, start, states uint64, do func(block uint64, pages uint16)) error {
	var flags uint64
	if states&pageIsPresent != 0 {
		flags |= pagemapPresent
	}
	if states&pageIsSwapped != 0 {
		flags |= pagemapSwapped
	}
	if c.lookEntries == nil {
		c.lookEntries = make([]uint64, stepBlocks*blockPages)
	}
	for len(b) > 0 {
		chunk := b[:min(len(b), len(c.lookEntries)*PageSize)]
		entry := c.lookEntries[:len(chunk)/PageSize]
		if err := c.entries(chunk, entry); err != nil {
			return err
		}
		for k := 0; k < len(entry); k += blockPages {
			var pages uint16
			for j, e := range entry[k:min(len(entry), k+blockPages)] {
				if e&flags != 0 && e&pagemapFile == 0 {
					pages |= 1 << j
				}
			}
			if pages != 0 {
				do(start/blockSize+uint64(k)/blockPages, pages)
			}
		}
		b, start = b[len(chunk):], start+uint64(len(chunk))
	}
	return nil
}

// scanOwn is eachOwn by PAGEMAP_SCAN, which skips pages in other states. That is
// several times as fast if most pages are skipped.
func (c *Capture) scanOwn(b []byte, start, states uint64, do func(block uint64, pages uint16)) error {
	if c.lookRegions == nil {
		c.lookRegions = make([]pageRegion, stepBlocks*blockPages/2)
	}
	var pin runtime.Pinner
	defer pin.Unpin()
	pin.Pin(unsafe.SliceData(c.lookRegions))
	address := uint64(addressOf(b))
	a := pageScan{
		start: address, end: address + uint64(len(b)),
		regions: uint64(uintptr(unsafe.Pointer(unsafe.SliceData(c.lookRegions)))), length: uint64(len(c.lookRegions)),
		inverted: pageIsFile, mask: pageIsFile, anyOf: states, returnedMask: states,
	}
	for a.start < a.end {
		n, err := a.scan(c.pagemap)
		if err != nil {
			return err
		}
		for _, r := range c.lookRegions[:n] {
			from, to := start+r.start-address, start+r.end-address
			for from < to {
				i := from / blockSize
				end := min(to, (i+1)*blockSize)
				do(i, runMask(int(from%blockSize/PageSize), int((end-from)/PageSize)))
				from = end
			}
		}
		a.start = a.walkEnd
	}
	return nil
}
