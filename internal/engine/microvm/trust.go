package microvm

import (
	"errors"
	"fmt"
	"io"
	"os"
	"slices"
	"time"

	"agentrun.dev/internal/storage/extent"
	"agentrun.dev/internal/storage/layer"
	"agentrun.dev/internal/storage/snapshot"
	"agentrun.dev/internal/vmm/vmmctl"
	"agentrun.dev/internal/vmm/vmstate"
	"golang.org/x/sys/unix"
)

// A vmm process may be in the hands of its guest. A process that says what no vmm
// says, closes its control socket or does not answer is killed: nothing that it
// says later could be relied on.

// How long a vmm may take to answer: answerTime, and what it takes to copy memory
// and disks at slowestCopy. That holds for every request, as one may have to wait
// for a Save that goes on. Emulated machines on a busy host copy some MiB in a
// second.
const (
	answerTime  = 5 * time.Minute
	slowestCopy = 4 << 20 // bytes in a second
)

// closingTime is how long a process that has closed its control socket may take
// to end by itself, which is what an honest one does.
const closingTime = 5 * time.Second

// expect sets how long the process may take for each answer from now on, if it
// may have to copy so many bytes.
func (p *Process) expect(bytes uint64) {
	seconds := min(bytes/slowestCopy, uint64(24*time.Hour/time.Second))
	p.patience.Store(int64(answerTime + time.Duration(seconds)*time.Second))
}

// expectCapture expects what a capture may have to copy: all of the memory and of
// the disks.
func (s *sandbox) expectCapture() {
	all := s.memory.Size
	for _, size := range s.writable() {
		all += size
	}
	s.expect(all)
}

// pending is a request that was not answered yet.
type pending struct {
	reply chan *vmmctl.Reply
	timer *time.Timer // nil where the guest decides when there is an answer
}

// overdue kills a vmm that has not answered in time.
func (p *Process) overdue(message vmmctl.Message, after time.Duration) {
	if p.left.Load() {
		return // whatever it answers, nobody reads it
	}
	p.accuse(fmt.Errorf("it has not answered %s within %v", nameOf(message), after))
}

// nameOf is for people.
func nameOf(m vmmctl.Message) string {
	if s, ok := m.(*vmmctl.Simple); ok {
		return fmt.Sprintf("a request of kind %d", s.Kind)
	}
	return fmt.Sprintf("%T", m)[len("*vmmctl."):]
}

// accuse kills the process and says why in how it ended. The first reason counts.
func (p *Process) accuse(why error) {
	text := why.Error()
	p.accused.CompareAndSwap(nil, &text)
	p.handle.kill()
}

// condemn is accuse for whoever asked and got nonsense. It returns when the
// process has gone, with how it ended.
func (p *Process) condemn(why error) error {
	p.accuse(why)
	p.Kill()
	return p.ended()
}

// saidByVMM are the reasons that a vmm can give for the end of its VM. The others
// are for the parent to find.
var saidByVMM = []vmstate.Reason{
	vmstate.PowerOff, vmstate.Reset, vmstate.Panic, vmstate.TripleFault, vmstate.InternalError, vmstate.Stopped,
}

// listen takes what the process says until its end of the socket closes, and
// returns its last word, if there was one. The error is io.EOF, or says what the
// process should not have said.
func (p *Process) listen() (last *vmmctl.Exit, err error) {
	ready := false
	for {
		m, files, err := p.conn.Receive()
		if errors.Is(err, io.EOF) {
			return last, err
		}
		if err != nil {
			return last, fmt.Errorf("it has sent what cannot be read: %w", err)
		}
		for _, f := range files {
			_ = f.Close() // nobody asked for it
		}
		if len(files) > 0 {
			return last, fmt.Errorf("it has sent %d descriptors", len(files))
		}
		switch m := m.(type) {
		case *vmmctl.Reply:
			p.mu.Lock()
			r, asked := p.waiting[m.ID]
			delete(p.waiting, m.ID)
			p.mu.Unlock()
			if !asked {
				return last, fmt.Errorf("it has answered request %d, which nobody has made", m.ID)
			}
			r.end(m)
		case *vmmctl.Ready:
			if ready {
				return last, errors.New("it has said twice that the guest's agent listens")
			}
			ready = true
			close(p.ready)
		case *vmmctl.Exit:
			if last != nil || !slices.Contains(saidByVMM, vmstate.Reason(m.Reason)) {
				return last, fmt.Errorf("it has said that its VM ended with %q", m.Reason)
			}
			last = m
		default:
			return last, fmt.Errorf("it has sent a %T, which is for a parent to send", m)
		}
	}
}

