package policy

import (
	"net/netip"
	"strings"
	"testing"

	"agentrun.dev/internal/network/addresses"
)

func must(t testing.TB, egress string, allow, deny []string) Policy {
	t.Helper()
	p, err := Parse(egress, allow, deny)
	if err != nil {
		t.Fatal(err)
	}
	return p
}

func list(text string) []string { return strings.Fields(text) }

// TestName: the rules by name, and their precedence.
func TestName(t *testing.T) {
	for _, c := range []struct {
		egress, allow, deny string
		name                Name
		proto               Protocol
		port                uint16
		allowed             bool
		rule                string
	}{
		{"deny", "a.example:443", "", "a.example", TCP, 443, true, "a.example:443"},
		{"deny", "a.example:443", "", "a.example", TCP, 80, false, "egress: deny"},
		{"deny", "a.example:443", "", "a.example", UDP, 443, false, "egress: deny"},
		{"deny", "a.example", "", "a.example", TCP, 22, true, "a.example"},
		{"deny", "a.example", "", "b.a.example", TCP, 22, false, "egress: deny"},
		{"deny", "udp://a.example:443", "", "a.example", UDP, 443, true, "udp://a.example:443"},
		{"deny", "udp://a.example:443", "", "a.example", TCP, 443, false, "egress: deny"},
		{"deny", "*.a.example", "", "a.example", TCP, 443, false, "egress: deny"},
		{"deny", "*.a.example", "", "b.a.example", TCP, 443, true, "*.a.example"},
		{"deny", "*.a.example", "", "d.c.b.a.example", TCP, 443, true, "*.a.example"},
		{"deny", "*.a.example", "", "ba.example", TCP, 443, false, "egress: deny"},
		{"deny", "*.a.example", "", "xa.example", TCP, 443, false, "egress: deny"},
		// The more precise rule wins, whether it allows or denies.
		{"deny", "*.a.example", "b.a.example", "b.a.example", TCP, 443, false, "b.a.example"},
		{"deny", "*.a.example", "b.a.example", "c.a.example", TCP, 443, true, "*.a.example"},
		{"deny", "b.a.example", "*.a.example", "b.a.example", TCP, 443, true, "b.a.example"},
		{"deny", "*.a.example", "*.b.a.example", "c.b.a.example", TCP, 443, false, "*.b.a.example"},
		{"deny", "*.b.a.example", "*.a.example", "c.b.a.example", TCP, 443, true, "*.b.a.example"},
		// The host comes before the port.
		{"deny", "*.a.example:443", "b.a.example", "b.a.example", TCP, 443, false, "b.a.example"},
		{"deny", "b.a.example", "*.a.example:443", "b.a.example", TCP, 443, true, "b.a.example"},
		{"deny", "a.example:443", "a.example", "a.example", TCP, 443, true, "a.example:443"},
		{"deny", "a.example", "a.example:25", "a.example", TCP, 25, false, "a.example:25"},
		{"deny", "a.example", "a.example:25", "a.example", TCP, 26, true, "a.example"},
		// At equal precision deny wins; the protocol does not make a rule more precise.
		{"deny", "a.example", "a.example", "a.example", TCP, 1, false, "a.example"},
		{"deny", "a.example:1", "a.example:1", "a.example", TCP, 1, false, "a.example:1"},
		{"allow", "tcp://a.example", "a.example", "a.example", TCP, 1, false, "a.example"},
		{"allow", "", "a.example", "a.example", UDP, 1, false, "a.example"},
		{"allow", "", "udp://a.example", "a.example", TCP, 1, true, "egress: allow"},
		{"allow", "", "*.a.example", "b.a.example", UDP, 53, false, "*.a.example"},
		{"allow", "", "*.a.example", "a.example", TCP, 53, true, "egress: allow"},
		{"allow", "", "10.0.0.0/8", "a.example", TCP, 53, true, "egress: allow"},
	} {
		p := must(t, c.egress, list(c.allow), list(c.deny))
		d := p.Name(c.name, c.proto, c.port)
		if d.Allowed != c.allowed || d.Rule != c.rule || d.Reason == "" {
			t.Errorf("egress %s, allow %s, deny %s: %s:%d of %s: %+v; want %v by %s", c.egress, c.allow, c.deny, c.proto, c.port, c.name, d, c.allowed, c.rule)
		}
	}
}

