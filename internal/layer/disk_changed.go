package layer

import (
	"cmp"
	"errors"
	"io"
	"slices"

	"golang.org/x/sys/unix"
)

// Changed lists what differs from the image below: runs to be stored, and
// ranges that are zeros now and need no place in a layer. Both are sorted,
// have at most MaxRuns entries and do not overlap; runs are joined over small
// gaps, whose content is to be stored with them.
func (d *Disk) Changed() (runs, zeros []Run) {
	if d.top == nil {
		return nil, nil
	}
	runs, zeros = d.topContent()
	zeros = d.hiding(zeros)
	if len(zeros) > MaxRuns {
		// The small ones are cheaper stored than listed.
		bySize := slices.Clone(zeros)
		slices.SortStableFunc(bySize, func(a, b Run) int { return cmp.Compare(b.Length, a.Length) })
		zeros = sortRuns(bySize[:MaxRuns])
		runs = sortRuns(append(runs, bySize[MaxRuns:]...))
	}
	runs = Coalesce(runs, MaxRuns)
	// Zeros lie wholly inside a joined gap or wholly outside.
	zeros = slices.DeleteFunc(zeros, func(z Run) bool {
		i, exact := slices.BinarySearchFunc(runs, z.Start, func(r Run, at uint64) int { return cmp.Compare(r.Start, at) })
		return exact || i > 0 && runs[i-1].end() > z.Start
	})
	return runs, zeros
}

func sortRuns(runs []Run) []Run {
	slices.SortFunc(runs, func(a, b Run) int { return cmp.Compare(a.Start, b.Start) })
	return runs
}

// topContent divides the present blocks into data and holes.
func (d *Disk) topContent() (data, holes []Run) {
	blocks := d.below.image.Size / PageSize
	h := holeFinder{fd: d.fd, size: d.below.image.Size}
	for first := uint64(0); first < blocks; {
		in, next := d.present.span(first, blocks)
		for off, end := first*PageSize, next*PageSize; in && off < end; {
			hole, to := h.at(off)
			to = min(to, end)
			if hole {
				holes = appendRun(holes, off, to)
			} else {
				data = appendRun(data, off, to)
			}
			off = to
		}
		first = next
	}
	return data, holes
}

// appendRun adds [off, end), to the last run if it ends there.
func appendRun(runs []Run, off, end uint64) []Run {
	if n := len(runs); n > 0 && runs[n-1].end() == off {
		runs[n-1].Length += end - off
		return runs
	}
	return append(runs, Run{off, end - off})
}

// hiding keeps those parts of zeros that have an extent below: elsewhere there
// are zeros already.
func (d *Disk) hiding(zeros []Run) []Run {
	var out []Run
	for _, z := range zeros {
		for off := z.Start; off < z.end(); {
			_, ok, next := d.below.image.Find(off)
			next = min(next, z.end())
			if ok {
				out = appendRun(out, off, next)
			}
			off = next
		}
	}
	return out
}

// holeFinder walks through the holes of a file, forwards. It knows the piece
// that it looked at last: one hole may span many blocks.
type holeFinder struct {
	fd         int
	size       uint64
	start, end uint64 // of the data last found; before it is a hole
}

// at says whether there is a hole at off, which is a multiple of PageSize, and
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
	h.start = uint64(data) &^ (PageSize - 1)
	h.end = min((uint64(next)+PageSize-1)&^(PageSize-1), h.size)
}

// WriteChanged writes the present content of runs, one after the other.
func (d *Disk) WriteChanged(w io.Writer, runs []Run) error {
	if err := validateRuns(runs, d.below.image.Size); err != nil {
		return err
	}
	return copyRuns(w, runs, d.read)
}
