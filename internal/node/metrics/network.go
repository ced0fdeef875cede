package metrics

import (
	"context"
	"slices"

	"github.com/prometheus/client_golang/prometheus"

	"agentrun.dev/internal/node"
	"agentrun.dev/internal/sandbox"
)

// Network is the source for the network use of sandboxes, such as *netds.Netds.
type Network interface {
	Stats(context.Context) map[sandbox.Namespace]node.NetworkStats
}

// WatchNetwork makes scrapes read a network.
func (m *Metrics) WatchNetwork(n Network) { m.registry.MustRegister(&network{n}) }

// network reads its source when it is scraped.
type network struct{ source Network }

var (
	descInterfaces  = describe("network_interfaces", "Machines that are connected to a network.", labelNamespace)
	descOpen        = describe("network_connections_open", "TCP connections and UDP flows of sandboxes that are open.", labelNamespace)
	descConnections = describe("network_connections_total", "Connections of sandboxes that were opened, by the kind of rule that allowed them.", labelNamespace, "kind")
	descRefusals    = describe("network_refusals_total", "Connections and names that were refused to sandboxes, by the kind of rule that refused them.", labelNamespace, "kind")
	descSent        = describe("network_sent_bytes_total", "Bytes that sandboxes sent over connections, by the kind of rule that allowed them.", labelNamespace, "kind")
	descReceived    = describe("network_received_bytes_total", "Bytes that sandboxes received over connections, by the kind of rule that allowed them.", labelNamespace, "kind")
	descQueries     = describe("network_dns_queries_total", "Questions of sandboxes to DNS.", labelNamespace)
	descInjected    = describe("network_injected_requests_total", "Requests of sandboxes that got values of secrets on their way out.", labelNamespace)
	descDropped     = describe("network_dropped_frames_total", "Frames and datagrams of sandboxes that were dropped: malformed, spoofed, or beyond a limit.", labelNamespace)
)

// ruleKinds are the values of the label kind. Other kinds of a netd are counted as
// other, so that no netd can make an unbounded number of series.
var ruleKinds = []string{"name", "wildcard", "address", "default", "closed", "tls", "http", "dns", "inject"}

const otherKind = "other"

// Describe implements prometheus.Collector.
func (n *network) Describe(out chan<- *prometheus.Desc) {
	for _, d := range []*prometheus.Desc{descInterfaces, descOpen, descConnections, descRefusals, descSent, descReceived, descQueries, descInjected, descDropped} {
		out <- d
	}
}

// Collect implements prometheus.Collector.
func (n *network) Collect(out chan<- prometheus.Metric) {
	for namespace, stats := range n.source.Stats(context.Background()) {
		send := func(d *prometheus.Desc, kind prometheus.ValueType, value uint64, more ...string) {
			out <- prometheus.MustNewConstMetric(d, kind, float64(value), append([]string{string(namespace)}, more...)...)
		}
		send(descInterfaces, prometheus.GaugeValue, uint64(stats.Interfaces))
		send(descOpen, prometheus.GaugeValue, stats.Open)
		send(descQueries, prometheus.CounterValue, stats.Queries)
		send(descInjected, prometheus.CounterValue, stats.Injected)
		send(descDropped, prometheus.CounterValue, stats.Dropped)
		for kind, sum := range byKind(stats.Kinds) {
			send(descConnections, prometheus.CounterValue, sum.Opened, kind)
			send(descRefusals, prometheus.CounterValue, sum.Refused, kind)
			send(descSent, prometheus.CounterValue, sum.Sent, kind)
			send(descReceived, prometheus.CounterValue, sum.Received, kind)
		}
	}
}

// byKind adds up the numbers for each value of the label.
func byKind(kinds []node.NetworkKind) map[string]node.NetworkKind {
	out := map[string]node.NetworkKind{}
	for _, k := range kinds {
		name := k.Kind
		if !slices.Contains(ruleKinds, name) {
			name = otherKind
		}
		sum := out[name]
		sum.Opened += k.Opened
		sum.Refused += k.Refused
		sum.Sent += k.Sent
		sum.Received += k.Received
		out[name] = sum
	}
	return out
}
