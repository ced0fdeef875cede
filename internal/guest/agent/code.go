package agent

import (
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"time"

	"agentrun.dev/internal/guest/guestrpc"
	"agentrun.dev/internal/guest/interpreter"
)

const (
	maxCodeContexts = 16
	maxQueued       = 64 // executions that wait in one context
	keepExecutions  = 64 // executions remembered after their end
	keepCodeBytes   = 16 << 20
	defaultContext  = "default"
)

// Interpreters runs code in interpreters that stay. The zero value, with its first
// two fields set, is ready for use and costs nothing until then.
type Interpreters struct {
	Processes  *Processes
	Generation func() uint64 // of the guest; nil: always 0

	mu         sync.Mutex // protects all following fields, and those of each codeContext
	contexts   map[string]*codeContext
	executions map[string]*execution
	ended      []*execution // oldest first
	lastID     uint64
}

// codeContext is a context: its current interpreter, and its queue of executions.
type codeContext struct {
	id      string
	lang    interpreter.Language
	user    string
	workdir string
	env     []string

	// Interpreters.mu protects all following fields.
	interpreter *interpreterProcess // may have ended; nil: never started
	running     *execution
	queue       []*execution
	working     bool   // a goroutine is running the queue
	begun       bool   // the interpreter has begun with running, and may be interrupted
	wanted      bool   // an interrupt is to be sent once begun is true
	ending      string // why the interpreter is being ended; empty if it is not
	closed      bool
}

// execution is one run of a source. The agent owns its outputs and its end.
type execution struct {
	id      string
	context *codeContext
	mode    guestrpc.CodeMode
	source  string
	env     []string
	timeout time.Duration
	warm    bool // it only starts the interpreter

	stdout *Output
	stderr *Output
	events *eventLog

	done   chan struct{}
	status guestrpc.CodeStatus // set before done is closed, as is err
	err    error               // why it could not be run
}

// codeReaders holds one reader on each output of an execution.
type codeReaders struct {
	stdout, stderr *Reader
	events         *eventReader
}

func (r codeReaders) close() {
	r.stdout.Close()
	r.stderr.Close()
	r.events.close()
}

func (ks *Interpreters) generation() uint64 {
	if ks.Generation == nil {
		return 0
	}
	return ks.Generation()
}

func newExecution(limit int, s *sink) *execution {
	out := func() *Output {
		return &Output{sink: s, room: make(chan struct{}, 1), limit: limit, left: -1}
	}
	return &execution{stdout: out(), stderr: out(), events: newEventLog(), done: make(chan struct{})}
}

func (e *execution) attach(stdoutFrom, stderrFrom, event int64) (r codeReaders, err error) {
	if r.stdout, err = e.stdout.Attach(stdoutFrom); err != nil {
		return r, err
	}
	if r.stderr, err = e.stderr.Attach(stderrFrom); err != nil {
		r.stdout.Close()
		return r, err
	}
	if r.events, err = e.events.attach(event); err != nil {
		r.stdout.Close()
		r.stderr.Close()
	}
	return r, err
}

// size is how many bytes the agent keeps of the execution.
func (e *execution) size() int { return e.stdout.size() + e.stderr.size() + e.events.bytes() }

func (o *Output) size() int {
	o.mu.Lock()
	defer o.mu.Unlock()
	return len(o.buf)
}

func validCodeID(id string) bool {
	return len(id) <= maxID && !strings.ContainsFunc(id, func(r rune) bool { return r < ' ' || r == 0x7f })
}

