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
	"sync"

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
	s := &server{conn: conn, pagemap: pagemap, files: files}
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
	// than vCPUs: for the control socket and for the devices.
	runtime.GOMAXPROCS(int(min(vcpus, vmm.MaxVCPUs)) + 2)
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
	go s.requests()
	exit := s.vm.Wait()
	console := s.vm.Console()
	sendErr := conn.Send(&vmmctl.Exit{
		Reason: string(exit.Reason), Detail: vmmctl.Clip(exit.Detail), Console: console.Tail,
	})
	_, closeErr := s.vm.Close()
	if errors.Is(sendErr, os.ErrClosed) || exit.Reason == vmm.ReasonStopped {
		sendErr = nil // the parent has gone; that is why we stopped
	}
	return errors.Join(sendErr, closeErr)
}

type server struct {
	conn      *vmmctl.Conn
	pagemap   *os.File
	files     []*os.File // of the first message, those not yet taken
	sys       *kvm.System
	vm        *vmm.VM
	disks     []*layer.Disk // those that can be saved
	readyPort uint32
	ready     sync.Once
}

// accept runs on a vCPU thread when the guest dials the host. The connection
// itself carries nothing: that it was made is the message.
func (s *server) accept(port uint32) (*os.File, bool) {
	if port == s.readyPort {
		s.ready.Do(func() {
			go func() { _ = s.conn.Send(&vmmctl.Ready{}) }() // a dead parent is noticed by requests
		})
	}
	return nil, false
}

// requests serves the parent until it closes its end, which stops the VM.
func (s *server) requests() {
	defer s.vm.Stop()
	for {
		m, files, err := s.conn.Receive()
		if err != nil {
			if !errors.Is(err, io.EOF) {
				fmt.Fprintln(os.Stderr, "vmm:", err)
			}
			return
		}
		if err := s.request(m, files); err != nil {
			fmt.Fprintln(os.Stderr, "vmm:", err)
			return
		}
	}
}

// request serves one message. An error means that the parent cannot be
// understood or reached, and ends the VM.
func (s *server) request(m vmmctl.Message, files []*os.File) error {
	if c, ok := m.(*vmmctl.Connect); ok && len(files) == 1 {
		s.vm.Connect(c.Port, files[0], func(err error) {
			_ = s.reply(c.ID, err, nil) // a dead parent is noticed by requests
		})
		return nil
	}
	if save, ok := m.(*vmmctl.Save); ok {
		saved, err := s.save(files)
		return s.reply(save.ID, err, saved)
	}
	for _, f := range files {
		_ = f.Close() // nobody asked for it
	}
	switch m := m.(type) {
	case *vmmctl.Balloon:
		s.vm.SetBalloon(m.Bytes)
		return s.reply(m.ID, nil, nil)
	case *vmmctl.Simple:
		switch m.Kind {
		case vmmctl.KindPause:
			return s.reply(m.ID, s.vm.Pause(), nil)
		case vmmctl.KindResume:
			return s.reply(m.ID, s.vm.Resume(), nil)
		case vmmctl.KindConsole:
			return s.reply(m.ID, nil, s.vm.Console().Tail)
		case vmmctl.KindGeneration:
			return s.reply(m.ID, s.vm.RenewGeneration(), nil)
		case vmmctl.KindStop:
			s.vm.Stop()
			return s.reply(m.ID, nil, nil)
		}
	}
	return fmt.Errorf("unexpected control message %T with %d files", m, len(files))
}

func (s *server) reply(id uint64, err error, data []byte) error {
	r := &vmmctl.Reply{ID: id, Data: data}
	if err != nil {
		r.Error = vmmctl.Clip(err.Error())
	}
	return s.conn.Send(r)
}
