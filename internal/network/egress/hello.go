package egress

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"io"
	"net"
	"slices"

	"agentrun.dev/internal/network/policy"
)

// maxHello bounds the bytes that are read for a ClientHello, which is kept in memory.
// The ClientHellos of today's browsers have 2 KiB.
const maxHello = 32 << 10

// Extensions of TLS that hide the server name.
const (
	extensionECH  = 0xfe0d // RFC 9849
	extensionESNI = 0xffce // its draft before 2020, which some servers still read
)

// recordTypeHandshake is the first byte of each TLS connection that may pass (RFC 8446 §5.1).
const recordTypeHandshake = 22

// beginsTLS reports whether a first byte is the type of a TLS record. Some servers
// accept alerts, and some accept other records, before the ClientHello. So a
// connection that begins with any TLS record must not pass as another protocol.
func beginsTLS(b byte) bool { return b >= 20 && b <= 24 }

// hello holds the first bytes of a connection, and the facts read from them.
type hello struct {
	// raw is all bytes that were read. The other side gets them if the connection is
	// allowed.
	raw []byte
	// isTLS is set if the connection begins like TLS. Otherwise the other fields are
	// empty.
	isTLS bool
	// name is the server name; empty if the ClientHello has none.
	name string
	// hidden is set if there may be another, encrypted name.
	hidden bool
	// protocols are the protocols that it offers for use inside of TLS (ALPN).
	protocols []string
}

var (
	errHelloRead = errors.New("ClientHello was read")
	errNoHello   = errors.New("the connection does not begin with a ClientHello")
	errHelloLong = fmt.Errorf("ClientHello is longer than %d bytes", maxHello)
)

// readHello reads a connection up to the end of its ClientHello, and no further than
// crypto/tls does. crypto/tls handles every way to split the message into records and
// segments.
func readHello(ctx context.Context, conn io.Reader) (hello, error) {
	recorder := &recorder{from: conn}
	var info *tls.ClientHelloInfo
	server := tls.Server(recorder, &tls.Config{
		MinVersion: tls.VersionTLS12, // has no effect: the version is negotiated later
		GetConfigForClient: func(i *tls.ClientHelloInfo) (*tls.Config, error) {
			info = i
			return nil, errHelloRead
		},
	})
	err := server.HandshakeContext(ctx)
	h := hello{raw: recorder.raw, isTLS: len(recorder.raw) > 0 && beginsTLS(recorder.raw[0])}
	if info == nil {
		if recorder.err != nil {
			err = recorder.err
		}
		return h, err
	}
	h.name, h.protocols = info.ServerName, info.SupportedProtos
	h.hidden = slices.Contains(info.Extensions, extensionECH) || slices.Contains(info.Extensions, extensionESNI)
	return h, nil
}

// recorder is a net.Conn that keeps the bytes that it reads, and writes none.
type recorder struct {
	net.Conn // nil: crypto/tls uses only the methods below
	from     io.Reader
	raw      []byte
	err      error
}

func (r *recorder) Read(b []byte) (int, error) {
	if len(r.raw) >= maxHello {
		r.err = errHelloLong
		return 0, r.err
	}
	n, err := r.from.Read(b[:min(len(b), maxHello-len(r.raw))])
	r.raw = append(r.raw, b[:n]...)
	if len(r.raw) > 0 && r.raw[0] != recordTypeHandshake {
		err = errNoHello // at once: crypto/tls would wait for a complete header
	}
	if err != nil {
		r.err = err
	}
	return n, err
}

// Write drops the alert that crypto/tls sends when the handshake is given up.
func (r *recorder) Write(b []byte) (int, error) { return len(b), nil }
func (r *recorder) Close() error                { return nil }

// judge decides about a ClientHello. A refusal has a reason. An empty name means that
// the connection is allowed without a name.
func (h hello) judge(err error, c policy.Connection, ech bool) (policy.Name, policy.Decision) {
	refuse := func(format string, args ...any) (policy.Name, policy.Decision) {
		return "", policy.Decision{Kind: ByTLS, Rule: c.Rule, Reason: fmt.Sprintf(format, args...)}
	}
	if err != nil {
		if !h.isTLS && len(h.raw) > 0 && !c.NameNeeded {
			return "", c.Decision
		}
		if !h.isTLS && len(h.raw) > 0 {
			return refuse("not TLS: port %d is open for names, which only TLS says", portHTTPS)
		}
		return refuse("no readable ClientHello: %v", err)
	}
	if h.hidden && !ech {
		return refuse("the ClientHello has an encrypted server name (ECH)")
	}
	if h.name == "" {
		if c.NameNeeded {
			return refuse("the ClientHello has no server name")
		}
		return "", c.Decision
	}
	name, err := policy.ParseName(h.name)
	if err != nil {
		return refuse("the server name of the ClientHello: %v", err)
	}
	return name, c.Admits(name)
}