// start queues an execution. It returns readers that were attached to each output
// before the first byte.
func (ks *Interpreters) start(req *guestrpc.CodeRunRequest) (*execution, codeReaders, error) {
	var none codeReaders
	const op = "run code"
	if !validCodeID(req.ID) || !validCodeID(req.Context) {
		return nil, none, fail(ErrInvalid, op, "", "an id is longer than 128 bytes or holds control characters")
	}
	if err := checkEnv(req.Env); err != nil {
		return nil, none, err
	}
	if req.Timeout < 0 {
		return nil, none, fail(ErrInvalid, op, req.ID, "the timeout is negative")
	}
	e := newExecution(ks.Processes.cfg.OutputLimit, &ks.Processes.sink)
	e.id, e.mode, e.source, e.env, e.timeout = req.ID, req.Mode, req.Source, req.Env, req.Timeout
	r, err := e.attach(0, 0, 0)
	if err != nil {
		return nil, none, err
	}
	ks.mu.Lock()
	defer ks.mu.Unlock()
	c, err := ks.contextFor(req)
	if err == nil {
		err = ks.enqueue(c, e)
	}
	if err != nil {
		return nil, none, err
	}
	return e, r, nil
}

// contextFor finds the context of a request. It makes the default context of a
// language on first use.
func (ks *Interpreters) contextFor(req *guestrpc.CodeRunRequest) (*codeContext, error) {
	id := req.Context
	if id == "" {
		id = defaultContext
		if lang, ok := interpreter.Find(req.Language); ok && lang.Name != interpreter.Default {
			id += "-" + lang.Name
		}
	}
	c := ks.contexts[id]
	if c == nil {
		if req.Context != "" && req.Context != defaultContext {
			return nil, fail(ErrNotFound, "find context", id, "create it first")
		}
		var err error
		if c, err = ks.newContext(&guestrpc.CodeCreateRequest{ID: id, Language: req.Language}); err != nil {
			return nil, err
		}
	}
	switch {
	case req.Language != "" && req.Language != c.lang.Name:
		return nil, fail(ErrInvalid, "run "+req.Language+" in context", id, "its language is "+c.lang.Name)
	case c.lang.Lines && strings.IndexByte(req.Source, 0) >= 0:
		return nil, fail(ErrInvalid, "run code in context", id, "the source holds a zero byte")
	case req.Mode == guestrpc.ModeText && !c.lang.Text:
		return nil, fail(ErrInvalid, "run a text in context", id, "only a Python kernel tells commands from code; send it as code")
	case len(req.Env) > 0 && !c.lang.Env:
		return nil, fail(ErrInvalid, "run code in context", id, "only a Python kernel has an environment for one execution; give it to the context")
	}
	return c, nil
}

// newContext makes a context. The caller holds the mutex.
func (ks *Interpreters) newContext(req *guestrpc.CodeCreateRequest) (*codeContext, error) {
	const op = "create context"
	lang, ok := interpreter.Find(req.Language)
	if !ok {
		return nil, fail(ErrInvalid, op, req.ID, "no kernel for language "+strconv.Quote(req.Language)+"; there are "+interpreter.Names())
	}
	if !validCodeID(req.ID) {
		return nil, fail(ErrInvalid, op, "", "the id is longer than 128 bytes or holds control characters")
	}
	if req.Workdir != "" && (req.Workdir[0] != '/' || strings.IndexByte(req.Workdir, 0) >= 0) {
		return nil, fail(ErrBadDir, op, req.ID, "the working directory must be an absolute path")
	}
	if err := checkEnv(req.Env); err != nil {
		return nil, err
	}
	if len(ks.contexts) >= maxCodeContexts {
		return nil, fail(ErrTooMany, op, req.ID, "there are 16 contexts, which is the limit; close one")
	}
	id := req.ID
	for id == "" {
		ks.lastID++
		if name := "context-" + strconv.FormatUint(ks.lastID, 10); ks.contexts[name] == nil {
			id = name
		}
	}
	if ks.contexts[id] != nil {
		return nil, fail(ErrExists, op, id, "close it first, or use it")
	}
	c := &codeContext{id: id, lang: lang, user: req.User, workdir: req.Workdir, env: slices.Clone(req.Env)}
	if ks.contexts == nil {
		ks.contexts = make(map[string]*codeContext)
		ks.executions = make(map[string]*execution)
	}
	ks.contexts[id] = c
	return c, nil
}

