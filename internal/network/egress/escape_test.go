package egress

import (
	"context"
	"io"
	"net"
	"net/http"
	"net/netip"
	"slices"
	"strings"
	"testing"
	"time"

	"golang.org/x/net/dns/dnsmessage"

	"agentrun.dev/internal/network/policy"
)

// attempt is a program's attempt to reach a host that its policy does not allow. It
// must end in a log entry with the rule and the reason of its refusal, and reach no
// server.
type attempt struct {
	title string
	rules Rules
	// resolves lists names that the program resolves first.
	resolves []string
	try      func(t *testing.T, e *escape)
	// reaches lists what servers may see of it; empty if nothing.
	reaches []string
	rule    string
	reason  string
}

// escape is the world of one attempt.
type escape struct {
	*world
	s *Sandbox
}

// newEscape makes a world in which allowed.example and evil.example share a server.
func newEscape(t *testing.T, a attempt) *escape {
	t.Helper()
	w := newWorld(t)
	for name, records := range map[string][]string{
		"allowed.example":          {addrAllowed},
		"a.wild.example":           {addrAllowed},
		"evil.example":             {addrAllowed},
		"rebind.allowed.example":   {"10.0.0.1"},
		"meta.allowed.example":     {"169.254.169.254"},
		"loop.allowed.example":     {"127.0.0.1"},
		"zero.allowed.example":     {"0.0.0.0"},
		"host.allowed.example":     {addrHost},
		"gate.allowed.example":     {"10.255.255.1"},
		"cname.allowed.example":    {"=inner.example.", "10.0.0.1"},
		"intern.allowed.example":   {"=db.corp.", "10.1.2.3"},
		"alias.example":            {"=evil.example.", addrAllowed},
		"smuggle.allowed.example":  {addrAllowed, "allowed.example.=" + addrOther},
		"metadata.google.internal": {"169.254.169.254"},
	} {
		w.upstream.set(name+". A", records...)
	}
	w.upstream.set("mapped.allowed.example. AAAA", "::ffff:169.254.169.254")
	w.upstream.set("nat64.allowed.example. AAAA", "64:ff9b::a9fe:a9fe")
	w.serveTLS(t, addrAllowed+":443", addrOther+":443", "8.8.8.8:443")
	w.serveHTTP(t, http.HandlerFunc(func(rw http.ResponseWriter, r *http.Request) {
		if r.URL.Path == "/redirect" {
			http.Redirect(rw, r, "http://169.254.169.254/latest/meta-data/", http.StatusFound)
		}
	}), addrAllowed+":80", addrOther+":80")
	w.serveEcho(t, addrAllowed+":22", addrAllowed+":8443", addrOther+":22", "8.8.8.8:53", "8.8.8.8:853", "10.0.0.1:80", "127.0.0.1:7070",
		"169.254.169.254:80", addrHost+":7070", "10.255.255.1:22", "10.255.255.2:22", "10.1.2.3:5432")
	e := &escape{world: w, s: w.sandbox(t, a.rules)}
	resolve(t, e.s, a.resolves...)
	return e
}

// TestEscapes makes each attempt, one after the other. Each must be refused for its
// reason.
func TestEscapes(t *testing.T) {
	all := slices.Concat(addressAttempts(), dnsAttempts(), tlsAttempts(), otherAttempts())
	for _, h := range httpAttempts {
		all = append(all, attempt{
			title: "HTTP: " + h.title, rules: allow("allowed.example:80"), resolves: []string{"allowed.example"},
			try: sends(addrAllowed+":80", []byte(h.request)), reaches: h.reaches, rule: "allowed.example:80", reason: h.reason,
		})
	}
	titles := make(map[string]bool)
	for _, a := range all {
		if titles[a.title] {
			t.Errorf("%q is there twice", a.title)
		}
		titles[a.title] = true
		t.Run(a.title, func(t *testing.T) {
			e := newEscape(t, a)
			a.try(t, e)
			fits := func(entry Entry) bool {
				return (entry.Outcome == Refused || entry.Outcome == Cut) && entry.Rule == a.rule && strings.Contains(entry.Reason, a.reason)
			}
			found := last(t, e.s, fits)
			if found.Outcome == Refused && len(a.reaches) == 0 && found.Sent+found.Received > 0 {
				t.Errorf("bytes were moved: %+v", found)
			}
			if seen := e.seen(); !slices.Equal(seen, a.reaches) {
				t.Errorf("servers saw %q, want %q", seen, a.reaches)
			}
		})
	}
	if len(all) < 120 {
		t.Errorf("%d attempts", len(all))
	}
	t.Logf("%d attempts", len(all))
}

