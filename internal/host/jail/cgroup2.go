package jail

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path"
	"strconv"
	"syscall"

	"github.com/containerd/cgroups/v3/cgroup2"
	"golang.org/x/sys/unix"
)

// v2 is the single hierarchy of all controllers.
type v2 struct {
	parent string
	io     bool // groups can bound the rates of devices
}

const v2Mount = "/sys/fs/cgroup"

func openV2(parent string) (*v2, error) {
	h := &v2{parent: "/" + parent}
	// Making one group with all limits enables the controllers down to it and
	// shows that they exist.
	trial := fmt.Sprintf("trial-%d", os.Getpid())
	m, err := cgroup2.NewManager(v2Mount, path.Join(h.parent, trial), v2Resources(Limits{Memory: 1 << 30, MilliCPUs: 1000, Threads: 1}))
	if err != nil {
		return nil, err
	}
	h.io = enableIO(m, h.dir(trial))
	return h, m.Delete()
}

func v2Resources(l Limits) *cgroup2.Resources {
	memory, quota, weight := int64(l.Memory), l.quota(), l.weight()
	return &cgroup2.Resources{
		Memory: &cgroup2.Memory{Max: &memory},
		CPU:    &cgroup2.CPU{Max: cgroup2.NewCPUMax(&quota, nil), Weight: &weight},
		Pids:   &cgroup2.Pids{Max: int64(l.Threads)},
	}
}

func (h *v2) dir(name string) string { return path.Join(v2Mount, h.parent, name) }

func (h *v2) create(name string) (group, error) {
	if err := os.Mkdir(h.dir(name), 0o750); err != nil {
		return nil, fmt.Errorf("make cgroup: %w", err)
	}
	return h.open(name)
}

func (h *v2) open(name string) (group, error) {
	if _, err := os.Stat(h.dir(name)); err != nil {
		return nil, fmt.Errorf("find cgroup: %w", err)
	}
	m, err := cgroup2.Load(path.Join(h.parent, name), cgroup2.WithMountpoint(v2Mount))
	if err != nil {
		return nil, fmt.Errorf("find cgroup %s: %w", name, err)
	}
	return v2Group{m, h.dir(name), h.io}, nil
}

func (h *v2) processes(name string) ([]int, error) {
	return readProcesses(path.Join(h.dir(name), "cgroup.procs"))
}

func (h *v2) remove(name string) error {
	g, err := h.open(name)
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err == nil {
		err = g.(v2Group).Delete()
	}
	if err != nil {
		return fmt.Errorf("remove cgroup %s: %w", name, err)
	}
	return nil
}

type v2Group struct {
	*cgroup2.Manager
	dir string
	io  bool
}

func (g v2Group) set(l Limits) error {
	if err := l.check(); err != nil {
		return err
	}
	if err := g.Update(v2Resources(l)); err != nil {
		return fmt.Errorf("set cgroup limits: %w", err)
	}
	return g.setIO(l.IO)
}

func (g v2Group) bornInside(sys *syscall.SysProcAttr) (func(), error) {
	f, err := os.Open(g.dir)
	if err != nil {
		return nil, fmt.Errorf("open cgroup: %w", err)
	}
	sys.UseCgroupFD, sys.CgroupFD = true, int(f.Fd())
	return func() { _ = f.Close() }, nil // the descriptor only names the group
}

// add does nothing: the process was born inside.
func (v2Group) add(int) error { return nil }

func (g v2Group) oomKills() (uint64, error) {
	st, err := g.StatFiltered(cgroup2.StatMemoryEvents)
	if err != nil {
		return 0, fmt.Errorf("read cgroup: %w", err)
	}
	return st.GetMemoryEvents().GetOomKill(), nil
}

func (g v2Group) memory() (usage, limit uint64, err error) {
	st, err := g.StatFiltered(cgroup2.StatMemory)
	if err != nil {
		return 0, 0, fmt.Errorf("read cgroup: %w", err)
	}
	m := st.GetMemory()
	return withoutCache(m.GetUsage(), m.GetActiveFile()+m.GetInactiveFile()), m.GetUsageLimit(), nil
}

func (g v2Group) setMemory(limit uint64) error {
	bytes := int64(limit)
	if err := g.Update(&cgroup2.Resources{Memory: &cgroup2.Memory{Max: &bytes}}); err != nil {
		return fmt.Errorf("set cgroup limit: %w", err)
	}
	return nil
}

// lowerMemory never sets a limit below the memory charged: the kernel would kill
// processes until the rest fits. Before that it has the kernel take back memory that
// can be taken back, such as cached pages of files.
func (g v2Group) lowerMemory(limit uint64) error {
	for tries := 2; ; tries-- {
		st, err := g.StatFiltered(cgroup2.StatMemory)
		if err != nil {
			return fmt.Errorf("read cgroup: %w", err)
		}
		m := st.GetMemory()
		charged := m.GetUsage()
		if charged <= limit {
			return g.setMemory(limit)
		}
		free := m.GetActiveFile() + m.GetInactiveFile() + m.GetSlabReclaimable()
		if tries == 0 || withoutCache(charged, free) > limit {
			return fmt.Errorf("%w than %d bytes", errInUse, limit)
		}
		if err := g.reclaim(charged-limit, limit); err != nil {
			return err
		}
	}
}

// reclaim asks the kernel to take back so many bytes, as far as it can. bound is the
// charge that would then remain.
func (g v2Group) reclaim(bytes, bound uint64) error {
	err := g.write("memory.reclaim", strconv.FormatUint(bytes, 10))
	if errors.Is(err, unix.EAGAIN) { // the kernel took back only a part
		return nil
	}
	if _, gone := os.Stat(g.dir); gone == nil && errors.Is(err, fs.ErrNotExist) {
		return g.reclaimByBound(bound)
	}
	return err
}

// reclaimByBound is for kernels before 5.19. When memory.high is set, the kernel
// takes back memory above it, and slows processes down while they are above it. So
// the bound is removed at once.
func (g v2Group) reclaimByBound(bound uint64) error {
	return errors.Join(g.write("memory.high", strconv.FormatUint(bound, 10)), g.write("memory.high", "max"))
}

func (g v2Group) write(file, value string) error {
	if err := os.WriteFile(path.Join(g.dir, file), []byte(value), 0); err != nil {
		return fmt.Errorf("take back cached pages: %w", err)
	}
	return nil
}
