package agent

import (
	"errors"
	"os"
	"sync"
	"syscall"
	"time"
)

// ExecSpec describes an exec.
type ExecSpec struct {
	ID       string   // chosen by the caller; "" lets the agent choose one
	Argv     []string // Argv[0] is looked up in PATH of the resulting environment
	Env      []string // NAME=value, over the base environment
	CleanEnv bool     // leave the base environment out
	Workdir  string   // absolute; "" is the user's home, or / if there is none
	User     string   // name, uid, name:group, uid:gid; "" is root
	TTY      bool     // run in a terminal; its output is the Stdout log
	Rows     uint16   // of the terminal; 0 is 24
	Cols     uint16   // of the terminal; 0 is 80
	Stdin    bool     // keep standard input open for writing; a TTY always is
	Timeout  time.Duration
}

// Exit is how a process ended.
type Exit struct {
	Code     int            // exit code, or 128+signal as a shell would say it
	Signal   syscall.Signal // 0 unless a signal ended it
	Core     bool
	TimedOut bool // killed because ExecSpec.Timeout had passed
	User     time.Duration
	System   time.Duration
	MaxRSS   int64 // bytes; never less than the agent's own, whose memory the child shared until its exec
	Wall     time.Duration
	Stdout   OutputStats
	Stderr   OutputStats
}

// Scope says which processes a signal reaches.
type Scope uint8

// The scopes of Signal.
const (
	ScopeProcess Scope = iota // the started process
	ScopeGroup                // its process group
	ScopeSession              // every process of its session
)

// Process is one exec. It stays valid after it has ended and been forgotten.
type Process struct {
	id      string
	spec    ExecSpec
	pid     int
	started time.Time
	stdout  *Output // nil for an interpreter
	stderr  *Output // nil with a terminal, and for an interpreter
	stdin   *input  // nil when standard input is closed
	master  *os.File
	done    chan struct{}
	// clockJumps is Config.ClockJumps.
	clockJumps bool

	mu       sync.Mutex // protects all following fields
	reaped   bool       // the pid may belong to another process
	timedOut bool
	timer    *countdown
	exit     Exit // without the output's counters
}

// ID is the exec's name.
func (p *Process) ID() string { return p.id }

// PID is the process id, which is also its process group and session id.
func (p *Process) PID() int { return p.pid }

// Spec is the spec that the exec was started with.
func (p *Process) Spec() ExecSpec { return p.spec }

// Started is when the program was started.
func (p *Process) Started() time.Time { return p.started }

// Stdout is everything that it wrote to standard output or to its terminal.
func (p *Process) Stdout() *Output { return p.stdout }

// Stderr is everything that it wrote to standard error; nil with a terminal.
func (p *Process) Stderr() *Output { return p.stderr }

// Readers holds one reader on each output of a process.
type Readers struct {
	Stdout *Reader
	Stderr *Reader // nil with a terminal
}

// Close detaches both.
func (r Readers) Close() {
	r.Stdout.Close()
	if r.Stderr != nil {
		r.Stderr.Close()
	}
}

// Attach attaches a reader to each output; see Output.Attach.
func (p *Process) Attach(stdoutFrom, stderrFrom int64) (Readers, error) {
	stdout, err := p.stdout.Attach(stdoutFrom)
	if err != nil {
		return Readers{}, err
	}
	r := Readers{Stdout: stdout}
	if p.stderr != nil {
		if r.Stderr, err = p.stderr.Attach(stderrFrom); err != nil {
			stdout.Close()
			return Readers{}, err
		}
	}
	return r, nil
}

// Done closes when the process has ended. Without an attached reader the output is
// complete by then. An attached reader goes on until io.EOF.
func (p *Process) Done() <-chan struct{} { return p.done }

// Exit is how the process ended; false while it runs. The counters of its output are
// final once their EOF is true.
func (p *Process) Exit() (Exit, bool) {
	select {
	case <-p.done:
	default:
		return Exit{}, false
	}
	p.mu.Lock()
	e := p.exit
	p.mu.Unlock()
	if p.stdout != nil {
		e.Stdout = p.stdout.Stats()
	}
	if p.stderr != nil {
		e.Stderr = p.stderr.Stats()
	} else {
		e.Stderr.EOF = true
	}
	return e, true
}

// WriteStdin writes all of b, and waits until the process makes room or stop closes
// (ErrStopped). It fails with ErrEnded after the process has ended. It fails with
// ErrClosed after CloseStdin, or once the process has closed its end, which it also
// does while it is dying. The count is valid in each case.
func (p *Process) WriteStdin(stop <-chan struct{}, b []byte) (int, error) {
	if p.stdin == nil {
		return 0, fail(ErrClosed, "write stdin of exec", p.id, "it was started with closed stdin")
	}
	n, err := p.stdin.write(stop, p.done, b)
	return n, p.stdinErr("write stdin of exec", err)
}

