package virtio

import (
	"encoding/binary"
	"errors"
	"fmt"

	"agentrun.dev/internal/network/wire"
	"agentrun.dev/internal/vmm/guestmem"
	"golang.org/x/sys/unix"
)

// usedBuffer is a buffer of the guest, and how much of it is written.
type usedBuffer struct {
	head uint16
	size uint32
}

// room is what there is for a frame in the guest.
type room int

const (
	enough room = iota
	later       // when the guest gives more buffers, or the device goes on
	never       // as the guest makes its buffers
)

// deliver moves one frame to the guest (§5.1.6.4). It looks at the frame and for
// buffers first, so that a frame without room stays in the socket.
func (n *Net) deliver(fd int) verdict {
	n.mu.Lock()
	defer n.mu.Unlock()
	if !n.running() {
		return waitWake
	}
	if n.held != nil {
		return n.deliverHeld()
	}
	length, next := n.peek(fd)
	if next != again {
		return next
	}
	if length < wire.HeaderLen {
		return n.drop(fd)
	}
	h, frame := wire.Get(n.head[:]), length-wire.HeaderLen
	if h.Check(frame) != nil || !h.Segmented() && frame > n.maxFrame() {
		return n.drop(fd)
	}
	if !n.takes(h) {
		return n.hold(fd, h, length)
	}
	if !n.negotiated(netGuestCsum) {
		h.Flags = 0 // DataValid
	}
	switch n.reserve(netHeaderLen + frame) {
	case later:
		return waitWake
	case never:
		return n.drop(fd)
	}
	return n.fill(fd, h, frame)
}

// peek looks at the next message: its header is in n.head, its length returned.
func (n *Net) peek(fd int) (int, verdict) {
	var head [1][]byte
	head[0] = n.head[:wire.HeaderLen]
	length, _, _, _, err := unix.RecvmsgBuffers(fd, head[:], nil, unix.MSG_PEEK|unix.MSG_TRUNC|unix.MSG_DONTWAIT)
	switch {
	case errors.Is(err, unix.EAGAIN):
		return 0, waitSocket
	case errors.Is(err, unix.EINTR):
		return n.peek(fd)
	case err != nil, length == 0 && hungUp(fd):
		return 0, finished
	}
	return length, again
}

// drop loses the next message.
func (n *Net) drop(fd int) verdict {
	n.stats.RxDropped++
	if _, err := unix.Read(fd, n.head[:1]); err != nil && !errors.Is(err, unix.EINTR) {
		return finished
	}
	return again
}

// takes reports whether the guest does what the header of a frame leaves to it.
func (n *Net) takes(h wire.Header) bool {
	switch h.GSO {
	case wire.GSONone:
		return h.Flags&wire.NeedsChecksum == 0 || n.negotiated(netGuestCsum)
	case wire.GSOTCPv4:
		return n.negotiated(netGuestCsum | netGuestTSO4)
	case wire.GSOTCPv6:
		return n.negotiated(netGuestCsum | netGuestTSO6)
	}
	return false // ECN was not offered
}

// reserve takes buffers for so many bytes, or none: one, or as many as are needed
// of a guest that takes frames in several. They are in n.buffers, cut to the
// length, and n.pieces.
func (n *Net) reserve(length int) room {
	n.buffers, n.pieces = n.buffers[:0], n.pieces[:0]
	mergeable := n.negotiated(netMergeable)
	slots := uint16(0)
	for rest := length; rest > 0; {
		c, ok := n.popOrListen(netRx)
		if !ok {
			n.unreserve()
			// All descriptors are here already: there will be no more.
			if n.live && slots >= n.ctx.Queues[netRx].size {
				return never
			}
			return later
		}
		slots += c.slots
		has := size(c.Writable)
		n.buffers = append(n.buffers, usedBuffer{c.Head, uint32(min(has, uint64(rest)))})
		n.pieces = appendUpTo(n.pieces, c.Writable, rest)
		switch {
		case mergeable && has < netHeaderLen:
			// §5.1.6.3.1: each buffer has room for the header at least.
			n.fail(fmt.Errorf("queue %d: %w: a buffer of %d bytes", netRx, ErrQueue, has))
			return later
		case !mergeable && has < uint64(rest), len(n.pieces) > guestmem.MaxPieces:
			n.unreserve()
			return never
		}
		rest -= int(min(has, uint64(rest)))
	}
	return enough
}

