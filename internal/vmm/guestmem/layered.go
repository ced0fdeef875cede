package guestmem

import (
	"errors"
	"fmt"
	"io"
	"os"
	"unsafe"

	"agentrun.dev/internal/storage/extent"
	"golang.org/x/sys/unix"
)

// Mapping backs a piece of RAM with a file that nobody writes any more.
type Mapping struct {
	extent.Run
	File *os.File
	// Offset is where the piece begins in the file.
	Offset uint64
}

// maxDiscardMappings bounds the mappings that a guest's discards can make of RAM that is
// backed by a file.
const maxDiscardMappings = 256

// NewLayered maps size bytes of RAM: private copies of the mappings' files
// where there are any, zeros elsewhere. The zeros are anonymous memory: a fault
// in a hole of a file would add a page to the file.
func NewLayered(size uint64, mappings []Mapping) (*Memory, error) {
	align := uint64(hugeSize)
	if len(mappings) > 0 {
		align = PageSize
	}
	m, err := newAnonymous(size, align)
	if err != nil {
		return nil, err
	}
	if len(mappings) > 0 {
		// A fork is to own what it writes and not 2 MiB around it. Kernels
		// without huge pages refuse, and need not be told.
		for _, r := range m.regions {
			_ = unix.Madvise(r.bytes, unix.MADV_NOHUGEPAGE)
		}
	}
	m.restored = len(mappings)
	for i, p := range mappings {
		if err := m.mapFile(p, i+1); err != nil {
			return nil, errors.Join(err, m.Close())
		}
		m.mapped = append(m.mapped, p.Run)
	}
	return m, nil
}

// mapFile maps one piece, in two parts if it lies on both sides of the gap.
func (m *Memory) mapFile(p Mapping, source int) error {
	last := uint64(0)
	if n := len(m.mapped); n > 0 {
		last = m.mapped[n-1].End()
	}
	if p.Start%PageSize|p.Length%PageSize|p.Offset%PageSize != 0 || p.Length == 0 ||
		p.Start < last || p.Start > m.size || p.Length > m.size-p.Start || p.Offset > 1<<62 {
		return fmt.Errorf("map guest memory %#x+%#x: not in order, not aligned or outside the %#x bytes of RAM", p.Start, p.Length, m.size)
	}
	offset := p.Offset
	return m.each(p.Run, func(b []byte) error {
		err := mapFixed(b, int(p.File.Fd()), int64(offset), 0)
		if err != nil {
			return fmt.Errorf("map guest memory %#x+%#x: %w", p.Start, p.Length, err)
		}
		offset += uint64(len(b))
		return nil
	}, func(s extent.Run) { m.layout.place(s, source) })
}

// each calls do with the bytes of a run, region by region, and then after
// with the part of the run.
func (m *Memory) each(s extent.Run, do func([]byte) error, after ...func(extent.Run)) error {
	return m.pieces(s, func(r *Region, offset uint64, piece extent.Run) error {
		if err := do(r.bytes[offset : offset+piece.Length]); err != nil {
			return err
		}
		for _, f := range after {
			f(piece)
		}
		return nil
	})
}

// EachGPA calls do with the guest's addresses of a run, region by region.
func (m *Memory) EachGPA(s extent.Run, do func(gpa, size uint64) error) error {
	return m.pieces(s, func(r *Region, offset uint64, piece extent.Run) error { return do(r.GPA+offset, piece.Length) })
}

// pieces calls do with the parts of a run in each region, and where in the region
// they begin.
func (m *Memory) pieces(s extent.Run, do func(r *Region, offset uint64, piece extent.Run) error) error {
	base := uint64(0)
	for i := range m.regions {
		r := &m.regions[i]
		from, to := max(s.Start, base), min(s.End(), base+r.Size())
		if from < to {
			if err := do(r, from-base, extent.Run{Start: from, Length: to - from}); err != nil {
				return err
			}
		}
		base += r.Size()
	}
	return nil
}

// mapFixed replaces the pages of b, which belong to a mapping of ours.
func mapFixed(b []byte, fd int, offset int64, flags int) error {
	_, err := unix.MmapPtr(fd, offset, unsafe.Pointer(unsafe.SliceData(b)), uintptr(len(b)),
		unix.PROT_READ|unix.PROT_WRITE, unix.MAP_PRIVATE|unix.MAP_FIXED|unix.MAP_NORESERVE|flags)
	return err
}

