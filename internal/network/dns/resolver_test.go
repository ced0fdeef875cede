package dns

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"golang.org/x/net/dns/dnsmessage"
)

func addrs(texts ...string) []netip.Addr {
	var list []netip.Addr
	for _, text := range texts {
		list = append(list, netip.MustParseAddr(text))
	}
	return list
}

func TestLookup(t *testing.T) {
	public := records{
		"plain.test. A":      {addrRecord("plain.test.", "203.0.113.1", 60), addrRecord("plain.test.", "203.0.113.2", 60)},
		"plain.test. AAAA":   {addrRecord("plain.test.", "2001:db8::1", 60)},
		"nodata.test. AAAA":  {soa("test.", 60)},
		"alias.test. A":      {cname("alias.test.", "cdn.other.", 60), addrRecord("cdn.other.", "203.0.113.3", 60)},
		"lazy.test. A":       {cname("lazy.test.", "plain.test.", 60)},
		"gone.test. A":       {cname("gone.test.", "none.test.", 60), soa("test.", 60)},
		"loop.test. A":       {cname("loop.test.", "pool.test.", 60), cname("pool.test.", "loop.test.", 60)},
		"slowloop.test. A":   {cname("slowloop.test.", "slowpool.test.", 60)},
		"slowpool.test. A":   {cname("slowpool.test.", "slowloop.test.", 60)},
		"smuggled.test. A":   {addrRecord("smuggled.test.", "203.0.113.4", 60), addrRecord("bank.test.", "198.51.100.66", 60), cname("bank.test.", "smuggled.test.", 60)},
		"onlyothers.test. A": {addrRecord("bank.test.", "198.51.100.66", 60)},
		"bank.test. A":       {addrRecord("bank.test.", "203.0.113.5", 60)},
		"into.test. A":       {cname("into.test.", "db.corp.", 60), addrRecord("db.corp.", "198.51.100.66", 60)},
		"mapped.test. AAAA":  {addrRecord("mapped.test.", "::ffff:127.0.0.1", 60), addrRecord("mapped.test.", "2001:db8::2", 60)},
		"twice.test. A":      {addrRecord("twice.test.", "203.0.113.6", 60), addrRecord("twice.test.", "203.0.113.6", 60)},
		"db.corp. A":         {addrRecord("db.corp.", "198.51.100.66", 60)},
	}
	for i := range 20 {
		public[fmt.Sprintf("chain%d.test. A", i)] = []dnsmessage.Resource{cname(fmt.Sprintf("chain%d.test.", i), fmt.Sprintf("chain%d.test.", i+1), 60)}
	}
	for i := range 200 {
		public["huge.test. A"] = append(public["huge.test. A"], addrRecord("huge.test.", fmt.Sprintf("203.0.113.%d", i), 60))
	}
	internal := records{
		"db.corp. A":     {addrRecord("db.corp.", "10.1.2.3", 60)},
		"alias.corp. A":  {cname("alias.corp.", "db.corp.", 60), addrRecord("db.corp.", "10.1.2.3", 60)},
		"leaves.corp. A": {cname("leaves.corp.", "plain.test.", 60), addrRecord("plain.test.", "10.6.6.6", 60)},
		"side.corp. A":   {cname("side.corp.", "x.deep.corp.", 60), addrRecord("x.deep.corp.", "10.6.6.6", 60)},
	}
	deep := records{"x.deep.corp. A": {addrRecord("x.deep.corp.", "10.7.7.7", 60)}}
	up := startServer(t, func(q dnsmessage.Message, tcp bool) [][]byte {
		m := public.reply(q)
		if !tcp && len(pack(m)) > udpSize {
			m.Answers, m.Truncated = nil, true
		}
		return [][]byte{pack(m)}
	})
	corp, deepCorp := startServer(t, internal.serve), startServer(t, deep.serve)
	for _, mix := range []bool{false, true} {
		r := newResolver(t, Config{MixCase: mix, Upstreams: Upstreams{
			Default: []netip.AddrPort{up.addr},
			Internal: map[string][]netip.AddrPort{
				"corp": {corp.addr}, "Deep.Corp.": {deepCorp.addr},
			},
		}})
		for _, test := range []struct {
			name   string
			family Family
			want   Answer
			err    error
		}{
			{name: "plain.test", want: Answer{Addrs: addrs("203.0.113.1", "203.0.113.2")}},
			{name: "plain.test", family: IPv6, want: Answer{Addrs: addrs("2001:db8::1")}},
			{name: "nodata.test", family: IPv6},
			{name: "missing.test", want: Answer{NotFound: true}},
			{name: "alias.test", want: Answer{Aliases: []string{"cdn.other"}, Addrs: addrs("203.0.113.3")}},
			{name: "lazy.test", want: Answer{Aliases: []string{"plain.test"}, Addrs: addrs("203.0.113.1", "203.0.113.2")}},
			{name: "gone.test", want: Answer{Aliases: []string{"none.test"}}},
			{name: "loop.test", err: ErrAlias},
			{name: "slowloop.test", err: ErrAlias},
			{name: "chain0.test", err: ErrAlias},
			{name: "chain19.test", want: Answer{Aliases: []string{"chain20.test"}, NotFound: true}},
			{name: "smuggled.test", want: Answer{Addrs: addrs("203.0.113.4")}},
			{name: "onlyothers.test"},
			{name: "bank.test", want: Answer{Addrs: addrs("203.0.113.5")}}, // not the record that came with smuggled.test
			{name: "mapped.test", family: IPv6, want: Answer{Addrs: addrs("2001:db8::2")}},
			{name: "twice.test", want: Answer{Addrs: addrs("203.0.113.6")}},
			{name: "into.test", err: ErrAlias},
			{name: "db.corp", want: Answer{Addrs: addrs("10.1.2.3"), Internal: true}},
			{name: "alias.corp", want: Answer{Aliases: []string{"db.corp"}, Addrs: addrs("10.1.2.3"), Internal: true}},
			{name: "leaves.corp", want: Answer{Aliases: []string{"plain.test"}, Addrs: addrs("203.0.113.1", "203.0.113.2")}},
			{name: "side.corp", want: Answer{Aliases: []string{"x.deep.corp"}, Addrs: addrs("10.7.7.7"), Internal: true}},
			{name: "notcorp", want: Answer{NotFound: true}},
		} {
			t.Run(fmt.Sprintf("%s mix=%v v6=%v", test.name, mix, test.family), func(t *testing.T) {
				got, err := r.Lookup(t.Context(), test.name, test.family)
				if !errors.Is(err, test.err) {
					t.Fatalf("error %v, want %v", err, test.err)
				}
				got.Expires = time.Time{}
				if fmt.Sprint(got) != fmt.Sprint(test.want) {
					t.Errorf("got %v, want %v", got, test.want)
				}
			})
		}
		streams := up.streams.Load()
		huge, err := r.Lookup(t.Context(), "huge.test", IPv4)
		if err != nil || len(huge.Addrs) != maxAddresses || up.streams.Load() != streams+1 {
			t.Errorf("200 addresses: got %d, error %v, %d streams", len(huge.Addrs), err, up.streams.Load()-streams)
		}
	}
}

