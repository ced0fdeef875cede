package egress

import (
	"sync/atomic"

	"agentrun.dev/internal/network/policy"
	"agentrun.dev/internal/network/stack"
)

// Kinds of refusals that do not come from a rule of a policy.
const (
	ByTLS  policy.Kind = "tls"  // the ClientHello
	ByHTTP policy.Kind = "http" // the form of a request
	ByDNS  policy.Kind = "dns"  // a bound on DNS questions
	// ByInject is the kind of connections and requests that ask for credentials and
	// cannot get them.
	ByInject policy.Kind = "inject"
)

// kinds are all values of Entry.Kind.
var kinds = [...]policy.Kind{policy.ByName, policy.ByWildcard, policy.ByAddress, policy.ByDefault, policy.ByClosed, ByTLS, ByHTTP, ByDNS, ByInject}

// Counters count connections and their bytes by the kind of rule that allowed them,
// and refusals by the kind that refused. Every kind is present.
type Counters map[policy.Kind]Count

// Count is the count of one kind of rule.
type Count struct {
	Connections, Refusals, Sent, Received uint64
}

// counters count for a sandbox, or for a whole gateway. The bytes of a connection are
// added when it ends. Until then the connection counts them itself.
type counters [len(kinds)]struct {
	connections, refusals, sent, received atomic.Uint64
}

// index is the index of a kind. Every Kind of this package and of policy is in kinds.
func index(kind policy.Kind) int {
	for i, k := range kinds {
		if k == kind {
			return i
		}
	}
	return 0
}

// connected counts a connection, and refused a refusal.
func (c *counters) connected(kind policy.Kind) { c[index(kind)].connections.Add(1) }
func (c *counters) refused(kind policy.Kind)   { c[index(kind)].refusals.Add(1) }

// moved adds the bytes of a connection that has ended.
func (c *counters) moved(kind policy.Kind, bytes *stack.Counters) {
	c[index(kind)].sent.Add(uint64(bytes.Sent.Load()))
	c[index(kind)].received.Add(uint64(bytes.Received.Load()))
}

func (c *counters) read() Counters {
	all := make(Counters, len(kinds))
	for i, kind := range kinds {
		n := &c[i]
		all[kind] = Count{Connections: n.connections.Load(), Refusals: n.refusals.Load(), Sent: n.sent.Load(), Received: n.received.Load()}
	}
	return all
}

// addLive adds the bytes of the connections that are still open.
func (s *Sandbox) addLive(all Counters) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for c := range s.live {
		if c.counted == "" {
			continue
		}
		n := all[c.counted]
		n.Sent += uint64(c.bytes.Sent.Load())
		n.Received += uint64(c.bytes.Received.Load())
		all[c.counted] = n
	}
}

// Counters are the counters of the sandbox, including open connections.
func (s *Sandbox) Counters() Counters {
	s.gateway.counting.Lock()
	defer s.gateway.counting.Unlock()
	all := s.counters.read()
	s.addLive(all)
	return all
}

// Queries counts the DNS messages of all sandboxes since the gateway was made.
func (g *Gateway) Queries() uint64 { return g.queries.Load() }

// Injected counts the requests of all sandboxes that got credentials since the
// gateway was made.
func (g *Gateway) Injected() uint64 { return g.injected.Load() }

// Counters are the counters of all sandboxes since the gateway was made. They never
// decrease.
func (g *Gateway) Counters() Counters {
	g.counting.Lock()
	defer g.counting.Unlock()
	all := g.counters.read()
	for s := range g.sandboxes {
		s.addLive(all)
	}
	return all
}
