package microvm

import (
	"context"
	"errors"
	"fmt"
	"os"
	"strconv"
	"strings"

	"agentrun.dev/internal/engine"
	"agentrun.dev/internal/vmm/vmmctl"
)

// wire makes the wire of a sandbox with an interface, and keeps the host's end. It
// returns the guest's end for the caller to close, or nil for a sandbox without an
// interface.
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

// rewire gives an adopted sandbox a new wire. The host's end of its old wire ended
// with the process that made it. Copies of the old end are cut off.
func (s *sandbox) rewire() (*os.File, error) {
	host, guest, err := s.engine.vmm.Wire()
	if err != nil {
		return nil, err
	}
	defer func() { _ = guest.Close() }() // the vmm has its own copy
	_, err = s.Request(context.Background(), func(id uint64) vmmctl.Message { return &vmmctl.Plug{ID: id} }, guest)
	if err != nil {
		return nil, errors.Join(fmt.Errorf("give the sandbox a wire: %w", err), host.Close())
	}
	return host, nil
}

// plugIn gives a sandbox its network interface before it boots.
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

// addressOf is the command line argument from which the agent configures the
// interface.
func addressOf(n *engine.Network) string {
	parts := []string{"agentrun.ip=" + n.Address.String()}
	if n.Gateway.IsValid() {
		parts = append(parts, "gw="+n.Gateway.String())
	}
	if a := n.Address6; a.IsValid() {
		parts = append(parts, "ip6="+a.Addr().StringExpanded()+"/"+strconv.Itoa(a.Bits()))
	}
	if n.Gateway6.IsValid() {
		parts = append(parts, "gw6="+n.Gateway6.StringExpanded())
	}
	for _, a := range n.DNS { // written out in full, the form that the agent parses
		parts = append(parts, "dns="+a.StringExpanded())
	}
	return strings.Join(parts, ",")
}
