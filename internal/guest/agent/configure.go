package agent

import (
	"bytes"
	"encoding/binary"
	"encoding/hex"
	"syscall"
	"unsafe"

	"golang.org/x/sys/unix"
)

const nic = "eth0"

// configure sets up the booted root: limits, host name, network. It fails only if a
// setting from the command line cannot be applied.
func configure(cfg *BootConfig, log func(string)) error {
	if err := setLimits(); err != nil {
		log(err.Error())
	}
	if err := linkUp("lo"); err != nil {
		log(err.Error())
	}
	name := cfg.Hostname
	if name == "" {
		name = "sandbox"
	}
	if err := SetHostname(name); err != nil {
		return err
	}
	if cfg.Net != nil {
		if err := setupNetwork(cfg.Net); err != nil {
			return err
		}
		if len(cfg.Net.DNS) > 0 {
			if err := writeResolvConf("/etc", cfg.Net.DNS); err != nil {
				log(err.Error())
			}
		}
	}
	if err := writeNames("/etc", name); err != nil {
		log(err.Error())
	}
	if err := writeMachineID("/etc"); err != nil {
		log(err.Error())
	}
	// Programs can watch the file only if it is there before the first fork.
	if err := replaceGeneration("", []byte("0\n")); err != nil {
		log(err.Error())
	}
	return nil
}

const hostnameRule = "want at most 63 letters, digits and hyphens"

// SetHostname sets the kernel's host name.
func SetHostname(name string) error {
	if !ValidHostname(name) {
		return fail(ErrInvalid, "set host name", name, hostnameRule)
	}
	return failed("set host name", name, rawSetHostname(name))
}

// setLimits raises the limit of descriptors above the kernel's 1024, and turns core
// files off by default. A limit that cannot be raised stays as it is.
func setLimits() error {
	for _, l := range []struct {
		what, name string
		res        int
		soft, hard uint64
	}{
		{"set limit", "RLIMIT_NOFILE", unix.RLIMIT_NOFILE, 65536, 1 << 20},
		{"set limit", "RLIMIT_CORE", unix.RLIMIT_CORE, 0, unix.RLIM_INFINITY},
	} {
		var now unix.Rlimit
		if err := unix.Getrlimit(l.res, &now); err != nil {
			return failed(l.what, l.name, err)
		}
		want := unix.Rlimit{Cur: l.soft, Max: max(l.hard, now.Max)}
		err := unix.Setrlimit(l.res, &want)
		if err == syscall.EPERM {
			want.Max = now.Max
			want.Cur = min(l.soft, now.Max)
			err = unix.Setrlimit(l.res, &want)
		}
		if err != nil {
			return failed(l.what, l.name, err)
		}
	}
	return nil
}

// netSocket opens a socket for interface ioctls and passes it to fn.
func netSocket(thing string, fn func(fd int) error) error {
	fd, err := unix.Socket(unix.AF_INET, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return failed("configure interface", thing, err)
	}
	defer unix.Close(fd)
	return failed("configure interface", thing, fn(fd))
}

func linkUp(name string) error {
	return netSocket(name, func(fd int) error { return linkUpBy(fd, name) })
}

func linkUpBy(fd int, name string) error {
	ifr, err := unix.NewIfreq(name)
	if err != nil {
		return err
	}
	if err := unix.IoctlIfreq(fd, unix.SIOCGIFFLAGS, ifr); err != nil {
		return err
	}
	ifr.SetUint16(ifr.Uint16() | unix.IFF_UP)
	return unix.IoctlIfreq(fd, unix.SIOCSIFFLAGS, ifr)
}

// minSegments is the file that sets how many segments a frame of a connection has at
// least, if that many wait to be sent. TCP makes small frames for slow connections,
// so as not to send bursts into a network. Here each frame costs the same, whatever
// its length, and no frame is lost, so small frames would only keep a slow connection
// slow. No frame has more than 64 KiB.
const minSegments = "/proc/sys/net/ipv4/tcp_min_tso_segs"

// setupNetwork gives eth0 its addresses and the default routes (netdevice(7)).
func setupNetwork(n *NetConfig) error {
	if err := writeSetting(minSegments, "255"); err != nil {
		return failed("write", minSegments, err)
	}
	with6 := n.Addr6 != [16]byte{}
	if with6 {
		if err := prepareIPv6(); err != nil {
			return err
		}
	}
	return netSocket(nic, func(fd int) error {
		var mask [4]byte
		binary.BigEndian.PutUint32(mask[:], ^uint32(0)<<(32-n.Prefix))
		for _, set := range []struct {
			req  uint
			addr [4]byte
		}{{unix.SIOCSIFADDR, n.Addr}, {unix.SIOCSIFNETMASK, mask}} {
			ifr, err := unix.NewIfreq(nic)
			if err != nil {
				return err
			}
			if err := ifr.SetInet4Addr(set.addr[:]); err != nil {
				return err
			}
			if err := unix.IoctlIfreq(fd, set.req, ifr); err != nil {
				return err
			}
		}
		if err := linkUpBy(fd, nic); err != nil {
			return err
		}
		if n.Gateway != [4]byte{} {
			if err := addDefaultRoute(fd, n.Gateway); err != nil {
				return failed("add default route by", formatIPv4(n.Gateway), err)
			}
		}
		if with6 {
			return setupIPv6(fd, n)
		}
		return nil
	})
}

