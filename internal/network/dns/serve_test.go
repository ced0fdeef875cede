package dns

import (
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"golang.org/x/net/dns/dnsmessage"
)

// asker allows names below allowed.test, and public addresses of the documentation ranges.
type asker struct {
	wildcard string

	mu      sync.Mutex
	told    map[string][]netip.Addr // protected by mu, like refused
	refused []string
}

func (a *asker) MayResolve(name string) Verdict {
	return Verdict{Allowed: below(name, "allowed.test"), Wildcard: a.wildcard}
}

func (a *asker) MayAlias(_, alias string) bool { return !below(alias, "denied.test") }

func (a *asker) Resolved(name string, answer Answer) ([]netip.Addr, string) {
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.told == nil {
		a.told = make(map[string][]netip.Addr)
	}
	a.told[name] = answer.Addrs
	return slices.DeleteFunc(slices.Clone(answer.Addrs), func(addr netip.Addr) bool { return addr.IsPrivate() }), "private"
}

func (a *asker) Refused(name string, reason Reason, _ string) {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.refused = append(a.refused, name+": "+string(reason))
}

func (a *asker) lastRefusal() string {
	a.mu.Lock()
	defer a.mu.Unlock()
	if len(a.refused) == 0 {
		return ""
	}
	return a.refused[len(a.refused)-1]
}

func ask(name string, typ dnsmessage.Type) dnsmessage.Message {
	return dnsmessage.Message{
		Header:    dnsmessage.Header{ID: 4711, RecursionDesired: true},
		Questions: []dnsmessage.Question{{Name: dnsmessage.MustNewName(name), Type: typ, Class: dnsmessage.ClassINET}},
	}
}

func withEDNS(m dnsmessage.Message, size int) dnsmessage.Message {
	var h dnsmessage.ResourceHeader
	if err := h.SetEDNS0(size, 0, false); err != nil {
		panic(err)
	}
	m.Additionals = append(m.Additionals, dnsmessage.Resource{Header: h, Body: &dnsmessage.OPTResource{}})
	return m
}

func unpack(t *testing.T, raw []byte) dnsmessage.Message {
	t.Helper()
	var m dnsmessage.Message
	if err := m.Unpack(raw); err != nil {
		t.Fatalf("answer %x: %v", raw, err)
	}
	return m
}

