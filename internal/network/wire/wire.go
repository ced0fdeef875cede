// Package wire owns the format of the datagrams on a sandbox's wire. Each datagram is
// a header followed by one Ethernet frame.
//
// The header is struct virtio_net_hdr of virtio 1.2 §5.1.6 in its short form, without
// num_buffers, little endian. It says which work the frame leaves to its receiver: to
// complete a checksum, or to cut one long TCP segment into many (GSO). Linux and
// gVisor write and read the same bytes.
package wire

import (
	"encoding/binary"
	"errors"
	"fmt"
)

const (
	// HeaderLen is the size of an encoded Header.
	HeaderLen = 10
	// EthernetLen is the size of an Ethernet header: two addresses and a type.
	EthernetLen = 14
	// MaxFrame is the longest frame: the longest IPv4 packet in Ethernet.
	MaxFrame = EthernetLen + 1<<16 - 1
	// MaxMessage is the longest datagram on a wire.
	MaxMessage = HeaderLen + MaxFrame
)

// Flags of a Header.
const (
	// NeedsChecksum: the checksum field contains only the sum of the pseudo header.
	// The receiver adds the sum from ChecksumStart to the end of the frame.
	NeedsChecksum = 1
	// DataValid: the sender vouches for the checksums.
	DataValid = 2
)

// Values of Header.GSO. ECN can be added to the TCP types: only the first segment
// then has the CWR flag.
const (
	GSONone  = 0
	GSOTCPv4 = 1
	GSOTCPv6 = 4
	GSOECN   = 0x80
)

// Sizes and offsets in the headers of TCP and IP.
const (
	tcpLen        = 20 // without options
	tcpChecksumAt = 16
	ipv4Len       = 20
	ipv6Len       = 40
)

// ErrMessage says that a message violates the format of a wire. Its receiver drops
// it.
var ErrMessage = errors.New("malformed message on a wire")

// Header says which work the frame after it leaves to the receiver. The zero Header
// precedes a complete frame.
type Header struct {
	Flags uint8
	// GSO is GSONone, or the kind of segment to be cut up.
	GSO uint8
	// HeadersLen is the size of the frame's headers up to the end of TCP's header. It
	// is a hint that receivers do not rely on.
	HeadersLen uint16
	// SegmentSize is how many bytes of TCP payload each segment gets. It is used only
	// with GSO.
	SegmentSize uint16
	// ChecksumStart is the offset in the frame from which on bytes are summed.
	// ChecksumOffset is the distance from there to the checksum. Both are used only
	// with NeedsChecksum.
	ChecksumStart, ChecksumOffset uint16
}

// Put encodes h into the first HeaderLen bytes of b.
func (h Header) Put(b []byte) {
	_ = b[HeaderLen-1]
	b[0], b[1] = h.Flags, h.GSO
	binary.LittleEndian.PutUint16(b[2:], h.HeadersLen)
	binary.LittleEndian.PutUint16(b[4:], h.SegmentSize)
	binary.LittleEndian.PutUint16(b[6:], h.ChecksumStart)
	binary.LittleEndian.PutUint16(b[8:], h.ChecksumOffset)
}

// Get decodes the first HeaderLen bytes of b without checking them. Check does that.
func Get(b []byte) Header {
	_ = b[HeaderLen-1]
	return Header{
		Flags:          b[0],
		GSO:            b[1],
		HeadersLen:     binary.LittleEndian.Uint16(b[2:]),
		SegmentSize:    binary.LittleEndian.Uint16(b[4:]),
		ChecksumStart:  binary.LittleEndian.Uint16(b[6:]),
		ChecksumOffset: binary.LittleEndian.Uint16(b[8:]),
	}
}

// Parse splits a message into header and frame, and checks them. The frame is a
// part of the message. An error wraps ErrMessage.
func Parse(message []byte) (Header, []byte, error) {
	if len(message) < HeaderLen {
		return Header{}, nil, fmt.Errorf("%w: %d bytes are no header", ErrMessage, len(message))
	}
	h, frame := Get(message), message[HeaderLen:]
	if err := h.Check(len(frame)); err != nil {
		return Header{}, nil, err
	}
	return h, frame, nil
}

// Segmented reports whether the frame is one long TCP segment to be cut up.
func (h Header) Segmented() bool { return h.GSO != GSONone }

// Check refuses a header that does not fit a frame of n bytes, and frames that are
// too short or too long. It does not look into the frame: Segments checks that the
// frame has TCP headers. An error wraps ErrMessage.
func (h Header) Check(n int) error {
	start, offset := int(h.ChecksumStart), int(h.ChecksumOffset)
	switch {
	case n < EthernetLen || n > MaxFrame:
		return fmt.Errorf("%w: a frame of %d bytes (%d to %d are possible)", ErrMessage, n, EthernetLen, MaxFrame)
	case h.Flags&^(NeedsChecksum|DataValid) != 0:
		return fmt.Errorf("%w: flags %#x", ErrMessage, h.Flags)
	case h.Flags&NeedsChecksum != 0 && (start < EthernetLen || start+offset+2 > n):
		return fmt.Errorf("%w: a checksum of the bytes from %d on, at %d, in a frame of %d", ErrMessage, start, start+offset, n)
	}
	switch h.GSO {
	case GSONone:
		return nil
	case GSOTCPv4, GSOTCPv4 | GSOECN, GSOTCPv6, GSOTCPv6 | GSOECN:
	default:
		return fmt.Errorf("%w: segmentation of type %#x", ErrMessage, h.GSO)
	}
	switch {
	case h.Flags&NeedsChecksum == 0 || offset != tcpChecksumAt:
		return fmt.Errorf("%w: a segment to be cut up without a TCP checksum to be completed", ErrMessage)
	case start < EthernetLen+h.ipLen() || start+tcpLen > n:
		return fmt.Errorf("%w: a TCP header at %d in a frame of %d bytes", ErrMessage, start, n)
	case h.SegmentSize == 0:
		return fmt.Errorf("%w: segments of 0 bytes", ErrMessage)
	case int(h.HeadersLen) > n:
		return fmt.Errorf("%w: headers of %d bytes in a frame of %d", ErrMessage, h.HeadersLen, n)
	}
	return nil
}

// ipLen is the size of the IP header of a segment without options.
func (h Header) ipLen() int {
	if h.GSO&^GSOECN == GSOTCPv6 {
		return ipv6Len
	}
	return ipv4Len
}
