// Package engine is the contract between AgentRun and the engines that run sandboxes:
// boot, snapshot, fork, speak to the agent, pause, count costs, end. Package
// enginetest holds the tests that every engine must pass.
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

// Spec describes a sandbox to boot. Its open files remain the caller's to close.
type Spec struct {
	// Kernel is a vmlinux. With nil the engine takes the kernel that comes with
	// AgentRun. Engines without a guest kernel of their own ignore it.
	Kernel *os.File
	// Root is the root filesystem, an EROFS image. Sandboxes share it, and each
	// writes to a layer of its own.
	Root   *os.File
	Memory uint64
	VCPUs  int
	// Disk is the size of the writable layer over Root. Once it is full, writes
	// inside fail with ENOSPC. With 0 the layer is in the sandbox's memory, and holds
	// at most half as many bytes as that memory.
	Disk uint64
	// Scratch is the size of an empty disk of the sandbox's own; 0 is no such disk.
	// Engines without disks let the root filesystem grow by that size instead.
	Scratch uint64
	// Files are attached as disks. A sandbox that was booted with any cannot be
	// captured, because something else may change the files. Engines without disks
	// refuse them: ErrNoDisks.
	Files    []FileDisk
	Hostname string
	// Cmdline is appended to the guest kernel's command line.
	Cmdline string
	Limits  Limits
	// Network is the sandbox's interface, eth0. Without one, the sandbox and all its
	// forks have only a loopback.
	Network *Network
}

// FileDisk is a disk that is a file.
type FileDisk struct {
	File     *os.File
	ReadOnly bool
	// ID is the disk's serial number, as the sandbox reads it (≤ 20 bytes).
	ID string
}

// MinDisk and LargestDisk bound Spec.Disk. The smallest disk holds a file system and
// a few files. The largest is the largest file that every host's file system allows.
const (
	MinDisk     = 16 << 20
	LargestDisk = 16 << 40
)

// CheckDisk refuses a Disk outside of MinDisk and LargestDisk.
func (s Spec) CheckDisk() error {
	if s.Disk > 0 && (s.Disk < MinDisk || s.Disk > LargestDisk) {
		return fmt.Errorf("boot: a disk of %d bytes is not possible: it has %d to %d", s.Disk, uint64(MinDisk), uint64(LargestDisk))
	}
	return nil
}

// Limits bound the resources of the host that a sandbox may use. Its memory is always
// limited, to its RAM and the overhead of running it.
type Limits struct {
	// MilliCPUs are thousandths of a processor's time. With 0 a sandbox may use one
	// processor more than its vCPUs, for its devices.
	MilliCPUs uint64
	// Background marks a sandbox that no caller is waiting for. Where processors are
	// short, other sandboxes are scheduled first.
	Background bool
	// IO applies to each disk.
	IO IOLimits
}

// IOLimits bound the reads and writes of a disk; 0 is no limit. A sandbox may save up
// unused allowance, up to a second's worth, and use it at once. Where the host's
// kernel bounds the device as well, the kernel's pace holds even then.
type IOLimits struct {
	BytesPerSecond, OpsPerSecond uint64
}