func TestServe(t *testing.T) {
	zone := records{
		"allowed.test. A":        {addrRecord("allowed.test.", "203.0.113.1", 60), addrRecord("bank.test.", "198.51.100.66", 60)},
		"allowed.test. AAAA":     {addrRecord("allowed.test.", "2001:db8::1", 60)},
		"alias.allowed.test. A":  {cname("alias.allowed.test.", "cdn.test.", 60), addrRecord("cdn.test.", "203.0.113.2", 60)},
		"denied.allowed.test. A": {cname("denied.allowed.test.", "www.denied.test.", 60), addrRecord("www.denied.test.", "203.0.113.2", 60)},
		"rebind.allowed.test. A": {addrRecord("rebind.allowed.test.", "10.0.0.1", 60)},
		"mixed.allowed.test. A":  {addrRecord("mixed.allowed.test.", "10.0.0.1", 60), addrRecord("mixed.allowed.test.", "203.0.113.3", 60)},
		"empty.allowed.test. A":  {soa("test.", 60)},
		"loop.allowed.test. A":   {cname("loop.allowed.test.", "loop.allowed.test.", 60)},
	}
	up := startServer(t, zone.serve)
	r := newResolver(t, Config{Upstreams: Upstreams{Default: []netip.AddrPort{up.addr}}})
	who := &asker{}
	c := r.NewClient(who, DefaultLimits())

	header := func(change func(*dnsmessage.Message)) dnsmessage.Message {
		m := ask("allowed.test.", dnsmessage.TypeA)
		change(&m)
		return m
	}
	const typeHTTPS, typeSVCB, typeANY, typeNULL, typeCAA = dnsmessage.Type(65), dnsmessage.Type(64), dnsmessage.TypeALL, dnsmessage.Type(10), dnsmessage.Type(257)
	for _, test := range []struct {
		title   string
		query   dnsmessage.Message
		code    dnsmessage.RCode
		answers string
		refused string
		asks    bool // whether an upstream learns of the question
	}{
		{title: "A", query: ask("allowed.test.", dnsmessage.TypeA), answers: "allowed.test. 203.0.113.1", asks: true},
		{title: "A again", query: ask("allowed.test.", dnsmessage.TypeA), answers: "allowed.test. 203.0.113.1"},
		{title: "another case", query: ask("aLLowed.Test.", dnsmessage.TypeA), answers: "aLLowed.Test. 203.0.113.1"},
		{title: "AAAA", query: ask("allowed.test.", dnsmessage.TypeAAAA), answers: "allowed.test. 2001:db8::1", asks: true},
		{title: "alias", query: ask("alias.allowed.test.", dnsmessage.TypeA), answers: "alias.allowed.test. cdn.test., cdn.test. 203.0.113.2", asks: true},
		{title: "denied alias", query: ask("denied.allowed.test.", dnsmessage.TypeA), code: dnsmessage.RCodeRefused, refused: "denied.allowed.test: alias not allowed", asks: true},
		{title: "rebinding", query: ask("rebind.allowed.test.", dnsmessage.TypeA), code: dnsmessage.RCodeRefused, refused: "rebind.allowed.test: only closed addresses", asks: true},
		{title: "one closed address", query: ask("mixed.allowed.test.", dnsmessage.TypeA), answers: "mixed.allowed.test. 203.0.113.3", asks: true},
		{title: "no data", query: ask("empty.allowed.test.", dnsmessage.TypeA), asks: true},
		{title: "no name", query: ask("none.allowed.test.", dnsmessage.TypeA), code: dnsmessage.RCodeNameError, asks: true},
		{title: "loop", query: ask("loop.allowed.test.", dnsmessage.TypeA), code: dnsmessage.RCodeServerFailure, refused: "loop.allowed.test: alias not allowed", asks: true},
		{title: "other name", query: ask("bank.test.", dnsmessage.TypeA), code: dnsmessage.RCodeRefused, refused: "bank.test: name not allowed"},
		{title: "other name, TXT", query: ask("data.bank.test.", dnsmessage.TypeTXT), code: dnsmessage.RCodeRefused, refused: "data.bank.test: name not allowed"},
		{title: "TXT", query: ask("allowed.test.", dnsmessage.TypeTXT)},
		{title: "HTTPS", query: ask("allowed.test.", typeHTTPS)},
		{title: "SVCB", query: ask("allowed.test.", typeSVCB)},
		{title: "MX", query: ask("allowed.test.", dnsmessage.TypeMX)},
		{title: "SRV", query: ask("allowed.test.", dnsmessage.TypeSRV)},
		{title: "CNAME", query: ask("alias.allowed.test.", dnsmessage.TypeCNAME)},
		{title: "NULL", query: ask("allowed.test.", typeNULL)},
		{title: "CAA", query: ask("allowed.test.", typeCAA)},
		{title: "PTR", query: ask("1.113.0.203.in-addr.arpa.", dnsmessage.TypePTR), code: dnsmessage.RCodeRefused, refused: "1.113.0.203.in-addr.arpa: name not allowed"},
		{title: "ANY", query: ask("allowed.test.", typeANY), code: dnsmessage.RCodeRefused, refused: "allowed.test: record type not served"},
		{title: "AXFR", query: ask("allowed.test.", typeAXFR), code: dnsmessage.RCodeRefused, refused: "allowed.test: record type not served"},
		{title: "IXFR", query: ask("allowed.test.", typeIXFR), code: dnsmessage.RCodeRefused, refused: "allowed.test: record type not served"},
		{title: "CHAOS", query: header(func(m *dnsmessage.Message) { m.Questions[0].Class = dnsmessage.ClassCHAOS }), code: dnsmessage.RCodeRefused, refused: "allowed.test: class not served"},
		{title: "root", query: ask(".", dnsmessage.TypeNS), code: dnsmessage.RCodeRefused, refused: `".": not a valid host name`},
		{title: "NUL", query: ask("a\x00.allowed.test.", dnsmessage.TypeA), code: dnsmessage.RCodeRefused, refused: `"a\x00.allowed.test.": not a valid host name`},
		{title: "address", query: ask("127.0.0.1.", dnsmessage.TypeA), code: dnsmessage.RCodeRefused, refused: `"127.0.0.1.": not a valid host name`},
		{title: "update", query: header(func(m *dnsmessage.Message) { m.OpCode = 5 }), code: dnsmessage.RCodeNotImplemented},
		{title: "no question", query: header(func(m *dnsmessage.Message) { m.Questions = nil }), code: dnsmessage.RCodeFormatError},
		{title: "two questions", query: header(func(m *dnsmessage.Message) { m.Questions = append(m.Questions, m.Questions[0]) }), code: dnsmessage.RCodeFormatError},
		{title: "answers", query: header(func(m *dnsmessage.Message) { m.Answers = []dnsmessage.Resource{addrRecord("x.", "203.0.113.1", 1)} }), code: dnsmessage.RCodeFormatError},
		{title: "authorities", query: header(func(m *dnsmessage.Message) { m.Authorities = []dnsmessage.Resource{soa("x.", 1)} }), code: dnsmessage.RCodeFormatError},
		{title: "two OPTs", query: withEDNS(withEDNS(ask("allowed.test.", dnsmessage.TypeA), 1232), 1232), code: dnsmessage.RCodeFormatError},
		{title: "EDNS version", query: header(func(m *dnsmessage.Message) {
			*m = withEDNS(*m, 1232)
			m.Additionals[0].Header.TTL = 1 << 16
		}), code: rcodeBadVers & 0xf},
		{title: "too long", query: header(func(m *dnsmessage.Message) {
			*m = withEDNS(*m, 1232)
			m.Additionals[0].Body = &dnsmessage.OPTResource{Options: []dnsmessage.Option{{Code: 12, Data: make([]byte, maxQuery)}}}
		}), code: dnsmessage.RCodeFormatError},
	} {
		t.Run(test.title, func(t *testing.T) {
			before, refusals := up.datagrams.Load(), len(who.refused)
			got := unpack(t, c.Serve(t.Context(), pack(test.query), false))
			if got.RCode != test.code || !got.Response || !got.RecursionAvailable || got.ID != 4711 {
				t.Errorf("header %+v, want code %v", got.Header, test.code)
			}
			if answers := show(got.Answers); answers != test.answers {
				t.Errorf("answers %q, want %q", answers, test.answers)
			}
			if (up.datagrams.Load() > before) != test.asks {
				t.Errorf("upstream asked: %v, want %v", !test.asks, test.asks)
			}
			refused := ""
			if len(who.refused) > refusals {
				refused = who.lastRefusal()
			}
			if refused != test.refused {
				t.Errorf("refused %q, want %q", refused, test.refused)
			}
		})
	}
	if _, told := who.told["bank.test"]; told {
		t.Error("a name that an upstream smuggled was told to the asker")
	}
	for _, raw := range [][]byte{nil, {1}, make([]byte, 11), pack(dnsmessage.Message{Header: dnsmessage.Header{Response: true}})} {
		if got := c.Serve(t.Context(), raw, false); got != nil {
			t.Errorf("message %x was answered", raw)
		}
	}
}

