// Package vmmserver is the vmm process's side of package vmmctl. It boots or
// restores one VM as its parent asks, serves the parent's requests and reports
// the VM's end.
package vmmserver

import (
	"errors"
	"fmt"
	"io"
	"os"
	"runtime"
	"sync"
	"time"

	"agentrun.dev/internal/vmm"
	"agentrun.dev/internal/vmm/cpu"
	"agentrun.dev/internal/vmm/disk"
	"agentrun.dev/internal/vmm/kvm"
	"agentrun.dev/internal/vmm/vmmctl"
)

// Serve takes a Boot message, or Spare and then Load, and runs the VM. It
// returns when the VM has ended and the parent knows the reason. If the parent
// goes away between Spare and Load, Serve returns, too. limitFiles bounds the
// size of all files that the process writes; Serve calls it once, before the
// guest runs.
func Serve(conn *vmmctl.Conn, limitFiles func(bytes uint64) error) error {
	s := &server{limitFiles: limitFiles}
	s.parents.Add(conn) // the first parent waits for no other
	id, err := s.make(conn)
	if err == nil {
		err = s.vm.Start()
	}
	err = errors.Join(err, closeAll(s.files)) // files that an early error did not use
	switch {
	case errors.Is(err, errGone):
		return nil
	case errors.Is(err, errUnanswered):
		return err
	case err != nil:
		return reply(conn, id, err, nil)
	}
	var data []byte
	if id == 0 { // a spare has sent its Hello earlier
		data = vmmctl.Hello{Protocol: protocol}.Marshal()
	}
	if err := reply(conn, id, nil, data); err != nil {
		return err
	}
	go s.serve(conn)
	if s.listener != nil {
		go s.accept()
	}
	exit := s.vm.Wait()
	s.broadcast(&vmmctl.Exit{
		Reason: string(exit.Reason), Detail: vmmctl.Clip(exit.Detail), Console: s.vm.Console().Tail,
	})
	_, err = s.vm.Close()
	return err
}

var (
	// errGone: a spare is of no use without its parent.
	errGone = errors.New("the parent has gone")
	// errUnanswered: a parent that sends an unexpected message gets no answer.
	errUnanswered = errors.New("no message that was expected")
)

// make makes the VM. It returns the id of the message that waits for the
// result.
func (s *server) make(conn *vmmctl.Conn) (id uint64, err error) {
	var m vmmctl.Message
	if m, s.files, err = conn.Receive(); err != nil {
		return 0, fmt.Errorf("%w: %w", errUnanswered, err)
	}
	switch m := m.(type) {
	case *vmmctl.Boot:
		if err := s.boot(m); err != nil {
			return 0, err
		}
		s.spread(m.VCPUs)
		return 0, nil
	case *vmmctl.Spare:
		spare, err := s.spare(m)
		if err != nil {
			return 0, err
		}
		id, err := s.fill(conn, spare)
		if err == nil {
			s.spread(m.VCPUs)
		}
		return id, err
	}
	return 0, fmt.Errorf("%w: the first is %T, neither Boot nor Spare", errUnanswered, m)
}

// fill tells the parent that the spare is ready, waits for the Load message and
// continues that machine in the spare.
func (s *server) fill(conn *vmmctl.Conn, spare *vmm.Spare) (id uint64, err error) {
	var m vmmctl.Message
	if err = reply(conn, 0, nil, vmmctl.Hello{Protocol: protocol}.Marshal()); err == nil {
		m, s.files, err = conn.Receive()
	}
	if err != nil {
		why := errUnanswered
		if errors.Is(err, io.EOF) {
			why = errGone
		}
		return 0, errors.Join(fmt.Errorf("%w: %w", why, err), spare.Close())
	}
	load, ok := m.(*vmmctl.Load)
	if !ok {
		return 0, errors.Join(fmt.Errorf("%w: %T after Spare, not Load", errUnanswered, m), spare.Close())
	}
	return load.ID, s.load(spare, load)
}

// spread makes as many Ps as the VM needs. A vCPU keeps its P while it runs the
// guest, so there must be more Ps than vCPUs: the control socket and the
// devices need one. spread runs only once the VM is made, because each P that
// has run has caches of its own.
func (s *server) spread(vcpus uint64) {
	s.procs = int(min(vcpus, cpu.MaxVCPUs)) + 1
	runtime.GOMAXPROCS(s.procs)
}

// errPaused: a parent that asks for a standby is about to capture the guest. A
// paused guest would never answer it.
var errPaused = errors.New("connect: the guest is paused")

// A guest reports free pages in bursts, two seconds after they became free.
const (
	settleQuiet = 300 * time.Millisecond
	settleLimit = 5 * time.Second
)

type server struct {
	limitFiles func(bytes uint64) error

	pagemap *os.File // of this process; nil before the first save
	// userfaultfd is the open /dev/userfaultfd, nil if the host has no such
	// device.
	userfaultfd *os.File
	files       []*os.File // descriptors of the first message that are not yet taken
	sys         *kvm.System
	vm          *vmm.VM
	procs       int          // the number of Ps, except during a save
	disks       []*disk.Disk // the layered ones, which can be saved
	listener    *os.File     // ends the capture that lingers; nil if no capture does
	readyPort   uint32
	ready       sync.Once

	saving  sync.Mutex // held by a save until its copy is complete; protects leave
	leave   func()     // ends the lingering capture; nil without one
	stillMu sync.Mutex // held while the guest is paused or resumed

	parents vmmctl.Parents
}

