package policy

import (
	"encoding/json"
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"
)

// TestResolvable: a name has addresses if it is allowed on some port.
func TestResolvable(t *testing.T) {
	for _, c := range []struct {
		egress, allow, deny string
		name                Name
		want                bool
	}{
		{"deny", "a.example:443", "", "a.example", true},
		{"deny", "udp://a.example:443", "", "a.example", true},
		{"deny", "a.example:443", "", "b.example", false},
		{"deny", "a.example:443", "a.example:443", "a.example", false},
		{"deny", "a.example", "a.example:443", "a.example", true},
		{"deny", "a.example:443", "a.example", "a.example", true},
		{"deny", "*.example", "a.example", "a.example", false},
		{"deny", "*.example", "a.example", "b.a.example", true},
		{"deny", "10.0.0.0/8", "", "a.example", false},
		{"allow", "", "a.example", "a.example", false},
		{"allow", "", "a.example", "b.a.example", true},
		{"allow", "", "a.example:25", "a.example", true},
		{"allow", "", "tcp://a.example", "a.example", true},
		{"allow", "", "tcp://a.example udp://a.example", "a.example", false},
		{"allow", "a.example:443", "a.example", "a.example", true},
	} {
		d := Set{must(t, c.egress, list(c.allow), list(c.deny))}.Resolvable(c.name)
		if d.Allowed != c.want || d.Rule == "" || d.Reason == "" {
			t.Errorf("egress %s, allow %s, deny %s: %s: %+v", c.egress, c.allow, c.deny, c.name, d)
		}
	}
	both := Set{must(t, "deny", list("a.example:443"), nil), must(t, "deny", list("a.example:80"), nil)}
	if d := both.Resolvable("a.example"); d.Allowed {
		t.Errorf("a name that two policies allow on different ports is resolved: %+v", d)
	}
}

func TestEmptySet(t *testing.T) {
	var s Set
	if s.Name("a.example", TCP, 443).Allowed || s.Resolvable("a.example").Allowed || s.Connect(query(TCP, "1.1.1.1:443")).Allowed {
		t.Error("a set without a policy allows something")
	}
}

// TestAdmits: which names an open connection may have.
func TestAdmits(t *testing.T) {
	for _, c := range []struct {
		set   Set
		names string
		looks bool
		admit map[Name]bool
	}{
		{Set{must(t, "deny", list("a.example"), nil)}, "a.example", true, map[Name]bool{"a.example": true, "b.example": false}},
		{Set{must(t, "deny", list("*.example"), nil)}, "a.example", true, map[Name]bool{"a.example": true, "b.example": false}},
		{Set{must(t, "deny", list("1.1.1.1"), list("b.example"))}, "", false, map[Name]bool{"b.example": true}},
		{Set{must(t, "allow", nil, list("b.example"))}, "", true, map[Name]bool{"a.example": true, "b.example": false}},
		{Set{must(t, "allow", nil, list("b.example")), must(t, "deny", list("1.1.1.1"), nil)}, "", true, map[Name]bool{"a.example": true, "b.example": false}},
		{Set{must(t, "allow", nil, list("b.example")), must(t, "deny", list("*.example"), nil)}, "a.example b.example", true,
			map[Name]bool{"a.example": true, "b.example": false, "c.example": false}},
		{Set{must(t, "deny", list("a.example"), nil), must(t, "deny", list("1.1.1.1"), nil)}, "a.example", true, map[Name]bool{"a.example": true, "b.example": false}},
	} {
		conn := c.set.Connect(query(TCP, "1.1.1.1:443", list(c.names)...))
		if !conn.Allowed || conn.Looks() != c.looks {
			t.Errorf("%+v: %+v", c.set, conn)
		}
		for n, want := range c.admit {
			if d := conn.Admits(n); d.Allowed != want {
				t.Errorf("%+v: %s: %+v", c.set, n, d)
			}
		}
	}
	refusals := []Connection{
		Set{must(t, "deny", list("a.example"), nil), must(t, "deny", list("b.example"), nil)}.Connect(query(TCP, "1.1.1.1:443", "a.example", "b.example")),
		Set{must(t, "allow", nil, list("b.example")), must(t, "deny", list("b.example"), nil)}.Connect(query(TCP, "1.1.1.1:443", "a.example", "b.example")),
		Set{must(t, "allow", nil, nil), must(t, "deny", list("10.0.0.0/8"), nil)}.Connect(query(TCP, "10.2.0.1:443")),
	}
	for i, c := range refusals {
		if c.Allowed || c.Admits("a.example").Allowed || c.Admits("b.example").Allowed || c.Reason == "" {
			t.Errorf("%d: %+v", i, c)
		}
	}
}

