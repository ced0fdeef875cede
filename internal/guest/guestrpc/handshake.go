package guestrpc

import (
	"encoding/binary"
	"errors"
	"io"
	"strconv"

	"agentrun.dev/internal/codec"
)

// The protocol versions that this package speaks.
const (
	MinVersion = 1
	MaxVersion = 1
)

const (
	magic         = "AGRUNRPC"
	helloVersion  = 1
	maxHello      = 4 << 10
	maxCapability = 64
	maxCapCount   = 32

	minWindow = 4 << 10
	maxWindow = 1 << 24
)

// hello is the description of an end that it sends before the first frame.
type hello struct {
	minVersion, maxVersion uint64
	maxPayload             uint32
	window                 uint32
	capabilities           []string
}

func (h *hello) append(b []byte) []byte {
	b = append(b, magic...)
	at := len(b)
	b = append(b, 0, 0)
	e := codec.NewEncoder(b)
	e.Version(helloVersion)
	e.Uvarint(h.minVersion)
	e.Uvarint(h.maxVersion)
	e.Uvarint(uint64(h.maxPayload))
	e.Uvarint(uint64(h.window))
	e.Strings(h.capabilities)
	b = e.Bytes()
	binary.LittleEndian.PutUint16(b[at:], uint16(len(b)-at-2))
	return b
}

// errNotPeer means that the other end does not speak this protocol at all.
var errNotPeer = violation("no AgentRun hello: whatever listens there is not an AgentRun guest agent or host")

// readHello reads the peer's hello and checks it against our versions.
func readHello(f *frameReader) (hello, error) {
	b, err := f.take(len(magic) + 2)
	if err != nil {
		if errors.Is(err, io.ErrUnexpectedEOF) {
			err = errNotPeer
		}
		return hello{}, err
	}
	if string(b[:len(magic)]) != magic {
		return hello{}, errNotPeer
	}
	n := int(binary.LittleEndian.Uint16(b[len(magic):]))
	if n > maxHello {
		return hello{}, violation("hello of " + strconv.Itoa(n) + " bytes")
	}
	if b, err = f.take(n); err != nil {
		if errors.Is(err, io.EOF) {
			err = io.ErrUnexpectedEOF
		}
		return hello{}, err
	}
	return decodeHello(b)
}

func decodeHello(b []byte) (hello, error) {
	d := codec.NewDecoder(b)
	d.Version(helloVersion)
	h := hello{minVersion: d.Uvarint(), maxVersion: d.Uvarint()}
	h.maxPayload = uint32(min(d.Uvarint(), MaxPayload))
	h.window = uint32(min(d.Uvarint(), maxWindow))
	h.capabilities = d.Strings(maxCapCount, maxCapability)
	if err := d.Finish(); err != nil {
		return h, violation("hello: " + err.Error())
	}
	if h.minVersion == 0 || h.minVersion > h.maxVersion {
		return h, violation("hello with an impossible version range " + versionRange(h.minVersion, h.maxVersion))
	}
	if h.maxPayload < minPayload || h.window < minWindow {
		return h, violation("hello with a frame size or window below 4096")
	}
	return h, nil
}

// VersionError says that the two ends share no protocol version.
type VersionError struct {
	OurMin, OurMax   uint64
	PeerMin, PeerMax uint64
}

func (e *VersionError) Error() string {
	older := "the peer (rebuild the template if that is a guest, upgrade AgentRun if it is the host)"
	if e.PeerMin > e.OurMax {
		older = "this end (upgrade AgentRun if this is the host, rebuild the template if it is a guest)"
	}
	return "no common guest protocol version: we speak " + versionRange(e.OurMin, e.OurMax) +
		", the peer speaks " + versionRange(e.PeerMin, e.PeerMax) + "; update " + older
}

func versionRange(lo, hi uint64) string {
	if lo == hi {
		return strconv.FormatUint(lo, 10)
	}
	return strconv.FormatUint(lo, 10) + " to " + strconv.FormatUint(hi, 10)
}

// negotiate picks the highest version that both ends speak.
func negotiate(peer hello) (uint64, error) {
	v := min(peer.maxVersion, MaxVersion)
	if v < max(peer.minVersion, MinVersion) {
		return 0, &VersionError{OurMin: MinVersion, OurMax: MaxVersion, PeerMin: peer.minVersion, PeerMax: peer.maxVersion}
	}
	return v, nil
}
