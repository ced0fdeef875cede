package layer

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"strconv"
	"sync"
	"syscall"

	"golang.org/x/sys/unix"
)

// lockName is the only file in the folder that is not a layer. Each byte of it
// is a lock (fcntl(2), open file description locks); a digest uses one of them.
const lockName = ".lock"

// Resident keeps layers in memory: in a folder on tmpfs that belongs to one
// user. A file gets its name only when it is complete and verified. Until then
// it has no name (O_TMPFILE), so that a killed process leaves no file behind.
// It is safe for concurrent use, also by several processes.
type Resident struct {
	root *os.Root
	// mu protects loading.
	mu sync.Mutex
	// loading has the digests that this process is loading; the channel is
	// closed when that ends, with or without an error.
	loading map[Digest]chan struct{}
}

// OpenResident makes the folder if it is missing, for this user alone. It
// refuses a folder into which other users could have put files.
func OpenResident(dir string) (*Resident, error) {
	if err := os.Mkdir(dir, 0o700); err != nil && !errors.Is(err, fs.ErrExist) {
		return nil, fmt.Errorf("make folder for resident layers: %w (memory of sandboxes is kept in files there: mount a tmpfs on %s that user %d may write to)",
			err, filepath.Dir(dir), os.Geteuid())
	}
	// os.OpenRoot would follow a symbolic link.
	f, err := os.OpenFile(dir, unix.O_DIRECTORY|unix.O_NOFOLLOW, 0)
	if err != nil {
		return nil, fmt.Errorf("open folder for resident layers: %w", err)
	}
	defer f.Close()
	info, err := checkFolder(f)
	if err != nil {
		return nil, fmt.Errorf("folder for resident layers %s: %w", dir, err)
	}
	root, err := os.OpenRoot(dir)
	if err != nil {
		return nil, fmt.Errorf("open folder for resident layers: %w", err)
	}
	if now, err := root.Stat("."); err != nil || !os.SameFile(info, now) {
		return nil, errors.Join(fmt.Errorf("folder for resident layers %s was replaced while it was opened", dir), err, root.Close())
	}
	return &Resident{root: root, loading: map[Digest]chan struct{}{}}, nil
}

// ResidentFolder is the folder that belongs to a state folder. Each state
// folder has its own, so that tidying one does not empty another. To remove a
// state folder completely, remove this folder, too.
func ResidentFolder(state string) string {
	sum := sha256.Sum256([]byte(state))
	return "/dev/shm/agentrun-" + strconv.Itoa(os.Geteuid()) + "-" + hex.EncodeToString(sum[:4])
}

func checkFolder(f *os.File) (os.FileInfo, error) {
	info, err := f.Stat()
	if err != nil {
		return nil, err
	}
	if st, ok := info.Sys().(*syscall.Stat_t); !ok || int(st.Uid) != os.Geteuid() {
		return nil, fmt.Errorf("belongs to another user than %d: choose another folder", os.Geteuid())
	}
	if info.Mode().Perm()&0o077 != 0 {
		return nil, fmt.Errorf("has mode %s, so others can reach it: chmod 700 it", info.Mode())
	}
	var st unix.Statfs_t
	if err := retry(func() error { return unix.Fstatfs(int(f.Fd()), &st) }); err != nil {
		return nil, fmt.Errorf("find its file system: %w", err)
	}
	if st.Type != unix.TMPFS_MAGIC {
		return nil, fmt.Errorf("is not on tmpfs (file system type %#x): choose a folder below /dev/shm", st.Type)
	}
	return info, nil
}

// Close closes the folder. Layers and descriptors remain valid.
func (r *Resident) Close() error { return r.root.Close() }

// Load returns a read-only descriptor of a layer. If the layer is not resident,
// Load copies it from open's reader and verifies it. It does so only once, no
// matter how many callers and processes ask for the layer.
func (r *Resident) Load(ctx context.Context, ref Ref, open func() (io.ReadCloser, error)) (*os.File, error) {
	if err := ref.validate(); err != nil {
		return nil, err
	}
	for {
		f, err := r.open(ref)
		if !errors.Is(err, fs.ErrNotExist) {
			return f, err
		}
		end, mine := r.begin(ref.Digest)
		if mine {
			err := r.load(ctx, ref, open)
			r.end(ref.Digest)
			if err != nil {
				return nil, fmt.Errorf("load layer %s: %w", ref.Digest, err)
			}
			continue
		}
		select {
		case <-end:
		case <-ctx.Done():
			return nil, fmt.Errorf("load layer %s: %w", ref.Digest, ctx.Err())
		}
	}
}

