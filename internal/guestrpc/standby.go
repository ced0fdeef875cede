package guestrpc

import (
	"bytes"
	"context"
	"errors"
	"io"
	"slices"
)

// Standby is a session that is open and was never used. When its guest is
// captured, each copy of the guest has the agent's end of it, and Resume makes
// a client for that: a fork need not open a connection.
type Standby struct {
	client *Client
	agreed []byte
}

// OpenStandby exchanges hellos over conn, which it owns from here on. ctx
// bounds the handshake only.
func OpenStandby(ctx context.Context, conn io.ReadWriteCloser) (*Standby, error) {
	c, err := NewClient(ctx, conn)
	if err != nil {
		return nil, err
	}
	return &Standby{c, c.s.peer.append(c.s.ourHello(nil))}, nil
}

// Agreed is what Resume needs: both hellos, ours first.
func (s *Standby) Agreed() []byte { return slices.Clone(s.agreed) }

// Close ends the session, here and not in copies of the guest.
func (s *Standby) Close() error { return s.client.Close() }

// Resume makes a client of a session that a Standby has opened, whose agent's
// end is the peer of conn. It sends nothing and waits for nothing. conn is
// closed if it fails.
func Resume(conn io.ReadWriteCloser, agreed []byte) (*Client, error) {
	ours, peer, err := parseAgreed(agreed)
	if err != nil {
		err = &Error{Code: CodeUnavailable, Message: "resume the session with the guest agent: " + err.Error(), cause: err}
		return nil, errors.Join(err, conn.Close())
	}
	c := newClient(conn, ours.window)
	// What the agent was told by an earlier version of this package holds.
	c.s.r.maxPayload = ours.maxPayload
	c.s.peer, c.s.version = peer, min(ours.maxVersion, peer.maxVersion)
	c.start()
	return c, nil
}

func parseAgreed(b []byte) (ours, peer hello, err error) {
	text := bytes.NewReader(b)
	r := newFrameReader(text)
	if ours, err = readHello(r); err != nil {
		return ours, peer, err
	}
	if peer, err = readHello(r); err != nil {
		return ours, peer, err
	}
	if r.end != r.start || text.Len() > 0 {
		return ours, peer, violation("more than two hellos")
	}
	if v := min(ours.maxVersion, peer.maxVersion); v < MinVersion || v > MaxVersion {
		err = &VersionError{OurMin: MinVersion, OurMax: MaxVersion, PeerMin: peer.minVersion, PeerMax: peer.maxVersion}
	}
	return ours, peer, err
}
