package network

import (
	_ "embed"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"agentrun.dev/api/rest"
	"agentrun.dev/internal/client"
	"agentrun.dev/internal/network/netctl"
)

//go:embed testdata/attempts.py
var attempts string

// attempt is one try of a program in a sandbox to reach a target that its policy does
// not allow.
type attempt struct {
	sandbox string // strict, or open
	// call is a function of testdata/attempts.py and its arguments.
	call []any
	// want is a regular expression for the result that the program sees.
	want string
	// target, rule and reason are those of the attempt's line in the log; target is a part
	// of the address or name. Without a target there is no line, because no rule has
	// decided: the sandbox's own kernel has answered (own), or netd has dropped the frame
	// and counted it by a reason (dropped) that is not the policy's.
	target, rule, reason string
	without              without
}

// without is the reason why the log has no line of an attempt: own, unanswered, or the reason
// by which netd counts dropped frames (stack.Drop).
type without string

const (
	// own is the sandbox's own loopback: no packet has left it.
	own without = "own"
	// unanswered is a question that is allowed and is answered without an address: no
	// connection follows, and no name server was asked.
	unanswered without = "unanswered"
)

func try(name string, args ...any) []any { return append([]any{name}, args...) }

const (
	refused = "^ECONNREFUSED$"
	nothing = "^timeout$|^ECONNREFUSED$|^EHOSTUNREACH$|^ENETUNREACH$|^EACCES$|^EPERM$"
	unknown = "^unknown name$"
	// unsent is the result of packets that only the sandbox's own kernel answers.
	unsent = "^sent, no answer$|^ENOTSUP$|^EPERM$|^EINVAL$|^EADDRNOTAVAIL$"
)

