package jail

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"slices"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// Groups manages cgroups for processes that have walls of their own, and for
// all of their descendants.
type Groups struct {
	hierarchy hierarchy
	files     watcher
}

// OpenGroups finds the host's cgroups.
func OpenGroups() (*Groups, error) {
	h, err := openHierarchy(defaultCgroup)
	if err != nil {
		return nil, fmt.Errorf("limit memory and processors by cgroups: %w", err)
	}
	return &Groups{hierarchy: h}, nil
}

// Create makes a group.
func (g *Groups) Create(name string, limits Limits) (*Group, error) {
	group, err := g.hierarchy.create(name)
	if err != nil {
		return nil, err
	}
	if err := group.set(limits); err != nil {
		return nil, errors.Join(err, g.hierarchy.remove(name))
	}
	made := &Group{groups: g, name: name, group: group}
	made.budget.is(limits.Memory)
	return made, nil
}

// Open finds a group; the error is fs.ErrNotExist if the group does not exist.
func (g *Groups) Open(name string) (*Group, error) {
	found, err := g.hierarchy.open(name)
	if err != nil {
		return nil, err
	}
	return &Group{groups: g, name: name, group: found}, nil
}

// Remove removes a group whose processes have ended. If the group does not
// exist, it does nothing.
func (g *Groups) Remove(name string) error { return g.hierarchy.remove(name) }

// Group is one cgroup. A nil Group sets no limits.
type Group struct {
	groups *Groups
	name   string
	group  group
	budget budget // the limit of memory
}

// Start starts a program in the group and raises its oom_score_adj, so that the
// kernel ends it first when the host's memory is short. On old kernels the
// program enters the group a moment after its start.
func (g *Group) Start(cmd *exec.Cmd) error {
	if err := g.start(cmd); err != nil {
		return err
	}
	if err := yieldMemory(cmd.Process.Pid); err != nil {
		return errors.Join(err, cmd.Process.Kill(), cmd.Wait())
	}
	return nil
}

func (g *Group) start(cmd *exec.Cmd) error {
	if g == nil {
		return cmd.Start()
	}
	if cmd.SysProcAttr == nil {
		cmd.SysProcAttr = &syscall.SysProcAttr{}
	}
	done, err := g.group.bornInside(cmd.SysProcAttr)
	if err != nil {
		return err
	}
	defer done()
	if err := cmd.Start(); err != nil {
		return err
	}
	if err := g.group.add(cmd.Process.Pid); err != nil {
		return errors.Join(err, cmd.Process.Kill(), cmd.Wait())
	}
	return nil
}

// Has reports whether a process is in the group.
func (g *Group) Has(pid int) (bool, error) {
	pids, err := g.groups.hierarchy.processes(g.name)
	return slices.Contains(pids, pid), err
}

// Memory returns the memory charged, without cached pages of files, and the
// limit.
func (g *Group) Memory() (usage, limit uint64, err error) {
	if g == nil {
		return 0, 0, nil
	}
	return g.group.memory()
}

// Extend raises the memory limit until back is called. If the memory is still in
// use then, the limit falls when it is freed.
func (g *Group) Extend(bytes uint64) (back func() error, err error) {
	if g == nil {
		return func() error { return nil }, nil
	}
	return g.budget.extend(g.group, bytes)
}

// Charge raises the memory limit by the size of files in memory that processes of
// the group have filled. The limit falls when the files are gone. They have no
// names, or are about to lose them. It does not matter which process has them open.
func (g *Group) Charge(files ...*os.File) error {
	if g == nil {
		return nil
	}
	for _, f := range files {
		var st unix.Stat_t
		if err := unix.Fstat(int(f.Fd()), &st); err != nil {
			return fmt.Errorf("look at %s: %w", f.Name(), err)
		}
		back, err := g.budget.extend(g.group, uint64(st.Blocks)*statBlock)
		if err != nil {
			return err
		}
		// If the group cannot be read, the next change reports it.
		if err := g.groups.files.whenGone(f, func() { _ = back() }); err != nil {
			// The host has no watch left. The limit falls when the memory in use
			// permits.
			if err := back(); err != nil {
				return err
			}
		}
	}
	return nil
}

// statBlock is the unit of stat(2)'s st_blocks.
const statBlock = 512

// Restore sets the memory limit of a group that Open has found. The process that
// had raised the limit may have been killed before it lowered it.
func (g *Group) Restore(limit uint64) error {
	if g == nil {
		return nil
	}
	return g.budget.restore(g.group, limit)
}

// Leave stops changing the limits. The process that opens the group next
// manages them.
func (g *Group) Leave() {
	if g != nil {
		g.budget.close()
	}
}

// Release removes the group, and returns how many processes the kernel has
// killed in it for want of memory. Its processes have ended, or are about to.
func (g *Group) Release() (oomKills uint64, err error) {
	if g == nil {
		return 0, nil
	}
	g.budget.close()
	oomKills, err = g.group.oomKills()
	if gone(err) {
		err = nil
	}
	return oomKills, errors.Join(err, removePatiently(g.groups.hierarchy, g.name))
}

// removePatiently removes a group whose processes have ended, or are about to. It
// polls, because not every kind of cgroup has an event for the end of the last
// process.
func removePatiently(h hierarchy, name string) error {
	for begin, wait := time.Now(), time.Millisecond; ; wait = min(2*wait, releaseStep) {
		err := h.remove(name)
		if err == nil || time.Since(begin) > releasePatience {
			return err
		}
		time.Sleep(wait)
	}
}

// releasePatience bounds how long killed processes may take to end on a busy
// host. releaseStep is the longest pause between two tries.
const (
	releasePatience = 30 * time.Second
	releaseStep     = 50 * time.Millisecond
)
