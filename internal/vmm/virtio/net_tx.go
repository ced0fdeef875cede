package virtio

import (
	"errors"

	"agentrun.dev/internal/network/wire"
	"agentrun.dev/internal/vmm/guestmem"
	"golang.org/x/sys/unix"
)

// maxUnannounced bounds the sent frames that are not announced while there are more to
// send. The guest's programs can send further frames only after the announcement, but
// each interrupt costs the guest three exits.
const maxUnannounced = 16

// maxAtOnce bounds the frames that a vCPU sends for one notification.
const maxAtOnce = 16

// transmitNow sends the guest's frames on the vCPU's thread, because waking another
// thread costs more than sending a frame. It never waits. It reports whether all frames
// were sent. If not, the pump must continue: the wire is full, the device is busy, or
// there are many frames.
func (n *Net) transmitNow() (sent bool) {
	if !n.plug.TryLock() {
		return false
	}
	defer n.plug.Unlock()
	if !n.pumping || !n.mu.TryLock() {
		return false
	}
	defer n.mu.Unlock()
	// This fails only if the socket is closed, and then the pump has ended, too.
	_ = n.raw.Control(func(fd uintptr) {
		for range maxAtOnce {
			if next := n.transmitOne(int(fd)); next != again {
				sent = next == waitWake
				return
			}
		}
		n.announceSent()
	})
	return sent
}

// transmit is the pump's step: it sends one frame of the guest.
func (n *Net) transmit(fd int) verdict {
	n.mu.Lock()
	defer n.mu.Unlock()
	return n.transmitOne(fd)
}

// transmitOne sends one frame of the guest (§5.1.6.2). The caller holds mu.
func (n *Net) transmitOne(fd int) verdict {
	c, ok := n.popOrListen(netTx)
	if !ok {
		n.announceSent()
		return waitWake
	}
	frame, ok := n.outgoing(c.Readable)
	if ok {
		err := n.ctx.Mem.WriteMessage(fd, n.head[:wire.HeaderLen], frame)
		if errors.Is(err, unix.EAGAIN) {
			n.ctx.Queues[netTx].Unpop() // the frame stays in the queue, which is saved with the guest
			n.announceSent()
			n.quiet(netTx) // the pump waits for the wire, and then looks at the queue anyway
			return waitSocket
		}
		ok = err == nil // otherwise the other end is closed, or the kernel has no memory
	}
	if ok {
		n.stats.TxFrames++
		n.stats.TxBytes += size(frame)
	} else {
		n.stats.TxDropped++
	}
	n.push(netTx, c.Head, 0)
	if n.unannounced++; n.unannounced >= maxUnannounced || !n.live || !n.ctx.Queues[netTx].more() {
		n.announceSent()
	}
	return again
}

// announceSent announces sent frames to the guest. The caller holds mu. A paused
// device does so when it continues. A device restored from a snapshot begins with an
// interrupt in any case (MMIO.Resume).
func (n *Net) announceSent() {
	if n.unannounced > 0 && n.running() {
		n.announce(netTx)
		n.unannounced = 0
	}
}

// outgoing checks a frame, puts its header into n.head, and returns the rest. It
// modifies ranges. It does not rely on the content of the frame, because the
// guest can change it at any time.
func (n *Net) outgoing(ranges []guestmem.Range) (frame []guestmem.Range, ok bool) {
	length := size(ranges)
	if length < netHeaderLen || length > netHeaderLen+wire.MaxFrame {
		return nil, false
	}
	if _, err := gather(n.ctx.Mem, ranges, n.head[:]); err != nil {
		return nil, false
	}
	h := wire.Get(n.head[:])
	h.Flags &^= wire.DataValid // only a device may set it
	frame = skip(ranges, netHeaderLen)
	if h.Check(int(length-netHeaderLen)) != nil || !n.mayLeave(h) ||
		!h.Segmented() && length > uint64(netHeaderLen+n.maxFrame()) {
		return nil, false
	}
	h.Put(n.head[:])
	return frame, true
}

// mayLeave reports whether the guest may use the offload in the header of its
// frame (§5.1.6.2.1).
func (n *Net) mayLeave(h wire.Header) bool {
	if h.Flags&wire.NeedsChecksum != 0 && !n.negotiated(netCsum) {
		return false
	}
	switch h.GSO {
	case wire.GSONone:
		return true
	case wire.GSOTCPv4:
		return n.negotiated(netHostTSO4)
	case wire.GSOTCPv6:
		return n.negotiated(netHostTSO6)
	}
	return false // ECN was not offered
}
