package addresses

import (
	"errors"
	"net/netip"
	"strings"
	"testing"
)

// table has the class of each address, from the address alone.
var table = []struct {
	addr  string
	class Class
}{
	{"1.1.1.1", Public}, {"8.8.8.8", Public}, {"93.184.216.34", Public}, {"9.255.255.255", Public}, {"11.0.0.0", Public},
	{"100.63.255.255", Public}, {"100.128.0.0", Public}, {"126.255.255.255", Public}, {"128.0.0.1", Public},
	{"169.253.255.255", Public}, {"169.255.0.0", Public}, {"172.15.255.255", Public}, {"172.32.0.0", Public},
	{"192.0.1.1", Public}, {"192.167.255.255", Public}, {"192.169.0.0", Public}, {"198.17.255.255", Public}, {"198.20.0.0", Public},
	{"168.63.129.15", Public}, {"168.63.129.17", Public}, {"223.255.255.255", Public}, {"192.31.196.1", Public},
	{"2606:4700:4700::1111", Public}, {"2a00:1450:4001::200e", Public}, {"2001:4860:4860::8888", Public}, {"2001:200::1", Public},
	{"::ffff:8.8.8.8", Public}, {"64:ff9b::8.8.8.8", Public}, {"64:ff9b::808:808", Public},

	{"0.0.0.0", Unspecified}, {"::", Unspecified}, {"::ffff:0.0.0.0", Unspecified}, {"64:ff9b::", Unspecified}, {"2002::1", Unspecified},

	{"127.0.0.1", Loopback}, {"127.255.255.254", Loopback}, {"127.0.0.53", Loopback}, {"::1", Loopback}, {"::ffff:127.0.0.1", Loopback},
	{"64:ff9b::127.0.0.1", Loopback}, {"2002:7f00:1::", Loopback}, {"::127.0.0.1", Loopback}, {"::ffff:0:127.0.0.1", Loopback},

	{"169.254.1.1", LinkLocal}, {"169.254.20.10", LinkLocal}, {"fe80::1", LinkLocal}, {"fe80::1%eth0", LinkLocal}, {"febf::1", LinkLocal},
	{"64:ff9b::169.254.1.1", LinkLocal},

	{"169.254.169.254", Metadata}, {"::ffff:169.254.169.254", Metadata}, {"::ffff:a9fe:a9fe", Metadata}, {"64:ff9b::a9fe:a9fe", Metadata},
	{"64:ff9b:1::a9fe:a9fe", Metadata}, {"64:ff9b:1:a9fe:a9:fe00::", Metadata}, {"64:ff9b:1:a9:fe:a9fe::", Metadata}, {"64:ff9b:1:0:a9:fea9:fe00:0", Metadata},
	{"2002:a9fe:a9fe::1", Metadata}, {"::169.254.169.254", Metadata}, {"::ffff:0:169.254.169.254", Metadata},
	{"2001:0:a9fe:a9fe::1", Metadata}, {"2001:0:101:101::5601:5601", Metadata}, {"fe80::a9fe:a9fe", Metadata},
	{"fd00:ec2::254", Metadata}, {"fd00:ec2::23", Metadata}, {"fd20:ce::254", Metadata}, {"168.63.129.16", Metadata}, {"::ffff:168.63.129.16", Metadata},
	{"64:ff9b::168.63.129.16", Metadata}, {"192.0.0.192", Metadata}, {"fd00:c1::a9fe:a9fe", Metadata}, {"100.100.100.200", Metadata},
	{"100.96.0.96", Metadata}, {"64:ff9b::100.96.0.96", Metadata},
	{"169.254.170.2", Metadata}, {"169.254.170.23", Metadata}, {"169.254.0.23", Metadata}, {"169.254.42.42", Metadata}, {"fd00:42::42", Metadata},
	{"169.254.169.255", Metadata}, {"fd00:a9fe:a9fe::1", Metadata},

	{"10.0.0.0", Private}, {"10.255.255.255", Private}, {"172.16.0.1", Private}, {"172.31.255.255", Private}, {"192.168.0.1", Private},
	{"100.64.0.0", Private}, {"100.127.255.255", Private}, {"192.0.0.9", Private}, {"198.18.0.1", Private}, {"198.19.255.255", Private},
	{"fc00::1", Private}, {"fd00::1", Private}, {"fdff:ffff::1", Private}, {"fec0::1", Private}, {"::ffff:10.0.0.1", Private},
	{"64:ff9b::10.0.0.1", Private}, {"64:ff9b::192.168.1.1", Private}, {"64:ff9b::100.64.0.1", Private}, {"2002:c0a8:101::1", Private}, {"2002:0a00:1::", Private},

	{"224.0.0.1", Multicast}, {"239.255.255.255", Multicast}, {"ff02::1", Multicast}, {"ff0e::1", Multicast}, {"64:ff9b::224.0.0.1", Multicast},

	{"0.0.0.1", Reserved}, {"0.255.255.255", Reserved}, {"192.0.2.1", Reserved}, {"198.51.100.7", Reserved}, {"203.0.113.7", Reserved},
	{"192.88.99.1", Reserved}, {"240.0.0.1", Reserved}, {"255.255.255.255", Reserved}, {"2001:db8::1", Reserved}, {"3fff::1", Reserved},
	{"2001:2::1", Reserved}, {"2001:10::1", Reserved}, {"100::1", Reserved}, {"5f00::1", Reserved}, {"4000::1", Reserved}, {"fe00::1", Reserved},
	{"2002:808:808::1", Reserved}, {"::8.8.8.8", Reserved}, {"2001:0:808:808::f7f7:f7f7", Reserved}, {"64:ff9b:1::808:808", Reserved}, {"64:ff9b:1::10.1.2.3", Private},
}

