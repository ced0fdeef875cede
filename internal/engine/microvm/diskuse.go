package microvm

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"
)

// diskUse is how many bytes the files of a vmm process's disks take. The files have
// no name, so they can only be found through the process's descriptors.
func diskUse(pid int) (uint64, error) {
	proc := "/proc/" + strconv.Itoa(pid)
	fds, err := os.ReadDir(proc + "/fd")
	if err != nil {
		return 0, fmt.Errorf("look at the disks of the vmm process: %w", err)
	}
	var total uint64
	for _, fd := range fds {
		n, err := topSize(proc, fd.Name())
		if err != nil && !errors.Is(err, fs.ErrNotExist) { // the descriptor was closed meanwhile
			return 0, fmt.Errorf("look at the disks of the vmm process: %w", err)
		}
		total += n
	}
	return total, nil
}

// topSize is the size of a descriptor's file if it is the top of a disk, and 0
// otherwise. A top is a file without a name, opened for reading and writing. Memfds
// are not tops; they count as memory.
func topSize(proc, fd string) (uint64, error) {
	path := filepath.Join(proc, "fd", fd)
	var st unix.Stat_t
	if err := unix.Stat(path, &st); err != nil {
		return 0, err
	}
	if st.Mode&unix.S_IFMT != unix.S_IFREG || st.Nlink != 0 {
		return 0, nil
	}
	if target, err := os.Readlink(path); err != nil || strings.HasPrefix(target, "/memfd:") {
		return 0, err
	}
	info, err := os.ReadFile(filepath.Join(proc, "fdinfo", fd))
	if err != nil {
		return 0, err
	}
	for line := range strings.Lines(string(info)) {
		octal, found := strings.CutPrefix(line, "flags:")
		if !found {
			continue
		}
		flags, err := strconv.ParseUint(strings.TrimSpace(octal), 8, 32)
		if err != nil || flags&unix.O_ACCMODE != unix.O_RDWR {
			return 0, err
		}
		return uint64(st.Blocks) * 512, nil
	}
	return 0, nil
}