func TestNarrow(t *testing.T) {
	p := must(t, "deny", list("a.example"), nil)
	one, err := Narrow(nil, p)
	if err != nil || len(one) != 1 {
		t.Fatalf("%v, %v", one, err)
	}
	if again, err := Narrow(one, p); err != nil || len(again) != 1 {
		t.Errorf("the same policy twice: %v, %v", again, err)
	}
	s := one
	for i := range maxPolicies {
		var next Set
		if next, err = Narrow(s, must(t, "deny", []string{fmt.Sprintf("a%d.example", i)}, nil)); err == nil {
			s = next
		}
	}
	if err == nil || len(s) != maxPolicies {
		t.Errorf("%d policies, and %v", len(s), err)
	}
	b, err := json.Marshal(s)
	if err != nil {
		t.Fatal(err)
	}
	var back Set
	if err := json.Unmarshal(b, &back); err != nil || !slices.EqualFunc(back, s, Policy.Equal) {
		t.Errorf("%s is read back as %+v: %v", b, back, err)
	}
	for _, bad := range []string{`{}`, `[{"egress":"x"}]`, `[` + strings.Repeat(`{},`, maxPolicies) + `{}]`} {
		if err := json.Unmarshal([]byte(bad), &back); err == nil {
			t.Errorf("%s is taken", bad)
		}
	}
}

// Values of random policies and queries. There are few, so that they often match.
var (
	someNames = []string{"a.example", "b.example", "x.a.example", "y.x.a.example", "db.svc"}
	someHosts = append([]string{"*.example", "*.a.example", "*.x.a.example", "*.svc", "1.1.1.1", "1.1.1.0/24", "1.0.0.0/8", "0.0.0.0/0",
		"10.2.0.1", "10.2.0.0/16", "10.0.0.0/8", "10.96.0.0/12", "2606::/16", "64:ff9b::/96", "::/0", "169.254.169.254", "127.0.0.0/8"}, someNames...)
	someAddrs = []string{"1.1.1.1", "1.1.2.1", "8.8.8.8", "10.2.0.1", "10.96.0.1", "10.1.0.5", "[2606::1]", "[64:ff9b::101:101]", "[64:ff9b::a02:1]", "127.0.0.1", "169.254.169.254"}
	somePorts = []uint16{443, 80, 53}
)

func pick[T any](r *rand.Rand, from []T) T { return from[r.IntN(len(from))] }

func randomPolicy(t testing.TB, r *rand.Rand) Policy {
	rules := func() (out []string) {
		for range r.IntN(4) {
			text := pick(r, []string{"", "", "tcp://", "udp://"})
			host := pick(r, someHosts)
			switch port := pick(r, somePorts); {
			case r.IntN(2) == 0:
				text += host
			case strings.Contains(host, "::"):
				text += fmt.Sprintf("[%s]:%d", host, port)
			default:
				text += fmt.Sprintf("%s:%d", host, port)
			}
			out = append(out, text)
		}
		return out
	}
	return must(t, pick(r, []string{"deny", "allow"}), rules(), rules())
}

func randomQuery(r *rand.Rand) Query {
	var names []string
	for range r.IntN(3) {
		names = append(names, pick(r, someNames)+pick(r, []string{"", "!"}))
	}
	return query(pick(r, []Protocol{TCP, UDP}), fmt.Sprintf("%s:%d", pick(r, someAddrs), pick(r, somePorts)), names...)
}

// FuzzNarrow: a narrowed set allows nothing that its parent or the child alone
// refuses: no connection, no name in it, no answer of DNS, and no alias. If a set
// allows connections to a name, it allows resolving the name.
func FuzzNarrow(f *testing.F) {
	for seed := range uint64(40) {
		f.Add(seed)
	}
	f.Fuzz(func(t *testing.T, seed uint64) {
		r := rand.New(rand.NewPCG(seed, 18))
		var parent Set
		for range 1 + r.IntN(2) {
			parent, _ = Narrow(parent, randomPolicy(t, r))
		}
		alone := randomPolicy(t, r)
		child, err := Narrow(parent, alone)
		if err != nil {
			t.Fatal(err)
		}
		for range 50 {
			q := randomQuery(r)
			got := child.Connect(q)
			for _, wider := range []Set{parent, {alone}} {
				of := wider.Connect(q)
				if got.Allowed && !of.Allowed || got.Allowed && of.NameNeeded && !got.NameNeeded || of.Looks() && got.Allowed && !got.Looks() {
					t.Fatalf("%+v to %v:\n%+v, though\n%+v", wider, q, got, of)
				}
				for _, n := range someNames {
					n := Name(n)
					if got.Admits(n).Allowed && !of.Admits(n).Allowed {
						t.Fatalf("%+v to %v: %s is admitted", wider, q, n)
					}
					if child.Resolvable(n).Allowed && !wider.Resolvable(n).Allowed || child.Name(n, q.Protocol, q.Port).Allowed && !wider.Name(n, q.Protocol, q.Port).Allowed {
						t.Fatalf("%+v: %s is resolved", wider, n)
					}
					if child.Tells(n, q.To, true) && !wider.Tells(n, q.To, true) {
						t.Fatalf("%+v: %v is told for %s", wider, q, n)
					}
					for _, alias := range someNames {
						if child.LeadsTo(n, Name(alias)) && !wider.LeadsTo(n, Name(alias)) {
							t.Fatalf("%+v: %s leads to %s", wider, n, alias)
						}
					}
				}
			}
			if got.Allowed && got.NameNeeded {
				for _, n := range got.Names {
					if len(child) == 1 && !child.Resolvable(n).Allowed {
						t.Fatalf("%+v: %s is connected, and not resolved", child, n)
					}
				}
			}
			if got.Allowed && q.To.Closed() && got.Kind == ByDefault {
				t.Fatalf("%+v: the default opens %v", child, q)
			}
		}
	})
}

