package agent

import (
	"encoding/binary"
	"errors"
	"io"
	"os"
	"strconv"
	"sync/atomic"
	"syscall"

	"golang.org/x/sys/unix"

	"agentrun.dev/internal/codec"
	"agentrun.dev/internal/guest/guestrpc"
	"agentrun.dev/internal/guest/interpreter"
)

// Frames to and from interpreters (docs/design/code.md).
const (
	frameRun    = 1
	frameEnv    = 2
	frameReseed = 3
	frameNoted  = 4

	frameReady = 1
	frameBegin = 2
	frameEvent = 3
	frameDone  = 4
	frameNote  = 5

	// maxInterpreterFrame has room for a type, the kind of an event, and its data.
	maxInterpreterFrame = 2 + guestrpc.MaxCodeEvent
	// maxDying bounds how much is read from an interpreter after its end.
	maxDying = 1 << 20
)

// interpreterProcess is the interpreter of a context.
type interpreterProcess struct {
	lang       interpreter.Language
	proc       *Process
	requests   *input
	events     *controlPipe
	stdout     *interpreterStream
	stderr     *interpreterStream
	env        []string // its environment, as far as the agent has set it
	envSet     uint64   // Processes.envSet when env was made
	generation uint64   // the guest's generation when the interpreter was last seeded
	count      uint64   // executions that it has run
	oomKills   uint64   // the guest's oomKills when it was started

	ready   chan struct{} // closed when it can be used
	begin   chan struct{} // cap 1: an execution has begun
	done    chan executionEnd
	closed  chan struct{}                   // closed when no more frames are read from it
	log     atomic.Pointer[eventLog]        // of the running execution
	version string                          // set before ready is closed
	broken  atomic.Pointer[protocolFailure] // the protocol error that it was killed for
}

type protocolFailure struct{ why string }

// executionEnd is the end of an execution as the interpreter reports it.
type executionEnd struct {
	state guestrpc.CodeState
	code  int32
	shell bool
}

// startInterpreter starts an interpreter for a context. It does not wait until the
// interpreter is ready.
func (ps *Processes) startInterpreter(c *codeContext, lang interpreter.Language, generation uint64) (*interpreterProcess, error) {
	ps.mu.Lock()
	base, envSet := ps.env, ps.envSet
	ps.mu.Unlock()
	id, err := ps.cfg.Accounts.Lookup(c.user)
	if err != nil {
		return nil, err
	}
	k := &interpreterProcess{
		lang: lang, envSet: envSet, generation: generation, oomKills: oomKills(),
		ready: make(chan struct{}), begin: make(chan struct{}, 1), done: make(chan executionEnd, 1), closed: make(chan struct{}),
	}
	spec := ExecSpec{Argv: append([]string{""}, lang.Args...), Env: c.env, Workdir: c.workdir, User: c.user}
	var path string
	k.env, path = buildEnv(&spec, base, &id)
	dir, program, err := resolveAny(lang.Programs, &spec, &id, path)
	if err != nil {
		return nil, err
	}
	k.proc = &Process{spec: spec, done: make(chan struct{})}
	k.proc.spec.Env = nil // it may hold secrets, and is no longer needed
	s := stdio{sink: &ps.sink}
	files, err := k.open(&s, &id)
	if err == nil {
		err = ps.fork(k.proc, program, &syscall.ProcAttr{
			Dir: dir, Env: k.env, Files: files,
			Sys: &syscall.SysProcAttr{Setsid: true, Credential: &syscall.Credential{Uid: id.UID, Gid: id.GID, Groups: id.Groups}},
		})
		if err != nil {
			err = startError(program, dir, err)
		}
	}
	for _, fd := range files {
		unix.Close(int(fd))
	}
	if err != nil {
		s.closeParent()
		return nil, err
	}
	go k.stdout.pump()
	go k.stderr.pump()
	go k.read()
	go k.last()
	return k, nil
}