// TestForgedDatagrams sends wrong answers before the right one, and then only wrong ones.
func TestForgedDatagrams(t *testing.T) {
	right := records{"bank.test. A": {addrRecord("bank.test.", "203.0.113.1", 60)}}
	forge := func(change func(*dnsmessage.Message)) func(dnsmessage.Message) []byte {
		return func(q dnsmessage.Message) []byte {
			m := right.reply(q)
			m.Answers = []dnsmessage.Resource{addrRecord("bank.test.", "198.51.100.66", 60)}
			m.Questions = slices.Clone(m.Questions)
			change(&m)
			return pack(m)
		}
	}
	forgeries := map[string]func(dnsmessage.Message) []byte{
		"id":           forge(func(m *dnsmessage.Message) { m.ID++ }),
		"name":         forge(func(m *dnsmessage.Message) { m.Questions[0].Name = dnsmessage.MustNewName("other.test.") }),
		"case":         forge(func(m *dnsmessage.Message) { m.Questions[0].Name.Data[0] ^= 'a' ^ 'A' }), // one letter has the other case
		"type":         forge(func(m *dnsmessage.Message) { m.Questions[0].Type = dnsmessage.TypeAAAA }),
		"class":        forge(func(m *dnsmessage.Message) { m.Questions[0].Class = dnsmessage.ClassCHAOS }),
		"no question":  forge(func(m *dnsmessage.Message) { m.Questions = nil }),
		"two":          forge(func(m *dnsmessage.Message) { m.Questions = append(m.Questions, m.Questions[0]) }),
		"no response":  forge(func(m *dnsmessage.Message) { m.Response = false }),
		"other opcode": forge(func(m *dnsmessage.Message) { m.OpCode = 5 }),
		"short":        func(dnsmessage.Message) []byte { return []byte{1, 2, 3} },
		"empty":        func(dnsmessage.Message) []byte { return nil },
	}
	for name, forged := range forgeries {
		t.Run(name, func(t *testing.T) {
			up := startServer(t, func(q dnsmessage.Message, _ bool) [][]byte { return [][]byte{forged(q), pack(right.reply(q))} })
			r := newResolver(t, Config{MixCase: true, Upstreams: Upstreams{Default: []netip.AddrPort{up.addr}}})
			got, err := r.Lookup(t.Context(), "bank.test", IPv4)
			if err != nil || !slices.Equal(got.Addrs, addrs("203.0.113.1")) {
				t.Errorf("got %v, %v", got.Addrs, err)
			}
		})
	}
	t.Run("many", func(t *testing.T) {
		up := startServer(t, func(q dnsmessage.Message, tcp bool) [][]byte {
			if tcp {
				return [][]byte{pack(right.reply(q))}
			}
			return slices.Repeat([][]byte{forgeries["id"](q)}, maxForeign)
		})
		r := newResolver(t, Config{Upstreams: Upstreams{Default: []netip.AddrPort{up.addr}}})
		got, err := r.Lookup(t.Context(), "bank.test", IPv4)
		if err != nil || !slices.Equal(got.Addrs, addrs("203.0.113.1")) || up.streams.Load() != 1 {
			t.Errorf("got %v, %v after %d streams", got.Addrs, err, up.streams.Load())
		}
	})
}

