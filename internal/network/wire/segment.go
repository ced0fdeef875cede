package wire

import (
	"encoding/binary"
	"fmt"
)

// Complete completes the checksum of a frame in place, if the checked header leaves
// that to the receiver.
func (h Header) Complete(frame []byte) {
	if h.Flags&NeedsChecksum == 0 {
		return
	}
	at := int(h.ChecksumStart) + int(h.ChecksumOffset)
	// The summed bytes contain the sum of the pseudo header, at the place of the
	// checksum.
	sum := fold(add(0, frame[h.ChecksumStart:]))
	if sum = ^sum; sum == 0 {
		sum = 0xffff // an equal sum; 0 would mean that a UDP datagram has no checksum
	}
	binary.BigEndian.PutUint16(frame[at:], sum)
}

// Segments cuts up a long TCP segment, as its checked header says. It calls yield
// with each complete frame, starting with number from, until yield returns false. All
// frames are in one buffer, which yield must not keep. Segments uses scratch as that
// buffer if it is large enough. It does not change frame. If the frame is not of the
// kind that the header says, the error wraps ErrMessage.
func (h Header) Segments(frame, scratch []byte, from int, yield func(segment []byte) bool) error {
	payload, err := h.payloadAt(frame)
	if err != nil {
		return err
	}
	ip, tcp := EthernetLen, int(h.ChecksumStart)
	size := int(h.SegmentSize)
	flags, sequence := frame[tcp+13], binary.BigEndian.Uint32(frame[tcp+4:])
	id := binary.BigEndian.Uint16(frame[ip+4:])
	if cap(scratch) < payload+size {
		scratch = make([]byte, payload+size)
	}
	for i, off := from, payload+from*size; off < len(frame); i, off = i+1, off+size {
		data := frame[off:min(len(frame), off+size)]
		s := append(append(scratch[:0], frame[:payload]...), data...)
		if h.ipLen() == ipv6Len {
			binary.BigEndian.PutUint16(s[ip+4:], uint16(len(s)-ip-ipv6Len))
		} else {
			binary.BigEndian.PutUint16(s[ip+2:], uint16(len(s)-ip))
			binary.BigEndian.PutUint16(s[ip+4:], id+uint16(i))
			s[ip+10], s[ip+11] = 0, 0
			binary.BigEndian.PutUint16(s[ip+10:], ^fold(add(0, s[ip:ip+int(s[ip]&15)*4])))
		}
		binary.BigEndian.PutUint32(s[tcp+4:], sequence+uint32(off-payload))
		s[tcp+13] = flags
		if i > 0 {
			s[tcp+13] &^= tcpCWR
		}
		if off+size < len(frame) {
			s[tcp+13] &^= tcpFIN | tcpPSH
		}
		s[tcp+tcpChecksumAt], s[tcp+tcpChecksumAt+1] = 0, 0
		binary.BigEndian.PutUint16(s[tcp+tcpChecksumAt:], ^fold(add(h.pseudo(s), s[tcp:])))
		if !yield(s) {
			return nil
		}
	}
	return nil
}

// Flags in byte 13 of a TCP header.
const (
	tcpFIN = 0x01
	tcpPSH = 0x08
	tcpCWR = 0x80
)

const protocolTCP = 6

// payloadAt is the offset of the TCP segment's payload.
func (h Header) payloadAt(frame []byte) (int, error) {
	kind, version := uint16(0x0800), byte(4)
	if h.ipLen() == ipv6Len {
		kind, version = 0x86dd, 6
	}
	tcp := int(h.ChecksumStart)
	payload := tcp + int(frame[tcp+12]>>4)*4
	switch {
	case binary.BigEndian.Uint16(frame[12:]) != kind || frame[EthernetLen]>>4 != version:
		return 0, fmt.Errorf("%w: a segment that is not in IPv%d", ErrMessage, version)
	case version == 4 && (int(frame[EthernetLen]&15)*4 != tcp-EthernetLen || frame[EthernetLen+9] != protocolTCP),
		// With extension headers, only the start of the checksum says where TCP's
		// header is.
		version == 6 && tcp == EthernetLen+ipv6Len && frame[EthernetLen+6] != protocolTCP:
		return 0, fmt.Errorf("%w: a segment whose TCP header is not at %d", ErrMessage, tcp)
	case payload < tcp+tcpLen || payload >= len(frame):
		return 0, fmt.Errorf("%w: a segment with a TCP header of %d bytes, at %d of %d", ErrMessage, payload-tcp, tcp, len(frame))
	}
	return payload, nil
}

// pseudo is the sum of the pseudo header of a segment.
func (h Header) pseudo(s []byte) uint32 {
	at, n := EthernetLen+12, 8
	if h.ipLen() == ipv6Len {
		at, n = EthernetLen+8, 32
	}
	return add(protocolTCP+uint32(len(s)-int(h.ChecksumStart)), s[at:at+n])
}

// add adds 16-bit words in network byte order to a sum (RFC 1071). The longest frame
// does not overflow the sum.
func add(sum uint32, b []byte) uint32 {
	for len(b) >= 2 {
		sum += uint32(b[0])<<8 | uint32(b[1])
		b = b[2:]
	}
	if len(b) == 1 {
		sum += uint32(b[0]) << 8
	}
	return sum
}

// fold reduces a sum to one word.
func fold(sum uint32) uint16 {
	sum = sum>>16 + sum&0xffff
	return uint16(sum>>16 + sum)
}
