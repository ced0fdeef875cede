package guest

import (
	"bytes"
	"context"
	"encoding/binary"
	"strconv"
	"sync"
	"sync/atomic"
	"syscall"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"

	"agentrun.dev/internal/guestrpc"
)

// Renewer gives a fork an identity of its own, before anybody uses the fork.
//
// A fork begins with its parent's memory, so what either of them draws next
// from a generator of random numbers is the same. Renewing reseeds that of the
// kernel: what comes from getrandom(2) and /dev/urandom after it differs, also
// in processes that draw by way of the vDSO. It does not reach what a process
// has drawn before and keeps in its own memory, nor generators that run there:
// OpenSSL in a warmed-up process (which reseeds for fork(2), but does not see
// this one), Java's SecureRandom, Python's random, math/rand. A template should
// seed those, or start what uses them, only in the fork.
//
// For programs that cannot, there is /run/agentrun/generation: a number in
// decimal, 0 from boot on and higher in every fork, written after all the rest
// is renewed. A watch (inotify(7)) of the folder sees IN_MOVED_TO of the name;
// one of the file sees IN_ATTRIB and IN_DELETE_SELF, and must then be made
// again, as the file is replaced.
type Renewer struct {
	root   string // before /etc and /run; empty but in tests
	random string // the kernel's generator

	// System calls that tests cannot make, or cannot make fail.
	ioctl       func(fd int, req uint, arg unsafe.Pointer) error
	setClock    func(clock int32, to *unix.Timespec) error
	setHostname func(name string) error

	renewing   sync.Mutex // serializes Renew
	generation atomic.Uint64
}

// NewRenewer returns the one that renews this machine.
func NewRenewer() *Renewer {
	return &Renewer{random: "/dev/random", ioctl: ioctl, setClock: unix.ClockSettime, setHostname: SetHostname}
}

// Generation is that of the last renewal that was completed; 0 before.
func (r *Renewer) Generation() uint64 { return r.generation.Load() }

// Renew does what is asked for, in an order in which a failure leaves nothing
// that looks like a complete fork: the generator before everything else, the
// generation after it. It stops at the first failure. What was done stays
// done, the generation stays what it was: the fork must not be used. The
// entropy is wiped in any case.
func (r *Renewer) Renew(ctx context.Context, req *guestrpc.RenewRequest) (guestrpc.RenewReply, error) {
	defer clear(req.Entropy)
	var reply guestrpc.RenewReply
	if err := checkRenewal(req); err != nil {
		return reply, err
	}
	r.renewing.Lock()
	defer r.renewing.Unlock()
	if err := ctx.Err(); err != nil {
		return reply, err // the host has given up while another renewal went on
	}
	if now := r.Generation(); req.Generation <= now {
		return reply, fail(ErrInvalid, "renew as generation", strconv.FormatUint(req.Generation, 10),
			"the guest is at "+strconv.FormatUint(now, 10)+" and wants a higher one")
	}
	if err := r.reseed(req.Entropy); err != nil {
		return reply, err
	}
	var step time.Duration
	if !req.WallClock.IsZero() {
		var err error
		if step, err = r.stepClock(req.WallClock); err != nil {
			return reply, err
		}
	}
	if req.Hostname != "" {
		if err := r.rename(req.Hostname); err != nil {
			return reply, err
		}
	}
	if req.MachineID != "" {
		err := r.inEtc(func(etc int) error {
			return replaceFile(etc, "machine-id", []byte(req.MachineID+"\n"), 0o444) // machine-id(5)
		})
		if err != nil {
			return reply, cannotReplace("/etc/machine-id", err)
		}
	}
	if err := writeGeneration(r.root, req.Generation); err != nil {
		return reply, err
	}
	r.generation.Store(req.Generation)
	return guestrpc.RenewReply{Generation: req.Generation, ClockStep: step}, nil
}

