package microvm

import (
	"os"
	"strings"

	"agentrun.dev/internal/engine"
	"agentrun.dev/internal/vmm/vmmctl"
)

// wire makes the wire of a sandbox that has an interface, and keeps the host's
// end. The guest's, nil for a sandbox without an interface, is the caller's to
// close.
func (s *sandbox) wire() (*os.File, error) {
	if s.network == nil {
		return nil, nil
	}
	host, guest, err := s.engine.vmm.Wire()
	if err != nil {
		return nil, err
	}
	s.KeepWire(host)
	return guest, nil
}

// plugIn gives a sandbox that is booted its network interface.
func (s *sandbox) plugIn(b *bootMessage, n *engine.Network) error {
	if err := n.Check(); err != nil {
		return err
	}
	s.network = n
	wire, err := s.wire()
	if err != nil {
		return err
	}
	b.addNet(vmmctl.Net{MAC: n.MAC, MTU: uint16(n.MTU)}, b.owned(wire))
	return nil
}

// addressOf is the part of the kernel's command line by which the agent
// configures the interface.
func addressOf(n *engine.Network) string {
	parts := []string{"agentrun.ip=" + n.Address.String()}
	if n.Gateway.IsValid() {
		parts = append(parts, "gw="+n.Gateway.String())
	}
	for _, a := range n.DNS {
		parts = append(parts, "dns="+a.String())
	}
	return strings.Join(parts, ",")
}
