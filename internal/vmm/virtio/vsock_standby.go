package virtio

import (
	"errors"
	"os"
)

// A copy of a guest must not speak on its parent's connections, whose other
// ends belong to somebody else: it gets a RST for each. (§5.10.6.7 has an event
// that resets all of them. It would make every copy open a connection anew, in
// which the guest touches some hundred pages.) One connection, the standby,
// goes on: whoever restores the copy gives it another end. It must have been
// idle when the guest was captured, so that neither side misses anything.

// ConnectStandby is Connect for the connection that copies go on with. A
// further call replaces it.
func (d *Vsock) ConnectStandby(port uint32, conn *os.File, result func(error)) {
	d.connect(port, conn, true, result)
}

// WakeOn has f called, once and without the device's lock, when the host sends
// something on an open connection while the device is paused. Resume ends that, as
// does WakeOn(nil).
func (d *Vsock) WakeOn(f func()) {
	d.mu.Lock()
	defer d.unlock()
	d.knocked = f
	if f != nil {
		d.wakeBlocked() // what has come already counts
	}
}

// errNoStandby is a mistake of the caller, who knows what was saved.
var errNoStandby = errors.New("vsock: the state has no standby connection")

// AttachStandby gives the standby connection of a restored guest its other end, after
// MMIO.Restore and before Resume. Without it the connection is gone, too.
// settled is called once, without the device's lock: when the guest has answered
// and the host has more for it, or when it will not answer. What it is to hear
// besides can be told then. Until it is used, a copy has nothing more to do, and
// so no more memory of its own.
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

// settleGone tells the guest of the connections that it has no more. With a
// standby that waits until the guest has answered on it: the first answer is
// what everybody waits for, and what the guest sends on the others meanwhile is
// answered with a RST anyway.
func (d *Vsock) settleGone() {
	if d.saved.Host != 0 { // nobody wanted it
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

// used notes that the host has something for the guest, which a copy that has
// answered takes as the beginning of its use.
func (d *Vsock) used() {
	if d.attached == nil && d.settled != nil {
		d.callbacks = append(d.callbacks, d.settled)
		d.settled = nil
	}
}

// forgetGone: the ports of a connection that is gone are used for a new one,
// or the guest was told otherwise.
func (d *Vsock) forgetGone(k connKey) {
	for i, g := range d.gone {
		if g == k {
			d.gone = append(d.gone[:i], d.gone[i+1:]...)
			return
		}
	}
}

// resetOf is the RST of a connection.
func resetOf(k connKey) vsockHeader {
	return vsockHeader{srcCID: HostCID, dstCID: GuestCID, srcPort: k.host, dstPort: k.guest, kind: vsockStream, op: opReset}
}