// dials tries to connect over TCP, and expects a refusal before the handshake.
func dials(to string) func(*testing.T, *escape) {
	return func(t *testing.T, e *escape) {
		if _, err := connect(t, e.s, to); !wasRefused(err) {
			t.Errorf("connect to %s: %v", to, err)
		}
	}
}

// datagram tries to send over UDP.
func datagram(to string) func(*testing.T, *escape) {
	return func(t *testing.T, e *escape) {
		if _, err := e.s.DialUDP(t.Context(), addrPort("10.255.255.2:4000"), addrPort(to)); !wasRefused(err) {
			t.Errorf("datagram to %s: %v", to, err)
		}
	}
}

// sends connects, sends pieces, and reads until the connection ends.
func sends(to string, pieces ...[]byte) func(*testing.T, *escape) {
	return func(t *testing.T, e *escape) {
		conn := mustConnect(t, e.s, to)
		for _, piece := range pieces {
			if _, err := conn.Write(piece); err != nil {
				break // it was refused already
			}
		}
		_ = conn.CloseWrite()
		_, _ = readAll(conn)
	}
}

// asks asks our DNS for a name, and expects no address.
func asks(name string, typ dnsmessage.Type, class dnsmessage.Class) func(*testing.T, *escape) {
	return func(t *testing.T, e *escape) {
		if m := ask(t, e.s, name, typ, class); m.RCode == dnsmessage.RCodeSuccess || len(m.Answers) > 0 {
			t.Errorf("%s: %v, %v", name, m.RCode, m.Answers)
		}
	}
}