// TestUpstreams shows which failures make the resolver ask the next upstream.
func TestUpstreams(t *testing.T) {
	right := records{"a.test. A": {addrRecord("a.test.", "203.0.113.1", 60)}}
	good := startServer(t, right.serve)
	code := func(change func(*dnsmessage.Message)) func(dnsmessage.Message, bool) [][]byte {
		return func(q dnsmessage.Message, _ bool) [][]byte {
			m := right.reply(q)
			m.Answers = nil
			change(&m)
			return [][]byte{pack(m)}
		}
	}
	for name, answer := range map[string]func(dnsmessage.Message, bool) [][]byte{
		"SERVFAIL":       code(func(m *dnsmessage.Message) { m.RCode = dnsmessage.RCodeServerFailure }),
		"REFUSED":        code(func(m *dnsmessage.Message) { m.RCode = dnsmessage.RCodeRefused }),
		"FORMERR":        code(func(m *dnsmessage.Message) { m.RCode = dnsmessage.RCodeFormatError }),
		"referral":       code(func(m *dnsmessage.Message) { m.RecursionAvailable = false }),
		"truncated ever": code(func(m *dnsmessage.Message) { m.Truncated = true }),
		"cut answer": func(q dnsmessage.Message, _ bool) [][]byte {
			raw := pack(right.reply(q))
			return [][]byte{raw[:len(raw)-2]}
		},
	} {
		t.Run(name, func(t *testing.T) {
			bad := startServer(t, answer)
			r := newResolver(t, Config{Upstreams: Upstreams{Default: []netip.AddrPort{bad.addr, good.addr}}})
			got, err := r.Lookup(t.Context(), "a.test", IPv4)
			if err != nil || !slices.Equal(got.Addrs, addrs("203.0.113.1")) {
				t.Errorf("got %v, %v", got.Addrs, err)
			}
			asked := bad.datagrams.Load()
			if _, err := r.Lookup(t.Context(), "b.test", IPv4); err != nil || bad.datagrams.Load() != asked {
				t.Errorf("the upstream that failed was asked again before the one that works (error %v)", err)
			}
		})
	}
	t.Run("without EDNS", func(t *testing.T) {
		old := startServer(t, func(q dnsmessage.Message, _ bool) [][]byte {
			m := right.reply(q)
			if len(q.Additionals) > 0 {
				m.Answers, m.RCode = nil, dnsmessage.RCodeFormatError
			}
			return [][]byte{pack(m)}
		})
		r := newResolver(t, Config{Upstreams: Upstreams{Default: []netip.AddrPort{old.addr}}})
		if got, err := r.Lookup(t.Context(), "a.test", IPv4); err != nil || len(got.Addrs) != 1 {
			t.Errorf("got %v, %v", got, err)
		}
	})
	t.Run("replaced", func(t *testing.T) {
		other := startServer(t, records{"a.test. A": {addrRecord("a.test.", "203.0.113.9", 60)}}.serve)
		r := newResolver(t, Config{Upstreams: Upstreams{Default: []netip.AddrPort{good.addr}}})
		if _, err := r.Lookup(t.Context(), "a.test", IPv4); err != nil {
			t.Fatal(err)
		}
		if err := r.SetUpstreams(Upstreams{Default: []netip.AddrPort{other.addr}}); err != nil {
			t.Fatal(err)
		}
		if got, err := r.Lookup(t.Context(), "a.test", IPv4); err != nil || !slices.Equal(got.Addrs, addrs("203.0.113.9")) {
			t.Errorf("got %v, %v: the old upstream's answer is still kept", got.Addrs, err)
		}
	})
	t.Run("none", func(t *testing.T) {
		r := newResolver(t, Config{})
		if _, err := r.Lookup(t.Context(), "a.test", IPv4); !errors.Is(err, ErrFailed) {
			t.Errorf("error %v", err)
		}
	})
	for _, bad := range []Upstreams{
		{Internal: map[string][]netip.AddrPort{"corp": nil}},
		{Internal: map[string][]netip.AddrPort{"": {good.addr}}},
		{Internal: map[string][]netip.AddrPort{"*.corp": {good.addr}}},
		{Internal: map[string][]netip.AddrPort{"corp": {good.addr}, "CORP": {good.addr}}},
	} {
		if _, err := New(Config{Upstreams: bad}); err == nil {
			t.Errorf("upstreams %v were accepted", bad)
		}
	}
}

