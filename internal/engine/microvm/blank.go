package microvm

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"strings"
	"sync"

	"agentrun.dev/internal/engine/microvm/process"
	"agentrun.dev/internal/storage/extent"
	"agentrun.dev/internal/storage/layer"
	"agentrun.dev/internal/vmm/vmmctl"
	"golang.org/x/sys/unix"
)

// diskID is the name of the disk of Spec.Disk in snapshots.
const diskID = "disk"

// blank is an empty file system of one size, as a layer that all sandboxes with such
// a disk start from. The engine owns its file. The file is in memory and takes only
// some pages, whatever the size of the disk.
type blank struct {
	stack layer.Stack
	file  *os.File
}

// blanks are the blank file systems that an engine has made, by size.
type blanks struct {
	mu     sync.Mutex // protects bySize; held while a blank is made
	bySize map[uint64]*blank
}

func (b *blanks) get(ctx context.Context, size uint64) (*blank, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if known := b.bySize[size]; known != nil {
		return known, nil
	}
	made, err := newBlank(ctx, size)
	if err != nil {
		return nil, fmt.Errorf("make a disk of %d bytes: %w", size, err)
	}
	if b.bySize == nil {
		b.bySize = map[uint64]*blank{}
	}
	b.bySize[size] = made
	return made, nil
}

func (b *blanks) close() error {
	b.mu.Lock()
	defer b.mu.Unlock()
	var errs []error
	for _, made := range b.bySize {
		errs = append(errs, made.file.Close())
	}
	b.bySize = nil
	return errors.Join(errs...)
}

// attachDisk gives a sandbox its disk before it boots.
func (s *sandbox) attachDisk(ctx context.Context, b *bootMessage, size uint64) error {
	shared, err := s.engine.blanks.get(ctx, (size+layer.PageSize-1)/layer.PageSize*layer.PageSize)
	if err != nil {
		return err
	}
	file, err := reopen(shared.file) // the sandbox's own descriptor: the sandbox may outlive the engine
	if err != nil {
		return err
	}
	s.boot.blank = &blank{shared.stack, file}
	top, err := s.engine.top()
	if err != nil {
		return err // the caller releases the sandbox, which closes file
	}
	b.addDisk(vmmctl.Disk{ID: diskID, Stack: &shared.stack}, b.owned(top), file)
	s.disks = append(s.disks, disk{id: diskID, stack: shared.stack})
	return nil
}

// mke2fsEnv and mke2fsArgs make the same bytes for the same size, whatever the host's
// settings. So snapshots share the layer, and a pack is the same wherever it is made.
var (
	mke2fsEnv = []string{"MKE2FS_CONFIG=/dev/null", "E2FSPROGS_FAKE_TIME=1", "LC_ALL=C"}
	// There is no journal: the file system is never mounted a second time. A machine
	// that has ended is not booted again, and a capture contains the guest's memory
	// with all unwritten data. There are no backup superblocks, and all metadata is
	// at the beginning, which keeps an empty file system small.
	mke2fsArgs = []string{
		"-q", "-F", "-t", "ext4", "-b", "4096", "-I", "256", "-i", "16384", "-m", "0", "-L", "agentrun",
		"-O", "none,ext_attr,dir_index,filetype,extent,flex_bg,sparse_super2,large_file,huge_file,dir_nlink,extra_isize,64bit,metadata_csum",
		"-U", "6167656e-7472-756e-8000-000000000001",
		"-E", "lazy_itable_init=1,nodiscard,num_backup_sb=0,packed_meta_blocks=1,root_owner=0:0,hash_seed=6167656e-7472-756e-8000-000000000002",
	}
)

// newBlank formats a file in memory and packs its nonzero pages into a layer.
func newBlank(ctx context.Context, size uint64) (_ *blank, err error) {
	mke2fs, err := findMke2fs()
	if err != nil {
		return nil, err
	}
	whole, err := process.MemoryFile("format", nil)
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, whole.Close()) }()
	if err := whole.Truncate(int64(size)); err != nil {
		return nil, err
	}
	cmd := exec.CommandContext(ctx, mke2fs, append(mke2fsArgs, "/proc/self/fd/3")...)
	var said bytes.Buffer
	cmd.Env, cmd.ExtraFiles, cmd.Stdout, cmd.Stderr = mke2fsEnv, []*os.File{whole}, &said, &said
	if err := cmd.Run(); err != nil {
		return nil, fmt.Errorf("%s: %w: %s", mke2fs, err, strings.TrimSpace(said.String()))
	}
	return packBlank(whole, size)
}

// findMke2fs looks in PATH and in the usual folders, since not every PATH contains
// those.
func findMke2fs() (string, error) {
	for _, name := range []string{"mke2fs", "/usr/sbin/mke2fs", "/sbin/mke2fs"} {
		if path, err := exec.LookPath(name); err == nil {
			return path, nil
		}
	}
	return "", errors.New("mke2fs is missing: apt-get install e2fsprogs")
}

func packBlank(whole *os.File, size uint64) (*blank, error) {
	runs, err := dataOf(whole, size)
	if err != nil {
		return nil, fmt.Errorf("read the new file system: %w", err)
	}
	runs = extent.Coalesce(runs, layer.MaxRuns)
	packed, err := process.MemoryFile("blank", nil)
	if err != nil {
		return nil, err
	}
	w := layer.NewWriter(packed)
	for _, r := range runs {
		if _, err = io.Copy(w, io.NewSectionReader(whole, int64(r.Start), int64(r.Length))); err != nil {
			break
		}
	}
	var stack layer.Stack
	if err == nil {
		stack, err = layer.Overlay(layer.Stack{Size: size}, w.Ref(), runs, nil)
	}
	if err == nil {
		const seals = unix.F_SEAL_WRITE | unix.F_SEAL_SHRINK | unix.F_SEAL_GROW | unix.F_SEAL_SEAL
		_, err = unix.FcntlInt(packed.Fd(), unix.F_ADD_SEALS, seals)
	}
	if err != nil {
		return nil, errors.Join(fmt.Errorf("pack the new file system: %w", err), packed.Close())
	}
	return &blank{stack, packed}, nil
}

// dataOf lists the nonzero pages of a sparse file.
func dataOf(f *os.File, size uint64) (runs []extent.Run, err error) {
	var page, zeros [layer.PageSize]byte
	for off := int64(0); ; {
		off, err = unix.Seek(int(f.Fd()), off, unix.SEEK_DATA)
		if errors.Is(err, unix.ENXIO) { // no data follows
			return runs, nil
		}
		if err != nil {
			return nil, err
		}
		off -= off % layer.PageSize
		if uint64(off) >= size {
			return runs, nil
		}
		if _, err := f.ReadAt(page[:], off); err != nil {
			return nil, err
		}
		if page != zeros {
			runs = append(runs, extent.Run{Start: uint64(off), Length: layer.PageSize})
		}
		off += layer.PageSize
	}
}
