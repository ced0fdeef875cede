package snapshot

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"

	"golang.org/x/sys/unix"
)

// Usage adds up the disk space of folders. A file that several of them link to
// counts once. The zero value is empty and ready to use.
type Usage struct {
	// Bytes is what all folders together take.
	Bytes   uint64
	seen    map[inode]*usedFile
	folders map[string]map[inode]bool // that were added
}

// usedFile is a file of some folders.
type usedFile struct {
	bytes   uint64
	folders int
}

type inode struct{ device, number uint64 }

// Size is the disk space of one folder.
type Size struct {
	// Stored is the space of all files in it. Unshared is the space of those that
	// have no other name: deleting the folder frees that much.
	Stored, Unshared uint64
}

// BytesBeside adds up the sizes of a folder's files, except the layers for which
// shared is true.
func BytesBeside(dir string, shared func(digest string) bool) (bytes uint64, err error) {
	err = filepath.WalkDir(dir, func(path string, d fs.DirEntry, err error) error {
		if err != nil || !d.Type().IsRegular() {
			return err
		}
		if name, _ := strings.CutSuffix(d.Name(), sealedSuffix); shared(name) {
			return nil
		}
		info, err := d.Info()
		if err == nil {
			bytes += uint64(info.Size())
		}
		return err
	})
	if err != nil {
		return 0, fmt.Errorf("add up what is stored: %w", err)
	}
	return bytes, nil
}

// statBlock is the unit of stat(2)'s st_blocks.
const statBlock = 512

// Remove takes back what Add has added of a folder, which may be gone by now.
func (u *Usage) Remove(dir string) {
	for id := range u.folders[dir] {
		file := u.seen[id]
		if file.folders--; file.folders == 0 {
			u.Bytes -= file.bytes
			delete(u.seen, id)
		}
	}
	delete(u.folders, dir)
}

// Add adds a folder, anew if it was added before. What vanishes meanwhile does not count.
func (u *Usage) Add(dir string) (size Size, err error) {
	u.Remove(dir)
	own := map[inode]bool{} // a file may have two names in one folder
	if u.seen == nil {
		u.seen, u.folders = map[inode]*usedFile{}, map[string]map[inode]bool{}
	}
	u.folders[dir] = own
	err = filepath.WalkDir(dir, func(path string, d fs.DirEntry, err error) error {
		if os.IsNotExist(err) {
			return nil
		}
		if err != nil || !d.Type().IsRegular() {
			return err
		}
		var st unix.Stat_t
		if err := unix.Lstat(path, &st); err != nil {
			if errors.Is(err, unix.ENOENT) {
				err = nil
			}
			return err
		}
		id, bytes := inode{st.Dev, st.Ino}, uint64(st.Blocks)*statBlock
		if own[id] {
			return nil
		}
		own[id] = true
		size.Stored += bytes
		if st.Nlink == 1 {
			size.Unshared += bytes
		}
		file := u.seen[id]
		if file == nil {
			file = &usedFile{bytes: bytes}
			u.seen[id] = file
			u.Bytes += bytes
		}
		file.folders++
		return nil
	})
	return size, err
}