// end hands the answer over.
func (r pending) end(m *vmmctl.Reply) {
	if r.timer != nil {
		r.timer.Stop()
	}
	r.reply <- m
}

// receive listens to the process, and reaps it.
func (p *Process) receive() {
	last, err := p.listen()
	_ = p.conn.Close() // makes a confused process stop
	switch {
	case p.left.Load(): // it goes on without this parent
	case errors.Is(err, io.EOF):
		defer time.AfterFunc(closingTime, func() {
			p.accuse(errors.New("it has closed its control socket and goes on"))
		}).Stop()
	default:
		p.accuse(err)
	}
	p.finish(last)
}

// maxKept is how many times its memory the layers may hold that a vmm still maps
// and nobody else uses. As many layers as an image has are enough.
const maxKept = layer.MaxLayers

// keep counts a charged file that was closed here until back is called.
func (p *Process) keep(size uint64, back func() error) func() error {
	p.kept.Add(size)
	return func() error {
		p.kept.Add(-size)
		return back()
	}
}

// refuseKept says that a guest with that much memory is not captured any more: its
// vmm could raise its limit with each capture.
func (p *Process) refuseKept(memory uint64) error {
	if kept := p.kept.Load(); kept > maxKept*memory {
		return fmt.Errorf("the vmm process maps %d bytes of layers that nobody else uses, more than %d times its memory: it cannot be captured any more", kept, maxKept)
	}
	return nil
}

// errLie says that what a vmm has saved is not what it says, or not what it may
// be.
var errLie = errors.New("what it has saved cannot be")

// verify takes what a vmm has answered to Save and looks at the files. The files
// in memory are sealed first: the vmm may still have them open, and other
// sandboxes are made of them. Those of the disks stay open in the vmm; they are
// only ever copied, as much as they have to hold. The error is errLie if the vmm
// is to blame.
func (c *captured) verify(answer []byte, memory uint64, disks []uint64) (err error) {
	if err := c.decode(answer, memory, disks); err != nil {
		return err
	}
	if c.held, err = sealed(c.memory.File, memory, memory); err != nil {
		return err
	}
	for i, f := range c.disks {
		want := extent.Total(c.saved.Disks[i].Runs)
		if _, err := checkSize(f, want, want); err != nil {
			return err
		}
	}
	return c.readState()
}

// decode takes what a vmm says that it has saved.
func (c *captured) decode(answer []byte, memory uint64, disks []uint64) error {
	saved, err := vmmctl.UnmarshalSaved(answer)
	if err == nil {
		err = saved.Check(memory, disks)
	}
	if err != nil {
		return fmt.Errorf("%w: %w", errLie, err)
	}
	c.saved = saved
	return nil
}

// readState reads the machine's state.
func (c *captured) readState() (err error) {
	if _, err := sealed(c.state, 0, snapshot.MaxState); err != nil {
		return err
	}
	if c.encoded, err = io.ReadAll(io.NewSectionReader(c.state, 0, snapshot.MaxState)); err != nil {
		return fmt.Errorf("read the captured state: %w", err)
	}
	if c.machine, err = vmstate.Unmarshal(c.encoded); err != nil {
		return fmt.Errorf("%w: %w", errLie, err)
	}
	return nil
}

// sealed seals a file in memory that a vmm has written, and then is checkSize.
func sealed(f *os.File, least, most uint64) (there uint64, err error) {
	const seals = unix.F_SEAL_WRITE | unix.F_SEAL_SHRINK | unix.F_SEAL_GROW | unix.F_SEAL_SEAL
	if _, err := unix.FcntlInt(f.Fd(), unix.F_ADD_SEALS, seals); err != nil {
		// It can be written as long as somebody has it mapped so.
		return 0, fmt.Errorf("%w: seal the captured %s: %w", errLie, f.Name(), err)
	}
	return checkSize(f, least, most)
}

// checkSize checks how long a file is that a vmm has written, and returns how
// many bytes are there, without holes.
func checkSize(f *os.File, least, most uint64) (there uint64, err error) {
	var st unix.Stat_t
	if err := unix.Fstat(int(f.Fd()), &st); err != nil {
		return 0, fmt.Errorf("look at %s: %w", f.Name(), err)
	}
	if size := uint64(st.Size); size < least || size > most {
		return 0, fmt.Errorf("%w: %s has %d bytes, not %d to %d", errLie, f.Name(), size, least, most)
	}
	return uint64(st.Blocks) * 512, nil
}
