package guestrpc

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"io"
)

// Standby is a session that stays open while its guest is captured. Each copy of the
// guest then has the agent's end of it, and Resume makes a client for that end. So a
// fork need not open a connection.
type Standby struct {
	client *Client
	hellos []byte // ours and the agent's
}

// OpenStandby exchanges hellos over conn, and owns conn from then on. ctx bounds the
// handshake only.
func OpenStandby(ctx context.Context, conn io.ReadWriteCloser) (*Standby, error) {
	c, err := NewClient(ctx, conn)
	if err != nil {
		return nil, err
	}
	return &Standby{c, c.s.peer.append(c.s.ourHello(nil))}, nil
}

// Prepare makes the guest ready to be captured. It renews the guest with its own
// identity, on this session. A fork's Renew then repeats steps that have already been
// done, which is cheap.
func (s *Standby) Prepare(ctx context.Context, req PrepareRequest) error {
	return s.client.call(ctx, MethodPrepare, &req, &empty{})
}

// idSize is the length of a stream's id.
const idSize = 4

// Agreed returns the state that Resume needs: the id of the last stream and both
// hellos, ours first. No call may be under way.
func (s *Standby) Agreed() []byte {
	s.client.s.mu.Lock()
	defer s.client.s.mu.Unlock()
	return append(binary.LittleEndian.AppendUint32(nil, s.client.s.lastID), s.hellos...)
}

// Close ends the session here. Copies of the guest keep theirs.
func (s *Standby) Close() error { return s.client.Close() }

// Resume makes a client of a session that a Standby has opened. conn leads to the
// agent's end of that session. Resume sends nothing and does not wait. If it fails,
// it closes conn.
func Resume(conn io.ReadWriteCloser, agreed []byte) (*Client, error) {
	ours, peer, lastID, err := parseAgreed(agreed)
	if err != nil {
		err = &Error{Code: CodeUnavailable, Message: "resume the session with the guest agent: " + err.Error(), cause: err}
		return nil, errors.Join(err, conn.Close())
	}
	c := newClient(conn, ours.window)
	// The hello that an earlier version of this package has sent to the agent stays
	// valid.
	c.s.r.maxPayload = ours.maxPayload
	c.s.lastID = lastID
	c.s.peer, c.s.version = peer, min(ours.maxVersion, peer.maxVersion)
	c.start()
	return c, nil
}

func parseAgreed(b []byte) (ours, peer hello, lastID uint32, err error) {
	if len(b) < idSize {
		return ours, peer, 0, errNotPeer
	}
	lastID = binary.LittleEndian.Uint32(b)
	hellos := bytes.NewReader(b[idSize:])
	r := newFrameReader(hellos)
	if ours, err = readHello(r); err != nil {
		return ours, peer, 0, err
	}
	if peer, err = readHello(r); err != nil {
		return ours, peer, 0, err
	}
	if r.end != r.start || hellos.Len() > 0 {
		return ours, peer, 0, violation("more than two hellos")
	}
	if v := min(ours.maxVersion, peer.maxVersion); v < MinVersion || v > MaxVersion {
		err = &VersionError{OurMin: MinVersion, OurMax: MaxVersion, PeerMin: peer.minVersion, PeerMax: peer.maxVersion}
	}
	return ours, peer, lastID, err
}
