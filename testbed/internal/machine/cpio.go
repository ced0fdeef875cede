package machine

import (
	"bufio"
	"fmt"
	"io"
	"os"
)

// cpioWriter writes an initramfs: a cpio archive in the "newc" form
// (Documentation/driver-api/early-userspace/buffer-format.rst).
type cpioWriter struct {
	w     *bufio.Writer
	inode int
	err   error
}

func newCpioWriter(w io.Writer) *cpioWriter { return &cpioWriter{w: bufio.NewWriterSize(w, 1<<20)} }

const (
	modeFolder = 0o040755
	modeFile   = 0o100644
	modeExec   = 0o100755
	modeChar   = 0o020600
)

func (c *cpioWriter) folder(name string)                 { c.entry(name, modeFolder, nil, 0, 0) }
func (c *cpioWriter) file(name string, data []byte)      { c.entry(name, modeFile, data, 0, 0) }
func (c *cpioWriter) char(name string, major, minor int) { c.entry(name, modeChar, nil, major, minor) }

func (c *cpioWriter) executable(name, source string) {
	data, err := os.ReadFile(source)
	if err != nil {
		c.err = err
		return
	}
	c.entry(name, modeExec, data, 0, 0)
}

func (c *cpioWriter) entry(name string, mode int, data []byte, major, minor int) {
	if c.err != nil {
		return
	}
	c.inode++
	_, c.err = fmt.Fprintf(c.w, "070701%08x%08x%08x%08x%08x%08x%08x%08x%08x%08x%08x%08x%08x%s\x00",
		c.inode, mode, 0, 0, 1, 0, len(data), 0, 0, major, minor, len(name)+1, 0, name)
	c.pad(110 + len(name) + 1)
	if c.err == nil {
		_, c.err = c.w.Write(data)
	}
	c.pad(len(data))
}

// pad aligns what was written to four bytes.
func (c *cpioWriter) pad(n int) {
	for ; n%4 != 0 && c.err == nil; n++ {
		c.err = c.w.WriteByte(0)
	}
}

func (c *cpioWriter) close() error {
	c.entry("TRAILER!!!", 0, nil, 0, 0)
	if c.err != nil {
		return fmt.Errorf("write the initramfs: %w", c.err)
	}
	return c.w.Flush()
}