// ForkOptions sets how a fork differs from its siblings.
type ForkOptions struct {
	// Hostname is the fork's host name; the engine makes one up if it is empty.
	Hostname string
	// KeepIdentity makes the fork the same sandbox as the captured one, which no
	// longer exists. The fork keeps its host name and machine id. It is reseeded and
	// its clock is set, like those of any fork.
	KeepIdentity bool
	// Folder lets the fork outlive the process that made it. It is an empty folder of
	// the fork's own, in which the engine keeps the data that Adopt needs. Anyone
	// with access to the folder controls the fork. With an empty Folder the fork ends
	// with the process that made it. A sandbox that was booted, not forked from a
	// snapshot, cannot have live forks with a folder.
	Folder string
	Limits Limits
	// Turn is called before the fork is started, and may block. Its release is called
	// when the fork has answered or failed. A caller that makes many sandboxes uses
	// it to bound how many are started at once; the children of one Sandbox.Fork
	// count, too. With nil the fork is started at once.
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
	// Name identifies this engine in the snapshots that it makes.
	Name() string
	// Capabilities say how this engine differs from others.
	Capabilities() Capabilities
	// Reserve is how much of the host's memory a sandbox with this RAM and this Disk
	// may come to need.
	Reserve(ram, disk uint64) uint64
	// MaxDisk is the largest Disk that this host could hold if it held nothing else.
	MaxDisk() (uint64, error)
	// Boot returns once the sandbox's agent has answered.
	Boot(context.Context, Spec) (Sandbox, error)
	// Fits refuses a snapshot that this engine cannot fork on this host. The error
	// names the difference and wraps ErrMismatch. Fits looks at the manifest alone.
	Fits(snapshot.Manifest) error
	// Fork makes a sandbox that continues from a snapshot, with an identity of its
	// own: it is reseeded, its clock is set, and its host name and machine id are
	// renewed. Fork returns once the sandbox's agent has confirmed the renewal.
	Fork(context.Context, *snapshot.Snapshot, ForkOptions) (Sandbox, error)
	// Adopt takes over a sandbox that has a folder. No other process may hold the
	// sandbox. The sandbox may be paused. It has no session with its agent until
	// Resume, which is harmless if the sandbox runs. If the sandbox is gone, the
	// error is ErrEnded.
	Adopt(ctx context.Context, folder string) (Sandbox, error)
	// Remove ends the machine of a folder and deletes the folder. It does so
	// whichever process started the machine, and however far the start came.
	Remove(ctx context.Context, folder string) error
	// Inspect returns the process that runs in a folder, and the part of its cost
	// that can be seen from outside. If the machine is gone, the error is ErrEnded.
	Inspect(folder string) (pid int, _ Stats, _ error)
	// Keep frees the memory that the engine keeps for any sandbox or snapshot that is
	// not listed. It also frees the remains of sandboxes that ended while no process
	// was watching. Running sandboxes lose nothing.
	Keep(folders, snapshots []string) error
	// Drop frees the memory held under these ids, which belong to sandboxes that have
	// ended. Ids that the engine does not know are no error.
	Drop(ids []string) error
	Close() error
}

// Rehearsal makes a fork perform the actions that it will perform first, without
// their effect.
type Rehearsal func(context.Context, Sandbox) error

// Learner is an engine that learns, from the rehearsals of a snapshot's first forks,
// which pages the later forks will need.
type Learner interface {
	// ForkRehearsed forks and then runs the rehearsal. If the rehearsal fails, the
	// fork ends.
	ForkRehearsed(context.Context, *snapshot.Snapshot, ForkOptions, Rehearsal) (Sandbox, error)
}

// ForkRehearsed forks and rehearses on any engine, whether or not it is a Learner.
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

// Ahead is an engine that can make parts of forks before the forks are asked for.
type Ahead interface {
	// KeepSpares keeps count spares waiting: machines for a snapshot that are
	// complete except for their state. Fork takes a spare if one waits, and the
	// engine makes the next one after Fork has returned. The caller closes the spares
	// before the snapshot.
	KeepSpares(snap *snapshot.Snapshot, count int) (Spares, error)
}

// Spares are the spares that one call of KeepSpares keeps.
type Spares interface {
	// WaitFull waits until all of the spares are waiting.
	WaitFull(context.Context) error
	Stats() SpareStats
	// Close ends the spares that wait.
	Close() error
}

// SpareStats describes spares.
type SpareStats struct {
	// Waiting is how many spares wait now.
	Waiting int `json:"waiting"`
	// Taken counts the forks that got a spare.
	Taken uint64 `json:"taken"`
	// Lost counts spares that ended while they waited. Failed counts failed attempts
	// to make one; LastError is the reason of the last failure.
	Lost      uint64 `json:"lost"`
	Failed    uint64 `json:"failed"`
	LastError string `json:"last_error,omitempty"`
}

