package image

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"hash/crc32"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"

	"agentrun.dev/internal/durable"
	"agentrun.dev/internal/storage/image/tree"
)

// FromDir packs a folder into an EROFS image at out, which appears whole or not
// at all. The image has no inline data and no compression, so that every engine
// can read it and pages map straight onto the file.
func FromDir(ctx context.Context, dir, out string) error { return pack(ctx, dir, out, true) }

// FromDirPlain is FromDir without extended attributes, because gVisor cannot
// open files that have any. lost names the files that had some, such as programs
// with capabilities, relative to the folder.
func FromDirPlain(ctx context.Context, dir, out string) (lost []string, err error) {
	if lost, err = withXattrs(dir); err != nil {
		return nil, err
	}
	return lost, pack(ctx, dir, out, false)
}

// Unnamed packs a folder like FromDir, or like FromDirPlain, into a file without a
// name. The file disappears with this process, even if it is killed.
func Unnamed(ctx context.Context, dir string, plain bool) (_ *os.File, lost []string, err error) {
	if plain {
		if lost, err = withXattrs(dir); err != nil {
			return nil, nil, err
		}
	}
	tmp, err := os.CreateTemp("", "agentrun-root-")
	if err != nil {
		return nil, nil, fmt.Errorf("pack root filesystem: %w", err)
	}
	defer func() { err = errors.Join(err, tmp.Close()) }()
	// Not O_TMPFILE: overlay filesystems support it only since Linux 6.2.
	if err := os.Remove(tmp.Name()); err != nil {
		return nil, nil, fmt.Errorf("pack root filesystem: %w", err)
	}
	if err := packInto(ctx, dir, tmp, !plain); err != nil {
		return nil, nil, err
	}
	// The caller must not be able to write to it.
	f, err := os.Open("/proc/self/fd/" + strconv.Itoa(int(tmp.Fd())))
	if err != nil {
		return nil, nil, fmt.Errorf("pack root filesystem: %w", err)
	}
	return f, lost, nil
}

// withXattrs names the files of a folder that have extended attributes.
func withXattrs(dir string) (names []string, err error) {
	if dir, err = filepath.EvalSymlinks(dir); err != nil {
		return nil, fmt.Errorf("root filesystem: %w", err)
	}
	facts, err := tree.Survey(dir)
	if err != nil {
		return nil, fmt.Errorf("root filesystem: %w", err)
	}
	for _, name := range facts.WithXattrs {
		names = append(names, strings.TrimPrefix(name, "/"))
	}
	return names, nil
}

// pack packs a folder with or without the files' extended attributes. The same
// folder gives the same bytes.
func pack(ctx context.Context, dir, out string, xattrs bool) error {
	var failed error
	err := durable.Replace(out, 0o600, func(f *os.File) error {
		failed = packInto(ctx, dir, f, xattrs)
		return failed
	})
	if err != nil && failed == nil {
		return fmt.Errorf("pack root filesystem: %w", err)
	}
	return err
}

// packInto packs a folder into an empty file.
func packInto(ctx context.Context, dir string, out *os.File, xattrs bool) (err error) {
	// mkfs.erofs would pack a symbolic link to the folder as a symbolic link.
	if dir, err = filepath.EvalSymlinks(dir); err != nil {
		return fmt.Errorf("root filesystem: %w", err)
	}
	info, err := os.Stat(dir)
	if err != nil {
		return fmt.Errorf("root filesystem: %w", err)
	}
	if !info.IsDir() {
		return fmt.Errorf("root filesystem %s is not a folder", dir)
	}
	mkfs, err := exec.LookPath("mkfs.erofs")
	if err != nil {
		return errors.New("mkfs.erofs is missing: apt-get install erofs-utils")
	}
	args := []string{"-E", "noinline_data", "--preserve-mtime", "--quiet", "-U", packUUID}
	if !xattrs {
		args = append(args, "-x-1")
	}
	var said strings.Builder
	// The file may have no name.
	cmd := exec.CommandContext(ctx, mkfs, append(args, "/proc/self/fd/3", dir)...)
	cmd.ExtraFiles = []*os.File{out}
	cmd.Stderr = &said
	// If this process is killed, the kernel ends mkfs.erofs.
	cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	if err := runLocked(cmd); err != nil {
		return fmt.Errorf("pack root filesystem %s with mkfs.erofs: %w: %s", dir, err, strings.TrimSpace(said.String()))
	}
	if err := clearBuildTime(out); err != nil {
		return fmt.Errorf("pack root filesystem %s: %w", dir, err)
	}
	return nil
}

// packUUID is the same in all images: their digests distinguish them.
const packUUID = "00000000-0000-0000-0000-000000000000"

// The superblock (fs/erofs/erofs_fs.h).
const (
	superblockAt    = 1024
	superblockMagic = 0xE0F5E1E2
	blockSize       = 4096
	checksumAt      = 4
	buildTimeAt     = 24 // 8 bytes of seconds, 4 of nanoseconds
	buildTimeSize   = 12
)

// clearBuildTime makes the image independent of the time of packing. All inodes
// have times of their own: the superblock's is not used.
func clearBuildTime(f *os.File) error {
	sb := make([]byte, blockSize-superblockAt)
	if _, err := f.ReadAt(sb, superblockAt); err != nil {
		return fmt.Errorf("read the superblock: %w", err)
	}
	sum := func() uint32 {
		binary.LittleEndian.PutUint32(sb[checksumAt:], 0)
		return ^crc32.Checksum(sb, crc32.MakeTable(crc32.Castagnoli))
	}
	stored := binary.LittleEndian.Uint32(sb[checksumAt:])
	if binary.LittleEndian.Uint32(sb) != superblockMagic || stored != sum() {
		return errors.New("mkfs.erofs has written a superblock of an unknown form")
	}
	clear(sb[buildTimeAt : buildTimeAt+buildTimeSize])
	binary.LittleEndian.PutUint32(sb[checksumAt:], sum())
	if _, err := f.WriteAt(sb, superblockAt); err != nil {
		return fmt.Errorf("write the superblock: %w", err)
	}
	return nil
}
