package netctl

import (
	"encoding/hex"
	"errors"
	"flag"
	"net/netip"
	"os"
	"reflect"
	"strings"
	"testing"
	"time"

	"agentrun.dev/internal/network/inject"
	"agentrun.dev/internal/network/policy"
)

var (
	moment = time.Unix(1_700_000_000, 123).UTC()
	here   = netip.MustParseAddrPort("10.255.255.2:40000")
	there  = netip.MustParseAddrPort("[2001:db8::1]:443")
)

func lineage() Lineage {
	return Lineage{
		Tuples:    []Tuple{{here, netip.MustParseAddrPort("203.0.113.7:443")}, {netip.MustParseAddrPort("[fd00:a9e7::2]:1"), there}},
		Pins:      []Pin{{Name: "api.example.com", Addr: there.Addr()}, {Name: "db.internal", Addr: netip.MustParseAddr("10.1.2.3"), Internal: true}},
		Wildcards: []Wildcard{{Pattern: "*.example.com:443", Began: moment, Names: 7, Bytes: 130}},
	}
}

func limits() Limits {
	return Limits{Connections: 1, Opening: 2, Flows: 3, Queries: 4, Buffers: 5, Up: 1 << 40, Down: 6}
}

func injections() []inject.Host {
	return []inject.Host{
		{Name: "api.example.com", Certificate: []byte{1, 2}, Key: "key", Credentials: []inject.Credential{
			{Secret: "llm/KEY", Header: "Authorization", Format: "Bearer {}", Placeholder: "p", Value: "v"}, {Secret: "llm/X", Problem: "it is gone"},
		}},
		{Name: "b.example.com", Problem: "no CA"},
	}
}

func messages() []Message {
	return []Message{
		&Hello{Protocol: 1, Features: []string{"a", "b"}},
		&Configure{1, Settings{
			Upstreams:       []netip.AddrPort{netip.MustParseAddrPort("192.0.2.1:53"), there},
			InternalDomains: []InternalDomain{{"svc.cluster.local", []netip.AddrPort{there}}},
			ClosedRanges:    []netip.Prefix{netip.MustParsePrefix("10.0.0.0/8"), netip.MustParsePrefix("::/0")},
			Defaults:        limits(),
			Roots:           []byte("PEM"),
		}},
		&Attach{2, Wire{
			ID: "sandbox-1", MAC: [6]byte{2, 0xa9, 0xe7, 0, 0, 2}, GatewayMAC: [6]byte{2, 0xa9, 0xe7, 0, 0, 1},
			Address: here.Addr(), Gateway: netip.MustParseAddr("10.255.255.1"),
			Address6: netip.MustParseAddr("fd00:a9e7::2"), Gateway6: netip.MustParseAddr("fd00:a9e7::1"), MTU: 1500,
			Rules: Rules{Policies: `[{"egress":"deny"},{}]`, ECH: true, Injections: injections()}, Limits: limits(), Paused: true, Lineage: lineage(),
		}},
		&SetPolicy{3, "w", Rules{Policies: "[{}]", Injections: injections()}},
		&OfWire{KindDetach, 4, "w"}, &OfWire{KindPause, 5, "w"}, &OfWire{KindResume, 6, "w"},
		&OfWire{KindMark, 7, "w"}, &Collect{8, "w", 3},
		&Simple{KindList, 9}, &Simple{KindStats, 10}, &Simple{KindShutdown, 1<<64 - 1},
		&Log{ID: 11, Wire: "w", From: 1 << 40, Max: 100, Wait: time.Second, Open: true},
		&Welcome{Protocol: 1, Version: "v1", PID: 4711, Started: moment, Refused: "no"},
		&Reply{ID: 12, Code: CodeNotFound, Error: "no such wire", Data: []byte("data")},
	}
}

func results() []Result {
	l := lineage()
	return []Result{
		&l, &Marked{4},
		&Wires{[]WireInfo{{ID: "w", Attached: moment, Paused: true, Counters: Counters{1, 2, 3, 4, 5, 6, 7, 8, 9}}}},
		&LogPage{Entries: []Entry{{
			Seq: 1, Time: moment, Ended: moment.Add(time.Second), Protocol: "tcp", Name: "evil.example.com", Address: here, Remote: there,
			Sent: 1, Received: 2, Rule: "evil.example.com", Kind: "name", Reason: "denied", Outcome: "refused", Repeated: 3,
		}}, Next: 2, Lost: 3, Open: []Entry{{Outcome: "open"}}},
		&Stats{Wires: 1, Queries: 6, Kinds: []KindCount{{"name", 1, 2, 3, 4}}, Dropped: []DropCount{{"spoofed", 5}}},
	}
}