func show(answers []dnsmessage.Resource) string {
	var parts []string
	for _, r := range answers {
		value := ""
		switch body := r.Body.(type) {
		case *dnsmessage.AResource:
			value = netip.AddrFrom4(body.A).String()
		case *dnsmessage.AAAAResource:
			value = netip.AddrFrom16(body.AAAA).String()
		case *dnsmessage.CNAMEResource:
			value = body.CNAME.String()
		}
		parts = append(parts, r.Header.Name.String()+" "+value)
	}
	return strings.Join(parts, ", ")
}

// TestSizes asks for an answer of 60 addresses over datagrams of several sizes, and over TCP.
func TestSizes(t *testing.T) {
	var list []dnsmessage.Resource
	for i := range 60 {
		list = append(list, addrRecord("allowed.test.", fmt.Sprintf("2001:db8::%x", i+1), 60))
	}
	up := startServer(t, records{"allowed.test. AAAA": list}.serve)
	r := newResolver(t, Config{Upstreams: Upstreams{Default: []netip.AddrPort{up.addr}}})
	c := r.NewClient(&asker{}, DefaultLimits())
	plain := ask("allowed.test.", dnsmessage.TypeAAAA)
	for _, test := range []struct {
		query dnsmessage.Message
		tcp   bool
		whole bool
	}{
		{query: plain},
		{query: withEDNS(plain, 100)},
		{query: withEDNS(plain, 65535)}, // the resolver does not exceed the size that passes unfragmented
		{query: plain, tcp: true, whole: true},
		{query: withEDNS(plain, 512), tcp: true, whole: true},
	} {
		raw := c.Serve(t.Context(), pack(test.query), test.tcp)
		m := unpack(t, raw)
		if m.Truncated == test.whole || (len(m.Answers) == 60) != test.whole || (!test.tcp && len(raw) > 512) {
			t.Errorf("%d additionals, tcp %v: %d answers in %d bytes, truncated %v", len(test.query.Additionals), test.tcp, len(m.Answers), len(raw), m.Truncated)
		}
	}
}

