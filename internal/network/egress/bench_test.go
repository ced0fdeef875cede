package egress

import (
	"bytes"
	"testing"

	"golang.org/x/net/dns/dnsmessage"

	"agentrun.dev/internal/network/policy"
)

// BenchmarkHello measures the cost of reading a server name.
func BenchmarkHello(b *testing.B) {
	raw := clientHello(sni("allowed.example"))
	for b.Loop() {
		if h, err := readHello(b.Context(), bytes.NewReader(raw)); err != nil || h.name != "allowed.example" {
			b.Fatal(h, err)
		}
	}
}

// BenchmarkDecide measures the decision about a connection, in a policy of 50 rules.
func BenchmarkDecide(b *testing.B) {
	w := newWorld(b)
	w.upstream.set("allowed.example. A", addrAllowed)
	var rules []string
	for i := range 49 {
		rules = append(rules, string(rune('a'+i%26))+string(rune('a'+i/26))+".example:443")
	}
	s := w.sandbox(b, allow(append(rules, "allowed.example:443")...))
	resolve(b, s, "allowed.example")
	to := addrPort(addrAllowed + ":443")
	for b.Loop() {
		now, pinned := s.situation(to.Addr())
		if d := s.decide(now.rules, policy.TCP, to, pinned); !d.Allowed {
			b.Fatal(d)
		}
	}
}

// BenchmarkServeDNS measures an answer from the cache.
func BenchmarkServeDNS(b *testing.B) {
	w := newWorld(b)
	w.gateway.config.DNS.Rate, w.gateway.config.DNS.Burst = 1<<40, 1<<40
	w.upstream.set("allowed.example. A", addrAllowed)
	s := w.sandbox(b, allow("allowed.example:443"))
	for b.Loop() {
		if addrs, code := lookup(b, s, "allowed.example", dnsmessage.TypeA); len(addrs) != 1 {
			b.Fatal(code)
		}
	}
}

// BenchmarkIdleSandbox measures the cost of a sandbox that never connects.
func BenchmarkIdleSandbox(b *testing.B) {
	w := newWorld(b)
	rules := allow("allowed.example:443")
	b.ReportAllocs()
	for b.Loop() {
		w.gateway.NewSandbox(rules, Inheritance{})
	}
}
