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

// Groups are cgroups for processes that have walls of their own, and for all
// that those start.
type Groups struct {
	hierarchy hierarchy
	files     watcher
}

// OpenGroups finds the machine's cgroups.
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

// Open finds a group; the error is fs.ErrNotExist if there is none.
func (g *Groups) Open(name string) (*Group, error) {
	found, err := g.hierarchy.open(name)
	if err != nil {
		return nil, err
	}
	return &Group{groups: g, name: name, group: found}, nil
}

// Remove removes a group whose processes have ended; none is fine.
func (g *Groups) Remove(name string) error { return g.hierarchy.remove(name) }

// Group is one cgroup. A nil Group limits nothing.
type Group struct {
	groups *Groups
	name   string
	group  group
	budget budget // the limit of memory
}

// Start starts a program in the group, that goes first when the machine's memory
// is short. On old kernels it gets there a moment after it has begun.
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

// Memory is how much is charged, cached pages of files aside, and the limit.
func (g *Group) Memory() (usage, limit uint64, err error) {
	if g == nil {
		return 0, 0, nil
	}
	return g.group.memory()
}

// Extend raises the limit of memory, until back is called, and as long after that
// as the memory is in use.
func (g *Group) Extend(bytes uint64) (back func() error, err error) {
	if g == nil {
		return func() error { return nil }, nil
	}
	return g.budget.extend(g.group, bytes)
}

// Charge raises the limit of memory by what files in memory hold that processes of
// the group have filled. It is lowered when the files are gone. They have no names,
// or are about to lose them; who has them open does not matter.
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
		// A failure to look at the group is met again by the next change.
		if err := g.groups.files.whenGone(f, func() { _ = back() }); err != nil {
			// The machine has no watch left. The limit is lowered when the memory in
			// use permits.
			if err := back(); err != nil {
				return err
			}
		}
	}
	return nil
}

// statBlock is the unit of stat(2)'s st_blocks.
const statBlock = 512

// Restore says what the limit of memory of a group is that was found: whoever has
// raised it may have been killed before it was lowered.
func (g *Group) Restore(limit uint64) error {
	if g == nil {
		return nil
	}
	return g.budget.restore(g.group, limit)
}

// Leave leaves the limits to whoever opens the group next.
func (g *Group) Leave() {
	if g != nil {
		g.budget.close()
	}
}

// Release removes the group, and says how many the kernel has killed in it for
// want of memory. Its processes have ended, or are about to.
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

// removePatiently removes a group whose processes have ended, or are about to: there
// is no event that tells of the last one's end on every kind of cgroup.
func removePatiently(h hierarchy, name string) error {
	for begin, wait := time.Now(), time.Millisecond; ; wait = min(2*wait, releaseStep) {
		err := h.remove(name)
		if err == nil || time.Since(begin) > releasePatience {
			return err
		}
		time.Sleep(wait)
	}
}

// releasePatience is how long processes that were killed may take to end, on a
// machine that is busy, and releaseStep how often it is looked at the least.
const (
	releasePatience = 30 * time.Second
	releaseStep     = 50 * time.Millisecond
)
