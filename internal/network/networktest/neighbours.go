package networktest

import (
	"errors"
	"fmt"
	"net/netip"
	"testing"

	"github.com/vishvananda/netlink"
)

// KnowGateway gives the guest's kernel permanent neighbour entries for the gateway.
// The kernel then never asks for the gateway's MAC. Tests with hundreds of guests
// need it: all network namespaces of a machine share one neighbour table per
// protocol, which holds 1024 entries that are not permanent (arp(7), gc_thresh3).
// While the table is full, the kernel silently drops the packets of a guest that has
// no entry, for as long as the other guests' entries are fresh.
func (g *Guest) KnowGateway(t testing.TB) {
	t.Helper()
	err := g.Run(func() error {
		eth0, err := netlink.LinkByName("eth0")
		if err != nil {
			return fmt.Errorf("find eth0: %w", err)
		}
		know := func(family int, a netip.Addr) error {
			return netlink.NeighSet(&netlink.Neigh{
				LinkIndex: eth0.Attrs().Index, Family: family, State: netlink.NUD_PERMANENT,
				IP: a.AsSlice(), HardwareAddr: GatewayMAC[:],
			})
		}
		return errors.Join(know(netlink.FAMILY_V4, Gateway), know(netlink.FAMILY_V6, Gateway6))
	})
	if err != nil {
		t.Fatalf("make the gateway a permanent neighbour: %v", err)
	}
}
