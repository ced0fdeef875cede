package jail

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"strconv"
	"syscall"

	"golang.org/x/sys/unix"
)

// Cell holds the resources of one process: its user id and its cgroup. Release
// frees it once the process has ended.
type Cell struct {
	cells *cells
	uid   int      // 0 for an unjailed process
	lock  *os.File // nil in a cell that Find returned
	group group    // nil if the process has no limits

	budget budget // the limit of memory
}

// Process is a process that Start has started.
type Process struct {
	*os.Process
	Cell *Cell
}

// Start starts the program with these limits. The process gets control as
// descriptor 3, and stderr as descriptor 2.
func (j *Jail) Start(limits Limits, control, stderr *os.File) (_ *Process, err error) {
	j.using.RLock()
	defer j.using.RUnlock()
	all, err := j.cells()
	if err != nil {
		return nil, err
	}
	t, err := j.usable()
	if err != nil {
		return nil, err
	}
	c := &Cell{}
	if t.walls {
		if c, err = all.take(); err != nil {
			return nil, fmt.Errorf("jail a %s process: %w", j.cfg.Kind, err)
		}
	}
	p, err := c.start(t, limits, control, stderr)
	if err != nil {
		_, releaseErr := c.Release()
		return nil, errors.Join(fmt.Errorf("jail a %s process: %w", j.cfg.Kind, err), releaseErr)
	}
	return p, nil
}

// usable returns the thread of the jail, or an error if the jail is closed.
func (j *Jail) usable() (*thread, error) {
	t, err := j.thread()
	if err != nil {
		return nil, err
	}
	j.mu.Lock()
	defer j.mu.Unlock()
	if j.closed {
		return nil, errClosed
	}
	return t, nil
}

func (c *Cell) start(t *thread, limits Limits, control, stderr *os.File) (*Process, error) {
	files := []*os.File{t.null, t.null, stderr, control}
	if c.lock != nil {
		files = append(files, c.lock)
	}
	attr := attributes(files, c.uid)
	attr.Env = t.kind.environment(limits)
	if c.group != nil {
		done, err := c.group.bornInside(attr.Sys)
		if err != nil {
			return nil, err
		}
		defer done()
	}
	process, err := t.start(attr)
	if err != nil {
		return nil, err
	}
	err = yieldMemory(process.Pid)
	if err == nil && c.group != nil {
		// The program is starting up: it does no work before its first message.
		err = c.group.set(limits)
		c.budget.is(limits.Memory)
		if err == nil {
			err = c.group.add(process.Pid)
		}
	}
	if err != nil {
		return nil, errors.Join(err, end(process))
	}
	return &Process{Process: process, Cell: c}, nil
}

// end kills a process that has done no work yet.
func end(p *os.Process) error {
	if err := p.Kill(); err != nil {
		return err
	}
	_, err := p.Wait()
	return err
}

// take finds a free user id and makes its group.
func (a *cells) take() (_ *Cell, err error) {
	c := &Cell{cells: a}
	var stale bool
	if c.uid, c.lock, stale, err = a.uids.take(); err != nil {
		return nil, err
	}
	if a.groups == nil {
		return c, nil
	}
	if stale {
		err = a.removeGroup(c.uid)
	}
	if err == nil {
		c.group, err = a.groups.create(groupName(c.uid))
	}
	if err != nil {
		return nil, errors.Join(err, a.uids.free(c.uid, c.lock))
	}
	return c, nil
}

// Find returns the cell of a running process that this or another jail of the
// host has started.
func (j *Jail) Find(pid int) (*Cell, error) {
	if os.Geteuid() != 0 {
		return &Cell{}, nil
	}
	all, err := j.cells()
	if err != nil {
		return nil, err
	}
	info, err := os.Stat("/proc/" + strconv.Itoa(pid))
	if err != nil {
		return nil, fmt.Errorf("find the jail of process %d: %w", pid, err)
	}
	st, ok := info.Sys().(*syscall.Stat_t)
	if !ok || !all.uids.has(int(st.Uid)) {
		return &Cell{}, nil // it was started unjailed
	}
	c := &Cell{cells: all, uid: int(st.Uid)}
	if all.groups != nil {
		if c.group, err = all.groups.open(groupName(c.uid)); err != nil && !errors.Is(err, fs.ErrNotExist) {
			return nil, fmt.Errorf("find the jail of process %d: %w", pid, err)
		}
	}
	return c, nil
}

