// Package metrics counts and measures a node's work, for Prometheus. Packages
// report events to it through the Observer interfaces that they own. It reads
// the present state when it is scraped. Labels name pools and engines, never
// sandboxes, whose number is unbounded. docs/metrics.md lists all metrics.
package metrics

import (
	"net/http"
	"runtime"
	"sync"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/collectors"
	"github.com/prometheus/client_golang/prometheus/promhttp"

	"agentrun.dev/internal/sandbox"
	"agentrun.dev/internal/storage/image"
)

// Metrics are the metrics of one daemon. It implements sandbox.Observer and
// restserver.Observer.
type Metrics struct {
	registry *prometheus.Registry
	engine   string

	forks, claims, livePause, liveStall, idles *prometheus.HistogramVec // by pool
	children, ends, uses                       *prometheus.CounterVec   // by pool
	busy                                       *prometheus.GaugeVec     // by pool

	builds, pulls, requests *prometheus.HistogramVec
	pulled, refusals        prometheus.Counter
	errors                  *prometheus.CounterVec
	inFlight                prometheus.Gauge
	journal                 prometheus.Histogram

	// ofPools are the metrics that have a pool in their labels.
	ofPools []pooled

	mu sync.Mutex // protects seen
	// seen has the pools with series, and for how many scrapes each of them has
	// been gone.
	seen map[sandbox.Key]int
}

// pooled is a metric of which single series can be deleted.
type pooled interface {
	prometheus.Collector
	DeletePartialMatch(prometheus.Labels) int
}

// Labels.
const (
	labelNamespace = "namespace"
	labelPool      = "pool"
	labelEngine    = "engine"
	labelResult    = "result"
)

// The buckets of histograms, in seconds: from a fork of a microVM to a build
// that installs packages.
var (
	durations = []float64{.001, .0025, .005, .01, .025, .05, .1, .25, .5, 1, 2.5, 5, 10, 30, 60}
	stalls    = []float64{.0001, .00025, .0005, .001, .0025, .005, .01, .025, .05, .1, .25, .5, 1, 2.5}
	builds    = []float64{1, 2.5, 5, 10, 20, 40, 60, 120, 300, 600, 1800}
)

// New makes the metrics of a daemon that runs sandboxes on an engine.
func New(version, engine string) *Metrics {
	m := &Metrics{registry: prometheus.NewRegistry(), engine: engine, seen: map[sandbox.Key]int{}}
	byPool := []string{labelNamespace, labelPool, labelEngine}
	with := func(more ...string) []string { return append(byPool[:len(byPool):len(byPool)], more...) }

	m.forks = histogram("fork_duration_seconds", "Time until forks are ready: one of a template's snapshot, or all children of a running sandbox.", durations, with("kind", labelResult)...)
	m.claims = histogram("claim_duration_seconds", "Time from a claim to the sandbox's first answer. source is whether one was waiting.", durations, with("source", labelResult)...)
	m.livePause = histogram("live_fork_pause_seconds", "For how long a sandbox stood still to be forked.", stalls, byPool...)
	m.liveStall = histogram("live_fork_write_stall_seconds", "The longest that a sandbox waited to write to its memory while it was forked.", stalls, byPool...)
	m.idles = histogram("hibernation_duration_seconds", "Time to write a sandbox to disk, or to make one of what was written.", durations, with("operation", labelResult)...)
	m.children = counter("fork_children_total", "Children of running sandboxes that were asked for.", with(labelResult)...)
	m.ends = counter("sandbox_ends_total", "Sandboxes that have ended, by reason.", with("reason")...)
	m.uses = counter("operations_total", "What was done in sandboxes: programs, code, terminals, requests to ports.", with("operation", labelResult)...)
	m.busy = gauge("operations_in_progress", "What is being done now: claims, forks and what is done in sandboxes.", with("operation")...)
	m.ofPools = []pooled{m.forks, m.claims, m.livePause, m.liveStall, m.idles, m.children, m.ends, m.uses, m.busy}

	m.builds = histogram("build_duration_seconds", "Time to build templates.", builds, labelEngine, "stage", labelResult)
	m.pulls = histogram("image_pull_duration_seconds", "Time to pull images.", builds, labelResult)
	m.pulled = plainCounter("image_pull_bytes_total", "Bytes of layers that came from registries.")
	m.refusals = plainCounter("admission_refusals_total", "Machines that were not made because there was no memory for them.")
	m.requests = histogram("http_request_duration_seconds", "Time to answer requests, streams to their end.", durations, "route", "method", "code")
	m.errors = counter("http_request_errors_total", "Requests that were answered with an error, by its code.", "route", "code")
	m.inFlight = prometheus.NewGauge(prometheus.GaugeOpts{Namespace: namespace, Name: "http_requests_in_flight", Help: "Requests that are being served."})
	m.journal = prometheus.NewHistogram(prometheus.HistogramOpts{
		Namespace: namespace, Name: "journal_write_duration_seconds", Buckets: stalls,
		Help: "Time of a transaction of the journal, from the wait for the one before to the disk.",
	})

	for _, c := range m.ofPools {
		m.registry.MustRegister(c)
	}
	m.registry.MustRegister(m.builds, m.pulls, m.pulled, m.refusals, m.requests, m.errors, m.inFlight, m.journal,
		collectors.NewGoCollector(), collectors.NewProcessCollector(collectors.ProcessCollectorOpts{}))
	info := prometheus.NewGauge(prometheus.GaugeOpts{
		Namespace: namespace, Name: "build_info", Help: "Always 1; its labels say what runs.",
		ConstLabels: prometheus.Labels{"version": version, labelEngine: engine, "goversion": runtime.Version()},
	})
	info.Set(1)
	m.registry.MustRegister(info)
	return m
}

const namespace = "agentrun"

func histogram(name, help string, buckets []float64, labels ...string) *prometheus.HistogramVec {
	return prometheus.NewHistogramVec(prometheus.HistogramOpts{Namespace: namespace, Name: name, Help: help, Buckets: buckets}, labels)
}

func counter(name, help string, labels ...string) *prometheus.CounterVec {
	return prometheus.NewCounterVec(prometheus.CounterOpts{Namespace: namespace, Name: name, Help: help}, labels)
}

func gauge(name, help string, labels ...string) *prometheus.GaugeVec {
	return prometheus.NewGaugeVec(prometheus.GaugeOpts{Namespace: namespace, Name: name, Help: help}, labels)
}

func plainCounter(name, help string) prometheus.Counter {
	return prometheus.NewCounter(prometheus.CounterOpts{Namespace: namespace, Name: name, Help: help})
}

// Bounds of a scrape.
const (
	maxScrapes    = 4
	scrapeTimeout = 30 * time.Second
)

// Handler answers scrapes.
func (m *Metrics) Handler() http.Handler {
	return promhttp.HandlerFor(m.registry, promhttp.HandlerOpts{
		MaxRequestsInFlight: maxScrapes, Timeout: scrapeTimeout,
		// A value that cannot be read does not hide the others.
		ErrorHandling: promhttp.ContinueOnError, Registry: m.registry,
	})
}

// Pulled receives the pulls of images.
func (m *Metrics) Pulled(p image.Pulled) {
	result := "ok"
	if p.Err != nil {
		result = "error"
	}
	m.pulls.WithLabelValues(result).Observe(p.Took.Seconds())
	m.pulled.Add(float64(p.Bytes))
}
