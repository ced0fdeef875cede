// Package engine is the contract between AgentRun and what runs sandboxes:
// boot, snapshot, fork, speak to, pause, count, end. Package enginetest holds
// the tests that every engine must pass.
package engine

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"strconv"
	"time"

	"agentrun.dev/internal/guest/guestrpc"
	"agentrun.dev/internal/storage/snapshot"
	"agentrun.dev/internal/vmm/livefork"
)

// Spec describes a sandbox to boot. The files stay the caller's.
type Spec struct {
	// Kernel is a vmlinux; nil takes the one that comes with AgentRun.
	// Engines without a guest kernel of their own ignore it.
	Kernel *os.File
	// Root is the root filesystem, an EROFS image. Sandboxes share it and
	// write to a layer of their own.
	Root   *os.File
	Memory uint64
	VCPUs  int
	// Disk is the size of the layer over Root that the sandbox writes to; what
	// does not fit is ENOSPC inside. With 0 the layer is in the sandbox's memory,
	// and holds half as much as that has.
	Disk uint64
	// Scratch is the size of an empty disk of the sandbox's own, 0 for none.
	// Engines without disks let the root filesystem grow by so much instead.
	Scratch uint64
	// Files are attached as disks. What was booted with any cannot be captured:
	// nobody knows what else changes them. Engines without disks refuse them:
	// ErrNoDisks.
	Files    []FileDisk
	Hostname string
	// Cmdline is appended to the guest kernel's command line.
	Cmdline string
	Limits  Limits
	// Network is the sandbox's interface, eth0. Without one it has a loopback
	// only, and so have all that are forked from it.
	Network *Network
}

// FileDisk is a disk that is a file.
type FileDisk struct {
	File     *os.File
	ReadOnly bool
	// ID is what the sandbox reads as the disk's serial number (≤ 20 bytes).
	ID string
}

// Bounds of Disk: the smallest holds a file system and some files, the largest is
// a file on any host's.
const (
	MinDisk     = 16 << 20
	LargestDisk = 16 << 40
)

// CheckDisk refuses a Disk of another size.
func (s Spec) CheckDisk() error {
	if s.Disk > 0 && (s.Disk < MinDisk || s.Disk > LargestDisk) {
		return fmt.Errorf("boot: a disk of %d bytes is not possible: it has %d to %d", s.Disk, uint64(MinDisk), uint64(LargestDisk))
	}
	return nil
}

// Limits bound what a sandbox takes from its host. Its memory is always
// limited, to its RAM and what running it costs.
type Limits struct {
	// MilliCPUs are thousandths of a processor's time; 0 is one processor more
	// than the sandbox has, for its devices.
	MilliCPUs uint64
	// Background is a sandbox that nobody waits for as for an answer: where processors
	// are short, others go first.
	Background bool
	// IO is for each disk.
	IO IOLimits
}

// IOLimits bound what a disk reads and writes; 0 is no limit. What was not used
// for a while may be used at once, up to a second's worth, but where the host's
// kernel bounds the device, too, at its pace.
type IOLimits struct {
	BytesPerSecond, OpsPerSecond uint64
}

// ForkOptions is what makes a fork differ from its siblings.
type ForkOptions struct {
	// Hostname is the fork's; empty makes one up.
	Hostname string
	// KeepIdentity makes the fork the same sandbox that was captured, which
	// exists no more: it keeps its host name and machine id, and is reseeded and
	// its clock set like any.
	KeepIdentity bool
	// Folder makes the fork outlive its maker: an empty folder of its own, in
	// which the engine keeps what Adopt finds it by. Whoever can reach the folder
	// has the fork in his hands. Empty ends the fork with the process that made
	// it. What was booted, and not forked from a snapshot, has no forks with a
	// folder.
	Folder string
	Limits Limits
	// Turn is waited for before the fork is started, and release called when it has
	// answered or failed. Whoever makes many sandboxes bounds so how many are started
	// at once, the children of one Sandbox.Fork included. nil starts it at once.
	Turn func(context.Context) (release func(), err error)
}

