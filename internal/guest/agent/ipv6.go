package agent

import (
	"encoding/binary"
	"encoding/hex"
	"strconv"
	"strings"
	"syscall"

	"golang.org/x/sys/unix"
)

// parseIPv6 reads an address in full form: eight groups of four digits. The engine
// and the container's command line write it so. :: is not a valid address here.
func parseIPv6(s string) (ip [16]byte, ok bool) {
	const groups, digits = 8, 4
	if len(s) != groups*digits+groups-1 {
		return ip, false
	}
	for i := range groups {
		at := i * (digits + 1)
		if i > 0 && s[at-1] != ':' {
			return ip, false
		}
		if _, err := hex.Decode(ip[2*i:2*i+2], []byte(s[at:at+digits])); err != nil {
			return ip, false
		}
	}
	return ip, ip != [16]byte{}
}

// formatIPv6 writes an address in the short form of RFC 5952, without the longest run
// of zero groups.
func formatIPv6(ip [16]byte) string {
	group := func(i int) uint16 { return binary.BigEndian.Uint16(ip[2*i:]) }
	from, length := 8, 1 // the minimum run is 2: a single zero group is written out
	for i := range 8 {
		n := 0
		for i+n < 8 && group(i+n) == 0 {
			n++
		}
		if n > length {
			from, length = i, n
		}
	}
	var b strings.Builder
	for i := 0; i < 8; i++ {
		if i == from {
			b.WriteString("::")
			i += length - 1
			continue
		}
		if i > 0 && i != from+length {
			b.WriteByte(':')
		}
		b.WriteString(strconv.FormatUint(uint64(group(i)), 16))
	}
	return b.String()
}

// parseServer reads the address of a DNS server, and returns it in the form of
// resolv.conf.
func parseServer(s string) (string, bool) {
	if ip, ok := parseIPv4(s); ok {
		return formatIPv4(ip), true
	}
	ip, ok := parseIPv6(s)
	return formatIPv6(ip), ok
}

// prepareIPv6 configures IPv6 before the link is up. The address is fixed, so the
// kernel must not look for routers, nor check whether the address is free.
func prepareIPv6() error {
	for _, name := range []string{"accept_ra", "accept_dad", "dad_transmits", "autoconf", "router_solicitations"} {
		path := "/proc/sys/net/ipv6/conf/" + nic + "/" + name
		if err := writeSetting(path, "0"); err != nil {
			return failed("write", path, err)
		}
	}
	return nil
}

func writeSetting(path, value string) error {
	fd, err := unix.Open(path, unix.O_WRONLY|unix.O_CLOEXEC, 0)
	if err != nil {
		return err
	}
	defer unix.Close(fd)
	_, err = unix.Write(fd, []byte(value))
	return err
}

// setupIPv6 gives eth0, which is up, its address and the default route. When it
// returns, the address can be used.
func setupIPv6(fd int, n *NetConfig) error {
	ifr, err := unix.NewIfreq(nic)
	if err != nil {
		return err
	}
	if err := unix.IoctlIfreq(fd, unix.SIOCGIFINDEX, ifr); err != nil {
		return err
	}
	index := ifr.Uint32()
	// struct ifaddrmsg of <linux/if_addr.h>
	address := []byte{unix.AF_INET6, byte(n.Prefix6), unix.IFA_F_NODAD, unix.RT_SCOPE_UNIVERSE}
	address = binary.NativeEndian.AppendUint32(address, index)
	address = appendAttribute(address, unix.IFA_LOCAL, n.Addr6[:])
	address = appendAttribute(address, unix.IFA_ADDRESS, n.Addr6[:])
	if err := routeRequest(unix.RTM_NEWADDR, address); err != nil {
		return failed("add address", formatIPv6(n.Addr6), err)
	}
	if n.Gateway6 == [16]byte{} {
		return nil
	}
	// struct rtmsg of <linux/rtnetlink.h>
	route := []byte{unix.AF_INET6, 0, 0, 0, unix.RT_TABLE_MAIN, unix.RTPROT_STATIC, unix.RT_SCOPE_UNIVERSE, unix.RTN_UNICAST, 0, 0, 0, 0}
	route = appendAttribute(route, unix.RTA_GATEWAY, n.Gateway6[:])
	route = appendAttribute(route, unix.RTA_OIF, binary.NativeEndian.AppendUint32(nil, index))
	return failed("add default route by", formatIPv6(n.Gateway6), routeRequest(unix.RTM_NEWROUTE, route))
}

// appendAttribute appends a struct rtattr with its value, whose length is a
// multiple of 4.
func appendAttribute(b []byte, kind uint16, value []byte) []byte {
	b = binary.NativeEndian.AppendUint16(b, uint16(unix.SizeofRtAttr+len(value)))
	b = binary.NativeEndian.AppendUint16(b, kind)
	return append(b, value...)
}

// routeRequest asks the kernel for a change (rtnetlink(7)), and waits for it.
func routeRequest(kind uint16, body []byte) error {
	fd, err := unix.Socket(unix.AF_NETLINK, unix.SOCK_RAW|unix.SOCK_CLOEXEC, unix.NETLINK_ROUTE)
	if err != nil {
		return err
	}
	defer unix.Close(fd)
	const flags = unix.NLM_F_REQUEST | unix.NLM_F_ACK | unix.NLM_F_CREATE | unix.NLM_F_REPLACE
	m := binary.NativeEndian.AppendUint32(nil, uint32(unix.SizeofNlMsghdr+len(body)))
	m = binary.NativeEndian.AppendUint16(m, kind)
	m = binary.NativeEndian.AppendUint16(m, flags)
	m = append(m, make([]byte, 8)...) // sequence and port are 0, since the socket carries one request
	if err := unix.Sendto(fd, append(m, body...), 0, &unix.SockaddrNetlink{Family: unix.AF_NETLINK}); err != nil {
		return err
	}
	reply := make([]byte, 4096)
	k, _, err := unix.Recvfrom(fd, reply, 0)
	if err != nil {
		return err
	}
	// struct nlmsgerr behind its header: 0, or an error.
	if k < unix.SizeofNlMsghdr+4 || binary.NativeEndian.Uint16(reply[4:]) != unix.NLMSG_ERROR {
		return syscall.EPROTO
	}
	if errno := -int32(binary.NativeEndian.Uint32(reply[unix.SizeofNlMsghdr:])); errno != 0 {
		return syscall.Errno(errno)
	}
	return nil
}
