package metrics

import (
	"context"
	"net/http"
	"strconv"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"agentrun.dev/internal/sandbox"
	restserver "agentrun.dev/internal/server/rest"
)

var (
	_ sandbox.Observer    = (*Metrics)(nil)
	_ restserver.Observer = (*Metrics)(nil)
)

// Begin implements sandbox.Observer.
func (m *Metrics) Begin(ctx context.Context, w sandbox.Work) (context.Context, func(sandbox.Outcome)) {
	begin := time.Now()
	if w.Op == sandbox.OpBuild {
		return ctx, func(out sandbox.Outcome) {
			m.builds.WithLabelValues(m.engine, string(w.Stage), out.Result()).Observe(time.Since(begin).Seconds())
		}
	}
	pool := m.poolLabels(w.Pool)
	busy := m.busy.MustCurryWith(pool).WithLabelValues(string(w.Op))
	busy.Inc()
	return ctx, func(out sandbox.Outcome) {
		busy.Dec()
		m.ended(w.Op, pool, time.Since(begin).Seconds(), out)
	}
}

// poolLabels returns the labels of a pool, which has series from now on.
func (m *Metrics) poolLabels(k sandbox.Key) prometheus.Labels {
	m.mu.Lock()
	m.seen[k] = 0
	m.mu.Unlock()
	return prometheus.Labels{labelNamespace: string(k.Namespace), labelPool: string(k.Name), labelEngine: m.engine}
}

// ended records an operation of a pool.
func (m *Metrics) ended(op sandbox.Op, pool prometheus.Labels, took float64, out sandbox.Outcome) {
	switch op {
	case sandbox.OpClaim:
		source := "fork"
		if out.Waited {
			source = "ready"
		}
		m.claims.MustCurryWith(pool).WithLabelValues(source, out.Result()).Observe(took)
	case sandbox.OpFork:
		m.forks.MustCurryWith(pool).WithLabelValues("template", out.Result()).Observe(took)
	case sandbox.OpLiveFork:
		m.forks.MustCurryWith(pool).WithLabelValues("live", out.Result()).Observe(took)
		children := m.children.MustCurryWith(pool)
		children.WithLabelValues("ok").Add(float64(out.Children))
		children.WithLabelValues("error").Add(float64(out.Failed))
		if out.Err == nil {
			m.livePause.With(pool).Observe(out.Live.Pause.Seconds())
			m.liveStall.With(pool).Observe(out.Live.LongestWait.Seconds())
		}
	case sandbox.OpHibernate, sandbox.OpWake:
		m.idles.MustCurryWith(pool).WithLabelValues(string(op), out.Result()).Observe(took)
	default:
		m.uses.MustCurryWith(pool).WithLabelValues(string(op), out.Result()).Inc()
	}
}

// Ended implements sandbox.Observer.
func (m *Metrics) Ended(pool sandbox.Key, why sandbox.Reason) {
	m.ends.MustCurryWith(m.poolLabels(pool)).WithLabelValues(string(why)).Inc()
}

// Refused implements sandbox.Observer.
func (m *Metrics) Refused() { m.refusals.Inc() }

// Journaled implements sandbox.Observer.
func (m *Metrics) Journaled(took time.Duration) { m.journal.Observe(took.Seconds()) }

// Request implements restserver.Observer.
func (m *Metrics) Request(r *http.Request) (context.Context, func(restserver.Answer)) {
	begin := time.Now()
	m.inFlight.Inc()
	return r.Context(), func(a restserver.Answer) {
		m.inFlight.Dec()
		m.requests.WithLabelValues(a.Route, a.Method, codeClass(a.Status)).Observe(time.Since(begin).Seconds())
		if a.Code != "" {
			m.errors.WithLabelValues(a.Route, string(a.Code)).Inc()
		}
	}
}

// codeClass is the class of a status, such as 2xx for 200.
func codeClass(status int) string { return strconv.Itoa(status/100) + "xx" }
