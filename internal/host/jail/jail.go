// Package jail starts vmm processes and netds behind walls that they cannot build
// themselves: a user id of their own, no capabilities, an empty root, an empty
// network (a netd uses the host's), and limits for memory, processors and
// threads. Package lockdown holds the restrictions that a process can put on
// itself, above all the filter of its system calls. docs/design/jail.md describes
// the whole.
//
// The namespaces are made once per Jail. One thread of this process stays in
// them and starts all of the jail's vmm processes. So starting one costs little
// more than a plain exec, and no cleanup is needed: the kernel frees the
// namespaces with the last process in them.
//
// A process is found again by its user id, also by other parents and after this
// one has died. A file named after the id is locked for as long as the process
// lives, and the name of its cgroup contains the id. The id counts as taken
// while either of the two is in use.
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
	// Program is the path of the program to start. It must be statically
	// linked, and other users must be allowed to execute it.
	Program string
	// Kind is the kind of the program; the zero value is a vmm.
	Kind Kind
	// Folder holds a locked file per user id in use. Jails of a host whose ids
	// overlap must use the same folder.
	Folder string
	// FirstUID and UIDs are the range of user ids.
	FirstUID, UIDs int
	// Cgroup is the name of the parent cgroup, below the root, of the
	// processes' groups.
	Cgroup string
	// AllowUnlimited starts processes without limits if cgroup limits cannot be
	// set.
	AllowUnlimited bool
	// AllowUnjailed starts processes without the walls of this package if the
	// walls cannot be built, for example without root.
	AllowUnjailed bool
}

// Defaults. The user ids are in a range that systemd's conventions leave unused
// (systemd.io/UIDS-GIDS), as most others do.
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
	// Made when first needed: most commands of the CLI start no process.
	cells  func() (*cells, error)
	thread func() (*thread, error)

	using sync.RWMutex // held by each caller that starts a process; Close waits for them

	mu     sync.Mutex // protects the following
	closed bool
	inside *thread // nil until the first process is started
}

// cells is where processes are put: user ids and cgroups.
type cells struct {
	uids   *uids     // nil without root
	groups hierarchy // nil: unlimited
	files  watcher   // that are charged to groups
}

// New makes a jail. Check, or the first Start, finds out whether its walls can
// be built.
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

// errNotRoot says which walls need root.
var errNotRoot = errors.New("only root can give processes user ids, namespaces and limits of their own: " +
	"run as root, or accept sandboxes with nothing but a system call filter around them (--allow-unjailed)")

var errClosed = errors.New("the jail is closed")

// openCells opens the user ids and cgroups. It also frees cells of processes
// that ended without a parent.
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
	_ = c.sweep() // a cell that resists blocks no other, and Sweep reports the error
	return c, nil
}

// openThread builds the walls that all processes share.
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

// Close frees the jail; its processes continue.
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

// Sweep frees the cells of processes that ended without a parent.
func (j *Jail) Sweep() error {
	if os.Geteuid() != 0 {
		return nil // unjailed processes have no cells
	}
	c, err := j.cells()
	if err != nil {
		return err
	}
	return c.sweep()
}

func (a *cells) sweep() error { return a.uids.sweep(a.removeGroup) }

// groupName is the name of the cgroup for a user id. Processes of both kinds use
// it, because they share the user ids.
func groupName(uid int) string { return "vm-" + strconv.Itoa(uid) }

// removeGroup removes the group of a process that has unlocked its user id. It
// waits a little, because an ending process unlocks the id before it leaves its
// group.
func (a *cells) removeGroup(uid int) error {
	if a.groups == nil {
		return nil
	}
	return removePatiently(a.groups, groupName(uid))
}