// Sandbox is one running sandbox. Its methods are safe for concurrent use.
type Sandbox interface {
	// Agent is a session with the sandbox's agent. It is nil in a sandbox that was
	// adopted and not resumed since.
	Agent() *guestrpc.Client
	// Dial opens a stream to a port inside.
	Dial(ctx context.Context, port uint32) (net.Conn, error)
	// Wire is the other end of the sandbox's interface: a unix datagram socket with
	// an Ethernet frame in each message, in the format of package wire. Its holder
	// completes the checksums and segments that a message leaves to it, and may leave
	// the same to the sandbox.
	//
	// Whoever reads and writes there is the sandbox's entire network, and decides
	// what it reaches. While nobody does, the interface leads nowhere. A wire never
	// leads to the host's network, nor to the network of a source or a fork: a fork
	// has the addresses of its source and a wire of its own. Connections that the
	// source had open are reset on the fork's wire.
	//
	// Each call returns a copy for the caller to close. All copies are the same
	// socket. Every read and write must be non-blocking (MSG_DONTWAIT), since a
	// process with another copy can change the socket's own mode. The first call for
	// an adopted sandbox may give it a new wire; copies that its maker made then lead
	// nowhere.
	//
	// The error is ErrNoWire if the sandbox has no interface, or if an older AgentRun
	// has started it.
	Wire() (*os.File, error)
	// Settle waits, some seconds at most, until the sandbox has done its postponed
	// work. Work that a template leaves undone is repeated by each of its forks.
	Settle(context.Context) error
	// Snapshot captures memory, processes and disks at one instant into a new folder.
	// The sandbox goes on. If the sandbox holds secrets, the caller passes
	// snapshot.Sealed, also for all of its forks.
	//
	// The memory of a sandbox that is paused, or that may stand still
	// (snapshot.Still), is written through pipes to the disk, with at most 64 MiB of
	// copies beside it. Otherwise the pages that the sandbox has changed may be in
	// memory twice until the snapshot is complete. The snapshot leaves nothing in
	// memory: its first fork loads it.
	Snapshot(ctx context.Context, dir string, opts ...snapshot.Option) (*snapshot.Snapshot, error)
	// Fork makes one sandbox for each element of opts. All of them continue from this
	// sandbox at the same instant. This sandbox goes on, and stands still only for
	// moments. Each fork has its own outcome; the returned error concerns all of
	// them.
	Fork(ctx context.Context, opts []ForkOptions) (*LiveFork, error)
	// Pause stops the sandbox's processors until Resume. The sandbox's monotonic
	// clock stops as well, unless the engine says that it counts pauses
	// (Capabilities.ClockCountsPauses). Resume returns once the sandbox's wall clock
	// is the host's again.
	Pause(context.Context) error
	Resume(context.Context) error
	// Park is Pause for a fork that will be claimed. It makes Claim faster. Until
	// Claim or Resume, nothing may be sent to the fork, since a message might wake
	// it.
	Park(context.Context) error
	// Claim lets a paused fork go on as a different sandbox. Before it serves
	// anything, its random numbers are reseeded, its clock is set and its generation
	// is raised. Its host name is changed unless hostname is empty. Claim returns
	// once the sandbox's agent has confirmed this.
	Claim(ctx context.Context, hostname string) error
	Stats(context.Context) (Stats, error)
	// Console is the tail of the sandbox's kernel log.
	Console(context.Context) ([]byte, error)
	// Done is closed once the sandbox has ended.
	Done() <-chan struct{}
	// Wait blocks until the sandbox has ended, and returns the reason.
	Wait() error
	// Detach releases a sandbox that has a folder. The sandbox goes on.
	Detach() error
	// Close ends the sandbox at once and frees everything but its folder, which
	// belongs to its maker. Shutdown asks the sandbox to end by itself.
	Close() error
	Shutdown(ctx context.Context, grace time.Duration) error
}

