package stack

import (
	"encoding/binary"
	"io"
	"math"
	"slices"
	"time"
)

const (
	portDNS   = 53
	dnsHeader = 12
	// maxQuery is the longest message to the gateway's port 53 that is read. Queries
	// have a few hundred bytes.
	maxQuery = 4096
	// dnsIdle is how long a TCP connection to it may be silent (RFC 7766 §6.2.3).
	dnsIdle = 10 * time.Second
)

// query lets the Outside answer a DNS message in a datagram.
func (w *Wire) query(t Tuple, data []byte) {
	if len(data) < dnsHeader || len(data) > maxQuery {
		w.drop(DropMalformed)
		return
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.queries >= w.cfg.Limits.Queries {
		w.drop(DropLimit)
		return
	}
	q := slices.Clone(data)
	if w.spawn(func() { w.serveQuery(t, q) }) {
		w.queries++
	}
}

func (w *Wire) serveQuery(t Tuple, q []byte) {
	// The query counts until its answer is on the wire. Otherwise a sandbox that does
	// not read could have any number of answers waiting for room.
	defer func() {
		w.mu.Lock()
		defer w.mu.Unlock()
		w.queries--
	}()
	answer := w.out.ServeDNS(w.ctx, q, false)
	if len(answer) > w.maxDatagram(t.Inside.Addr()) {
		w.drop(DropTooLong)
		answer = truncated(q)
	}
	if len(answer) == 0 || w.ctx.Err() != nil {
		return
	}
	m := w.newDatagram(t.Outside, t.Inside, answer)
	w.transmit(vectorsOf(m), len(m))
}

// truncated returns an answer that tells the sandbox to repeat its query over TCP
// (RFC 1035 §4.1.1). It returns nil if the query does not have a single question.
func truncated(q []byte) []byte {
	end := dnsHeader
	for end < len(q) && q[end] != 0 && q[end] < 64 {
		end += 1 + int(q[end])
	}
	end += 1 + 4 // the root, type and class
	if binary.BigEndian.Uint16(q[4:]) != 1 || end > len(q) {
		return nil
	}
	a := slices.Clone(q[:end])
	a[2] = a[2]&0x79 | 0x82 // an answer, with the same opcode and RD, truncated
	a[3] = 0x80             // recursion is available
	clear(a[6:dnsHeader])   // no records
	return a
}

// dnsRemote is the gateway's port 53 over TCP.
type dnsRemote struct{ w *Wire }

// Splice implements Remote. It answers one query after the other (RFC 7766).
func (d *dnsRemote) Splice(inside Conn) {
	defer func() { _ = inside.Close() }() // it never fails
	var b [2 + maxQuery]byte
	for {
		if inside.SetDeadline(time.Now().Add(dnsIdle)) != nil || fill(inside, b[:2]) != nil {
			return
		}
		n := int(binary.BigEndian.Uint16(b[:]))
		if n < dnsHeader || n > maxQuery || fill(inside, b[2:2+n]) != nil {
			return
		}
		answer := d.w.out.ServeDNS(d.w.ctx, b[2:2+n], true)
		if len(answer) == 0 || len(answer) > math.MaxUint16 {
			return
		}
		m := append(binary.BigEndian.AppendUint16(make([]byte, 0, 2+len(answer)), uint16(len(answer))), answer...)
		if _, err := inside.Write(m); err != nil {
			return
		}
	}
}

// Close implements Remote. The only connection is the sandbox's side, which Splice
// closes.
func (d *dnsRemote) Close() error { return nil }

func fill(r io.Reader, b []byte) error {
	_, err := io.ReadFull(r, b)
	return err
}
