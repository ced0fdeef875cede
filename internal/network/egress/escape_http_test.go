package egress

import (
	"net/netip"
	"strings"
)

func addrPort(text string) netip.AddrPort { return netip.MustParseAddrPort(text) }

// httpAttempt is a request that a program sends to port 80 of allowed.example, to
// reach evil.example, which the same server serves.
type httpAttempt struct {
	title   string
	request string
	// reaches lists the requests that the server may see, all for the allowed name.
	reaches []string
	reason  string
}

const good = "GET /good HTTP/1.1\r\nHost: allowed.example\r\n\r\n"

var reachesGood = []string{"http GET allowed.example /good"}

// httpAttempts are refused by the rule allowed.example:80.
var httpAttempts = []httpAttempt{
	{title: "another Host", request: "GET / HTTP/1.1\r\nHost: evil.example\r\n\r\n", reason: "says evil.example"},
	{title: "another Host in the second request", request: good + "GET / HTTP/1.1\r\nHost: evil.example\r\n\r\n", reaches: reachesGood, reason: "says evil.example"},
	{title: "a name that ends like the allowed one", request: "GET / HTTP/1.1\r\nHost: evilallowed.example\r\n\r\n", reason: "says evilallowed.example"},
	{title: "a name that begins like the allowed one", request: "GET / HTTP/1.1\r\nHost: allowed.example.evil.example\r\n\r\n", reason: "says allowed.example.evil.example"},
	{title: "two Hosts", request: "GET / HTTP/1.1\r\nHost: allowed.example\r\nHost: evil.example\r\n\r\n", reason: "not a well-formed"},
	{title: "two equal Hosts", request: "GET / HTTP/1.1\r\nHost: allowed.example\r\nHost: allowed.example\r\n\r\n", reason: "not a well-formed"},
	{title: "a list of Hosts", request: "GET / HTTP/1.1\r\nHost: allowed.example, evil.example\r\n\r\n", reason: "not a well-formed"},
	{title: "no Host", request: "GET / HTTP/1.1\r\n\r\n", reason: "not a well-formed"},
	{title: "an empty Host", request: "GET / HTTP/1.1\r\nHost:\r\n\r\n", reason: "host"},
	{title: "no Host in HTTP/1.0", request: "GET / HTTP/1.0\r\n\r\n", reason: "host"},
	{title: "HTTP/0.9", request: "GET /\r\n\r\n", reason: "not a well-formed"},
	{title: "HTTP/1.2 to 3", request: "GET / HTTP/3.0\r\nHost: allowed.example\r\n\r\n", reason: "not a well-formed"},
	{title: "a Host with NUL", request: "GET / HTTP/1.1\r\nHost: allowed.example\x00.evil.example\r\n\r\n", reason: "not a well-formed"},
	{title: "a Host with a slash", request: "GET / HTTP/1.1\r\nHost: evil.example/allowed.example\r\n\r\n", reason: "not a well-formed"},
	{title: "a Host with a user", request: "GET / HTTP/1.1\r\nHost: allowed.example@evil.example\r\n\r\n", reason: "not a well-formed"},
	{title: "a Host with another port", request: "GET / HTTP/1.1\r\nHost: allowed.example:8080\r\n\r\n", reason: "port 80"},
	{title: "a Host that is an address", request: "GET / HTTP/1.1\r\nHost: " + addrAllowed + "\r\n\r\n", reason: "number"},
	{title: "a Host that is an IPv6 address", request: "GET / HTTP/1.1\r\nHost: [::1]\r\n\r\n", reason: "host"},
	{title: "a Host that is metadata", request: "GET / HTTP/1.1\r\nHost: 169.254.169.254\r\n\r\n", reason: "number"},
	{title: "a space before the colon", request: "GET / HTTP/1.1\r\nHost : evil.example\r\nHost: allowed.example\r\n\r\n", reason: "not a well-formed"},
	{title: "a folded Host", request: "GET / HTTP/1.1\r\nX: y\r\n Host: evil.example\r\n\r\n", reason: "not a well-formed"},
	{title: "an absolute URI", request: "GET http://evil.example/ HTTP/1.1\r\nHost: allowed.example\r\n\r\n", reason: "says evil.example"},
	{title: "an absolute URI with a user", request: "GET http://allowed.example@evil.example/ HTTP/1.1\r\nHost: allowed.example\r\n\r\n", reason: "user name"},
	{title: "an absolute URI of another scheme", request: "GET ftp://allowed.example/ HTTP/1.1\r\nHost: allowed.example\r\n\r\n", reason: "another scheme"},
	{title: "CONNECT", request: "CONNECT evil.example:443 HTTP/1.1\r\nHost: evil.example:443\r\n\r\n", reason: "CONNECT"},
	{title: "CONNECT to the allowed name", request: "CONNECT allowed.example:80 HTTP/1.1\r\nHost: allowed.example\r\n\r\n", reason: "CONNECT"},
	{title: "h2c by upgrade", request: "GET / HTTP/1.1\r\nHost: allowed.example\r\nConnection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAMAAABkAAQAAP__\r\n\r\n", reason: "upgrade"},
	{title: "h2c behind websocket", request: "GET / HTTP/1.1\r\nHost: allowed.example\r\nConnection: Upgrade\r\nUpgrade: websocket\r\nUpgrade: h2c\r\n\r\n", reason: "upgrade"},
	{title: "h2c in a list", request: "GET / HTTP/1.1\r\nHost: allowed.example\r\nConnection: Upgrade\r\nUpgrade: websocket, h2c\r\n\r\n", reason: "upgrade"},
	{title: "upgrade to TLS", request: "OPTIONS * HTTP/1.1\r\nHost: allowed.example\r\nConnection: Upgrade\r\nUpgrade: TLS/1.0\r\n\r\n", reason: "upgrade"},
	{title: "h2c with prior knowledge", request: "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\x00\x00\x00\x04\x00\x00\x00\x00\x00", reason: "HTTP/2 without TLS"},
	{title: "smuggled behind Content-Length and chunks", request: "POST /good HTTP/1.1\r\nHost: allowed.example\r\nContent-Length: 4\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\nGET / HTTP/1.1\r\nHost: evil.example\r\n\r\n", reaches: []string{"http POST allowed.example /good"}, reason: "says evil.example"},
	{title: "smuggled behind two lengths", request: "POST /good HTTP/1.1\r\nHost: allowed.example\r\nContent-Length: 0\r\nContent-Length: 44\r\n\r\nGET / HTTP/1.1\r\nHost: evil.example\r\n\r\n", reason: "not a well-formed"},
	{title: "smuggled behind an unknown encoding", request: "POST /good HTTP/1.1\r\nHost: allowed.example\r\nTransfer-Encoding: xchunked\r\n\r\nGET / HTTP/1.1\r\nHost: evil.example\r\n\r\n", reason: "not a well-formed"},
	{title: "smuggled behind two encodings", request: "POST /good HTTP/1.1\r\nHost: allowed.example\r\nTransfer-Encoding: chunked\r\nTransfer-Encoding: identity\r\n\r\n0\r\n\r\nGET / HTTP/1.1\r\nHost: evil.example\r\n\r\n", reason: "not a well-formed"},
	{title: "smuggled behind a length that is no number", request: "POST /good HTTP/1.1\r\nHost: allowed.example\r\nContent-Length: +44\r\n\r\nGET / HTTP/1.1\r\nHost: evil.example\r\n\r\n", reason: "not a well-formed"},
	{title: "smuggled in the body of GET", request: "GET /good HTTP/1.1\r\nHost: allowed.example\r\nContent-Length: 5\r\n\r\nabcdeGET / HTTP/1.1\r\nHost: evil.example\r\n\r\n", reaches: reachesGood, reason: "says evil.example"},
	{title: "smuggled by a bare line feed", request: "GET /good HTTP/1.1\nHost: allowed.example\n\nGET / HTTP/1.1\nHost: evil.example\n\n", reaches: reachesGood, reason: "says evil.example"},
	{title: "a head that is too long", request: "GET / HTTP/1.1\r\nHost: allowed.example\r\nX: " + strings.Repeat("a", 128<<10) + "\r\n\r\n", reason: "not a well-formed"},
	{title: "another protocol", request: "SSH-2.0-OpenSSH_9.6\r\n\r\n", reason: "not a well-formed"},
	{title: "TLS", request: string(clientHello(sni("evil.example"))) + "\r\n\r\n", reason: "not a well-formed"},
}
