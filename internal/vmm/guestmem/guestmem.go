package guestmem

import (
	"errors"
	"fmt"
	"math"
	"sync"
	"sync/atomic"
	"unsafe"

	"agentrun.dev/internal/storage/extent"
	"golang.org/x/sys/unix"
)

const (
	// PageSize is the granule of discards and of a guest's page frame numbers.
	PageSize = 4096
	// GapStart is the end of low RAM; device windows live between it and GapEnd.
	GapStart = 0xC000_0000
	// GapEnd is where RAM continues if a guest has more than GapStart bytes.
	GapEnd = 0x1_0000_0000
	// MaxSize bounds the RAM of one guest (1 TiB), far below the 46-bit
	// physical addresses that every supported CPU has.
	MaxSize = 1 << 40
)

// ErrRange says that an address range is not, or not wholly, guest RAM.
var ErrRange = errors.New("address range outside guest memory")

// Region is a contiguous piece of guest RAM and its host mapping.
type Region struct {
	// GPA is the guest physical address of the first byte.
	GPA uint64
	// bytes is the mapping; it is page aligned and never resized.
	bytes []byte
}

// Size is the length of the region in bytes.
func (r Region) Size() uint64 { return uint64(len(r.bytes)) }

// HostAddr is the host virtual address of the mapping. Its only use is
// KVM_SET_USER_MEMORY_REGION.
func (r Region) HostAddr() uintptr { return addressOf(r.bytes) }

// Memory is the RAM of one guest. Its methods are safe for concurrent use. The
// guest uses the memory at the same time and takes no lock.
type Memory struct {
	regions  []Region
	size     uint64
	restored int // how many file mappings it began with

	// live is the capture in progress beside the guest: before a host write,
	// the protected pages must be saved. It changes only while no host write is
	// in progress.
	live atomic.Pointer[Capture]

	mu              sync.Mutex   // protects all following fields
	mapped          []extent.Run // where the stack has data that this memory began with, or was rebased to
	layout          layout       // which file is mapped where
	orphan          []extent.Run // mapped from a layer that no stack uses: these pages count as changed for ever
	discardMappings int          // how many mappings Discard has made
	shares          int          // how many captures Share was called for
	watch           userfaultfd  // 0: Watch is not active
}

// hugeSize is the size of a huge page. KVM maps RAM with huge pages only if
// guest and host addresses agree modulo this size.
const hugeSize = 2 << 20

// NewAnonymous maps size bytes of zeroed private memory. A page takes no memory
// until it is touched.
func NewAnonymous(size uint64) (*Memory, error) { return newAnonymous(size, hugeSize) }

func newAnonymous(size, align uint64) (*Memory, error) {
	if size == 0 || size%PageSize != 0 || size > MaxSize {
		return nil, fmt.Errorf("guest memory of %d bytes: must be a multiple of %d, above zero and at most %d", size, PageSize, uint64(MaxSize))
	}
	m := &Memory{size: size}
	for _, piece := range split(size) {
		b, err := mapAligned(piece.size, align)
		if err != nil {
			return nil, errors.Join(fmt.Errorf("map %d bytes of guest memory: %w", piece.size, err), m.Close())
		}
		m.layout = append(m.layout, mapping{Run: extent.Run{Start: ramOffset(piece.gpa), Length: piece.size}})
		m.regions = append(m.regions, Region{GPA: piece.gpa, bytes: b})
	}
	return m, nil
}

// mapAligned maps memory at a multiple of align, a power of two.
func mapAligned(size, align uint64) ([]byte, error) {
	whole, err := unix.MmapPtr(-1, 0, nil, uintptr(size+align-PageSize),
		unix.PROT_READ|unix.PROT_WRITE, unix.MAP_PRIVATE|unix.MAP_ANONYMOUS|unix.MAP_NORESERVE)
	if err != nil {
		return nil, err
	}
	head := uintptr(-uint64(uintptr(whole)) & (align - 1))
	b := unsafe.Slice((*byte)(unsafe.Add(whole, head)), size)
	if head > 0 {
		err = unix.MunmapPtr(whole, head)
	}
	if tail := uintptr(align-PageSize) - head; tail > 0 {
		err = errors.Join(err, unix.MunmapPtr(unsafe.Add(whole, head+uintptr(size)), tail))
	}
	return b, err
}

