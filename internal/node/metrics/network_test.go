package metrics

import (
	"context"
	"testing"

	"agentrun.dev/internal/node"
	"agentrun.dev/internal/sandbox"
)

// played is a network that says what it is told to.
type played map[sandbox.Namespace]node.NetworkStats

func (p played) Stats(context.Context) map[sandbox.Namespace]node.NetworkStats { return p }

// TestNetwork: namespaces and kinds of rules are kept apart, and an unknown kind
// makes no series of its own.
func TestNetwork(t *testing.T) {
	n := newNode(t)
	n.metrics.WatchNetwork(played{
		"a": {Interfaces: 2, Open: 3, Dropped: 4, Queries: 11, Injected: 12, Kinds: []node.NetworkKind{
			{Kind: "name", Opened: 5, Refused: 6, Sent: 7, Received: 8},
			{Kind: "made up", Refused: 9}, {Kind: "another", Refused: 10},
		}},
		"b": {Interfaces: 1},
	})
	got := n.scrape()
	for name, want := range map[string]float64{
		"agentrun_network_interfaces": 2, "agentrun_network_connections_open": 3, "agentrun_network_dropped_frames_total": 4,
		"agentrun_network_dns_queries_total":       11,
		"agentrun_network_injected_requests_total": 12,
	} {
		if v := got.value(t, name, "namespace", "a"); v != want {
			t.Errorf("%s is %v", name, v)
		}
	}
	for name, want := range map[string]float64{
		"agentrun_network_connections_total": 5, "agentrun_network_refusals_total": 6,
		"agentrun_network_sent_bytes_total": 7, "agentrun_network_received_bytes_total": 8,
	} {
		if v := got.value(t, name, "namespace", "a", "kind", "name"); v != want {
			t.Errorf("%s is %v", name, v)
		}
	}
	if v := got.value(t, "agentrun_network_refusals_total", "namespace", "a", "kind", otherKind); v != 19 {
		t.Errorf("refusals by other kinds are %v", v)
	}
	if v := got.value(t, "agentrun_network_interfaces", "namespace", "b"); v != 1 {
		t.Errorf("interfaces of b are %v", v)
	}
}