// still runs a function that pauses or resumes the guest, or that relies on its
// standing still.
func (s *server) still(do func() error) error {
	s.stillMu.Lock()
	defer s.stillMu.Unlock()
	return do()
}

// broadcastPatience bounds the wait for a parent that does not read. The end of
// a VM must not depend on it.
const broadcastPatience = time.Second

// broadcast sends a message to all parents. Errors are ignored here: serve
// notices a parent that has gone.
func (s *server) broadcast(m vmmctl.Message) {
	var sends sync.WaitGroup
	s.parents.Each(func(conn *vmmctl.Conn) {
		sends.Go(func() { _ = conn.Send(m) })
	})
	sent := make(chan struct{})
	go func() { sends.Wait(); close(sent) }()
	patience := time.NewTimer(broadcastPatience)
	defer patience.Stop()
	select {
	case <-sent:
	case <-patience.C:
	}
}

// accept takes further parents for as long as the process lives.
func (s *server) accept() {
	for {
		conn, err := vmmctl.Accept(s.listener)
		if err != nil {
			fmt.Fprintln(os.Stderr, "vmm:", err)
			return
		}
		wait := s.parents.Add(conn)
		go func() {
			wait()
			s.serve(conn)
		}()
	}
}

// dialed runs on a vCPU thread when the guest dials the host. The connection
// carries no data: dialing the ready port is the message.
func (s *server) dialed(port uint32) (*os.File, bool) {
	if port == s.readyPort {
		s.ready.Do(func() { go s.broadcast(&vmmctl.Ready{}) })
	}
	return nil, false
}

// serve answers one parent until the parent closes its end. Without a listener
// no other parent could connect, so the VM stops.
func (s *server) serve(conn *vmmctl.Conn) {
	defer func() {
		s.parents.Remove(conn)
		_ = conn.Close() // the other end is closed
		if s.listener == nil {
			s.vm.Stop()
		}
	}()
	for {
		m, files, err := conn.Receive()
		if err != nil {
			if !errors.Is(err, io.EOF) {
				fmt.Fprintln(os.Stderr, "vmm:", err)
			}
			return
		}
		if err := s.request(conn, m, files); err != nil {
			fmt.Fprintln(os.Stderr, "vmm:", err)
			return
		}
	}
}

// request serves one message. An error means that the parent sent an unexpected
// message or cannot be reached.
func (s *server) request(conn *vmmctl.Conn, m vmmctl.Message, files []*os.File) error {
	if c, ok := m.(*vmmctl.Connect); ok && len(files) == 1 {
		if c.Standby && s.vm.Paused() {
			return reply(conn, c.ID, errors.Join(errPaused, files[0].Close()), nil)
		}
		s.vm.Connect(c.Port, files[0], c.Standby, func(err error) {
			_ = reply(conn, c.ID, err, nil) // serve notices a dead parent
		})
		return nil
	}
	if done, err := s.newest(conn, m, files); done {
		return err
	}
	if save, ok := m.(*vmmctl.Save); ok {
		go func() { // a save takes long, and the parent may send other requests
			saved, err := s.save(save, files)
			_ = reply(conn, save.ID, err, saved) // serve notices a dead parent
		}()
		return nil
	}
	if m, ok := m.(*vmmctl.Simple); ok && m.Kind == vmmctl.KindTouched && len(files) == 1 {
		written, read, err := s.vm.TouchedMemory(files[0])
		err = errors.Join(err, files[0].Close())
		return reply(conn, m.ID, err, vmmctl.Touched{Written: written, Read: read}.Marshal())
	}
	for _, f := range files {
		_ = f.Close() // no request uses it
	}
	switch m := m.(type) {
	case *vmmctl.Balloon:
		s.vm.SetBalloon(m.Bytes)
		return reply(conn, m.ID, nil, nil)
	case *vmmctl.Simple:
		switch m.Kind {
		case vmmctl.KindPause:
			return reply(conn, m.ID, s.still(s.vm.Pause), nil)
		case vmmctl.KindPark:
			return reply(conn, m.ID, s.still(func() error { return s.vm.Park(s.knocked) }), nil)
		case vmmctl.KindResume:
			stood := byte(0)
			err := s.still(func() error {
				if s.vm.Paused() {
					stood = 1
				}
				return s.vm.Resume()
			})
			return reply(conn, m.ID, err, []byte{stood})
		case vmmctl.KindConsole:
			return reply(conn, m.ID, nil, s.vm.Console().Tail)
		case vmmctl.KindGenerationID:
			return reply(conn, m.ID, s.vm.RenewGenerationID(), nil)
		case vmmctl.KindSettle:
			go func() { // settling takes long, and the parent may send other requests
				s.vm.Settle(settleQuiet, settleLimit)
				_ = reply(conn, m.ID, nil, nil) // serve notices a dead parent
			}()
			return nil
		case vmmctl.KindStop:
			s.vm.Stop()
			return reply(conn, m.ID, nil, nil)
		}
	}
	return fmt.Errorf("unexpected control message %T with %d files", m, len(files))
}

// knocked resumes a parked machine. If that fails, it stops the machine: its end
// is the only way to tell the parent, which waits for the guest's answer.
func (s *server) knocked() {
	if err := s.still(s.vm.Resume); err != nil {
		fmt.Fprintln(os.Stderr, "vmm:", err)
		s.vm.Stop()
	}
}

func reply(conn *vmmctl.Conn, id uint64, err error, data []byte) error {
	r := &vmmctl.Reply{ID: id, Data: data}
	if err != nil {
		r.Error = vmmctl.Clip(err.Error())
	}
	return conn.Send(r)
}
