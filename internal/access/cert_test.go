package access

import (
	"crypto/tls"
	"crypto/x509"
	"encoding/pem"
	"errors"
	"net"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"
)

// trusting makes the settings of a client that has the authority's file.
func trusting(t *testing.T, file, name string) *tls.Config {
	t.Helper()
	data, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	pool := x509.NewCertPool()
	if !pool.AppendCertsFromPEM(data) {
		t.Fatal("no certificate")
	}
	return &tls.Config{RootCAs: pool, ServerName: name}
}

// shake makes a handshake and returns what the server showed.
func shake(t *testing.T, server, client *tls.Config) (*x509.Certificate, error) {
	t.Helper()
	l, err := tls.Listen("tcp", "127.0.0.1:0", server)
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	answered := make(chan error, 1)
	go func() {
		conn, err := l.Accept()
		if err == nil {
			err = conn.(*tls.Conn).Handshake()
			conn.Close()
		}
		answered <- err
	}()
	conn, err := tls.Dial("tcp", l.Addr().String(), client)
	if answer := <-answered; err != nil || answer != nil {
		return nil, errors.Join(err, answer)
	}
	defer conn.Close()
	return conn.ConnectionState().PeerCertificates[0], nil
}

func authority(t *testing.T, dir string, hosts ...string) (*Authority, *tls.Config) {
	t.Helper()
	a, err := OpenAuthority(dir)
	if err != nil {
		t.Fatal(err)
	}
	cfg, err := a.Server(hosts)
	if err != nil {
		t.Fatal(err)
	}
	return a, cfg
}

// TestAuthority: made once, it tells the node from others by name and address.
func TestAuthority(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "tls")
	a, cfg := authority(t, dir, "node.example", "192.0.2.7", "::1")
	for _, name := range []string{"node.example", "192.0.2.7", "::1"} {
		if _, err := shake(t, cfg, trusting(t, a.File, name)); err != nil {
			t.Errorf("%s: %v", name, err)
		}
	}
	var wrong x509.HostnameError
	if _, err := shake(t, cfg, trusting(t, a.File, "other.example")); !errors.As(err, &wrong) {
		t.Errorf("another name: %v", err)
	}
	other, _ := authority(t, t.TempDir(), "node.example")
	var unknown x509.UnknownAuthorityError
	if _, err := shake(t, cfg, trusting(t, other.File, "node.example")); !errors.As(err, &unknown) {
		t.Errorf("another authority: %v", err)
	}
	old := trusting(t, a.File, "node.example")
	old.MinVersion, old.MaxVersion = tls.VersionTLS10, tls.VersionTLS11
	if _, err := shake(t, cfg, old); err == nil {
		t.Error("TLS 1.1 is spoken")
	}
	if err := os.Remove(a.File); err != nil {
		t.Fatal(err)
	}
	again, err := OpenAuthority(dir)
	if err != nil || again.Fingerprint() != a.Fingerprint() || len(a.Fingerprint()) != 64 {
		t.Errorf("%v, %v", again, err)
	}
	if _, err := shake(t, cfg, trusting(t, a.File, "node.example")); err != nil {
		t.Errorf("the file for clients is not there again: %v", err)
	}
	whole := filepath.Join(dir, "authority.pem")
	if info, err := os.Stat(whole); err != nil || info.Mode().Perm() != 0o600 {
		t.Errorf("%v, %v", info, err)
	}
	if shown, err := os.ReadFile(a.File); err != nil || strings.Contains(string(shown), "KEY") {
		t.Errorf("%s, %v", shown, err)
	}
	if err := os.WriteFile(whole, []byte("damage"), 0o600); err != nil {
		t.Fatal(err)
	}
	if _, err := OpenAuthority(dir); err == nil || !strings.Contains(err.Error(), "delete it") {
		t.Errorf("%v", err)
	}
}