func TestClassify(t *testing.T) {
	g := NewGuard(nobody{}, nil)
	for _, row := range table {
		a := netip.MustParseAddr(row.addr)
		if got := Classify(a); got != row.class {
			t.Errorf("%s is %v, want %v", row.addr, got, row.class)
		}
		v := g.Check(a)
		if v.Class != row.class || v.Closed() != (row.class != Public) || v.Closed() == (v.Reason == "") {
			t.Errorf("%s: the guard says %+v, want class %v", row.addr, v, row.class)
		}
		if v.Closed() && !v.Range.Contains(v.Addr) {
			t.Errorf("%s is closed by %v, which does not hold it", row.addr, v.Range)
		}
	}
	if v := g.Check(netip.Addr{}); !v.Closed() || v.Class != Invalid || v.OpenedBy(netip.MustParsePrefix("0.0.0.0/0")) {
		t.Errorf("no address: %+v", v)
	}
}

// nobody is a host without addresses of its own. hosts is one with the listed
// addresses.
type nobody struct{}

func (nobody) Owns(netip.Addr) (bool, string, error) { return false, "", nil }

type hosts map[string]bool

func (h hosts) Owns(a netip.Addr) (bool, string, error) {
	return h[a.String()], "an address of the host", nil
}

type unknowing struct{}

func (unknowing) Owns(netip.Addr) (bool, string, error) {
	return false, "", errors.New("out of memory")
}

// TestOpenedBy: a rule opens its range, and no narrower closed range within it.
func TestOpenedBy(t *testing.T) {
	ranges, err := ParseRanges([]string{"10.96.0.0/12", " 2a00:1::/32", "8.8.4.4", "169.254.169.254/32"})
	if err != nil {
		t.Fatal(err)
	}
	g := NewGuard(hosts{"10.1.0.5": true, "93.184.216.34": true, "2a00:2::5": true, "0.0.0.0": true}, ranges)
	for _, row := range []struct {
		addr, rule string
		opens      bool
		class      Class
	}{
		{"10.1.2.3", "10.0.0.0/8", true, Private},
		{"10.1.2.3", "10.1.0.0/16", true, Private},
		{"10.1.2.3", "10.2.0.0/16", false, Private},
		{"10.1.2.3", "0.0.0.0/0", false, Private},
		{"10.1.2.3", "8.0.0.0/5", false, Private},
		{"10.1.0.5", "10.1.0.0/16", false, Host},
		{"10.1.0.5", "10.1.0.5/32", true, Host},
		{"10.100.0.1", "10.0.0.0/8", false, NodeRange},
		{"10.100.0.1", "10.100.0.0/16", true, NodeRange},
		{"10.100.0.1", "10.96.0.0/12", true, NodeRange},
		{"2a00:1::7", "2a00::/16", false, NodeRange},
		{"2a00:1::7", "2a00:1::/32", true, NodeRange},
		{"2a00:2::5", "2a00:2::/32", false, Host},
		{"2a00:2::6", "2a00:2::/32", true, Public},
		{"8.8.4.4", "8.8.4.0/24", false, NodeRange},
		{"64:ff9b::8.8.4.4", "64:ff9b::/96", false, NodeRange},
		{"64:ff9b::8.8.4.4", "64:ff9b::808:404/128", true, NodeRange},
		{"93.184.216.34", "93.184.216.0/24", false, Host},
		{"64:ff9b::93.184.216.34", "64:ff9b::/96", false, Host},
		{"::ffff:93.184.216.34", "93.184.216.34/32", true, Host},
		{"2002:5db8:d822::1", "2002::/16", false, Host},
		{"64:ff9b::10.1.2.3", "64:ff9b::/96", false, Private},
		{"64:ff9b::10.1.2.3", "64:ff9b::a00:0/104", true, Private},
		{"64:ff9b::10.1.2.3", "10.0.0.0/8", false, Private},
		{"64:ff9b:1::8.8.8.8", "64:ff9b:1::/96", true, Reserved},
		{"64:ff9b:1::10.1.2.3", "64:ff9b:1::/96", false, Private},
		{"169.254.169.254", "169.254.0.0/16", false, Metadata},
		{"169.254.169.254", "169.254.169.254/32", true, Metadata},
		{"169.254.1.1", "169.254.0.0/16", true, LinkLocal},
		{"100.100.100.200", "100.64.0.0/10", false, Metadata},
		{"fd00:ec2::254", "fd00::/8", false, Metadata},
		{"127.0.0.1", "127.0.0.0/8", true, Loopback},
		{"8.8.8.8", "1.0.0.0/8", true, Public},
	} {
		v := g.Check(netip.MustParseAddr(row.addr))
		if v.Class != row.class || v.OpenedBy(netip.MustParsePrefix(row.rule)) != row.opens {
			t.Errorf("%s: %+v; %s opens it: %v, want class %v and %v", row.addr, v, row.rule, !row.opens, row.class, row.opens)
		}
	}
	g.SetClosed(nil)
	if v := g.Check(netip.MustParseAddr("8.8.4.4")); v.Closed() {
		t.Errorf("8.8.4.4 is closed after its range was taken back: %s", v.Reason)
	}
}