// unmap ends a mapping that mapAligned made.
func unmap(b []byte) error {
	return unix.MunmapPtr(unsafe.Pointer(unsafe.SliceData(b)), uintptr(len(b)))
}

type piece struct{ gpa, size uint64 }

// split divides size bytes of RAM into the parts below and above the gap.
func split(size uint64) []piece {
	if size <= GapStart {
		return []piece{{0, size}}
	}
	return []piece{{0, GapStart}, {GapEnd, size - GapStart}}
}

// Close unmaps the memory. No other call may be running or come later.
func (m *Memory) Close() error {
	m.unwatch()
	var errs []error
	for _, r := range m.regions {
		if err := unmap(r.bytes); err != nil {
			errs = append(errs, fmt.Errorf("unmap guest memory: %w", err))
		}
	}
	m.regions = nil
	return errors.Join(errs...)
}

// Size is the size of all RAM in bytes.
func (m *Memory) Size() uint64 { return m.size }

// Regions lists the pieces of RAM in ascending order.
func (m *Memory) Regions() []Region { return m.regions }

// Contains reports whether [gpa, gpa+n) is wholly RAM in one region.
func (m *Memory) Contains(gpa, n uint64) bool {
	_, err := m.slice(gpa, n)
	return err == nil
}

// slice returns the host bytes of a range. They must not leave the package,
// because a caller could write past the checks made here.
func (m *Memory) slice(gpa, n uint64) ([]byte, error) {
	for i := range m.regions {
		r := &m.regions[i]
		if gpa < r.GPA {
			break
		}
		off := gpa - r.GPA
		if off > r.Size() || n > r.Size()-off {
			continue
		}
		return r.bytes[off : off+n : off+n], nil
	}
	return nil, fmt.Errorf("%w: %#x+%#x", ErrRange, gpa, n)
}

// Read copies guest memory at gpa into p.
func (m *Memory) Read(gpa uint64, p []byte) error {
	b, err := m.slice(gpa, uint64(len(p)))
	if err != nil {
		return err
	}
	copy(p, b)
	return nil
}

// writing begins a write by the host; Capture.written ends it. Without a
// capture in progress its cost is one atomic load.
func (m *Memory) writing() *Capture {
	c := m.live.Load()
	if c != nil {
		c.writers.RLock()
	}
	return c
}

// written ends a write by the host.
func (c *Capture) written() {
	if c != nil {
		c.writers.RUnlock()
	}
}

// toWrite is slice for a caller that will write, between writing and written:
// the capture saves the old content first.
func (m *Memory) toWrite(c *Capture, gpa, n uint64) ([]byte, error) {
	b, err := m.slice(gpa, n)
	if err == nil && c != nil {
		err = c.releaseRun(ramOffset(gpa), n)
	}
	return b, err
}

// Write copies p into guest memory at gpa.
func (m *Memory) Write(gpa uint64, p []byte) error {
	c := m.writing()
	defer c.written()
	b, err := m.toWrite(c, gpa, uint64(len(p)))
	if err != nil {
		return err
	}
	copy(b, p)
	return nil
}

// Zero clears n bytes at gpa.
func (m *Memory) Zero(gpa, n uint64) error {
	c := m.writing()
	defer c.written()
	b, err := m.toWrite(c, gpa, n)
	if err != nil {
		return err
	}
	clear(b)
	return nil
}

// LoadUint16 reads a little-endian 16-bit ring index or flag with acquire
// ordering: all writes that the guest made before it published the index are
// visible. gpa must be 2-aligned, as virtio 1.2 §2.7 demands of every ring.
func (m *Memory) LoadUint16(gpa uint64) (uint16, error) {
	b, err := m.slice(gpa, 2)
	if err != nil {
		return 0, err
	}
	p, err := pointer16(gpa, b)
	if err != nil {
		return 0, err
	}
	return load16(p), nil
}

// StoreUint16 publishes a little-endian 16-bit ring index with a full
// barrier: earlier writes are visible before it and later loads happen after
// it (virtio 1.2 §2.7.13.3 and §2.7.14 need the latter before it reads the flags that
// suppress interrupts).
func (m *Memory) StoreUint16(gpa uint64, v uint16) error {
	c := m.writing()
	defer c.written()
	b, err := m.toWrite(c, gpa, 2)
	if err != nil {
		return err
	}
	p, err := pointer16(gpa, b)
	if err != nil {
		return err
	}
	store16(p, v)
	return nil
}

