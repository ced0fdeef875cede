package virtio

import (
	"encoding/binary"
	"errors"
	"fmt"

	"agentrun.dev/internal/network/wire"
	"agentrun.dev/internal/vmm/guestmem"
	"golang.org/x/sys/unix"
)

// usedBuffer is a buffer of the guest and the number of bytes written to it.
type usedBuffer struct {
	head uint16
	size uint32
}

// room says whether the guest has room for a frame.
type room int

const (
	enough room = iota
	later       // when the guest gives more buffers, or the device continues
	never       // the guest's buffers can never hold it
)

// deliver moves one frame to the guest (§5.1.6.4). It first peeks at the frame
// and takes buffers, so that a frame without room stays in the socket.
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

// peek peeks at the next message. It puts its header into n.head and returns
// its length.
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

// drop discards the next message.
func (n *Net) drop(fd int) verdict {
	n.stats.RxDropped++
	if _, err := unix.Read(fd, n.head[:1]); err != nil && !errors.Is(err, unix.EINTR) {
		return finished
	}
	return again
}

// takes reports whether the guest has accepted the offload that the header of a
// frame requires.
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

// reserve takes buffers for so many bytes, or no buffers at all. It takes one
// buffer, or several if the guest accepts frames in several. They are in
// n.buffers, cut to the length, and n.pieces.
func (n *Net) reserve(length int) room {
	n.buffers, n.pieces = n.buffers[:0], n.pieces[:0]
	mergeable := n.negotiated(netMergeable)
	slots := uint16(0)
	for rest := length; rest > 0; {
		c, ok := n.popOrListen(netRx)
		if !ok {
			n.unreserve()
			// The guest has given all of its descriptors already: more cannot
			// come.
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
			// §5.1.6.3.1: each buffer has room for at least the header.
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

// unreserve puts the reserved buffers back.
func (n *Net) unreserve() {
	for range n.buffers {
		n.ctx.Queues[netRx].Unpop()
	}
	n.buffers, n.pieces = n.buffers[:0], n.pieces[:0]
}

// fill reads the next message, whose header and length are known, into the
// reserved buffers.
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

// put copies a frame that needs no offload into the reserved buffers.
func (n *Net) put(frame []byte) verdict {
	body, err := n.begin(wire.Header{})
	if err == nil {
		_, err = scatter(n.ctx.Mem, body, frame)
	}
	return n.finish(len(frame), err)
}

// begin writes the header to the reserved buffers, and returns the place for
// the frame.
func (n *Net) begin(h wire.Header) ([]guestmem.Range, error) {
	var header [netHeaderLen]byte
	h.Put(header[:])
	binary.LittleEndian.PutUint16(header[wire.HeaderLen:], uint16(len(n.buffers))) // 1 without mergeable buffers
	if _, err := scatter(n.ctx.Mem, n.pieces, header[:]); err != nil {
		return nil, err
	}
	return skip(n.pieces, netHeaderLen), nil
}

// finish gives all buffers to the guest at the same time: when the guest sees
// the first buffer of a frame, it expects the others (§5.1.6.4).
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
	n.quiet(netRx) // new buffers do not matter until the current ones are used up
	n.stats.RxFrames++
	n.stats.RxBytes += uint64(frame)
	return again
}

// heldFrame is a frame whose offload the guest has not accepted. It was read
// from the socket and waits for buffers of the guest. It is not part of the
// saved state, because a fork has another wire.
type heldFrame struct {
	header  wire.Header
	frame   []byte
	scratch []byte
	next    int // number of the next segment
}

// hold reads a message from the socket to complete or segment it.
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

// maxHeaders is the usual maximum length of a segment's headers. If they are
// longer, the segment is copied once more.
const maxHeaders = wire.EthernetLen + 40 + 60

// deliverHeld delivers as many parts of the held frame as there is room for.
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
