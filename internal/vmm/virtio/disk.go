package virtio

import (
	"errors"
	"fmt"
	"io"
	"os"

	"agentrun.dev/internal/vmm/guestmem"
	"golang.org/x/sys/unix"
)

// Disk is the storage of a Block device. The device calls it from one goroutine
// at a time, with offsets and lengths that are multiples of SectorSize and lie
// inside Size.
type Disk interface {
	// Size is constant.
	Size() int64
	ReadOnly() bool
	// ReadAt fills the ranges. Fewer bytes than asked are an I/O error for the
	// guest, with or without an error here.
	ReadAt(mem *guestmem.Memory, ranges []guestmem.Range, off int64) (int64, error)
	WriteAt(mem *guestmem.Memory, ranges []guestmem.Range, off int64) (int64, error)
	// Flush returns when all earlier writes are durable.
	Flush() error
	// Discard says that the guest does not need the content any more. It may
	// return errors.ErrUnsupported.
	Discard(off, n int64) error
	// WriteZeroes makes a range read as zeros; with unmap it may become a hole.
	WriteZeroes(off, n int64, unmap bool) error
}

// FileDisk is a Disk in a regular file or on a block device.
type FileDisk struct {
	file     *os.File
	fd       int
	size     int64
	readOnly bool
}

// OpenFileDisk uses an open file. It takes the file's current size, rounded
// down to sectors. The caller keeps the file and closes it after the device was
// reset.
func OpenFileDisk(f *os.File, readOnly bool) (*FileDisk, error) {
	n, err := f.Seek(0, io.SeekEnd)
	if err != nil {
		return nil, fmt.Errorf("size disk %s: %w", f.Name(), err)
	}
	return &FileDisk{file: f, fd: int(f.Fd()), size: n &^ (SectorSize - 1), readOnly: readOnly}, nil
}

func (d *FileDisk) Size() int64    { return d.size }
func (d *FileDisk) ReadOnly() bool { return d.readOnly }

func (d *FileDisk) ReadAt(mem *guestmem.Memory, ranges []guestmem.Range, off int64) (int64, error) {
	return mem.ReadFile(d.fd, off, ranges)
}

func (d *FileDisk) WriteAt(mem *guestmem.Memory, ranges []guestmem.Range, off int64) (int64, error) {
	return mem.WriteFile(d.fd, off, ranges)
}

func (d *FileDisk) Flush() error {
	return retry(func() error { return unix.Fdatasync(d.fd) })
}

func (d *FileDisk) Discard(off, n int64) error {
	return retry(func() error {
		return unix.Fallocate(d.fd, unix.FALLOC_FL_PUNCH_HOLE|unix.FALLOC_FL_KEEP_SIZE, off, n)
	})
}

// WriteZeroes punches a hole if unmap is set. A range that must stay allocated
// (§5.2.6.2) is overwritten with zeros instead: the other modes of fallocate
// are not allowed for a vmm, because with them ext4 allocates beyond the limit
// of the file size.
func (d *FileDisk) WriteZeroes(off, n int64, unmap bool) error {
	if unmap {
		if err := d.Discard(off, n); !errors.Is(err, errors.ErrUnsupported) {
			return err
		}
	}
	return d.writeZeroes(off, n)
}

func (d *FileDisk) writeZeroes(off, n int64) error {
	zeros := make([]byte, min(n, 64<<10))
	for n > 0 {
		k, err := d.file.WriteAt(zeros[:min(n, int64(len(zeros)))], off)
		if err != nil {
			return fmt.Errorf("write zeros: %w", err)
		}
		off += int64(k)
		n -= int64(k)
	}
	return nil
}

// retry repeats a system call that was interrupted by a signal.
func retry(call func() error) error {
	for {
		if err := call(); !errors.Is(err, unix.EINTR) {
			return err
		}
	}
}
