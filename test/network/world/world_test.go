package world

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"io"
	"net"
	"net/http"
	"os/exec"
	"strings"
	"testing"
)

// client returns an HTTP client on the world's host.
func client(t *testing.T, w *World) *http.Client {
	t.Helper()
	pool := x509.NewCertPool()
	pool.AppendCertsFromPEM(w.Authority())
	dial := func(ctx context.Context, network, address string) (c net.Conn, err error) {
		err = w.OnHost(func() error {
			c, err = new(net.Dialer).DialContext(ctx, network, address)
			return err
		})
		return c, err
	}
	resolver := &net.Resolver{PreferGo: true, Dial: func(ctx context.Context, network, _ string) (net.Conn, error) {
		return dial(ctx, network, NameServer.String())
	}}
	tr := &http.Transport{
		TLSClientConfig: &tls.Config{RootCAs: pool, MinVersion: tls.VersionTLS12}, ForceAttemptHTTP2: true,
		DialContext: func(ctx context.Context, network, address string) (net.Conn, error) {
			host, port, err := net.SplitHostPort(address)
			if err != nil {
				return nil, err
			}
			found, err := resolver.LookupHost(ctx, host)
			if err != nil {
				return nil, err
			}
			return dial(ctx, network, net.JoinHostPort(found[0], port))
		},
	}
	t.Cleanup(tr.CloseIdleConnections)
	return &http.Client{Transport: tr}
}

// TestWorld: a program on the world's host can use names, aliases, IPv4 and IPv6, TLS
// and plain HTTP.
func TestWorld(t *testing.T) {
	w := New(t)
	w.Name("v4.example.org", 60, "25.1.113.10")
	w.Name("v6.example.org", 60, "2600:db8:5::10")
	w.Alias("www.example.org", "v4.example.org", 60)
	hello := http.HandlerFunc(func(rw http.ResponseWriter, r *http.Request) { _, _ = io.WriteString(rw, r.Proto+" "+r.Host) })
	w.ServeHTTPS(t, "25.1.113.10:443", hello, "v4.example.org", "www.example.org")
	w.ServeHTTP(t, "[2600:db8:5::10]:80", hello)
	c := client(t, w)
	for url, want := range map[string]string{
		"https://v4.example.org/":  "HTTP/2.0 v4.example.org",
		"https://www.example.org/": "HTTP/2.0 www.example.org",
		"http://v6.example.org/":   "HTTP/1.1 v6.example.org",
	} {
		resp, err := c.Get(url)
		if err != nil {
			t.Fatal(err)
		}
		got, err := io.ReadAll(resp.Body)
		_ = resp.Body.Close()
		if err != nil || string(got) != want {
			t.Errorf("%s: %q, %v; want %q", url, got, err, want)
		}
	}
	if w.Asked("v4.example.org") == 0 {
		t.Error("the name server was not asked")
	}
	out := new(strings.Builder)
	cmd := exec.Command("cat", "/proc/net/route")
	cmd.Stdout = out
	if err := w.Start(cmd); err != nil {
		t.Fatal(err)
	}
	if err := cmd.Wait(); err != nil || !strings.Contains(out.String(), "up0") {
		t.Errorf("a command's routes: %v\n%s", err, out)
	}
}
