package agent

import (
	"bytes"
	"encoding/binary"
	"syscall"

	"golang.org/x/sys/unix"
)

// eachName calls fn with every name in the folder open at fd, without "." and
// "..", until it returns false. The name is only valid during the call: reading
// entries this way makes no garbage in folders of any size.
func eachName(fd int, fn func(name []byte) bool) error {
	var buf [4096]byte
	for {
		n, err := unix.ReadDirent(fd, buf[:])
		if err == syscall.EINTR {
			continue
		}
		if err != nil || n <= 0 {
			return err
		}
		for rest := buf[:n]; len(rest) > 0; {
			name, size := dirent(rest)
			if size == 0 {
				return syscall.EIO
			}
			rest = rest[size:]
			if len(name) > 0 && string(name) != "." && string(name) != ".." && !fn(name) {
				return nil
			}
		}
	}
}

// dirent cuts the first struct linux_dirent64 (getdents64(2)) from b: inode and
// offset of 8 bytes each, record length of 2, type of 1, then the name.
func dirent(b []byte) (name []byte, size int) {
	const header = 19
	if len(b) < header {
		return nil, 0
	}
	size = int(binary.NativeEndian.Uint16(b[16:]))
	if size < header || size > len(b) {
		return nil, 0
	}
	name = b[header:size]
	if i := bytes.IndexByte(name, 0); i >= 0 {
		name = name[:i]
	}
	return name, size
}