// enqueue puts an execution into the queue of its context. The caller holds the
// mutex.
func (ks *Interpreters) enqueue(c *codeContext, e *execution) error {
	if len(c.queue) >= maxQueued {
		return fail(ErrTooMany, "run code in context", c.id, "64 executions wait for their turn, which is the limit")
	}
	for e.id == "" {
		ks.lastID++
		if id := "code-" + strconv.FormatUint(ks.lastID, 10); ks.executions[id] == nil {
			e.id = id
		}
	}
	if ks.executions[e.id] != nil {
		return fail(ErrDuplicateID, "run code", e.id, "an execution of this id exists")
	}
	e.context = c
	ks.executions[e.id] = e
	c.queue = append(c.queue, e)
	if !c.working {
		c.working = true
		go ks.work(c)
	}
	return nil
}

// create makes a context and, if asked to, waits until its interpreter is ready.
func (ks *Interpreters) create(stop <-chan struct{}, req *guestrpc.CodeCreateRequest) (guestrpc.CodeContext, error) {
	ks.mu.Lock()
	c, err := ks.newContext(req)
	var e *execution
	if err == nil && req.Start {
		e = newExecution(ks.Processes.cfg.OutputLimit, &ks.Processes.sink)
		e.warm = true
		err = ks.enqueue(c, e)
	}
	ks.mu.Unlock()
	if err != nil {
		return guestrpc.CodeContext{}, err
	}
	if e != nil {
		select {
		case <-e.done:
		case <-stop:
			return guestrpc.CodeContext{}, ErrStopped
		}
		if _ = ks.release(e.id); e.err != nil {
			_ = ks.close(c.id) // it would only fail again
			return guestrpc.CodeContext{}, e.err
		}
	}
	ks.mu.Lock()
	defer ks.mu.Unlock()
	return c.info(), nil
}

// info describes a context. The caller holds the mutex.
func (c *codeContext) info() guestrpc.CodeContext {
	info := guestrpc.CodeContext{ID: c.id, Language: c.lang.Name, Workdir: c.workdir, User: c.user, Queued: uint32(len(c.queue))}
	if c.interpreter.alive() {
		info.PID = int32(c.interpreter.proc.PID())
		select {
		case <-c.interpreter.ready:
			info.Version = strings.ToValidUTF8(c.interpreter.version, "?")
		default:
		}
	}
	if c.running != nil {
		info.Running = c.running.id
	}
	return info
}

func (k *interpreterProcess) alive() bool {
	if k == nil {
		return false
	}
	select {
	case <-k.proc.Done():
		return false
	default:
		return true
	}
}

func (ks *Interpreters) list() []guestrpc.CodeContext {
	ks.mu.Lock()
	defer ks.mu.Unlock()
	list := make([]guestrpc.CodeContext, 0, len(ks.contexts))
	for _, c := range ks.contexts {
		list = append(list, c.info())
	}
	slices.SortFunc(list, func(a, b guestrpc.CodeContext) int { return strings.Compare(a.ID, b.ID) })
	return list
}

func (ks *Interpreters) get(id string) (*execution, error) {
	ks.mu.Lock()
	defer ks.mu.Unlock()
	if e := ks.executions[id]; e != nil {
		return e, nil
	}
	return nil, fail(ErrNotFound, "find execution", id, "it was never started, or it ended and is no longer remembered")
}

func (ks *Interpreters) find(id string) (*codeContext, error) {
	if id == "" {
		id = defaultContext
	}
	if c := ks.contexts[id]; c != nil {
		return c, nil
	}
	return nil, fail(ErrNotFound, "find context", id, "it does not exist")
}