// TestRenewal: certificates are replaced before they expire, under the same
// authority. The authority is replaced before it expires.
func TestRenewal(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		dir := t.TempDir()
		a, cfg := authority(t, dir, "node.example")
		client := trusting(t, a.File, "node.example")
		show := func() *x509.Certificate {
			t.Helper()
			c, err := shake(t, cfg, client)
			if err != nil {
				t.Fatal(err)
			}
			return c
		}
		first := show()
		time.Sleep(certificateLife - renewal - time.Hour)
		if !show().Equal(first) {
			t.Error("it was replaced too early")
		}
		time.Sleep(2 * time.Hour)
		second := show()
		if second.Equal(first) || time.Until(second.NotAfter) < certificateLife-time.Hour {
			t.Errorf("not replaced: until %s", second.NotAfter)
		}
		time.Sleep(authorityLife - authorityRenewal - 60*24*time.Hour)
		if same, err := OpenAuthority(dir); err != nil || same.Fingerprint() != a.Fingerprint() {
			t.Errorf("%v, %v", same, err)
		}
		time.Sleep(60 * 24 * time.Hour)
		if c := show(); c.NotAfter.After(a.cert.NotAfter) {
			t.Error("a certificate outlives its authority")
		}
		if fresh, err := OpenAuthority(dir); err != nil || fresh.Fingerprint() == a.Fingerprint() {
			t.Errorf("%v, %v", fresh, err)
		}
	})
}

// TestGiven: a certificate from files is used, and followed when it is
// replaced.
func TestGiven(t *testing.T) {
	dir := t.TempDir()
	a, err := OpenAuthority(filepath.Join(dir, "ca"))
	if err != nil {
		t.Fatal(err)
	}
	certFile, keyFile := filepath.Join(dir, "cert.pem"), filepath.Join(dir, "key.pem")
	stamp := time.Now()
	install := func(name string) {
		t.Helper()
		pair, err := a.issue(x509.Certificate{DNSNames: []string{name}}, certificateLife, x509.ExtKeyUsageServerAuth)
		if err != nil {
			t.Fatal(err)
		}
		private, err := x509.MarshalPKCS8PrivateKey(pair.PrivateKey)
		if err != nil {
			t.Fatal(err)
		}
		stamp = stamp.Add(time.Second)
		err = errors.Join(writePEM(keyFile, 0o600, &pem.Block{Type: "PRIVATE KEY", Bytes: private}), writePEM(certFile, 0o644, &pem.Block{Type: "CERTIFICATE", Bytes: pair.Certificate[0]}),
			os.Chtimes(certFile, stamp, stamp))
		if err != nil {
			t.Fatal(err)
		}
	}
	if _, err := Given(certFile, keyFile, nil); err == nil {
		t.Error("no files")
	}
	install("one.example")
	if err := os.Chmod(keyFile, 0o644); err != nil {
		t.Fatal(err)
	}
	if _, err := Given(certFile, keyFile, nil); err == nil || !strings.Contains(err.Error(), "chmod") {
		t.Errorf("a key for everybody: %v", err)
	}
	install("one.example")
	var failures []error
	cfg, err := Given(certFile, keyFile, func(err error) { failures = append(failures, err) })
	if err != nil {
		t.Fatal(err)
	}
	for _, name := range []string{"one.example", "two.example"} {
		install(name)
		if _, err := shake(t, cfg, trusting(t, a.File, name)); err != nil {
			t.Errorf("%s: %v", name, err)
		}
	}
	if err := os.WriteFile(certFile, []byte("half"), 0o600); err != nil {
		t.Fatal(err)
	}
	if _, err := shake(t, cfg, trusting(t, a.File, "two.example")); err != nil || len(failures) == 0 {
		t.Errorf("the one before is not used: %v, %v", err, failures)
	}
}

func TestHosts(t *testing.T) {
	hosts := func(addr, advertise string) []string {
		t.Helper()
		tcp, err := net.ResolveTCPAddr("tcp", addr)
		if err != nil {
			t.Fatal(err)
		}
		list, err := Hosts(tcp, advertise)
		if err != nil {
			t.Fatal(err)
		}
		return list
	}
	if l := hosts("192.0.2.1:7070", "node.example:443"); !slices.Equal(l, []string{"localhost", "127.0.0.1", "::1", "node.example", "192.0.2.1"}) {
		t.Errorf("%q", l)
	}
	if l := hosts("127.0.0.1:1", "2001:db8::1"); !slices.Equal(l, []string{"localhost", "127.0.0.1", "::1", "2001:db8::1"}) {
		t.Errorf("%q", l)
	}
	name, err := os.Hostname()
	if err != nil {
		t.Fatal(err)
	}
	if l := hosts("[::]:7070", ""); !slices.Contains(l, name) {
		t.Errorf("%q", l)
	}
	if _, err := Hosts(&net.TCPAddr{}, "https://node:7070"); err == nil {
		t.Error("a URL is no host")
	}
	if _, err := Hosts(&net.UnixAddr{}, ""); err == nil {
		t.Error("a socket has no host")
	}
}
