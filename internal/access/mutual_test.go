package access

import (
	"bytes"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"agentrun.dev/internal/access/accesstest"
)

// mutualEnd is one end, with a CA of its own unless there is one, as a component.
func mutualEnd(t *testing.T, ca *accesstest.CA, name string) (*Mutual, accesstest.Files) {
	t.Helper()
	files := accesstest.NewFiles(t)
	files.WritePair(t, ca.Component(name))
	files.WriteCAs(t, ca)
	m, err := OpenMutual(MutualFiles(files))
	if err != nil {
		t.Fatal(err)
	}
	return m, files
}

// client are the settings of a client of HTTP/2.
func client(c *tls.Config) *tls.Config {
	c.NextProtos = []string{"h2"}
	if c.ServerName == "" {
		c.ServerName = "127.0.0.1"
	}
	return c
}

// TestMutual: both ends know each other by the CA; a client also by the name of the node.
func TestMutual(t *testing.T) {
	ca, other := accesstest.NewCA(t), accesstest.NewCA(t)
	server, _ := mutualEnd(t, ca, "node/n1")
	caller, _ := mutualEnd(t, ca, "controller/c")
	stranger, _ := mutualEnd(t, other, "controller/c")
	for node, says := range map[string]string{"": "", "n1": "", "n2": "not node:n2"} {
		cfg := client(caller.Now().Client(node))
		if node != "" {
			cfg.ServerName = "elsewhere.example"
		}
		if _, err := shake(t, server.Now().Server(), cfg); says == "" && err != nil || says != "" && (err == nil || !strings.Contains(err.Error(), says)) {
			t.Errorf("node %q: %v", node, err)
		}
	}
	cfg := client(caller.Now().Client(""))
	cfg.ServerName = "elsewhere.example"
	var wrong x509.HostnameError
	if _, err := shake(t, server.Now().Server(), cfg); !errors.As(err, &wrong) {
		t.Errorf("another host: %v", err)
	}
	for _, node := range []string{"", "n1"} {
		var unknown x509.UnknownAuthorityError
		if _, err := shake(t, server.Now().Server(), client(stranger.Now().Client(node))); !errors.As(err, &unknown) {
			t.Errorf("another CA, node %q: %v", node, err)
		}
	}
	gateway, _ := mutualEnd(t, ca, "gateway/n1")
	if _, err := shake(t, gateway.Now().Server(), client(caller.Now().Client("n1"))); err == nil || !strings.Contains(err.Error(), "the server is gateway:n1") {
		t.Errorf("a gateway that passes for a node: %v", err)
	}
}

// TestMutualFresh: each connection shows a certificate that is verified: no session is
// resumed.
func TestMutualFresh(t *testing.T) {
	ca := accesstest.NewCA(t)
	server, _ := mutualEnd(t, ca, "node/n1")
	caller, _ := mutualEnd(t, ca, "controller/c")
	l, err := tls.Listen("tcp", "127.0.0.1:0", server.Now().Server())
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	go func() {
		for {
			conn, err := l.Accept()
			if err != nil {
				return
			}
			_ = conn.(*tls.Conn).Handshake() // the client sees the result
			_ = conn.Close()
		}
	}()
	cfg := client(caller.Now().Client(""))
	cfg.ClientSessionCache = tls.NewLRUClientSessionCache(8)
	for range 3 {
		conn, err := tls.Dial("tcp", l.Addr().String(), cfg)
		if err != nil {
			t.Fatal(err)
		}
		if _, err := io.Copy(io.Discard, conn); err != nil { // tickets come after the handshake
			t.Error(err)
		}
		if conn.ConnectionState().DidResume {
			t.Error("a session was resumed")
		}
		conn.Close()
	}
}

