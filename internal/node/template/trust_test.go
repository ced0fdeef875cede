package template

import (
	"bytes"
	"io"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"agentrun.dev/internal/node/authority"
	"agentrun.dev/internal/sandbox"
)

// TestSubjectHash: it equals the output of `openssl x509 -hash`.
func TestSubjectHash(t *testing.T) {
	const ca = `-----BEGIN CERTIFICATE-----
MIIB3DCCAYGgAwIBAgIUAXohM4dNONEUyfrwt6oSS0svcnYwCgYIKoZIzj0EAwIw
QzEWMBQGA1UECgwNQWdlbnRSdW4gIEluYzEPMA0GA1UECwwGVGVhbSBBMRgwFgYD
VQQDDA/DhGdlbnQgUlVOIENBIDEwHhcNMjYxMTE4MDYwNDMwWhcNMzYxMTE1MDYw
NDMwWjBDMRYwFAYDVQQKDA1BZ2VudFJ1biAgSW5jMQ8wDQYDVQQLDAZUZWFtIEEx
GDAWBgNVBAMMD8OEZ2VudCBSVU4gQ0EgMTBZMBMGByqGSM49AgEGCCqGSM49AwEH
A0IABJM+tHnmfn/X8vTIvoJNyVt6PDZJGXWuyUPR9BCysbu6o9IB/E99I71zwDDU
Uq5StU5hfoJz6cHCE5NkfX/ll1ujUzBRMB0GA1UdDgQWBBTCipqMatc+1HRQMMM2
XHPP4qLKdDAfBgNVHSMEGDAWgBTCipqMatc+1HRQMMM2XHPP4qLKdDAPBgNVHRMB
Af8EBTADAQH/MAoGCCqGSM49BAMCA0kAMEYCIQCb6k/hN/t0DRzhodqv62H1MhQ2
MkK3rwY7s6QPOCIuRgIhALmVfTFGA6FFK8AhANMAQ1fRTGXbsa4WehC6CHQaFuRm
-----END CERTIFICATE-----
`
	if got, err := subjectHash([]byte(ca)); err != nil || got != 0xd3bd7142 {
		t.Errorf("%08x, %v", got, err)
	}
	for _, bad := range []string{"", "-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n"} {
		if _, err := subjectHash([]byte(bad)); err == nil {
			t.Errorf("%q has a hash", bad)
		}
	}
}

func newCA(t *testing.T) []byte {
	t.Helper()
	a, err := authority.New("default", nil, time.Now())
	if err != nil {
		t.Fatal(err)
	}
	return a.Certificate()
}

// TestTrust: a CA is added to the image's bundles, once, and programs with certificates of
// their own get it by their environment.
func TestTrust(t *testing.T) {
	root, ca := t.TempDir(), newCA(t)
	write := func(path, text string) {
		t.Helper()
		if err := os.MkdirAll(filepath.Dir(root+path), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(root+path, []byte(text), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	read := func(path string) string {
		t.Helper()
		b, err := os.ReadFile(root + path)
		if err != nil {
			t.Error(err)
		}
		return string(b)
	}
	r := &run{agent: startAgent(t), log: io.Discard, root: root}
	if _, err := r.trust(t.Context(), ca, nil); err == nil || !strings.Contains(err.Error(), "Install ca-certificates") {
		t.Errorf("an image without a bundle: %v", err)
	}
	write("/etc/ssl/certs/ca-certificates.crt", "before") // without a line break at its end
	write("/usr/lib/ssl/cert.pem", "other\n")
	write("/etc/pki/ca-trust/source/anchors/README", "")
	var env sandbox.Env
	for range 2 {
		var err error
		if env, err = r.trust(t.Context(), ca, sandbox.Env{"PATH": "/bin", "REQUESTS_CA_BUNDLE": "/mine"}); err != nil {
			t.Fatal(err)
		}
	}
	for path, want := range map[string]string{
		"/etc/ssl/certs/ca-certificates.crt":                      "before\n" + string(ca),
		"/usr/lib/ssl/cert.pem":                                   "other\n" + string(ca),
		"/etc/agentrun/ca.crt":                                    string(ca),
		"/usr/local/share/ca-certificates/agentrun-namespace.crt": string(ca),
		"/etc/pki/ca-trust/source/anchors/agentrun-namespace.crt": string(ca),
	} {
		if got := read(path); got != want {
			t.Errorf("%s has %q", path, got)
		}
	}
	for name, want := range map[string]string{
		"PATH": "/bin", "SSL_CERT_FILE": "/etc/ssl/certs/ca-certificates.crt", "REQUESTS_CA_BUNDLE": "/mine", "NODE_EXTRA_CA_CERTS": "/etc/agentrun/ca.crt",
	} {
		if env[name] != want {
			t.Errorf("%s is %q", name, env[name])
		}
	}
	links, err := filepath.Glob(root + "/etc/ssl/certs/*.0")
	if err != nil || len(links) != 1 {
		t.Fatalf("%v, %v", links, err)
	}
	if to, err := os.Readlink(links[0]); err != nil || to != "/etc/agentrun/ca.crt" {
		t.Errorf("%s leads to %s, %v", links[0], to, err)
	}
	// The environment is the agent's, too.
	var said bytes.Buffer
	r.log = &said
	if code, _, err := r.exec(t.Context(), r.shell("echo $NODE_EXTRA_CA_CERTS")); err != nil || code != 0 || said.String() != "/etc/agentrun/ca.crt\n" {
		t.Errorf("%q, %d, %v", said.String(), code, err)
	}
}
