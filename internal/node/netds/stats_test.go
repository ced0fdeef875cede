package netds

import (
	"errors"
	"net/netip"
	"reflect"
	"testing"
	"time"

	"agentrun.dev/internal/network/netctl"
	"agentrun.dev/internal/network/networktest"
	"agentrun.dev/internal/node"
	"agentrun.dev/internal/sandbox"
	"golang.org/x/net/dns/dnsmessage"
	"golang.org/x/sys/unix"
)

// TestFromStats: the numbers of wires are added up, and kinds are kept apart.
func TestFromStats(t *testing.T) {
	got := fromStats(netctl.Stats{
		Wires: 2, Queries: 14,
		Kinds:   []netctl.KindCount{{Kind: "name", Connections: 1, Refusals: 2, Sent: 3, Received: 4}, {Kind: "closed", Refusals: 5}},
		Dropped: []netctl.DropCount{{Reason: "a", Count: 6}, {Reason: "b", Count: 7}},
	}, []netctl.WireInfo{{Counters: netctl.Counters{Connections: 8, Flows: 9}}, {Counters: netctl.Counters{Connections: 10}}})
	want := node.NetworkStats{
		Interfaces: 2, Open: 27, Dropped: 13, Queries: 14,
		Kinds: []node.NetworkKind{{Kind: "name", Opened: 1, Refused: 2, Sent: 3, Received: 4}, {Kind: "closed", Refused: 5}},
	}
	if !reflect.DeepEqual(got, want) {
		t.Errorf("%+v", got)
	}
}

// TestStats: a netd tells what its machines have done, by the kind of rule that decided.
func TestStats(t *testing.T) {
	h, to := newHosts(t), echo(t)
	n := New(h.cfg)
	defer func() { _ = n.Close() }()
	a, b := networktest.New(t), networktest.New(t)
	if err := errors.Join(n.Join(t.Context(), joint(t, "a", a, to)), n.Join(t.Context(), joint(t, "b", b))); err != nil {
		t.Fatal(err)
	}
	conn, err := a.Dial(t.Context(), "tcp", to)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = conn.Close() }()
	if err := talk(conn); err != nil {
		t.Fatal(err)
	}
	if err := speaks(t, b, to); !errors.Is(err, unix.ECONNREFUSED) {
		t.Fatalf("what is not allowed: %v", err)
	}
	askDNS(t, b)
	var got node.NetworkStats
	var use map[sandbox.ID]sandbox.NetworkUse
	// A netd of a busy host may not answer in time, and bytes are counted when they have
	// been passed on.
	for deadline := time.Now().Add(time.Minute); got.Interfaces == 0 || use["a"].Received == 0; {
		if time.Now().After(deadline) {
			t.Fatalf("%+v, %+v", got, use)
		}
		got, use = n.Stats(t.Context())["default"], n.Use(t.Context(), "default")
	}
	if got.Interfaces != 2 || got.Open != 1 || got.Queries != 1 {
		t.Errorf("%+v", got)
	}
	kinds := map[string]node.NetworkKind{}
	for _, k := range got.Kinds {
		kinds[k.Kind] = k
	}
	if kinds["address"].Opened != 1 || kinds["closed"].Refused != 1 {
		t.Errorf("%+v", kinds)
	}
	if u := use["a"]; u.Sent == 0 || u.Received == 0 || u.Connections != 1 || u.Refused != 0 {
		t.Errorf("a: %+v", u)
	}
	if u := use["b"]; u.Connections != 0 || u.Refused != 2 { // an address and a name
		t.Errorf("b: %+v", u)
	}
}

// askDNS has a guest ask its gateway for a name that it may not reach.
func askDNS(t *testing.T, g *networktest.Guest) {
	t.Helper()
	q := dnsmessage.Message{Questions: []dnsmessage.Question{{
		Name: dnsmessage.MustNewName("a.example."), Type: dnsmessage.TypeA, Class: dnsmessage.ClassINET,
	}}}
	raw, err := q.Pack()
	if err != nil {
		t.Fatal(err)
	}
	conn, err := g.Dial(t.Context(), "udp", netip.AddrPortFrom(node.Interface().Gateway, 53).String())
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = conn.Close() }()
	if err := conn.SetDeadline(time.Now().Add(time.Minute)); err != nil {
		t.Fatal(err)
	}
	if _, err := conn.Write(raw); err != nil {
		t.Fatal(err)
	}
	if _, err := conn.Read(make([]byte, 512)); err != nil {
		t.Fatal(err)
	}
}

// TestNoNetd: a namespace without a netd has nothing, and is not waited for.
func TestNoNetd(t *testing.T) {
	n := &Netds{namespaces: map[sandbox.Namespace]*namespace{}}
	n.of("quiet")
	if got := n.Stats(t.Context()); len(got) != 0 {
		t.Errorf("%+v", got)
	}
	for _, name := range []sandbox.Namespace{"quiet", "unknown"} {
		if got := n.Use(t.Context(), name); len(got) != 0 {
			t.Errorf("%s: %+v", name, got)
		}
	}
}