// TestMutualFiles: the error for an unusable file names the file.
func TestMutualFiles(t *testing.T) {
	ca := accesstest.NewCA(t)
	leaf := accesstest.NewFiles(t)
	leaf.WritePair(t, ca.Component("node/a"))
	text := func(path string) string {
		b, err := os.ReadFile(path)
		if err != nil {
			t.Fatal(err)
		}
		return string(b)
	}
	for name, c := range map[string]struct {
		change func(accesstest.Files) error
		says   string
	}{
		"no certificate": {func(f accesstest.Files) error { return os.Remove(f.Cert) }, "tls.crt"},
		"no key":         {func(f accesstest.Files) error { return os.Remove(f.Key) }, "tls.key"},
		"no CA":          {func(f accesstest.Files) error { return os.Remove(f.CA) }, "ca.crt"},
		"a key for all":  {func(f accesstest.Files) error { return os.Chmod(f.Key, 0o644) }, "chmod o= "},
		"another key":    {func(f accesstest.Files) error { return os.WriteFile(f.Key, []byte(text(leaf.Key)), 0o600) }, "does not match"},
		"an empty CA":    {func(f accesstest.Files) error { return os.WriteFile(f.CA, nil, 0o600) }, "no certificate"},
		"half a CA":      {func(f accesstest.Files) error { return os.WriteFile(f.CA, ca.PEM()[:200], 0o600) }, "cut off"},
		"a CA and half":  {func(f accesstest.Files) error { return os.WriteFile(f.CA, append(ca.PEM(), ca.PEM()[:200]...), 0o600) }, "cut off"},
		"half a CA and one": {func(f accesstest.Files) error {
			return os.WriteFile(f.CA, append(ca.PEM()[:200:200], append([]byte("\n"), ca.PEM()...)...), 0o600)
		}, "cut off"},
		"a damaged CA and one": {func(f accesstest.Files) error {
			return os.WriteFile(f.CA, append(bytes.Replace(ca.PEM(), []byte("MII"), []byte("M!I"), 1), ca.PEM()...), 0o600)
		}, "damaged"},
		"a CA between damaged ones": {func(f accesstest.Files) error {
			damaged := bytes.Replace(ca.PEM(), []byte("-----END"), []byte("----END"), 1)
			return os.WriteFile(f.CA, slices.Concat(damaged, ca.PEM(), damaged), 0o600)
		}, "damaged"},
		"a key as CA": {func(f accesstest.Files) error { return os.WriteFile(f.CA, []byte(text(leaf.Key)), 0o600) }, "PRIVATE KEY"},
		"no CA's":     {func(f accesstest.Files) error { return os.WriteFile(f.CA, []byte(text(leaf.Cert)), 0o600) }, "not that of a CA"},
		"a huge CA":   {func(f accesstest.Files) error { return os.WriteFile(f.CA, make([]byte, maxPEM+1), 0o600) }, "more than"},
		"a damaged CA": {func(f accesstest.Files) error {
			return os.WriteFile(f.CA, []byte("-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n"), 0o600)
		}, "ca.crt"},
		"a folder as cert": {func(f accesstest.Files) error { return errors.Join(os.Remove(f.Cert), os.Mkdir(f.Cert, 0o700)) }, "tls.crt"},
	} {
		files := accesstest.NewFiles(t)
		files.WritePair(t, ca.Component("node/b"))
		files.WriteCAs(t, ca)
		if err := c.change(files); err != nil {
			t.Fatal(err)
		}
		if _, err := OpenMutual(MutualFiles(files)); err == nil || !strings.Contains(err.Error(), c.says) {
			t.Errorf("%s: %v", name, err)
		}
	}
}

// TestMutualLook: new files are used once two looks have seen them unchanged, all
// together or none of them. This holds for links that are replaced, too, as in
// Kubernetes.
func TestMutualLook(t *testing.T) {
	ca := accesstest.NewCA(t)
	m, files := mutualEnd(t, ca, "node/n1")
	first := m.Now()
	look := func(want bool, says string) {
		t.Helper()
		changed, err := m.Look()
		if changed != want || (err != nil) != (says != "") || err != nil && !strings.Contains(err.Error(), says) {
			t.Errorf("changed %t, %v; want %t, %q", changed, err, want, says)
		}
	}
	look(false, "")
	files.WritePair(t, ca.Component("node/n1"))
	look(false, "") // a program may still write
	look(true, "")
	second := m.Now()
	if first == second {
		t.Error("it is the same")
	}
	look(false, "")
	for _, broken := range []func() error{
		func() error { return os.WriteFile(files.CA, []byte("half"), 0o600) },
		func() error { return os.Remove(files.CA) },
	} {
		if err := broken(); err != nil {
			t.Fatal(err)
		}
		files.WritePair(t, ca.Component("node/n1"))
		look(false, "")
		look(false, "ca.crt")
		look(false, "") // returned once
		if m.Now() != second {
			t.Error("a good certificate is used without its CA")
		}
	}
	files.WriteCAs(t, ca)
	look(false, "")
	look(true, "")

	// A volume of Kubernetes: the files are links through a link that is replaced.
	dir := t.TempDir()
	install := func(version string) {
		t.Helper()
		at := filepath.Join(dir, version)
		if err := os.Mkdir(at, 0o700); err != nil {
			t.Fatal(err)
		}
		f := accesstest.Files{Cert: filepath.Join(at, "tls.crt"), Key: filepath.Join(at, "tls.key"), CA: filepath.Join(at, "ca.crt")}
		f.WritePair(t, ca.Component("node/n1"))
		f.WriteCAs(t, ca)
		data := filepath.Join(dir, "..data")
		if err := errors.Join(os.Symlink(version, data+".new"), os.Rename(data+".new", data)); err != nil {
			t.Fatal(err)
		}
	}
	install("1")
	at := func(name string) string { return filepath.Join(dir, "..data", name) }
	m, err := OpenMutual(MutualFiles{Cert: at("tls.crt"), Key: at("tls.key"), CA: at("ca.crt")})
	if err != nil {
		t.Fatal(err)
	}
	install("2")
	look(false, "")
	look(true, "")
}