// rtentry is struct rtentry of <linux/route.h> on 64-bit Linux, 120 bytes.
type rtentry struct {
	_                     uint64
	dst, gateway, genmask unix.RawSockaddrInet4
	flags                 uint16
	_                     int16
	_                     uint64
	_                     uint64
	metric                int16
	_                     [6]byte
	dev                   uintptr
	mtu, window           uint64
	irtt                  uint16
	_                     [6]byte
}

func addDefaultRoute(fd int, gw [4]byte) error {
	rt := rtentry{flags: unix.RTF_UP | unix.RTF_GATEWAY}
	rt.dst.Family, rt.gateway.Family, rt.genmask.Family = unix.AF_INET, unix.AF_INET, unix.AF_INET
	rt.gateway.Addr = gw
	// The kernel reads sizeof(struct rtentry) bytes of rt, which outlives the call.
	_, _, errno := syscall.Syscall(unix.SYS_IOCTL, uintptr(fd), unix.SIOCADDRT, uintptr(unsafe.Pointer(&rt)))
	if errno != 0 && errno != syscall.EEXIST {
		return errno
	}
	return nil
}

// writeResolvConf replaces resolv.conf. Images often ship it as a link into a
// /run that is empty here, so a link is replaced, not followed.
func writeResolvConf(etc string, dns []string) error {
	var text []byte
	for _, ip := range dns {
		text = append(text, "nameserver "+ip+"\n"...)
	}
	path := etc + "/resolv.conf"
	var st unix.Stat_t
	if unix.Lstat(path, &st) == nil && fileType(st.Mode) == TypeSymlink {
		if err := unix.Unlink(path); err != nil {
			return failed("replace", path, err)
		}
	}
	return writeFile(path, text)
}

// writeNames adds missing names to hosts and hostname. Entries of the image stay as
// they are.
func writeNames(etc, name string) error {
	hosts, err := readFile(etc+"/hosts", maxAccountFile)
	if err != nil && err != syscall.ENOENT {
		return failed("read", etc+"/hosts", err)
	}
	if text := withNames(hosts, name); len(text) != len(hosts) {
		if err := writeFile(etc+"/hosts", text); err != nil {
			return err
		}
	}
	if have, err := readFile(etc+"/hostname", 4096); err != nil || len(bytes.TrimSpace(have)) == 0 {
		return writeFile(etc+"/hostname", []byte(name+"\n"))
	}
	return nil
}

// writeMachineID gives a machine without an id one (machine-id(5)). Then the renewal
// of a fork need not make the file.
func writeMachineID(etc string) error {
	path := etc + "/machine-id"
	if have, err := readFile(path, 4096); err != syscall.ENOENT && (err != nil || len(bytes.TrimSpace(have)) > 0) {
		return failed("read", path, err)
	}
	var id [16]byte
	if _, err := unix.Getrandom(id[:], 0); err != nil {
		return failed("draw", path, err)
	}
	text := append(hex.AppendEncode(nil, id[:]), '\n')
	if err := writeFile(path, text); err != nil {
		return err
	}
	return failed("change mode of", path, unix.Chmod(path, machineIDMode))
}

// appendHostLine appends to b the line of a hosts file for the sandbox's own name.
func appendHostLine(b []byte, name string) []byte {
	return append(append(append(b, hostAddress...), name...), '\n')
}

const hostAddress = "127.0.1.1\t"

// withNames returns the text of a hosts file with the missing names appended.
func withNames(hosts []byte, name string) []byte {
	local, named := namesHost(hosts, "localhost"), namesHost(hosts, name)
	if n := len(hosts); n > 0 && hosts[n-1] != '\n' && !(local && named) {
		hosts = append(hosts, '\n')
	}
	if !local {
		hosts = append(hosts, "127.0.0.1\tlocalhost\n::1\tlocalhost ip6-localhost ip6-loopback\n"...)
	}
	if !named {
		hosts = appendHostLine(hosts, name)
	}
	return hosts
}

// namesHost reports whether a hosts file has an address for name.
func namesHost(hosts []byte, name string) bool {
	for line := range lines(hosts) {
		line, _, _ = bytes.Cut(line, []byte{'#'})
		address := true
		for w := range bytes.FieldsSeq(line) {
			if !address && string(w) == name {
				return true
			}
			address = false
		}
	}
	return false
}

// writeFile replaces a small file of the root filesystem.
func writeFile(path string, data []byte) error {
	w, err := (&Files{}).OpenWrite(path, WriteOptions{Atomic: true, Parents: true})
	if err != nil {
		return err
	}
	if _, err := w.Write(data); err != nil {
		w.Abort()
		return err
	}
	return w.Commit()
}
