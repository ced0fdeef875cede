// Package doctor examines a host. It says which engine runs sandboxes on it,
// what is missing and how to fix that. It changes nothing on the host, except
// that the trial of a jail leaves an empty cgroup and an empty folder.
//
// Its inputs are the files under /proc, /sys and /dev and the answers of a few
// system calls. Both are parameters of Run, so that tests can simulate other
// hosts.
package doctor

import (
	"context"
	"io/fs"
	"os"
	"os/exec"
	"slices"

	"agentrun.dev/internal/host/assets"
)

// Status is the outcome of one check.
type Status string

// The outcomes. A warning is important for the administrator; a failure keeps
// sandboxes from running on this host.
const (
	OK   Status = "ok"
	Warn Status = "warn"
	Fail Status = "fail"
)

// Check is the result of one examination.
type Check struct {
	// Name says what was examined. Names are part of the JSON schema.
	Name   string `json:"name"`
	Status Status `json:"status"`
	// Detail says what was found.
	Detail string `json:"detail"`
	// Fix says what to do about a warning or a failure.
	Fix string `json:"fix,omitempty"`
}

// Names of the checks, in the order of a report. CheckCapabilities is included
// only if /dev/kvm could be opened.
const (
	CheckKVM          = "kvm"
	CheckCapabilities = "kvm-capabilities"
	CheckCPU          = "cpu"
	CheckKernel       = "kernel"
	CheckCgroups      = "cgroups"
	CheckJail         = "jail"
	CheckDiskLimits   = "disk-limits"
	CheckUserfaultfd  = "userfaultfd"
	CheckMemfd        = "memfd"
	CheckMemory       = "memory"
	CheckDisk         = "disk"
	CheckAssets       = "assets"
	CheckTools        = "tools"
	CheckGVisor       = "gvisor"
)

// Engine is a way to run sandboxes.
type Engine string

// The engines that a report can name.
const (
	EngineMicroVM Engine = "microvm"
	EngineGVisor  Engine = "gvisor"
	// EngineNone means that no engine works on this host in its current state.
	EngineNone Engine = "none"
)

// Schema is the version of a report's JSON form. It increases when a field
// changes its meaning or is removed, not when one is added.
const Schema = 1

// Report holds the results for a host.
type Report struct {
	Schema int `json:"schema"`
	// Engine is the engine that this host uses by default.
	Engine Engine `json:"engine"`
	// Advice says in a sentence what to do next.
	Advice string  `json:"advice"`
	Checks []Check `json:"checks"`
}

// Usable reports whether sandboxes can run on the host.
func (r Report) Usable() bool { return r.Engine != EngineNone }

// Config holds the inputs. Run fills a zero Config with those of the real host.
type Config struct {
	// Files is the host's root folder: Run reads proc, sys and dev from it.
	Files fs.FS
	// CacheFolder is the folder of images and kernels. StateFolder is the folder to
	// which sandboxes write. They need not exist.
	CacheFolder, StateFolder string
	// Probes ask the kernel. A nil probe is replaced by the real one.
	Probes Probes
}

// Probes are the questions that no file can answer.
type Probes struct {
	// KVM opens /dev/kvm and names the capabilities that it lacks. The error
	// is that of opening it.
	KVM func() (missing []string, err error)
	// Jail builds the walls around a process, including limits. Its error says
	// why they cannot be built.
	Jail func() error
	// DiskLimits returns the device below a folder. Its error says why cgroups
	// cannot bound the reads and writes of sandboxes there.
	DiskLimits func(folder string) (device string, err error)
	// Userfaultfd makes a userfaultfd, in any way that is open to this process,
	// and returns its features (UFFD_FEATURE_*).
	Userfaultfd func() (features uint64, err error)
	// Memfd makes a file in memory and seals it.
	Memfd func() error
	// Disk returns the free bytes of the file system that holds a path.
	Disk func(path string) (free uint64, err error)
	// Writable reports whether this process may create files in a folder.
	Writable func(path string) bool
	// Root reports whether this process runs as root.
	Root func() bool
	// Asset finds a part of a sandbox.
	Asset func(assets.Asset) (path string, err error)
	// LookPath finds a program.
	LookPath func(name string) (path string, err error)
}

func (c *Config) fill() {
	if c.Files == nil {
		c.Files = os.DirFS("/")
	}
	p := &c.Probes
	if p.KVM == nil {
		p.KVM = probeKVM
	}
	if p.Jail == nil {
		p.Jail = probeJail
	}
	if p.DiskLimits == nil {
		p.DiskLimits = probeDiskLimits
	}
	if p.Userfaultfd == nil {
		p.Userfaultfd = probeUserfaultfd
	}
	if p.Memfd == nil {
		p.Memfd = probeMemfd
	}
	if p.Disk == nil {
		p.Disk = probeDisk
	}
	if p.Writable == nil {
		p.Writable = probeWritable
	}
	if p.Root == nil {
		p.Root = func() bool { return os.Geteuid() == 0 }
	}
	if p.Asset == nil {
		p.Asset = assets.Path
	}
	if p.LookPath == nil {
		p.LookPath = exec.LookPath
	}
}

// host is a Config with the facts that several checks need.
type host struct {
	Config
	cpu cpuInfo
}

// Run makes all checks. If the context ends, it stops and returns the checks
// made so far.
func Run(ctx context.Context, cfg Config) Report {
	cfg.fill()
	h := &host{Config: cfg, cpu: readCPU(cfg.Files)}
	r := Report{Schema: Schema, Checks: []Check{}}
	for _, check := range []func(*host) []Check{
		checkKVM, checkCPU, checkKernel, checkCgroups, checkJail, checkDiskLimits, checkUserfaultfd,
		checkMemfd, checkMemory, checkDisk, checkAssets, checkTools, checkGVisor,
	} {
		if ctx.Err() != nil {
			break
		}
		r.Checks = append(r.Checks, check(h)...)
	}
	r.Engine, r.Advice = conclude(ctx, r.Checks)
	return r
}

// onlyMicroVMs are the checks that concern only microVMs.
var onlyMicroVMs = []string{CheckKVM, CheckCapabilities, CheckJail, CheckDiskLimits, CheckUserfaultfd, CheckAssets}

// conclude picks the engine, as auto does, and says why: microVMs on hardware
// KVM, gVisor on other hosts.
func conclude(ctx context.Context, checks []Check) (Engine, string) {
	if ctx.Err() != nil {
		return EngineNone, "The examination was interrupted: run it again."
	}
	var kvm, gvisor, common, micro bool // the checks that failed
	for _, c := range checks {
		switch {
		case c.Name == CheckGVisor:
			gvisor = c.Status != OK
		case c.Status != Fail:
		case c.Name == CheckKVM:
			kvm = true
		case slices.Contains(onlyMicroVMs, c.Name):
			micro = true
		default:
			common = true
		}
	}
	const testbed = "To see microVMs, in a checkout of AgentRun: make demo ENGINE=microvm, which runs them in its testbed, an emulated machine with AMD-V."
	switch {
	case !kvm && !micro && !common:
		return EngineMicroVM, "MicroVMs run on this host, since its KVM is backed by hardware."
	case !kvm:
		return EngineNone, "MicroVMs will run on this host once the failed checks are put right."
	case gvisor || common:
		return EngineNone, "Sandboxes will run on this host, on gVisor, once the failed checks are put right. " + testbed
	}
	return EngineGVisor, "Sandboxes run on gVisor on this host, since it has no KVM that is backed by hardware. " + testbed
}
