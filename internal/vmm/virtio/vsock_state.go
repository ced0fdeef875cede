package virtio

import (
	"errors"

	"golang.org/x/sys/unix"
)

// VsockState is the state of a paused Vsock. Of the connections only the
// standby continues: the other ends of the rest are processes of the host, and
// a copy of the guest gets a RST for each.
type VsockState struct {
	// NextPort continues in the copy, so that a new connection does not get the
	// ports of a connection from before the capture.
	NextPort uint32
	// Standby is the connection that a copy continues; its ports are 0 if there
	// is no such connection.
	Standby VsockConnState
	// Gone is how many entries of Ports are connections that the guest believes
	// in.
	Gone  uint32
	Ports [MaxVsockConns]VsockPorts
}

// VsockPorts are the two ports of a connection.
type VsockPorts struct{ Host, Guest uint32 }

// VsockConnState is the state of an idle connection: its ports and the counters
// of its credit.
type VsockConnState struct {
	Host, Guest        uint32
	Taken, Told        uint32 // guest to host; all of it has reached the host
	Sent               uint32 // host to guest
	PeerAlloc, PeerCnt uint32
}

// Save returns the state of the device, which must be paused.
func (d *Vsock) Save() VsockState {
	d.mu.Lock()
	defer d.mu.Unlock()
	s := VsockState{NextPort: d.nextPort}
	note := func(k connKey) {
		if s.Gone < MaxVsockConns {
			s.Ports[s.Gone] = VsockPorts{k.host, k.guest}
			s.Gone++
		}
	}
	for key, c := range d.conns {
		if key == d.standby && c.idle() {
			s.Standby = VsockConnState{
				Host: key.host, Guest: key.guest, Taken: c.takenCnt, Told: c.toldCnt,
				Sent: c.sentCnt, PeerAlloc: c.peerAlloc, PeerCnt: c.peerCnt,
			}
			continue
		}
		note(key)
	}
	for _, k := range d.gone {
		note(k)
	}
	// These come last, because they may be lost: the guest's next packet causes
	// another RST.
	for _, h := range d.resets {
		note(connKey{host: h.srcPort, guest: h.dstPort})
	}
	return s
}

// HasStandby reports whether a copy can continue the standby connection.
func (s VsockState) HasStandby() bool { return s.Standby.Host != 0 }

// idle reports whether no data is in transit in either direction, so that a
// copy misses none.
func (c *vsockConn) idle() bool {
	if !c.open || c.unsaid != 0 || len(c.out) > 0 || c.flushing || c.deaf || c.eof || c.peerShut != 0 || c.hostShut != 0 {
		return false
	}
	var look error
	err := c.raw.Control(func(fd uintptr) {
		_, _, _, _, look = unix.Recvmsg(int(fd), make([]byte, 1), nil, unix.MSG_PEEK|unix.MSG_DONTWAIT)
	})
	return err == nil && errors.Is(look, unix.EAGAIN) // neither data nor the end of the stream
}

// Restore prepares a new device, before MMIO.Restore.
func (d *Vsock) Restore(s VsockState) error {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.nextPort = min(max(s.NextPort, vsockFirstPort), vsockLastPort)
	d.saved = s.Standby
	for _, k := range s.Ports[:min(s.Gone, MaxVsockConns)] {
		d.gone = append(d.gone, connKey{host: k.Host, guest: k.Guest})
	}
	return nil
}
