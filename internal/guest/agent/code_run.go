package agent

import (
	"errors"
	"time"

	"agentrun.dev/internal/codec"
	"agentrun.dev/internal/guest/guestrpc"
	"agentrun.dev/internal/guest/interpreter"
)

// codeGrace is the time that an interpreter gets after the interrupt of a timeout
// before it is killed.
const codeGrace = 2 * time.Second

// work runs the executions of a context until its queue is empty.
func (ks *Interpreters) work(c *codeContext) {
	for {
		ks.mu.Lock()
		if len(c.queue) == 0 {
			c.working = false
			ks.mu.Unlock()
			return
		}
		e := c.queue[0]
		c.queue[0] = nil
		c.queue = c.queue[1:]
		c.running, c.begun, c.wanted = e, false, false
		ks.mu.Unlock()

		began := time.Now()
		ks.run(c, e)
		e.status.Wall = time.Since(began)

		ks.mu.Lock()
		c.running, c.begun = nil, false
		ks.finish(e)
		ks.mu.Unlock()
	}
}

// run runs one execution to its end and sets its status.
func (ks *Interpreters) run(c *codeContext, e *execution) {
	expired := make(chan struct{})
	if e.timeout > 0 {
		timer := time.AfterFunc(e.timeout, func() { close(expired) })
		defer timer.Stop()
	}
	for ks.attempt(c, e, expired) {
	}
}

// attempt runs an execution in the interpreter of its context. It reports whether the
// interpreter died before it began with the execution, so that another one can be
// tried.
func (ks *Interpreters) attempt(c *codeContext, e *execution, expired <-chan struct{}) (again bool) {
	e.status = guestrpc.CodeStatus{Language: c.lang.Name}
	k, err := ks.interpreterFor(c, e)
	if errors.Is(err, ErrNotFound) && e.mode == guestrpc.ModeText {
		// Without Python in the sandbox, a text can only be a command.
		if k, err = ks.shellFor(c, e); err == nil {
			defer k.end()
		}
	}
	if err != nil {
		e.err = err
		return false
	}
	// A new interpreter gets its driver first.
	requests := k.requestsFor(ks, c, e)
	if e.status.Fresh {
		requests = append(k.driver(), requests...)
	}
	k.stdout.begin(e.stdout)
	k.stderr.begin(e.stderr)
	k.log.Store(e.events)
	if !e.warm {
		begun := guestrpc.CodeBegun{Fresh: e.status.Fresh, Reason: e.status.FreshReason, PID: int32(k.proc.PID())}
		data, err := begun.Bytes()
		if err == nil { // a reason is never longer than the limit
			e.events.add(nil, guestrpc.CodeEvent{Kind: guestrpc.CodeEventBegun, Data: data})
		}
	}
	// If the interpreter dies or the time runs out before it has read everything,
	// await notices it too.
	_ = k.write(expired, requests)
	ks.await(c, e, k, expired)
	k.log.Store(nil)
	if ks.untouched(c, e) {
		k.stdout.begin(nil)
		k.stderr.begin(nil)
		return true
	}
	k.stdout.end()
	k.stderr.end()
	if e.status.State != guestrpc.CodeDied && !e.warm && e.status.Language != shellName {
		k.count++
	}
	e.status.Count = k.count
	return false
}

// untouched reports whether an interpreter that had run before died by itself without
// having begun with e. It was already dead, and its death had not been noticed.
func (ks *Interpreters) untouched(c *codeContext, e *execution) bool {
	ks.mu.Lock()
	defer ks.mu.Unlock()
	return e.status.State == guestrpc.CodeDied && !e.status.Fresh && !e.status.TimedOut && !c.begun && c.ending == ""
}

// shellName is the language of a text that was run as a command.
const shellName = "shell"

// shellFor starts a shell for one text.
func (ks *Interpreters) shellFor(c *codeContext, e *execution) (*interpreterProcess, error) {
	bash, _ := interpreter.Find("bash")
	k, err := ks.Processes.startInterpreter(c, bash, ks.generation())
	if err != nil {
		return nil, err
	}
	e.status.Language = shellName
	ks.mu.Lock()
	c.interpreter, c.ending = k, ""
	ks.mu.Unlock()
	return k, nil
}

// interpreterFor returns the interpreter of a context, and starts it if need be.
func (ks *Interpreters) interpreterFor(c *codeContext, e *execution) (*interpreterProcess, error) {
	ks.mu.Lock()
	k, ending, closed := c.interpreter, c.ending, c.closed
	ks.mu.Unlock()
	if closed {
		return nil, fail(ErrEnded, "run code in context", c.id, "it was closed")
	}
	if k.alive() && ending == "" {
		return k, nil
	}
	if k != nil && k.lang.Name == c.lang.Name {
		<-k.proc.Done()
		e.status.FreshReason = ending
		if ending == "" {
			e.status.FreshReason = k.reason()
		}
	}
	fresh, err := ks.Processes.startInterpreter(c, c.lang, ks.generation())
	if err != nil {
		return nil, err
	}
	e.status.Fresh = true
	ks.mu.Lock()
	c.interpreter, c.ending = fresh, ""
	closed = c.closed
	ks.mu.Unlock()
	if closed {
		fresh.end()
		return nil, fail(ErrEnded, "run code in context", c.id, "it was closed")
	}
	return fresh, nil
}

