package process

import (
	"context"
	"errors"
	"fmt"
	"os"

	"agentrun.dev/internal/host/jail"
	"agentrun.dev/internal/vmm/vmmctl"
	"golang.org/x/sys/unix"
)

// Message is a message to a vmm process, with its files.
type Message struct {
	vmmctl.Message
	Files []*os.File
}

// Add adds an opened file. If opening failed, it records the error unless an earlier
// one is recorded.
func (m *Message) Add(err *error, f *os.File, openErr error) {
	if openErr == nil {
		m.Files = append(m.Files, f)
	} else if *err == nil {
		*err = openErr
	}
}

// Close closes our copies of the files. The vmm has its own.
func (m *Message) Close() {
	for _, f := range m.Files {
		_ = f.Close() // the vmm has its own copy
	}
}

// stderrLimit bounds the output of a crashing vmm. It has room for a Go stack trace.
const stderrLimit = 64 << 10

// Begin starts a vmm process and returns once it has answered its first message.
func Begin(j *jail.Jail, limits jail.Limits, first *Message) (*Process, error) {
	p, made, err := Open(j, limits, first)
	if err != nil {
		return nil, err
	}
	if err := p.Made(made); err != nil {
		p.Kill()
		return nil, fmt.Errorf("start microVM: %w", err)
	}
	return p, nil
}

// Made waits for the reply to the first message.
func (p *Process) Made(made <-chan *vmmctl.Reply) error {
	r, err := p.Await(context.Background(), made)
	if err != nil {
		return err
	}
	h, err := vmmctl.UnmarshalHello(r.Data)
	if err != nil {
		return p.Condemn(err)
	}
	p.protocol = int(h.Protocol)
	return nil
}

// Open starts a vmm process with its first message, Boot or Spare. It does not wait
// for the reply; Made does. Open adds the files that every vmm gets to the message's
// files.
func Open(j *jail.Jail, limits jail.Limits, first *Message) (*Process, <-chan *vmmctl.Reply, error) {
	kvm, err := OpenKVM()
	if err != nil {
		return nil, nil, err
	}
	defer func() { _ = kvm.Close() }() // the vmm has its own copy
	files := []*os.File{kvm}
	uffd := openUserfaultfd()
	if uffd != nil {
		defer func() { _ = uffd.Close() }()
		files = append(files, uffd)
	}
	var memory uint64
	switch m := first.Message.(type) {
	case *vmmctl.Boot:
		m.HasUserfaultfd, memory = uffd != nil, m.Memory
	case *vmmctl.Spare:
		m.HasUserfaultfd, memory = uffd != nil, m.Memory.Size
	}
	p, err := spawn(j, limits, memory)
	if err != nil {
		return nil, nil, err
	}
	reply := p.enlist(0, first.Message) // the id of the first message is 0
	err = p.conn.Send(first.Message, append(files, first.Files...)...)
	go p.receive()
	if err != nil {
		p.Kill()
		return nil, nil, fmt.Errorf("start microVM: %w", errors.Join(err, p.Ended()))
	}
	return p, reply, nil
}

// spawn starts the process with its control socket.
func spawn(j *jail.Jail, limits jail.Limits, memory uint64) (*Process, error) {
	parent, child, err := vmmctl.Pair()
	if err != nil {
		return nil, err
	}
	defer func() { _ = child.Close() }() // the process has its own copy
	stderr, err := sealedMemfd("vmm stderr", stderrLimit)
	if err != nil {
		return nil, errors.Join(err, parent.Close())
	}
	conn, err := vmmctl.NewConn(parent)
	if err != nil {
		return nil, errors.Join(err, parent.Close(), stderr.Close())
	}
	started, err := j.Start(limits, child, stderr)
	if err != nil {
		return nil, errors.Join(err, conn.Close(), stderr.Close())
	}
	p := newProcess(&ownChild{started, stderr}, conn, started.Cell, memory)
	p.limits = limits
	return p, nil
}

// sealedMemfd is a file in memory that cannot grow beyond size.
func sealedMemfd(name string, size int64) (*os.File, error) {
	fd, err := unix.MemfdCreate(name, unix.MFD_CLOEXEC|unix.MFD_ALLOW_SEALING)
	if err != nil {
		return nil, fmt.Errorf("make memfd: %w", err)
	}
	f := os.NewFile(uintptr(fd), name)
	err = f.Truncate(size)
	if err == nil {
		_, err = unix.FcntlInt(f.Fd(), unix.F_ADD_SEALS, unix.F_SEAL_GROW|unix.F_SEAL_SHRINK)
	}
	if err != nil {
		return nil, errors.Join(fmt.Errorf("seal memfd: %w", err), f.Close())
	}
	return f, nil
}

// OpenKVM opens the host's KVM.
func OpenKVM() (*os.File, error) {
	f, err := os.OpenFile("/dev/kvm", os.O_RDWR, 0)
	if err != nil {
		return nil, fmt.Errorf("open KVM: %w (agentrun doctor says what this host lacks)", err)
	}
	return f, nil
}

// openUserfaultfd opens the device that live forks need to avoid copying memory
// during the pause. It returns nil on a host without the device, where memory is
// copied during the pause.
func openUserfaultfd() *os.File {
	f, err := os.OpenFile("/dev/userfaultfd", os.O_RDWR, 0)
	if err != nil {
		return nil
	}
	return f
}

// MemoryFile makes a file in memory with this content.
func MemoryFile(name string, content []byte) (*os.File, error) {
	fd, err := unix.MemfdCreate(name, unix.MFD_CLOEXEC|unix.MFD_ALLOW_SEALING)
	if err != nil {
		return nil, fmt.Errorf("make memfd: %w", err)
	}
	f := os.NewFile(uintptr(fd), name)
	if _, err := f.WriteAt(content, 0); err != nil {
		return nil, errors.Join(fmt.Errorf("fill memfd: %w", err), f.Close())
	}
	return f, nil
}
