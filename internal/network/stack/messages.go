package stack

import (
	"errors"
	"syscall"
	"unsafe"

	"golang.org/x/sys/unix"
	"gvisor.dev/gvisor/pkg/buffer"

	"agentrun.dev/internal/network/wire"
)

const (
	// headLen is how many bytes of a message precede the IP packet.
	headLen = wire.HeaderLen + wire.EthernetLen
	// batch is how many messages are read with one system call.
	batch = 8
	// maxPacket is the room for an IP packet. It is the largest size that package
	// buffer pools.
	maxPacket = 1 << 16
	// keepPacket is the size from which on a packet keeps the memory that it was read
	// into. A smaller packet is copied, since a connection may hold it for long.
	keepPacket = maxPacket / 2
)

// mmsghdr is struct mmsghdr of recvmmsg(2).
type mmsghdr struct {
	hdr unix.Msghdr
	len uint32
	_   [4]byte
}

// input is the memory into which one goroutine reads messages.
type input struct {
	heads   [batch][headLen]byte
	packets [batch]*buffer.View
	vectors [batch][2]unix.Iovec
	headers [batch]mmsghdr
}

func newInput() *input {
	in := &input{}
	for i := range in.headers {
		in.vectors[i][0].Base = &in.heads[i][0]
		in.vectors[i][0].SetLen(headLen)
		in.vectors[i][1].SetLen(maxPacket)
		in.headers[i].hdr.Iov = &in.vectors[i][0]
		in.headers[i].hdr.SetIovlen(2)
		in.renew(i)
	}
	return in
}

// renew gives message i memory of its own.
func (in *input) renew(i int) {
	in.packets[i] = buffer.NewViewSize(maxPacket)
	in.vectors[i][1].Base = &in.packets[i].AsSlice()[0]
}

func (in *input) release() {
	for i, v := range in.packets {
		v.Release()
		in.packets[i] = nil
	}
}

// receive reads the available messages, at most batch.
func (in *input) receive(fd int) (int, error) {
	for {
		// Invariant: headers point to vectors, and vectors to heads and packets. in
		// keeps all of them alive, and they do not move.
		n, _, errno := unix.Syscall6(unix.SYS_RECVMMSG, uintptr(fd), uintptr(unsafe.Pointer(&in.headers[0])),
			batch, unix.MSG_DONTWAIT, 0, 0)
		switch {
		case errno == 0:
			return int(n), nil
		case !errors.Is(errno, unix.EINTR):
			return 0, errno
		}
	}
}

// message returns message i: the bytes before the packet, and the packet. It returns
// nil if the message is too short or too long.
func (in *input) message(i int) (head, packet []byte) {
	n := int(in.headers[i].len)
	if n < headLen || in.headers[i].hdr.Flags&unix.MSG_TRUNC != 0 {
		return nil, nil
	}
	return in.heads[i][:], in.packets[i].AsSlice()[:n-headLen]
}

// take returns the first n bytes of packet i; the first headers bytes of these are
// its headers. The caller owns the result. The headers are in memory of their own:
// netstack keeps a copy of them and reads them again later, which would copy
// everything in the same memory.
func (in *input) take(i, headers, n int) buffer.Buffer {
	packet := in.packets[i].AsSlice()[:n]
	all := buffer.MakeWithView(buffer.NewViewWithData(packet[:headers]))
	if n == headers {
		return all
	}
	data := in.packets[i]
	if n < keepPacket {
		data = buffer.NewViewWithData(packet[headers:])
	} else {
		in.renew(i)
		data.CapLength(n)
		data.TrimFront(headers)
	}
	rest := buffer.MakeWithView(data)
	all.Merge(&rest)
	return all
}

// sendMessage sends one message of several parts, or fails with EAGAIN.
func sendMessage(fd int, vectors []unix.Iovec) error {
	h := unix.Msghdr{Iov: &vectors[0]}
	h.SetIovlen(len(vectors))
	for {
		// Invariant: h points to vectors, which the caller keeps alive and which do
		// not move.
		_, _, errno := unix.Syscall(unix.SYS_SENDMSG, uintptr(fd), uintptr(unsafe.Pointer(&h)), unix.MSG_DONTWAIT|unix.MSG_NOSIGNAL)
		switch {
		case errno == 0:
			return nil
		case errno != syscall.EINTR:
			return errno
		}
	}
}
