package network

import (
	"io"
	"net/http"
	"testing"
)

// get fetches a URL inside of a sandbox, and prints what came or why nothing did.
const get = `
import sys, urllib.request
try:
    print(urllib.request.urlopen(sys.argv[1], timeout=120).read().decode())
except Exception as e:
    print("failed:", e)
`

// hello says what it was asked for.
var hello = http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
	_, _ = io.WriteString(w, "hello from "+r.Host+" by "+r.Proto)
})

// TestPolicy: a sandbox reaches the names that its policy allows, and nothing else.
func TestPolicy(t *testing.T) {
	s := newSite(t)
	s.Name("allowed.example.org", 60, "25.1.113.10")
	s.Name("other.example.org", 60, "25.1.113.10")
	s.ServeHTTP(t, "25.1.113.10:80", hello)
	s.importImage(t, "demo:1", "python.sh")
	s.pool(t, "demo", 1, "networkPolicy: {egress: deny, allow: [allowed.example.org:80]}")
	s.claim(t, "demo", "a")
	for _, c := range []struct{ url, want string }{
		// Before the name was resolved, its address is one like any other.
		{"http://25.1.113.10/", "Connection refused"},
		{"http://allowed.example.org/", "hello from allowed.example.org"},
		{"http://25.1.113.10/", "failed: HTTP Error 421"},
		{"http://other.example.org/", "failed: <urlopen error [Errno -"},
		{"http://25.1.113.11/", "Connection refused"},
		{"http://allowed.example.org:81/", "Connection refused"},
		{"http://10.77.0.1/", "Connection refused"},
	} {
		s.prints(t, "a", c.want, "python3", "-c", get, c.url)
	}
}