func addressAttempts() []attempt {
	open := written("allow", nil, nil)
	var list []attempt
	for _, row := range []struct{ title, to, rule, reason string }{
		{"metadata", "169.254.169.254:80", "closed: metadata", "metadata of AWS"},
		{"metadata as mapped IPv6", "[::ffff:169.254.169.254]:80", "closed: metadata", "metadata of AWS"},
		{"metadata through NAT64", "[64:ff9b::a9fe:a9fe]:80", "closed: metadata", "inside of NAT64"},
		{"metadata through local NAT64", "[64:ff9b:1::a9fe:a9fe]:80", "closed: metadata", "inside of local NAT64"},
		{"metadata through 6to4", "[2002:a9fe:a9fe::1]:80", "closed: metadata", "inside of 6to4"},
		{"metadata as compatible IPv6", "[::a9fe:a9fe]:80", "closed: metadata", "inside of"},
		{"metadata as translated IPv6", "[::ffff:0:a9fe:a9fe]:80", "closed: metadata", "inside of"},
		{"metadata of AWS by IPv6", "[fd00:ec2::254]:80", "closed: metadata", "AWS"},
		{"metadata of Google by IPv6", "[fd20:ce::254]:80", "closed: metadata", "Google"},
		{"credentials of ECS", "169.254.170.2:80", "closed: metadata", "AWS"},
		{"the wire server of Azure", "168.63.129.16:80", "closed: metadata", "Azure"},
		{"metadata of Oracle", "192.0.0.192:80", "closed: metadata", "Oracle"},
		{"metadata of Alibaba", "100.100.100.200:80", "closed: metadata", "Alibaba"},
		{"link-local", "169.254.1.1:80", "closed: link-local", "link-local"},
		{"link-local IPv6", "[fe80::1]:80", "closed: link-local", "link-local"},
		{"loopback", "127.0.0.1:7070", "closed: loopback", "loopback"},
		{"another loopback", "127.8.8.8:7070", "closed: loopback", "loopback"},
		{"loopback IPv6", "[::1]:7070", "closed: loopback", "loopback"},
		{"loopback as mapped IPv6", "[::ffff:127.0.0.1]:7070", "closed: loopback", "loopback"},
		{"unspecified", "0.0.0.0:7070", "closed: unspecified", "unspecified"},
		{"unspecified IPv6", "[::]:7070", "closed: unspecified", "unspecified"},
		{"private 10", "10.0.0.1:80", "closed: private", "private"},
		{"private 172.16", "172.16.0.1:80", "closed: private", "private"},
		{"private 192.168", "192.168.1.1:80", "closed: private", "private"},
		{"private IPv6", "[fd12::1]:80", "closed: private", "private"},
		{"shared by a carrier", "100.64.0.1:80", "closed: private", "RFC 6598"},
		{"multicast", "224.0.0.251:80", "closed: multicast", "multicast"},
		{"multicast IPv6", "[ff02::1]:80", "closed: multicast", "multicast"},
		{"broadcast", "255.255.255.255:80", "closed: reserved", "reserved"},
		{"Teredo", "[2001:0:4136:e378:8000:63bf:3fff:fdd2]:80", "closed: reserved", "Teredo"},
		{"the node's API by the host's public address", addrHost + ":7070", "closed: host", "address of the host"},
		{"the gateway's other ports", "10.255.255.1:22", "closed: gateway", "serves DNS and nothing else"},
		{"the gateway's other ports by IPv6", "[fd00:a9e7::1]:22", "closed: gateway", "serves DNS and nothing else"},
		{"a sibling sandbox", "10.255.255.2:22", "closed: gateway", "gateway"},
		{"a sibling sandbox by IPv6", "[fd00:a9e7::2]:22", "closed: gateway", "gateway"},
	} {
		list = append(list, attempt{title: row.title, rules: open, try: dials(row.to), rule: row.rule, reason: row.reason})
	}
	datagrams := attempt{title: "metadata over UDP", rules: open, try: datagram("169.254.169.254:80"), rule: "closed: metadata", reason: "metadata"}
	return append(list, datagrams,
		attempt{title: "metadata by a wide rule", rules: allow("0.0.0.0/0"), try: dials("169.254.169.254:80"), rule: "closed: metadata", reason: "only a rule by address"},
		attempt{title: "private by a wide rule", rules: allow("0.0.0.0/0"), try: dials("10.0.0.1:80"), rule: "closed: private", reason: "only a rule by address"},
		attempt{title: "the gateway by a rule for private addresses", rules: allow("10.0.0.0/8"), try: dials("10.255.255.1:22"), rule: "closed: gateway", reason: "DNS and nothing else"},
		attempt{title: "the host's address by a wider rule", rules: allow("93.184.216.0/24"), try: dials(addrHost + ":7070"), rule: "closed: host", reason: "address of the host"},
		attempt{title: "a denied address in an allowed range", rules: written("deny", []string{"93.184.216.0/24"}, []string{addrOther}), try: dials(addrOther + ":22"), rule: addrOther, reason: "denies"},
		attempt{title: "a denied address by its NAT64 form", rules: written("allow", nil, []string{addrOther}), try: dials("[64:ff9b::5db8:d842]:22"), rule: addrOther, reason: "denies"},
		attempt{title: "metadata by a redirect", rules: allow("allowed.example:80"), resolves: []string{"allowed.example"}, try: redirected, reaches: []string{"http GET allowed.example /redirect"}, rule: "closed: metadata", reason: "metadata"},
	)
}

// redirected follows a redirect of an allowed server, as any HTTP client does.
func redirected(t *testing.T, e *escape) {
	transport := &http.Transport{DialContext: func(_ context.Context, _, address string) (net.Conn, error) {
		if strings.HasPrefix(address, "allowed.example") {
			address = addrAllowed + ":80"
		}
		return connect(t, e.s, address)
	}}
	defer transport.CloseIdleConnections()
	client := &http.Client{Transport: transport}
	if r, err := client.Get("http://allowed.example/redirect"); !wasRefused(err) {
		t.Errorf("got %v, %v", r, err)
	}
}

