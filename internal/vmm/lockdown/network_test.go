package lockdown

import (
	"testing"

	"golang.org/x/sys/unix"
)

// TestNetworkFilter: the filter of a netd allows TCP and UDP, and no call that
// reaches other programs of the host.
func TestNetworkFilter(t *testing.T) {
	const pid = 4711
	program, err := assemble(networkRules(pid))
	if err != nil {
		t.Fatal(err)
	}
	x64 := func(number uintptr, args ...uint64) call {
		c := call{arch: unix.AUDIT_ARCH_X86_64, number: uint32(number)}
		copy(c.args[:], args)
		return c
	}
	socket := func(domain, kind, protocol uint64) call { return x64(unix.SYS_SOCKET, domain, kind|made, protocol) }
	option := func(level, name uint64) call { return x64(unix.SYS_SETSOCKOPT, 3, level, name) }
	for name, tt := range map[string]struct {
		call
		want uint32
	}{
		"TCP":                 {socket(unix.AF_INET, unix.SOCK_STREAM, 0), retAllow},
		"TCP by name":         {socket(unix.AF_INET6, unix.SOCK_STREAM, unix.IPPROTO_TCP), retAllow},
		"UDP":                 {socket(unix.AF_INET6, unix.SOCK_DGRAM, 0), retAllow},
		"UDP by name":         {socket(unix.AF_INET, unix.SOCK_DGRAM, unix.IPPROTO_UDP), retAllow},
		"routes":              {socket(unix.AF_NETLINK, unix.SOCK_RAW, unix.NETLINK_ROUTE), retKill},
		"a blocking socket":   {x64(unix.SYS_SOCKET, unix.AF_INET, unix.SOCK_STREAM, 0), retKill},
		"raw":                 {socket(unix.AF_INET, unix.SOCK_RAW, unix.IPPROTO_TCP), retKill},
		"ping":                {socket(unix.AF_INET, unix.SOCK_DGRAM, unix.IPPROTO_ICMP), retKill},
		"SCTP":                {socket(unix.AF_INET, unix.SOCK_STREAM, unix.IPPROTO_SCTP), retKill},
		"MPTCP":               {socket(unix.AF_INET, unix.SOCK_STREAM, unix.IPPROTO_MPTCP), retKill},
		"packets":             {socket(unix.AF_PACKET, unix.SOCK_DGRAM, 0), retKill},
		"a unix stream":       {socket(unix.AF_UNIX, unix.SOCK_STREAM, 0), retKill},
		"a unix datagram":     {socket(unix.AF_UNIX, unix.SOCK_DGRAM, 0), retKill},
		"a unix pair":         {x64(unix.SYS_SOCKETPAIR, unix.AF_UNIX, unix.SOCK_DGRAM), retKill},
		"vsock":               {socket(unix.AF_VSOCK, unix.SOCK_STREAM, 0), retKill},
		"audit":               {socket(unix.AF_NETLINK, unix.SOCK_RAW, unix.NETLINK_AUDIT), retKill},
		"sockets of others":   {socket(unix.AF_NETLINK, unix.SOCK_RAW, unix.NETLINK_SOCK_DIAG), retKill},
		"a crypto socket":     {socket(unix.AF_ALG, unix.SOCK_STREAM, 0), retKill},
		"connect":             {x64(unix.SYS_CONNECT, 3), retAllow},
		"accept":              {x64(unix.SYS_ACCEPT4, 3), retAllow},
		"listen":              {x64(unix.SYS_LISTEN, 3), retKill},
		"bind":                {x64(unix.SYS_BIND, 3), retNoBind},
		"no delay":            {option(unix.IPPROTO_TCP, unix.TCP_NODELAY), retAllow},
		"linger":              {option(unix.SOL_SOCKET, unix.SO_LINGER), retAllow},
		"only IPv6":           {option(unix.IPPROTO_IPV6, unix.IPV6_V6ONLY), retAllow},
		"a number of another": {option(unix.IPPROTO_IPV6, unix.TCP_NODELAY), retKill},
		"TLS of the kernel":   {option(unix.IPPROTO_TCP, unix.TCP_ULP), retKill},
		"repair":              {option(unix.IPPROTO_TCP, unix.TCP_REPAIR), retKill},
		"a filter":            {option(unix.SOL_SOCKET, unix.SO_ATTACH_FILTER), retKill},
		"a device":            {option(unix.SOL_SOCKET, unix.SO_BINDTODEVICE), retKill},
		"a route":             {option(unix.IPPROTO_IP, unix.IP_OPTIONS), retKill},
		"send":                {x64(unix.SYS_SENDMSG, 3, 0, unix.MSG_NOSIGNAL|unix.MSG_DONTWAIT), retAllow},
		"send many":           {x64(unix.SYS_SENDMMSG, 3, 0, 8, unix.MSG_DONTWAIT), retAllow},
		"receive many":        {x64(unix.SYS_RECVMMSG, 3, 0, 8, unix.MSG_DONTWAIT), retAllow},
		"send out of band":    {x64(unix.SYS_SENDMSG, 3, 0, unix.MSG_OOB), retKill},
		"receive out of band": {x64(unix.SYS_RECVFROM, 3, 0, 0, unix.MSG_OOB), retKill},
		"a file":              {x64(unix.SYS_OPENAT), retNoFile},
		"an old open":         {x64(unix.SYS_OPEN), retKill},
		"its own thread":      {x64(unix.SYS_TGKILL, pid, 1, 23), retAllow},
		"another's thread":    {x64(unix.SYS_TGKILL, pid+1, 1, 23), retKill},
		"kill":                {x64(unix.SYS_KILL, pid), retKill},
		"exec":                {x64(unix.SYS_EXECVE), retKill},
		"ioctl":               {x64(unix.SYS_IOCTL, 3, unix.SIOCGIFCONF), retKill},
		"files' sizes":        {x64(unix.SYS_PRLIMIT64, 0, unix.RLIMIT_FSIZE), retKill},
		"another namespace":   {x64(unix.SYS_SETNS, 3), retKill},
	} {
		if got := run(t, program, tt.call); got != tt.want {
			t.Errorf("%s: %#x, want %#x", name, got, tt.want)
		}
	}
	// A number without a rule kills.
	allowed := 0
	for number := range uintptr(1024) {
		if run(t, program, x64(number, 1<<31-1, 1<<31-1, 1<<31-1, 1<<31-1)) == retAllow {
			allowed++
		}
	}
	if want := len(runtimeCalls) + len(networkCalls); allowed != want {
		t.Errorf("%d calls are allowed whatever their arguments, want %d", allowed, want)
	}
}
