package agent

import (
	"bytes"
	"context"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"agentrun.dev/internal/guest/guestrpc"
)

// A fork answers once it has renewed itself. Each page that it touches for the first
// time costs a copy and a fault. So the guest is prepared before it is captured. The
// files that a renewal changes are already open, and are written in place instead of
// being replaced. The renewal is rehearsed, so that a fork allocates no memory and
// grows no stack.

// Indexes of the files that are kept open.
const (
	keptHostname = iota
	keptHosts
	keptMachineID
	keptGeneration
	numKept
)

var keptPaths = [numKept]string{"/etc/hostname", "/etc/hosts", "/etc/machine-id", "/run/agentrun/generation"}

// keptFile is a file that is open for writing.
type keptFile struct {
	open bool
	fd   int
	st   unix.Stat_t // state when it was opened
}

// Prepare makes the next renewal cheap. It has no visible effect. With settle it
// waits until the kernel has done its postponed work.
func (r *Renewer) Prepare(ctx context.Context, settle bool) error {
	r.renewing.Lock()
	defer r.renewing.Unlock()
	if err := ctx.Err(); err != nil {
		return err
	}
	for i := range r.kept {
		r.keep(i)
	}
	r.looked = time.Now()
	var uts unix.Utsname
	if err := unix.Uname(&uts); err != nil {
		return failed("read", "host name", err)
	}
	req := guestrpc.RenewRequest{
		Entropy:    make([]byte, guestrpc.MinEntropy),
		Hostname:   unix.ByteSliceToString(uts.Nodename[:]),
		Generation: r.Generation(),
	}
	if _, err := unix.Getrandom(req.Entropy, 0); err != nil {
		return failed("draw", "entropy", err)
	}
	if id, ok := r.contents(keptMachineID); ok && validMachineID(strings.TrimSuffix(string(id), "\n")) {
		req.MachineID = string(id[:len(id)-1])
	}
	if !r.canRehearseName(req.Hostname) {
		req.Hostname = ""
	}
	if _, ok := r.current(keptGeneration); ok {
		if _, err := r.apply(&req); err != nil {
			return err
		}
	}
	clear(req.Entropy)
	if settle {
		// One grace period of RCU frees memory that was removed before.
		if _, _, errno := unix.Syscall(unix.SYS_MEMBARRIER, membarrierGlobal, 0, 0); errno != 0 && errno != unix.ENOSYS && errno != unix.EINVAL {
			return failed("settle", "kernel", errno)
		}
	}
	return nil
}

// keep opens a file that a renewal can write in place: a regular file with one name.
// A renewal replaces all other files.
func (r *Renewer) keep(i int) {
	f := &r.kept[i]
	var st unix.Stat_t
	if f.open && unix.Fstatat(unix.AT_FDCWD, r.root+keptPaths[i], &st, unix.AT_SYMLINK_NOFOLLOW) == nil && f.is(&st) {
		return
	}
	if f.open {
		unix.Close(f.fd)
	}
	*f = keptFile{}
	fd, err := open(unix.AT_FDCWD, r.root+keptPaths[i], unix.O_RDWR|unix.O_NOFOLLOW|unix.O_NONBLOCK|unix.O_NOCTTY, 0)
	if err != nil {
		return
	}
	f.fd = fd
	if unix.Fstat(fd, &f.st) != nil || fileType(f.st.Mode) != TypeFile || f.st.Nlink != 1 || f.st.Size > maxAccountFile {
		unix.Close(fd)
		return
	}
	f.open = true
}

// is reports whether the open file has this state, and one name.
func (f *keptFile) is(st *unix.Stat_t) bool {
	return st.Dev == f.st.Dev && st.Ino == f.st.Ino && st.Mode == f.st.Mode && st.Nlink == 1
}

// freshness is how long after a check of the paths an open file with one name counts
// as the file at its path. A fork renews itself within that time, because its
// monotonic clock continues from the capture, which follows a check at once. Walking
// the paths again would touch every name on them.
const freshness = time.Second

// current reports whether the open file is still the one at its path, and its size.
func (r *Renewer) current(i int) (size int64, ok bool) {
	f := &r.kept[i]
	if !f.open {
		return 0, false
	}
	var st unix.Stat_t
	if time.Since(r.looked) >= freshness && (unix.Fstatat(unix.AT_FDCWD, r.root+keptPaths[i], &st, unix.AT_SYMLINK_NOFOLLOW) != nil || !f.is(&st)) {
		return 0, false
	}
	ok = rawFstat(f.fd, &st) == nil && f.is(&st)
	return st.Size, ok
}

// put writes the contents of a file: in place if it is kept, otherwise by replace.
func (r *Renewer) put(i int, data []byte, replace func([]byte) error) error {
	if size, ok := r.current(i); ok {
		return r.overwrite(i, size, data)
	}
	return replace(data)
}

// contents reads a kept file. The result is valid until the next call. false says
// that the file must be replaced.
func (r *Renewer) contents(i int) ([]byte, bool) {
	if _, ok := r.current(i); !ok {
		return nil, false
	}
	n, err := rawPread(r.kept[i].fd, r.buf[:], 0)
	if err != nil || n == len(r.buf) {
		return nil, false
	}
	return r.buf[:n], true
}

// membarrierGlobal is MEMBARRIER_CMD_GLOBAL of membarrier(2).
const membarrierGlobal = 1

// maxKept bounds the bytes that are read of a kept file; larger files are replaced.
// maxAdded is the most that a renewal adds to one: two lines of hosts.
const (
	maxKept  = 2048
	maxAdded = 256
)

// canRehearseName reports whether writing the name again leaves its files unchanged.
func (r *Renewer) canRehearseName(name string) bool {
	if !ValidHostname(name) {
		return false
	}
	text, ok := r.contents(keptHostname)
	if !ok || string(text) != name+"\n" {
		return false
	}
	hosts, ok := r.contents(keptHosts)
	return ok && bytes.Equal(renameInHosts(nil, hosts, []byte(name), name), hosts)
}

// overwrite changes a kept file of the given size in place. A single call writes all
// of it, and the kernel does not show readers half of one call.
func (r *Renewer) overwrite(i int, size int64, data []byte) error {
	fd := r.kept[i].fd
	if err := rawPwrite(fd, data, 0); err != nil {
		return err
	}
	if size > int64(len(data)) {
		return rawFtruncate(fd, int64(len(data)))
	}
	return nil
}
