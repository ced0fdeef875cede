package jail

import (
	"crypto/rand"
	"encoding/binary"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strconv"

	"golang.org/x/sys/unix"
)

// uids hands out user ids so that no two living processes of this host share
// one, no matter which parent started them. An id is taken while the file of
// its number is locked. The process inherits the lock: flock(2) belongs to the
// open file, not to the process that opened it. So the lock ends with the
// process, even if the parent dies first. A process under an attacker's control
// may close the file. Therefore an id whose file exists also counts as taken
// while a process of that id lives.
type uids struct {
	dir          string
	first, count int
	living       func(uid int) (bool, error)
}

func openUIDs(dir string, first, count int, living func(uid int) (bool, error)) (*uids, error) {
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return nil, fmt.Errorf("make the folder of user ids: %w", err)
	}
	return &uids{dir, first, count, living}, nil
}

// errTaken says that the id is in use.
var errTaken = errors.New("the user id is taken")

// take locks a free id. stale says that a process had the id before and its
// cell was not cleaned up.
func (u *uids) take() (uid int, lock *os.File, stale bool, err error) {
	// Start anywhere in the range, so that ids in use are rarely tried.
	// (rand.Read never fails.)
	var b [4]byte
	_, _ = rand.Read(b[:])
	start := int(binary.NativeEndian.Uint32(b[:]) % uint32(u.count))
	for i := range u.count {
		uid = u.first + (start+i)%u.count
		lock, stale, err = u.lock(uid)
		if !errors.Is(err, errTaken) {
			return uid, lock, stale, err
		}
	}
	return 0, nil, false, fmt.Errorf("all %d user ids from %d on are in use: end some sandboxes", u.count, u.first)
}

func (u *uids) has(uid int) bool { return uid >= u.first && uid < u.first+u.count }

func (u *uids) path(uid int) string { return filepath.Join(u.dir, strconv.Itoa(uid)) }

// lock makes and locks the file of an id.
func (u *uids) lock(uid int) (f *os.File, stale bool, err error) {
	for {
		// Only for reading: all that a process can do with it is to hold it.
		f, err = os.OpenFile(u.path(uid), os.O_RDONLY|os.O_CREATE|os.O_EXCL, 0o600)
		if stale = errors.Is(err, fs.ErrExist); stale {
			if f, err = os.Open(u.path(uid)); errors.Is(err, fs.ErrNotExist) {
				continue // it was removed just now
			}
		}
		if err != nil {
			return nil, false, fmt.Errorf("lock user id %d: %w", uid, err)
		}
		var held bool
		if stale {
			held, err = u.vacate(f, uid)
		} else {
			held, err = tryLock(f)
		}
		if err == nil && held {
			return f, stale, nil
		}
		if err = errors.Join(err, f.Close()); err != nil {
			return nil, false, fmt.Errorf("lock user id %d: %w", uid, err)
		}
		if _, err := os.Lstat(u.path(uid)); err == nil {
			return nil, false, errTaken
		}
	}
}

// tryLock locks a file, unless another process has locked it or it was removed:
// a lock on a removed file excludes no other process.
func tryLock(f *os.File) (held bool, err error) {
	err = unix.Flock(int(f.Fd()), unix.LOCK_EX|unix.LOCK_NB)
	if errors.Is(err, unix.EWOULDBLOCK) {
		return false, nil
	}
	var st unix.Stat_t
	if err == nil {
		err = unix.Fstat(int(f.Fd()), &st)
	}
	return st.Nlink > 0, err
}

// vacate locks the file of an id that was used before, unless a process still
// has the id.
func (u *uids) vacate(f *os.File, uid int) (held bool, err error) {
	if held, err = tryLock(f); err != nil || !held {
		return false, err
	}
	living, err := u.living(uid)
	return !living, err
}

// free gives an id back. The caller holds its lock; free closes it.
func (u *uids) free(uid int, lock *os.File) error {
	return errors.Join(os.Remove(u.path(uid)), lock.Close())
}

// sweep calls clean for each id whose process has ended, and frees it.
func (u *uids) sweep(clean func(uid int) error) error {
	entries, err := os.ReadDir(u.dir)
	if err != nil {
		return fmt.Errorf("list user ids: %w", err)
	}
	var errs []error
	for _, e := range entries {
		if uid, err := strconv.Atoi(e.Name()); err == nil { // other files are not ours
			errs = append(errs, u.reclaim(uid, clean))
		}
	}
	return errors.Join(errs...)
}

// reclaim frees an id if no process has it.
func (u *uids) reclaim(uid int, clean func(uid int) error) error {
	f, err := os.Open(u.path(uid))
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err != nil {
		return fmt.Errorf("free user id %d: %w", uid, err)
	}
	held, err := u.vacate(f, uid)
	if err != nil || !held {
		return errors.Join(err, f.Close())
	}
	if err := clean(uid); err != nil {
		return errors.Join(err, f.Close())
	}
	return u.free(uid, f)
}
