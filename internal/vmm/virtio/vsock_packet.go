package virtio

import "encoding/binary"

// Operations, virtio 1.2 §5.10.6.
const (
	opRequest       = 1
	opResponse      = 2
	opReset         = 3
	opShutdown      = 4
	opData          = 5
	opCreditUpdate  = 6
	opCreditRequest = 7
)

// Flags of opShutdown, §5.10.6.5.
const (
	shutReceive = 1 // the sender of the packet will receive no more
	shutSend    = 2 // it will send no more
	shutBoth    = shutReceive | shutSend
)

const (
	vsockHeaderLen = 44
	vsockStream    = 1 // socket type
)

// vsockHeader is struct virtio_vsock_hdr, §5.10.6.
type vsockHeader struct {
	srcCID, dstCID   uint64
	srcPort, dstPort uint32
	len              uint32
	kind             uint16
	op               uint16
	flags            uint32
	bufAlloc         uint32
	fwdCnt           uint32
}

// parseVsockHeader reads the first vsockHeaderLen bytes of p.
func parseVsockHeader(p []byte) vsockHeader {
	le := binary.LittleEndian
	_ = p[vsockHeaderLen-1]
	return vsockHeader{
		srcCID: le.Uint64(p[0:]), dstCID: le.Uint64(p[8:]),
		srcPort: le.Uint32(p[16:]), dstPort: le.Uint32(p[20:]),
		len: le.Uint32(p[24:]), kind: le.Uint16(p[28:]), op: le.Uint16(p[30:]),
		flags: le.Uint32(p[32:]), bufAlloc: le.Uint32(p[36:]), fwdCnt: le.Uint32(p[40:]),
	}
}

// put writes the header to the first vsockHeaderLen bytes of p.
func (h vsockHeader) put(p []byte) {
	le := binary.LittleEndian
	_ = p[vsockHeaderLen-1]
	le.PutUint64(p[0:], h.srcCID)
	le.PutUint64(p[8:], h.dstCID)
	le.PutUint32(p[16:], h.srcPort)
	le.PutUint32(p[20:], h.dstPort)
	le.PutUint32(p[24:], h.len)
	le.PutUint16(p[28:], h.kind)
	le.PutUint16(p[30:], h.op)
	le.PutUint32(p[32:], h.flags)
	le.PutUint32(p[36:], h.bufAlloc)
	le.PutUint32(p[40:], h.fwdCnt)
}

// key names the connection a packet from the guest belongs to.
func (h vsockHeader) key() connKey { return connKey{host: h.dstPort, guest: h.srcPort} }

// resetReply is the RST that answers a packet from the guest.
func (h vsockHeader) resetReply() vsockHeader {
	return vsockHeader{
		srcCID: h.dstCID, dstCID: h.srcCID, srcPort: h.dstPort, dstPort: h.srcPort,
		kind: h.kind, op: opReset,
	}
}
