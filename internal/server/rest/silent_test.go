package rest

import (
	"crypto/tls"
	"errors"
	"io"
	"log/slog"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"testing"
	"testing/synctest"
	"time"

	"agentrun.dev/internal/access"
	"agentrun.dev/internal/server"
)

// pipes is a listener of connections that only exist in memory, so that time can
// be played.
type pipes chan net.Conn

func (p pipes) Accept() (net.Conn, error) {
	conn, ok := <-p
	if !ok {
		return nil, net.ErrClosed
	}
	return conn, nil
}

func (p pipes) Close() error   { return nil }
func (p pipes) Addr() net.Addr { return &net.TCPAddr{IP: net.IPv4(127, 0, 0, 1)} }

// TestSilentClients: the connection of a client that sends nothing, or begins and
// does not end, is ended in bounded time: before TLS, in its handshake, in the
// headers, and between requests.
func TestSilentClients(t *testing.T) {
	authority, err := access.OpenAuthority(filepath.Join(t.TempDir(), "tls"))
	if err != nil {
		t.Fatal(err)
	}
	settings, err := authority.Server([]string{"node"})
	if err != nil {
		t.Fatal(err)
	}
	for name, c := range map[string]struct {
		tls    bool
		says   string
		within time.Duration
	}{
		"nothing":                 {false, "", server.ReadHeaderTimeout},
		"half a line":             {false, "GET /v1/ver", server.ReadHeaderTimeout},
		"half of headers":         {false, "GET /v1/version HTTP/1.1\r\nHost: n\r\nX-A: b\r\n", server.ReadHeaderTimeout},
		"nothing, of TLS":         {true, "", server.ReadHeaderTimeout},
		"half a handshake":        {true, "\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03", server.ReadHeaderTimeout},
		"nothing any more":        {false, "GET /v1/version HTTP/1.1\r\nHost: n\r\n\r\n", server.IdleTimeout},
		"something else than TLS": {true, "GET /v1/version HTTP/1.1\r\nHost: n\r\n\r\n", 0},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				quiet := slog.New(slog.NewTextHandler(io.Discard, nil))
				srv := HTTP(http.NotFoundHandler(), quiet)
				l := make(pipes)
				var listener net.Listener = l
				if c.tls {
					listener = tls.NewListener(l, settings)
				}
				served := make(chan error, 1)
				go func() { served <- srv.Serve(listener) }()
				here, there := net.Pipe()
				l <- there
				begin := time.Now()
				go func() { _, _ = io.WriteString(here, c.says) }() // it may be gone before it has taken all
				if _, err := io.Copy(io.Discard, here); err != nil && !errors.Is(err, os.ErrClosed) {
					t.Error(err)
				}
				if took := time.Since(begin); took > c.within+time.Second {
					t.Errorf("it was let go after %s", took)
				}
				here.Close()
				close(l)
				if err := <-served; !errors.Is(err, net.ErrClosed) {
					t.Error(err)
				}
				if err := srv.Close(); err != nil {
					t.Error(err)
				}
			})
		})
	}
}
