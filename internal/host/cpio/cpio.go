// Package cpio writes archives in the "newc" format, which the Linux kernel
// unpacks as its initial root filesystem
// (Documentation/driver-api/early-userspace/buffer-format.rst).
package cpio

import (
	"bufio"
	"fmt"
	"io"
)

// File types of the mode field.
const (
	modeFolder = 0o040000
	modeFile   = 0o100000
	modeChar   = 0o020000
)

// Writer writes one archive. It keeps its first error, which Close returns.
type Writer struct {
	out     *bufio.Writer
	inode   int
	written int64
	err     error
}

// NewWriter writes an archive to w.
func NewWriter(w io.Writer) *Writer { return &Writer{out: bufio.NewWriterSize(w, 64<<10)} }

// Folder adds a folder. Its parents must have been added before.
func (w *Writer) Folder(name string) { w.header(name, modeFolder|0o755, 0, 0, 0) }

// Device adds a character device.
func (w *Writer) Device(name string, major, minor int) {
	w.header(name, modeChar|0o600, 0, major, minor)
}

// File adds a regular file of exactly size bytes read from r.
func (w *Writer) File(name string, permissions uint32, size int64, r io.Reader) {
	const maxSize = 1<<32 - 1 // the field has eight hexadecimal digits
	if size < 0 || size > maxSize {
		w.fail(fmt.Errorf("archive %s: size %d does not fit", name, size))
		return
	}
	w.header(name, modeFile|permissions&0o7777, size, 0, 0)
	if w.err != nil {
		return
	}
	n, err := io.CopyN(w.out, r, size)
	w.written += n
	if err != nil {
		w.fail(fmt.Errorf("archive %s: %w", name, err))
		return
	}
	w.pad()
}

// Close writes the trailer and returns the first error. It does not close the
// underlying writer.
func (w *Writer) Close() error {
	w.inode = 0
	w.header("TRAILER!!!", 0, 0, 0, 0)
	if err := w.out.Flush(); err != nil {
		w.fail(err)
	}
	return w.err
}

func (w *Writer) header(name string, mode uint32, size int64, major, minor int) {
	if w.err != nil {
		return
	}
	w.inode++
	const links, modified, devMajor, devMinor, check = 1, 0, 0, 0, 0
	n, err := fmt.Fprintf(w.out, "070701%08x%08x%08x%08x%08x%08x%08x%08x%08x%08x%08x%08x%08x%s\x00",
		w.inode, mode, 0, 0, links, modified, size, devMajor, devMinor, major, minor, len(name)+1, check, name)
	w.written += int64(n)
	if err != nil {
		w.fail(err)
		return
	}
	w.pad()
}

// pad pads the archive to a multiple of four bytes.
func (w *Writer) pad() {
	for w.written%4 != 0 && w.err == nil {
		w.written++
		if err := w.out.WriteByte(0); err != nil {
			w.fail(err)
		}
	}
}

func (w *Writer) fail(err error) {
	if w.err == nil {
		w.err = err
	}
}