// appendUpTo appends the first n bytes of the ranges.
func appendUpTo(to, ranges []guestmem.Range, n int) []guestmem.Range {
	for _, r := range ranges {
		if n == 0 {
			break
		}
		r.Len = uint32(min(int(r.Len), n))
		n -= int(r.Len)
		to = append(to, r)
	}
	return to
}

// unreserve puts the buffers back.
func (n *Net) unreserve() {
	for range n.buffers {
		n.ctx.Queues[netRx].Unpop()
	}
	n.buffers, n.pieces = n.buffers[:0], n.pieces[:0]
}

// fill reads the next message, whose header and length are known, into the
// buffers that were reserved.
func (n *Net) fill(fd int, h wire.Header, frame int) verdict {
	body, err := n.begin(h)
	if err == nil {
		var k int
		if k, err = n.ctx.Mem.ReadMessage(fd, n.head[:wire.HeaderLen], body); err == nil && k != wire.HeaderLen+frame {
			err = fmt.Errorf("a message of %d bytes has become one of %d", wire.HeaderLen+frame, k)
		}
	}
	return n.finish(frame, err)
}

// put copies a frame, which leaves nothing to do, into the buffers that were
// reserved.
func (n *Net) put(frame []byte) verdict {
	body, err := n.begin(wire.Header{})
	if err == nil {
		_, err = scatter(n.ctx.Mem, body, frame)
	}
	return n.finish(len(frame), err)
}

// begin writes the header to the buffers that were reserved, and returns where
// the frame belongs.
func (n *Net) begin(h wire.Header) ([]guestmem.Range, error) {
	var header [netHeaderLen]byte
	h.Put(header[:])
	binary.LittleEndian.PutUint16(header[wire.HeaderLen:], uint16(len(n.buffers))) // 1 without mergeable ones
	if _, err := scatter(n.ctx.Mem, n.pieces, header[:]); err != nil {
		return nil, err
	}
	return skip(n.pieces, netHeaderLen), nil
}

// finish gives the buffers to the guest, all at the same time: it expects all
// buffers of a frame when it sees the first (§5.1.6.4).
func (n *Net) finish(frame int, err error) verdict {
	q := n.ctx.Queues[netRx]
	for _, b := range n.buffers {
		if err == nil {
			err = q.fill(b.head, b.size)
		}
	}
	if err == nil {
		err = q.publish()
	}
	if err != nil {
		n.fail(fmt.Errorf("queue %d: %w", netRx, err))
		return waitWake
	}
	n.announce(netRx)
	n.quiet(netRx) // new buffers are of no interest before there are none
	n.stats.RxFrames++
	n.stats.RxBytes += uint64(frame)
	return again
}

// heldFrame is a frame that leaves something to do which the guest does not. It
// has left the socket, and waits for buffers of the guest. It is no part of a
// saved device: a fork has another wire.
type heldFrame struct {
	header  wire.Header
	frame   []byte
	scratch []byte
	next    int // number of the next segment
}

// hold takes a message out of the socket to complete it.
func (n *Net) hold(fd int, h wire.Header, length int) verdict {
	message := make([]byte, length)
	k, err := unix.Read(fd, message)
	switch {
	case errors.Is(err, unix.EINTR), errors.Is(err, unix.EAGAIN):
		return again
	case err != nil:
		return finished
	case k != length:
		n.stats.RxDropped++
		return again
	}
	f := &heldFrame{header: h, frame: message[wire.HeaderLen:]}
	if !h.Segmented() {
		h.Complete(f.frame)
	} else {
		f.scratch = make([]byte, 0, min(len(f.frame), int(h.SegmentSize)+maxHeaders))
	}
	n.held = f
	return again
}

// maxHeaders is the usual most of the headers of a segment; others are copied once
// more.
const maxHeaders = wire.EthernetLen + 40 + 60

// deliverHeld hands out as much of the held frame as there is room for.
func (n *Net) deliverHeld() verdict {
	f, next := n.held, again
	give := func(s []byte) bool {
		switch {
		case len(s) > n.maxFrame():
			n.stats.RxDropped++
		default:
			switch n.reserve(netHeaderLen + len(s)) {
			case later:
				next = waitWake
				return false
			case never:
				n.stats.RxDropped++
			case enough:
				if next = n.put(s); next != again {
					return false
				}
			}
		}
		f.next++
		return true
	}
	if !f.header.Segmented() {
		give(f.frame)
	} else if f.header.Segments(f.frame, f.scratch, f.next, give) != nil {
		n.stats.RxDropped++
	}
	if next == again {
		n.held = nil
	}
	return next
}