// addressAttempts use addresses, in all forms, from a sandbox that may reach the
// public internet.
var addressAttempts = []attempt{
	{"open", try("tcp", "169.254.169.254", 80), refused, "169.254.169.254:80", "closed: metadata", "metadata", ""},
	{"open", try("tcp", "2852039166", 80), refused, "169.254.169.254:80", "closed: metadata", "metadata", ""},
	{"open", try("tcp", "0251.0376.0251.0376", 80), refused, "169.254.169.254:80", "closed: metadata", "metadata", ""},
	{"open", try("tcp", "0xa9fea9fe", 8080), refused, "169.254.169.254:8080", "closed: metadata", "metadata", ""},
	{"open", try("tcp", "::ffff:169.254.169.254", 8081), refused, "169.254.169.254:8081", "closed: metadata", "metadata", ""},
	{"open", try("tcp", "64:ff9b::a9fe:a9fe", 80), refused, "64:ff9b::a9fe:a9fe", "closed: metadata", "inside of NAT64", ""},
	{"open", try("tcp", "2002:a9fe:a9fe::1", 80), refused, "2002:a9fe:a9fe::1", "closed: metadata", "inside of 6to4", ""},
	{"open", try("tcp", "fd00:ec2::254", 80), refused, "fd00:ec2::254", "closed: metadata", "metadata", ""},
	{"open", try("tcp", "100.100.100.200", 80), refused, "100.100.100.200", "closed: metadata", "metadata", ""},
	{"open", try("tcp", "168.63.129.16", 80), refused, "168.63.129.16", "closed: metadata", "Azure", ""},
	{"open", try("tcp", "192.0.0.192", 80), refused, "192.0.0.192", "closed: metadata", "metadata", ""},
	{"open", try("tcp", "169.254.170.2", 80), refused, "169.254.170.2", "closed: metadata", "metadata", ""},
	{"open", try("tcp", "169.254.1.1", 80), refused, "169.254.1.1", "closed: link-local", "link-local", ""},
	{"open", try("tcp", "10.77.0.1", 80), refused, "10.77.0.1:80", "closed: private", "private", ""},
	{"open", try("tcp", "::ffff:10.77.0.1", 81), refused, "10.77.0.1:81", "closed: private", "private", ""},
	{"open", try("tcp", "64:ff9b::a4d:1", 80), refused, "64:ff9b::a4d:1", "closed: private", "inside of NAT64", ""},
	{"open", try("tcp", "192.168.0.1", 80), refused, "192.168.0.1", "closed: private", "private", ""},
	{"open", try("tcp", "172.16.0.1", 80), refused, "172.16.0.1", "closed: private", "private", ""},
	{"open", try("tcp", "100.64.0.1", 80), refused, "100.64.0.1", "closed: private", "carrier", ""},
	{"open", try("tcp", "fd12::1", 80), refused, "fd12::1", "closed: private", "private", ""},
	{"open", try("tcp", "198.51.100.1", 80), refused, "198.51.100.1", "closed: reserved", "documentation", ""},
	{"open", try("tcp", "240.0.0.1", 80), refused, "240.0.0.1", "closed: reserved", "RFC 1112", ""},
	{"open", try("tcp", "25.1.100.2", 7070), refused, "25.1.100.2:7070", "closed: host", "host", ""},
	{"open", try("tcp", "::ffff:25.1.100.2", 7070), refused, "25.1.100.2:7070", "closed: host", "host", ""},
	{"open", try("tcp", "2600:db8:1::2", 7070), refused, "2600:db8:1::2", "closed: host", "host", ""},
	{"open", try("tcp", "64:ff9b::1901:6402", 7070), refused, "64:ff9b::1901:6402", "closed: host", "address of the host", ""},
	{"open", try("tcp", "127.0.0.1", 7070), refused, "", "", "", own},
	{"open", try("tcp", "0.0.0.0", 7070), refused, "", "", "", own},
	{"open", try("tcp", "::1", 7070), refused, "", "", "", own},
	{"open", try("tcp", "::", 7070), refused, "", "", "", own},
	{"open", try("tcp", "10.255.255.1", 80), refused, "10.255.255.1:80", "closed: gateway", "serves DNS and nothing else", ""},
	{"open", try("tcp", "10.255.255.1", 7070), refused, "10.255.255.1:7070", "closed: gateway", "serves DNS and nothing else", ""},
	{"open", try("tcp", "fd00:a9e7::1", 22), refused, "fd00:a9e7::1", "closed: gateway", "serves DNS and nothing else", ""},
	{"open", try("tcp", "10.0.0.1", 443), refused, "10.0.0.1:443", "closed: private", "private", ""},
	{"open", try("tcp", "172.31.255.254", 22), refused, "172.31.255.254:22", "closed: private", "private", ""},
	{"open", try("tcp", "192.0.2.1", 80), refused, "192.0.2.1:80", "closed: reserved", "documentation", ""},
	{"open", try("tcp", "203.0.113.1", 80), refused, "203.0.113.1:80", "closed: reserved", "documentation", ""},
	{"open", try("tcp", "2001:db8::1", 80), refused, "2001:db8::1", "closed: reserved", "documentation", ""},
	{"open", try("tcp", "::ffff:100.100.100.200", 81), refused, "100.100.100.200:81", "closed: metadata", "metadata", ""},
	{"open", try("tcp", "64:ff9b::6464:64c8", 80), refused, "64:ff9b::6464:64c8", "closed: metadata", "inside of NAT64", ""},
	{"open", try("tcp", "2002:a4d:1::1", 80), refused, "2002:a4d:1::1", "closed: private", "inside of 6to4", ""},
	{"open", try("udp", "fd00:ec2::254", 123), nothing, "fd00:ec2::254", "closed: metadata", "metadata", ""},
	{"open", try("udp", "10.255.255.1", 123), nothing, "10.255.255.1:123", "closed: gateway", "serves DNS and nothing else", ""},
	{"open", try("udp", "169.254.169.254", 123), nothing, "169.254.169.254:123", "closed: metadata", "metadata", ""},
	{"open", try("udp", "25.1.100.2", 7070), nothing, "25.1.100.2:7070", "closed: host", "host", ""},
	{"open", try("udp", "224.0.0.251", 5353), nothing, "", "", "", "multicast"},
	{"open", try("udp", "255.255.255.255", 68), nothing, "", "", "", "multicast"},
	{"strict", try("tcp", "25.1.113.11", 80), refused, "25.1.113.11:80", "egress: deny", "no name is pinned", ""},
	{"strict", try("tcp", "25.1.113.10", 22), refused, "25.1.113.10:22", "egress: deny", "no rule is about tcp port 22", ""},
	{"strict", try("tcp", "2600:db8:5::10", 80), refused, "2600:db8:5::10", "egress: deny", "no name is pinned", ""},
	{"strict", try("udp", "25.1.113.10", 443), nothing, "25.1.113.10:443", "egress: deny", "no rule is about udp port 443", ""},
	{"strict", try("udp", "25.1.113.11", 123), nothing, "25.1.113.11:123", "egress: deny", "no name is pinned", ""},
}

