package stack

import "sync/atomic"

// Drop is the reason why a frame or datagram was dropped.
type Drop uint8

// The reasons.
const (
	// DropMalformed: headers that contradict each other or the frame's size.
	DropMalformed Drop = iota
	// DropForeign: a source or destination MAC that does not belong to this wire.
	DropForeign
	// DropVLAN: a VLAN tag.
	DropVLAN
	// DropMulticast: multicast or broadcast, by MAC or by address, that neither ARP
	// nor neighbour discovery needs.
	DropMulticast
	// DropEtherType: neither ARP nor IP, or an IP version that the sandbox does not
	// have.
	DropEtherType
	// DropOptions: IPv4 options, IPv6 extension headers.
	DropOptions
	// DropFragment: a part of an IP packet.
	DropFragment
	// DropSpoofed: a source address that is not the sandbox's.
	DropSpoofed
	// DropMartian: a destination that cannot be on a wire, such as a loopback
	// address.
	DropMartian
	// DropProtocol: neither TCP nor UDP nor an answered kind of ICMP.
	DropProtocol
	// DropStray: a segment that belongs to no connection and gets no answer.
	DropStray
	// DropLimit: a limit of the sandbox was reached.
	DropLimit
	// DropTooLong: a datagram from outside that does not fit into the MTU.
	DropTooLong
	// DropFull: no room for a handmade answer, or for a datagram.
	DropFull
	// DropGone: a frame for a wire whose other end is closed.
	DropGone
	// DropOversized: a frame that is longer than the MTU although it leaves no
	// segmentation to do.
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

// Stats are the statistics of a wire since it was attached.
type Stats struct {
	// Frames and bytes from the sandbox, and to it.
	FramesIn, BytesIn, FramesOut, BytesOut uint64
	// Dropped counts dropped frames and datagrams by reason. Reasons with a count of
	// 0 are missing.
	Dropped map[Drop]uint64
	// Connections and Flows are current numbers. Stack says whether the wire has a
	// netstack now.
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
