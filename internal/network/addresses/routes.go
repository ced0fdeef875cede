package addresses

import (
	"encoding/binary"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"sync"

	"golang.org/x/sys/unix"
)

// Routes asks the kernel where packets to an address go, over one socket that stays
// open. The socket belongs to the network namespace in which it was opened. Asking
// takes only write(2) and read(2), and no privilege. So a process can open Routes,
// lock itself down, and ask afterwards.
type Routes struct {
	mu  sync.Mutex // one question at a time; protects all following fields
	fd  int        // -1 after Close
	seq uint32
	buf [8192]byte
}

// OpenRoutes opens the socket.
func OpenRoutes() (*Routes, error) {
	// The kernel answers within write(2), so a read never has to wait. A read that
	// would wait is an error, not a hang.
	fd, err := unix.Socket(unix.AF_NETLINK, unix.SOCK_RAW|unix.SOCK_CLOEXEC|unix.SOCK_NONBLOCK, unix.NETLINK_ROUTE)
	if err != nil {
		return nil, fmt.Errorf("open a routing socket: %w", os.NewSyscallError("socket", err))
	}
	kernel := &unix.SockaddrNetlink{Family: unix.AF_NETLINK}
	// A connected netlink socket receives messages only from its peer, the kernel.
	if err := errors.Join(os.NewSyscallError("bind", unix.Bind(fd, kernel)), os.NewSyscallError("connect", unix.Connect(fd, kernel))); err != nil {
		_ = unix.Close(fd)
		return nil, fmt.Errorf("open a routing socket: %w", err)
	}
	return &Routes{fd: fd}, nil
}

// Close closes the socket. Owns fails afterwards.
func (r *Routes) Close() error {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.fd < 0 {
		return nil
	}
	err := unix.Close(r.fd)
	r.fd = -1
	return os.NewSyscallError("close", err)
}

// Owns says whether a is an address of the host, or an address that reaches all of a
// network of the host. An address without a route is neither.
func (r *Routes) Owns(a netip.Addr) (bool, string, error) {
	kind, err := r.lookup(a)
	if err != nil {
		return false, "", fmt.Errorf("look up the route to %v: %w", a, err)
	}
	switch kind {
	case unix.RTN_LOCAL:
		return true, "an address of the host", nil
	case unix.RTN_BROADCAST:
		return true, "a broadcast address of the host's network", nil
	case unix.RTN_ANYCAST:
		return true, "an anycast address of the host's network", nil
	}
	return false, "", nil
}

// lookup returns the type of the route to a, or RTN_UNSPEC if no route exists.
func (r *Routes) lookup(a netip.Addr) (byte, error) {
	if !a.IsValid() {
		return 0, errors.New("it is not an address")
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.fd < 0 {
		return 0, os.ErrClosed
	}
	r.seq++
	if err := ignoringEINTR(func() error { _, err := unix.Write(r.fd, routeRequest(a, r.seq)); return err }); err != nil {
		return 0, os.NewSyscallError("write", err)
	}
	for {
		n := 0
		err := ignoringEINTR(func() (err error) { n, err = unix.Read(r.fd, r.buf[:]); return err })
		if err != nil {
			return 0, os.NewSyscallError("read", err)
		}
		if kind, ours, err := parseRoute(r.buf[:n], r.seq); ours || err != nil {
			return kind, err
		} // otherwise it answers an earlier question whose read had failed
	}
}

func ignoringEINTR(f func() error) error {
	for {
		if err := f(); !errors.Is(err, unix.EINTR) {
			return err
		}
	}
}

// routeRequest is an RTM_GETROUTE for one address (rtnetlink(7)): a header, an
// rtmsg, and the attribute RTA_DST.
func routeRequest(a netip.Addr, seq uint32) []byte {
	family, dst := byte(unix.AF_INET6), a.AsSlice()
	if a.Is4() {
		family = unix.AF_INET
	}
	size := unix.SizeofNlMsghdr + unix.SizeofRtMsg + unix.SizeofRtAttr + len(dst)
	b := make([]byte, 0, size)
	b = binary.NativeEndian.AppendUint32(b, uint32(size))
	b = binary.NativeEndian.AppendUint16(b, unix.RTM_GETROUTE)
	b = binary.NativeEndian.AppendUint16(b, unix.NLM_F_REQUEST)
	b = binary.NativeEndian.AppendUint32(b, seq)
	b = binary.NativeEndian.AppendUint32(b, 0) // the kernel knows the socket's port
	b = append(b, family, byte(a.BitLen()))
	b = append(b, make([]byte, unix.SizeofRtMsg-2)...)
	b = binary.NativeEndian.AppendUint16(b, uint16(unix.SizeofRtAttr+len(dst)))
	b = binary.NativeEndian.AppendUint16(b, unix.RTA_DST)
	return append(b, dst...)
}

// rtmType is the offset of the route's type in an rtmsg.
const rtmType = 7

// parseRoute reads the kernel's answer. The answer is ours if it has the sequence
// number of the question.
func parseRoute(b []byte, seq uint32) (kind byte, ours bool, err error) {
	if len(b) < unix.SizeofNlMsghdr {
		return 0, false, fmt.Errorf("the kernel's answer of %d bytes is cut off", len(b))
	}
	size, what := binary.NativeEndian.Uint32(b), binary.NativeEndian.Uint16(b[4:])
	if binary.NativeEndian.Uint32(b[8:]) != seq {
		return 0, false, nil
	}
	if size < unix.SizeofNlMsghdr || uint64(size) > uint64(len(b)) {
		return 0, true, fmt.Errorf("the kernel's answer says %d bytes and has %d", size, len(b))
	}
	body := b[unix.SizeofNlMsghdr:size]
	switch {
	case what == unix.RTM_NEWROUTE && len(body) >= unix.SizeofRtMsg:
		return body[rtmType], true, nil
	case what == unix.NLMSG_ERROR && len(body) >= 4:
		return unix.RTN_UNSPEC, true, routeError(unix.Errno(-int32(binary.NativeEndian.Uint32(body))))
	}
	return 0, true, fmt.Errorf("the kernel answered with a message of type %d and %d bytes", what, len(body))
}

// routeError is nil for the errors by which the kernel reports a missing route: no
// route was found, an administrator forbids it, the host has no IPv6.
func routeError(e unix.Errno) error {
	switch e {
	case unix.ENETUNREACH, unix.EHOSTUNREACH, unix.EACCES, unix.EOPNOTSUPP, unix.EAFNOSUPPORT:
		return nil
	case 0:
		return errors.New("the kernel acknowledged the question and did not answer it")
	}
	return e
}