// nameAttempts use names: in DNS, TLS and HTTP.
var nameAttempts = []attempt{
	{"strict", try("resolve", "evil.example.org"), unknown, "evil.example.org", "egress: deny", "no rule is about tcp of evil.example.org", ""},
	{"strict", try("resolve", "secret-data.attacker.example.net"), unknown, "attacker.example.net", "egress: deny", "no rule is about tcp of secret-data", ""},
	{"strict", try("resolve", "allowed.example.org.attacker.example.net"), unknown, "allowed.example.org.attacker", "egress: deny", "no rule is about tcp of allowed.example.org.attacker", ""},
	{"strict", try("resolve", "meta.tricky.example.org"), unknown, "meta.tricky.example.org", "closed", "metadata", ""},
	{"strict", try("resolve", "private.tricky.example.org"), unknown, "private.tricky.example.org", "closed", "private", ""},
	{"strict", try("resolve", "loop.tricky.example.org"), unknown, "loop.tricky.example.org", "closed", "loopback", ""},
	{"strict", try("resolve", "zero.tricky.example.org"), unknown, "zero.tricky.example.org", "closed", "unspecified", ""},
	{"strict", try("resolve", "host.tricky.example.org"), unknown, "host.tricky.example.org", "closed", "host", ""},
	{"strict", try("resolve", "gate.tricky.example.org"), unknown, "gate.tricky.example.org", "closed", "gateway", ""},
	{"strict", try("resolve", "nat64.tricky.example.org"), unknown, "nat64.tricky.example.org", "closed", "inside of NAT64", ""},
	{"strict", try("resolve", "alias.tricky.example.org"), unknown, "alias.tricky.example.org", "closed", "private", ""},
	{"open", try("resolve", "evil.example.org"), unknown, "evil.example.org", "evil.example.org", "denies", ""},
	{"strict", try("dns", "10.255.255.1", "allowed.example.org", 16), "rcode [05], 0 answers", "", "", "", unanswered},                                      // TXT
	{"strict", try("dns", "10.255.255.1", "allowed.example.org", 65), "rcode [05], 0 answers", "", "", "", unanswered},                                      // HTTPS
	{"strict", try("dns", "10.255.255.1", "allowed.example.org", 255), "rcode [05], 0 answers", "allowed.example.org", "dns", "record type not served", ""}, // ANY
	{"strict", try("dns_stream", "10.255.255.1", "evil.example.org", 1), "rcode [35], 0 answers", "evil.example.org", "egress: deny", "no rule is about tcp of evil.example.org", ""},
	{"strict", try("dns", "25.1.113.53", "evil.example.org", 1), nothing, "25.1.113.53:53", "egress: deny", "no rule allows udp to 25.1.113.53:53", ""},
	{"strict", try("dns_stream", "25.1.113.53", "evil.example.org", 1), refused, "25.1.113.53:53", "egress: deny", "no rule allows tcp to 25.1.113.53:53", ""},
	{"strict", try("tcp", "25.1.113.53", 853), refused, "25.1.113.53:853", "egress: deny", "no name is pinned", ""}, // DNS over TLS
	{"strict", try("tls", "25.1.113.53", "dns.example.org"), refused, "25.1.113.53:443", "egress: deny", "no name is pinned", ""},

	{"strict", try("tls", "allowed.example.org", "evil.example.org"), "ECONNRESET", "evil.example.org", "allowed.example.org:443", "evil.example.org", ""},
	{"strict", try("tls", "allowed.example.org", "evil2.example.org", 1), "ECONNRESET|EPIPE", "evil2.example.org", "allowed.example.org:443", "evil2.example.org", ""},
	{"strict", try("tls", "allowed.example.org", "evil3.example.org", 1<<20, 20), "ECONNRESET|EPIPE", "evil3.example.org", "allowed.example.org:443", "evil3.example.org", ""},
	{"strict", try("tls", "allowed.example.org", nil), "ECONNRESET", "25.1.113.10:443", "allowed.example.org:443", "no server name", ""},
	{"strict", try("tls", "25.1.113.10", "evil4.example.org"), "ECONNRESET", "evil4.example.org", "allowed.example.org:443", "evil4.example.org", ""},
	{"strict", try("tcp", "allowed.example.org", 443, "SSH-2.0-tunnel\r\n"), "ECONNRESET", "25.1.113.10:443", "allowed.example.org:443", "not TLS", ""},
	{"open", try("tls", "25.1.113.10", "evil.example.org"), "ECONNRESET", "evil.example.org", "evil.example.org", "denies", ""},

	{"strict", try("tcp", "allowed.example.org", 80, "GET / HTTP/1.1\r\nHost: evil5.example.org\r\n\r\n"), "421 Misdirected", "evil5.example.org", "allowed.example.org:80", "says evil5.example.org", ""},
	{"strict", try("tcp", "allowed.example.org", 80, "GET / HTTP/1.1\r\nHost: allowed.example.org\r\n\r\nGET / HTTP/1.1\r\nHost: evil6.example.org\r\n\r\n"), "(?s)200 OK.*421 Misdirected", "evil6.example.org", "allowed.example.org:80", "says evil6.example.org", ""},
	{"strict", try("tcp", "allowed.example.org", 80, "GET / HTTP/1.1\r\nHost: allowed.example.org\r\nHost: evil7.example.org\r\n\r\n"), "400 Bad Request", "25.1.113.10:80", "allowed.example.org:80", "not a well-formed", ""},
	{"strict", try("tcp", "allowed.example.org", 80, "GET http://evil8.example.org/ HTTP/1.1\r\nHost: allowed.example.org\r\n\r\n"), "421 Misdirected", "evil8.example.org", "allowed.example.org:80", "says evil8.example.org", ""},
	{"strict", try("tcp", "allowed.example.org", 80, "CONNECT 10.77.0.1:80 HTTP/1.1\r\nHost: 10.77.0.1:80\r\n\r\n"), "403 Forbidden", "25.1.113.10:80", "allowed.example.org:80", "CONNECT", ""},
	{"strict", try("tcp", "allowed.example.org", 80, "GET / HTTP/1.1\r\nHost: allowed.example.org\r\nConnection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAMAAABkAAQAAP__\r\n\r\n"), "403 Forbidden", "25.1.113.10:80", "allowed.example.org:80", "upgrade", ""},
	{"strict", try("tcp", "allowed.example.org", 80, "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"), "40[0-9]|403|ECONNRESET|505", "25.1.113.10:80", "allowed.example.org:80", "HTTP/2 without TLS", ""},
	{"strict", try("tcp", "allowed.example.org", 80, "POST / HTTP/1.1\r\nHost: allowed.example.org\r\nContent-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\nGET / HTTP/1.1\r\nHost: evil9.example.org\r\n\r\n"), "421|400", "evil9.example.org", "allowed.example.org:80", "says evil9.example.org", ""},
	{"strict", try("tcp", "allowed.example.org", 80, "SSH-2.0-tunnel\r\n\r\n"), "400 Bad Request", "25.1.113.10:80", "allowed.example.org:80", "not a well-formed", ""},
	{"strict", try("tcp", "allowed.example.org", 80, "GET / HTTP/1.0\r\n\r\n"), "421 Misdirected", "25.1.113.10:80", "allowed.example.org:80", "host", ""},
	{"strict", try("tcp", "allowed.example.org", 80, "GET / HTTP/1.1\r\nHost: 169.254.169.254\r\n\r\n"), "421 Misdirected", "25.1.113.10:80", "allowed.example.org:80", "host", ""},
	{"strict", try("tcp", "allowed.example.org", 80, "GET / HTTP/1.1\r\nHost: evil10.example.org:80\r\n\r\n"), "421 Misdirected", "evil10.example.org", "allowed.example.org:80", "says evil10.example.org", ""},
	{"strict", try("tcp", "allowed.example.org", 8080), refused, "25.1.113.10:8080", "egress: deny", "no rule is about tcp port 8080", ""},
	{"strict", try("tcp", "allowed.example.org", 8443), refused, "25.1.113.10:8443", "egress: deny", "no rule is about tcp port 8443", ""},
}

