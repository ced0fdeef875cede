package agent

import (
	"os"
	"os/signal"
	"strconv"
	"sync"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// Config configures a Processes. The zero value is usable.
type Config struct {
	// Log receives messages that no caller would get otherwise. It is a plain
	// function because log/slog formats with fmt and reflection. nil discards them.
	Log func(msg string)

	MaxProcesses int // execs running at once; default 512
	OutputLimit  int // bytes kept per stream; default 256 KiB
	KeepEnded    int // ended execs remembered; default 64, negative for none

	// Env is the base environment of every exec, under ExecSpec.Env.
	Env []string

	// Orphans makes the reaper take every child of this OS process, even children
	// that it did not start. PID 1 and a child subreaper must set it. It takes the
	// exit status away from other code that waits for a child, such as os/exec.
	// Without it only the execs started here are waited for, so that several
	// Processes and os/exec can live in one program.
	Orphans bool

	Accounts Accounts // where users and groups are read

	// ClockJumps says that the monotonic clock counts the time in which the sandbox
	// stood still or did not exist. Timeouts must not count that time.
	ClockJumps bool
}

const (
	defaultMaxProcesses = 512
	defaultOutputLimit  = 256 << 10
	defaultKeepEnded    = 64
	// DefaultPath is the PATH of an exec whose environment has none.
	DefaultPath = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
)

// Processes starts, remembers and reaps execs.
type Processes struct {
	cfg   Config
	sink  sink
	chld  chan os.Signal
	close chan struct{} // closed by Close
	gone  chan struct{} // closed when the reaper has returned

	// birth is held for reading from the fork of a child until the child is
	// registered, and for writing while children are waited for. So a child that dies
	// at once is not mistaken for an orphan.
	birth sync.RWMutex

	mu        sync.Mutex // protects all following fields
	env       []string
	envSet    uint64              // how often env was replaced
	byID      map[string]*Process // nil value: being started
	byPID     map[int]*Process    // running
	starting  int
	ended     []string // ids in the order of their end
	nextID    uint64
	down      bool
	childless []chan struct{} // closed when this process has no children; see awaitChildless
}

// NewProcesses starts the reaper.
func NewProcesses(cfg Config) *Processes {
	if cfg.MaxProcesses <= 0 {
		cfg.MaxProcesses = defaultMaxProcesses
	}
	if cfg.OutputLimit <= 0 {
		cfg.OutputLimit = defaultOutputLimit
	}
	if cfg.KeepEnded == 0 {
		cfg.KeepEnded = defaultKeepEnded
	}
	ps := &Processes{
		cfg:   cfg,
		env:   cfg.Env,
		chld:  make(chan os.Signal, 1),
		close: make(chan struct{}),
		gone:  make(chan struct{}),
		byID:  make(map[string]*Process),
		byPID: make(map[int]*Process),
	}
	signal.Notify(ps.chld, syscall.SIGCHLD)
	go ps.reaper()
	return ps
}

// Close kills the running execs, and stops the reaper once they have ended. It is for
// tests and for an agent that is not PID 1. PID 1 uses Shutdown.
func (ps *Processes) Close() {
	ps.refuse()
	for _, p := range ps.running() {
		_ = p.Signal(syscall.SIGKILL, ScopeSession) // ErrEnded: it has ended
		<-p.Done()
	}
	signal.Stop(ps.chld)
	close(ps.close)
	<-ps.gone
}

// refuse makes every later Start fail.
func (ps *Processes) refuse() {
	ps.mu.Lock()
	ps.down = true
	ps.mu.Unlock()
	// After this, every Start that was forking has registered its child.
	ps.birth.Lock()
	ps.birth.Unlock() //nolint:staticcheck // only waits
}

func (ps *Processes) log(msg string) {
	if ps.cfg.Log != nil {
		ps.cfg.Log(msg)
	}
}

// SetEnv replaces the base environment of the execs started from now on. A fork gets
// its own environment through it.
func (ps *Processes) SetEnv(env []string) error {
	if err := checkEnv(env); err != nil {
		return err
	}
	kept := append([]string(nil), env...)
	ps.mu.Lock()
	ps.env = kept
	ps.envSet++
	ps.mu.Unlock()
	return nil
}

// Get finds an exec that runs or is still remembered.
func (ps *Processes) Get(id string) (*Process, error) {
	ps.mu.Lock()
	p := ps.byID[id]
	ps.mu.Unlock()
	if p == nil {
		return nil, fail(ErrNotFound, "find exec", id, "it was never started, or it ended and is no longer remembered")
	}
	return p, nil
}

// List returns the execs that run or are still remembered, in no order.
func (ps *Processes) List() []*Process {
	ps.mu.Lock()
	defer ps.mu.Unlock()
	list := make([]*Process, 0, len(ps.byID))
	for _, p := range ps.byID {
		if p != nil {
			list = append(list, p)
		}
	}
	return list
}

// running returns all processes that were not reaped, including interpreters.
func (ps *Processes) running() []*Process {
	ps.mu.Lock()
	defer ps.mu.Unlock()
	list := make([]*Process, 0, len(ps.byPID))
	for _, p := range ps.byPID {
		list = append(list, p)
	}
	return list
}

// Forget frees an ended exec and its output ahead of time.
func (ps *Processes) Forget(id string) error {
	p, err := ps.Get(id)
	if err != nil {
		return err
	}
	if _, ended := p.Exit(); !ended {
		return fail(ErrBusy, "forget exec", id, "it is running")
	}
	ps.mu.Lock()
	defer ps.mu.Unlock()
	if ps.byID[id] == p {
		delete(ps.byID, id)
		for i, have := range ps.ended {
			if have == id {
				ps.ended = append(ps.ended[:i], ps.ended[i+1:]...)
				break
			}
		}
	}
	return nil
}

// Start runs a program. Without an attached reader the program never blocks on its
// output, and only the last Config.OutputLimit bytes are kept. The errors are
// ErrNotFound, ErrPermission, ErrIsDirectory, ErrNotExecutable, ErrBadInterpreter,
// ErrBadUser, ErrBadDir, ErrTooMany, ErrTooLarge, ErrDuplicateID, ErrInvalid and
// ErrShuttingDown.
func (ps *Processes) Start(spec ExecSpec) (*Process, error) {
	return ps.startWith(spec, nil)
}

// StartAttached is Start with a reader attached to each output before the first byte.
// So nothing is lost, however much the program writes at once. The caller must close
// the readers.
func (ps *Processes) StartAttached(spec ExecSpec) (*Process, Readers, error) {
	var r Readers
	p, err := ps.startWith(spec, func(p *Process) (err error) {
		r, err = p.Attach(0, 0)
		return err
	})
	if err != nil {
		return nil, Readers{}, err
	}
	return p, r, nil
}

// startWith calls prepare, unless it is nil, before the program runs. If the program
// cannot run, the readers that prepare attached are dropped with the process.
func (ps *Processes) startWith(spec ExecSpec, prepare func(*Process) error) (*Process, error) {
	if err := checkSpec(&spec); err != nil {
		return nil, err
	}
	base, err := ps.reserve(&spec)
	if err != nil {
		return nil, err
	}
	p, err := ps.start(spec, base, prepare)
	ps.mu.Lock()
	ps.starting--
	if err != nil {
		delete(ps.byID, spec.ID)
	}
	ps.mu.Unlock()
	return p, err
}

// reserve takes the id and a place among the running execs, and returns the base
// environment.
func (ps *Processes) reserve(spec *ExecSpec) ([]string, error) {
	ps.mu.Lock()
	defer ps.mu.Unlock()
	if ps.down {
		return nil, fail(ErrShuttingDown, "start", spec.Argv[0], "")
	}
	if n := len(ps.byPID) + ps.starting; n >= ps.cfg.MaxProcesses {
		return nil, fail(ErrTooMany, "start", spec.Argv[0], strconv.Itoa(n)+" execs are running, which is the limit")
	}
	for spec.ID == "" {
		ps.nextID++
		id := "exec-" + strconv.FormatUint(ps.nextID, 10)
		if _, taken := ps.byID[id]; !taken {
			spec.ID = id
		}
	}
	if _, taken := ps.byID[spec.ID]; taken {
		return nil, fail(ErrDuplicateID, "start exec", spec.ID, "an exec of this id runs or is still remembered")
	}
	ps.byID[spec.ID] = nil
	ps.starting++
	return ps.env, nil
}

func (ps *Processes) start(spec ExecSpec, base []string, prepare func(*Process) error) (*Process, error) {
	id, err := ps.cfg.Accounts.Lookup(spec.User)
	if err != nil {
		return nil, err
	}
	env, path := buildEnv(&spec, base, &id)
	dir, program, err := resolve(&spec, &id, path)
	if err != nil {
		return nil, err
	}
	p := &Process{id: spec.ID, spec: spec, done: make(chan struct{}), clockJumps: ps.cfg.ClockJumps}
	p.spec.Env = nil // it may hold secrets, and is no longer needed
	s := stdio{limit: ps.cfg.OutputLimit, sink: &ps.sink}
	defer s.closeChild()
	if err := s.open(p, &id); err != nil {
		s.closeParent()
		return nil, err
	}
	// This happens before the fork and not just before the pumps start, because the
	// reaper takes output as well when the program ends at once.
	if prepare != nil {
		if err := prepare(p); err != nil {
			s.closeParent()
			return nil, err
		}
	}
	attr := &syscall.ProcAttr{
		Dir:   dir,
		Env:   env,
		Files: []uintptr{uintptr(s.child[0]), uintptr(s.child[1]), uintptr(s.child[2])},
		Sys: &syscall.SysProcAttr{
			Setsid:     true,
			Setctty:    spec.TTY, // Ctty 0: descriptor 0 of the child
			Credential: &syscall.Credential{Uid: id.UID, Gid: id.GID, Groups: id.Groups},
		},
	}
	if err := ps.fork(p, program, attr); err != nil {
		s.closeParent()
		return nil, startError(program, dir, err)
	}
	go p.stdout.pump()
	if p.stderr != nil {
		go p.stderr.pump()
	}
	p.arm()
	return p, nil
}

// fork starts the program and registers it before the reaper may look.
func (ps *Processes) fork(p *Process, program string, attr *syscall.ProcAttr) error {
	ps.birth.RLock()
	defer ps.birth.RUnlock()
	ps.mu.Lock()
	down := ps.down
	ps.mu.Unlock()
	if down {
		return fail(ErrShuttingDown, "start", program, "")
	}
	p.started = time.Now()
	pid, err := syscall.ForkExec(program, p.spec.Argv, attr)
	if err != nil {
		return err
	}
	p.pid = pid
	ps.mu.Lock()
	ps.byPID[pid] = p
	if p.id != "" { // an interpreter is not an exec
		ps.byID[p.id] = p
	}
	ps.mu.Unlock()
	return nil
}

// stdio makes the three standard streams of one exec.
type stdio struct {
	limit  int
	sink   *sink
	child  [3]int // descriptors for the child
	opened int    // how many of child are open
	parent []*os.File
}

func (s *stdio) open(p *Process, id *Identity) (err error) {
	if p.spec.TTY {
		master, slave, err := openTerminal(p.spec.Rows, p.spec.Cols, id)
		if err != nil {
			return err
		}
		s.parent = append(s.parent, master)
		s.child, s.opened = [3]int{slave, slave, slave}, 1
		p.master = master
		if p.stdout, err = newOutput(master, s.limit, true, s.sink); err != nil {
			return err
		}
		p.stdin, err = newInput(master, true)
		return err
	}
	in, err := s.pipe(0, id)
	if err != nil {
		return err
	}
	if !p.spec.Stdin {
		_ = in.Close() // the child's end reads as empty; needs no /dev/null
	} else if p.stdin, err = newInput(in, false); err != nil {
		return err
	}
	if p.stdout, err = s.output(1, id); err != nil {
		return err
	}
	p.stderr, err = s.output(2, id)
	return err
}

func (s *stdio) output(child int, id *Identity) (*Output, error) {
	f, err := s.pipe(child, id)
	if err != nil {
		return nil, err
	}
	return newOutput(f, s.limit, false, s.sink)
}

// pipe makes the pipe of one standard stream: the child's end blocks, ours does
// not. The pipe belongs to the user, who could not open /dev/stdout otherwise.
func (s *stdio) pipe(child int, id *Identity) (*os.File, error) {
	ours, theirs, err := s.makePipe(child == 0, id)
	if err == nil {
		s.child[child] = theirs
		s.opened++
	}
	return ours, err
}

func (s *stdio) makePipe(toChild bool, id *Identity) (*os.File, int, error) {
	var fd [2]int
	if err := unix.Pipe2(fd[:], unix.O_CLOEXEC); err != nil {
		return nil, -1, failed("make a pipe", "", err)
	}
	ours, theirs := fd[0], fd[1]
	if toChild {
		ours, theirs = fd[1], fd[0]
	}
	err := unix.SetNonblock(ours, true)
	if err == nil && !id.root() {
		err = unix.Fchown(theirs, int(id.UID), int(id.GID))
	}
	if err != nil {
		unix.Close(ours)
		unix.Close(theirs)
		return nil, -1, failed("prepare a pipe", "", err)
	}
	f := os.NewFile(uintptr(ours), "pipe")
	s.parent = append(s.parent, f)
	return f, theirs, nil
}

func (s *stdio) closeChild() {
	for _, fd := range s.child[:s.opened] {
		unix.Close(fd)
	}
}

func (s *stdio) closeParent() {
	for _, f := range s.parent {
		_ = f.Close() // nothing was written to it
	}
}