// checkRenewal refuses what could only be done in part.
func checkRenewal(req *guestrpc.RenewRequest) error {
	const op = "renew"
	switch n := len(req.Entropy); {
	case n < guestrpc.MinEntropy || n > guestrpc.MaxEntropy:
		return fail(ErrInvalid, op, "entropy", "want 32 to 1024 bytes, not "+strconv.Itoa(n))
	case req.Hostname != "" && !ValidHostname(req.Hostname):
		return fail(ErrInvalid, op, "host name "+strconv.Quote(req.Hostname), hostnameRule)
	case req.MachineID != "" && !validMachineID(req.MachineID):
		return fail(ErrInvalid, op, "machine id "+strconv.Quote(req.MachineID), "want 32 lower-case hexadecimal digits")
	case !req.WallClock.IsZero() && req.WallClock.UnixNano() <= 0:
		return fail(ErrInvalid, op, "wall clock", "want a time after 1970")
	}
	return nil
}

// validMachineID follows machine-id(5).
func validMachineID(s string) bool {
	return len(s) == 32 && only(s, func(c byte) bool { return c >= '0' && c <= '9' || c >= 'a' && c <= 'f' }, "")
}

// reseed puts entropy into the kernel's generator and has it used at once
// (random(4)).
func (r *Renewer) reseed(entropy []byte) error {
	// O_NONBLOCK: a root in the guest may have put a FIFO there.
	fd, err := open(unix.AT_FDCWD, r.random, unix.O_WRONLY|unix.O_NONBLOCK|unix.O_NOCTTY, 0)
	if err != nil {
		return failed("open", r.random, err)
	}
	defer unix.Close(fd)
	// struct rand_pool_info: entropy_count in bits, buf_size in bytes, buf.
	pool := make([]byte, 8, 8+guestrpc.MaxEntropy)
	binary.NativeEndian.PutUint32(pool, uint32(8*len(entropy)))
	binary.NativeEndian.PutUint32(pool[4:], uint32(len(entropy)))
	pool = append(pool, entropy...)
	defer clear(pool)
	// The kernel reads 8 bytes and then buf_size of them, which is all of pool.
	if err := r.ioctl(fd, unix.RNDADDENTROPY, unsafe.Pointer(&pool[0])); err != nil {
		return failed("add entropy to", r.random, err)
	}
	return failed("reseed from", r.random, r.ioctl(fd, unix.RNDRESEEDCRNG, nil))
}

func ioctl(fd int, req uint, arg unsafe.Pointer) error {
	// What arg points to outlives the call; how much of it is used says req.
	if _, _, errno := syscall.Syscall(unix.SYS_IOCTL, uintptr(fd), uintptr(req), uintptr(arg)); errno != 0 {
		return errno
	}
	return nil
}

// stepClock sets the wall clock and returns what that added to it.
func (r *Renewer) stepClock(to time.Time) (time.Duration, error) {
	var now unix.Timespec
	if err := unix.ClockGettime(unix.CLOCK_REALTIME, &now); err != nil {
		return 0, failed("read", "wall clock", err)
	}
	ts := unix.NsecToTimespec(to.UnixNano())
	if err := r.setClock(unix.CLOCK_REALTIME, &ts); err != nil {
		return 0, failed("set", "wall clock", err)
	}
	return time.Duration(to.UnixNano() - now.Nano()), nil
}

// rename changes the host name, in the kernel and in the files that boot
// writes it to. A file that is missing, or a link, is the image's own affair.
func (r *Renewer) rename(name string) error {
	var uts unix.Utsname
	if err := unix.Uname(&uts); err != nil {
		return failed("read", "host name", err)
	}
	old := unix.ByteSliceToString(uts.Nodename[:])
	if err := r.setHostname(name); err != nil {
		return err
	}
	err := r.inEtc(func(etc int) error {
		var st unix.Stat_t
		if !isRegular(etc, "hostname", &st) {
			return nil
		}
		return replaceFile(etc, "hostname", []byte(name+"\n"), st.Mode&modeBits)
	})
	if err != nil {
		return cannotReplace("/etc/hostname", err)
	}
	err = r.inEtc(func(etc int) error { return renameInHosts(etc, old, name) })
	if err != nil {
		return cannotReplace("/etc/hosts", err)
	}
	return nil
}