func pointer16(gpa uint64, b []byte) (*uint16, error) {
	if gpa%2 != 0 {
		return nil, fmt.Errorf("%w: %#x is not 2-aligned", ErrRange, gpa)
	}
	return pointerTo16(b), nil
}

// Discard gives whole pages inside [gpa, gpa+n) back to the host; the guest
// then reads zeros there. Partial pages at the ends are kept.
func (m *Memory) Discard(gpa, n uint64) error {
	c := m.writing()
	defer c.written()
	b, err := m.toWrite(c, gpa, n)
	if err != nil {
		return err
	}
	head := (PageSize - gpa%PageSize) % PageSize
	if head >= n {
		return nil
	}
	b = b[head:]
	b = b[:uint64(len(b))&^(PageSize-1)]
	if len(b) == 0 {
		return nil
	}
	if err := unix.Madvise(b, unix.MADV_DONTNEED); err != nil {
		return fmt.Errorf("discard guest memory %#x+%#x: %w", gpa, n, err)
	}
	if err := m.discard(extent.Run{Start: ramOffset(gpa + head), Length: uint64(len(b))}, c); err != nil {
		return fmt.Errorf("discard guest memory %#x+%#x: %w", gpa, n, err)
	}
	return nil
}

// ramOffset converts a guest address to an offset in RAM that leaves out the
// gap.
func ramOffset(gpa uint64) uint64 {
	if gpa >= GapEnd {
		return gpa - (GapEnd - GapStart)
	}
	return gpa
}

// Range is a piece of guest memory as a descriptor names it. It is checked when
// it is used.
type Range struct {
	GPA uint64
	Len uint32
}

// maxIovecs is UIO_MAXIOV: the kernel refuses more in one call.
const maxIovecs = 1024

// ReadFile fills the ranges, in order, with the bytes of fd from offset on. It
// returns the number of bytes read. If that is less than the length of the
// ranges and the error is nil, the file has ended.
func (m *Memory) ReadFile(fd int, offset int64, ranges []Range) (int64, error) {
	c := m.writing()
	defer c.written()
	access := func(gpa, n uint64) ([]byte, error) { return m.toWrite(c, gpa, n) }
	return m.transfer(ranges, access, func(iov [][]byte, done int64) (int, error) {
		return unix.Preadv(fd, iov, offset+done)
	})
}

// WriteFile writes the ranges, in order, to fd from offset on.
func (m *Memory) WriteFile(fd int, offset int64, ranges []Range) (int64, error) {
	return m.transfer(ranges, m.slice, func(iov [][]byte, done int64) (int, error) {
		return unix.Pwritev(fd, iov, offset+done)
	})
}

// transfer moves all ranges by vectored calls, and continues after short ones.
func (m *Memory) transfer(ranges []Range, access func(gpa, n uint64) ([]byte, error), call func(iov [][]byte, done int64) (int, error)) (int64, error) {
	iov := make([][]byte, 0, min(len(ranges), maxIovecs))
	var done int64
	for len(ranges) > 0 {
		n := min(len(ranges), maxIovecs)
		iov = iov[:0]
		var want int64
		for _, r := range ranges[:n] {
			b, err := access(r.GPA, uint64(r.Len))
			if err != nil {
				return done, err
			}
			if len(b) > 0 {
				iov = append(iov, b)
			}
			want += int64(r.Len)
		}
		ranges = ranges[n:]
		for want > 0 {
			if done > math.MaxInt64-want {
				return done, fmt.Errorf("%w: transfer too long", ErrRange)
			}
			k, err := call(iov, done)
			switch {
			case errors.Is(err, unix.EINTR):
				continue
			case err != nil:
				return done, err
			case k == 0:
				return done, nil
			}
			done += int64(k)
			want -= int64(k)
			iov = advance(iov, k)
		}
	}
	return done, nil
}

// advance drops the first n bytes of a vector.
func advance(iov [][]byte, n int) [][]byte {
	for n > 0 {
		if n < len(iov[0]) {
			iov[0] = iov[0][n:]
			break
		}
		n -= len(iov[0])
		iov = iov[1:]
	}
	return iov
}
