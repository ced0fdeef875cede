package jail

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"strconv"
	"sync"
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

	extending sync.Mutex // held while the limit of memory is changed; protects surplus
	// surplus is what the limit is too high by: memory that was given back and
	// is still there.
	surplus uint64
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
			return nil, fmt.Errorf("jail a vmm process: %w", err)
		}
	}
	p, err := c.start(t, limits, control, stderr)
	if err != nil {
		_, releaseErr := c.Release()
		return nil, errors.Join(fmt.Errorf("jail a vmm process: %w", err), releaseErr)
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
	c.extending.Lock()
	defer c.extending.Unlock()
	if err := c.group.set(l); err != nil {
		return fmt.Errorf("limit a vmm process: %w", err)
	}
	return nil
}

// Extend lets the process have more memory until back is called, and as long
// after that as it has it. For one that has ended that is nothing.
func (c *Cell) Extend(bytes uint64) (back func() error, err error) {
	nothing := func() error { return nil }
	if c.group == nil {
		return nothing, nil
	}
	err = c.changeMemory(bytes, 0)
	if gone(err) {
		return nothing, nil
	}
	if err != nil {
		return nil, fmt.Errorf("extend the memory of a vmm process: %w", err)
	}
	return func() error {
		err := c.changeMemory(0, bytes)
		if err != nil && !gone(err) {
			return fmt.Errorf("reduce the memory of a vmm process: %w", err)
		}
		return nil
	}, nil
}

// roomToFree is what is left above what a process uses when its limit is
// lowered: it goes on allocating meanwhile.
const roomToFree = 16 << 20

// changeMemory changes the limit of memory. It is not lowered to below what is
// in use: the kernel would kill the process, which may be about to unmap a file
// that others have closed. The next change makes up for it.
func (c *Cell) changeMemory(more, less uint64) error {
	c.extending.Lock()
	defer c.extending.Unlock()
	usage, limit, err := c.group.memory()
	if err != nil {
		return err
	}
	limit += more
	surplus := c.surplus + less
	possible := limit - min(limit, usage+roomToFree)
	lower := min(surplus, possible)
	if more == 0 && lower == 0 {
		c.surplus = surplus
		return nil
	}
	if err := c.group.setMemory(limit - lower); err != nil {
		return err
	}
	c.surplus = surplus - lower
	return nil
}

// Release frees the cell of a process that has ended, and says how often the
// kernel had killed in it for want of memory.
func (c *Cell) Release() (oomKills uint64, err error) {
	if c.uid == 0 {
		return 0, nil
	}
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
