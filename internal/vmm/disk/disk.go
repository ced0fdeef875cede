// Package disk is the storage behind a guest's block device. Private files hold the
// blocks that the guest has written; a stack of immutable layers below them holds
// the rest. A disk can be frozen, so that its snapshot is written while the guest
// continues.
package disk

import (
	"errors"
	"fmt"
	"os"

	"agentrun.dev/internal/storage/extent"
	"agentrun.dev/internal/storage/layer"
	"agentrun.dev/internal/vmm/guestmem"
	"golang.org/x/sys/unix"
)

// blockSize is the granule of a disk's content: each block comes from a single
// file.
const blockSize = extent.PageSize

// errReadOnly answers writes to a disk without a top.
var errReadOnly = errors.New("disk is read-only")

// Disk is a block device above a stack. Private sparse files hold the written
// blocks; the newest file is the top. Only one goroutine may use a disk at a
// time.
type Disk struct {
	view // stages[0] is the top; a disk without stages is read-only
	// since holds the blocks of the files put aside that were written after
	// Rebase.
	since bitmap
	// merged says that the content of the newest file put aside is also in the
	// one before it.
	merged bool
	// noPunch is set when the file system of the top turns out not to support
	// holes.
	noPunch bool
	part    []guestmem.Range // reused by each request
	block   [blockSize]byte  // reused by each request
}

// New makes a disk of a stack, its layers in the order of stack.Layers and an
// empty top, which it extends to the size of the stack. Without a top the disk
// is read-only. If New succeeds, the files belong to the disk.
func New(stack layer.Stack, layers []*os.File, top *os.File) (*Disk, error) {
	b, err := layer.OpenStack(stack, layers)
	if err != nil {
		return nil, fmt.Errorf("make disk: %w", err)
	}
	d := &Disk{view: view{below: b}}
	if top == nil {
		return d, nil
	}
	if err := prepareTop(top, stack.Size); err != nil {
		return nil, fmt.Errorf("make disk: top %s: %w", top.Name(), err)
	}
	d.stages = []*stage{newStage(top, stack.Size)}
	d.since = newBitmap(stack.Size / blockSize)
	return d, nil
}

func prepareTop(top *os.File, size uint64) error {
	info, err := top.Stat()
	if err != nil {
		return err
	}
	flags, err := unix.FcntlInt(top.Fd(), unix.F_GETFL, 0)
	switch {
	case err != nil:
		return err
	case !info.Mode().IsRegular():
		return errors.New("not a regular file")
	case flags&unix.O_ACCMODE != unix.O_RDWR || flags&unix.O_APPEND != 0:
		return errors.New("not opened for reading and writing at any place")
	case uint64(info.Size()) == size:
		return nil
	}
	return top.Truncate(int64(size))
}

// Close closes the layers, the top and the files put aside.
func (d *Disk) Close() error {
	err := d.below.Close()
	for _, s := range d.stages {
		err = errors.Join(err, s.file.Close())
	}
	return err
}

func (d *Disk) Size() int64    { return int64(d.below.Stack.Size) }
func (d *Disk) ReadOnly() bool { return len(d.stages) == 0 }

// check refuses ranges beyond the end of the disk. The block device does not
// send them.
func (d *Disk) check(off, n int64) error {
	if off < 0 || n < 0 || n > d.Size() || off > d.Size()-n {
		return fmt.Errorf("disk range %#x+%#x: beyond the size %#x", off, n, d.Size())
	}
	return nil
}

func (d *Disk) ReadAt(mem *guestmem.Memory, ranges []guestmem.Range, off int64) (int64, error) {
	total := length(ranges)
	if err := d.check(off, total); err != nil {
		return 0, err
	}
	rest := cursor{ranges: ranges}
	var done int64
	for done < total {
		at := uint64(off + done)
		s, e, in, next := d.segment(at, uint64(off+total))
		d.part = rest.take(d.part[:0], int64(next-at))
		var n int64
		var err error
		switch {
		case s != nil:
			n, err = mem.ReadFile(s.fd, int64(at), d.part)
		case in:
			n, err = mem.ReadFile(int(d.below.Files[e.Layer].Fd()), int64(e.Offset+(at-e.Start)), d.part)
		default:
			n, err = zeroRanges(mem, d.part)
		}
		done += n
		if err != nil || n < int64(next-at) {
			return done, err
		}
	}
	return done, nil
}

func zeroRanges(mem *guestmem.Memory, ranges []guestmem.Range) (n int64, err error) {
	for _, r := range ranges {
		if err := mem.Zero(r.GPA, uint64(r.Len)); err != nil {
			return n, err
		}
		n += int64(r.Len)
	}
	return n, nil
}

// length is the sum of the ranges' lengths.
func length(ranges []guestmem.Range) int64 {
	var n int64
	for _, r := range ranges {
		n += int64(r.Len)
	}
	return n
}

// cursor is a place in a list of ranges.
type cursor struct {
	ranges []guestmem.Range
	done   uint32 // of the first range
}

// take appends the next n bytes to part.
func (c *cursor) take(part []guestmem.Range, n int64) []guestmem.Range {
	for n > 0 {
		r := c.ranges[0]
		r.GPA, r.Len = r.GPA+uint64(c.done), r.Len-c.done
		if int64(r.Len) > n {
			r.Len = uint32(n)
			c.done += r.Len
		} else {
			c.ranges, c.done = c.ranges[1:], 0
		}
		part = append(part, r)
		n -= int64(r.Len)
	}
	return part
}
