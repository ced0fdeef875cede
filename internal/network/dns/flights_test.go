package dns

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"golang.org/x/net/dns/dnsmessage"
)

// stuck is a resolver whose upstream answers for no name that begins with "dead".
func stuck(t *testing.T, flights int) *Resolver {
	t.Helper()
	hold := make(chan struct{})
	t.Cleanup(func() { close(hold) })
	up := &played{answer: func(q dnsmessage.Message) dnsmessage.Message {
		if strings.HasPrefix(q.Questions[0].Name.String(), "dead") {
			<-hold
		}
		return records{}.reply(q)
	}}
	return newResolver(t, Config{
		Dial: up.dial, Flights: flights, Upstreams: Upstreams{Default: []netip.AddrPort{netip.MustParseAddrPort("192.0.2.53:53")}},
	})
}

// TestDeadNames: sandboxes with as many questions as allowed, for names whose servers
// never answer, do not delay the answers of another sandbox.
func TestDeadNames(t *testing.T) {
	for _, greedy := range []int{4, 40, 200} {
		t.Run(fmt.Sprint(greedy, " sandboxes"), func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				r := stuck(t, 0)
				ctx, cancel := context.WithCancel(t.Context())
				var wg sync.WaitGroup
				for i := range greedy {
					c := r.NewClient(&asker{}, DefaultLimits())
					for j := range DefaultLimits().Pending {
						wg.Go(func() { c.Serve(ctx, pack(ask(fmt.Sprintf("dead%d-%d.allowed.test.", i, j), dnsmessage.TypeA)), false) })
					}
				}
				synctest.Wait()
				if r.flights.all > DefaultFlights {
					t.Errorf("%d questions are under way", r.flights.all)
				}
				began := time.Now()
				for i := range 3 {
					other := r.NewClient(&asker{}, DefaultLimits())
					m := unpack(t, other.Serve(t.Context(), pack(ask(fmt.Sprintf("live%d.allowed.test.", i), dnsmessage.TypeA)), false))
					if m.RCode != dnsmessage.RCodeNameError || time.Since(began) > 0 {
						t.Errorf("another sandbox: %v after %v", m.RCode, time.Since(began))
					}
				}
				cancel()
				wg.Wait()
				time.Sleep(lookupTimeout)
				synctest.Wait()
				if r.flights.all != 0 || len(r.flights.own) != 0 {
					t.Errorf("%d flights are left, of %d clients", r.flights.all, len(r.flights.own))
				}
			})
		})
	}
}

// TestQuestionsThatAreGivenUp: a question goes on when its client has given up, and
// counts meanwhile.
func TestQuestionsThatAreGivenUp(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := stuck(t, 0)
		c := r.NewClient(&asker{}, DefaultLimits())
		gone, cancel := context.WithCancel(t.Context())
		cancel()
		for i := range 2 * DefaultLimits().Pending {
			if _, err := c.Lookup(gone, fmt.Sprintf("dead%d.allowed.test", i), IPv4); err == nil {
				t.Fatal("a dead name has an answer")
			}
		}
		synctest.Wait()
		if r.flights.all > DefaultLimits().Pending {
			t.Errorf("%d questions are under way", r.flights.all)
		}
	})
}

// TestBoundOfAnother: a question that failed at the limit of another sandbox can be asked
// by this one.
func TestBoundOfAnother(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := stuck(t, 0)
		full := r.NewClient(&asker{}, Limits{Rate: 1, Burst: 1})
		if _, err := r.lookup(t.Context(), full, "live.test", IPv4); !errors.Is(err, ErrLimit) {
			t.Errorf("beyond its bound: %v", err)
		}
		b := r.NewClient(&asker{}, DefaultLimits())
		if _, err := r.lookup(t.Context(), b, "live.test", IPv4); err != nil {
			t.Errorf("another: %v", err)
		}
	})
}

// TestWildcardBoundOfForks: a fork continues its source's count against the limit.
// Names that the source has resolved do not count again, and rewording the pattern
// does not reset the count.
func TestWildcardBoundOfForks(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := stuck(t, 0)
		passed := func(c *Client, prefix string, n int) (passes int) {
			for i := range n {
				m := unpack(t, c.Serve(t.Context(), pack(ask(fmt.Sprintf("%s%d.allowed.test.", prefix, i), dnsmessage.TypeA)), false))
				if m.RCode == dnsmessage.RCodeNameError {
					passes++
				}
			}
			return passes
		}
		source := r.NewClient(&asker{wildcard: "*.allowed.test:443"}, DefaultLimits())
		if n := passed(source, "s", 100); n != 100 {
			t.Fatalf("the source asks for %d names", n)
		}
		fork := func(pattern string, from *Client, names ...string) *Client {
			c := r.NewClient(&asker{wildcard: pattern}, DefaultLimits())
			c.Inherit(from.Wildcards(), names)
			return c
		}
		child := fork("*.allowed.test:443", source, "s0.allowed.test", "s1.allowed.test")
		if n := passed(child, "s", 2); n != 2 {
			t.Errorf("%d of 2 names that the source knows", n)
		}
		if n := passed(child, "c", 100); n != 28 {
			t.Errorf("the fork asks for %d names beside the source's 100", n)
		}
		if n := passed(fork("*.allowed.test:443", child), "g", 100); n != 0 {
			t.Errorf("its fork asks for %d more", n)
		}
		if n := passed(fork("tcp://*.test", child), "g", 100); n != 0 {
			t.Errorf("a fork whose rule is written in another way asks for %d more", n)
		}
		time.Sleep(DefaultLimits().WildcardWindow)
		if n := passed(child, "n", 200); n != 128 {
			t.Errorf("%d names in the next window", n)
		}
		if n := passed(fork("*.allowed.test:443", source), "n", 200); n != 128 {
			t.Errorf("%d names of a fork that was made later", n)
		}
	})
}
