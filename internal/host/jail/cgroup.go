package jail

import (
	"errors"
	"fmt"
	"syscall"

	"github.com/containerd/cgroups/v3"
)

// Limits bound the host's resources that a process can take. All but IO must be
// set.
type Limits struct {
	// Memory is in bytes. It includes memory that the kernel allocates for the
	// process.
	Memory uint64
	// MilliCPUs are thousandths of a processor's time.
	MilliCPUs uint64
	// Background gives the processes of other groups eight times as much of the
	// processors when there are not enough for all.
	Background bool
	// Threads bounds the threads of the process.
	Threads int
	// IO is optional: the zero value leaves the current bounds.
	IO IO
}

func (l Limits) check() error {
	if l.Memory == 0 || l.MilliCPUs == 0 || l.Threads <= 0 {
		return fmt.Errorf("limits %+v: each must be set", l)
	}
	return nil
}

// cpuPeriod is the kernel's default, in microseconds.
const cpuPeriod = 100_000

// quota is the processor time per period.
func (l Limits) quota() int64 { return int64(l.MilliCPUs * cpuPeriod / 1000) }

// The weights of groups. A process in a light group is preempted when a process in a usual
// group wakes.
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
	// remove removes an empty group. If the group does not exist, it does
	// nothing.
	remove(name string) error
	// processes lists the processes in a group; the list is empty if the group
	// does not exist.
	processes(name string) ([]int, error)
	// tryIO reports why groups cannot bound a device, or nil.
	tryIO(Device) error
}

// group is a cgroup for one process.
type group interface {
	set(Limits) error
	// bornInside prepares a process that is about to be started so that it
	// begins in the group, if the kernel can do that. The caller calls the
	// returned function once the process has started. add moves the process
	// into the group afterwards, if the kernel cannot.
	bornInside(*syscall.SysProcAttr) (done func(), err error)
	add(pid int) error
	// oomKills counts the processes that the kernel has killed for want of
	// memory.
	oomKills() (uint64, error)
	// memory returns how much is charged and the limit. The charge excludes
	// cached pages of files, because the kernel takes them back when it needs
	// them.
	memory() (usage, limit uint64, err error)
	// setMemory raises the limit. lowerMemory lowers it. It fails with errInUse,
	// and no process is killed, if more memory is charged than the new limit
	// allows and cannot be taken back.
	setMemory(limit uint64) error
	lowerMemory(limit uint64) error
}

// openHierarchy finds out which kind of cgroups the host has, and that all
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

// withoutCache subtracts the cached pages. They are read later than usage, and
// so may be more.
func withoutCache(usage, cached uint64) uint64 { return usage - min(usage, cached) }
