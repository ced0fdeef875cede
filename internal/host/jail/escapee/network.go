package main

import (
	"fmt"
	"net"
	"time"

	"golang.org/x/sys/unix"
)

// networkAttempts are made behind the filter of a netd, which is in the host's network. The
// files of their order are: a datagram socket made in the network of a jail (a wire); a
// listening stream socket and a connected one of the host's network (control sockets); and a
// netlink socket for routes. One service listens at the abstract address Name, and one for
// streams at Name-stream.
var networkAttempts = map[string]func(order) any{
	"raw socket":           makeSocket(unix.AF_INET, unix.SOCK_RAW, unix.IPPROTO_TCP),
	"ping socket":          makeSocket(unix.AF_INET, unix.SOCK_DGRAM, unix.IPPROTO_ICMP),
	"packet socket":        makeSocket(unix.AF_PACKET, unix.SOCK_RAW, 0),
	"unix stream":          makeSocket(unix.AF_UNIX, unix.SOCK_STREAM, 0),
	"unix datagram":        makeSocket(unix.AF_UNIX, unix.SOCK_DGRAM, 0),
	"unix pair":            raw(unix.SYS_SOCKETPAIR, unix.AF_UNIX, unix.SOCK_DGRAM),
	"vsock":                makeSocket(unix.AF_VSOCK, unix.SOCK_STREAM, 0),
	"firewall":             makeSocket(unix.AF_NETLINK, unix.SOCK_RAW, unix.NETLINK_NETFILTER),
	"routes":               makeSocket(unix.AF_NETLINK, unix.SOCK_RAW, unix.NETLINK_ROUTE),
	"sockets of others":    makeSocket(unix.AF_NETLINK, unix.SOCK_RAW, unix.NETLINK_SOCK_DIAG),
	"crypto socket":        makeSocket(unix.AF_ALG, unix.SOCK_SEQPACKET, 0),
	"listen":               func(o order) any { return call(unix.SYS_LISTEN, uintptr(o.files[1]), 1) },
	"attach a filter":      raw(unix.SYS_SETSOCKOPT, controlFD, unix.SOL_SOCKET, unix.SO_ATTACH_FILTER),
	"protocol of a socket": raw(unix.SYS_SETSOCKOPT, controlFD, unix.IPPROTO_TCP, unix.TCP_ULP),
	"list interfaces":      raw(unix.SYS_IOCTL, controlFD, unix.SIOCGIFCONF),
	"take a descriptor":    raw(unix.SYS_PIDFD_GETFD, controlFD),
	"open a process":       func(o order) any { return call(unix.SYS_PIDFD_OPEN, uintptr(o.Victim)) },

	// These attempts end in an error.
	"bind": func(o order) any { return unix.Bind(o.files[0], &unix.SockaddrUnix{Name: o.Name + "-2"}) },
	"send to the host by the wire": func(o order) any {
		return said(sendTo(o.files[0], o.Name))
	},
	"connect the wire to the host": func(o order) any {
		return said(unix.Connect(o.files[0], &unix.SockaddrUnix{Name: o.Name}))
	},
	"connect the listener to the host": func(o order) any {
		return said(unix.Connect(o.files[1], &unix.SockaddrUnix{Name: o.Name + "-stream"}))
	},
	"connect the control socket to the host": func(o order) any {
		return said(unix.Connect(o.files[2], &unix.SockaddrUnix{Name: o.Name + "-stream"}))
	},
	"send to the host by the control socket": func(o order) any { return said(sendTo(o.files[2], o.Name)) },
	"add an address":                         func(o order) any { return addAddress(o.files[3]) },

	// These must continue to work.
	"dial": func(o order) any { return dial(o.Name) },
}

func makeSocket(domain, kind, protocol uintptr) func(order) any {
	return raw(unix.SYS_SOCKET, domain, kind|unix.SOCK_NONBLOCK|unix.SOCK_CLOEXEC, protocol)
}

func said(err error) any {
	if err == nil {
		return "succeeded"
	}
	return err
}

// dial connects to an address of the host by TCP and UDP, and returns the data
// that it received.
func dial(address string) any {
	for _, network := range []string{"tcp", "udp"} {
		c, err := net.Dial(network, address)
		if err != nil {
			return err
		}
		_ = c.SetDeadline(time.Now().Add(time.Minute))
		b := make([]byte, 16)
		if _, err := c.Write([]byte("hello")); err != nil {
			return err
		}
		if n, err := c.Read(b); err != nil || string(b[:n]) != "hello" {
			return fmt.Sprintf("%s: %q, %v", network, b[:n], err)
		}
		_ = c.Close() // read and written
	}
	return "ok"
}

// addAddress asks the kernel, over netlink, to give an address to the loopback.
func addAddress(fd int) any {
	// struct nlmsghdr, struct ifaddrmsg, one attribute: 192.0.2.77/32 on interface 1.
	message := []byte{
		32, 0, 0, 0, unix.RTM_NEWADDR, 0, unix.NLM_F_REQUEST | unix.NLM_F_ACK, 0, 1, 0, 0, 0, 0, 0, 0, 0,
		unix.AF_INET, 32, 0, 0, 1, 0, 0, 0,
		8, 0, unix.IFA_LOCAL, 0, 192, 0, 2, 77,
	}
	if err := unix.Sendto(fd, message, 0, &unix.SockaddrNetlink{Family: unix.AF_NETLINK}); err != nil {
		return err
	}
	answer := make([]byte, 4096)
	n, _, err := unix.Recvfrom(fd, answer, 0) // the kernel answers before sendto returns
	if err != nil {
		return err
	}
	if n < 20 {
		return fmt.Errorf("an answer of %d bytes", n)
	}
	// struct nlmsgerr: a negative error number after the header.
	if code := int32(uint32(answer[16]) | uint32(answer[17])<<8 | uint32(answer[18])<<16 | uint32(answer[19])<<24); code != 0 {
		return unix.Errno(-code)
	}
	return "succeeded"
}