// TestVerify: a client's certificate is valid until the first of its chain expires, by
// the CAs that are there and for clients.
func TestVerify(t *testing.T) {
	ca, other := accesstest.NewCA(t), accesstest.NewCA(t)
	m, _ := mutualEnd(t, ca, "node/n1")
	soon := time.Now().Add(time.Minute).Truncate(time.Second)
	for name, c := range map[string]struct {
		pair tls.Certificate
		ok   bool
	}{
		"valid":         {ca.Issue(accesstest.Spec{Until: soon}), true},
		"another CA":    {other.Issue(accesstest.Spec{Until: soon}), false},
		"expired":       {ca.Issue(accesstest.Spec{Until: time.Now().Add(-time.Minute)}), false},
		"not yet valid": {ca.Issue(accesstest.Spec{From: time.Now().Add(time.Minute)}), false},
		"a server's":    {ca.Issue(accesstest.Spec{Uses: []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth}}), false},
	} {
		until, err := m.Now().Verify([]*x509.Certificate{c.pair.Leaf})
		if c.ok && (err != nil || !until.Equal(soon)) || !c.ok && err == nil {
			t.Errorf("%s: %s, %v", name, until, err)
		}
	}
	if _, err := m.Now().Verify(nil); err == nil {
		t.Error("nothing is verified")
	}
}

// TestIssue: an issued certificate gives its role, a node's at both ends, and lives no
// longer than its authority.
func TestIssue(t *testing.T) {
	dir := t.TempDir()
	a, err := OpenAuthority(filepath.Join(dir, "ca"))
	if err != nil {
		t.Fatal(err)
	}
	open := func(role, name string, hosts ...string) *Mutual {
		t.Helper()
		c, err := ParseComponent(role, name)
		if err != nil {
			t.Fatal(err)
		}
		f := MutualFiles{Cert: filepath.Join(dir, name+".crt"), Key: filepath.Join(dir, name+".key"), CA: a.File}
		for range 2 { // again: replaced
			until, err := a.Issue(c, hosts, time.Hour, f.Cert, f.Key)
			if err != nil || time.Until(until) > time.Hour {
				t.Fatal(until, err)
			}
		}
		m, err := OpenMutual(f)
		if err != nil {
			t.Fatal(err)
		}
		return m
	}
	server, caller := open("node", "n1", "127.0.0.1", "node.example"), open("controller", strings.Repeat("c", 200))
	if _, err := shake(t, server.Now().Server(), client(caller.Now().Client(""))); err != nil {
		t.Error(err)
	}
	if _, err := shake(t, server.Now().Server(), client(server.Now().Client("n1"))); err != nil {
		t.Errorf("a node asks a node: %v", err)
	}
	if _, err := shake(t, caller.Now().Server(), client(caller.Now().Client(""))); err == nil {
		t.Error("a controller's certificate is good for a server")
	}
	c := Component{RoleGateway, "g"}
	for name, try := range map[string]func() (time.Time, error){
		"hosts of a client": func() (time.Time, error) { return a.Issue(c, []string{"x"}, time.Hour, dir+"/x", dir+"/y") },
		"no lifetime":       func() (time.Time, error) { return a.Issue(c, nil, 0, dir+"/x", dir+"/y") },
		"no folder":         func() (time.Time, error) { return a.Issue(c, nil, time.Hour, dir+"/no/x", dir+"/no/y") },
	} {
		if _, err := try(); err == nil {
			t.Errorf("%s: it was issued", name)
		}
	}
	if until, err := a.Issue(c, nil, 2*authorityLife, dir+"/x", dir+"/y"); err != nil || until.After(a.cert.NotAfter) {
		t.Errorf("%s, %v", until, err)
	}
}

// FuzzCAs: a file of CAs is read whole or refused.
func FuzzCAs(f *testing.F) {
	ca := accesstest.NewCA(f).PEM()
	f.Add(ca)
	f.Add(append([]byte("# a comment\n"), ca...))
	f.Add(ca[:100])
	f.Fuzz(func(t *testing.T, text []byte) {
		roots, err := parseCAs(text)
		if (roots == nil) != (err != nil) {
			t.Errorf("%v, %v", roots, err)
		}
	})
}
