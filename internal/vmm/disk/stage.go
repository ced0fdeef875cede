package disk

import (
	"errors"
	"fmt"
	"os"

	"agentrun.dev/internal/storage/extent"
	"agentrun.dev/internal/storage/layer"
	"golang.org/x/sys/unix"
)

// stage is a private sparse file with part of a disk, at the disk's offsets.
type stage struct {
	file *os.File
	fd   int
	// present says which blocks of a page the file has. What it holds
	// elsewhere (a write that failed half way) is never read.
	present bitmap
}

func newStage(file *os.File, size uint64) *stage {
	return &stage{file: file, fd: int(file.Fd()), present: newBitmap(size / blockSize)}
}

// view is a disk's content: the newest stage that has a block decides, and the
// stack where none has it.
type view struct {
	below  layer.Opened
	stages []*stage // newest first
}

// segment finds where the bytes at off come from and how far, at most to end,
// that holds: from a stage, from a layer of the stack (in), or from nowhere,
// which means zeros.
func (v *view) segment(off, end uint64) (s *stage, e layer.Extent, in bool, next uint64) {
	for _, s := range v.stages {
		has, block := s.present.span(off/blockSize, (end+blockSize-1)/blockSize)
		end = min(end, block*blockSize)
		if has {
			return s, layer.Extent{}, false, end
		}
	}
	e, in, next = v.below.Stack.Find(off)
	return nil, e, in, min(end, next)
}

// read fills p with the content, for the host.
func (v *view) read(p []byte, off uint64) error {
	for len(p) > 0 {
		s, _, _, next := v.segment(off, off+uint64(len(p)))
		n := next - off
		if s != nil {
			if _, err := s.file.ReadAt(p[:n], int64(off)); err != nil {
				return fmt.Errorf("read disk at %#x: %w", off, err)
			}
		} else if err := v.below.Read(p[:n], off); err != nil {
			return err
		}
		p, off = p[n:], next
	}
	return nil
}

// content divides the blocks of a set, all of which are in stages, into data
// and holes.
func (v *view) content(set *bitmap) (data, holes []extent.Run) {
	blocks := v.below.Stack.Size / blockSize
	finders := make([]holeFinder, len(v.stages))
	for i, s := range v.stages {
		finders[i] = holeFinder{fd: s.fd, size: v.below.Stack.Size}
	}
	for first := uint64(0); first < blocks; {
		in, next := set.span(first, blocks)
		for off, end := first*blockSize, next*blockSize; in && off < end; {
			s, _, _, to := v.segment(off, end)
			hole := false
			for i := range v.stages {
				if v.stages[i] == s {
					var known uint64
					hole, known = finders[i].at(off)
					to = min(to, known)
				}
			}
			if hole {
				holes = extent.Append(holes, off, to)
			} else {
				data = extent.Append(data, off, to)
			}
			off = to
		}
		first = next
	}
	return data, holes
}

// holeFinder walks through the holes of a file, forwards. It knows the piece
// that it looked at last: one hole may span many blocks.
type holeFinder struct {
	fd         int
	size       uint64
	start, end uint64 // of the data last found; before it is a hole
}

// at says whether there is a hole at off, which is a multiple of a page, and
// to where that holds in whole blocks. What the file system cannot tell is
// data.
func (h *holeFinder) at(off uint64) (hole bool, end uint64) {
	if off >= h.end {
		h.find(off)
	}
	if off < h.start {
		return true, h.start
	}
	return false, h.end
}

func (h *holeFinder) find(off uint64) {
	h.start, h.end = off, h.size
	data, err := unix.Seek(h.fd, int64(off), unix.SEEK_DATA)
	if errors.Is(err, unix.ENXIO) { // nothing up to the end
		h.start = h.size
		return
	}
	if err != nil {
		return
	}
	next, err := unix.Seek(h.fd, data, unix.SEEK_HOLE)
	if err != nil {
		return
	}
	// Blocks of the file system may be smaller than ours.
	h.start = uint64(data) &^ (blockSize - 1)
	h.end = min((uint64(next)+blockSize-1)&^(blockSize-1), h.size)
}