// packetAttempts send packets that a kernel would not send, to addresses that the policy
// allows. netd drops them before a policy is asked, so the log has no line of them. gVisor
// does not send frames that a program has made (ENOTSUP), but does send IP packets.
var packetAttempts = []attempt{
	{"strict", try("ping", "25.1.113.10"), nothing, "", "", "", "protocol"},
	{"open", try("ping", "169.254.169.254"), nothing, "", "", "", "protocol"},
	{"strict", try("spoofed", "frame", "25.1.113.99", "25.1.113.70", 9100), unsent, "", "", "", "spoofed"},
	{"strict", try("spoofed", "raw", "25.1.113.99", "25.1.113.70", 9101), unsent, "", "", "", "spoofed"},
	{"strict", try("spoofed", "frame", "10.255.255.1", "25.1.113.70", 9102), unsent, "", "", "", "spoofed"},
	{"strict", try("spoofed", "raw", "10.255.255.1", "25.1.113.70", 9103), unsent, "", "", "", "spoofed"},
	{"strict", try("spoofed", "frame", "127.0.0.1", "25.1.113.70", 9104), unsent, "", "", "", "spoofed"},
	{"strict", try("spoofed_udp", "raw", "10.255.255.3", "25.1.113.70", 9105), unsent, "", "", "", "spoofed"},
	{"strict", try("fragments", "frame", "25.1.113.70", 9106), unsent, "", "", "", "fragment"},
	{"strict", try("fragments", "raw", "25.1.113.70", 9107), unsent, "", "", "", "fragment"},
	{"strict", try("routed", "frame", "10.77.0.1", "25.1.113.70", 9108), unsent, "", "", "", "options"},
	{"strict", try("routed", "raw", "10.77.0.1", "25.1.113.70", 9109), unsent, "", "", "", "options"},
	{"strict", try("tunnelled", "frame", "25.1.113.70", 9110), unsent, "", "", "", "protocol"},
	{"strict", try("tunnelled", "raw", "25.1.113.70", 9111), unsent, "", "", "", "protocol"},
	{"strict", try("foreign", "25.1.113.70", 9112), unsent, "", "", "", "foreign-mac"},
	{"strict", try("tagged", "25.1.113.70", 9113), unsent, "", "", "", "vlan"},
}