// resolveAny finds the first program that exists.
func resolveAny(programs []string, spec *ExecSpec, id *Identity, path string) (dir, program string, err error) {
	for _, name := range programs {
		spec.Argv[0] = name
		dir, program, err = resolve(spec, id, path)
		if !errors.Is(err, ErrNotFound) {
			return dir, program, err
		}
	}
	return "", "", fail(ErrNotFound, "start the kernel", programs[0], "not in PATH "+path+"; use an image that has it")
}

// open makes the five pipes and returns the interpreter's ends, which the caller
// closes.
func (k *interpreterProcess) open(s *stdio, id *Identity) (files []uintptr, err error) {
	var ours [5]*os.File
	for i := range ours {
		toInterpreter := i == 0 || i == 3
		var theirs int
		if ours[i], theirs, err = s.makePipe(toInterpreter, id); err != nil {
			return files, err
		}
		files = append(files, uintptr(theirs))
	}
	_ = ours[0].Close() // standard input reads as empty
	if k.requests, err = newInput(ours[3], false); err != nil {
		return files, err
	}
	if k.events, err = newControlPipe(ours[4]); err != nil {
		return files, err
	}
	if k.stdout, err = newInterpreterStream(ours[1], s.sink); err != nil {
		return files, err
	}
	k.stderr, err = newInterpreterStream(ours[2], s.sink)
	return files, err
}

// last closes the interpreter's pipes after its end.
func (k *interpreterProcess) last() {
	<-k.proc.Done()
	k.events.drain()
	_ = k.requests.file.Close() // nothing reads from it any more
}

// write sends bytes to the interpreter. If the interpreter does not read them, write
// waits until it ends or stop closes.
func (k *interpreterProcess) write(stop <-chan struct{}, b []byte) error {
	_, err := k.requests.write(stop, k.proc.Done(), b)
	return err
}

// driver is the first request to an interpreter: its driver.
func (k *interpreterProcess) driver() []byte {
	n := 0
	for _, part := range k.lang.Driver {
		n += len(part)
	}
	if n == 0 {
		return nil
	}
	b := binary.LittleEndian.AppendUint32(make([]byte, 0, n+4), uint32(n))
	for _, part := range k.lang.Driver {
		b = append(b, part...)
	}
	return b
}

// frame makes a request.
func frame(kind byte, fields func(e *codec.Encoder)) []byte {
	e := codec.NewEncoder([]byte{0, 0, 0, 0, kind})
	if fields != nil {
		fields(e)
	}
	b := e.Bytes()
	binary.LittleEndian.PutUint32(b, uint32(len(b)-4))
	return b
}

// read reads the interpreter's frames until it ends or violates the protocol.
func (k *interpreterProcess) read() {
	defer close(k.closed)
	read := k.readFrames
	if k.lang.Lines {
		read = k.readLines
	}
	err := read(k.events)
	_ = k.events.file.Close() // nothing was written to it
	if err != nil && !errors.Is(err, io.EOF) {
		k.broken.Store(&protocolFailure{err.Error()})
	}
	// Without a reader of its frames an interpreter is useless.
	_ = k.proc.Signal(syscall.SIGKILL, ScopeSession) // ErrEnded: it has ended
}

const (
	errInterpreterFrame = Kind("it sent a frame that is empty or too large")
	errInterpreterOrder = Kind("it sent a frame out of order")
	errInterpreterField = Kind("it sent a malformed frame")
)

func (k *interpreterProcess) readFrames(r io.Reader) error {
	isReady := false
	for {
		var size [4]byte
		if _, err := io.ReadFull(r, size[:]); err != nil {
			return io.EOF // an end in the middle of a frame counts as a plain end
		}
		n := int(binary.LittleEndian.Uint32(size[:]))
		if n == 0 || n > maxInterpreterFrame {
			return errInterpreterFrame
		}
		body, err := io.ReadAll(io.LimitReader(r, int64(n)))
		if err != nil || len(body) < n {
			return io.EOF
		}
		if kind := body[0]; isReady != (kind != frameReady) {
			return errInterpreterOrder
		}
		isReady = true
		if err := k.handle(body[0], body[1:]); err != nil {
			return err
		}
	}
}