// WaitTurn waits for the fork's turn.
func (o ForkOptions) WaitTurn(ctx context.Context) (release func(), err error) {
	if o.Turn == nil {
		return func() {}, nil
	}
	return o.Turn(ctx)
}

// Engine runs sandboxes of one kind.
type Engine interface {
	// Name is what snapshots of this engine carry.
	Name() string
	// Capabilities say how this engine differs from others.
	Capabilities() Capabilities
	// Reserve is how much memory of the host a sandbox with that much RAM and
	// that Disk may come to need.
	Reserve(ram, disk uint64) uint64
	// MaxDisk is the largest Disk that this host could hold if it were empty.
	MaxDisk() (uint64, error)
	// Boot returns when the sandbox's agent has answered.
	Boot(context.Context, Spec) (Sandbox, error)
	// Fits refuses a snapshot that this engine, on this host, cannot fork, with
	// what differs: ErrMismatch. It looks at the manifest alone.
	Fits(snapshot.Manifest) error
	// Fork makes a sandbox that continues from a snapshot, with an identity of
	// its own: reseeded, its clock set, its host name and machine id renewed.
	// It returns when the sandbox's agent has confirmed that.
	Fork(context.Context, *snapshot.Snapshot, ForkOptions) (Sandbox, error)
	// Adopt takes over a sandbox that has a folder, while no other process has
	// it. It may stand still: it has no session with its agent until Resume,
	// which does no harm to one that runs. One that is gone is ErrEnded.
	Adopt(ctx context.Context, folder string) (Sandbox, error)
	// Remove ends what runs in a folder, whoever started it and however far that
	// came, and deletes the folder.
	Remove(ctx context.Context, folder string) error
	// Inspect tells which process runs in a folder, and what it costs as far as
	// that is seen from outside. One that is gone is ErrEnded.
	Inspect(folder string) (pid int, _ Stats, _ error)
	// Keep frees what the engine keeps in memory for others than the sandboxes
	// in these folders and these snapshots, and what sandboxes left that ended
	// while nobody watched. What runs keeps what it has.
	Keep(folders, snapshots []string) error
	// Drop frees what is held under these ids, of sandboxes that have ended. What
	// the engine does not know is fine.
	Drop(ids []string) error
	Close() error
}

// Rehearsal has a fork do, without an effect, what it is going to do first.
type Rehearsal func(context.Context, Sandbox) error

// Learner is an engine that learns from the rehearsals of a snapshot's first forks
// what the others are going to need.
type Learner interface {
	// ForkRehearsed is Fork and then the rehearsal, whose error ends the fork.
	ForkRehearsed(context.Context, *snapshot.Snapshot, ForkOptions, Rehearsal) (Sandbox, error)
}

// ForkRehearsed does so on any engine.
func ForkRehearsed(ctx context.Context, e Engine, snap *snapshot.Snapshot, o ForkOptions, rehearse Rehearsal) (Sandbox, error) {
	if l, ok := e.(Learner); ok {
		return l.ForkRehearsed(ctx, snap, o, rehearse)
	}
	sb, err := e.Fork(ctx, snap, o)
	if err != nil {
		return nil, err
	}
	if err := rehearse(ctx, sb); err != nil {
		return nil, errors.Join(err, sb.Close())
	}
	return sb, nil
}

// Ahead is an engine that can make parts of forks before they are asked for.
type Ahead interface {
	// KeepSpares has so many spares wait: sandboxes of a snapshot that have all
	// but a state. Fork takes one where there is one, and the next is made when
	// it has returned. The snapshot must not be closed before the spares are.
	KeepSpares(snap *snapshot.Snapshot, count int) (Spares, error)
}

// Spares are those of one call of KeepSpares.
type Spares interface {
	// WaitFull waits until all of them are there.
	WaitFull(context.Context) error
	Stats() SpareStats
	// Close ends those that wait.
	Close() error
}