// discard drops the pages of a run so that they read as zeros. For memory
// with a file behind it MADV_DONTNEED would bring the file's bytes back, so
// such pages become anonymous memory, or, when a guest has made many such
// mappings, are cleared. live is the capture that goes on, nil if none does: a new
// mapping is registered for it, so that it can be protected like all others. Whoever
// takes protection away in the moment before finds nothing protected.
func (m *Memory) discard(s extent.Run, live *Capture) error {
	m.mu.Lock()
	defer m.mu.Unlock()
	for _, p := range m.layout.within(s) {
		if p.source == 0 {
			continue
		}
		if m.discardMappings == maxDiscardMappings {
			_ = m.each(p.Run, func(b []byte) error { clear(b); return nil })
			continue
		}
		m.discardMappings++
		err := m.each(p.Run, func(b []byte) error { return mapFixed(b, -1, 0, unix.MAP_ANONYMOUS) })
		if err != nil {
			return err
		}
		m.layout.place(p.Run, 0)
		if live == nil || live.closed {
			continue
		}
		if err := m.each(p.Run, live.uffd.register); err != nil {
			live.fail(err) // the guest has discarded its pages all the same
		}
	}
	return nil
}

// Changed lists the pages that are not what NewLayered or NewAnonymous made
// them: those of this process's own, as pagemap (an open /proc/self/pagemap)
// tells, and those whose file was taken away. Pages of zeros are listed apart,
// and only where the stack has data: elsewhere they are what they were. The
// guest must stand still.
func (m *Memory) Changed(pagemap *os.File) (data, zeros []extent.Run, err error) {
	c := &Capture{m: m, pagemap: pagemap, uffd: -1}
	c.remember()
	return c.List(nil)
}

// Watch has Touched know what the guest reads until then, unless a capture comes
// before: with userfaultfd (device is /dev/userfaultfd) the kernel maps only the
// page that a read is for, and not some around it. It is of no consequence where
// it fails.
func (m *Memory) Watch(device *os.File) {
	u, _, err := newUserfaultfd(device)
	if err != nil {
		return
	}
	for i := range m.regions {
		if err := u.register(m.regions[i].bytes); err != nil {
			_ = u.close() // nothing was done with it
			return
		}
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	m.watch = u
}

// unwatch ends Watch.
func (m *Memory) unwatch() {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.watch > 0 {
		_ = m.watch.close() // nothing was done with it
		m.watch = 0
	}
}

// Touched lists the pages that are this process's own, and, of memory that was
// watched, those of the layers that were read. The guest may run.
func (m *Memory) Touched(pagemap *os.File) (own, read []extent.Run, err error) {
	m.mu.Lock()
	watched := m.watch > 0
	m.mu.Unlock()
	defer m.unwatch()
	entry := make([]uint64, 4096)
	start := uint64(0)
	for i := range m.regions {
		r := m.regions[i].bytes
		for off := 0; off < len(r); off += len(entry) * PageSize {
			part := r[off:min(len(r), off+len(entry)*PageSize)]
			if err := readEntries(pagemap, part, entry); err != nil {
				return nil, nil, fmt.Errorf("list pages: %w", err)
			}
			for k, e := range entry[:len(part)/PageSize] {
				page := start + uint64(off) + uint64(k)*PageSize
				switch {
				case e&pagemapPresent == 0 && (e&pagemapSwapped == 0 || e&pagemapProtected != 0):
					// Not there. Of what a capture protects, a page that the kernel
					// is moving cannot be told from one that is not there: the list
					// is a hint, and may lack it.
				case e&pagemapFile == 0:
					own = extent.Append(own, page, page+PageSize)
				case watched:
					read = extent.Append(read, page, page+PageSize)
				}
			}
		}
		start += uint64(len(r))
	}
	return own, read, nil
}

// Populate makes pages this process's own before the guest writes to them. To
// do it for many at once is cheaper than a fault for each: two, mostly, since a
// guest reads a page before it writes to it. It is of no consequence where it
// fails (before Linux 5.14 the kernel cannot).
func (m *Memory) Populate(runs []extent.Run) {
	for _, s := range runs {
		if s.Start > m.size || s.Length > m.size-s.Start {
			continue
		}
		_ = m.each(s, func(b []byte) error { return unix.Madvise(b, unix.MADV_POPULATE_WRITE) })
	}
}

// runCursor answers for ascending offsets whether they lie in sorted runs.
type runCursor []extent.Run

func (c *runCursor) has(offset uint64) bool {
	for len(*c) > 0 && (*c)[0].End() <= offset {
		*c = (*c)[1:]
	}
	return len(*c) > 0 && (*c)[0].Start <= offset
}

// isZero looks at eight bytes at a time.
func isZero(page []byte) bool {
	words := unsafe.Slice((*uint64)(unsafe.Pointer(unsafe.SliceData(page))), len(page)/8)
	for _, w := range words {
		if w != 0 {
			return false
		}
	}
	return true
}

// WriteRuns writes the content of the runs to w, one after the other. The
// guest must stand still.
func (m *Memory) WriteRuns(w io.Writer, runs []extent.Run) error {
	for _, s := range runs {
		if s.Start > m.size || s.Length > m.size-s.Start {
			return fmt.Errorf("%w: offset %#x+%#x", ErrRange, s.Start, s.Length)
		}
		err := m.each(s, func(b []byte) error {
			_, err := w.Write(b)
			return err
		})
		if err != nil {
			return fmt.Errorf("write guest memory: %w", err)
		}
	}
	return nil
}
