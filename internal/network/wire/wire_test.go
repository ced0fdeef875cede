package wire

import (
	"bytes"
	"encoding/binary"
	"errors"
	"slices"
	"testing"
)

// tcpFrame is a TCP segment over IPv4 or IPv6 in the form in which a sender with
// offloads leaves it: the checksum field has the sum of the pseudo header.
func tcpFrame(version, payload, size int) (Header, []byte) {
	ip, kind, gso := ipv4Len, uint16(0x0800), uint8(GSOTCPv4)
	if version == 6 {
		ip, kind, gso = ipv6Len, 0x86dd, GSOTCPv6
	}
	f := make([]byte, EthernetLen+ip+tcpLen+4+payload)
	binary.BigEndian.PutUint16(f[12:], kind)
	h := f[EthernetLen:]
	if version == 4 {
		h[0], h[8], h[9] = 0x45, 64, protocolTCP
		binary.BigEndian.PutUint16(h[2:], uint16(len(h)))
		binary.BigEndian.PutUint16(h[4:], 0xffff) // the next one is 0
		copy(h[12:], []byte{10, 255, 255, 2, 192, 0, 2, 1})
		binary.BigEndian.PutUint16(h[10:], ^fold(add(0, h[:ip])))
	} else {
		h[0], h[6], h[7] = 0x60, protocolTCP, 64
		binary.BigEndian.PutUint16(h[4:], uint16(len(h)-ip))
		h[8], h[23], h[24], h[39] = 0xfd, 2, 0x20, 1
	}
	t := h[ip:]
	binary.BigEndian.PutUint32(t[4:], 0xffff_ff00) // wraps around
	t[12], t[13] = 6<<4, 0x10|tcpPSH|tcpFIN|tcpCWR
	for i := range payload {
		t[tcpLen+4+i] = byte(i * 7 >> 3)
	}
	out := Header{
		Flags: NeedsChecksum, GSO: gso, SegmentSize: uint16(size), HeadersLen: uint16(EthernetLen + ip + tcpLen + 4),
		ChecksumStart: uint16(EthernetLen + ip), ChecksumOffset: tcpChecksumAt,
	}
	binary.BigEndian.PutUint16(t[tcpChecksumAt:], fold(out.pseudo(f)))
	return out, f
}

func TestHeaderRoundTrip(t *testing.T) {
	h := Header{Flags: 3, GSO: GSOTCPv6 | GSOECN, HeadersLen: 0x0102, SegmentSize: 0x0304, ChecksumStart: 0x0506, ChecksumOffset: 0x0708}
	b := make([]byte, HeaderLen)
	h.Put(b)
	// The bytes as Linux's struct virtio_net_hdr has them on a little-endian machine.
	if want := []byte{3, 0x84, 2, 1, 4, 3, 6, 5, 8, 7}; !bytes.Equal(b, want) {
		t.Fatalf("encoded as %x, not %x", b, want)
	}
	if got := Get(b); got != h {
		t.Fatalf("decoded as %+v", got)
	}
}