func TestInternalDomains(t *testing.T) {
	ds, err := ParseInternalDomains(map[string][]string{"svc.cluster.local": {"10.96.0.10"}, ".Corp.": {"[fd00::10]:5353", "fd00::11", "127.0.0.53"}, "prod.corp": {"10.0.0.1:53"}})
	if err != nil {
		t.Fatal(err)
	}
	b, err := json.Marshal(ds)
	if want := `{"corp":["[fd00::10]:5353","[fd00::11]:53","127.0.0.53:53"],"prod.corp":["10.0.0.1:53"],"svc.cluster.local":["10.96.0.10:53"]}`; err != nil || string(b) != want {
		t.Errorf("%s, %v", b, err)
	}
	var back InternalDomains
	if err := json.Unmarshal(b, &back); err != nil || fmt.Sprint(back) != fmt.Sprint(ds) {
		t.Errorf("%v, %v", back, err)
	}
	for name, want := range map[Name]Name{"db.prod.corp": "prod.corp", "prod.corp": "prod.corp", "x.corp": "corp", "corp": "corp", "xcorp": "", "a.b.svc.cluster.local": "svc.cluster.local", "cluster.local": ""} {
		if d, ok := ds.For(name); d.Domain != want || ok != (want != "") {
			t.Errorf("%s is of %q, want %q", name, d.Domain, want)
		}
	}
	many := map[string][]string{}
	for i := range maxInternalDomains + 1 {
		many[fmt.Sprintf("d%d.corp", i)] = []string{"10.0.0.1"}
	}
	for say, bad := range map[string]map[string][]string{
		"more than": many, "not between": {"corp": nil}, "not an address": {"corp": {"dns.corp"}}, "port other than 0": {"corp": {"10.0.0.1:0"}},
		"one host": {"corp": {"0.0.0.0"}}, "twice": {"corp": {"10.0.0.1"}, "Corp.": {"10.0.0.1"}}, "1 to 253": {".": {"10.0.0.1"}}, "'*'": {"*.corp": {"10.0.0.1"}},
	} {
		if _, err := ParseInternalDomains(bad); err == nil || !strings.Contains(err.Error(), say) {
			t.Errorf("%v: %v; want %q", bad, err, say)
		}
	}
}

// BenchmarkConnect decides with as many rules as a policy can have. The last rule
// matches.
func BenchmarkConnect(b *testing.B) {
	var allow, deny []string
	for i := range MaxRules {
		allow, deny = append(allow, fmt.Sprintf("a%d.example:443", i)), append(deny, fmt.Sprintf("10.%d.0.0/16", i))
	}
	s := Set{must(b, "deny", allow, deny)}
	q := query(TCP, "1.1.1.1:443", fmt.Sprintf("a%d.example", MaxRules-1))
	for b.Loop() {
		if !s.Connect(q).Allowed {
			b.Fatal("refused")
		}
	}
}

// FuzzJSON: accepted sets and internal domains are written in the form in which they
// are read.
func FuzzJSON(f *testing.F) {
	f.Add([]byte(`[{"egress":"deny","allow":["a.example:443"]},{"deny":["10.0.0.0/8"]}]`))
	f.Add([]byte(`{"corp":["10.0.0.1","[fd00::10]:5353"],"svc.cluster.local":["10.96.0.10:53"]}`))
	f.Fuzz(func(t *testing.T, b []byte) {
		again[Set](t, b)
		again[InternalDomains](t, b)
	})
}

func again[T any](t *testing.T, b []byte) {
	var given, back T
	if json.Unmarshal(b, &given) != nil {
		return
	}
	written, err := json.Marshal(given)
	if err != nil {
		t.Fatalf("%s is read, and not written: %v", b, err)
	}
	if err := json.Unmarshal(written, &back); err != nil || fmt.Sprintf("%v", back) != fmt.Sprintf("%v", given) {
		t.Fatalf("%s is written as %s, which is read as %v: %v", b, written, back, err)
	}
}