// CloseStdin ends standard input. In a terminal it sends Ctrl-D.
func (p *Process) CloseStdin() error {
	if p.stdin == nil {
		return nil
	}
	return p.stdinErr("close stdin of exec", p.stdin.close())
}

func (p *Process) stdinErr(op string, err error) error {
	var own *Error
	var kind Kind
	if errors.As(err, &own) || !errors.As(err, &kind) {
		return err // nil, or an error that names its thing already
	}
	if kind == ErrClosed {
		p.mu.Lock()
		if p.reaped {
			kind = ErrEnded
		}
		p.mu.Unlock()
	}
	return &Error{Kind: kind, Op: op, Thing: p.id}
}

// Resize changes the size of the terminal.
func (p *Process) Resize(rows, cols uint16) error {
	if p.master == nil {
		return fail(ErrInvalid, "resize exec", p.id, "it has no terminal")
	}
	raw, err := p.master.SyscallConn()
	if err == nil {
		var ioctlErr error
		if err = raw.Control(func(fd uintptr) { ioctlErr = setSize(int(fd), rows, cols) }); err == nil {
			return ioctlErr
		}
	}
	return &Error{Kind: ErrEnded, Op: "resize exec", Thing: p.id}
}

// Signal sends sig. ErrEnded says that no process was left to receive it. A process
// that made a session of its own (setsid) is out of reach of every scope.
func (p *Process) Signal(sig syscall.Signal, scope Scope) error {
	if sig < 0 || sig > 64 || scope > ScopeSession {
		return fail(ErrInvalid, "signal exec", p.id, "unknown signal or scope")
	}
	// The mutex keeps the reaper from giving the pid back meanwhile.
	p.mu.Lock()
	defer p.mu.Unlock()
	var sent bool
	var err error
	switch {
	case scope == ScopeProcess && p.reaped:
	case scope == ScopeProcess:
		err = syscall.Kill(p.pid, sig)
		sent = err == nil
	case p.reaped && pidInUse(p.pid):
		// The kernel does not reuse a pid while a group or a session of that number
		// has members. Another process has the pid now, so ours are gone.
	case scope == ScopeGroup:
		err = syscall.Kill(-p.pid, sig)
		sent = err == nil
	default:
		sent = signalSession(p.pid, sig)
	}
	if err != nil && err != syscall.ESRCH {
		return failed("signal exec", p.id, err)
	}
	if !sent {
		return &Error{Kind: ErrEnded, Op: "signal exec", Thing: p.id}
	}
	return nil
}

// arm starts the timeout, unless the process has ended already.
func (p *Process) arm() {
	if p.spec.Timeout <= 0 {
		return
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	if !p.reaped {
		p.timer = startCountdown(p.spec.Timeout, p.clockJumps, p.expire)
	}
}

func (p *Process) expire() {
	p.mu.Lock()
	p.timedOut = !p.reaped
	p.mu.Unlock()
	_ = p.Signal(syscall.SIGKILL, ScopeSession) // ErrEnded: it has ended
}

// reap takes the status of the process, if it has ended.
func (p *Process) reap() bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	var ws syscall.WaitStatus
	var ru syscall.Rusage
	pid, err := wait4(p.pid, &ws, &ru)
	if err == nil && pid == 0 {
		return false
	}
	p.reaped = true
	p.exit = Exit{Wall: time.Since(p.started)}
	if p.timer != nil {
		p.timer.stop()
		p.timer = nil
	}
	if err != nil {
		// Other code in this process has taken the status; it is lost.
		p.exit.Code = -1
		return true
	}
	p.exit.User, p.exit.System = time.Duration(ru.Utime.Nano()), time.Duration(ru.Stime.Nano())
	p.exit.MaxRSS = ru.Maxrss << 10 // getrusage(2): in kilobytes
	if ws.Signaled() {
		p.exit.Signal, p.exit.Core = ws.Signal(), ws.CoreDump()
		p.exit.Code = 128 + int(p.exit.Signal)
		p.exit.TimedOut = p.timedOut && p.exit.Signal == syscall.SIGKILL
	} else {
		p.exit.Code = ws.ExitStatus()
	}
	return true
}

// finish closes the process's files and announces its end.
func (p *Process) finish() {
	if p.stdin != nil && p.master == nil {
		_ = p.stdin.file.Close() // fails if CloseStdin was faster
	}
	if p.stdout != nil {
		p.stdout.ended()
	}
	if p.stderr != nil {
		p.stderr.ended()
	}
	close(p.done)
}