// canaries are the addresses of servers that no attempt may reach.
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

// serveCanaries starts the servers of the attempts: those that may be reached,
// and canaries.
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

// wholeLog returns all entries in the log of a sandbox's network.
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

// TestEscapes: programs in real sandboxes try to escape in different ways. They see a
// refusal, the log names the rule and the reason, and no server sees a request.
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
	// These calls show that the sandboxes are connected and that packets made by hand
	// are otherwise valid. So the other packets are refused only for their fault.
	s.prints(t, "strict", "hello", "python3", "-c", get, "https://allowed.example.org/")
	s.prints(t, "open", "hello", "python3", "-c", get, "http://25.1.113.10/")
	control := s.attempt(t, "strict", [][]any{try("plain", "raw", "25.1.113.70", 9999), try("plain", "frame", "25.1.113.70", 9999), try("ping", "10.255.255.1", 20)})
	for i, want := range []string{"answered by 25.1.113.70", "answered by 25.1.113.70|^ENOTSUP$", "^answered$"} {
		if !regexp.MustCompile(want).MatchString(control[i]) {
			t.Errorf("a packet that is allowed: %s; want %s", control[i], want)
		}
	}

	total, explained := 0, 0
	for group, list := range map[string][]attempt{"addresses": addressAttempts, "names": nameAttempts, "packets": packetAttempts} {
		total += len(list)
		for _, a := range list {
			if a.target != "" && a.rule != "" && a.reason != "" {
				explained++
			} else if a.without == "" || a.target+a.rule+a.reason != "" {
				t.Errorf("%q names neither rule and reason nor why there are none", fmt.Sprint(a.call...))
			}
		}
		t.Run(group, func(t *testing.T) { s.tryAll(t, list) })
	}
	if explained < 80 {
		t.Errorf("of %d attempts rule and reason are looked for", explained)
	}
	t.Logf("%d attempts, %d of which the log explains by rule and reason", total, explained)
	// The sandboxes are still connected. When these calls return, everything
	// sent before them has been handled.
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