func TestRoundTrip(t *testing.T) {
	for _, m := range messages() {
		got, err := Unmarshal(Marshal(m))
		if err != nil || !reflect.DeepEqual(got, m) {
			t.Errorf("%+v came back as %+v, %v", m, got, err)
		}
	}
	for _, r := range results() {
		got := reflect.New(reflect.TypeOf(r).Elem()).Interface().(Result)
		if err := UnmarshalResult(MarshalResult(r), got); err != nil || !reflect.DeepEqual(got, r) {
			t.Errorf("%+v came back as %+v, %v", r, got, err)
		}
	}
}

var update = flag.Bool("update", false, "write testdata/messages.hex")

// TestEncodingStays: messages for a netd of another version of the daemon are encoded
// as before.
func TestEncodingStays(t *testing.T) {
	var got []string
	for _, m := range messages() {
		got = append(got, hex.EncodeToString(Marshal(m)))
	}
	for _, r := range results() {
		got = append(got, hex.EncodeToString(MarshalResult(r)))
	}
	const file = "testdata/messages.hex"
	if *update {
		if err := os.WriteFile(file, []byte(strings.Join(got, "\n")+"\n"), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	b, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	want := strings.Fields(string(b))
	if len(got) != len(want) {
		t.Fatalf("%d messages, want %d", len(got), len(want))
	}
	for i := range want {
		if got[i] != want[i] {
			t.Errorf("message %d is encoded as\n%s, want\n%s", i, got[i], want[i])
		}
	}
}

func TestUnmarshalRefuses(t *testing.T) {
	for name, b := range map[string][]byte{
		"nothing":          nil,
		"unknown kind":     {200, 1},
		"no version":       {byte(KindList)},
		"an unknown field": append(Marshal(&Simple{KindList, 1}), 0),
		"short":            Marshal(&OfWire{KindMark, 1, "wire"})[:5],
		"long id":          Marshal(&OfWire{KindMark, 1, ID(strings.Repeat("x", maxID+1))}),
		"long policies":    Marshal(&SetPolicy{1, "w", Rules{Policies: strings.Repeat("x", maxPolicies+1)}}),
		"long wait":        Marshal(&Log{Wait: maxDuration + 1}),
		"many tuples":      Marshal(&Attach{1, Wire{Lineage: Lineage{Tuples: make([]Tuple, MaxTuples+1)}}}),
		"an unknown code":  Marshal(&Reply{ID: 1, Code: codes}),
		"5 bytes of IP":    {byte(KindConfigure), 1, 1, 1, 5, 1, 2, 3, 4, 5, 53},
		"a large port":     {byte(KindConfigure), 1, 1, 1, 4, 1, 2, 3, 4, 0x80, 0x80, 4},
		"a long prefix":    {byte(KindConfigure), 1, 1, 0, 0, 1, 4, 10, 0, 0, 0, 33},
	} {
		if m, err := Unmarshal(b); err == nil {
			t.Errorf("%s: decoded as %+v", name, m)
		}
	}
}

func FuzzUnmarshal(f *testing.F) {
	for _, m := range messages() {
		f.Add(Marshal(m))
	}
	f.Fuzz(func(t *testing.T, b []byte) {
		m, err := Unmarshal(b)
		if err != nil {
			return
		}
		again, err := Unmarshal(Marshal(m))
		if err != nil || !reflect.DeepEqual(m, again) {
			t.Fatalf("%+v came back as %+v, %v", m, again, err)
		}
	})
}

// FuzzResult: every answer of a netd is decoded, or refused.
func FuzzResult(f *testing.F) {
	for i, r := range results() {
		f.Add(uint8(i), MarshalResult(r))
	}
	f.Fuzz(func(t *testing.T, kind uint8, b []byte) {
		all := results()
		r := reflect.New(reflect.TypeOf(all[int(kind)%len(all)]).Elem()).Interface().(Result)
		if UnmarshalResult(b, r) != nil {
			return
		}
		again := reflect.New(reflect.TypeOf(r).Elem()).Interface().(Result)
		if err := UnmarshalResult(MarshalResult(r), again); err != nil || !reflect.DeepEqual(r, again) {
			t.Fatalf("%+v came back as %+v, %v", r, again, err)
		}
	})
}

func TestErrors(t *testing.T) {
	for _, is := range []error{ErrInvalid, ErrNotFound, ErrExists, ErrBusy} {
		err := Fail(1, errors.Join(errors.New("why"), is)).Err()
		if !errors.Is(err, is) || !strings.Contains(err.Error(), "why") {
			t.Errorf("%v came back as %v", is, err)
		}
	}
	if err := Fail(1, errors.New("why")).Err(); err == nil || err.Error() != "why" {
		t.Errorf("another error came back as %v", err)
	}
	if r := Fail(1, errors.New(strings.Repeat("x", MaxMessage))); len(Marshal(r)) > 2*maxText {
		t.Error("a long error is not clipped")
	}
	if err := (&Reply{}).Err(); err != nil {
		t.Error(err)
	}
}

func TestIDs(t *testing.T) {
	for _, bad := range []ID{"", ID(strings.Repeat("x", maxID+1)), "a b", "a\x00", "a\n", "ä"} {
		if bad.Check() == nil {
			t.Errorf("%q was accepted", bad)
		}
	}
	if err := ID("m-0123456789abcdef").Check(); err != nil {
		t.Error(err)
	}
}

// TestLargestFits: the largest contents that the limits allow fit into a message.
func TestLargestFits(t *testing.T) {
	name := strings.Repeat("x", maxName)
	l := Lineage{Tuples: make([]Tuple, MaxTuples), Pins: make([]Pin, MaxPins), Wildcards: make([]Wildcard, MaxWildcards)}
	for i := range l.Tuples {
		l.Tuples[i] = Tuple{there, there}
	}
	for i := range l.Pins {
		l.Pins[i] = Pin{name, there.Addr(), true}
	}
	for i := range l.Wildcards {
		l.Wildcards[i] = Wildcard{"tcp://*." + name + ":65535", moment, 1<<31 - 1, 1<<31 - 1}
	}
	w := Wire{ID: ID(strings.Repeat("x", maxID)), Lineage: l, Rules: Rules{Policies: strings.Repeat("x", maxPolicies)}}
	for range maxInjections { // the number of a sandbox's secrets, whatever their hosts
		word := strings.Repeat("x", maxFormat)
		w.Rules.Injections = append(w.Rules.Injections, inject.Host{
			Name: policy.Name(name), Certificate: make([]byte, 2<<10), Key: inject.Value(make([]byte, 256)), Problem: word,
			Credentials: []inject.Credential{{Secret: word, Header: word, Format: word, Placeholder: word, Value: inject.Value(strings.Repeat("x", inject.MaxValue)), Problem: word}},
		})
	}
	page := LogPage{Entries: make([]Entry, MaxEntries)}
	for i := range page.Entries {
		long := strings.Repeat("x", 1<<16)
		e := &page.Entries[i]
		*e = Entry{Time: moment, Ended: moment, Protocol: long, Name: long, Rule: long, Kind: long, Reason: long, Outcome: long, Address: there, Remote: there, Sent: 1 << 63, Received: 1 << 63}
		e.Clip()
	}
	page.Open = page.Entries
	wires := Wires{All: make([]WireInfo, MaxWires)}
	for i := range wires.All {
		n := uint64(1 << 63)
		wires.All[i] = WireInfo{w.ID, moment, true, Counters{n, n, n, n, n, n, n, n, n}}
	}
	for name, size := range map[string]int{
		"an Attach":     len(Marshal(&Attach{1 << 63, w})),
		"a Collect":     len(MarshalResult(&l)),
		"a Log":         len(MarshalResult(&page)),
		"a List":        len(MarshalResult(&wires)),
		"a Reply to it": len(Marshal(&Reply{ID: 1 << 63, Data: MarshalResult(&wires)})),
	} {
		t.Logf("%s: %d bytes", name, size)
		if size > MaxMessage-100 {
			t.Errorf("%s has %d bytes, more than a message of %d", name, size, MaxMessage)
		}
	}
}
