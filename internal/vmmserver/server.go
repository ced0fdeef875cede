// Package vmmserver is the vmm process's side of package vmmctl: it boots or
// restores the one VM it is told to, serves the parent's requests and reports
// the end.
package vmmserver

import (
	"errors"
	"fmt"
	"io"
	"os"
	"runtime"
	"runtime/debug"
	"sync"
	"time"

	"agentrun.dev/internal/kvm"
	"agentrun.dev/internal/layer"
	"agentrun.dev/internal/vmm"
	"agentrun.dev/internal/vmmctl"
)

// Serve takes a Boot or Restore message, runs the VM and returns when it has
// ended and the parent was told why. pagemap is this process's own
// /proc/self/pagemap, which tells what to save.
func Serve(conn *vmmctl.Conn, pagemap *os.File) error {
	m, files, err := conn.Receive()
	if err != nil {
		return err
	}
	s := &server{pagemap: pagemap, files: files, parents: map[*vmmctl.Conn]bool{conn: true}}
	var vcpus uint64
	var start func() error
	switch m := m.(type) {
	case *vmmctl.Boot:
		vcpus, start = m.VCPUs, func() error { return s.boot(m) }
	case *vmmctl.Restore:
		vcpus, start = m.VCPUs, func() error { return s.restore(m) }
	default:
		return fmt.Errorf("first control message is %T, neither Boot nor Restore", m)
	}
	// A vCPU keeps its P while it is in the guest, so there must be more Ps
	// than vCPUs: for the control socket, for the devices, and during a save for
	// who copies and who answers a vCPU that waits.
	runtime.GOMAXPROCS(int(min(vcpus, vmm.MaxVCPUs)) + 4)
	err = start()
	for _, f := range s.files {
		err = errors.Join(err, f.Close()) // what an early error left over
	}
	if err != nil {
		return conn.Send(&vmmctl.Reply{Error: vmmctl.Clip(err.Error())})
	}
	if err := conn.Send(&vmmctl.Reply{}); err != nil {
		return err
	}
	go s.serve(conn)
	if s.listener != nil {
		go s.accept()
	}
	// Making a VM leaves garbage that a heap this small would keep for ever.
	settled := time.AfterFunc(settleTime, debug.FreeOSMemory)
	defer settled.Stop()
	exit := s.vm.Wait()
	s.broadcast(&vmmctl.Exit{
		Reason: string(exit.Reason), Detail: vmmctl.Clip(exit.Detail), Console: s.vm.Console().Tail,
	})
	_, err = s.vm.Close()
	return err
}

// settleTime is when a VM's first requests, which must be fast, are over.
const settleTime = time.Second

type server struct {
	pagemap *os.File
	// userfaultfd is its device, nil where there is none.
	userfaultfd *os.File
	files       []*os.File // of the first message, those not yet taken
	sys         *kvm.System
	vm          *vmm.VM
	disks       []*layer.Disk // those that can be saved
	listener    *os.File      // nil: the VM ends with its parent
	readyPort   uint32
	ready       sync.Once

	saving  sync.Mutex // held by a save until its copy is complete; protects leave
	leave   func()     // ends the capture that lingers, if there is one
	stillMu sync.Mutex // held by who pauses or resumes

	mu      sync.Mutex // protects parents
	parents map[*vmmctl.Conn]bool
}

// still runs what depends on the guest standing still, or changes that.
func (s *server) still(do func() error) error {
	s.stillMu.Lock()
	defer s.stillMu.Unlock()
	return do()
}

// broadcastPatience is how long a message to all waits for a parent that does
// not read. The end of a VM must not.
const broadcastPatience = time.Second

// broadcast tells all parents something. One that has gone is noticed by
// serve.
func (s *server) broadcast(m vmmctl.Message) {
	var sends sync.WaitGroup
	s.mu.Lock()
	for conn := range s.parents {
		sends.Go(func() { _ = conn.Send(m) })
	}
	s.mu.Unlock()
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
		s.mu.Lock()
		s.parents[conn] = true
		s.mu.Unlock()
		go s.serve(conn)
	}
}

// dialed runs on a vCPU thread when the guest dials the host. The connection
// itself carries nothing: that it was made is the message.
func (s *server) dialed(port uint32) (*os.File, bool) {
	if port == s.readyPort {
		s.ready.Do(func() { go s.broadcast(&vmmctl.Ready{}) })
	}
	return nil, false
}

// serve answers one parent until it closes its end. That stops a VM that has
// no other way to be reached.
func (s *server) serve(conn *vmmctl.Conn) {
	defer func() {
		s.mu.Lock()
		delete(s.parents, conn)
		s.mu.Unlock()
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

// request serves one message. An error means that the parent cannot be
// understood or reached.
func (s *server) request(conn *vmmctl.Conn, m vmmctl.Message, files []*os.File) error {
	if c, ok := m.(*vmmctl.Connect); ok && len(files) == 1 {
		s.vm.Connect(c.Port, files[0], func(err error) {
			_ = reply(conn, c.ID, err, nil) // a dead parent is noticed by serve
		})
		return nil
	}
	if save, ok := m.(*vmmctl.Save); ok {
		go func() { // it takes long, and the parent may want more
			saved, err := s.save(save, files)
			_ = reply(conn, save.ID, err, saved) // a dead parent is noticed by serve
		}()
		return nil
	}
	for _, f := range files {
		_ = f.Close() // nobody asked for it
	}
	switch m := m.(type) {
	case *vmmctl.Balloon:
		s.vm.SetBalloon(m.Bytes)
		return reply(conn, m.ID, nil, nil)
	case *vmmctl.Simple:
		switch m.Kind {
		case vmmctl.KindPause:
			return reply(conn, m.ID, s.still(s.vm.Pause), nil)
		case vmmctl.KindResume:
			return reply(conn, m.ID, s.still(s.vm.Resume), nil)
		case vmmctl.KindConsole:
			return reply(conn, m.ID, nil, s.vm.Console().Tail)
		case vmmctl.KindGeneration:
			return reply(conn, m.ID, s.vm.RenewGeneration(), nil)
		case vmmctl.KindStop:
			s.vm.Stop()
			return reply(conn, m.ID, nil, nil)
		}
	}
	return fmt.Errorf("unexpected control message %T with %d files", m, len(files))
}

func reply(conn *vmmctl.Conn, id uint64, err error, data []byte) error {
	r := &vmmctl.Reply{ID: id, Data: data}
	if err != nil {
		r.Error = vmmctl.Clip(err.Error())
	}
	return conn.Send(r)
}