// TestHostNotKnown: without the kernel's answer an address is closed for every rule.
func TestHostNotKnown(t *testing.T) {
	g := NewGuard(unknowing{}, nil)
	for _, addr := range []string{"8.8.8.8", "10.0.0.1", "2a00::1"} {
		a := netip.MustParseAddr(addr)
		if v := g.Check(a); !v.Closed() || v.OpenedBy(single(a)) || !strings.Contains(v.Reason, "out of memory") {
			t.Errorf("%s: %+v", addr, v)
		}
	}
}

func TestParsePrefix(t *testing.T) {
	for text, want := range map[string]string{"10.1.0.0/16": "10.1.0.0/16", "10.1.2.3": "10.1.2.3/32", "2001:db8::/32": "2001:db8::/32", "::1": "::1/128", "0.0.0.0/0": "0.0.0.0/0"} {
		if p, err := ParsePrefix(text); err != nil || p.String() != want {
			t.Errorf("%s: %v, %v, want %s", text, p, err, want)
		}
	}
	for text, say := range map[string]string{
		"": "not an address", "10.1.2.3/16": "write 10.1.0.0/16", "fe80::1%eth0": "zone", "::ffff:10.0.0.1": "write 10.0.0.1", "::ffff:10.0.0.0/104": "as IPv4",
		"10.0.0.0/33": "not a range", "010.0.0.1": "not an address", "10.1": "not an address", "2130706433": "not an address", "0x7f.0.0.1": "not an address",
		"fe80::%eth0/64": "not a range", strings.Repeat("1", 100): "more than",
	} {
		if p, err := ParsePrefix(text); err == nil || !strings.Contains(err.Error(), say) {
			t.Errorf("%q: %v, %v, want an error with %q", text, p, err, say)
		}
	}
	if _, err := ParseRanges(make([]string, maxRanges+1)); err == nil {
		t.Error("too many ranges are taken")
	}
	if _, err := ParseRanges([]string{"10.0.0.0/8", "x"}); err == nil || !strings.Contains(err.Error(), "[1]") {
		t.Errorf("a bad range: %v", err)
	}
}

// FuzzCheck: an address that stands for a closed one is never open, whatever its
// bytes.
func FuzzCheck(f *testing.F) {
	for _, row := range table {
		f.Add(netip.MustParseAddr(row.addr).AsSlice())
	}
	g := NewGuard(hosts{"93.184.216.34": true}, nil)
	f.Fuzz(func(t *testing.T, b []byte) {
		a, ok := netip.AddrFromSlice(b)
		v := g.Check(a)
		if !ok != (v.Class == Invalid) {
			t.Fatalf("%x: %+v", b, v)
		}
		if v.Closed() {
			if v.OpenedBy(netip.MustParsePrefix("0.0.0.0/0")) || v.OpenedBy(netip.MustParsePrefix("::/0")) && v.Range.Bits() > 0 {
				t.Fatalf("%v is opened by a rule for everything: %+v", a, v)
			}
			return
		}
		if a = a.Unmap(); !a.IsGlobalUnicast() || a.IsPrivate() || a.String() == "93.184.216.34" {
			t.Fatalf("%v is open: %+v", a, v)
		}
		for _, inner := range Embedded(a) {
			if g.Check(inner).Closed() {
				t.Fatalf("%v is open and stands for %v, which is closed", a, inner)
			}
		}
	})
}