// open opens a resident layer.
func (r *Resident) open(ref Ref) (*os.File, error) {
	f, err := r.root.Open(ref.Digest.String())
	if err != nil {
		return nil, fmt.Errorf("open resident layer: %w", err)
	}
	info, err := f.Stat()
	if err == nil && uint64(info.Size()) != ref.Size {
		err = fmt.Errorf("it has %d bytes, %d are expected", info.Size(), ref.Size)
	}
	if err != nil {
		return nil, errors.Join(fmt.Errorf("resident layer %s: %w", ref.Digest, err), f.Close())
	}
	return f, nil
}

// begin makes the caller the one that loads d, or returns a channel to wait
// for. Waiting for the lock instead would block a thread for each caller.
func (r *Resident) begin(d Digest) (end <-chan struct{}, mine bool) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if c, ok := r.loading[d]; ok {
		return c, false
	}
	r.loading[d] = make(chan struct{})
	return nil, true
}

func (r *Resident) end(d Digest) {
	r.mu.Lock()
	defer r.mu.Unlock()
	close(r.loading[d])
	delete(r.loading, d)
}

// load makes a layer resident, unless another process has done so meanwhile.
func (r *Resident) load(ctx context.Context, ref Ref, open func() (io.ReadCloser, error)) error {
	lock, err := r.lock(ctx, ref.Digest)
	if err != nil {
		return err
	}
	defer lock.Close() // also unlocks
	if _, err := r.root.Lstat(ref.Digest.String()); !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	src, err := open()
	if err != nil {
		return err
	}
	defer src.Close()
	dst, err := r.Create()
	if err != nil {
		return err
	}
	defer dst.Close()
	if err := Copy(ctx, dst, src, ref); err != nil {
		return err
	}
	return r.Adopt(ctx, dst, ref)
}

// lock waits for the lock of a digest. Closing the returned file unlocks it.
func (r *Resident) lock(ctx context.Context, d Digest) (*os.File, error) {
	f, err := r.root.OpenFile(lockName, os.O_RDWR|os.O_CREATE, 0o600)
	if err != nil {
		return nil, fmt.Errorf("open lock: %w", err)
	}
	// Two digests that share a byte wait for each other, which is harmless.
	where := int64(d[0])<<24 | int64(d[1])<<16 | int64(d[2])<<8 | int64(d[3])
	locked := make(chan error, 1)
	go func() {
		locked <- retry(func() error {
			return unix.FcntlFlock(f.Fd(), unix.F_OFD_SETLKW, &unix.Flock_t{Type: unix.F_WRLCK, Start: where, Len: 1})
		})
	}()
	select {
	case err = <-locked:
		if err != nil {
			return nil, errors.Join(fmt.Errorf("lock: %w", err), f.Close())
		}
		return f, nil
	case <-ctx.Done():
		// The call cannot be interrupted: it ends when the other loader ends.
		go func() {
			<-locked
			_ = f.Close() // the file is only a lock
		}()
		return nil, ctx.Err()
	}
}

// Create opens a new file in the folder, without a name, for Adopt. Closing it
// without Adopt deletes it.
func (r *Resident) Create() (*os.File, error) {
	f, err := r.root.OpenFile(".", unix.O_TMPFILE|os.O_RDWR, 0o600)
	if err != nil {
		return nil, fmt.Errorf("make resident file: %w", err)
	}
	return f, nil
}

// Adopt makes a file of Create the resident copy of a layer. The caller has
// hashed it (Writer) and closes it. From now on the file must not be written,
// also not by other processes that have its descriptor.
func (r *Resident) Adopt(ctx context.Context, f *os.File, ref Ref) error {
	if err := ctx.Err(); err != nil {
		return err
	}
	if err := ref.validate(); err != nil {
		return err
	}
	info, err := f.Stat()
	if err != nil {
		return fmt.Errorf("adopt layer %s: %w", ref.Digest, err)
	}
	if uint64(info.Size()) != ref.Size {
		return fmt.Errorf("adopt layer %s: the file has %d bytes, %d are expected", ref.Digest, info.Size(), ref.Size)
	}
	if err := f.Chmod(0o400); err != nil {
		return fmt.Errorf("adopt layer %s: %w", ref.Digest, err)
	}
	dir, err := r.root.Open(".")
	if err != nil {
		return fmt.Errorf("adopt layer %s: %w", ref.Digest, err)
	}
	defer dir.Close()
	from := "/proc/self/fd/" + strconv.Itoa(int(f.Fd()))
	err = unix.Linkat(unix.AT_FDCWD, from, int(dir.Fd()), ref.Digest.String(), unix.AT_SYMLINK_FOLLOW)
	if err != nil && !errors.Is(err, unix.EEXIST) { // EEXIST: the same bytes are there already
		return fmt.Errorf("adopt layer %s: %w", ref.Digest, err)
	}
	return nil
}

// retry repeats a system call that was interrupted by a signal.
func retry(call func() error) error {
	for {
		if err := call(); !errors.Is(err, unix.EINTR) {
			return err
		}
	}
}
