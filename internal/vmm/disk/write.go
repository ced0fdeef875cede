package disk

import (
	"errors"
	"fmt"
	"os"

	"agentrun.dev/internal/vmm/guestmem"
	"golang.org/x/sys/unix"
)

func (d *Disk) WriteAt(mem *guestmem.Memory, ranges []guestmem.Range, off int64) (int64, error) {
	total := length(ranges)
	if err := d.beginWrite(off, total); err != nil {
		return 0, err
	}
	top := d.stages[0]
	done, err := mem.WriteFile(top.fd, off, ranges)
	// A block is present once all of it was written; beginWrite has copied up
	// the partial blocks at the ends. After an error the remaining blocks keep
	// their old content.
	first, end := wholeBlocks(uint64(off), uint64(off+done))
	top.present.set(first, end)
	return done, err
}

// beginWrite checks a range that will be written, and copies up the blocks at
// its ends if they will be written only in part.
func (d *Disk) beginWrite(off, n int64) error {
	if d.ReadOnly() {
		return errReadOnly
	}
	if err := d.check(off, n); err != nil || n == 0 {
		return err
	}
	if off%blockSize != 0 {
		if err := d.copyUp(uint64(off) / blockSize); err != nil {
			return err
		}
	}
	if (off+n)%blockSize != 0 {
		return d.copyUp(uint64(off+n) / blockSize)
	}
	return nil
}

// copyUp copies a block into the top, unless the top has it.
func (d *Disk) copyUp(block uint64) error {
	top := d.stages[0]
	if top.present.has(block) {
		return nil
	}
	if err := d.read(d.block[:], block*blockSize); err != nil {
		return fmt.Errorf("copy up: %w", err)
	}
	if _, err := top.file.WriteAt(d.block[:], int64(block*blockSize)); err != nil {
		return fmt.Errorf("copy up: %w", err)
	}
	top.present.set(block, block+1)
	return nil
}

// wholeBlocks returns the blocks that lie completely in [off, end).
func wholeBlocks(off, end uint64) (first, last uint64) {
	first, last = (off+blockSize-1)/blockSize, end/blockSize
	return first, max(first, last)
}

// Flush makes all written blocks durable; the layers are durable already.
func (d *Disk) Flush() error {
	for _, s := range d.stages {
		if err := retry(func() error { return unix.Fdatasync(s.fd) }); err != nil {
			return err
		}
	}
	return nil
}

// Discard makes the range read as zeros, so that no snapshot stores its old
// content.
func (d *Disk) Discard(off, n int64) error { return d.zero(off, n) }

// WriteZeroes punches holes, whether unmap is set or not: a sparse top reserves
// no blocks anyway, and known zeros take no room in a snapshot.
func (d *Disk) WriteZeroes(off, n int64, _ bool) error { return d.zero(off, n) }

func (d *Disk) zero(off, n int64) error {
	if err := d.beginWrite(off, n); err != nil || n == 0 {
		return err
	}
	start, end := uint64(off), uint64(off+n)
	first, last := wholeBlocks(start, end)
	// A range inside one block contains no whole block; first then lies behind
	// the range.
	if err := writeZeros(d.stages[0].file, start, min(first*blockSize, end)); err != nil {
		return err
	}
	if err := d.zeroBlocks(first, last); err != nil {
		return err
	}
	return writeZeros(d.stages[0].file, last*blockSize, end)
}

// zeroBlocks makes whole blocks zero. Blocks that already read as zeros,
// because neither the top nor any file below has them, stay as they are.
func (d *Disk) zeroBlocks(first, last uint64) error {
	if first == last {
		return nil
	}
	if err := d.punch(first*blockSize, last*blockSize); err != nil {
		return err
	}
	for off, end := first*blockSize, last*blockSize; off < end; {
		s, _, in, next := d.segment(off, end)
		if s != nil || in {
			if d.noPunch {
				if err := writeZeros(d.stages[0].file, off, next); err != nil {
					return err
				}
			}
			d.stages[0].present.set(off/blockSize, next/blockSize)
		}
		off = next
	}
	return nil
}

// punch makes a hole, or notes that the file system does not support holes.
func (d *Disk) punch(off, end uint64) error {
	if d.noPunch {
		return nil
	}
	err := punchHole(d.stages[0].fd, off, end)
	if errors.Is(err, errors.ErrUnsupported) {
		d.noPunch = true
		return nil
	}
	return err
}

func punchHole(fd int, off, end uint64) error {
	err := retry(func() error {
		return unix.Fallocate(fd, unix.FALLOC_FL_PUNCH_HOLE|unix.FALLOC_FL_KEEP_SIZE, int64(off), int64(end-off))
	})
	if err != nil {
		return fmt.Errorf("punch hole %#x-%#x: %w", off, end, err)
	}
	return nil
}

var zeroBlock [blockSize]byte

// writeZeros writes zeros to a file.
func writeZeros(f *os.File, off, end uint64) error {
	for off < end {
		n, err := f.WriteAt(zeroBlock[:min(blockSize, end-off)], int64(off))
		if err != nil {
			return fmt.Errorf("write zeros: %w", err)
		}
		off += uint64(n)
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
