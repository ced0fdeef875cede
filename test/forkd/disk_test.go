package forkd

import (
	"errors"
	"os"
	"path/filepath"

	"golang.org/x/sys/unix"
)

// onDisk puts the state folder on a file system of its own. It must be called before a
// daemon is started.
func (n *node) onDisk(options string) {
	n.t.Helper()
	if err := unix.Mount("tmpfs", n.State, "tmpfs", 0, options); err != nil {
		n.t.Fatalf("a small disk: %v", err)
	}
	n.t.Cleanup(func() { _ = unix.Unmount(n.State, unix.MNT_DETACH) })
}

func (n *node) filler() string { return filepath.Join(n.State, "filler") }

// fill fills the state folder's disk until only that many bytes are left.
func (n *node) fill(left uint64) {
	n.t.Helper()
	f, err := os.OpenFile(n.filler(), os.O_CREATE|os.O_WRONLY|os.O_APPEND, 0o600)
	if err != nil {
		n.t.Fatal(err)
	}
	defer func() { _ = f.Close() }()
	for block := make([]byte, 1<<20); ; {
		var st unix.Statfs_t
		if err := unix.Statfs(n.State, &st); err != nil {
			n.t.Fatal(err)
		}
		free := st.Bavail * uint64(st.Bsize)
		if free <= left {
			return
		}
		_, err := f.Write(block[:min(uint64(len(block)), free-left)])
		if err != nil && !errors.Is(err, unix.ENOSPC) {
			n.t.Fatal(err)
		}
	}
}
