package agent

import (
	"strconv"
	"strings"
)

// maxCmdline is COMMAND_LINE_SIZE of the largest architecture (arm64, x86: 2048).
const maxCmdline = 4096

// BootConfig holds the sandbox's settings from the kernel command line. Their keys
// begin with "agentrun.". All other keys belong to the kernel and are skipped.
type BootConfig struct {
	Root       string            // agentrun.root=/dev/vda; "" stays in the initramfs
	RootFSType string            // agentrun.rootfstype=erofs, the default
	RootFlags  string            // agentrun.rootflags=, mount options of the root
	Overlay    string            // agentrun.overlay=tmpfs, the default, none, or /dev/vdb (ext4)
	Hostname   string            // agentrun.hostname=
	Net        *NetConfig        // agentrun.ip=10.0.2.15/24,gw=10.0.2.2,dns=10.0.2.3; and ip6=, gw6=
	Extra      map[string]string // the keys that the caller declared
}

// The values of BootConfig.Overlay that are not a device.
const (
	OverlayTmpfs = "tmpfs"
	OverlayNone  = "none"
)

// NetConfig holds the addresses of eth0.
type NetConfig struct {
	Addr     [4]byte
	Prefix   int
	Gateway  [4]byte  // zero: no default route
	Addr6    [16]byte // zero: no IPv6 address
	Prefix6  int
	Gateway6 [16]byte // zero: no default route
	DNS      []string // addresses of either kind
}

// ParseCmdline reads the kernel command line. It is strict: an unknown agentrun key
// that is not among extra, a key given twice and an invalid value are errors. A
// sandbox that boots without a requested setting is worse than one that does not
// boot.
func ParseCmdline(line string, extra ...string) (BootConfig, error) {
	cfg := BootConfig{RootFSType: "erofs", Overlay: OverlayTmpfs}
	if len(line) > maxCmdline {
		return cfg, fail(ErrTooLarge, "parse", "kernel command line", "longer than 4096 bytes")
	}
	seen := make(map[string]bool, 8)
	for line != "" {
		var word string
		var err error
		if word, line, err = nextWord(line); err != nil {
			return cfg, err
		}
		if word == "--" {
			break // the rest is init's argument list
		}
		key, value, _ := strings.Cut(word, "=")
		if !strings.HasPrefix(key, "agentrun.") {
			continue
		}
		if seen[key] {
			return cfg, fail(ErrInvalid, "parse", key, "given twice on the kernel command line")
		}
		seen[key] = true
		if err := cfg.set(key, value, extra); err != nil {
			return cfg, err
		}
	}
	if cfg.Root == "" && (seen["agentrun.rootfstype"] || seen["agentrun.rootflags"] || seen["agentrun.overlay"]) {
		return cfg, fail(ErrInvalid, "parse", "kernel command line", "agentrun.root is missing, but how to mount it is given")
	}
	return cfg, nil
}

func (cfg *BootConfig) set(key, value string, extra []string) error {
	var good bool
	var want string
	switch key {
	case "agentrun.root":
		cfg.Root, good, want = value, validDevice(value), "a device such as /dev/vda"
	case "agentrun.rootfstype":
		cfg.RootFSType, good, want = value, validFSType(value), "a filesystem such as erofs"
	case "agentrun.rootflags":
		cfg.RootFlags, good, want = value, validFlags(value), "mount options such as noatime,user_xattr"
	case "agentrun.overlay":
		cfg.Overlay, good, want = value, value == OverlayTmpfs || value == OverlayNone || validDevice(value), "tmpfs, none or a device"
	case "agentrun.hostname":
		cfg.Hostname, good, want = value, ValidHostname(value), "a host name of at most 63 letters, digits and hyphens"
	case "agentrun.ip":
		cfg.Net, good = parseNet(value)
		want = "ADDRESS/PREFIX[,gw=ADDRESS][,dns=ADDRESS]..."
	default:
		for _, name := range extra {
			if name == key {
				if cfg.Extra == nil {
					cfg.Extra = make(map[string]string, len(extra))
				}
				cfg.Extra[key] = value
				return nil
			}
		}
		return fail(ErrInvalid, "parse", key, "unknown key on the kernel command line")
	}
	if !good {
		return fail(ErrInvalid, "parse", key+"="+value, "want "+want)
	}
	return nil
}

