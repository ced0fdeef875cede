package dns

import (
	"bytes"
	"net/netip"
	"slices"
	"testing"
	"time"

	"golang.org/x/net/dns/dnsmessage"
)

// FuzzServe passes a sandbox's message to the resolver. An answer, if there is one,
// is a well-formed response to the message and fits its size.
func FuzzServe(f *testing.F) {
	zone := records{"allowed.test. A": {addrRecord("allowed.test.", "203.0.113.1", 60)}}
	up := &played{answer: zone.reply}
	r := newResolver(f, Config{Dial: up.dial, Upstreams: Upstreams{Default: []netip.AddrPort{netip.MustParseAddrPort("192.0.2.53:53")}}})
	f.Add(pack(ask("allowed.test.", dnsmessage.TypeA)), false)
	f.Add(pack(withEDNS(ask("allowed.test.", dnsmessage.TypeALL), 4096)), true)
	f.Add(pack(ask("bank.test.", dnsmessage.TypeTXT)), false)
	f.Add([]byte("\x00\x01\x01\x00\x00\x01\x00\x00\x00\x00\x00\x00\xc0\x0c\x00\x01\x00\x01"), false)
	f.Fuzz(func(t *testing.T, raw []byte, tcp bool) {
		c := r.NewClient(&asker{}, DefaultLimits())
		got := c.Serve(t.Context(), raw, tcp)
		if got == nil {
			return
		}
		if !tcp && len(got) > udpSize {
			t.Errorf("%d bytes over UDP", len(got))
		}
		var m dnsmessage.Message
		if err := m.Unpack(got); err != nil {
			t.Fatalf("answer %x: %v", got, err)
		}
		if !m.Response || !bytes.Equal(got[:2], raw[:2]) {
			t.Errorf("header %+v", m.Header)
		}
		for _, q := range m.Questions {
			name, err := canonical(q.Name)
			if len(m.Answers) > 0 && (err != nil || !below(name, "allowed.test")) {
				t.Errorf("answers for %v", q.Name)
			}
		}
	})
}

// FuzzMessage passes an upstream's message to the parser. The accepted part is
// bounded, and concerns only the name asked for.
func FuzzMessage(f *testing.F) {
	a := asked{id: 7, name: dnsmessage.MustNewName("a.test."), typ: dnsmessage.TypeA}
	q := ask("a.test.", dnsmessage.TypeA)
	q.ID = 7
	for _, list := range [][]dnsmessage.Resource{
		{addrRecord("a.test.", "203.0.113.1", 60)},
		{cname("a.test.", "b.test.", 60), addrRecord("b.test.", "203.0.113.1", 60)},
		{cname("a.test.", "b.test.", 60), cname("b.test.", "a.test.", 60)},
		{addrRecord("bank.test.", "203.0.113.1", 60)},
		{soa("test.", 60)},
	} {
		f.Add(pack(records{"a.test. A": list}.reply(q)))
	}
	f.Fuzz(func(t *testing.T, raw []byte) {
		m, err := parseMessage(raw, a)
		if err != nil {
			return
		}
		now := time.Now()
		r, err := m.reply("a.test", func(name string) bool { return below(name, "test") }, now)
		if err != nil {
			return
		}
		if len(r.addrs) > maxAddresses || len(r.aliases) > maxAliases || r.expires.After(now.Add(maxTTL)) {
			t.Errorf("%d addresses, %d aliases, kept for %v", len(r.addrs), len(r.aliases), r.expires.Sub(now))
		}
		owner := "a.test"
		for _, target := range r.aliases {
			if _, err := CanonicalName(target); err != nil || m.aliases[owner].target != target {
				t.Errorf("alias %q of %q: %v", target, owner, err)
			}
			owner = target
		}
		for _, addr := range r.addrs {
			if !addr.Is4() || !slices.ContainsFunc(m.addrs[owner], func(a address) bool { return a.addr == addr }) {
				t.Errorf("address %v is not %q's", addr, owner)
			}
		}
	})
}