// TestExtendedError shows that dig says why a name was refused.
func TestExtendedError(t *testing.T) {
	c := newResolver(t, Config{}).NewClient(&asker{}, DefaultLimits())
	m := unpack(t, c.Serve(t.Context(), pack(withEDNS(ask("bank.test.", dnsmessage.TypeA), 1232)), false))
	opt := m.Additionals[0].Body.(*dnsmessage.OPTResource)
	if len(opt.Options) != 1 || opt.Options[0].Code != 15 || string(opt.Options[0].Data) != "\x00\x0f"+string(ReasonPolicy) {
		t.Errorf("options %+v", opt.Options)
	}
}

// TestRate empties a sandbox's bucket, checks that another sandbox has its own, and
// waits for a token.
func TestRate(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		up := &played{answer: records{"allowed.test. A": {addrRecord("allowed.test.", "203.0.113.1", 3600)}}.reply}
		r := newResolver(t, Config{Dial: up.dial, Upstreams: Upstreams{Default: []netip.AddrPort{netip.MustParseAddrPort("192.0.2.53:53")}}})
		limits := DefaultLimits()
		limits.Rate, limits.Burst = 10, 20
		who := &asker{}
		c, other := r.NewClient(who, limits), r.NewClient(&asker{}, limits)
		code := func(c *Client) dnsmessage.RCode {
			return unpack(t, c.Serve(t.Context(), pack(ask("allowed.test.", dnsmessage.TypeA)), false)).RCode
		}
		for i := range 20 {
			if got := code(c); got != dnsmessage.RCodeSuccess {
				t.Fatalf("query %d: %v", i, got)
			}
		}
		if got := code(c); got != dnsmessage.RCodeRefused || who.lastRefusal() != "allowed.test: "+string(ReasonRate) {
			t.Errorf("query over the limit: %v, refused %q", got, who.lastRefusal())
		}
		if got := code(other); got != dnsmessage.RCodeSuccess {
			t.Errorf("another sandbox: %v", got)
		}
		time.Sleep(100 * time.Millisecond)
		if first, second := code(c), code(c); first != dnsmessage.RCodeSuccess || second != dnsmessage.RCodeRefused {
			t.Errorf("after the time of one query: %v, then %v", first, second)
		}
	})
}

