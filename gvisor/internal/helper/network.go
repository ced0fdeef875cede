package helper

import (
	"fmt"
	"net"
	"net/netip"
	"os"

	"agentrun.dev/internal/engine/gvisorctl"
	"gvisor.dev/gvisor/pkg/urpc"
	"gvisor.dev/gvisor/runsc/boot"
	"gvisor.dev/gvisor/runsc/config"
)

// nic is the name of the interface inside, as in a microVM.
const nic = "eth0"

// maxSegment is the size of the longest packet that gVisor leaves to others to cut
// up. It fits into the length field of IPv4.
const maxSegment = 1<<16 - 1

// linksOf describes a loopback and an interface whose frames go to a wire. Each frame
// follows the header of package wire, which gVisor calls host GSO: long TCP segments
// leave in one piece, with their checksum to be completed. gVisor completes all other
// checksums itself. (With TXChecksumOffload it would leave them out without saying
// so.) It trusts the checksums of incoming frames, because it reads no header, and
// those of long segments are not complete.
func linksOf(n *gvisorctl.Network, wire *os.File) *boot.CreateLinksAndRoutesArgs {
	prefix := ipNet(n.Address.Masked())
	links := &boot.CreateLinksAndRoutesArgs{
		FilePayload:   urpc.FilePayload{Files: []*os.File{wire}},
		LoopbackLinks: []boot.LoopbackLink{boot.DefaultLoopbackLink},
		FDBasedLinks: []boot.FDBasedLink{{
			Name: nic, MTU: n.MTU, LinkAddress: net.HardwareAddr(n.MAC[:]),
			Addresses:   []boot.IPWithPrefix{{Address: n.Address.Addr().AsSlice(), PrefixLen: n.Address.Bits()}},
			Routes:      []boot.Route{{Destination: prefix}},
			NumChannels: 1, ProcessorsPerChannel: 1,
			GSOMaxSize: maxSegment, RXChecksumOffload: true,
			// When the wire is full, frames wait here and not in the system calls of
			// programs.
			QDisc: config.QDiscFIFO,
		}},
	}
	if n.Gateway.IsValid() {
		links.Defaultv4Gateway = boot.DefaultRoute{Name: nic, Route: boot.Route{
			Destination: ipNet(netip.PrefixFrom(netip.IPv4Unspecified(), 0)), Gateway: n.Gateway.AsSlice(),
		}}
	}
	if n.Address6.IsValid() {
		l := &links.FDBasedLinks[0]
		l.Addresses = append(l.Addresses, boot.IPWithPrefix{Address: n.Address6.Addr().AsSlice(), PrefixLen: n.Address6.Bits()})
		l.Routes = append(l.Routes, boot.Route{Destination: ipNet(n.Address6.Masked())})
	}
	if n.Gateway6.IsValid() {
		links.Defaultv6Gateway = boot.DefaultRoute{Name: nic, Route: boot.Route{
			Destination: ipNet(netip.PrefixFrom(netip.IPv6Unspecified(), 0)), Gateway: n.Gateway6.AsSlice(),
		}}
	}
	return links
}

func ipNet(p netip.Prefix) net.IPNet {
	return net.IPNet{IP: p.Addr().AsSlice(), Mask: net.CIDRMask(p.Bits(), p.Addr().BitLen())}
}

// startWired starts the sandbox with these links. runsc takes links from a namespace
// of the host, or makes a loopback. To start a sandbox with other links, the helper
// first tells the kernel about them. With the host's network runsc sets nothing up;
// the configuration that the kernel was made with has no network.
func (s *sandboxed) startWired(links *boot.CreateLinksAndRoutesArgs) error {
	if err := s.tellLinks(links); err != nil {
		return fmt.Errorf("make the network interface: %w", err)
	}
	conf := *s.conf
	conf.Network = config.NetworkHost
	return s.cont.Start(&conf)
}

// tellLinks tells the kernel which links the sandbox will have when it starts.
func (s *sandboxed) tellLinks(links *boot.CreateLinksAndRoutesArgs) error {
	conn, err := s.connect()
	if err != nil {
		return err
	}
	defer func() { _ = conn.Close() }() // the answer has come
	return conn.Call(boot.ContMgrSetNetworkArgs, links, nil)
}