func TestParse(t *testing.T) {
	tso4, frame4 := tcpFrame(4, 3000, 1448)
	tso6, frame6 := tcpFrame(6, 3000, 1428)
	plain := func(n int) []byte { return make([]byte, n) }
	with := func(h Header, change func(*Header)) Header {
		change(&h)
		return h
	}
	for _, c := range []struct {
		name  string
		h     Header
		frame []byte
		ok    bool
	}{
		{"complete", Header{}, plain(60), true},
		{"shortest", Header{}, plain(EthernetLen), true},
		{"too short", Header{}, plain(EthernetLen - 1), false},
		{"empty", Header{}, nil, false},
		{"longest", Header{}, plain(MaxFrame), true},
		{"too long", Header{}, plain(MaxFrame + 1), false},
		{"valid data", Header{Flags: DataValid}, plain(60), true},
		{"unknown flag", Header{Flags: 4}, plain(60), false},
		{"checksum at the end", Header{Flags: NeedsChecksum, ChecksumStart: 34, ChecksumOffset: 6}, plain(42), true},
		{"checksum behind the end", Header{Flags: NeedsChecksum, ChecksumStart: 34, ChecksumOffset: 7}, plain(42), false},
		{"checksum of the Ethernet header", Header{Flags: NeedsChecksum, ChecksumStart: 13, ChecksumOffset: 6}, plain(42), false},
		{"checksum far away", Header{Flags: NeedsChecksum, ChecksumStart: 0xffff, ChecksumOffset: 0xffff}, plain(MaxFrame), false},
		{"unused fields", Header{SegmentSize: 9, ChecksumStart: 0xffff, ChecksumOffset: 0xffff}, plain(60), true},
		{"TSO", tso4, frame4, true},
		{"TSO6", tso6, frame6, true},
		{"ECN", with(tso4, func(h *Header) { h.GSO |= GSOECN }), frame4, true},
		{"ECN alone", Header{GSO: GSOECN}, plain(60), false},
		{"UDP", with(tso4, func(h *Header) { h.GSO = 3 }), frame4, false},
		{"two types", with(tso4, func(h *Header) { h.GSO = GSOTCPv4 | GSOTCPv6 }), frame4, false},
		{"segments of 0", with(tso4, func(h *Header) { h.SegmentSize = 0 }), frame4, false},
		{"TSO without checksum", with(tso4, func(h *Header) { h.Flags = 0 }), frame4, false},
		{"TSO with another checksum", with(tso4, func(h *Header) { h.ChecksumOffset = 6 }), frame4, false},
		{"TCP header in IP's", with(tso6, func(h *Header) { h.ChecksumStart = 34 }), frame6, false},
		{"TCP header behind the end", tso4, frame4[:EthernetLen+ipv4Len+tcpLen-1], false},
		{"headers behind the end", with(tso4, func(h *Header) { h.HeadersLen = 60000 }), frame4, false},
	} {
		message := append(make([]byte, HeaderLen), c.frame...)
		c.h.Put(message)
		h, frame, err := Parse(message)
		switch {
		case c.ok && (err != nil || h != c.h || !bytes.Equal(frame, c.frame)):
			t.Errorf("%s: %+v, %d bytes, %v", c.name, h, len(frame), err)
		case !c.ok && !errors.Is(err, ErrMessage):
			t.Errorf("%s: %v", c.name, err)
		}
	}
	if _, _, err := Parse(make([]byte, HeaderLen-1)); !errors.Is(err, ErrMessage) {
		t.Errorf("half a header: %v", err)
	}
}

func TestComplete(t *testing.T) {
	for _, version := range []int{4, 6} {
		h, frame := tcpFrame(version, 1001, 0)
		h.Complete(frame) // the kind of segment does not matter here
		if sum := fold(add(h.pseudo(frame), frame[h.ChecksumStart:])); sum != 0xffff {
			t.Errorf("IPv%d: the sum is %#x", version, sum)
		}
	}
	before := []byte("nothing to do here")
	after := bytes.Clone(before)
	Header{}.Complete(after)
	if !bytes.Equal(before, after) {
		t.Error("a complete frame was changed")
	}
	// A sum of 0 is written in its other form, because 0 means that there is no
	// checksum.
	frame := make([]byte, 42)
	binary.BigEndian.PutUint16(frame[40:], 0xffff)
	Header{Flags: NeedsChecksum, ChecksumStart: 34, ChecksumOffset: 6}.Complete(frame)
	if got := binary.BigEndian.Uint16(frame[40:]); got != 0xffff {
		t.Errorf("a sum of 0 was written as %#x", got)
	}
}

func TestSegments(t *testing.T) {
	for _, version := range []int{4, 6} {
		for _, payload := range []int{1, 999, 1000, 1001, 2000, 65000} {
			h, frame := tcpFrame(version, payload, 1000)
			headers := int(h.HeadersLen)
			before := bytes.Clone(frame)
			var data []byte
			count := 0
			err := h.Segments(frame, nil, 0, func(s []byte) bool {
				checkSegment(t, h, s, count, len(data)+1000 >= payload)
				count++
				data = append(data, s[headers:]...)
				return true
			})
			if err != nil || !bytes.Equal(data, frame[headers:]) || count != (payload+999)/1000 {
				t.Errorf("IPv%d, %d bytes: %d segments with %d bytes, %v", version, payload, count, len(data), err)
			}
			if !bytes.Equal(before, frame) {
				t.Errorf("IPv%d, %d bytes: the frame was changed", version, payload)
			}
		}
	}
}

