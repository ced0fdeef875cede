package agent

import (
	"net/netip"
	"reflect"
	"strings"
	"testing"
)

// fullIP6 is all but the last digit of an address.
const fullIP6 = "fd00:a9e7:0000:0000:0000:0000:0000:000"

func ip6(last byte) [16]byte { return [16]byte{0: 0xfd, 2: 0xa9, 3: 0xe7, 15: last} }

func TestFormatIPv6(t *testing.T) {
	for _, want := range []string{
		"::1", "fd00:a9e7::2", "1::", "1:2:3:4:5:6:7:8", "1:0:3:4:5:6:7:8", "1:0:0:4::8", "::2:0:0:5:6:7:8", "1:2:3:4:5:6::", "2001:db8::ff00:42:8329",
	} {
		a := netip.MustParseAddr(want)
		ip, ok := parseIPv6(a.StringExpanded())
		if got := formatIPv6(ip); !ok || got != a.String() || ip != a.As16() {
			t.Errorf("%s: %q, not %q (%t)", want, got, a, ok)
		}
	}
}

func TestParseCmdline(t *testing.T) {
	got, err := ParseCmdline(`console=ttyS0 quiet="a agentrun.x b" agentrun.root=/dev/vda agentrun.rootfstype=ext4 `+
		`agentrun.rootflags="noatime,data=ordered" agentrun.overlay=/dev/disk/by-id/x agentrun.hostname=a-1.b agentrun.ip=10.1.2.3/8,dns=1.2.3.4,gw=10.0.0.1,ip6=`+fullIP6+`2/126,gw6=`+fullIP6+`1,dns=`+fullIP6+`1 agentrun.port=7 -- agentrun.junk`, "agentrun.port")
	want := BootConfig{Root: "/dev/vda", RootFSType: "ext4", RootFlags: "noatime,data=ordered", Overlay: "/dev/disk/by-id/x", Hostname: "a-1.b",
		Net:   &NetConfig{Addr: [4]byte{10, 1, 2, 3}, Prefix: 8, Gateway: [4]byte{10, 0, 0, 1}, DNS: []string{"1.2.3.4", "fd00:a9e7::1"}, Addr6: ip6(2), Prefix6: 126, Gateway6: ip6(1)},
		Extra: map[string]string{"agentrun.port": "7"}}
	if err != nil || !reflect.DeepEqual(got, want) {
		t.Errorf("%+v, %v", got, err)
	}
	if got, err := ParseCmdline(""); err != nil || got.Root != "" || got.Overlay != OverlayTmpfs || got.RootFSType != "erofs" {
		t.Errorf("empty: %+v, %v", got, err)
	}
	for _, bad := range []string{
		"agentrun.typo=1", "agentrun.root", "agentrun.root=", "agentrun.root=vda", "agentrun.root=/dev/../etc", "agentrun.root=/dev/..", "agentrun.root=/dev/a/..", "agentrun.root=/dev/a/../b", "agentrun.root=/dev/.",
		"agentrun.root=/dev/a//b",
		"agentrun.root=/dev/a agentrun.root=/dev/a", "agentrun.rootfstype=erofs", "agentrun.overlay=none",
		"agentrun.root=/dev/a agentrun.rootfstype=../x", "agentrun.root=/dev/a agentrun.overlay=/etc", "agentrun.root=/dev/a agentrun.rootflags=a;b",
		"agentrun.hostname=", "agentrun.hostname=-a", "agentrun.hostname=a..b", "agentrun.hostname=" + strings.Repeat("a", 64),
		"agentrun.ip=", "agentrun.ip=1.2.3.4", "agentrun.ip=1.2.3.4/33", "agentrun.ip=1.2.3.4/0", "agentrun.ip=1.2.3/8", "agentrun.ip=1.2.3.4.5/8",
		"agentrun.ip=1.2.3.256/8", "agentrun.ip=0.0.0.0/8", "agentrun.ip=1.2.3.4/8,gw=x", "agentrun.ip=1.2.3.4/8,mtu=1.2.3.4", "agentrun.ip=1.2.3.4/8,",
		"agentrun.ip=1.2.3.4/8,gw=1.2.3.5,gw=1.2.3.5", "agentrun.ip=1.2.3.4/8" + strings.Repeat(",dns=1.1.1.1", 4), "agentrun.ip=01.2.3.0004/8",
		"agentrun.ip=1.2.3.4/8,ip6=" + fullIP6 + "2", "agentrun.ip=1.2.3.4/8,ip6=" + fullIP6 + "2/129", "agentrun.ip=1.2.3.4/8,ip6=" + fullIP6 + "2/0",
		"agentrun.ip=1.2.3.4/8,ip6=fd00::1/64", "agentrun.ip=1.2.3.4/8,gw6=" + fullIP6 + "1", "agentrun.ip=" + fullIP6 + "2/126",
		"agentrun.ip=1.2.3.4/8,ip6=" + fullIP6 + "2/126,ip6=" + fullIP6 + "2/126", "agentrun.ip=1.2.3.4/8,ip6=" + fullIP6 + "g/126",
		"agentrun.ip=1.2.3.4/8,ip6=0000:0000:0000:0000:0000:0000:0000:0000/126", "agentrun.ip=1.2.3.4/8,ip6=fd00:a9e7:0000:0000:0000:0000:0000.0001/126",
		`quote="open`, "zero\x00byte", strings.Repeat("x", maxCmdline+1),
	} {
		if got, err := ParseCmdline(bad); err == nil {
			t.Errorf("%q: %+v", bad, got)
		}
	}
}

func FuzzParseCmdline(f *testing.F) {
	f.Add(`console=ttyS0 agentrun.root=/dev/vda agentrun.ip=10.0.2.15/24,gw=10.0.2.2,dns=1.1.1.1 "a b"=c -- x`)
	f.Add("agentrun.overlay=none agentrun.root=/dev/vda\tagentrun.hostname=h")
	f.Fuzz(func(t *testing.T, line string) {
		cfg, err := ParseCmdline(line, "agentrun.extra")
		if err != nil {
			return
		}
		if cfg.Root != "" && (!strings.HasPrefix(cfg.Root, "/dev/") || strings.Contains(cfg.Root, "/.")) {
			t.Errorf("root %q", cfg.Root)
		}
		if len(cfg.Hostname) > 63 || strings.ContainsAny(cfg.RootFlags+cfg.Overlay+cfg.RootFSType, " \x00\n\"") {
			t.Errorf("%+v", cfg)
		}
		if n := cfg.Net; n != nil && (n.Prefix < 1 || n.Prefix > 32 || len(n.DNS) > 3) {
			t.Errorf("%+v", n)
		}
	})
}