func (k *interpreterProcess) handle(kind byte, body []byte) error {
	d := codec.NewDecoder(body)
	switch kind {
	case frameReady:
		k.version = d.String(64)
		if d.Finish() != nil {
			return errInterpreterField
		}
		close(k.ready)
	case frameBegin:
		select {
		case k.begin <- struct{}{}:
		default:
			return errInterpreterOrder
		}
	case frameEvent, frameNote:
		if len(body) == 0 || body[0] < byte(guestrpc.CodeEventResult) || body[0] > byte(guestrpc.CodeEventError) {
			return errInterpreterField
		}
		e := guestrpc.CodeEvent{
			Kind: guestrpc.CodeEventKind(body[0]), Stdout: k.stdout.position(), Stderr: k.stderr.position(), Data: body[1:],
		}
		if log := k.log.Load(); log != nil { // otherwise a thread that outlives its execution has sent it
			log.add(k.proc.Done(), e)
		}
		if kind == frameNote {
			_ = k.write(nil, frame(frameNoted, nil)) // fails if the interpreter has died
		}
	case frameDone:
		var r executionEnd
		r.state = guestrpc.CodeState(d.UvarintMax(uint64(guestrpc.CodeExited)))
		code := d.Varint()
		r.shell = d.UvarintMax(1) == 1
		if d.Finish() != nil || int64(int32(code)) != code {
			return errInterpreterField
		}
		r.code = int32(code)
		return k.say(r)
	default:
		return errInterpreterField
	}
	return nil
}

// say announces the end of the running execution.
func (k *interpreterProcess) say(r executionEnd) error {
	if k.log.Load() == nil {
		return errInterpreterOrder
	}
	select {
	case k.done <- r:
		return nil
	default:
		return errInterpreterOrder
	}
}

// kill ends the interpreter and everything in its session.
func (k *interpreterProcess) kill() {
	_ = k.proc.Signal(syscall.SIGKILL, ScopeSession) // ErrEnded: it has ended
}

// reason says how the interpreter ended.
func (k *interpreterProcess) reason() string {
	exit, _ := k.proc.Exit()
	switch b := k.broken.Load(); {
	case b != nil:
		return "the kernel was killed: " + b.why
	case exit.Signal == syscall.SIGKILL && oomKills() > k.oomKills:
		return "the kernel was killed by SIGKILL: the sandbox has run out of memory"
	case exit.Signal != 0:
		return "the kernel was killed by " + signalName(exit.Signal)
	}
	return "the kernel exited with code " + strconv.Itoa(exit.Code)
}

func signalName(s syscall.Signal) string {
	if name := unix.SignalName(s); name != "" {
		return name
	}
	return "signal " + strconv.Itoa(int(s))
}

// oomKills is how many processes the guest's kernel has killed for want of
// memory since it booted.
func oomKills() uint64 {
	table, err := readFile("/proc/vmstat", 64<<10)
	if err != nil {
		return 0
	}
	const name = "oom_kill "
	for line := range lines(table) {
		if len(line) > len(name) && string(line[:len(name)]) == name {
			n, _ := strconv.ParseUint(string(line[len(name):]), 10, 64) // 0: unknown
			return n
		}
	}
	return 0
}

// controlPipe reads an interpreter's frames. Other processes may hold the pipe open
// after the interpreter's death, so the end of the pipe is not waited for.
type controlPipe struct {
	file  *os.File
	raw   syscall.RawConn
	dying bool // the interpreter has ended: read only the rest
	left  int
}

func newControlPipe(file *os.File) (*controlPipe, error) {
	raw, err := file.SyscallConn()
	return &controlPipe{file: file, raw: raw, left: maxDying}, err
}

// drain makes Read end once the pipe is empty.
func (p *controlPipe) drain() { p.file.SetReadDeadline(past) }

func (p *controlPipe) Read(b []byte) (int, error) {
	if !p.dying {
		n, err := p.file.Read(b)
		if !errors.Is(err, os.ErrDeadlineExceeded) {
			return n, err
		}
		p.dying = true
	}
	n := 0
	err := p.raw.Control(func(fd uintptr) { n, _ = unix.Read(int(fd), b[:min(len(b), p.left)]) })
	if err != nil || n <= 0 {
		return 0, io.EOF
	}
	p.left -= n
	return n, nil
}
