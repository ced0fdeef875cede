package enginetest

import (
	"encoding/binary"
	"net/netip"

	"agentrun.dev/internal/network/wire"
)

const (
	flagFIN = 1 << iota
	flagSYN
	flagRST
	flagPSH
	flagACK
)

const (
	tcpLen     = 20
	tcpSegment = 1340 // payload at an MTU of 1400, over IPv6
	tcpLongest = 60000
	tcpWindow  = 1<<16 - 1
)

// segment is a received TCP segment.
type segment struct {
	packet
	header   []byte
	seq, ack uint32
	flags    byte
	window   uint32
	data     []byte
}

// lanConn is a TCP connection to the lan, which returns the bytes that it gets. It
// never retransmits: no frame to a sandbox is lost.
type lanConn struct {
	next, acked uint32 // the next byte to send, and the first one that the sandbox has not acknowledged
	window      uint32 // how many bytes the sandbox accepts beyond acked
	want        uint32 // the next byte that the sandbox will send
	pending     []byte // bytes to be returned
	closing     bool   // the sandbox has sent its FIN
	closed      bool   // the lan has sent its FIN
}

// tcp takes a segment of any connection. A segment of no known connection is reset.
func (l *lan) tcp(h wire.Header, p packet) [][]byte {
	b := p.data
	if len(b) < tcpLen || int(b[12]>>4)*4 > len(b) {
		return nil
	}
	s := segment{
		packet: p, header: b, seq: binary.BigEndian.Uint32(b[4:]), ack: binary.BigEndian.Uint32(b[8:]), flags: b[13],
		window: uint32(binary.BigEndian.Uint16(b[14:])), data: b[int(b[12]>>4)*4:],
	}
	if h.Segmented() {
		l.longest[0] = max(l.longest[0], len(s.data))
	}
	port := binary.BigEndian.Uint16(b[2:])
	to := netip.AddrPortFrom(p.to, port).String()
	key := to + string(b[:2])
	c := l.conns[key]
	switch {
	case s.flags&flagRST != 0:
		delete(l.conns, key)
		return nil
	case s.flags&flagSYN != 0:
		if c == nil {
			l.dials = append(l.dials, to)
		}
		if port != lanEchoPort {
			return [][]byte{s.reply(flagRST|flagACK, 0, s.seq+1, nil)}
		}
		const first = 1000
		l.conns[key] = &lanConn{next: first + 1, acked: first + 1, window: s.window, want: s.seq + 1}
		return [][]byte{s.reply(flagSYN|flagACK, first, s.seq+1, nil)}
	case c == nil:
		return [][]byte{s.reply(flagRST, s.ack, 0, nil)}
	}
	return c.take(l, s)
}

// take takes a segment of a connection, and returns the segments that may be sent
// now.
func (c *lanConn) take(l *lan, s segment) (out [][]byte) {
	c.acked, c.window = s.ack, s.window
	if s.seq == c.want {
		c.pending = append(c.pending, s.data...)
		c.want += uint32(len(s.data))
		if s.flags&flagFIN != 0 && !c.closing {
			c.closing = true
			c.want++
		}
	}
	for {
		room := int(c.window) - int(c.next-c.acked)
		n := min(len(c.pending), tcpLongest, room)
		if n <= 0 {
			break
		}
		l.longest[1] = max(l.longest[1], n)
		l.echoed += n
		out = append(out, s.reply(flagACK|flagPSH, c.next, c.want, c.pending[:n]))
		c.pending = c.pending[n:]
		c.next += uint32(n)
	}
	if c.closing && !c.closed && len(c.pending) == 0 {
		c.closed = true
		out = append(out, s.reply(flagACK|flagFIN, c.next, c.want, nil))
		c.next++
	}
	if len(out) == 0 && (len(s.data) > 0 || s.flags&flagFIN != 0) {
		out = append(out, s.reply(flagACK, c.next, c.want, nil))
	}
	return out
}

// reply is a segment back to the sender.
func (s segment) reply(flags byte, seq, ack uint32, data []byte) []byte {
	r := make([]byte, tcpLen, tcpLen+4+len(data))
	copy(r[0:], s.header[2:4])
	copy(r[2:], s.header[0:2])
	binary.BigEndian.PutUint32(r[4:], seq)
	binary.BigEndian.PutUint32(r[8:], ack)
	if flags&flagSYN != 0 { // the maximum segment size option
		r = append(r, 2, 4, tcpSegment>>8, tcpSegment&0xff)
	}
	r[12], r[13] = byte(len(r)/4)<<4, flags
	binary.BigEndian.PutUint16(r[14:], tcpWindow)
	size := 0
	if len(data) > tcpSegment {
		size = tcpSegment
	}
	return s.packet.reply(append(r, data...), size)
}