func dnsAttempts() []attempt {
	named := allow("allowed.example", "*.allowed.example")
	open := written("allow", nil, []string{"evil.example"})
	const a, in = dnsmessage.TypeA, dnsmessage.ClassINET
	return []attempt{
		{title: "DNS: a name that is not allowed", rules: named, try: asks("other.example", a, in), rule: "egress: deny", reason: "no rule is about"},
		{title: "DNS: the domain of a wildcard", rules: allow("*.wild.example"), try: asks("wild.example", a, in), rule: "egress: deny", reason: "no rule is about"},
		{title: "DNS: a name that ends like an allowed one", rules: named, try: asks("evilallowed.example", a, in), rule: "egress: deny", reason: "no rule is about"},
		{title: "DNS: a denied name", rules: open, try: asks("evil.example", a, in), rule: "evil.example", reason: "denies"},
		{title: "DNS: a denied name in another case", rules: open, try: asks("EVIL.Example", a, in), rule: "evil.example", reason: "denies"},
		{title: "DNS: an alias of a denied name", rules: open, try: asks("alias.example", a, in), rule: "dns", reason: "alias not allowed: evil.example"},
		{title: "DNS: data to an upstream by TXT", rules: named, try: asks("secret.other.example", dnsmessage.TypeTXT, in), rule: "egress: deny", reason: "no rule is about"},
		{title: "DNS: ANY", rules: named, try: asks("allowed.example", dnsmessage.TypeALL, in), rule: "dns", reason: "record type"},
		{title: "DNS: a zone transfer", rules: named, try: asks("allowed.example", 252, in), rule: "dns", reason: "record type"},
		{title: "DNS: CHAOS", rules: named, try: asks("allowed.example", dnsmessage.TypeTXT, dnsmessage.ClassCHAOS), rule: "dns", reason: "class"},
		{title: "DNS: PTR", rules: named, try: asks("34.216.184.93.in-addr.arpa", dnsmessage.TypePTR, in), rule: "egress: deny", reason: "no rule is about"},
		{title: "DNS: metadata in decimal", rules: written("allow", nil, nil), try: asks("2852039166", a, in), rule: "dns", reason: "not a valid host name"},
		{title: "DNS: metadata in hexadecimal", rules: written("allow", nil, nil), try: asks("0xa9fea9fe", a, in), rule: "dns", reason: "not a valid host name"},
		{title: "DNS: metadata in octal", rules: written("allow", nil, nil), try: asks("0251.0376.0251.0376", a, in), rule: "dns", reason: "not a valid host name"},
		{title: "DNS: metadata by name", rules: written("allow", nil, nil), try: asks("metadata.google.internal", a, in), rule: "closed", reason: "metadata"},
		{title: "DNS: an allowed name with a metadata address", rules: named, try: asks("meta.allowed.example", a, in), rule: "closed", reason: "metadata"},
		{title: "DNS: rebinding to a private address", rules: named, try: asks("rebind.allowed.example", a, in), rule: "closed", reason: "private"},
		{title: "DNS: rebinding to the loopback", rules: named, try: asks("loop.allowed.example", a, in), rule: "closed", reason: "loopback"},
		{title: "DNS: rebinding to 0.0.0.0", rules: named, try: asks("zero.allowed.example", a, in), rule: "closed", reason: "unspecified"},
		{title: "DNS: rebinding to the host", rules: named, try: asks("host.allowed.example", a, in), rule: "closed", reason: "address of the host"},
		{title: "DNS: rebinding to the gateway", rules: named, try: asks("gate.allowed.example", a, in), rule: "closed", reason: "gateway"},
		{title: "DNS: rebinding through NAT64", rules: named, try: asks("nat64.allowed.example", dnsmessage.TypeAAAA, in), rule: "closed", reason: "NAT64"},
		{title: "DNS: an alias to a private address", rules: named, try: asks("cname.allowed.example", a, in), rule: "closed", reason: "private"},
		{title: "DNS: an alias into an internal domain", rules: named, try: asks("intern.allowed.example", a, in), rule: "dns", reason: "internal domain"},
		{title: "DNS: an internal domain's metadata address", rules: allow("metadata.corp:80"), try: asks("metadata.corp", a, in), rule: "closed", reason: "metadata"},
		{title: "DNS: an internal name by default", rules: written("allow", nil, nil), try: func(t *testing.T, e *escape) {
			_, _ = lookup(t, e.s, "db.corp", a)
			dials("10.1.2.3:5432")(t, e)
		}, rule: "closed: private", reason: "private"},
		{title: "DNS: an address smuggled into another answer", rules: named, resolves: []string{"smuggle.allowed.example"}, try: dials(addrOther + ":443"), rule: "egress: deny", reason: "no name is pinned"},
		{title: "DNS: many names below a wildcard", rules: named, try: exfiltrates(func(i int) string { return string(rune('a'+i%26)) + string(rune('a'+i/26)) + ".allowed.example" }), rule: "dns", reason: "below one wildcard"},
		{title: "DNS: long names below a wildcard", rules: named, try: exfiltrates(func(i int) string {
			return strings.Repeat(string(rune('a'+i%26)), 60) + string(rune('a'+i/26)) + ".allowed.example"
		}), rule: "dns", reason: "below one wildcard"},
		{title: "DNS: many questions", rules: named, try: func(t *testing.T, e *escape) {
			for range 10_000 {
				if _, code := lookup(t, e.s, "allowed.example", a); code == dnsmessage.RCodeRefused {
					return
				}
			}
			t.Error("10,000 questions in a row were answered")
		}, rule: "dns", reason: "too many DNS queries"},
		{title: "DNS: another resolver", rules: named, try: datagram("8.8.8.8:53"), rule: "egress: deny", reason: "no name is pinned"},
		{title: "DNS: another resolver over TCP", rules: named, try: dials("8.8.8.8:53"), rule: "egress: deny", reason: "no name is pinned"},
		{title: "DNS: another resolver over TLS", rules: named, try: dials("8.8.8.8:853"), rule: "egress: deny", reason: "no name is pinned"},
		{title: "DNS: another resolver over HTTPS", rules: named, try: dials("8.8.8.8:443"), rule: "egress: deny", reason: "no name is pinned"},
		{title: "DNS: another resolver over HTTPS, at an allowed server", rules: named, resolves: []string{"allowed.example"}, try: sends(addrAllowed+":443", clientHello(sni("dns.google"))), rule: "allowed.example", reason: "says dns.google"},
		{title: "DNS: rebinding after the answer", rules: named, resolves: []string{"allowed.example"}, try: func(t *testing.T, e *escape) {
			// The program waits until the answer is old. The name's current address
			// is private.
			e.upstream.set("flip.allowed.example. A", "10.0.0.1")
			e.s = e.sandbox(t, named, Pin{Addr: addrPort(addrAllowed + ":443").Addr(), Name: "flip.allowed.example"})
			dials(addrAllowed+":443")(t, e)
		}, rule: "closed", reason: "private"},
		{title: "DNS: the address is closed after the answer", rules: named, resolves: []string{"allowed.example"}, try: func(t *testing.T, e *escape) {
			e.guard.SetClosed([]netip.Prefix{netip.MustParsePrefix("93.184.216.32/27")})
			dials(addrAllowed+":443")(t, e)
		}, rule: "closed: node-range", reason: "node's configuration"},
		{title: "DNS: another address is dialled than was decided", rules: named, resolves: []string{"allowed.example"}, try: func(t *testing.T, e *escape) {
			e.mu.Lock()
			e.detour = addrPort("169.254.169.254:80")
			e.mu.Unlock()
			dials(addrAllowed+":80")(t, e)
		}, rule: "closed: changed", reason: "would be dialled"},
	}
}