// LiveFork is the result of forking a running sandbox.
type LiveFork struct {
	// Forks and Errs have one entry for each requested fork. For each fork, exactly
	// one of the two entries is nil.
	Forks []Sandbox
	Errs  []error
	Stats LiveForkStats
	// Held is the memory that each fork holds of this capture and earlier ones.
	// Source is the memory that the source holds since; it is set even if no fork
	// could be made.
	Held, Source []Held
	// Same says that the source holds exactly the memory that it held before, and
	// nothing of this capture. Source is then empty.
	Same bool
}

// LiveForkStats is the cost of a live fork to its source.
type LiveForkStats = livefork.Stats

// Stats is the cost of a sandbox, in bytes.
type Stats struct {
	// Own is the memory of this sandbox alone, which is freed when it ends. It
	// includes the guest's memory, except the pages that the guest shares with its
	// snapshot.
	Own uint64
	// Proportional is the process's share of all memory that it maps (PSS).
	Proportional uint64
	// Disk is how many bytes the sandbox has written to its disks and not deleted.
	// Disks that are in its memory are not counted.
	Disk uint64
	// CPU is the processor time of the process and the guest since the sandbox was
	// made.
	CPU time.Duration
	// Layers is how many files the sandbox's memory is made of. Mappings is in how
	// many pieces these are mapped.
	Layers, Mappings int
	// Generation counts the forks between a boot and this sandbox.
	Generation uint64
	// LastFork is the cost of this sandbox's last live fork.
	LastFork LiveForkStats
}

// Capabilities say how an engine differs from others, for the callers that depend on
// it. The tests of all engines check each capability.
type Capabilities struct {
	// Disks: a scratch disk is a block device of its own, and files can be attached
	// as disks.
	Disks bool
	// ClockCountsPauses: the sandbox's monotonic clock counts the time that the
	// sandbox is paused or hibernated. Timeouts of execs never count that time, on
	// any engine.
	ClockCountsPauses bool
	// TCPPorts: Dial reaches TCP ports on the sandbox's loopback. Without it, Dial
	// reaches only the agent and programs that listen on vsock.
	TCPPorts bool
	// CopiesInPause: a live fork copies memory while its source stands still.
	CopiesInPause bool
	// SharesMemory: forks share the pages of their snapshot until they write to them.
	// Without it each fork has a copy.
	SharesMemory bool
	// EndsOutOfMemory: a program that exceeds the available memory may end the whole
	// sandbox, with ErrOutOfMemory. Without it, only the program ends.
	EndsOutOfMemory bool
}

// Processor is the host's processor as sandboxes of an engine see it.
type Processor struct {
	// Profile names the set of features that sandboxes see.
	Profile, Vendor string
	// Features are these features, sorted. Their names are the engine's.
	Features []string
}

// ProcessorOf is the processor of an engine. It is empty if the engine does not
// report one.
func ProcessorOf(e Engine) (Processor, error) {
	if has, ok := e.(interface{ Processor() (Processor, error) }); ok {
		return has.Processor()
	}
	return Processor{}, nil
}

// GenerationLabel is the manifest label that counts the forks before a snapshot.
const GenerationLabel = "generation"

// NextGeneration is the generation of a snapshot's forks.
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
	// ErrEnded says that the sandbox no longer runs.
	ErrEnded = errors.New("the sandbox has ended")
	// ErrPoweredOff says that the sandbox powered itself off.
	ErrPoweredOff = errors.New("it powered itself off")
	// ErrOutOfMemory says that the sandbox ended because it reached its memory limit.
	ErrOutOfMemory = errors.New("out of memory")
	// ErrFiles says that a sandbox with files as disks cannot be captured.
	ErrFiles = errors.New("it has files as disks, and what becomes of them is not captured")
	// ErrNoDisks says that an engine without disks cannot attach files as disks.
	ErrNoDisks = errors.New("the engine has no disks")
	// ErrNoWire says that no process here holds the other end of the sandbox's
	// interface.
	ErrNoWire = errors.New("no wire")
	// ErrMismatch says that a snapshot does not fit this engine or this host.
	ErrMismatch = errors.New("the snapshot does not fit")
)
