package virtio

import (
	"fmt"
	"math/bits"

	"agentrun.dev/internal/vmm/guestmem"
)

// The control packets that a connection can have pending, in the order in which
// they are sent. Each is a bit, so a guest that gives no receive buffers costs
// no memory.
const (
	sayRequest = 1 << iota
	sayResponse
	sayCreditUpdate
	sayCreditRequest
	sayShutdown
)

// say marks a control packet as pending; Vsock.flush sends it.
func (c *vsockConn) say(what uint8) {
	if c.closed {
		return
	}
	if c.unsaid == 0 {
		c.dev.talking = append(c.dev.talking, c)
	}
	c.unsaid |= what
}

// flush sends pending control packets while there are receive buffers. It
// reports whether all were sent. They go before data.
func (d *Vsock) flush() bool {
	if !d.running() {
		return false
	}
	sent := 0
	for _, h := range d.resets {
		if !d.sendControl(h) {
			break
		}
		d.stats.Resets++
		sent++
	}
	d.resets = d.resets[:copy(d.resets, d.resets[sent:])]
	if len(d.resets) > 0 {
		return false
	}
	return d.flushTalking()
}

func (d *Vsock) flushTalking() bool {
	keep := d.talking[:0]
	full := false
	for _, c := range d.talking {
		for c.unsaid != 0 && !full {
			bit := uint8(1) << bits.TrailingZeros8(c.unsaid)
			if !d.sendControl(c.controlHeader(bit)) {
				full = true
				break
			}
			c.unsaid &^= bit
			if bit == sayResponse {
				c.unblock() // data may follow
			}
		}
		if c.unsaid != 0 {
			keep = append(keep, c)
		}
	}
	clear(d.talking[len(keep):])
	d.talking = keep
	return !full
}

func (c *vsockConn) controlHeader(bit uint8) vsockHeader {
	h := c.header()
	switch bit {
	case sayRequest:
		h.op = opRequest
	case sayResponse:
		h.op = opResponse
	case sayCreditUpdate:
		h.op = opCreditUpdate
	case sayCreditRequest:
		h.op = opCreditRequest
	case sayShutdown:
		h.op = opShutdown
		h.flags = uint32(c.hostShut)
	}
	return h
}

// sendControl puts a packet without payload into a receive buffer. It returns
// false if there is no buffer.
func (d *Vsock) sendControl(h vsockHeader) bool {
	c, room := d.rxBuffer()
	if room == 0 {
		return false
	}
	p := d.controlPacket[:]
	h.put(p)
	return d.sendPacket(c, p)
}

// rxBuffer takes a receive buffer and returns how much payload fits; 0 if there
// is no buffer. A buffer without room for payload is an error of the driver,
// because it could never be filled.
func (d *Vsock) rxBuffer() (Chain, int) {
	c, ok := d.pop(vsockRx)
	if !ok {
		return Chain{}, 0
	}
	n := size(c.Writable)
	if n <= vsockHeaderLen {
		d.fail(fmt.Errorf("%w: vsock receive buffer of %d bytes", ErrQueue, n))
		return Chain{}, 0
	}
	return c, int(min(n-vsockHeaderLen, vsockMaxData))
}

// sendPacket fills a receive buffer; unlock raises the interrupt.
func (d *Vsock) sendPacket(c Chain, p []byte) bool {
	if _, err := scatter(d.ctx.Mem, c.Writable, p); err != nil {
		d.fail(fmt.Errorf("queue %d: %w", vsockRx, err))
		return false
	}
	d.push(vsockRx, c.Head, uint32(len(p)))
	d.rxDirty = true
	d.stats.RxPackets++
	return true
}

// header is the start of every packet to the guest. It carries our credit, so
// the guest then knows how much was forwarded.
func (c *vsockConn) header() vsockHeader {
	c.toldCnt = c.fwdCnt
	return vsockHeader{
		srcCID: HostCID, dstCID: GuestCID, srcPort: c.key.host, dstPort: c.key.guest,
		kind: vsockStream, bufAlloc: VsockBuffer, fwdCnt: c.fwdCnt,
	}
}

// updateCredit stores how much room the guest has (§5.10.6.3).
func (c *vsockConn) updateCredit(h vsockHeader) {
	c.peerAlloc, c.peerCnt = h.bufAlloc, h.fwdCnt
	if c.credit() > 0 {
		c.unblock()
	}
}

// credit is how much room the guest has. The counters run freely. A guest that
// claims to have received more than was sent has no credit.
func (c *vsockConn) credit() uint32 {
	inFlight := c.sentCnt - c.peerCnt
	if inFlight >= c.peerAlloc {
		return 0
	}
	return c.peerAlloc - inFlight
}

// payload copies the next n bytes of a packet from the guest.
func (d *Vsock) payload(packet []guestmem.Range, n uint64) ([]byte, []guestmem.Range, error) {
	p := d.scratch()[:min(n, vsockMaxData)]
	if _, err := gather(d.ctx.Mem, packet, p); err != nil {
		return nil, nil, err
	}
	return p, skip(packet, uint64(len(p))), nil
}