// nextWord cuts the first word off. As in the kernel's next_arg, blanks inside
// double quotes do not end it, and the quotes around a value are dropped.
func nextWord(line string) (word, rest string, err error) {
	line = strings.TrimLeft(line, " \t\n\r")
	quoted := false
	i := 0
	for ; i < len(line); i++ {
		switch c := line[i]; {
		case c == '"':
			quoted = !quoted
		case c == 0:
			return "", "", fail(ErrInvalid, "parse", "kernel command line", "it holds a zero byte")
		case !quoted && (c == ' ' || c == '\t' || c == '\n' || c == '\r'):
			return strings.ReplaceAll(line[:i], `"`, ""), line[i+1:], nil
		}
	}
	if quoted {
		return "", "", fail(ErrInvalid, "parse", "kernel command line", "a quote is not closed")
	}
	return strings.ReplaceAll(line, `"`, ""), "", nil
}

func validDevice(s string) bool {
	name, ok := strings.CutPrefix(s, "/dev/")
	if !ok || len(s) > 128 {
		return false
	}
	for elem := range strings.SplitSeq(name, "/") {
		if elem == "" || elem[0] == '.' || !only(elem, isAlnum, "._-:") {
			return false
		}
	}
	return true
}

func validFSType(s string) bool {
	return s != "" && len(s) <= 16 && only(s, isAlnum, "")
}

func validFlags(s string) bool {
	return s != "" && len(s) <= 512 && only(s, isAlnum, "._-:=,/+%")
}

// ValidHostname accepts one label of RFC 1123, or several with dots, 63 bytes in all.
// The kernel takes 64 bytes, and many programs take fewer.
func ValidHostname(s string) bool {
	if len(s) > 63 {
		return false
	}
	for label := range strings.SplitSeq(s, ".") {
		if label == "" || label[0] == '-' || label[len(label)-1] == '-' || !only(label, isAlnum, "-") {
			return false
		}
	}
	return true
}

func isAlnum(c byte) bool {
	return c >= 'a' && c <= 'z' || c >= 'A' && c <= 'Z' || c >= '0' && c <= '9'
}

func only(s string, class func(byte) bool, also string) bool {
	for i := range len(s) {
		if !class(s[i]) && strings.IndexByte(also, s[i]) < 0 {
			return false
		}
	}
	return true
}

// maxDNS is MAXNS of resolv.conf(5).
const maxDNS = 3

func parseNet(s string) (*NetConfig, bool) {
	var n NetConfig
	first, rest, more := strings.Cut(s, ",")
	addr, bits, ok := cutPrefix(first, 32)
	if ok {
		n.Addr, ok = parseIPv4(addr)
	}
	n.Prefix = bits
	for ok && more {
		var part string
		part, rest, more = strings.Cut(rest, ",")
		key, value, _ := strings.Cut(part, "=")
		ok = n.set(key, value)
	}
	if !ok || n.Gateway6 != [16]byte{} && n.Addr6 == [16]byte{} {
		return nil, false
	}
	return &n, true
}

// set sets one of the settings that follow the address. Only dns may come more than
// once.
func (n *NetConfig) set(key, value string) (ok bool) {
	switch {
	case key == "gw" && n.Gateway == [4]byte{}:
		n.Gateway, ok = parseIPv4(value)
	case key == "ip6" && n.Addr6 == [16]byte{}:
		if value, n.Prefix6, ok = cutPrefix(value, 128); ok {
			n.Addr6, ok = parseIPv6(value)
		}
	case key == "gw6" && n.Gateway6 == [16]byte{}:
		n.Gateway6, ok = parseIPv6(value)
	case key == "dns" && len(n.DNS) < maxDNS:
		var server string
		server, ok = parseServer(value)
		n.DNS = append(n.DNS, server)
	}
	return ok
}

// cutPrefix splits an address and the length of its network's prefix.
func cutPrefix(s string, most uint64) (addr string, bits int, ok bool) {
	addr, prefix, _ := strings.Cut(s, "/")
	n, err := strconv.ParseUint(prefix, 10, 8)
	return addr, int(n), err == nil && n >= 1 && n <= most && len(prefix) <= 3
}

// parseIPv4 exists because net/netip starts goroutines of its own. 0.0.0.0 is not a
// valid address here.
func parseIPv4(s string) (ip [4]byte, ok bool) {
	for i := range 4 {
		part, rest, more := strings.Cut(s, ".")
		n, err := strconv.ParseUint(part, 10, 8)
		if err != nil || len(part) > 3 || more != (i < 3) {
			return ip, false
		}
		ip[i], s = byte(n), rest
	}
	return ip, ip != [4]byte{}
}

func formatIPv4(ip [4]byte) string {
	return strconv.Itoa(int(ip[0])) + "." + strconv.Itoa(int(ip[1])) + "." + strconv.Itoa(int(ip[2])) + "." + strconv.Itoa(int(ip[3]))
}