// SpareStats describes spares.
type SpareStats struct {
	// Waiting is how many are there now.
	Waiting int `json:"waiting"`
	// Taken counts forks that got one.
	Taken uint64 `json:"taken"`
	// Lost counts those that ended while they waited, Failed attempts to make
	// one, and LastError is the reason of the last.
	Lost      uint64 `json:"lost"`
	Failed    uint64 `json:"failed"`
	LastError string `json:"last_error,omitempty"`
}

// Sandbox is one running sandbox. Its methods are safe for concurrent use.
type Sandbox interface {
	// Agent is a session with the sandbox's agent; nil if it was adopted and not
	// resumed since.
	Agent() *guestrpc.Client
	// Dial opens a stream to a port inside.
	Dial(ctx context.Context, port uint32) (net.Conn, error)
	// Wire is the other end of the sandbox's interface: a unix datagram socket with
	// an Ethernet frame in each message, as package wire describes it. Its holder
	// does what messages leave to do, and may leave as much to the sandbox. Whoever
	// reads and writes there is the sandbox's entire network, and decides what it
	// reaches. While nobody does, the interface leads nowhere. It
	// is never the host's network, nor where a source's or a fork's interface
	// leads: a fork has the addresses of its source and a wire of its own, on which
	// the connections that its source has open are reset. Each call makes a copy
	// for the caller to close. All copies are the same socket: each message is to be
	// read and written without waiting (MSG_DONTWAIT), as a process that has another
	// copy can change what the socket does by itself. The first call for a sandbox
	// that was adopted may give it a new wire: copies from its maker lead nowhere
	// then. There is none, ErrNoWire, if the sandbox has no interface, or an older
	// AgentRun has started it.
	Wire() (*os.File, error)
	// Settle waits, some seconds at most, until the sandbox has done what it
	// puts off: what a template has not done, each of its forks does.
	Settle(context.Context) error
	// Snapshot captures memory, processes and disks at one instant into a new
	// folder. The sandbox goes on. That of a sandbox that holds secrets is made
	// with snapshot.Sealed, and so are all of its forks. One that is paused, or may
	// stand still (snapshot.Still), is written through pipes to the disk, with at
	// most 64 MiB beside it. Otherwise what it has changed may be in memory twice
	// until the snapshot is there. Nothing of it stays in memory: the first fork
	// loads it.
	Snapshot(ctx context.Context, dir string, opts ...snapshot.Option) (*snapshot.Snapshot, error)
	// Fork makes one sandbox for each of the options that continue from this
	// one, all from the same instant. This one goes on: it stands still for
	// moments only. Each fork has its own outcome; the error is that of all.
	Fork(ctx context.Context, opts []ForkOptions) (*LiveFork, error)
	// Pause stops the sandbox's processors until Resume. Its own clocks do not
	// notice; Resume returns when its wall clock is the host's again.
	Pause(context.Context) error
	Resume(context.Context) error
	// Park is Pause for a fork that is to be claimed: Claim is faster then. Until
	// Claim or Resume nothing may be sent to it, which might wake it, too.
	Park(context.Context) error
	// Claim lets a paused fork go on as another one: its random numbers are
	// reseeded and its clock set before anything is served, its generation is
	// raised, and its host name changed unless hostname is empty. It returns
	// when the sandbox's agent has confirmed that.
	Claim(ctx context.Context, hostname string) error
	Stats(context.Context) (Stats, error)
	// Console is the tail of what the sandbox's kernel has printed.
	Console(context.Context) ([]byte, error)
	// Done is closed when the sandbox has ended.
	Done() <-chan struct{}
	// Wait returns how it ended, once it has.
	Wait() error
	// Detach lets go of a sandbox that has a folder. It goes on.
	Detach() error
	// Close ends the sandbox at once and frees everything but its folder, which
	// is its maker's. Shutdown is the polite way.
	Close() error
	Shutdown(ctx context.Context, grace time.Duration) error
}

// LiveFork is what forking a running sandbox gave.
type LiveFork struct {
	// Forks and Errs have an entry for each fork that was asked for, one of
	// which is nil.
	Forks []Sandbox
	Errs  []error
	Stats LiveForkStats
	// Held is what each of the forks holds of this capture and earlier ones, and
	// Source what their source does since: also where none could be made of it.
	Held, Source []Held
	// Same says that the source holds what it did before, and nothing of this
	// capture. Source is empty then.
	Same bool
}

