package virtio

import (
	"errors"
	"os"
)

// A copy of a guest must not use its parent's connections, whose other ends
// belong to clients of the parent: it gets a RST for each. (§5.10.6.7 has an
// event that resets all of them. It would make every copy open a connection
// anew, for which the guest touches some hundred pages.) Only one connection,
// the standby, continues: the process that restores the copy attaches another
// end to it. The standby must have been idle when the guest was captured, so
// that neither side misses data.

// ConnectStandby is Connect for the connection that copies continue. A later
// call replaces it.
func (d *Vsock) ConnectStandby(port uint32, conn *os.File, result func(error)) {
	d.connect(port, conn, true, result)
}

// WakeOn makes the device call f, once and without its lock, when the host sends
// data on an open connection while the device is paused. Resume and WakeOn(nil)
// cancel that.
func (d *Vsock) WakeOn(f func()) {
	d.mu.Lock()
	defer d.unlock()
	d.knocked = f
	if f != nil {
		d.wakeBlocked() // data that has already arrived counts, too
	}
}

// errNoStandby is a mistake of the caller, which knows the saved state.
var errNoStandby = errors.New("vsock: the state has no standby connection")

// AttachStandby attaches another end to the standby connection of a restored guest,
// after MMIO.Restore and before Resume. Without it the connection is gone like the
// others. settled is called once, without the device's lock: when the guest has
// answered and the host has more data for it, or when the guest will not answer. The
// VMM can then give the guest other news. Until a copy is used it has no other work,
// and so no more memory of its own.
func (d *Vsock) AttachStandby(conn *os.File, settled func()) error {
	d.mu.Lock()
	defer d.unlock()
	s := d.saved
	if s.Host == 0 || !d.live {
		return errors.Join(errNoStandby, conn.Close())
	}
	c, err := d.newConn(connKey{host: s.Host, guest: s.Guest}, conn)
	if err != nil {
		return errors.Join(err, conn.Close())
	}
	c.open = true
	c.takenCnt, c.fwdCnt, c.toldCnt = s.Taken, s.Taken, s.Told
	c.sentCnt, c.peerAlloc, c.peerCnt = s.Sent, s.PeerAlloc, s.PeerCnt
	d.attached, d.settled, d.saved = c, settled, VsockConnState{}
	return nil
}

// settleGone sends the guest a RST for each connection that is gone. With a
// standby it waits until the guest has answered on it, because users wait for
// that first answer. If the guest sends on the other connections meanwhile, it
// gets a RST anyway.
func (d *Vsock) settleGone() {
	if d.saved.Host != 0 { // it was not attached
		d.gone = append(d.gone, connKey{host: d.saved.Host, guest: d.saved.Guest})
		d.saved = VsockConnState{}
	}
	if c := d.attached; c != nil {
		if !c.closed && !c.answered {
			return
		}
		d.attached = nil
		if !c.answered {
			d.used()
		}
	}
	for _, k := range d.gone {
		d.queueReset(resetOf(k))
	}
	d.gone = nil
}

// used notes that the host has data for the guest. If a copy has already
// answered, this is the start of its use.
func (d *Vsock) used() {
	if d.attached == nil && d.settled != nil {
		d.callbacks = append(d.callbacks, d.settled)
		d.settled = nil
	}
}

// forgetGone drops the RST for a connection that is gone, because its ports are
// used for a new one or the guest has already got a RST.
func (d *Vsock) forgetGone(k connKey) {
	for i, g := range d.gone {
		if g == k {
			d.gone = append(d.gone[:i], d.gone[i+1:]...)
			return
		}
	}
}

// resetOf returns the RST packet of a connection.
func resetOf(k connKey) vsockHeader {
	return vsockHeader{srcCID: HostCID, dstCID: GuestCID, srcPort: k.host, dstPort: k.guest, kind: vsockStream, op: opReset}
}
