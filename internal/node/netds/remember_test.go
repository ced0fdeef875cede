package netds

import (
	"errors"
	"io"
	"net"
	"net/netip"
	"testing"
	"time"

	"agentrun.dev/internal/network/netctl"
	"agentrun.dev/internal/network/networktest"
	"golang.org/x/net/dns/dnsmessage"
	"golang.org/x/sys/unix"
)

// TestNamesOutliveANetd: after its netd was killed, a program connects to the address that it got
// for an allowed name before, and one that only reads learns that its connection is gone.
func TestNamesOutliveANetd(t *testing.T) {
	public := netip.MustParseAddr("93.184.216.34")
	h := newHosts(t)
	w := networktest.NewWorld(t, public)
	dns := w.ListenPacket(t, netip.AddrPortFrom(public, 53).String())
	go func() {
		b := make([]byte, 4096)
		for {
			n, from, err := dns.ReadFrom(b)
			if err != nil {
				return
			}
			var m dnsmessage.Message
			if m.Unpack(b[:n]) != nil {
				continue
			}
			q := m.Questions[0]
			m.Response, m.RecursionAvailable, m.Additionals = true, true, nil
			if q.Type == dnsmessage.TypeA {
				m.Answers = []dnsmessage.Resource{{
					Header: dnsmessage.ResourceHeader{Name: q.Name, Type: q.Type, Class: q.Class, TTL: 60},
					Body:   &dnsmessage.AResource{A: public.As4()},
				}}
			}
			if out, err := m.Pack(); err == nil {
				_, _ = dns.WriteTo(out, from)
			}
		}
	}()
	l := w.Listen(t, netip.AddrPortFrom(public, 22).String())
	go func() {
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			_, _ = c.Write([]byte("hello"))
			t.Cleanup(func() { _ = c.Close() })
		}
	}()
	g := networktest.New(t) // it ends after the netds, which may ask for its wire
	n, _ := withSettings(t, h.cfg, `upstreams: ["93.184.216.34"]`)
	if err := n.Join(t.Context(), joint(t, "a", g, "a.example:22")); err != nil {
		t.Fatal(err)
	}
	askDNS(t, g) // a.example
	connect := func() (net.Conn, error) {
		c, err := g.Dial(t.Context(), "tcp", l.Addr().String())
		if err != nil {
			return nil, err
		}
		t.Cleanup(func() { _ = c.Close() })
		_ = c.SetDeadline(time.Now().Add(time.Minute))
		_, err = io.ReadFull(c, make([]byte, 5))
		return c, err
	}
	reader, err := connect()
	if err != nil {
		t.Fatal(err)
	}
	first, _ := h.process(t, "default")
	client := n.of("default").connected()
	n.of("default").remember(t.Context(), client, map[netctl.ID]uint64{})
	if err := unix.Kill(first.PID, unix.SIGKILL); err != nil {
		t.Fatal(err)
	}
	<-client.Done()
	if _, err := n.of("default").await(t.Context()); err != nil {
		t.Fatal(err)
	}
	if _, err := connect(); err != nil {
		t.Errorf("after its netd was killed: %v", err)
	}
	if _, err := reader.Read(make([]byte, 1)); !errors.Is(err, unix.ECONNRESET) {
		t.Errorf("a reader whose netd was killed: %v", err)
	}
}

// TestRememberGivesUp: a netd that does not answer is not asked about each wire, because the wait
// for its answers would delay the namespace. A netd that answers with an error about one wire is
// still asked about the others.
func TestRememberGivesUp(t *testing.T) {
	n, _ := withSettings(t, Config{Dir: t.TempDir(), Log: silent()}, "")
	for name, test := range map[string]struct {
		reply func(netctl.Request) *netctl.Reply
		asked int
	}{
		"silent": {func(netctl.Request) *netctl.Reply { return nil }, 1},
		"unable": {func(r netctl.Request) *netctl.Reply { return netctl.Fail(r.RequestID(), errors.New("no luck")) }, 3},
	} {
		l := newListener(t, n, joint(t, "a", nil), func(r netctl.Request) *netctl.Reply {
			if of, ok := r.(*netctl.Simple); ok && of.Kind == netctl.KindList {
				return &netctl.Reply{ID: r.RequestID(), Data: netctl.MarshalResult(&netctl.Wires{All: []netctl.WireInfo{{ID: "a"}, {ID: "b"}, {ID: "c"}}})}
			}
			return test.reply(r)
		})
		ns := n.of("default")
		ns.remember(t.Context(), ns.connected(), map[netctl.ID]uint64{})
		for range 1 + test.asked {
			<-l.told
		}
		if len(l.told) != 0 {
			t.Errorf("%s: it is asked for more", name)
		}
	}
}
