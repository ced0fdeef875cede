package microvm

import (
	"errors"
	"fmt"
	"os"

	"agentrun.dev/internal/host/cpio"
	"golang.org/x/sys/unix"
)

// Initramfs packs the guest agent as /init of an initial root filesystem, in memory.
// A guest needs no other file from us, so its own root filesystem may be empty. The
// kernel brings /dev/console itself.
func Initramfs(agent *os.File) (*os.File, error) {
	info, err := agent.Stat()
	if err != nil {
		return nil, fmt.Errorf("pack guest agent: %w", err)
	}
	fd, err := unix.MemfdCreate("initramfs", unix.MFD_CLOEXEC)
	if err != nil {
		return nil, fmt.Errorf("pack guest agent: %w", err)
	}
	out := os.NewFile(uintptr(fd), "initramfs")
	if _, err := agent.Seek(0, 0); err != nil {
		return nil, errors.Join(fmt.Errorf("pack guest agent: %w", err), out.Close())
	}
	w := cpio.NewWriter(out)
	w.File("init", 0o755, info.Size(), agent)
	if err := w.Close(); err != nil {
		return nil, errors.Join(fmt.Errorf("pack guest agent: %w", err), out.Close())
	}
	return out, nil
}