// await follows an execution in its interpreter.
func (ks *Interpreters) await(c *codeContext, e *execution, k *interpreterProcess, expired <-chan struct{}) {
	ready := k.ready
	if !e.warm {
		ready = nil
	}
	for {
		select {
		case <-ready:
			return
		case <-k.begin:
			ks.mu.Lock()
			c.begun = true
			if c.wanted {
				_ = c.interrupt() // ErrEnded: it has ended
			}
			ks.mu.Unlock()
		case r := <-k.done:
			select {
			case <-k.begin: // begin came before done, but was not received yet
			default:
			}
			e.ended(r)
			return
		case <-k.proc.Done():
			<-k.closed // its last words are read
			select {
			case <-k.begin:
				ks.mu.Lock()
				c.begun = true
				ks.mu.Unlock()
			default:
			}
			select {
			case r := <-k.done:
				e.ended(r)
			default:
				ks.died(c, e, k)
			}
			return
		case <-expired:
			expired = nil
			e.status.TimedOut = true
			ks.mu.Lock()
			begun := c.begun
			_ = c.interrupt() // ErrEnded: it has ended
			ks.mu.Unlock()
			if !begun {
				k.kill() // it does not even read its requests
				continue
			}
			grace := time.AfterFunc(codeGrace, k.kill)
			defer grace.Stop()
		}
	}
}

func (e *execution) ended(r executionEnd) {
	e.status.State, e.status.Code = r.state, r.code
	if r.shell {
		e.status.Language = shellName
	}
}

// died records how the interpreter's death ended the execution.
func (ks *Interpreters) died(c *codeContext, e *execution, k *interpreterProcess) {
	exit, _ := k.proc.Exit()
	ks.mu.Lock()
	ending := c.ending
	ks.mu.Unlock()
	e.status.State, e.status.Code = guestrpc.CodeDied, int32(exit.Code)
	switch {
	case k.lang.Lines && ending == "" && exit.Signal == 0 && k.broken.Load() == nil:
		e.status.State = guestrpc.CodeExited // in a shell, exit means just that
	case ending != "":
		e.status.Reason = ending
	case e.status.TimedOut:
		e.status.Reason = "the kernel was killed: it did not heed the interrupt of the timeout"
	default:
		e.status.Reason = k.reason()
	}
	if e.warm {
		e.err = fail(ErrEnded, "start the kernel of context", c.id, e.status.Reason)
	}
}

// requestsFor encodes all requests that the interpreter needs for an execution.
func (k *interpreterProcess) requestsFor(ks *Interpreters, c *codeContext, e *execution) []byte {
	now := ks.generation()
	reseed := now != k.generation
	k.generation = now
	set, unset := k.changedEnv(ks.Processes, c)
	if k.lang.Lines {
		return shellRequests(reseed, set, unset, e)
	}
	var b []byte
	if reseed {
		b = append(b, frame(frameReseed, nil)...)
	}
	if len(set)+len(unset) > 0 {
		b = append(b, frame(frameEnv, func(e *codec.Encoder) {
			e.Strings(set)
			e.Strings(unset)
		})...)
	}
	if e.warm {
		return b
	}
	return append(b, frame(frameRun, func(w *codec.Encoder) {
		w.Uvarint(uint64(e.mode))
		w.Strings(e.env)
		w.String(e.source)
	})...)
}

// changedEnv compares the environment that a new interpreter would get now with the
// environment that this one got.
func (k *interpreterProcess) changedEnv(ps *Processes, c *codeContext) (set, unset []string) {
	ps.mu.Lock()
	base, times := ps.env, ps.envSet
	ps.mu.Unlock()
	if times == k.envSet {
		return nil, nil
	}
	id, err := ps.cfg.Accounts.Lookup(c.user)
	if err != nil {
		return nil, nil // the user is gone: the interpreter keeps the environment that it has
	}
	env, _ := buildEnv(&ExecSpec{Env: c.env, User: c.user}, base, &id)
	set, unset = diffEnv(k.env, env)
	k.env, k.envSet = env, times
	return set, unset
}

// diffEnv returns the variables that next adds to before or changes, and the names of
// the variables that next lacks.
func diffEnv(before, next []string) (set, unset []string) {
	had := make(map[string]string, len(before))
	for _, kv := range before {
		had[envName(kv)] = kv
	}
	for _, kv := range next {
		name := envName(kv)
		if had[name] != kv {
			set = append(set, kv)
		}
		delete(had, name)
	}
	for _, kv := range before {
		if name := envName(kv); had[name] != "" {
			unset = append(unset, name)
		}
	}
	return set, unset
}

// envName is the name of NAME=value.
func envName(kv string) string {
	for i := range len(kv) {
		if kv[i] == '=' {
			return kv[:i]
		}
	}
	return kv
}