// played is an upstream without sockets, for tests in a bubble: each question is one pipe.
type played struct {
	answer func(dnsmessage.Message) dnsmessage.Message

	mu    sync.Mutex
	asked []string // protected by mu
}

func (p *played) dial(context.Context, string, netip.AddrPort) (net.Conn, error) {
	here, there := net.Pipe()
	go func() {
		defer func() { _ = there.Close() }()
		buffer := make([]byte, 4096)
		n, err := there.Read(buffer)
		if err != nil {
			return
		}
		var q dnsmessage.Message
		if q.Unpack(buffer[:n]) != nil {
			return
		}
		p.mu.Lock()
		p.asked = append(p.asked, q.Questions[0].Name.String())
		p.mu.Unlock()
		_, _ = there.Write(pack(p.answer(q)))
	}()
	return here, nil
}

func (p *played) questions() int {
	p.mu.Lock()
	defer p.mu.Unlock()
	return len(p.asked)
}

// TestCacheTimes shows how long answers of each kind are kept.
func TestCacheTimes(t *testing.T) {
	zone := records{
		"short.test. A":      {addrRecord("short.test.", "203.0.113.1", 0)},
		"plain.test. A":      {addrRecord("plain.test.", "203.0.113.1", 60)},
		"long.test. A":       {addrRecord("long.test.", "203.0.113.1", 1<<31-1)},
		"alias.test. A":      {cname("alias.test.", "plain.test.", 20), addrRecord("plain.test.", "203.0.113.1", 60)},
		"nodata.test. A":     {soa("test.", 30)},
		"nodatalong.test. A": {soa("test.", 86400)},
		"foreignsoa.test. A": {soa("other.", 30)},
		"bare.test. A":       {},
	}
	for _, test := range []struct {
		name string
		kept time.Duration
	}{
		{"short.test", minTTL},
		{"plain.test", time.Minute},
		{"long.test", maxTTL},
		{"alias.test", 20 * time.Second},
		{"missing.test", time.Minute}, // from the zone's SOA
		{"nodata.test", 30 * time.Second},
		{"nodatalong.test", maxNegativeTTL},
		{"foreignsoa.test", 0},
		{"bare.test", 0},
	} {
		t.Run(test.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				up := &played{answer: zone.reply}
				r := newResolver(t, Config{Dial: up.dial, Upstreams: Upstreams{Default: []netip.AddrPort{netip.MustParseAddrPort("192.0.2.53:53")}}})
				lookup := func() {
					t.Helper()
					if _, err := r.Lookup(t.Context(), test.name, IPv4); err != nil {
						t.Fatal(err)
					}
				}
				lookup()
				if test.kept > 0 {
					time.Sleep(test.kept - 1)
					lookup()
					if n := up.questions(); n != 1 {
						t.Fatalf("asked %d times within %v", n, test.kept)
					}
					time.Sleep(time.Nanosecond)
				}
				lookup()
				if n := up.questions(); n != 2 {
					t.Errorf("asked %d times after %v, want 2", n, test.kept)
				}
			})
		})
	}
}