// attempt makes attempts in a sandbox and returns their results.
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

// tryAll makes attempts, and looks for each in the log, or among the frames that
// netd has dropped.
func (s *site) tryAll(t *testing.T, list []attempt) {
	for _, sandbox := range []string{"strict", "open"} {
		var mine []attempt
		var calls [][]any
		for _, a := range list {
			switch {
			case a.sandbox != sandbox:
			case a.without != "" && a.without != own && a.without != unanswered:
				s.tryDropped(t, a)
			default:
				mine, calls = append(mine, a), append(calls, a.call)
			}
		}
		if len(mine) == 0 {
			continue
		}
		results, log := s.attempt(t, sandbox, calls), s.wholeLog(t, sandbox)
		for i, a := range mine {
			a.wants(t, results[i])
			if a.target != "" && !slices.ContainsFunc(log, a.explains) {
				var seen []string
				for _, e := range log {
					if a.about(e) {
						seen = append(seen, fmt.Sprintf("%s %s %s: %s, %s: %s", e.Protocol, e.Name, e.Address, e.Outcome, e.Rule, e.Reason))
					}
				}
				t.Errorf("%s: the log does not say rule %q and reason %q about %s, but\n%s", a.title(), a.rule, a.reason, a.target, strings.Join(seen, "\n"))
			}
		}
	}
}

func (a attempt) title() string { return fmt.Sprintf("%s: %.90q", a.sandbox, fmt.Sprint(a.call...)) }

// wants compares the result that the program saw.
func (a attempt) wants(t *testing.T, saw string) {
	t.Helper()
	if !regexp.MustCompile(a.want).MatchString(saw) {
		t.Errorf("%s: %.300q; want %s", a.title(), saw, a.want)
	}
}

// about reports whether a line is about the attempt's target.
func (a attempt) about(e rest.NetworkLogEntry) bool {
	return strings.Contains(e.Address, strings.Trim(a.target, "[]")) || strings.Contains(e.Name, a.target)
}

// explains reports whether a line says that the attempt was refused, with the rule and the
// reason.
func (a attempt) explains(e rest.NetworkLogEntry) bool {
	if protocol := a.call[0]; protocol == "udp" && e.Protocol != "udp" || protocol == "resolve" && e.Protocol != "dns" {
		return false
	}
	return a.about(e) && e.Outcome == "refused" && e.Rule == a.rule && strings.Contains(e.Reason, a.reason)
}

// tryDropped makes one attempt, whose frames netd drops and counts.
func (s *site) tryDropped(t *testing.T, a attempt) {
	t.Helper()
	before := s.dropped(t, a.without)
	saw := s.attempt(t, a.sandbox, [][]any{a.call})[0]
	a.wants(t, saw)
	if saw != "sent, no answer" && saw != "timeout" {
		return // the sandbox's kernel has not sent it
	}
	for deadline := time.Now().Add(patience); s.dropped(t, a.without) == before; {
		if time.Now().After(deadline) {
			t.Fatalf("%s: netd has not counted it as %q", a.title(), a.without)
		}
		time.Sleep(10 * time.Millisecond) // there is no event for it
	}
}

// dropped returns how many frames and datagrams netd has dropped for a reason.
func (s *site) dropped(t *testing.T, why without) uint64 {
	t.Helper()
	c, err := netctl.Dial(t.Context(), filepath.Join(s.state, "forkd", "netd", "default", "control"))
	if err != nil {
		t.Fatal(err)
	}
	stats, err := c.Stats(t.Context())
	if err := errors.Join(err, c.Close()); err != nil {
		t.Fatal(err)
	}
	for _, d := range stats.Dropped {
		if d.Reason == string(why) {
			return d.Count
		}
	}
	return 0
}
