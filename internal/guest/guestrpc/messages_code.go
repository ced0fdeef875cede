package guestrpc

import "time"

// Limits of code.
const (
	MaxCode      = 16 << 20 // of a source
	MaxCodeEvent = 4 << 20  // of the data of an event

	maxCodeInline = 32 << 10 // of a source in a request; a longer source follows the request
	maxLanguage   = 32
	maxMIME       = 256
	maxCodeItems  = 32
	maxReason     = 1 << 10
	maxContexts   = 64 // more than an agent keeps
)

// SetEnvRequest replaces the base environment of every exec and interpreter. An
// interpreter that already runs gets the changes before its next execution.
// Formatting the request never shows a value.
type SetEnvRequest struct {
	Env []string // "NAME=value"
}

func (m *SetEnvRequest) visit(c *visitor) { c.strs("env", &m.Env, maxArgs, maxArg) }

// String shows no values, since they may be secrets.
func (m SetEnvRequest) String() string { return "SetEnvRequest{…}" }

// GoString is what %#v prints.
func (m SetEnvRequest) GoString() string { return m.String() }

// CodeMode is the kind of a source.
type CodeMode uint8

// The modes.
const (
	ModeCode CodeMode = 0 // in the context's language
	ModeText CodeMode = 1 // in the context's language or a command; the agent decides (docs/design/code.md)
)

// CodeRunRequest runs a source in a context, after the sources that were sent there
// before. The execution goes on when the connection is lost; CodeAttach finds it
// again.
type CodeRunRequest struct {
	ID       string // empty: the agent picks one
	Context  string // empty: the default context of Language
	Language string // "python", "bash" or "node"; empty: the context's language, or python
	Mode     CodeMode
	Source   string        // Client.RunCode takes up to MaxCode
	More     bool          // the rest of the source follows
	Env      []string      // of this execution only; Python only
	Timeout  time.Duration // counted from the start of its turn, 0: no timeout; then it is interrupted, and killed a little later
}

func (m *CodeRunRequest) visit(c *visitor) {
	c.str("id", &m.ID, maxID)
	c.str("context", &m.Context, maxID)
	c.str("language", &m.Language, maxLanguage)
	number(c, "mode", &m.Mode, uint64(ModeText))
	c.str("source", &m.Source, maxCodeInline)
	c.bool(&m.More)
	c.strs("env", &m.Env, maxArgs, maxArg)
	c.dur(&m.Timeout)
}

// CodeAttachRequest joins an execution that has not been released.
type CodeAttachRequest struct {
	ID           string
	StdoutOffset int64 // byte of the output to begin at; negative: only new output
	StderrOffset int64
	Event        int64 // sequence number of the first event; negative: only new events
}

func (m *CodeAttachRequest) visit(c *visitor) {
	c.str("id", &m.ID, maxID)
	c.i64(&m.StdoutOffset)
	c.i64(&m.StderrOffset)
	c.i64(&m.Event)
}

// CodeStarted is the first answer to CodeRun and CodeAttach.
type CodeStarted struct {
	ID             string
	Context        string
	Stdout, Stderr OutputStart
	Events         OutputStart // counted in events
}

func (m *CodeStarted) visit(c *visitor) {
	c.str("id", &m.ID, maxID)
	c.str("context", &m.Context, maxID)
	c.nested(&m.Stdout)
	c.nested(&m.Stderr)
	c.nested(&m.Events)
}

// CodeState is the way in which an execution ended.
type CodeState uint8

// The states.
const (
	CodeOK          CodeState = 0
	CodeRaised      CodeState = 1 // an exception; an event describes it
	CodeInterrupted CodeState = 2
	CodeExited      CodeState = 3 // by sys.exit or its like; the interpreter lives
	CodeDied        CodeState = 4 // its interpreter died; Reason says why
	CodeCancelled   CodeState = 5 // before it ran
)

// CodeStatus is how an execution ended.
type CodeStatus struct {
	State          CodeState
	Code           int32 // exit code, as of a process
	TimedOut       bool
	Fresh          bool   // a new interpreter was started for this execution
	FreshReason    string // how the previous interpreter ended; empty if there was no previous one
	Reason         string // of CodeDied
	Language       string // the language in which the source ran: the context's, or "shell" for a command
	Count          uint64 // of executions in this interpreter
	Stdout, Stderr OutputTotal
	Events         OutputTotal // counted in events
	Wall           time.Duration
}

func (m *CodeStatus) visit(c *visitor) {
	number(c, "state", &m.State, uint64(CodeCancelled))
	c.i32("exit code", &m.Code)
	c.bool(&m.TimedOut)
	c.bool(&m.Fresh)
	c.str("fresh reason", &m.FreshReason, maxReason)
	c.str("reason", &m.Reason, maxReason)
	c.str("language", &m.Language, maxLanguage)
	c.u64(&m.Count)
	c.nested(&m.Stdout)
	c.nested(&m.Stderr)
	c.nested(&m.Events)
	c.dur(&m.Wall)
}

// CodeEventKind is the kind of an event.
type CodeEventKind uint8

// The kinds of events.
const (
	CodeEventBegun   CodeEventKind = 1 // its turn has come; see CodeBegun
	CodeEventResult  CodeEventKind = 2 // the value of the last expression; see CodeResult
	CodeEventDisplay CodeEventKind = 3 // a displayed value; see CodeResult
	CodeEventError   CodeEventKind = 4 // an exception; see CodeError
)

// CodeEvent is an event of an execution beside its output.
type CodeEvent struct {
	Seq    uint64
	Kind   CodeEventKind
	Stdout int64  // bytes of stdout before it
	Stderr int64  // bytes of stderr before it
	Data   []byte // comes from the interpreter; the agent does not read it
}

