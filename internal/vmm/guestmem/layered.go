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

// Mapping backs a piece of RAM with a file that is not written any more.
type Mapping struct {
	extent.Run
	File *os.File
	// Offset is where the piece begins in the file.
	Offset uint64
}

// maxDiscardMappings bounds the mappings that a guest can create by discarding
// file-backed RAM.
const maxDiscardMappings = 256

// NewLayered maps size bytes of RAM: private copies of the mappings' files, and
// zeros elsewhere. The zeros are anonymous memory, because a fault in a hole of
// a file would add a page to the file.
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
		// A write by a fork must copy one page, not the 2 MiB around it.
		// Kernels without huge pages refuse this call, and do not need it.
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

// mapFile maps one piece, in two parts if it spans the gap.
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

// each calls do with the bytes of a run, region by region, and then the
// functions of after with that part of the run.
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

// EachGPA calls do with the guest addresses of a run, region by region.
func (m *Memory) EachGPA(s extent.Run, do func(gpa, size uint64) error) error {
	return m.pieces(s, func(r *Region, offset uint64, piece extent.Run) error { return do(r.GPA+offset, piece.Length) })
}

// pieces calls do with the part of a run in each region and the offset of that
// part in the region.
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

// mapFixed replaces the pages of b, which must belong to our own mapping.
func mapFixed(b []byte, fd int, offset int64, flags int) error {
	_, err := unix.MmapPtr(fd, offset, unsafe.Pointer(unsafe.SliceData(b)), uintptr(len(b)),
		unix.PROT_READ|unix.PROT_WRITE, unix.MAP_PRIVATE|unix.MAP_FIXED|unix.MAP_NORESERVE|flags)
	return err
}

// discard drops the pages of a run so that they read as zeros. For file-backed
// memory MADV_DONTNEED would bring the file's content back. So discard maps such
// pages as anonymous memory or, after maxDiscardMappings such mappings, clears them.
// live is the capture in progress, or nil. discard registers the new mapping for it,
// so that it can be protected like all others. A thread that removes protection just
// before that finds none to remove.
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
			live.fail(err) // the discard itself has succeeded
		}
	}
	return nil
}

// Changed lists the pages that differ from the state that NewLayered or
// NewAnonymous made: private pages, as pagemap (an open /proc/self/pagemap)
// shows them, and pages whose file mapping was removed. Pages of zeros are
// listed separately, and only where the stack has data: elsewhere they have not
// changed. The guest must stand still.
func (m *Memory) Changed(pagemap *os.File) (data, zeros []extent.Run, err error) {
	c := &Capture{m: m, pagemap: pagemap, uffd: -1}
	c.remember()
	return c.List(nil)
}

// Watch makes Touched list the pages that the guest reads until then, unless a
// capture comes first. It uses userfaultfd (device is /dev/userfaultfd), with
// which the kernel maps only the page that is read, not its neighbours. If Watch
// fails, Touched lists no read pages.
func (m *Memory) Watch(device *os.File) {
	u, _, err := newUserfaultfd(device)
	if err != nil {
		return
	}
	for i := range m.regions {
		if err := u.register(m.regions[i].bytes); err != nil {
			_ = u.close() // no page was protected with it
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
		_ = m.watch.close() // no page was protected with it
		m.watch = 0
	}
}

// Touched lists the private pages and, if Watch is active, the pages of the
// layers that the guest has read. The guest may run.
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
					// Not present. If a capture protects pages, a page that the
					// kernel is moving looks like one that is not present. The list
					// is only a hint, so it may lack such a page.
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

// Populate copies pages before the guest writes to them. One call for many
// pages is cheaper than a fault for each: mostly even two faults, because a
// guest reads a page before it writes to it. A failure is ignored (before Linux
// 5.14 the kernel cannot do it).
func (m *Memory) Populate(runs []extent.Run) {
	for _, s := range runs {
		if s.Start > m.size || s.Length > m.size-s.Start {
			continue
		}
		_ = m.each(s, func(b []byte) error { return unix.Madvise(b, unix.MADV_POPULATE_WRITE) })
	}
}

// runCursor reports for ascending offsets whether they lie in sorted runs.
type runCursor []extent.Run

func (c *runCursor) has(offset uint64) bool {
	for len(*c) > 0 && (*c)[0].End() <= offset {
		*c = (*c)[1:]
	}
	return len(*c) > 0 && (*c)[0].Start <= offset
}

// isZero compares eight bytes at a time.
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
