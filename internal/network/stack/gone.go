package stack

import (
	"errors"

	"golang.org/x/sys/unix"
	"gvisor.dev/gvisor/pkg/tcpip/header"
)

// Gone finds out whether the sandbox's end of the wire is closed. A datagram socket
// reports that only on sending. So Gone sends a frame without effect: an unsolicited
// ARP reply with the gateway's address, which the sandbox knows. It is for rare use,
// because the frame stays on the wire of a sandbox that does not run.
func (w *Wire) Gone() bool {
	m, data := w.newMessage(typeARP, header.ARPSize)
	reply := header.ARP(data)
	reply.SetIPv4OverEthernet()
	reply.SetOp(header.ARPReply)
	copy(reply.HardwareAddressSender(), w.cfg.GatewayMAC[:])
	copy(reply.ProtocolAddressSender(), w.cfg.Gateway.AsSlice())
	copy(reply.HardwareAddressTarget(), w.cfg.MAC[:])
	copy(reply.ProtocolAddressTarget(), w.cfg.Address.AsSlice())
	w.tx.mu.Lock()
	defer w.tx.mu.Unlock()
	if w.tx.closed {
		return true
	}
	err := sendMessage(w.fd, vectorsOf(m))
	return errors.Is(err, unix.ECONNREFUSED) || errors.Is(err, unix.ECONNRESET) || errors.Is(err, unix.EPIPE)
}
