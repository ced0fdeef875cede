package jail

import (
	"errors"
	"fmt"
	"syscall"

	"github.com/containerd/cgroups/v3"
)

// Limits bound what a process can take from its machine. All but IO must
// be set.
type Limits struct {
	// Memory is in bytes, with what the kernel allocates for the process.
	Memory uint64
	// MilliCPUs are thousandths of a processor's time.
	MilliCPUs uint64
	// Background gives the others' processes eight times as much of the processors where
	// they do not suffice for all.
	Background bool
	// Threads bounds those of the process.
	Threads int
	// IO need not be set: it leaves what is.
	IO IO
}

func (l Limits) check() error {
	if l.Memory == 0 || l.MilliCPUs == 0 || l.Threads <= 0 {
		return fmt.Errorf("limits %+v: each must be set", l)
	}
	return nil
}

// cpuPeriod is the kernel's own, in microseconds.
const cpuPeriod = 100_000

// quota is the processor time in a period.
func (l Limits) quota() int64 { return int64(l.MilliCPUs * cpuPeriod / 1000) }

// The weight of a group beside others. A process of a light one is preempted when one of a
// usual one is woken.
const (
	usualWeight      = 100
	backgroundWeight = usualWeight / 8
)

func (l Limits) weight() uint64 {
	if l.Background {
		return backgroundWeight
	}
	return usualWeight
}

// hierarchy is where groups are made.
type hierarchy interface {
	create(name string) (group, error)
	// open fails with fs.ErrNotExist if there is no such group.
	open(name string) (group, error)
	// remove removes an empty group; one that is not there is fine.
	remove(name string) error
	// processes are those in a group, none if it is not there.
	processes(name string) ([]int, error)
	// tryIO reports why groups do not bound a device, or nil.
	tryIO(Device) error
}

// group is a cgroup for one process.
type group interface {
	set(Limits) error
	// bornInside makes a process that is about to be started begin in the
	// group, where the kernel can do that; the returned function is called
	// once it has. add moves it there afterwards, where it cannot.
	bornInside(*syscall.SysProcAttr) (done func(), err error)
	add(pid int) error
	// oomKills counts what the kernel has killed for want of memory.
	oomKills() (uint64, error)
	// memory is how much is charged, but for files' cached pages, which the
	// kernel takes back when it needs them, and the limit of it.
	memory() (usage, limit uint64, err error)
	// setMemory raises the limit. lowerMemory lowers it, and fails with errInUse
	// where more than that is charged and cannot be taken back: nobody is killed.
	setMemory(limit uint64) error
	lowerMemory(limit uint64) error
}

// openHierarchy finds out which kind of cgroups the machine has, and that all
// limits can be set.
func openHierarchy(parent string) (hierarchy, error) {
	var h hierarchy
	var err error
	switch mode := cgroups.Mode(); mode {
	case cgroups.Unified:
		h, err = openV2(parent)
	case cgroups.Legacy, cgroups.Hybrid:
		h, err = openV1(parent)
	default:
		err = errors.New("none are mounted at /sys/fs/cgroup")
	}
	return h, err
}

// withoutCache subtracts what was read a moment later, and may be more.
func withoutCache(usage, cached uint64) uint64 { return usage - min(usage, cached) }
