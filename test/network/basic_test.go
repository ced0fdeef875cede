package network

import (
	"fmt"
	"io"
	"net/http"
	"testing"
)

// get fetches a URL in a sandbox, and prints the answer or the error.
const get = `
import sys, urllib.request
try:
    print(urllib.request.urlopen(sys.argv[1], timeout=120).read().decode())
except Exception as e:
    print("failed:", e)
`

// hello answers with the host and the protocol of the request.
var hello = http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
	_, _ = io.WriteString(w, "hello from "+r.Host+" by "+r.Proto)
})

// request returns a script that makes an HTTP request for a host, for an image
// without Python.
func request(address string, port int, host string) string {
	return fmt.Sprintf(`printf 'GET / HTTP/1.1\r\nHost: %s\r\nConnection: close\r\n\r\n' | nc -w 60 %s %d`, host, address, port)
}

// TestPolicy: a sandbox reaches the names that its policy allows, and nothing else. Its
// image is small, so the test is short in an emulated machine, too.
func TestPolicy(t *testing.T) {
	s := newSite(t)
	s.Name("allowed.example.org", 60, "25.1.113.10")
	s.Name("other.example.org", 60, "25.1.113.10")
	s.ServeHTTP(t, "25.1.113.10:80", hello)
	s.importImage(t, "demo:1", "busybox.sh")
	s.pool(t, "demo", 1, "networkPolicy: {egress: deny, allow: [allowed.example.org:80]}")
	s.claim(t, "demo", "a")
	for _, c := range []struct{ script, want string }{
		// Before the name was resolved, its address is not allowed.
		{request("25.1.113.10", 80, "allowed.example.org"), "Connection refused"},
		{"nslookup allowed.example.org", "Address: 25.1.113.10\n"},
		{request("25.1.113.10", 80, "allowed.example.org"), "hello from allowed.example.org"},
		{request("25.1.113.10", 80, "25.1.113.10"), "HTTP/1.1 421"},
		{"nslookup other.example.org", "REFUSED"},
		{request("25.1.113.11", 80, "allowed.example.org"), "Connection refused"},
		{request("25.1.113.10", 81, "allowed.example.org"), "Connection refused"},
		{request("10.77.0.1", 80, "allowed.example.org"), "Connection refused"},
	} {
		s.prints(t, "a", c.want, "sh", "-c", "{ "+c.script+"; } 2>&1 || true")
	}
}
