package egress

import (
	"context"
	"fmt"
	"net"
	"net/http"
	"sync"
)

// frameHead is the length of the header of an HTTP/2 frame (RFC 9113, 4.1).
const frameHead = 9

// streams sends requests over one HTTP/2 connection, never more at a time than the
// server allows. net/http would count waiting requests as if they were under way.
// Then none would continue if more came at once than the server allows, or before the
// server has stated its limit.
type streams struct {
	conn    *http.ClientConn
	bounded <-chan struct{} // closed once the server has stated its limit

	mu      sync.Mutex    // protects all following fields
	changed chan struct{} // closed and replaced when there may be room
}

// newStreams begins HTTP/2 on a connection that has TLS already.
func newStreams(ctx context.Context, remote net.Conn) (*streams, error) {
	first := &firstFrame{Conn: remote, done: make(chan struct{})}
	protocols := new(http.Protocols)
	protocols.SetUnencryptedHTTP2(true) // net/http sees no TLS: the connection encrypts by itself
	transport := &http.Transport{
		DialContext:        func(context.Context, string, string) (net.Conn, error) { return first, nil },
		DisableCompression: true, MaxResponseHeaderBytes: maxHTTPHead, Protocols: protocols, HTTP2: limitsHTTP2,
	}
	conn, err := transport.NewClientConn(ctx, "http", "remote:https")
	if err != nil {
		return nil, fmt.Errorf("HTTP/2 with the server: %w", err)
	}
	s := &streams{conn: conn, bounded: first.done, changed: make(chan struct{})}
	conn.SetStateHook(func(*http.ClientConn) { s.wake() })
	return s, nil
}

func (s *streams) wake() {
	s.mu.Lock()
	defer s.mu.Unlock()
	close(s.changed)
	s.changed = make(chan struct{})
}

// RoundTrip sends a request once there is room for it.
func (s *streams) RoundTrip(r *http.Request) (*http.Response, error) {
	for wait := s.bounded; ; {
		select {
		case <-wait:
		case <-r.Context().Done():
			return nil, r.Context().Err()
		}
		s.mu.Lock()
		wait = s.changed
		s.mu.Unlock()
		if s.conn.Reserve() == nil {
			return s.conn.RoundTrip(r)
		}
		if s.conn.Err() != nil {
			return nil, errOneConnection // no part of the request was sent
		}
	}
}

// CloseIdleConnections ends the connection, whose requests have all ended.
func (s *streams) CloseIdleConnections() { _ = s.conn.Close() }

// firstFrame is an HTTP/2 connection that reports when its reader has processed the
// server's first frame, its SETTINGS. That is the case when the reader reads again.
type firstFrame struct {
	net.Conn

	// Only the reader uses the following fields.
	head []byte // of the first frame
	left int    // unread bytes of its payload
	over bool   // done is closed

	done chan struct{}
}

func (f *firstFrame) Read(b []byte) (int, error) {
	if len(f.head) == frameHead && f.left == 0 {
		f.end()
	}
	n, err := f.Conn.Read(b)
	if err != nil {
		f.end() // waiting requests learn of the error from the connection
	}
	f.note(b[:n])
	return n, err
}

// note follows the first frame through the bytes that were read.
func (f *firstFrame) note(b []byte) {
	if missing := frameHead - len(f.head); missing > 0 {
		missing = min(missing, len(b))
		f.head = append(f.head, b[:missing]...)
		b = b[missing:]
		if len(f.head) == frameHead {
			f.left = int(f.head[0])<<16 | int(f.head[1])<<8 | int(f.head[2])
		}
	}
	f.left -= min(f.left, len(b))
}

func (f *firstFrame) end() {
	if !f.over {
		f.over = true
		close(f.done)
	}
}
