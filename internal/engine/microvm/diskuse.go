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

// diskUse is how many bytes the files take that a vmm process writes its disks
// to. They have no name: the process is the only one to ask.
func diskUse(pid int) (uint64, error) {
	proc := "/proc/" + strconv.Itoa(pid)
	fds, err := os.ReadDir(proc + "/fd")
	if err != nil {
		return 0, fmt.Errorf("look at the disks of the vmm process: %w", err)
	}
	var total uint64
	for _, fd := range fds {
		n, err := topSize(proc, fd.Name())
		if err != nil && !errors.Is(err, fs.ErrNotExist) { // it was closed meanwhile
			return 0, fmt.Errorf("look at the disks of the vmm process: %w", err)
		}
		total += n
	}
	return total, nil
}

// topSize is that of a descriptor if it is a disk's: a file without a name,
// opened for reading and writing, and no memfd, which memory is counted in.
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