// TestEqualQuestions asks one name many times at once, and a second name that is
// never answered.
func TestEqualQuestions(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		zone := records{"a.test. A": {addrRecord("a.test.", "203.0.113.1", 60)}}
		release := make(chan struct{})
		up := &played{answer: func(q dnsmessage.Message) dnsmessage.Message {
			<-release
			return zone.reply(q)
		}}
		r := newResolver(t, Config{Dial: up.dial, Upstreams: Upstreams{Default: []netip.AddrPort{netip.MustParseAddrPort("192.0.2.53:53")}}})
		gone, cancel := context.WithCancel(t.Context())
		var wg sync.WaitGroup
		wg.Go(func() { // the first client leaves, and the others are still answered
			if _, err := r.Lookup(gone, "a.test", IPv4); !errors.Is(err, context.Canceled) {
				t.Errorf("error %v of the lookup that was given up", err)
			}
		})
		synctest.Wait()
		for range 50 {
			wg.Go(func() {
				if got, err := r.Lookup(t.Context(), "a.test", IPv4); err != nil || len(got.Addrs) != 1 {
					t.Errorf("got %v, %v", got, err)
				}
			})
		}
		cancel()
		synctest.Wait()
		close(release)
		wg.Wait()
		if n := up.questions(); n != 1 {
			t.Errorf("the upstream was asked %d times", n)
		}
	})
}

// TestUpstreamsChangeMeanwhile: after the upstreams were replaced, a client gets no
// answer of the old ones, even if a question to them is still under way. Otherwise a
// public server could give an address for a name that has become internal.
func TestUpstreamsChangeMeanwhile(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		public, internal := netip.MustParseAddrPort("192.0.2.53:53"), netip.MustParseAddrPort("10.0.0.53:53")
		answer := make(chan struct{})
		slow := &played{answer: func(q dnsmessage.Message) dnsmessage.Message {
			<-answer
			return records{"db.corp. A": {addrRecord("db.corp.", "10.6.6.6", 60)}}.reply(q)
		}}
		own := &played{answer: records{"db.corp. A": {addrRecord("db.corp.", "10.1.2.3", 60)}}.reply}
		r := newResolver(t, Config{
			Upstreams: Upstreams{Default: []netip.AddrPort{public}},
			Dial: func(ctx context.Context, network string, to netip.AddrPort) (net.Conn, error) {
				if to == internal {
					return own.dial(ctx, network, to)
				}
				return slow.dial(ctx, network, to)
			},
		})
		go func() { _, _ = r.Lookup(t.Context(), "db.corp", IPv4) }()
		synctest.Wait()
		if err := r.SetUpstreams(Upstreams{Default: []netip.AddrPort{public}, Internal: map[string][]netip.AddrPort{"corp": {internal}}}); err != nil {
			t.Fatal(err)
		}
		var got Answer
		var err error
		go func() { got, err = r.Lookup(t.Context(), "db.corp", IPv4) }()
		synctest.Wait() // it has its answer, or waits for the question under way
		close(answer)
		synctest.Wait()
		if err != nil || !slices.Equal(got.Addrs, addrs("10.1.2.3")) || !got.Internal {
			t.Errorf("got %+v, %v", got, err)
		}
	})
}

