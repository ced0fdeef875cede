package stack

import "sync/atomic"

// Drop is why something was dropped.
type Drop uint8

// The reasons.
const (
	// DropMalformed: headers that contradict each other or the frame's size.
	DropMalformed Drop = iota
	// DropForeign: a source or destination MAC that is not of this wire.
	DropForeign
	// DropVLAN: a VLAN tag.
	DropVLAN
	// DropMulticast: multicast or broadcast, by MAC or by address, other than what
	// ARP and neighbour discovery need.
	DropMulticast
	// DropEtherType: neither ARP nor IP, or an IP version that the sandbox has not.
	DropEtherType
	// DropOptions: IPv4 options, IPv6 extension headers.
	DropOptions
	// DropFragment: a part of an IP packet.
	DropFragment
	// DropSpoofed: a source address that is not the sandbox's.
	DropSpoofed
	// DropMartian: a destination that is on no wire, as a loopback address.
	DropMartian
	// DropProtocol: neither TCP nor UDP nor an answered kind of ICMP.
	DropProtocol
	// DropStray: a segment of no connection that is not worth an answer.
	DropStray
	// DropLimit: something that a limit of the sandbox forbids.
	DropLimit
	// DropTooLong: a datagram from outside that does not fit into the MTU.
	DropTooLong
	// DropFull: an answer by hand, or a datagram, for which there was no room.
	DropFull
	// DropGone: a frame for a wire whose other end is closed.
	DropGone
	// DropOversized: a frame that is longer than the MTU, and leaves no segmentation to do.
	DropOversized
	drops
)

var dropNames = [drops]string{
	"malformed", "foreign-mac", "vlan", "multicast", "ethertype", "options", "fragment",
	"spoofed", "martian", "protocol", "stray", "limit", "too-long", "full", "gone", "oversized",
}

func (d Drop) String() string {
	if d < drops {
		return dropNames[d]
	}
	return "unknown"
}

// Stats are what a wire has seen since it was attached.
type Stats struct {
	// Frames and bytes from the sandbox, and to it.
	FramesIn, BytesIn, FramesOut, BytesOut uint64
	// Dropped are frames and datagrams by reason. Reasons without one are missing.
	Dropped map[Drop]uint64
	// Connections and Flows are those of this moment; Stack is whether there is one.
	Connections, Flows int
	Stack              bool
}

type counters struct {
	framesIn, bytesIn, framesOut, bytesOut atomic.Uint64
	dropped                                [drops]atomic.Uint64
}

func (w *Wire) drop(why Drop) { w.counters.dropped[why].Add(1) }

// Stats returns w's statistics.
func (w *Wire) Stats() Stats {
	s := Stats{
		FramesIn: w.counters.framesIn.Load(), BytesIn: w.counters.bytesIn.Load(),
		FramesOut: w.counters.framesOut.Load(), BytesOut: w.counters.bytesOut.Load(),
		Dropped: map[Drop]uint64{},
	}
	for why := range w.counters.dropped {
		if n := w.counters.dropped[why].Load(); n > 0 {
			s.Dropped[Drop(why)] = n
		}
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	s.Connections, s.Flows, s.Stack = len(w.conns), len(w.flows), w.stack != nil
	return s
}
