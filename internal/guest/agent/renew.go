package agent

import (
	"context"
	"encoding/binary"
	"strconv"
	"sync"
	"sync/atomic"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"

	"agentrun.dev/internal/guest/guestrpc"
)

// Renewer gives a fork an identity of its own, before anybody uses the fork.
//
// A fork begins with its parent's memory. AgentRun's own kernel notices that by
// itself before anything is drawn from it (guest/kernel/patches); others go on
// with their parent's random numbers until they are told. Renewing reseeds the
// kernel's generator in any case: what comes from getrandom(2) and /dev/urandom
// after it differs. It does not reach what a process
// has drawn before and keeps in its own memory, nor generators that run there:
// OpenSSL in a warmed-up process (which reseeds for fork(2), but does not see
// this one), Java's SecureRandom, Python's random, math/rand. A template should
// seed those, or start what uses them, only in the fork.
//
// For programs that cannot, there is /run/agentrun/generation: a number in
// decimal, 0 from boot on and higher in every fork, written after all the rest
// is renewed. A watch (inotify(7)) of the folder sees IN_MODIFY of the name, or
// IN_MOVED_TO where the guest was not prepared for the fork.
type Renewer struct {
	root   string // before /etc and /run; empty but in tests
	random string // the kernel's generator

	// System calls that tests cannot make, or cannot make fail.
	ioctl       func(fd int, req uint, arg unsafe.Pointer) error
	setClock    func(clock int32, to *unix.Timespec) error
	setHostname func(name string) error

	// hosts says that the generator and the wall clock are the host's: they
	// are looked at, not set.
	hosts bool

	generation atomic.Uint64

	renewing sync.Mutex // serializes Renew and Prepare; protects all following fields
	kept     [numKept]keptFile
	looked   time.Time // when kept were last seen to be what is at their paths
	device   int       // random, once it is open; else -1

	// Renewals need no memory but this: what is allocated for the first time
	// in a fork is a page that the fork has of its own.
	clock   unix.Timespec
	scratch [maxKept + maxAdded]byte
	buf     [maxKept]byte // of contents
}

// NewRenewer returns the one that renews this machine.
func NewRenewer() *Renewer {
	return &Renewer{device: -1, random: "/dev/random", ioctl: rawIoctl, setClock: rawSetClock, setHostname: SetHostname}
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
	return r.apply(req)
}

// apply does what is asked for.
func (r *Renewer) apply(req *guestrpc.RenewRequest) (guestrpc.RenewReply, error) {
	var none, reply guestrpc.RenewReply
	reseed, stepClock := r.reseed, r.stepClock
	if r.hosts {
		reseed, stepClock = checkGenerator, checkClock
	}
	if err := reseed(req.Entropy); err != nil {
		return none, err
	}
	if !req.WallClock.IsZero() {
		var err error
		if reply.ClockStep, err = stepClock(req.WallClock); err != nil {
			return none, err
		}
	}
	if req.Hostname != "" {
		if err := r.rename(req.Hostname); err != nil {
			return none, err
		}
	}
	if req.MachineID != "" {
		err := r.put(keptMachineID, append(append(r.scratch[:0], req.MachineID...), '\n'), func(data []byte) error {
			return r.inEtc(func(etc int) error { return replaceFile(etc, "machine-id", data, machineIDMode) })
		})
		if err != nil {
			return none, cannotReplace("/etc/machine-id", err)
		}
	}
	text := append(strconv.AppendUint(r.scratch[:0], req.Generation, 10), '\n')
	if err := r.put(keptGeneration, text, func(text []byte) error { return replaceGeneration(r.root, text) }); err != nil {
		return none, err
	}
	r.generation.Store(req.Generation)
	reply.Generation = req.Generation
	return reply, nil
}

// machineIDMode is that of machine-id(5).
const machineIDMode = 0o444

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
	if r.device < 0 {
		// O_NONBLOCK: a root in the guest may have put a FIFO there.
		fd, err := open(unix.AT_FDCWD, r.random, unix.O_WRONLY|unix.O_NONBLOCK|unix.O_NOCTTY, 0)
		if err != nil {
			return failed("open", r.random, err)
		}
		r.device = fd // stays open: to open and close it again is some pages of each fork
	}
	// struct rand_pool_info: entropy_count in bits, buf_size in bytes, buf.
	pool := r.scratch[:8]
	binary.NativeEndian.PutUint32(pool, uint32(8*len(entropy)))
	binary.NativeEndian.PutUint32(pool[4:], uint32(len(entropy)))
	pool = append(pool, entropy...)
	defer clear(pool)
	// The kernel reads 8 bytes and then buf_size of them, which is all of pool.
	if err := r.ioctl(r.device, unix.RNDADDENTROPY, unsafe.Pointer(&pool[0])); err != nil {
		return failed("add entropy to", r.random, err)
	}
	return failed("reseed from", r.random, r.ioctl(r.device, unix.RNDRESEEDCRNG, nil))
}

// SetClock sets the wall clock and nothing else.
func (r *Renewer) SetClock(ctx context.Context, to time.Time) error {
	if to.IsZero() || to.UnixNano() <= 0 {
		return fail(ErrInvalid, "set", "wall clock", "want a time after 1970")
	}
	r.renewing.Lock()
	defer r.renewing.Unlock()
	if err := ctx.Err(); err != nil {
		return err // the host has given up while a renewal went on
	}
	stepClock := r.stepClock
	if r.hosts {
		stepClock = checkClock
	}
	_, err := stepClock(to)
	return err
}

// stepClock sets the wall clock and returns what that added to it.
func (r *Renewer) stepClock(to time.Time) (time.Duration, error) {
	now := time.Now().UnixNano()
	r.clock = unix.NsecToTimespec(to.UnixNano())
	if err := r.setClock(unix.CLOCK_REALTIME, &r.clock); err != nil {
		return 0, failed("set", "wall clock", err)
	}
	return time.Duration(to.UnixNano() - now), nil
}