// TestWildcardBound sends data in names below a wildcard until the limit stops it.
func TestWildcardBound(t *testing.T) {
	for _, test := range []struct {
		title  string
		names  func(i int) string
		passes int
	}{
		{"many names", func(i int) string { return fmt.Sprintf("n%d.allowed.test.", i) }, 128},
		{"long names", func(i int) string {
			return strings.Repeat(fmt.Sprintf("%060d.", i), 3) + fmt.Sprintf("%03d.allowed.test.", i)
		}, 8 << 10 / (3*61 + 16)},
		{"one name", func(int) string { return "same.allowed.test." }, 300},
	} {
		t.Run(test.title, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				up := &played{answer: records{}.reply}
				r := newResolver(t, Config{Dial: up.dial, Upstreams: Upstreams{Default: []netip.AddrPort{netip.MustParseAddrPort("192.0.2.53:53")}}})
				who := &asker{wildcard: "*.allowed.test"}
				c := r.NewClient(who, DefaultLimits())
				passed := func() (n int) {
					for i := range 300 {
						m := unpack(t, c.Serve(t.Context(), pack(ask(test.names(i), dnsmessage.TypeA)), false))
						if m.RCode == dnsmessage.RCodeNameError {
							n++
						}
					}
					return n
				}
				if n := passed(); n != test.passes {
					t.Errorf("%d names passed, want %d", n, test.passes)
				}
				if test.passes < 300 && !strings.HasSuffix(who.lastRefusal(), string(ReasonWildcard)) {
					t.Errorf("refused %q", who.lastRefusal())
				}
				if n := up.questions(); test.passes < 300 && n != test.passes {
					t.Errorf("the upstream heard of %d names, want %d", n, test.passes)
				}
				time.Sleep(DefaultLimits().WildcardWindow)
				if n := passed(); n != test.passes {
					t.Errorf("%d names passed in the next window, want %d", n, test.passes)
				}
			})
		})
	}
}

// TestPending fills a sandbox's share with questions that are never answered.
func TestPending(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		hold := make(chan struct{})
		up := &played{answer: func(q dnsmessage.Message) dnsmessage.Message {
			<-hold
			return records{}.reply(q)
		}}
		r := newResolver(t, Config{Dial: up.dial, Upstreams: Upstreams{Default: []netip.AddrPort{netip.MustParseAddrPort("192.0.2.53:53")}}})
		limits := DefaultLimits()
		limits.Pending = 3
		who := &asker{}
		c := r.NewClient(who, limits)
		serve := func(name string) dnsmessage.RCode {
			return unpack(t, c.Serve(t.Context(), pack(ask(name, dnsmessage.TypeA)), false)).RCode
		}
		var wg sync.WaitGroup
		for i := range 3 {
			wg.Go(func() { serve(fmt.Sprintf("n%d.allowed.test.", i)) })
		}
		synctest.Wait()
		if code := serve("more.allowed.test."); code != dnsmessage.RCodeRefused || who.lastRefusal() != "more.allowed.test: "+string(ReasonPending) {
			t.Errorf("one more question: %v, refused %q", code, who.lastRefusal())
		}
		if _, err := c.Lookup(t.Context(), "more.allowed.test", IPv4); !errors.Is(err, ErrLimit) {
			t.Errorf("one more lookup: %v", err)
		}
		close(hold)
		wg.Wait()
		if code := serve("more.allowed.test."); code != dnsmessage.RCodeNameError {
			t.Errorf("after the others: %v", code)
		}
	})
}
