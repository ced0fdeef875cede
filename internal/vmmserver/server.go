// Package vmmserver is the vmm process's side of package vmmctl: it boots the
// one VM it is told to, serves the parent's requests and reports the end.
package vmmserver

import (
	"errors"
	"fmt"
	"io"
	"os"
	"runtime"
	"sync"

	"agentrun.dev/internal/kvm"
	"agentrun.dev/internal/vmm"
	"agentrun.dev/internal/vmmctl"
)

// Serve takes a Boot message, runs the VM and returns when it has ended and
// the parent was told why.
func Serve(conn *vmmctl.Conn) error {
	m, files, err := conn.Receive()
	if err != nil {
		return err
	}
	boot, ok := m.(*vmmctl.Boot)
	if !ok {
		return fmt.Errorf("first control message is %T, not Boot", m)
	}
	// A vCPU keeps its P while it is in the guest, so there must be more Ps
	// than vCPUs: for the control socket and for the devices.
	runtime.GOMAXPROCS(int(boot.VCPUs) + 2)
	s := &server{conn: conn, readyPort: boot.ReadyPort}
	if err := s.boot(boot, files); err != nil {
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
	vm        *vmm.VM
	readyPort uint32
	ready     sync.Once
}

// boot hands the descriptors to the VM in the order that Boot documents.
func (s *server) boot(b *vmmctl.Boot, files []*os.File) error {
	want := 2 + len(b.Disks) + len(b.Nets)
	if b.HasInitrd {
		want++
	}
	if len(files) != want {
		for _, f := range files {
			_ = f.Close()
		}
		return fmt.Errorf("boot message came with %d files, not %d", len(files), want)
	}
	next := func() *os.File {
		f := files[0]
		files = files[1:]
		return f
	}
	sys, err := kvm.FromFile(next())
	if err != nil {
		return err
	}
	cfg := vmm.Config{
		KVM:     sys,
		Kernel:  next(),
		Cmdline: b.Cmdline,
		Memory:  b.Memory,
		VCPUs:   int(b.VCPUs),
		Profile: vmm.Profile(b.Profile),
		Devices: vmm.Devices{Vsock: &vmm.Vsock{Accept: s.accept}},
	}
	if b.HasInitrd {
		cfg.Initrd = next()
	}
	for _, d := range b.Disks {
		disk, err := vmm.FileDisk(next(), d.ReadOnly, d.ID)
		if err != nil {
			return err
		}
		cfg.Disks = append(cfg.Disks, disk)
	}
	for _, n := range b.Nets {
		cfg.Nets = append(cfg.Nets, vmm.Net{Socket: next(), MAC: n.MAC, MTU: n.MTU})
	}
	if s.vm, err = vmm.Boot(cfg); err != nil {
		return err
	}
	err = cfg.Kernel.Close()
	if cfg.Initrd != nil {
		err = errors.Join(err, cfg.Initrd.Close())
	}
	return errors.Join(err, s.vm.Start())
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
