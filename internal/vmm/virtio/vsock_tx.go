package virtio

import (
	"fmt"

	"agentrun.dev/internal/vmm/guestmem"
)

// serveTx handles packets from the guest, at most as many as the ring holds:
// see core.serve.
func (d *Vsock) serveTx() {
	q := d.ctx.Queues[vsockTx]
	for range q.size {
		c, ok := d.pop(vsockTx)
		if !ok {
			return
		}
		n := size(c.Readable)
		if err := d.takePacket(c.Readable, n); err != nil {
			d.fail(fmt.Errorf("queue %d: %w", vsockTx, err))
			return
		}
		d.push(vsockTx, c.Head, 0)
		d.finishTx(c.slots, n)
		if len(d.resets)+len(d.talking) > 0 {
			d.flush() // send them now: replies that pile up are dropped
		}
	}
}

// finishTx announces used transmit buffers, but not one by one. A driver does
// not wait for them, so most interrupts would be useless. And the answer to a
// request interrupts for the receive queue anyway, on the same line.
//
// That is safe because Linux looks at used transmit buffers for two reasons
// only: to free them, and to continue sending after the ring was full. The ring
// is full for one of two reasons. Either used and unannounced buffers occupy it:
// then they exceed a quarter of it, and were announced here. Or announced ones
// do: then the interrupt is on its way. The quarter is counted in descriptors,
// not in packets, because a packet may take many. vsockLazyBytes bounds the
// memory that the guest holds meanwhile. A driver that has masked the interrupt
// looks at the ring when it unmasks it, so then, too, all buffers count as
// announced.
func (d *Vsock) finishTx(slots uint16, n uint64) {
	d.lazySlots += uint32(slots)
	d.lazyBytes += n
	if d.lazySlots >= uint32(d.ctx.Queues[vsockTx].size)/4 || d.lazyBytes >= vsockLazyBytes {
		d.lazySlots, d.lazyBytes = 0, 0
		d.announce(vsockTx)
	}
}

// takePacket handles one packet of n bytes. It answers or drops bad packets
// (§5.10.6). An error means that guest memory could not be read.
func (d *Vsock) takePacket(packet []guestmem.Range, n uint64) error {
	d.stats.TxPackets++
	p := d.scratch()
	if n < vsockHeaderLen {
		d.stats.Dropped++
		return nil
	}
	if _, err := gather(d.ctx.Mem, packet, p[:vsockHeaderLen]); err != nil {
		return err
	}
	h := parseVsockHeader(p)
	packet = skip(packet, vsockHeaderLen)
	switch {
	case h.srcCID != GuestCID:
		d.stats.Dropped++ // with a false source there is no address to answer to
		return nil
	case h.dstCID != HostCID || h.kind != vsockStream:
		d.refuse(h) // §5.10.6.4 for the type; the host is the only valid destination
		return nil
	}
	c := d.conns[h.key()]
	if uint64(h.len) != n-vsockHeaderLen {
		if c != nil {
			c.drop(ErrVsockReset)
		}
		d.refuse(h)
		return nil
	}
	if c == nil {
		d.takeUnknown(h)
		return nil
	}
	return c.take(h, packet)
}

// refuse answers a packet with RST, unless the packet is itself a RST. Replies
// that wait for receive buffers are sent once per connection. If too many would
// pile up, they are dropped: the guest's next packet causes another.
func (d *Vsock) refuse(h vsockHeader) {
	if h.op == opReset {
		d.stats.Dropped++
		return
	}
	d.forgetGone(h.key())
	d.queueReset(h.resetReply())
}

func (d *Vsock) queueReset(r vsockHeader) {
	for _, waiting := range d.resets {
		if waiting == r {
			return
		}
	}
	if len(d.resets) >= vsockMaxResets {
		d.stats.Dropped++
		return
	}
	d.resets = append(d.resets, r)
}

// takeUnknown handles a packet without a connection. A request makes one; all
// other packets are refused.
func (d *Vsock) takeUnknown(h vsockHeader) {
	if h.op != opRequest || len(d.conns) >= MaxVsockConns {
		d.refuse(h)
		return
	}
	file, ok := d.accept(h.dstPort)
	if !ok {
		d.refuse(h)
		return
	}
	d.forgetReset(h.resetReply())
	d.forgetGone(h.key())
	c, err := d.newConn(h.key(), file)
	if err != nil {
		_ = file.Close() // it is not a usable socket
		d.refuse(h)
		return
	}
	c.open = true
	c.updateCredit(h)
	c.say(sayResponse)
}

// forgetReset drops a waiting RST for an earlier connection with the same
// ports, because it would hit the new one.
func (d *Vsock) forgetReset(r vsockHeader) {
	for i, waiting := range d.resets {
		if waiting == r {
			d.resets = append(d.resets[:i], d.resets[i+1:]...)
			return
		}
	}
}

// scratch is the buffer for one packet, made when first needed.
func (d *Vsock) scratch() []byte {
	if d.packet == nil {
		d.packet = make([]byte, vsockHeaderLen+vsockMaxData)
	}
	return d.packet
}