// exfiltrates sends data in names until it is refused, and expects that soon.
func exfiltrates(name func(int) string) func(*testing.T, *escape) {
	return func(t *testing.T, e *escape) {
		for i := range 300 {
			if _, code := lookup(t, e.s, name(i), dnsmessage.TypeA); code == dnsmessage.RCodeRefused {
				if n := len(e.upstream.questions()); n > 129 {
					t.Errorf("the upstream heard of %d names", n)
				}
				return
			}
		}
		t.Error("300 names were asked for")
	}
}

func tlsAttempts() []attempt {
	const to, rule = addrAllowed + ":443", "allowed.example:443"
	var list []attempt
	evil := clientHello(sni("evil.example"))
	for _, row := range []struct {
		title  string
		pieces [][]byte
		reason string
	}{
		{"another name", [][]byte{evil}, "says evil.example"},
		{"another name, byte by byte", slices.Collect(slices.Chunk(evil, 1)), "says evil.example"},
		{"another name, in records of one byte", [][]byte{reRecord(evil, 1)}, "says evil.example"},
		{"another name, in two segments", [][]byte{evil[:50], evil[50:]}, "says evil.example"},
		{"another name, behind an empty record", [][]byte{record(nil), evil}, "ClientHello"},
		{"another name in capitals", [][]byte{clientHello(sni("EVIL.EXAMPLE"))}, "says evil.example"},
		{"a name that ends like the allowed one", [][]byte{clientHello(sni("evilallowed.example"))}, "says evilallowed.example"},
		{"a name below the allowed one", [][]byte{clientHello(sni("evil.allowed.example"))}, "says evil.allowed.example"},
		{"no name", [][]byte{clientHello()}, "no server name"},
		{"an empty name", [][]byte{clientHello(sni(""))}, "ClientHello"},
		{"a list without names", [][]byte{clientHello(sni())}, "ClientHello"},
		{"NUL in the name", [][]byte{clientHello(sni("allowed.example\x00.evil.example"))}, "server name"},
		{"a name behind NUL", [][]byte{clientHello(sni("\x00allowed.example"))}, "server name"},
		{"a dot at the end", [][]byte{clientHello(sni("allowed.example."))}, "ClientHello"},
		{"a space at the end", [][]byte{clientHello(sni("allowed.example "))}, "server name"},
		{"an address as the name", [][]byte{clientHello(sni(addrAllowed))}, "server name"},
		{"an IPv6 address as the name", [][]byte{clientHello(sni("::1"))}, "server name"},
		{"a wildcard as the name", [][]byte{clientHello(sni("*.example"))}, "server name"},
		{"a name in UTF-8", [][]byte{clientHello(sni("аllowed.example"))}, "server name"},
		{"two names", [][]byte{clientHello(sni("allowed.example", "evil.example"))}, "ClientHello"},
		{"two names in two extensions", [][]byte{clientHello(sni("allowed.example"), sni("evil.example"))}, "ClientHello"},
		{"ECH", [][]byte{clientHello(sni("allowed.example"), ech())}, "(ECH)"},
		{"ESNI", [][]byte{clientHello(sni("allowed.example"), extension(extensionESNI, []byte{1, 2, 3}))}, "(ECH)"},
		{"not TLS", [][]byte{[]byte("GET / HTTP/1.1\r\nHost: allowed.example\r\n\r\n")}, "not TLS"},
		{"SSLv2", [][]byte{{0x80, 0x2e, 1, 3, 1, 0, 3, 0, 0, 0, 0x20}}, "not TLS"},
		{"an alert first", [][]byte{{21, 3, 1, 0, 2, 1, 0}, evil}, "ClientHello"},
		{"application data first", [][]byte{{23, 3, 3, 0, 1, 0}, evil}, "ClientHello"},
		{"half a ClientHello", [][]byte{evil[:len(evil)-1]}, "ClientHello"},
		{"another handshake message", [][]byte{record([]byte{2, 0, 0, 0})}, "ClientHello"},
		{"a ClientHello without end", [][]byte{{22, 3, 1, 0x40, 0, 1, 0, 0xff, 0xff}, make([]byte, 100<<10)}, "ClientHello"},
		{"a length that lies", [][]byte{record([]byte{1, 0, 0, 0})}, "ClientHello"},
		{"nothing", nil, "ClientHello"},
	} {
		list = append(list, attempt{title: "TLS: " + row.title, rules: allow(rule), resolves: []string{"allowed.example"}, try: sends(to, row.pieces...), rule: rule, reason: row.reason})
	}
	denying := written("allow", nil, []string{"evil.example"})
	return append(list,
		attempt{title: "TLS: silence", rules: allow(rule), resolves: []string{"allowed.example"}, try: func(t *testing.T, e *escape) {
			e.gateway.config.FirstBytes = 50 * time.Millisecond
			conn := mustConnect(t, e.s, to)
			_, _ = readAll(conn)
		}, rule: rule, reason: "timeout"},
		attempt{title: "TLS: an allowed name at an address that was not resolved", rules: allow(rule), resolves: []string{"allowed.example"}, try: dials(addrOther + ":443"), rule: "egress: deny", reason: "no name is pinned"},
		attempt{title: "TLS: an allowed name on another port", rules: allow(rule), resolves: []string{"allowed.example"}, try: dials(addrAllowed + ":8443"), rule: "egress: deny", reason: "egress is deny"},
		attempt{title: "TLS: a denied name at a server that is open", rules: denying, try: sends(to, evil), rule: "evil.example", reason: "denies"},
		attempt{title: "TLS: a denied name behind an alert", rules: denying, try: sends(to, []byte{21, 3, 1, 0, 2, 1, 100}, evil), rule: "egress: allow", reason: "ClientHello"},
		attempt{title: "TLS: a denied name in capitals", rules: denying, try: sends(to, clientHello(sni("Evil.EXAMPLE"))), rule: "evil.example", reason: "denies"},
		attempt{title: "TLS: a denied name behind ECH", rules: denying, try: sends(to, clientHello(sni("public.example"), ech())), rule: "egress: allow", reason: "(ECH)"},
		attempt{title: "TLS: a denied name with a dot at the end", rules: denying, try: sends(to, clientHello(sni("evil.example."))), rule: "egress: allow", reason: "ClientHello"},
		attempt{title: "TLS: a name that one of two policies allows", rules: both(allow("allowed.example:443", "evil.example:443"), allow("allowed.example:443")), resolves: []string{"allowed.example"}, try: sends(to, evil), rule: rule, reason: "says evil.example"},
	)
}

