package egress

import (
	"bytes"
	"crypto/tls"
	"encoding/binary"
	"errors"
	"io"
	"net/netip"
	"slices"
	"testing"

	"agentrun.dev/internal/network/addresses"
	"agentrun.dev/internal/network/policy"
)

// clientHello builds a TLS record with a ClientHello that has the given extensions.
func clientHello(extensions ...[]byte) []byte {
	body := []byte{3, 3}
	body = append(body, make([]byte, 32)...)          // random
	body = append(body, 0)                            // session id
	body = append(body, 0, 4, 0x13, 0x01, 0xc0, 0x2f) // cipher suites
	body = append(body, 1, 0)                         // compression
	all := bytes.Join(extensions, nil)
	body = binary.BigEndian.AppendUint16(body, uint16(len(all)))
	body = append(body, all...)
	message := append([]byte{1, 0}, binary.BigEndian.AppendUint16(nil, uint16(len(body)))...)
	return record(append(message, body...))
}

func record(payload []byte) []byte {
	return append(binary.BigEndian.AppendUint16([]byte{22, 3, 1}, uint16(len(payload))), payload...)
}

// reRecord cuts the handshake message of a record into records of n bytes.
func reRecord(raw []byte, n int) []byte {
	var out []byte
	for payload := raw[5:]; len(payload) > 0; {
		size := min(n, len(payload))
		out = append(out, record(payload[:size])...)
		payload = payload[size:]
	}
	return out
}

func extension(typ uint16, data []byte) []byte {
	out := binary.BigEndian.AppendUint16(nil, typ)
	out = binary.BigEndian.AppendUint16(out, uint16(len(data)))
	return append(out, data...)
}

// sni is the extension with server names (RFC 6066 §3).
func sni(names ...string) []byte {
	var list []byte
	for _, name := range names {
		list = append(list, 0)
		list = binary.BigEndian.AppendUint16(list, uint16(len(name)))
		list = append(list, name...)
	}
	return extension(0, append(binary.BigEndian.AppendUint16(nil, uint16(len(list))), list...))
}

// ech is the extension that a client with ECH sends. Other clients send an imitation
// of it (GREASE).
func ech() []byte {
	data := []byte{0, 0, 1, 0, 1, 42, 0, 32}
	data = append(data, make([]byte, 32)...)
	data = append(data, 0, 128)
	return extension(extensionECH, append(data, make([]byte, 128)...))
}

// FuzzHello passes the first bytes of a connection to the parser. An accepted name
// occurs in the bytes, and no byte that was read is lost.
func FuzzHello(f *testing.F) {
	f.Add(clientHello(sni("allowed.example")), 1000)
	f.Add(clientHello(sni("allowed.example"), ech()), 1)
	f.Add(clientHello(sni("allowed.example", "evil.example")), 7)
	f.Add(clientHello(sni("allowed.example"), sni("evil.example")), 7)
	f.Add(clientHello(sni("allowed.example\x00.evil.example")), 7)
	f.Add(clientHello(sni("allowed.example.")), 7)
	f.Add(reRecord(clientHello(sni("allowed.example")), 2), 3)
	f.Add([]byte("GET / HTTP/1.1\r\n"), 5)
	set := allow("allowed.example:443").Policy
	connection := set.Connect(policy.Query{Protocol: policy.TCP, To: publicAddress(), Port: 443, Names: []policy.Pinned{{Name: "allowed.example"}}})
	f.Fuzz(func(t *testing.T, raw []byte, piece int) {
		h, err := readHello(t.Context(), &pieces{raw: raw, size: max(piece, 1)})
		if !bytes.HasPrefix(raw, h.raw) {
			t.Fatalf("recorded %x of %x", h.raw, raw)
		}
		name, d := h.judge(err, connection, false)
		if !d.Allowed {
			return
		}
		if err != nil || h.hidden || name != "allowed.example" || !bytes.Contains(bytes.ToLower(joinRecords(raw)), []byte(name)) {
			t.Errorf("%x is allowed for %q: %+v", raw, name, d)
		}
	})
}

// joinRecords is the payload of all TLS records.
func joinRecords(raw []byte) []byte {
	var out []byte
	for len(raw) >= 5 {
		n := min(int(binary.BigEndian.Uint16(raw[3:])), len(raw)-5)
		out = append(out, raw[5:5+n]...)
		raw = raw[5+n:]
	}
	return out
}

// pieces reads a few bytes at a time.
type pieces struct {
	raw  []byte
	size int
}

func (p *pieces) Read(b []byte) (int, error) {
	if len(p.raw) == 0 {
		return 0, errEnd
	}
	n := copy(b, p.raw[:min(p.size, len(p.raw))])
	p.raw = p.raw[n:]
	return n, nil
}

var errEnd = errors.New("end of the test's bytes")

func publicAddress() addresses.Verdict {
	return addresses.NewGuard(hostAddresses{}, nil).Check(netip.MustParseAddr(addrAllowed))
}

// TestAlertBeforeHello: TLS servers ignore a warning before the ClientHello. A denied
// name after a warning is still denied.
func TestAlertBeforeHello(t *testing.T) {
	w := newWorld(t)
	pool := w.serveTLS(t, addrAllowed+":443")
	s := w.sandbox(t, written("allow", nil, []string{"evil.example"}))
	conn := mustConnect(t, s, addrAllowed+":443")
	// no_renegotiation, a warning (RFC 5246, 7.2)
	if _, err := conn.Write([]byte{21, 3, 1, 0, 2, 1, 100}); err != nil {
		t.Fatal(err)
	}
	client := tls.Client(conn, &tls.Config{ServerName: "evil.example", RootCAs: pool, MinVersion: tls.VersionTLS12})
	if err := client.Handshake(); err == nil {
		_, _ = io.WriteString(client, "x")
		_, _ = io.ReadFull(client, make([]byte, 1))
		t.Error("TLS with a denied name was begun behind an alert")
	}
	if seen := w.seen(); slices.Contains(seen, "tls evil.example") {
		t.Errorf("servers saw %q", seen)
	}
}
