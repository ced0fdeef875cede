package egress

import (
	"math"
	"sync"
	"testing"

	"agentrun.dev/internal/network/policy"
)

// TestRulesChangeMeanwhile opens connections while the rules change. The change comes
// at the worst moment: after the decision, during the dial.
func TestRulesChangeMeanwhile(t *testing.T) {
	w := newWorld(t)
	w.serveEcho(t, addrOther+":22")
	s := w.sandbox(t, allow(addrOther+":22"))
	revoke := sync.OnceFunc(func() { s.SetRules(allow()) })
	w.mu.Lock()
	w.beforeDial = revoke
	w.mu.Unlock()
	if _, err := connect(t, s, addrOther+":22"); !wasRefused(err) {
		t.Errorf("a connection whose rule has gone while it was dialled: %v", err)
	}
	if e := last(t, s, func(e Entry) bool { return e.Protocol == "tcp" }); e.Rule != "egress: deny" {
		t.Errorf("log: %+v", e)
	}
	if open := s.Connections(); len(open) != 0 {
		t.Errorf("connections: %+v", open)
	}
}

// TestManyAtOnce opens, uses and cuts connections from many goroutines. The counters
// add up and never decrease.
func TestManyAtOnce(t *testing.T) {
	w := newWorld(t)
	w.serveEcho(t, addrOther+":22")
	rules := allow(addrOther + ":22")
	s := w.sandbox(t, rules)
	stop := make(chan struct{})
	var watch, work sync.WaitGroup
	watch.Go(func() {
		var before Count
		for {
			now := w.gateway.Counters()[policy.ByAddress]
			if now.Sent < before.Sent || now.Received < before.Received || now.Connections < before.Connections {
				t.Errorf("counters went from %+v to %+v", before, now)
			}
			before = now
			select {
			case <-stop:
				return
			default:
				s.SetRules(rules)
				s.Connections()
			}
		}
	})
	const workers, rounds, size = 8, 20, 5000
	for range workers {
		work.Go(func() {
			for range rounds {
				conn := mustConnect(t, s, addrOther+":22")
				var reader sync.WaitGroup
				reader.Go(func() {
					if got, err := readAll(conn); err != nil || len(got) != size {
						t.Errorf("%d bytes, %v", len(got), err)
					}
				})
				_, _ = conn.Write(make([]byte, size))
				_ = conn.CloseWrite()
				reader.Wait()
			}
		})
	}
	work.Wait()
	close(stop)
	watch.Wait()
	last(t, s, func(e Entry) bool { return e.Seq == workers*rounds })
	want := Count{Connections: workers * rounds, Sent: workers * rounds * size, Received: workers * rounds * size}
	if got := s.Counters()[policy.ByAddress]; got != want {
		t.Errorf("counters %+v, want %+v", got, want)
	}
	s.Close()
	w.gateway.counting.RLock()
	defer w.gateway.counting.RUnlock()
	if len(w.gateway.sandboxes) != 0 {
		t.Errorf("%d sandboxes are left", len(w.gateway.sandboxes))
	}
}

// TestIdleSandboxIsSmall bounds the memory of a sandbox that never connects.
func TestIdleSandboxIsSmall(t *testing.T) {
	w := newWorld(t)
	rules := allow("allowed.example:443")
	perSandbox := math.Inf(1)
	for range 5 { // other goroutines allocate as well, at times
		perSandbox = min(perSandbox, testing.AllocsPerRun(100, func() { w.gateway.NewSandbox(rules, Inheritance{}).Close() }))
	}
	if perSandbox > 4 {
		t.Errorf("%v allocations for an idle sandbox", perSandbox)
	}
	s := w.gateway.NewSandbox(rules, Inheritance{})
	if s.live != nil || s.pins.byAddr != nil || s.log.entries != nil {
		t.Errorf("an idle sandbox has %+v", s)
	}
	s.Close()
}