// both is the policy of a sandbox that is bounded by two policies.
func both(template, claim Rules) Rules {
	set, err := policy.Narrow(template.Policy, claim.Policy[0])
	if err != nil {
		panic(err)
	}
	return Rules{Policy: set}
}

func otherAttempts() []attempt {
	byName := allow("allowed.example:443", "allowed.example:22", "allowed.example:80")
	resolved := []string{"allowed.example"}
	pinned := Pin{Addr: addrPort(addrAllowed + ":443").Addr(), Name: "allowed.example"}
	fork := func(rules Rules, to string, pins ...Pin) func(*testing.T, *escape) {
		return func(t *testing.T, e *escape) {
			e.s = e.sandbox(t, rules, append(e.s.Inheritance().Pins, pins...)...)
			dials(to)(t, e)
		}
	}
	return []attempt{
		{title: "UDP: QUIC to an allowed name", rules: byName, resolves: resolved, try: datagram(addrAllowed + ":443"), rule: "egress: deny", reason: "egress is deny"},
		{title: "UDP: QUIC where names are denied", rules: written("allow", nil, []string{"evil.example"}), try: datagram(addrAllowed + ":443"), rule: "egress: allow", reason: "QUIC"},
		{title: "UDP: another port than the rule's", rules: allow("udp://" + addrOther + ":123"), try: datagram(addrOther + ":124"), rule: "egress: deny", reason: "no name is pinned"},
		{title: "UDP: a rule for TCP", rules: allow(addrOther + ":123"), try: datagram(addrOther + ":123"), rule: "egress: deny", reason: "no name is pinned"},
		{title: "TCP: a rule for UDP", rules: allow("udp://" + addrOther + ":22"), try: dials(addrOther + ":22"), rule: "egress: deny", reason: "no name is pinned"},
		{title: "HTTP: a denied name at a server that is open", rules: written("allow", nil, []string{"evil.example"}), try: sends(addrAllowed+":80", []byte("GET / HTTP/1.1\r\nHost: evil.example\r\n\r\n")), rule: "evil.example", reason: "denies"},
		{title: "HTTP: a denied name as an absolute URI", rules: written("allow", nil, []string{"evil.example"}), try: sends(addrAllowed+":80", []byte("GET http://evil.example/ HTTP/1.1\r\nHost: x.example\r\n\r\n")), rule: "evil.example", reason: "denies"},
		{title: "HTTP: the address of another server as Host", rules: written("allow", nil, []string{"evil.example"}), try: sends(addrAllowed+":80", []byte("GET / HTTP/1.1\r\nHost: "+addrOther+"\r\n\r\n")), rule: "egress: allow", reason: "host"},
		{title: "no policy", rules: Rules{}, try: dials(addrOther + ":22"), rule: "egress: deny", reason: "no network policy"},
		{title: "a raw address", rules: byName, resolves: resolved, try: dials(addrOther + ":22"), rule: "egress: deny", reason: "no name is pinned"},
		{title: "another port of an allowed name", rules: byName, resolves: resolved, try: dials(addrAllowed + ":8443"), rule: "egress: deny", reason: "egress is deny"},
		{title: "revoked while it runs", rules: byName, resolves: resolved, try: func(t *testing.T, e *escape) {
			conn := mustConnect(t, e.s, addrAllowed+":22")
			_, _ = io.WriteString(conn, "x")
			if _, err := io.ReadFull(conn, make([]byte, 1)); err != nil {
				t.Fatal(err)
			}
			e.s.SetRules(allow("allowed.example:443"))
			if _, err := readAll(conn); err == nil {
				t.Error("the connection ended as if its server had ended it")
			}
		}, reaches: []string{"raw connection"}, rule: "egress: deny", reason: "egress is deny"},
		{title: "revoked before the name was said", rules: byName, resolves: resolved, try: func(t *testing.T, e *escape) {
			conn := mustConnect(t, e.s, addrAllowed+":443")
			e.s.SetRules(allow("allowed.example:22"))
			_, _ = conn.Write(clientHello(sni("allowed.example")))
			_, _ = readAll(conn)
		}, rule: "egress: deny", reason: "egress is deny"},
		{title: "revoked between two requests", rules: byName, resolves: resolved, try: func(t *testing.T, e *escape) {
			conn := mustConnect(t, e.s, addrAllowed+":80")
			_, _ = io.WriteString(conn, good)
			if _, err := io.ReadFull(conn, make([]byte, 1)); err != nil {
				t.Fatal(err)
			}
			e.s.SetRules(allow())
			_, _ = io.WriteString(conn, good)
			_, _ = readAll(conn)
		}, reaches: reachesGood, rule: "egress: deny", reason: "egress is deny"},
		{title: "closed ranges change while it runs", rules: byName, resolves: resolved, try: func(t *testing.T, e *escape) {
			conn := mustConnect(t, e.s, addrAllowed+":22")
			_, _ = io.WriteString(conn, "x")
			if _, err := io.ReadFull(conn, make([]byte, 1)); err != nil {
				t.Fatal(err)
			}
			e.guard.SetClosed([]netip.Prefix{netip.MustParsePrefix("93.184.216.34/32")})
			e.s.Recheck()
			_, _ = readAll(conn)
		}, reaches: []string{"raw connection"}, rule: "closed: node-range", reason: "node's configuration"},
		{title: "fork: the parent's pins with a narrower policy", rules: byName, resolves: resolved, try: fork(both(byName, allow("other.example:22")), addrAllowed+":22"), rule: "egress: deny", reason: "egress is deny"},
		{title: "fork: a wider policy", rules: byName, resolves: resolved, try: fork(both(byName, written("allow", nil, nil)), addrOther+":22"), rule: "egress: deny", reason: "no name is pinned"},
		{title: "fork: a rule that the parent lacks", rules: byName, resolves: resolved, try: fork(both(byName, allow(addrOther+":22")), addrOther+":22"), rule: "egress: deny", reason: "no name is pinned"},
		{title: "fork: a pin to metadata", rules: byName, try: fork(byName, "169.254.169.254:80", Pin{Addr: addrPort("169.254.169.254:80").Addr(), Name: "allowed.example", Internal: true}), rule: "closed: metadata", reason: "metadata"},
		{title: "fork: a pin of a name that is not allowed", rules: allow("other.example:22"), try: fork(allow("other.example:22"), addrAllowed+":22", pinned), rule: "egress: deny", reason: "egress is deny"},
	}
}
