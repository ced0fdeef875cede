// Package jail starts vmm processes and netds behind walls that they cannot build
// themselves: a user id of their own, no capabilities, an empty root, an empty
// network (a netd has the machine's), and limits for memory, processors and
// threads. What a process can
// do about itself, the filter of its system calls above all, is package
// lockdown's. docs/design/jail.md has the whole picture.
//
// The namespaces are made once per Jail, by one thread of this process that
// stays in them and starts all of its vmm processes. So starting one costs
// little more than a plain exec, and nothing has to be taken down: the
// namespaces go with the last process in them.
//
// A process is found again, also by other parents and after this one has died,
// by its user id: a file of that number is locked for as long as it lives, and
// its cgroup has the same number. The id is taken while either says so.
package jail

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"sync"
)

// Config says how to jail. Only Program is needed.
type Config struct {
	// Program is the path of the program to start, a static one that others
	// may execute.
	Program string
	// Kind is what the program is: a vmm unless another is named.
	Kind Kind
	// Folder is where the user ids in use are locked. All jails of a machine
	// whose ids overlap must have the same.
	Folder string
	// FirstUID and UIDs are the range of user ids.
	FirstUID, UIDs int
	// Cgroup is the name of the group, below the root, for those of the
	// processes.
	Cgroup string
	// AllowUnlimited goes on where cgroup limits cannot be set.
	AllowUnlimited bool
	// AllowUnjailed goes on without anything that this package does where it
	// cannot be done, as without root.
	AllowUnjailed bool
}

// Defaults. The user ids are in a range that systemd's conventions leave unused
// (systemd.io/UIDS-GIDS), as are most others.
const (
	defaultFolder   = "/run/agentrun/jail"
	defaultFirstUID = 1_900_000_000
	defaultUIDs     = 1 << 16
	defaultCgroup   = "agentrun"
)

func (c *Config) fill() {
	if c.Folder == "" {
		c.Folder = defaultFolder
	}
	if c.FirstUID == 0 {
		c.FirstUID = defaultFirstUID
	}
	if c.UIDs == 0 {
		c.UIDs = defaultUIDs
	}
	if c.Cgroup == "" {
		c.Cgroup = defaultCgroup
	}
}

// Jail starts processes. Its methods are safe for concurrent use.
type Jail struct {
	cfg Config
	// Made when first needed: most commands of a CLI start nothing.
	cells  func() (*cells, error)
	thread func() (*thread, error)

	using sync.RWMutex // held by who starts a process; Close waits for them

	mu     sync.Mutex // protects the following
	closed bool
	inside *thread // nil until a process was started
}

// cells is where processes are put.
type cells struct {
	uids   *uids     // nil without root
	groups hierarchy // nil: unlimited
	files  watcher   // of those that are charged to groups
}

// New makes a jail. Whether it can hold anybody is found out by Check, or by
// the first Start.
func New(cfg Config) *Jail {
	cfg.fill()
	j := &Jail{cfg: cfg}
	j.cells = sync.OnceValues(j.openCells)
	j.thread = sync.OnceValues(j.openThread)
	return j
}

// Check reports why processes cannot be jailed here, or nil.
func (j *Jail) Check() error {
	_, err := j.cells()
	if err == nil {
		_, err = j.thread()
	}
	return err
}

// errNotRoot says what cannot be had without root.
var errNotRoot = errors.New("only root can give processes user ids, namespaces and limits of their own: " +
	"run as root, or accept sandboxes with nothing but a system call filter around them (--allow-unjailed)")

var errClosed = errors.New("the jail is closed")

// openCells also frees what processes that ended unobserved have left.
func (j *Jail) openCells() (_ *cells, err error) {
	c := &cells{}
	if os.Geteuid() != 0 {
		if j.cfg.AllowUnjailed {
			return c, nil
		}
		return nil, fmt.Errorf("make a jail: %w", errNotRoot)
	}
	if c.groups, err = openHierarchy(j.cfg.Cgroup); err != nil {
		if !j.cfg.AllowUnlimited && !j.cfg.AllowUnjailed {
			return nil, fmt.Errorf("make a jail: limits by cgroups: %w (agentrun doctor says what this host lacks; --allow-unlimited goes on without)", err)
		}
		c.groups = nil
	}
	if c.uids, err = openUIDs(j.cfg.Folder, j.cfg.FirstUID, j.cfg.UIDs, c.living); err != nil {
		return nil, fmt.Errorf("make a jail: %w", err)
	}
	_ = c.sweep() // what resists is in nobody's way, and Sweep tells
	return c, nil
}

// openThread makes the walls that all processes share.
func (j *Jail) openThread() (*thread, error) {
	j.mu.Lock()
	defer j.mu.Unlock()
	if j.closed {
		return nil, errClosed
	}
	program, err := filepath.Abs(j.cfg.Program)
	if err != nil {
		return nil, fmt.Errorf("make a jail: %w", err)
	}
	j.inside, err = startThread(program, j.cfg.Kind, os.Geteuid() == 0)
	if err != nil && j.cfg.AllowUnjailed {
		j.inside, err = startThread(program, j.cfg.Kind, false)
	}
	if err != nil {
		return nil, fmt.Errorf("make a jail: %w", err)
	}
	return j.inside, nil
}

// Close frees the jail; its processes live on.
func (j *Jail) Close() error {
	j.using.Lock()
	defer j.using.Unlock()
	j.mu.Lock()
	defer j.mu.Unlock()
	j.closed = true
	if j.inside == nil {
		return nil
	}
	t := j.inside
	j.inside = nil
	return t.close()
}

// Sweep frees what processes have left that ended while nobody watched.
func (j *Jail) Sweep() error {
	if os.Geteuid() != 0 {
		return nil // they had nothing of their own
	}
	c, err := j.cells()
	if err != nil {
		return err
	}
	return c.sweep()
}

func (a *cells) sweep() error { return a.uids.sweep(a.removeGroup) }

// groupName is the cgroup of the process with a user id, of either kind: ids are
// handed out to both.
func groupName(uid int) string { return "vm-" + strconv.Itoa(uid) }

// removeGroup removes the group of a process that has let go of its user id. One
// that ends does so before it leaves its group.
func (a *cells) removeGroup(uid int) error {
	if a.groups == nil {
		return nil
	}
	return removePatiently(a.groups, groupName(uid))
}
