package guestrpc

import (
	"io"
	"syscall"
	"unsafe"
)

// socketWriter writes to a socket with sendmsg and MSG_DONTWAIT, which does not wait
// even if the descriptor is in blocking mode.
//
// The call is raw. A system call that goes through the Go scheduler wakes its monitor
// thread when the process was idle, which would cost an agent a thread switch for
// every ping. A raw call is safe here because it does not block.
type socketWriter struct {
	raw  syscall.RawConn
	send func(fd uintptr) bool // made once, so that a write allocates nothing

	// Arguments and results of send. The holder of the write turn owns them.
	iov   [2]syscall.Iovec
	msg   syscall.Msghdr
	n     int
	errno syscall.Errno
}

// init initialises a zero socketWriter. It returns false if conn is not a socket.
func (w *socketWriter) init(conn io.Writer) bool {
	sc, ok := conn.(syscall.Conn)
	if !ok {
		return false
	}
	var err error
	if w.raw, err = sc.SyscallConn(); err != nil {
		return false
	}
	w.send = w.sendmsg
	n, err := w.tryWrite(nil, nil) // ENOTSOCK: a pipe or a device
	return n == 0 && err == nil
}

func (w *socketWriter) tryWrite(a, b []byte) (int, error) {
	k := 0
	for _, p := range [...][]byte{a, b} {
		if len(p) > 0 {
			w.iov[k].Base = &p[0]
			w.iov[k].SetLen(len(p))
			k++
		}
	}
	w.msg.Iov = &w.iov[0]
	w.msg.Iovlen = uint64(k)
	w.n, w.errno = 0, 0
	err := w.raw.Write(w.send)
	w.iov = [2]syscall.Iovec{}
	if err != nil {
		return 0, err
	}
	if w.errno != 0 {
		return 0, w.errno
	}
	return w.n, nil
}

// sendmsg always reports that it is done, so that RawConn.Write does not wait.
func (w *socketWriter) sendmsg(fd uintptr) bool {
	for {
		// msg points to iov and iov to the slices with real pointers from the
		// heap, so all of them stay alive and in place during the call.
		n, _, errno := syscall.RawSyscall(syscall.SYS_SENDMSG, fd, uintptr(unsafe.Pointer(&w.msg)), syscall.MSG_DONTWAIT|syscall.MSG_NOSIGNAL)
		switch errno {
		case 0:
			w.n = int(n)
		case syscall.EINTR:
			continue
		case syscall.EAGAIN:
		default:
			w.errno = errno
		}
		return true
	}
}