// interrupt interrupts an execution as Ctrl-C would.
func (ks *Interpreters) interrupt(context, id string) error {
	ks.mu.Lock()
	defer ks.mu.Unlock()
	if id != "" {
		e := ks.executions[id]
		if e == nil || context != "" && e.context.id != context {
			return fail(ErrNotFound, "interrupt execution", id, "it is not known")
		}
		c := e.context
		if i := slices.Index(c.queue, e); i >= 0 {
			c.queue = slices.Delete(c.queue, i, i+1)
			ks.cancel(e)
			return nil
		}
		if c.running != e {
			return fail(ErrEnded, "interrupt execution", id, "it has ended")
		}
		return c.interrupt()
	}
	c, err := ks.find(context)
	if err != nil {
		return err
	}
	if c.running == nil {
		return fail(ErrEnded, "interrupt context", c.id, "nothing runs there")
	}
	return c.interrupt()
}

// interrupt signals the interpreter now, or once it has begun. The caller holds the
// mutex.
func (c *codeContext) interrupt() error {
	if !c.begun {
		c.wanted = true
		return nil
	}
	return c.interpreter.proc.Signal(syscall.SIGINT, ScopeGroup)
}

// restart ends the interpreter of a context. The next execution starts another one.
func (ks *Interpreters) restart(id string) error {
	ks.mu.Lock()
	c, err := ks.find(id)
	if err != nil {
		ks.mu.Unlock()
		return err
	}
	k := c.interpreter
	if k.alive() {
		c.ending = "the kernel was restarted on request"
	}
	ks.mu.Unlock()
	k.end()
	return nil
}

// close ends a context. Executions that still wait are cancelled.
func (ks *Interpreters) close(id string) error {
	ks.mu.Lock()
	c, err := ks.find(id)
	if err != nil {
		ks.mu.Unlock()
		return err
	}
	delete(ks.contexts, c.id)
	c.closed = true
	c.ending = "the context was closed"
	for _, e := range c.queue {
		ks.cancel(e)
	}
	c.queue = nil
	k := c.interpreter
	ks.mu.Unlock()
	k.end()
	return nil
}

// end kills the interpreter and waits for it.
func (k *interpreterProcess) end() {
	if k != nil {
		k.kill()
		<-k.proc.Done()
	}
}

// cancel ends an execution that has not run. The caller holds the mutex.
func (ks *Interpreters) cancel(e *execution) {
	e.status = guestrpc.CodeStatus{State: guestrpc.CodeCancelled, Code: 130, Language: e.context.lang.Name}
	ks.finish(e)
}

// finish announces the end of an execution. The caller holds the mutex.
func (ks *Interpreters) finish(e *execution) {
	e.stdout.finish()
	e.stderr.finish()
	e.events.end()
	e.source, e.env = "", nil
	close(e.done)
	ks.ended = append(ks.ended, e)
	size := 0
	for i := len(ks.ended) - 1; i >= 0; i-- {
		size += ks.ended[i].size()
		if i < len(ks.ended)-1 && (size > keepCodeBytes || len(ks.ended)-i > keepExecutions) {
			for _, old := range ks.ended[:i+1] {
				delete(ks.executions, old.id)
			}
			ks.ended = slices.Delete(ks.ended, 0, i+1)
			return
		}
	}
}

// release removes an execution that has ended.
func (ks *Interpreters) release(id string) error {
	ks.mu.Lock()
	defer ks.mu.Unlock()
	e := ks.executions[id]
	if e == nil {
		return fail(ErrNotFound, "release execution", id, "it is not known")
	}
	i := slices.Index(ks.ended, e)
	if i < 0 {
		return fail(ErrBusy, "release execution", id, "it has not ended")
	}
	ks.ended = slices.Delete(ks.ended, i, i+1)
	delete(ks.executions, id)
	return nil
}

// renewed tells interpreters in the middle of an execution that they are in a fork.
// Others learn it before their next execution.
func (ks *Interpreters) renewed() {
	ks.mu.Lock()
	defer ks.mu.Unlock()
	for _, c := range ks.contexts {
		if c.running != nil && c.begun {
			_ = c.interpreter.proc.Signal(syscall.SIGURG, ScopeProcess) // ErrEnded: it has ended
		}
	}
}
