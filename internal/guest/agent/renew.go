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

// Renewer gives a fork an identity of its own, before the fork is used.
//
// A fork begins with its parent's memory. AgentRun's own kernel notices that by
// itself before anything is drawn from it (guest/kernel/patches). Other kernels go on
// with their parent's random numbers until they are told. Renewing reseeds the
// kernel's generator in any case: numbers from getrandom(2) and /dev/urandom differ
// after it. It does not reach numbers that a process has drawn before and keeps in
// its own memory. Nor does it reach generators that run in processes: OpenSSL in a
// warmed-up process (which reseeds for fork(2), but does not see this one), Java's
// SecureRandom, Python's random, math/rand. A template should seed those, or start
// the programs that use them, only in the fork.
//
// For programs that cannot wait until then, there is /run/agentrun/generation: a
// decimal number, 0 from boot on and higher in every fork, written after everything
// else is renewed. A watch (inotify(7)) of the folder sees IN_MODIFY of the name, or
// IN_MOVED_TO if the guest was not prepared for the fork.
type Renewer struct {
	root   string // prefix of /etc and /run; empty except in tests
	random string // the kernel's generator

	// System calls that tests cannot make, or cannot make fail.
	ioctl       func(fd int, req uint, arg unsafe.Pointer) error
	setClock    func(clock int32, to *unix.Timespec) error
	setHostname func(name string) error

	// hosts says that the generator and the wall clock are the host's. They are
	// checked, not set.
	hosts bool

	generation atomic.Uint64

	renewing sync.Mutex // serializes Renew and Prepare; protects all following fields
	kept     [numKept]keptFile
	looked   time.Time // when the kept files were last seen at their paths
	device   int       // descriptor of random once it is open; -1 before

	// Renewals use only this memory: memory that is allocated for the first time in a
	// fork is a page of the fork's own.
	clock   unix.Timespec
	scratch [maxKept + maxAdded]byte
	buf     [maxKept]byte // result of contents
}

// NewRenewer returns the Renewer of this machine.
func NewRenewer() *Renewer {
	return &Renewer{device: -1, random: "/dev/random", ioctl: rawIoctl, setClock: rawSetClock, setHostname: SetHostname}
}

// Generation is the generation of the last completed renewal; 0 before the first.
func (r *Renewer) Generation() uint64 { return r.generation.Load() }

// Renew applies a request in an order in which a failure leaves nothing that looks
// like a complete fork: the generator before everything else, the generation after
// it. It stops at the first failure. Completed steps stay, and the generation stays
// as it was, so the fork must not be used. The entropy is wiped in any case.
func (r *Renewer) Renew(ctx context.Context, req *guestrpc.RenewRequest) (guestrpc.RenewReply, error) {
	defer clear(req.Entropy)
	var reply guestrpc.RenewReply
	if err := checkRenewal(req); err != nil {
		return reply, err
	}
	r.renewing.Lock()
	defer r.renewing.Unlock()
	if err := ctx.Err(); err != nil {
		return reply, err // the host has given up during another renewal
	}
	if now := r.Generation(); req.Generation <= now {
		return reply, fail(ErrInvalid, "renew as generation", strconv.FormatUint(req.Generation, 10),
			"the guest is at "+strconv.FormatUint(now, 10)+" and wants a higher one")
	}
	return r.apply(req)
}

// apply applies the request.
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

// checkRenewal refuses a request that could only be applied in part.
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

// reseed adds entropy to the kernel's generator and makes the kernel use it at once
// (random(4)).
func (r *Renewer) reseed(entropy []byte) error {
	if r.device < 0 {
		// O_NONBLOCK: root in the guest may have put a FIFO there.
		fd, err := open(unix.AT_FDCWD, r.random, unix.O_WRONLY|unix.O_NONBLOCK|unix.O_NOCTTY, 0)
		if err != nil {
			return failed("open", r.random, err)
		}
		r.device = fd // stays open: opening and closing it again would cost each fork some pages
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
		return err // the host has given up during a renewal
	}
	stepClock := r.stepClock
	if r.hosts {
		stepClock = checkClock
	}
	_, err := stepClock(to)
	return err
}

// stepClock sets the wall clock and returns the difference.
func (r *Renewer) stepClock(to time.Time) (time.Duration, error) {
	now := time.Now().UnixNano()
	r.clock = unix.NsecToTimespec(to.UnixNano())
	if err := r.setClock(unix.CLOCK_REALTIME, &r.clock); err != nil {
		return 0, failed("set", "wall clock", err)
	}
	return time.Duration(to.UnixNano() - now), nil
}
