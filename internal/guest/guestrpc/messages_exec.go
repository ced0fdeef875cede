package guestrpc

import "time"

// ExecRequest starts a process. It keeps running when the connection is lost
// or the session is closed; Attach finds it again by its id.
type ExecRequest struct {
	ID         string   // empty: the agent picks one
	Argv       []string // Argv[0] is looked up in the PATH of the environment
	Env        []string // "NAME=value", over the base environment
	CleanEnv   bool     // leave the base environment out
	Workdir    string   // absolute; empty: the user's home
	User       string   // "name", "uid", "name:group" or "uid:gid"; empty: root
	TTY        bool     // stdin, stdout and stderr are one terminal; output comes as stdout
	Rows, Cols uint16
	Timeout    time.Duration // 0: no timeout; otherwise the whole session of the process is killed after it
	Stdin      bool          // stdin is open; otherwise it reads as empty
}

func (m *ExecRequest) visit(c *visitor) {
	c.str("id", &m.ID, maxID)
	c.strs("argv", &m.Argv, maxArgs, maxArg)
	c.strs("env", &m.Env, maxArgs, maxArg)
	c.bool(&m.CleanEnv)
	c.str("cwd", &m.Workdir, maxPath)
	c.str("user", &m.User, maxUser)
	c.bool(&m.TTY)
	number(c, "rows", &m.Rows, 1<<16-1)
	number(c, "cols", &m.Cols, 1<<16-1)
	c.dur(&m.Timeout)
	c.bool(&m.Stdin)
}

// AttachRequest joins a process, running or ended, that has not been released.
type AttachRequest struct {
	ID           string
	StdoutOffset int64 // byte of the output to begin at; negative: only new output
	StderrOffset int64
}

func (m *AttachRequest) visit(c *visitor) {
	c.str("id", &m.ID, maxID)
	c.i64(&m.StdoutOffset)
	c.i64(&m.StderrOffset)
}

// OutputStart says where an output stream begins. The agent keeps only the last part
// of each output. Dropped counts the bytes between the requested offset and Offset
// that were no longer kept.
type OutputStart struct {
	Offset  int64
	Dropped int64
}

func (m *OutputStart) visit(c *visitor) {
	c.i64(&m.Offset)
	c.i64(&m.Dropped)
}

// ExecStarted is the first answer to Exec and Attach.
type ExecStarted struct {
	ID             string
	PID            int32
	Stdout, Stderr OutputStart
}

func (m *ExecStarted) visit(c *visitor) {
	c.str("id", &m.ID, maxID)
	number(c, "pid", &m.PID, 1<<31-1)
	c.nested(&m.Stdout)
	c.nested(&m.Stderr)
}

// OutputTotal counts the bytes that a process wrote, and how many of them the agent
// had to drop before they were read.
type OutputTotal struct {
	Bytes   int64
	Dropped int64
}

func (m *OutputTotal) visit(c *visitor) {
	c.i64(&m.Bytes)
	c.i64(&m.Dropped)
}

// ExitStatus is how a process ended.
type ExitStatus struct {
	Code           int32 // exit code, or 128+Signal as a shell would say it; -1 if unknown
	Signal         int32 // 0 if it exited by itself
	Core           bool
	TimedOut       bool // killed because of ExecRequest.Timeout
	Stdout, Stderr OutputTotal
	Wall           time.Duration
	UserTime       time.Duration
	SystemTime     time.Duration
	MaxRSS         int64 // bytes
}

func (m *ExitStatus) visit(c *visitor) {
	c.i32("exit code", &m.Code)
	number(c, "signal", &m.Signal, 255)
	c.bool(&m.Core)
	c.bool(&m.TimedOut)
	c.nested(&m.Stdout)
	c.nested(&m.Stderr)
	c.dur(&m.Wall)
	c.dur(&m.UserTime)
	c.dur(&m.SystemTime)
	c.i64(&m.MaxRSS)
}

// ExecInfo describes a process that was started with Exec.
type ExecInfo struct {
	ID      string
	PID     int32
	Argv    []string // cut to 4 KiB
	User    string
	Workdir string
	TTY     bool
	Started time.Time
	Running bool
	Exit    ExitStatus // if not Running
}

func (m *ExecInfo) visit(c *visitor) {
	c.str("id", &m.ID, maxID)
	number(c, "pid", &m.PID, 1<<31-1)
	c.strs("argv", &m.Argv, maxArgs, maxPath)
	c.str("user", &m.User, maxUser)
	c.str("cwd", &m.Workdir, maxPath)
	c.bool(&m.TTY)
	c.time(&m.Started)
	c.bool(&m.Running)
	c.nested(&m.Exit)
}

// ListExecsRequest asks for the processes whose ids sort after After.
type ListExecsRequest struct {
	After string
}

func (m *ListExecsRequest) visit(c *visitor) { c.str("after", &m.After, maxID) }

// ListExecsReply holds as many processes as fit, sorted by id.
type ListExecsReply struct {
	Execs []ExecInfo
	More  bool // ask again, after the last id
}

func (m *ListExecsReply) visit(c *visitor) {
	list(c, "execs", &m.Execs, maxListItems)
	c.bool(&m.More)
}

// SignalScope says which processes get a signal.
type SignalScope uint8

// The scopes.
const (
	ScopeProcess SignalScope = 0 // the process alone
	ScopeGroup   SignalScope = 1 // its process group
	ScopeSession SignalScope = 2 // every process in its session
)

// SignalRequest sends a signal to a process started with Exec.
type SignalRequest struct {
	ID     string
	Signal int32
	Scope  SignalScope
}

func (m *SignalRequest) visit(c *visitor) {
	c.str("id", &m.ID, maxID)
	number(c, "signal", &m.Signal, 64)
	number(c, "scope", &m.Scope, uint64(ScopeSession))
}

// ResizeRequest sets the size of a process's terminal.
type ResizeRequest struct {
	ID         string
	Rows, Cols uint16
}

func (m *ResizeRequest) visit(c *visitor) {
	c.str("id", &m.ID, maxID)
	number(c, "rows", &m.Rows, 1<<16-1)
	number(c, "cols", &m.Cols, 1<<16-1)
}

// MaxStdin is the size of one WriteStdinRequest's data.
const MaxStdin = 32 << 10

// WriteStdinRequest writes to the stdin of a process without attaching to it. The
// answer comes once the process's pipe or terminal has taken all bytes.
type WriteStdinRequest struct {
	ID   string
	Data []byte
	EOF  bool // close stdin afterwards; a terminal gets Ctrl-D
}

func (m *WriteStdinRequest) visit(c *visitor) {
	c.str("id", &m.ID, maxID)
	c.data("data", &m.Data, MaxStdin)
	c.bool(&m.EOF)
}

// ReleaseExecRequest forgets a process that has ended, and its output.
type ReleaseExecRequest struct {
	ID string
}

func (m *ReleaseExecRequest) visit(c *visitor) { c.str("id", &m.ID, maxID) }
