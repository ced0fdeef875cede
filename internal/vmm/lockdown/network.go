package lockdown

import (
	"os"

	"golang.org/x/sys/unix"
)

// Bounds of a netd: a descriptor for each wire and for each connection to the
// outside, and a file for its error output.
const (
	maxNetworkFiles = 64 << 10
	maxNetworkWords = 1 << 20
)

// EnterNetwork locks down a netd: all of its threads and all later ones. A netd can still
// connect to the outside by TCP and UDP, and use the descriptors that it has or is given;
// one of them asks the kernel for routes. A netd lives in the host's network, so it must
// not make unix sockets of its own: it could reach every abstract address of the host, and
// a filter cannot check addresses. EnterNetwork returns how many descriptors the process
// can have, because its parent's limit may be lower than ours.
func EnterNetwork() (descriptors int, err error) {
	if err := giveUp(maxNetworkFiles); err != nil {
		return 0, err
	}
	var limit unix.Rlimit
	if err := unix.Getrlimit(unix.RLIMIT_NOFILE, &limit); err != nil {
		return 0, err
	}
	if err := LimitFileSize(maxNetworkWords); err != nil {
		return 0, err
	}
	return int(limit.Cur), filterCalls(networkRules(os.Getpid()))
}

// Answers to calls that the standard library tries on its own and can do without. It
// looks for files (certificates, time zones, names of hosts), which do not exist in
// the jail, and binds a socket to find out about IPv6.
const (
	retNoFile = unix.SECCOMP_RET_ERRNO | uint32(unix.ENOENT)
	retNoBind = unix.SECCOMP_RET_ERRNO | uint32(unix.EACCES)
)

// made are the flags with which Go makes each of its sockets.
const made = unix.SOCK_NONBLOCK | unix.SOCK_CLOEXEC

// noFlags are flags of send and receive calls that netd does not use. The kernel
// has had its bugs in out-of-band data of unix sockets and in connections that
// begin with data.
const noFlags = unix.MSG_OOB | unix.MSG_FASTOPEN | unix.MSG_ZEROCOPY

// networkRules returns the rules for a netd with this process id.
func networkRules(pid int) []rule {
	refuse := func(number uintptr, with uint32) rule { return rule{number, []unix.SockFilter{ret(with)}} }
	is := func(arg int, values ...uint32) condition { return condition{arg: arg, values: values} }
	rules := append(runtimeRules(pid),
		// No raw sockets, no ping sockets, no SCTP and MPTCP, no netlink.
		allowAny(unix.SYS_SOCKET,
			[]condition{is(0, unix.AF_INET, unix.AF_INET6), is(1, unix.SOCK_STREAM|made), is(2, 0, unix.IPPROTO_TCP)},
			[]condition{is(0, unix.AF_INET, unix.AF_INET6), is(1, unix.SOCK_DGRAM|made), is(2, 0, unix.IPPROTO_UDP)},
		),
		// No options that attach programs (SO_ATTACH_FILTER), other protocols
		// (TCP_ULP) or devices (SO_BINDTODEVICE).
		allowAny(unix.SYS_SETSOCKOPT,
			[]condition{is(1, unix.SOL_SOCKET), is(2, unix.SO_KEEPALIVE, unix.SO_BROADCAST, unix.SO_LINGER, unix.SO_RCVBUF, unix.SO_SNDBUF)},
			[]condition{is(1, unix.IPPROTO_TCP), is(2, unix.TCP_NODELAY, unix.TCP_KEEPIDLE, unix.TCP_KEEPINTVL, unix.TCP_KEEPCNT, unix.TCP_USER_TIMEOUT, unix.TCP_NOTSENT_LOWAT)},
			[]condition{is(1, unix.IPPROTO_IPV6), is(2, unix.IPV6_V6ONLY, unix.IPV6_RECVERR)},
			[]condition{is(1, unix.IPPROTO_IP), is(2, unix.IP_RECVERR)},
		),
		allowWithout(unix.SYS_SENDTO, 3, noFlags),
		allowWithout(unix.SYS_RECVFROM, 3, noFlags),
		allowWithout(unix.SYS_SENDMSG, 2, noFlags),
		allowWithout(unix.SYS_RECVMSG, 2, noFlags),
		allowWithout(unix.SYS_SENDMMSG, 3, noFlags),
		allowWithout(unix.SYS_RECVMMSG, 3, noFlags),
		refuse(unix.SYS_OPENAT, retNoFile), refuse(unix.SYS_NEWFSTATAT, retNoFile), refuse(unix.SYS_READLINKAT, retNoFile),
		refuse(unix.SYS_BIND, retNoBind),
	)
	for _, number := range networkCalls {
		rules = append(rules, allow(number))
	}
	return rules
}

// networkCalls are the calls of a netd that are allowed with any arguments. listen is
// not among them: other processes connect to a netd only at the socket that it was
// started with.
var networkCalls = []uintptr{
	unix.SYS_CONNECT, unix.SYS_ACCEPT4, unix.SYS_SHUTDOWN,
	unix.SYS_GETSOCKNAME, unix.SYS_GETPEERNAME, unix.SYS_GETSOCKOPT,
	unix.SYS_UNAME, // the standard library asks for the kernel's version
}