type nobody struct{}

func (nobody) Owns(a netip.Addr) (bool, string, error) {
	return a == netip.MustParseAddr("10.1.0.5"), "an address of the host", nil
}

var guard = addresses.NewGuard(nobody{}, []netip.Prefix{netip.MustParsePrefix("10.96.0.0/12")})

// query is a connection to an address. A name that ends with ! is internal.
func query(proto Protocol, to string, names ...string) Query {
	a := netip.MustParseAddrPort(to)
	q := Query{Protocol: proto, To: guard.Check(a.Addr()), Port: a.Port()}
	for _, n := range names {
		name, internal := strings.CutSuffix(n, "!")
		q.Names = append(q.Names, Pinned{Name(name), internal})
	}
	return q
}

// TestConnect: names and addresses together, and closed addresses.
func TestConnect(t *testing.T) {
	for _, c := range []struct {
		egress, allow, deny string
		proto               Protocol
		to, names           string
		allowed             bool
		rule                string
		needed              bool   // the connection must have one of these names
		left                string // the names that it may be for
	}{
		// By name.
		{"deny", "a.example:443", "", TCP, "1.1.1.1:443", "a.example", true, "a.example:443", true, "a.example"},
		{"deny", "a.example:443", "", TCP, "1.1.1.1:80", "a.example", false, "egress: deny", false, ""},
		{"deny", "a.example:443", "", TCP, "1.1.1.1:443", "", false, "egress: deny", false, ""},
		{"deny", "a.example:443", "", TCP, "1.1.1.1:443", "b.example", false, "egress: deny", false, ""},
		{"deny", "a.example:443", "", TCP, "1.1.1.1:443", "b.example a.example", true, "a.example:443", true, "a.example"},
		{"deny", "a.example:443", "", UDP, "1.1.1.1:443", "a.example", false, "egress: deny", false, ""},
		{"deny", "*.example", "b.example", TCP, "1.1.1.1:443", "a.example b.example", true, "*.example", true, "a.example"},
		{"deny", "*.example", "b.example", TCP, "1.1.1.1:443", "b.example", false, "b.example", false, ""},
		// By address.
		{"deny", "1.1.1.0/24:443", "", TCP, "1.1.1.1:443", "", true, "1.1.1.0/24:443", false, ""},
		{"deny", "1.1.1.0/24:443", "", TCP, "1.1.1.1:80", "", false, "egress: deny", false, ""},
		{"deny", "1.1.1.0/24", "", UDP, "1.1.1.1:443", "", false, "egress: deny", false, ""},
		{"deny", "udp://1.1.1.1:53", "", UDP, "1.1.1.1:53", "", true, "udp://1.1.1.1:53", false, ""},
		{"deny", "1.1.1.0/24:443", "", TCP, "[::ffff:1.1.1.1]:443", "", true, "1.1.1.0/24:443", false, ""},
		{"deny", "[2606:4700::/32]:443", "", TCP, "[2606:4700::1]:443", "", true, "[2606:4700::/32]:443", false, ""},
		{"deny", "1.1.1.0/24", "1.1.1.1", TCP, "1.1.1.1:1", "", false, "1.1.1.1", false, ""},
		{"deny", "1.1.1.1", "1.1.1.0/24", TCP, "1.1.1.1:1", "", true, "1.1.1.1", false, ""},
		{"deny", "1.1.1.0/24:443", "1.1.1.0/24", TCP, "1.1.1.1:443", "", true, "1.1.1.0/24:443", false, ""},
		{"deny", "1.1.1.0/24", "1.1.1.0/24", TCP, "1.1.1.1:443", "", false, "1.1.1.0/24", false, ""},
		// A denied address is denied for every name.
		{"deny", "a.example", "1.1.1.0/24", TCP, "1.1.1.1:443", "a.example", false, "1.1.1.0/24", false, ""},
		{"deny", "a.example", "1.0.0.0/8", TCP, "1.1.1.1:443", "a.example", false, "1.0.0.0/8", false, ""},
		{"deny", "a.example 1.1.1.1", "1.0.0.0/8", TCP, "1.1.1.1:443", "a.example", true, "1.1.1.1", false, "a.example"},
		{"allow", "a.example", "1.0.0.0/8", TCP, "1.1.1.1:443", "a.example", false, "1.0.0.0/8", false, ""},
		// An allowed address is allowed for every name.
		{"deny", "1.1.1.1", "b.example", TCP, "1.1.1.1:443", "b.example", true, "1.1.1.1", false, "b.example"},
		// A denied IPv4 address is also denied within IPv6. An allowed one is not
		// allowed within IPv6.
		{"allow", "", "1.1.1.0/24", TCP, "[64:ff9b::1.1.1.1]:443", "", false, "1.1.1.0/24", false, ""},
		{"allow", "", "1.1.1.0/24", TCP, "[64:ff9b::1.1.2.1]:443", "", true, "egress: allow", false, ""},
		{"deny", "1.1.1.0/24", "", TCP, "[64:ff9b::1.1.1.1]:443", "", false, "egress: deny", false, ""},
		{"deny", "64:ff9b::101:101", "1.1.1.0/24", TCP, "[64:ff9b::1.1.1.1]:443", "", true, "64:ff9b::101:101", false, ""},
		{"deny", "64:ff9b::/96", "1.1.1.0/24", TCP, "[64:ff9b::1.1.1.1]:443", "", false, "1.1.1.0/24", false, ""},
		{"deny", "64:ff9b::/96", "0.0.0.0/0", TCP, "[64:ff9b::1.1.1.1]:443", "", false, "0.0.0.0/0", false, ""},
		// The default.
		{"allow", "", "", TCP, "1.1.1.1:25", "", true, "egress: allow", false, ""},
		{"allow", "", "", UDP, "1.1.1.1:443", "", true, "egress: allow", false, ""},
		{"allow", "", "b.example", TCP, "1.1.1.1:443", "b.example", false, "b.example", false, ""},
		{"allow", "", "b.example", TCP, "1.1.1.1:443", "b.example a.example", true, "egress: allow", false, "a.example"},
		{"allow", "", "b.example", UDP, "1.1.1.1:443", "", false, "egress: allow", false, ""},
		{"allow", "", "b.example", UDP, "1.1.1.1:443", "a.example", false, "egress: allow", false, ""},
		{"allow", "", "b.example", UDP, "1.1.1.1:123", "", true, "egress: allow", false, ""},
		{"allow", "udp://a.example:443", "b.example", UDP, "1.1.1.1:443", "a.example", true, "udp://a.example:443", false, "a.example"},
		{"allow", "", "b.example:25", TCP, "1.1.1.1:443", "b.example", true, "egress: allow", false, "b.example"},
		// Closed addresses.
		{"allow", "", "", TCP, "10.2.0.1:80", "", false, "closed: private", false, ""},
		{"allow", "", "", TCP, "127.0.0.1:80", "", false, "closed: loopback", false, ""},
		{"allow", "", "", TCP, "169.254.169.254:80", "", false, "closed: metadata", false, ""},
		{"allow", "", "", TCP, "[::ffff:169.254.169.254]:80", "", false, "closed: metadata", false, ""},
		{"allow", "", "", TCP, "[64:ff9b::a9fe:a9fe]:80", "", false, "closed: metadata", false, ""},
		{"allow", "", "", TCP, "0.0.0.0:80", "", false, "closed: unspecified", false, ""},
		{"deny", "a.example", "", TCP, "10.2.0.1:80", "a.example", false, "closed: private", false, ""},
		{"deny", "10.2.0.0/16:80", "", TCP, "10.2.0.1:80", "", true, "10.2.0.0/16:80", false, ""},
		{"allow", "10.2.0.0/16:80", "", TCP, "10.2.0.1:80", "", true, "10.2.0.0/16:80", false, ""},
		{"allow", "10.2.0.0/16:80", "", TCP, "10.2.0.1:81", "", false, "closed: private", false, ""},
		{"deny", "0.0.0.0/0", "", TCP, "10.2.0.1:80", "", false, "closed: private", false, ""},
		{"deny", "0.0.0.0/0", "", TCP, "1.1.1.1:80", "", true, "0.0.0.0/0", false, ""},
		{"deny", "10.0.0.0/8", "", TCP, "10.1.0.5:80", "", false, "closed: host", false, ""},
		{"deny", "10.1.0.5", "", TCP, "10.1.0.5:80", "", true, "10.1.0.5", false, ""},
		{"deny", "10.0.0.0/8", "", TCP, "10.96.0.1:80", "", false, "closed: node-range", false, ""},
		{"deny", "10.96.0.0/16", "", TCP, "10.96.0.1:80", "", true, "10.96.0.0/16", false, ""},
		{"deny", "169.254.169.254", "", TCP, "169.254.169.254:80", "", true, "169.254.169.254", false, ""},
		{"deny", "10.2.0.0/16", "10.2.3.0/24", TCP, "10.2.3.4:80", "", false, "10.2.3.0/24", false, ""},
		// Internal domains.
		{"deny", "db.svc:5432", "", TCP, "10.96.0.1:5432", "db.svc!", true, "db.svc:5432", true, "db.svc"},
		{"deny", "db.svc:5432", "", TCP, "10.2.0.1:5432", "db.svc! a.example", true, "db.svc:5432", true, "db.svc"},
		{"deny", "db.svc:5432", "", TCP, "10.2.0.1:5432", "db.svc", false, "closed: private", false, ""},
		{"deny", "db.svc:5432", "", TCP, "10.2.0.1:5433", "db.svc!", false, "closed: private", false, ""},
		{"deny", "db.svc:5432", "10.2.0.0/16", TCP, "10.2.0.1:5432", "db.svc!", false, "10.2.0.0/16", false, ""},
		{"allow", "", "", TCP, "10.2.0.1:5432", "db.svc!", false, "closed: private", false, ""},
		{"allow", "*.svc", "", TCP, "10.2.0.1:5432", "db.svc!", true, "*.svc", true, "db.svc"},
		{"deny", "db.svc", "", TCP, "127.0.0.1:5432", "db.svc!", false, "closed: loopback", false, ""},
		{"deny", "db.svc", "", TCP, "169.254.169.254:80", "db.svc!", false, "closed: metadata", false, ""},
		{"deny", "db.svc", "", TCP, "10.1.0.5:80", "db.svc!", false, "closed: host", false, ""},
		{"deny", "db.svc", "", TCP, "1.1.1.1:80", "db.svc!", true, "db.svc", true, "db.svc"},
	} {
		s := Set{must(t, c.egress, list(c.allow), list(c.deny))}
		got := s.Connect(query(c.proto, c.to, list(c.names)...))
		var left []string
		for _, n := range got.Names {
			left = append(left, string(n))
		}
		if got.Allowed != c.allowed || got.Rule != c.rule || got.Reason == "" || got.NameNeeded != c.needed || strings.Join(left, " ") != c.left {
			t.Errorf("egress %s, allow %s, deny %s: %s to %s (%s):\n got %+v\nwant %v by %s, names %q, needed %v", c.egress, c.allow, c.deny, c.proto, c.to, c.names, got, c.allowed, c.rule, c.left, c.needed)
		}
	}
}