// renameInHosts puts the new name in the place of the line that was added for
// the old one; what the image says itself stays.
func renameInHosts(etc int, old, name string) error {
	var st unix.Stat_t
	if !isRegular(etc, "hosts", &st) || st.Size > maxAccountFile {
		return nil // boot has not written it either
	}
	hosts, err := readFileAt(etc, "hosts", unix.O_NOFOLLOW, maxAccountFile)
	if err != nil {
		return err
	}
	text := append([]byte{'\n'}, hosts...)
	text = bytes.Replace(text, []byte("\n"+hostLine(old)), []byte("\n"+hostLine(name)), 1)
	text = withNames(text[1:], name)
	if bytes.Equal(text, hosts) {
		return nil
	}
	return replaceFile(etc, "hosts", text, st.Mode&modeBits)
}

// inEtc calls fn with /etc, if there is one. A link is not followed.
func (r *Renewer) inEtc(fn func(etc int) error) error {
	etc, err := open(unix.AT_FDCWD, r.root+"/etc", unix.O_PATH|unix.O_DIRECTORY|unix.O_NOFOLLOW, 0)
	if err == syscall.ENOENT {
		return nil
	}
	if err != nil {
		return failed("open", "/etc", err)
	}
	defer unix.Close(etc)
	return fn(etc)
}

// cannotReplace says why a fork cannot be made, and what to do about it.
func cannotReplace(path string, err error) error {
	switch kindOf(err) {
	case ErrReadOnly:
		return fail(ErrReadOnly, "replace", path, "boot the template with a root that can be written, such as agentrun.overlay=tmpfs")
	case ErrNoSpace:
		return fail(ErrNoSpace, "replace", path, "make room in the template before it is forked")
	}
	return failed("replace", path, err)
}

// writeGeneration makes the file that tells programs of a fork.
func writeGeneration(root string, n uint64) error {
	const folder, name = "/run/agentrun", "generation"
	if err := mkdirExact(root+folder, 0o755); err != nil && err != syscall.EEXIST {
		return failed("make folder", folder, err)
	}
	dir, err := open(unix.AT_FDCWD, root+folder, unix.O_PATH|unix.O_DIRECTORY|unix.O_NOFOLLOW, 0)
	if err != nil {
		return failed("open", folder, err)
	}
	defer unix.Close(dir)
	text := strconv.AppendUint(nil, n, 10)
	return failed("replace", folder+"/"+name, replaceFile(dir, name, append(text, '\n'), 0o444))
}

// isRegular reports whether name is a regular file in dir, itself and not by
// way of a link.
func isRegular(dir int, name string, st *unix.Stat_t) bool {
	return unix.Fstatat(dir, name, st, unix.AT_SYMLINK_NOFOLLOW) == nil && fileType(st.Mode) == TypeFile
}

// replaceFile puts a new file in the place of name in dir, atomically. A
// regular file passes its owner on; a link is replaced, never followed.
func replaceFile(dir int, name string, data []byte, mode uint32) error {
	fd, temp, err := makeTemp(dir)
	if err != nil {
		return err
	}
	defer unix.Close(fd)
	if err = fillReplacement(fd, dir, name, data, mode); err == nil {
		err = unix.Renameat(dir, temp, dir, name)
	}
	if err != nil {
		_ = unix.Unlinkat(dir, temp, 0) // best effort: nobody knows the name
		return err
	}
	return syncFolder(dir)
}

func fillReplacement(fd, dir int, name string, data []byte, mode uint32) error {
	var old unix.Stat_t
	if isRegular(dir, name, &old) {
		if err := unix.Fchown(fd, int(old.Uid), int(old.Gid)); err != nil {
			return err
		}
	}
	if err := unix.Fchmod(fd, mode); err != nil {
		return err
	}
	for len(data) > 0 {
		n, err := unix.Write(fd, data)
		if err != nil && err != syscall.EINTR {
			return err
		}
		data = data[max(n, 0):]
	}
	return fsync(fd)
}