// LiveForkStats is what a live fork cost its source.
type LiveForkStats = livefork.Stats

// Stats is what a sandbox costs, in bytes.
type Stats struct {
	// Own is the memory of this sandbox alone, which is free when it ends: the
	// guest's included, without what it has of its snapshot.
	Own uint64
	// Proportional is the process's share of everything that it maps (PSS).
	Proportional uint64
	// Disk is what it has written to its disks and not deleted, where these are
	// not in its memory.
	Disk uint64
	// CPU is the processor time that it has taken since it was made, of the
	// process and of the guest.
	CPU time.Duration
	// Layers and Mappings are how many files its memory is made of, and in how
	// many pieces.
	Layers, Mappings int
	// Generation counts the forks between a boot and this sandbox.
	Generation uint64
	// LastFork is what the last live fork of this sandbox cost.
	LastFork LiveForkStats
}

// Capabilities say how an engine differs from others, for those to whom it
// matters. The tests of all engines check each of them.
type Capabilities struct {
	// Disks: a scratch disk is a block device of its own, and files can be
	// attached.
	Disks bool
	// ClockCountsPauses: the monotonic clock inside counts the time in which a
	// sandbox is paused or hibernated. Timeouts of execs do not, on any engine.
	ClockCountsPauses bool
	// TCPPorts: Dial reaches TCP ports of the sandbox's loopback. Without it,
	// ports are those of the agent and of programs that listen on vsock.
	TCPPorts bool
	// CopiesInPause: a live fork copies memory while its source stands still.
	CopiesInPause bool
	// SharesMemory: forks have the pages of their snapshot in common until they
	// write to them. Without it each has a copy.
	SharesMemory bool
	// EndsOutOfMemory: a program that takes more memory than there is may end the
	// sandbox, with ErrOutOfMemory. Without it, it always ends alone.
	EndsOutOfMemory bool
}

// Processor is the host's processor as sandboxes of an engine see it.
type Processor struct {
	// Profile says which features of it they see.
	Profile, Vendor string
	// Features are those, sorted; their names are the engine's.
	Features []string
}

// ProcessorOf is the processor of an engine; of one that has none to speak of an empty one.
func ProcessorOf(e Engine) (Processor, error) {
	if has, ok := e.(interface{ Processor() (Processor, error) }); ok {
		return has.Processor()
	}
	return Processor{}, nil
}

// GenerationLabel counts the forks that led to a snapshot.
const GenerationLabel = "generation"

// NextGeneration is that of a fork of a snapshot.
func NextGeneration(m snapshot.Manifest) (uint64, error) {
	text, ok := m.Labels[GenerationLabel]
	if !ok {
		return 1, nil
	}
	n, err := strconv.ParseUint(text, 10, 32)
	if err != nil {
		return 0, fmt.Errorf("label %s of the snapshot: %w", GenerationLabel, err)
	}
	return n + 1, nil
}

// Errors that engines wrap.
var (
	// ErrEnded says that the sandbox is no longer running.
	ErrEnded = errors.New("the sandbox has ended")
	// ErrPoweredOff says that it ended itself.
	ErrPoweredOff = errors.New("it powered itself off")
	// ErrOutOfMemory says that it ended because it reached its memory limit.
	ErrOutOfMemory = errors.New("out of memory")
	// ErrFiles says that a sandbox with files as disks cannot be captured.
	ErrFiles = errors.New("it has files as disks, and what becomes of them is not captured")
	// ErrNoDisks says that an engine without disks cannot attach files as disks.
	ErrNoDisks = errors.New("the engine has no disks")
	// ErrNoWire says that nobody here has the other end of the sandbox's interface.
	ErrNoWire = errors.New("no wire")
	// ErrMismatch says that a snapshot does not fit this engine or this host.
	ErrMismatch = errors.New("the snapshot does not fit")
)