// UID is the user id of the process, or 0 if the process runs unjailed.
func (c *Cell) UID() int { return c.uid }

// gone reports whether an error means that a group was removed or is being
// removed.
func gone(err error) bool { return errors.Is(err, fs.ErrNotExist) || errors.Is(err, unix.ENODEV) }

// Memory returns how much memory is charged to the process now, without cached
// pages of files, and its limit. Both are 0 if the process has no cgroup.
func (c *Cell) Memory() (usage, limit uint64, err error) {
	if c.group == nil {
		return 0, 0, nil
	}
	return c.group.memory()
}

// Limit changes the limits of the process.
func (c *Cell) Limit(l Limits) error {
	if c.group == nil {
		return nil
	}
	if err := c.budget.limit(c.group, l); err != nil {
		return fmt.Errorf("limit a jailed process: %w", err)
	}
	return nil
}

// Extend raises the memory limit of the process until back is called. If the
// process still uses the memory then, the limit falls when it has freed it. For
// a process that has ended, Extend does nothing.
func (c *Cell) Extend(bytes uint64) (back func() error, err error) {
	if c.group == nil {
		return func() error { return nil }, nil
	}
	reduce, err := c.budget.extend(c.group, bytes)
	if err != nil {
		return nil, fmt.Errorf("extend the memory of a jailed process: %w", err)
	}
	return func() error {
		if err := reduce(); err != nil {
			return fmt.Errorf("reduce the memory of a jailed process: %w", err)
		}
		return nil
	}, nil
}

// WhenGone calls back, a function that Extend has returned, when no process has the
// file open or mapped any more. The process has filled the file, and the kernel
// charges it to the process until then. The file has no name. If the host has no
// inotify watch left, WhenGone calls back at once: the limit then falls when the
// memory in use permits, and the capture does not fail.
func (c *Cell) WhenGone(f *os.File, back func() error) error {
	if c.group == nil {
		return back()
	}
	// If the group cannot be read, the next change reports it.
	if err := c.cells.files.whenGone(f, func() { _ = back() }); err != nil {
		return back()
	}
	return nil
}

// Restore sets the memory limit of a process that Find has found. The process that
// had raised the limit may have been killed before it lowered it.
func (c *Cell) Restore(limit uint64) error {
	if c.group == nil {
		return nil
	}
	if err := c.budget.restore(c.group, limit); err != nil {
		return fmt.Errorf("restore the limit of a jailed process: %w", err)
	}
	return nil
}

// Leave stops changing the limits of a process that continues. The next finder of
// the cell manages them.
func (c *Cell) Leave() { c.budget.close() }

// Disown leaves the cell to the next finder, as if this process had ended. The user id
// stays taken for as long as the jailed process lives. The Cell must not be used
// afterwards.
func (c *Cell) Disown() error {
	c.budget.close()
	if c.lock == nil {
		return nil
	}
	return c.lock.Close()
}

// Release frees the cell of a process that has ended. It returns how many
// processes the kernel has killed in the cell for want of memory.
func (c *Cell) Release() (oomKills uint64, err error) {
	if c.uid == 0 {
		return 0, nil
	}
	c.budget.close()
	if c.group != nil {
		// Another parent may have released it already.
		if oomKills, err = c.group.oomKills(); gone(err) {
			err = nil
		}
	}
	if c.lock == nil {
		return oomKills, errors.Join(err, c.cells.uids.reclaim(c.uid, c.cells.removeGroup))
	}
	return oomKills, errors.Join(err, c.cells.removeGroup(c.uid), c.cells.uids.free(c.uid, c.lock))
}
