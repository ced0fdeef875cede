package disk

import (
	"errors"
	"fmt"
	"os"

	"agentrun.dev/internal/storage/extent"
	"agentrun.dev/internal/storage/layer"
	"golang.org/x/sys/unix"
)

// stage is a private sparse file that holds some blocks of a disk, at the
// disk's offsets.
type stage struct {
	file *os.File
	fd   int
	// present says which blocks the file holds. Other content of the file, such
	// as a write that failed half way, is never read.
	present bitmap
}

func newStage(file *os.File, size uint64) *stage {
	return &stage{file: file, fd: int(file.Fd()), present: newBitmap(size / blockSize)}
}

// view is a disk's content. A block comes from the newest stage that has it, or
// else from the stack.
type view struct {
	below  layer.Opened
	stages []*stage // newest first
}

// segment finds the source of the bytes at off and how far, up to end, the same
// source continues: a stage, a layer of the stack (in), or no file, which means
// zeros.
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

// read fills p with the content, for use by the host.
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

// content divides the blocks of a set into data and holes. All of them must be
// in stages.
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

// holeFinder walks forwards through the holes of a file. It remembers the last
// piece that it looked up, because one hole may span many blocks.
type holeFinder struct {
	fd         int
	size       uint64
	start, end uint64 // of the data last found; a hole lies before it
}

// at reports whether there is a hole at off, which is a multiple of a page, and
// how far that holds, in whole blocks. If the file system cannot tell, it is
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
	if errors.Is(err, unix.ENXIO) { // no data up to the end
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
	// Blocks of the file system may be smaller than blockSize.
	h.start = uint64(data) &^ (blockSize - 1)
	h.end = min((uint64(next)+blockSize-1)&^(blockSize-1), h.size)
}