func (m *CodeEvent) visit(c *visitor) {
	c.u64(&m.Seq)
	number(c, "kind", &m.Kind, 255)
	c.i64(&m.Stdout)
	c.i64(&m.Stderr)
	c.data("data", &m.Data, MaxCodeEvent)
}

// CodeBegun is the data of CodeEventBegun.
type CodeBegun struct {
	Fresh  bool   // a new interpreter was started for this execution
	Reason string // how the previous interpreter ended
	PID    int32  // of the interpreter
}

func (m *CodeBegun) visit(c *visitor) {
	c.bool(&m.Fresh)
	c.str("reason", &m.Reason, maxReason)
	number(c, "pid", &m.PID, 1<<31-1)
}

// Bytes is the data of an event.
func (m *CodeBegun) Bytes() ([]byte, error) { return marshal(nil, m) }

// CodeItem is one form of a value.
type CodeItem struct {
	MIME string
	Data []byte // text in UTF-8, images in their own format
}

// CodeResult is the data of CodeEventResult and CodeEventDisplay.
type CodeResult struct {
	Items []CodeItem // each MIME type once; text/plain is always among them
}

func (m *CodeResult) visit(c *visitor) {
	if c.d != nil {
		n := c.d.Count(maxCodeItems)
		for range n {
			item := CodeItem{MIME: c.d.String(maxMIME), Data: c.d.Data(MaxCodeEvent)}
			if c.d.Err() != nil {
				return
			}
			m.Items = append(m.Items, item)
		}
		return
	}
	if len(m.Items) > maxCodeItems {
		c.tooLong("items", len(m.Items), maxCodeItems)
		return
	}
	c.e.Uvarint(uint64(len(m.Items)))
	for i := range m.Items {
		c.str("MIME type", &m.Items[i].MIME, maxMIME)
		c.data("item", &m.Items[i].Data, MaxCodeEvent)
	}
}

// CodeError is the data of CodeEventError.
type CodeError struct {
	Name      string // "ZeroDivisionError"
	Value     string
	Traceback string
}

func (m *CodeError) visit(c *visitor) {
	c.str("name", &m.Name, maxMIME)
	c.str("value", &m.Value, MaxCodeEvent)
	c.str("traceback", &m.Traceback, MaxCodeEvent)
}

// Begun decodes the data of a CodeEventBegun.
func (m *CodeEvent) Begun() (CodeBegun, error) { return eventData[CodeBegun](m) }

// Result decodes the data of a CodeEventResult or CodeEventDisplay.
func (m *CodeEvent) Result() (CodeResult, error) { return eventData[CodeResult](m) }

// Error decodes the data of a CodeEventError.
func (m *CodeEvent) Error() (CodeError, error) { return eventData[CodeError](m) }

// eventData decodes data from an interpreter, which may be arbitrary bytes.
func eventData[T any, P request[T]](m *CodeEvent) (T, error) {
	var v T
	if err := unmarshal(m.Data, P(&v)); err != nil {
		var none T
		return none, newError(CodeInternal, "the kernel sent a malformed event: ", err.Error())
	}
	return v, nil
}

// CodeInterruptRequest interrupts the running execution of a context, as Ctrl-C does.
type CodeInterruptRequest struct {
	Context string // empty: the execution's context
	ID      string // interrupt only this execution, or cancel it if it still waits; empty: any
}

func (m *CodeInterruptRequest) visit(c *visitor) {
	c.str("context", &m.Context, maxID)
	c.str("id", &m.ID, maxID)
}

// CodeReleaseRequest forgets an execution that has ended, and its output.
type CodeReleaseRequest struct {
	ID string
}

func (m *CodeReleaseRequest) visit(c *visitor) { c.str("id", &m.ID, maxID) }

// CodeCreateRequest makes a context.
type CodeCreateRequest struct {
	ID       string   // empty: the agent picks one
	Language string   // empty: python
	Workdir  string   // absolute; empty: the user's home
	User     string   // as of ExecRequest
	Env      []string // over the base environment
	Start    bool     // start its interpreter now instead of with the first execution
}

func (m *CodeCreateRequest) visit(c *visitor) {
	c.str("id", &m.ID, maxID)
	c.str("language", &m.Language, maxLanguage)
	c.str("cwd", &m.Workdir, maxPath)
	c.str("user", &m.User, maxUser)
	c.strs("env", &m.Env, maxArgs, maxArg)
	c.bool(&m.Start)
}

// CodeContext describes a context.
type CodeContext struct {
	ID       string
	Language string
	Workdir  string
	User     string
	PID      int32  // of its interpreter; 0 if it has no running interpreter
	Version  string // of the interpreter, as the interpreter reports it
	Running  string // id of the running execution; empty if no execution runs
	Queued   uint32
}

func (m *CodeContext) visit(c *visitor) {
	c.str("id", &m.ID, maxID)
	c.str("language", &m.Language, maxLanguage)
	c.str("cwd", &m.Workdir, maxPath)
	c.str("user", &m.User, maxUser)
	number(c, "pid", &m.PID, 1<<31-1)
	c.str("version", &m.Version, maxShort)
	c.str("running", &m.Running, maxID)
	number(c, "queued", &m.Queued, 1<<32-1)
}

// CodeListReply lists the contexts, sorted by id.
type CodeListReply struct {
	Contexts []CodeContext
}

func (m *CodeListReply) visit(c *visitor) { list(c, "contexts", &m.Contexts, maxContexts) }

// CodeContextRequest names a context.
type CodeContextRequest struct {
	ID string
}

func (m *CodeContextRequest) visit(c *visitor) { c.str("id", &m.ID, maxID) }
