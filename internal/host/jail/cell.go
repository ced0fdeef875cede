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

// Cell is what a process occupies. It is freed by Release once the process has
// ended.
type Cell struct {
	cells *cells
	uid   int      // 0: unjailed
	lock  *os.File // nil in a cell that was found
	group group    // nil: unlimited

	budget budget // the limit of memory
}

// Process is one that was started.
type Process struct {
	*os.Process
	Cell *Cell
}

// Start starts the program with these limits. It finds control as its
// descriptor 3, and stderr as 2.
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

// usable is the thread of a jail that is not closed.
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
		// It is starting up; nothing happens in it before its first message.
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

// end kills a process that has done nothing yet.
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
// machine has started.
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

// UID is the user id of the process, 0 if it has none of its own.
func (c *Cell) UID() int { return c.uid }

// gone says that a group was removed, or is just now being.
func gone(err error) bool { return errors.Is(err, fs.ErrNotExist) || errors.Is(err, unix.ENODEV) }

// Memory is how much memory is charged to the process now, without cached pages
// of files, and its limit. Both are 0 if nobody counts.
func (c *Cell) Memory() (usage, limit uint64, err error) {
	if c.group == nil {
		return 0, 0, nil
	}
	return c.group.memory()
}

// Limit gives the process other limits than it was started with.
func (c *Cell) Limit(l Limits) error {
	if c.group == nil {
		return nil
	}
	if err := c.budget.limit(c.group, l); err != nil {
		return fmt.Errorf("limit a jailed process: %w", err)
	}
	return nil
}

// Extend lets the process have more memory until back is called, and as long
// after that as it has it. For one that has ended that is nothing.
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

// WhenGone calls back, which Extend has returned, once nobody has a file open or
// mapped that the process has filled: until then it is charged to it. The file has no
// name. Where the machine has no watch left for it, back is called at once: the
// limit is lowered when the memory in use permits, and a capture does not fail.
func (c *Cell) WhenGone(f *os.File, back func() error) error {
	if c.group == nil {
		return back()
	}
	// A failure to look at the group is met again by the next change.
	if err := c.cells.files.whenGone(f, func() { _ = back() }); err != nil {
		return back()
	}
	return nil
}

// Restore says what the limit of memory of a process is that was found: whoever has
// raised it may have been killed before it was lowered.
func (c *Cell) Restore(limit uint64) error {
	if c.group == nil {
		return nil
	}
	if err := c.budget.restore(c.group, limit); err != nil {
		return fmt.Errorf("restore the limit of a jailed process: %w", err)
	}
	return nil
}

// Leave leaves the limits of a process that goes on to whoever finds its cell next.
func (c *Cell) Leave() { c.budget.close() }

// Disown leaves the cell to whoever finds it next, as if this process had ended: the
// user id stays taken for as long as the jailed process lives. Nobody may use the Cell
// afterwards.
func (c *Cell) Disown() error {
	c.budget.close()
	if c.lock == nil {
		return nil
	}
	return c.lock.Close()
}

// Release frees the cell of a process that has ended, and says how often the
// kernel had killed in it for want of memory.
func (c *Cell) Release() (oomKills uint64, err error) {
	if c.uid == 0 {
		return 0, nil
	}
	c.budget.close()
	if c.group != nil {
		// One that another parent has released already is fine.
		if oomKills, err = c.group.oomKills(); gone(err) {
			err = nil
		}
	}
	if c.lock == nil {
		return oomKills, errors.Join(err, c.cells.uids.reclaim(c.uid, c.cells.removeGroup))
	}
	return oomKills, errors.Join(err, c.cells.removeGroup(c.uid), c.cells.uids.free(c.uid, c.lock))
}
