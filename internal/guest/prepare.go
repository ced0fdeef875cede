package guest

import (
	"bytes"
	"context"
	"strings"

	"golang.org/x/sys/unix"

	"agentrun.dev/internal/guestrpc"
)

// A fork answers when it has renewed itself, and what that touches for the
// first time it pays for: each page is a copy and a fault. So the guest is
// prepared before it is captured. The files that a renewal changes are open,
// and are written in place instead of being made anew; and the renewal is
// rehearsed, so that in a fork no memory is allocated and no stack grows.

// The files that are kept open.
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
	st   unix.Stat_t // as it was opened
}

// Prepare makes the next renewal cheap. It changes nothing that can be seen.
// settle waits until the kernel has done what it puts off.
func (r *Renewer) Prepare(ctx context.Context, settle bool) error {
	r.renewing.Lock()
	defer r.renewing.Unlock()
	if err := ctx.Err(); err != nil {
		return err
	}
	for i := range r.kept {
		r.keep(i)
	}
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
	if r.current(keptGeneration) {
		if _, err := r.apply(&req); err != nil {
			return err
		}
	}
	clear(req.Entropy)
	if settle {
		// Frees what was removed before: a grace period of RCU.
		if _, _, errno := unix.Syscall(unix.SYS_MEMBARRIER, membarrierGlobal, 0, 0); errno != 0 && errno != unix.ENOSYS && errno != unix.EINVAL {
			return failed("settle", "kernel", errno)
		}
	}
	return nil
}

// keep opens a file that a renewal can write in place: a regular file with one
// name. Others are replaced when the time comes.
func (r *Renewer) keep(i int) {
	f := &r.kept[i]
	if f.open && r.current(i) {
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

// current reports whether the file that is open is still the one at its path.
func (r *Renewer) current(i int) bool {
	f := &r.kept[i]
	var st unix.Stat_t
	return f.open && unix.Fstatat(unix.AT_FDCWD, r.root+keptPaths[i], &st, unix.AT_SYMLINK_NOFOLLOW) == nil &&
		st.Dev == f.st.Dev && st.Ino == f.st.Ino && st.Mode == f.st.Mode && st.Nlink == 1
}

// put gives a file its contents: in place if it is kept, else by replace.
func (r *Renewer) put(i int, data []byte, replace func([]byte) error) error {
	if r.current(i) {
		return r.overwrite(i, data)
	}
	return replace(data)
}

// contents reads a file that is kept, until the next call; false says that it
// must be replaced.
func (r *Renewer) contents(i int) ([]byte, bool) {
	if !r.current(i) {
		return nil, false
	}
	if r.buf == nil {
		r.buf = make([]byte, maxKept)
	}
	n, err := unix.Pread(r.kept[i].fd, r.buf, 0)
	if err != nil || n == len(r.buf) {
		return nil, false
	}
	return r.buf[:n], true
}

// membarrierGlobal is MEMBARRIER_CMD_GLOBAL of membarrier(2).
const membarrierGlobal = 1

// maxKept is what is read of a kept file; larger ones are replaced.
const maxKept = 2048

// canRehearseName: writing the name again leaves its files as they are.
func (r *Renewer) canRehearseName(name string) bool {
	if !ValidHostname(name) {
		return false
	}
	text, ok := r.contents(keptHostname)
	if !ok || string(text) != name+"\n" {
		return false
	}
	hosts, ok := r.contents(keptHosts)
	return ok && bytes.Equal(renameInHosts(hosts, name, name), hosts)
}

// overwrite changes a kept file in place. One call writes all of it: the
// kernel lets no reader see half of that.
func (r *Renewer) overwrite(i int, data []byte) error {
	f := &r.kept[i]
	var st unix.Stat_t
	if err := unix.Fstat(f.fd, &st); err != nil {
		return err
	}
	if _, err := unix.Pwrite(f.fd, data, 0); err != nil {
		return err
	}
	if st.Size > int64(len(data)) {
		return unix.Ftruncate(f.fd, int64(len(data)))
	}
	return nil
}