// TestClearedMeanwhile: what was current when it was put does not outlive the cache's clearing,
// whenever that comes.
func TestClearedMeanwhile(t *testing.T) {
	c, q, cleared := newCache(1), question{name: "db.corp"}, make(chan struct{})
	c.put(q, reply{expires: time.Now().Add(time.Hour)}, func() bool {
		go func() { c.clear(); close(cleared) }()
		select {
		case <-cleared: // too soon
		case <-time.After(10 * time.Millisecond):
		}
		return true
	})
	<-cleared
	if _, found := c.get(q, time.Now()); found {
		t.Error("an answer of upstreams that were replaced is kept")
	}
}

// TestSilentUpstream: a lookup ends, and its failure is kept for a second.
func TestSilentUpstream(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		hold := make(chan struct{})
		up := &played{answer: func(q dnsmessage.Message) dnsmessage.Message {
			<-hold
			return records{}.reply(q)
		}}
		r := newResolver(t, Config{Dial: up.dial, Upstreams: Upstreams{Default: []netip.AddrPort{netip.MustParseAddrPort("192.0.2.53:53")}}})
		began := time.Now()
		if _, err := r.Lookup(t.Context(), "a.test", IPv4); !errors.Is(err, ErrFailed) {
			t.Fatalf("error %v", err)
		}
		if took := time.Since(began); took != rounds*attemptTimeout {
			t.Errorf("gave up after %v", took)
		}
		if _, err := r.Lookup(t.Context(), "a.test", IPv4); !errors.Is(err, ErrFailed) || up.questions() != rounds {
			t.Errorf("error %v after %d questions", err, up.questions())
		}
		close(hold)
		time.Sleep(failureTTL)
		if _, err := r.Lookup(t.Context(), "a.test", IPv4); err != nil {
			t.Errorf("error %v after the upstream came back", err)
		}
	})
}

func TestCacheIsBounded(t *testing.T) {
	c := newCache(3)
	now := time.Now()
	for i := range 10 {
		c.put(question{name: fmt.Sprint(i)}, reply{expires: now.Add(time.Minute)}, func() bool { return true })
		c.get(question{name: "0"}, now)
	}
	if len(c.entries) != 3 || c.order.Len() != 3 {
		t.Errorf("%d entries, %d in order", len(c.entries), c.order.Len())
	}
	if _, ok := c.get(question{name: "0"}, now); !ok {
		t.Error("the entry that was used most is gone")
	}
}

func TestCanonicalName(t *testing.T) {
	for name, want := range map[string]string{
		"Example.COM":                   "example.com",
		"example.com.":                  "example.com",
		"_dmarc.example.com":            "_dmarc.example.com",
		"xn--bcher-kva.example":         "xn--bcher-kva.example",
		"a":                             "a",
		"1.2.3.4.in-addr.arpa":          "1.2.3.4.in-addr.arpa",
		"4chan.org":                     "4chan.org",
		"":                              "",
		".":                             "",
		"a..b":                          "",
		"a.b..":                         "",
		".a":                            "",
		"a b":                           "",
		"a\x00.example.com":             "",
		"bücher.example":                "",
		"*.example.com":                 "",
		"a/b":                           "",
		"a:80":                          "",
		"127.0.0.1":                     "",
		"127.1":                         "",
		"2130706433":                    "",
		"0x7f000001":                    "",
		"0x7F.0x1":                      "",
		"example.0x":                    "",
		"0177.0.0.01":                   "",
		"::1":                           "",
		"[::1]":                         "",
		strings.Repeat("a", 64):         "",
		strings.Repeat("a.", 127) + "a": "",
	} {
		got, err := CanonicalName(name)
		if got != want || (err == nil) != (want != "") {
			t.Errorf("CanonicalName(%q) = %q, %v; want %q", name, got, err, want)
		}
	}
}