// checkSegment checks the headers of segment i.
func checkSegment(t *testing.T, h Header, s []byte, i int, last bool) {
	t.Helper()
	ip, tcp := s[EthernetLen:], s[h.ChecksumStart:]
	if h.GSO == GSOTCPv4 {
		if fold(add(0, ip[:ipv4Len])) != 0xffff || int(binary.BigEndian.Uint16(ip[2:])) != len(ip) || binary.BigEndian.Uint16(ip[4:]) != uint16(0xffff+i) {
			t.Errorf("segment %d has the IP header %x", i, ip[:ipv4Len])
		}
	} else if int(binary.BigEndian.Uint16(ip[4:])) != len(ip)-ipv6Len {
		t.Errorf("segment %d has the IP header %x", i, ip[:ipv6Len])
	}
	if sum := fold(add(h.pseudo(s), tcp)); sum != 0xffff {
		t.Errorf("segment %d has the sum %#x", i, sum)
	}
	want := byte(0x10)
	if i == 0 {
		want |= tcpCWR
	}
	if last {
		want |= tcpPSH | tcpFIN
	}
	if tcp[13] != want || binary.BigEndian.Uint32(tcp[4:]) != 0xffff_ff00+uint32(i*1000) {
		t.Errorf("segment %d has the TCP header %x", i, tcp[:tcpLen])
	}
}

func TestSegmentsRefuses(t *testing.T) {
	for name, change := range map[string]func(h *Header, frame []byte){
		"another protocol":    func(_ *Header, f []byte) { f[EthernetLen+9] = 17 },
		"another version":     func(_ *Header, f []byte) { f[EthernetLen] = 0x65 },
		"another type":        func(_ *Header, f []byte) { f[13] = 6 },
		"options in IP":       func(_ *Header, f []byte) { f[EthernetLen] = 0x46 },
		"no TCP header":       func(h *Header, f []byte) { f[h.ChecksumStart+12] = 4 << 4 },
		"IPv6 for IPv4":       func(h *Header, _ []byte) { h.GSO, h.ChecksumStart = GSOTCPv6, 54 },
		"TCP header too long": func(h *Header, f []byte) { f[h.ChecksumStart+12] = 15 << 4 },
	} {
		h, frame := tcpFrame(4, 30, 10)
		change(&h, frame)
		if err := h.Check(len(frame)); err != nil {
			t.Fatalf("%s: %v", name, err)
		}
		if err := h.Segments(frame, nil, 0, func([]byte) bool { return true }); !errors.Is(err, ErrMessage) {
			t.Errorf("%s: %v", name, err)
		}
	}
	h, frame := tcpFrame(6, 5000, 1000)
	count := 3
	if err := h.Segments(frame, nil, count, func(s []byte) bool {
		checkSegment(t, h, s, count, count == 4)
		count++
		return true
	}); err != nil || count != 5 {
		t.Errorf("from the fourth of five segments on there are %d, %v", count, err)
	}
	count = 0
	if err := h.Segments(frame, nil, 0, func([]byte) bool { count++; return false }); err != nil || count != 1 {
		t.Errorf("%d segments after the first was refused, %v", count, err)
	}
}

// FuzzParse: no message does harm, and an accepted message can be completed or cut
// up.
func FuzzParse(f *testing.F) {
	for _, version := range []int{4, 6} {
		h, frame := tcpFrame(version, 3000, 1000)
		message := append(make([]byte, HeaderLen), frame...)
		h.Put(message)
		f.Add(message)
	}
	f.Add(make([]byte, HeaderLen+60))
	f.Fuzz(func(t *testing.T, message []byte) {
		h, frame, err := Parse(message)
		if err != nil {
			if !errors.Is(err, ErrMessage) {
				t.Fatal(err)
			}
			return
		}
		if h.Segmented() {
			total := 0
			err := h.Segments(frame, nil, 0, func(s []byte) bool {
				if len(s) > len(frame) {
					t.Fatalf("a segment of %d bytes of a frame of %d", len(s), len(frame))
				}
				total += len(s)
				return true
			})
			if err == nil && total < len(frame) {
				t.Fatalf("segments of %d bytes of a frame of %d", total, len(frame))
			}
			return
		}
		again := slices.Clone(frame)
		h.Complete(again)
		if len(again) != len(frame) {
			t.Fatal("the frame has another length")
		}
		encoded := make([]byte, HeaderLen)
		h.Put(encoded)
		if !bytes.Equal(encoded, message[:HeaderLen]) {
			t.Fatalf("%x was encoded as %x", message[:HeaderLen], encoded)
		}
	})
}
