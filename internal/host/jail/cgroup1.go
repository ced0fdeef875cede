package jail

import (
	"errors"
	"fmt"
	"io/fs"
	"path"
	"syscall"

	"github.com/containerd/cgroups/v3/cgroup1"
	specs "github.com/opencontainers/runtime-spec/specs-go"
	"golang.org/x/sys/unix"
)

// v1 has a hierarchy per controller.
type v1 struct {
	parent      string
	controllers []cgroup1.Subsystem // those that the jail uses, found once
}

func openV1(parent string) (*v1, error) {
	all, err := cgroup1.Default()
	if err != nil {
		return nil, err
	}
	h := &v1{parent: "/" + parent}
	for _, name := range []cgroup1.Name{cgroup1.Memory, cgroup1.Cpu, cgroup1.Pids} {
		found := false
		for _, s := range all {
			if s.Name() == name {
				h.controllers, found = append(h.controllers, s), true
			}
		}
		if !found {
			return nil, fmt.Errorf("the %s controller is not mounted", name)
		}
	}
	if _, err := cgroup1.New(cgroup1.StaticPath(h.parent), &specs.LinuxResources{}, h.mine()); err != nil {
		return nil, err
	}
	return h, nil
}

// mine gives the library the controllers, so that it does not read the list of
// mounts for each group.
func (h *v1) mine() cgroup1.InitOpts {
	return cgroup1.WithHierarchy(func() ([]cgroup1.Subsystem, error) { return h.controllers, nil })
}

func (h *v1) path(name string) cgroup1.Path { return cgroup1.StaticPath(path.Join(h.parent, name)) }

func (h *v1) create(name string) (group, error) {
	cg, err := cgroup1.New(h.path(name), &specs.LinuxResources{}, h.mine())
	if err != nil {
		return nil, fmt.Errorf("make cgroup %s: %w", name, err)
	}
	return v1Group{cg}, nil
}

func (h *v1) open(name string) (group, error) {
	cg, err := cgroup1.Load(h.path(name), h.mine())
	if errors.Is(err, cgroup1.ErrCgroupDeleted) {
		err = fs.ErrNotExist
	}
	if err != nil {
		return nil, fmt.Errorf("find cgroup %s: %w", name, err)
	}
	return v1Group{cg}, nil
}

func (h *v1) processes(name string) (pids []int, err error) {
	cg, err := cgroup1.Load(h.path(name), h.mine())
	if errors.Is(err, cgroup1.ErrCgroupDeleted) {
		return nil, nil
	}
	if err != nil {
		return nil, fmt.Errorf("find cgroup %s: %w", name, err)
	}
	list, err := cg.Processes(cgroup1.Pids, false)
	if err != nil && !gone(err) {
		return nil, fmt.Errorf("list cgroup %s: %w", name, err)
	}
	for _, p := range list {
		pids = append(pids, p.Pid)
	}
	return pids, nil
}

func (h *v1) remove(name string) error {
	cg, err := cgroup1.Load(h.path(name), h.mine())
	if errors.Is(err, cgroup1.ErrCgroupDeleted) {
		return nil
	}
	if err == nil {
		err = cg.Delete()
	}
	if err != nil {
		return fmt.Errorf("remove cgroup %s: %w", name, err)
	}
	return nil
}

// usualShares is the kernel's default for a group.
const usualShares = 1024

type v1Group struct{ cgroup1.Cgroup }

func (g v1Group) set(l Limits) error {
	if err := l.check(); err != nil {
		return err
	}
	memory, quota, period, threads := int64(l.Memory), l.quota(), uint64(cpuPeriod), int64(l.Threads)
	shares := l.weight() * usualShares / usualWeight
	err := g.Update(&specs.LinuxResources{
		Memory: &specs.LinuxMemory{Limit: &memory},
		CPU:    &specs.LinuxCPU{Quota: &quota, Period: &period, Shares: &shares},
		Pids:   &specs.LinuxPids{Limit: &threads},
	})
	if err != nil {
		return fmt.Errorf("set cgroup limits: %w", err)
	}
	return nil
}

func (v1Group) bornInside(*syscall.SysProcAttr) (func(), error) { return func() {}, nil }

func (g v1Group) add(pid int) error {
	if err := g.AddProc(uint64(pid)); err != nil {
		return fmt.Errorf("move process %d into its cgroup: %w", pid, err)
	}
	return nil
}

func (g v1Group) oomKills() (uint64, error) {
	st, err := g.Stat()
	if err != nil {
		return 0, fmt.Errorf("read cgroup: %w", err)
	}
	return st.GetMemoryOomControl().GetOomKill(), nil
}

func (g v1Group) memory() (usage, limit uint64, err error) {
	st, err := g.Stat()
	if err != nil {
		return 0, 0, fmt.Errorf("read cgroup: %w", err)
	}
	m := st.GetMemory()
	cached := m.GetTotalActiveFile() + m.GetTotalInactiveFile()
	return withoutCache(m.GetUsage().GetUsage(), cached), m.GetUsage().GetLimit(), nil
}

func (g v1Group) setMemory(limit uint64) error {
	bytes := int64(limit)
	if err := g.Update(&specs.LinuxResources{Memory: &specs.LinuxMemory{Limit: &bytes}}); err != nil {
		return fmt.Errorf("set cgroup limit: %w", err)
	}
	return nil
}

// lowerMemory relies on the kernel, which takes back cached pages and then
// refuses a limit below the memory charged.
func (g v1Group) lowerMemory(limit uint64) error {
	err := g.setMemory(limit)
	if errors.Is(err, unix.EBUSY) {
		return fmt.Errorf("%w than %d bytes", errInUse, limit)
	}
	return err
}
