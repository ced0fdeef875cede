package layer

import (
	"errors"
	"fmt"
	"os"

	"agentrun.dev/internal/guestmem"
	"golang.org/x/sys/unix"
)

// errReadOnly answers writes to a disk without a top.
var errReadOnly = errors.New("disk is read-only")

// Disk is a block device above an image. What was written is in a private
// sparse file, the top, at the same offsets. It is used by one goroutine at a
// time.
type Disk struct {
	below below
	top   *os.File // nil: read-only
	fd    int      // of top
	// present says which blocks of PageSize the top has. What the top holds
	// elsewhere (a write that failed half way) is never read.
	present bitmap
	// noPunch is set when the file system of the top turns out to have no holes.
	noPunch bool
	part    []guestmem.Range // reused by each request
	block   [PageSize]byte   // likewise
}

// NewDisk makes a disk of an image, its layers in the order of im.Layers and
// an empty top, which is made as long as the image; without a top the disk is
// read-only. The files belong to the disk from then on, unless it fails.
func NewDisk(im Image, layers []*os.File, top *os.File) (*Disk, error) {
	b, err := openBelow(im, layers)
	if err != nil {
		return nil, fmt.Errorf("make disk: %w", err)
	}
	d := &Disk{below: b, top: top}
	if top == nil {
		return d, nil
	}
	d.fd = int(top.Fd())
	if err := prepareTop(top, im.Size); err != nil {
		return nil, fmt.Errorf("make disk: top %s: %w", top.Name(), err)
	}
	d.present = newBitmap(im.Size / PageSize)
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

// Close closes the layers and the top.
func (d *Disk) Close() error {
	err := d.below.close()
	if d.top != nil {
		err = errors.Join(err, d.top.Close())
	}
	return err
}

func (d *Disk) Size() int64    { return int64(d.below.image.Size) }
func (d *Disk) ReadOnly() bool { return d.top == nil }

// check refuses what the block device does not send.
func (d *Disk) check(off, n int64) error {
	if off < 0 || n < 0 || n > d.Size() || off > d.Size()-n {
		return fmt.Errorf("disk range %#x+%#x: beyond the size %#x", off, n, d.Size())
	}
	return nil
}

// origin says where bytes of the disk come from.
type origin int

const (
	fromZeros origin = iota
	fromTop
	fromLayer
)

// segment finds the origin of the bytes at off and how far, at most to end,
// it holds. e is for fromLayer.
func (d *Disk) segment(off, end uint64) (from origin, e Extent, next uint64) {
	if d.top != nil {
		in, block := d.present.span(off/PageSize, (end+PageSize-1)/PageSize)
		end = min(end, block*PageSize)
		if in {
			return fromTop, Extent{}, end
		}
	}
	e, ok, next := d.below.image.Find(off)
	if !ok {
		return fromZeros, Extent{}, min(end, next)
	}
	return fromLayer, e, min(end, next)
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
		from, e, next := d.segment(at, uint64(off+total))
		d.part = rest.take(d.part[:0], int64(next-at))
		n, err := d.readSegment(mem, from, e, at)
		done += n
		if err != nil || n < int64(next-at) {
			return done, err
		}
	}
	return done, nil
}

// readSegment fills d.part from one origin.
func (d *Disk) readSegment(mem *guestmem.Memory, from origin, e Extent, off uint64) (int64, error) {
	switch from {
	case fromTop:
		return mem.ReadFile(d.fd, int64(off), d.part)
	case fromLayer:
		return mem.ReadFile(int(d.below.files[e.Layer].Fd()), int64(e.Offset+(off-e.Start)), d.part)
	}
	var n int64
	for _, r := range d.part {
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

// read fills p with the disk's content, for the host.
func (d *Disk) read(p []byte, off uint64) error {
	for len(p) > 0 {
		from, _, next := d.segment(off, off+uint64(len(p)))
		n := next - off
		if from == fromTop {
			if _, err := d.top.ReadAt(p[:n], int64(off)); err != nil {
				return fmt.Errorf("read disk at %#x: %w", off, err)
			}
		} else if err := d.below.read(p[:n], off); err != nil {
			return err
		}
		p, off = p[n:], next
	}
	return nil
}
