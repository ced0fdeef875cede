package metrics

import (
	"fmt"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"slices"
	"strings"
	"testing"
	"time"

	dto "github.com/prometheus/client_model/go"
	"github.com/prometheus/common/expfmt"
	"github.com/prometheus/common/model"

	"agentrun.dev/internal/node"
	"agentrun.dev/internal/node/managertest"
	"agentrun.dev/internal/node/nodetest"
	"agentrun.dev/internal/sandbox"
	restserver "agentrun.dev/internal/server/rest"
	"agentrun.dev/internal/storage/image"
)

// testNode is a manager with metrics.
type testNode struct {
	t       *testing.T
	host    *nodetest.Host
	metrics *Metrics
	manager *node.Manager
}

const mib = 1 << 20

func newNode(t *testing.T) *testNode {
	n := &testNode{t: t, host: nodetest.NewHost(t), metrics: New("v1.2.3", "fake")}
	var err error
	n.manager, err = node.Open(t.Context(), node.Config{
		Dir: t.TempDir(), Engine: n.host, Builder: &managertest.Builder{Workdir: sandbox.DefaultWorkdir}, Capacity: 4096 * mib, Boot: "this",
		Log: slog.New(slog.DiscardHandler), Observer: n.metrics,
	})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := n.manager.Close(); err != nil {
			t.Error(err)
		}
	})
	n.metrics.Watch(n.manager)
	return n
}

func key(name string) sandbox.Key {
	return sandbox.Key{Namespace: sandbox.DefaultNamespace, Name: sandbox.Name(name)}
}

// pool makes a pool and waits until its sandboxes wait.
func (n *testNode) pool(name string, replicas int) {
	n.t.Helper()
	if _, err := n.manager.ApplyTemplate(n.t.Context(), key("t"), sandbox.TemplateSpec{Image: "x", Memory: 64 * mib, MilliCPUs: 1000}); err != nil {
		n.t.Fatal(err)
	}
	if _, err := n.manager.ApplyPool(n.t.Context(), key(name), sandbox.PoolSpec{Template: "t", Replicas: replicas}); err != nil {
		n.t.Fatal(err)
	}
	if err := n.manager.WaitPool(n.t.Context(), key(name)); err != nil {
		n.t.Fatal(err)
	}
	n.eventually(func() bool {
		_, st, err := n.manager.Pool(n.t.Context(), key(name))
		return err == nil && st.Ready == replicas
	})
}

// eventually waits for a condition that no event reports.
func (n *testNode) eventually(is func() bool) {
	n.t.Helper()
	tick := time.NewTicker(time.Millisecond)
	defer tick.Stop()
	for !is() {
		select {
		case <-tick.C:
		case <-n.t.Context().Done():
			n.t.Fatal("it never was")
		}
	}
}

// families are the metrics of a scrape, by name.
type families map[string]*dto.MetricFamily

func (n *testNode) scrape() families {
	n.t.Helper()
	w := httptest.NewRecorder()
	n.metrics.Handler().ServeHTTP(w, httptest.NewRequestWithContext(n.t.Context(), http.MethodGet, "/metrics", nil))
	if w.Code != http.StatusOK {
		n.t.Fatalf("answered %d: %s", w.Code, w.Body)
	}
	parser := expfmt.NewTextParser(model.UTF8Validation)
	found, err := parser.TextToMetricFamilies(w.Body)
	if err != nil {
		n.t.Fatal(err)
	}
	return found
}

// value is that of the series whose labels include these; a histogram's is its
// count. There is exactly one such series.
func (f families) value(t *testing.T, name string, labels ...string) float64 {
	t.Helper()
	var found []*dto.Metric
	for _, m := range f[name].GetMetric() {
		have := map[string]string{}
		for _, l := range m.GetLabel() {
			have[l.GetName()] = l.GetValue()
		}
		same := true
		for i := 0; i < len(labels); i += 2 {
			same = same && have[labels[i]] == labels[i+1]
		}
		if same {
			found = append(found, m)
		}
	}
	if len(found) != 1 {
		t.Fatalf("%s%v has %d series", name, labels, len(found))
	}
	m := found[0]
	return m.GetGauge().GetValue() + m.GetCounter().GetValue() + float64(m.GetHistogram().GetSampleCount())
}

// TestValues: each metric says what happened.
func TestValues(t *testing.T) {
	n := newNode(t)
	n.pool("agents", 2)
	ctx := t.Context()
	if _, err := n.manager.ApplyTemplate(ctx, key("broken"), sandbox.TemplateSpec{Image: "broken", Memory: 64 * mib, MilliCPUs: 1000}); err != nil {
		t.Fatal(err)
	}
	for _, name := range []string{"one", "two"} {
		if _, _, err := n.manager.Claim(ctx, sandbox.ClaimRequest{Key: key(name), Spec: sandbox.ClaimSpec{Pool: "agents"}}); err != nil {
			t.Fatal(err)
		}
	}
	if _, _, err := n.manager.Claim(ctx, sandbox.ClaimRequest{Key: key("one"), Spec: sandbox.ClaimSpec{Pool: "agents"}}); !sandbox.HasCode(err, sandbox.CodeExists) {
		t.Fatalf("claimed twice: %v", err)
	}
	if _, _, err := n.manager.Fork(ctx, sandbox.ForkRequest{Key: key("try"), Spec: sandbox.ForkSpec{Source: "one", Replicas: 2}}); err != nil {
		t.Fatal(err)
	}
	if _, _, err := n.manager.Fork(ctx, sandbox.ForkRequest{Key: key("many"), Spec: sandbox.ForkSpec{Source: "one", Replicas: 1000}}); err != nil { // some do not fit
		t.Fatal(err)
	}
	if _, err := n.manager.Kill(ctx, key("two")); err != nil {
		t.Fatal(err)
	}
	if _, err := n.manager.Hibernate(ctx, key("one")); err != nil {
		t.Fatal(err)
	}
	u, err := n.manager.Use(ctx, key("try-1"))
	if err != nil {
		t.Fatal(err)
	}
	_, end := n.metrics.Begin(ctx, u.Record().Work(sandbox.OpExec))
	if got := n.scrape().value(t, "agentrun_operations_in_progress", "operation", "exec"); got != 1 {
		t.Errorf("%v execs are under way, not 1", got)
	}
	end(sandbox.Outcome{})
	u.Close()
	n.eventually(func() bool { return n.manager.Overview().Builds == 0 })
	n.metrics.Pulled(image.Pulled{Took: time.Second, Bytes: 4096})

	f := n.scrape()
	live := 0.0
	for _, s := range f["agentrun_fork_children_total"].GetMetric() {
		live += s.GetCounter().GetValue()
	}
	if live < 3 {
		t.Errorf("%v children", live)
	}
	for _, want := range []struct {
		value  float64
		name   string
		labels []string
	}{
		{2, "agentrun_claim_duration_seconds", []string{"pool", "agents", "engine", "fake", "result", "ok"}},
		{1, "agentrun_claim_duration_seconds", []string{"result", "already_exists"}},
		{2, "agentrun_fork_duration_seconds", []string{"kind", "live", "result", "ok"}},
		{2, "agentrun_live_fork_pause_seconds", nil},
		{2, "agentrun_live_fork_write_stall_seconds", nil},
		{1, "agentrun_sandbox_ends_total", []string{"reason", "killed"}},
		{1, "agentrun_hibernation_duration_seconds", []string{"operation", "hibernate", "result", "ok"}},
		{1, "agentrun_operations_total", []string{"operation", "exec", "result", "ok"}},
		{0, "agentrun_operations_in_progress", []string{"operation", "exec"}},
		{1, "agentrun_build_duration_seconds", []string{"stage", "Ready", "result", "ok"}},
		{1, "agentrun_build_duration_seconds", []string{"stage", "Ready", "result", "internal"}},
		{1, "agentrun_sandboxes", []string{"pool", "agents", "state", "Hibernated"}},
		{4096 * mib, "agentrun_capacity_bytes", nil},
		{0, "agentrun_builds_in_progress", nil},
		{2, "agentrun_pool_replicas", nil},
		{1, "agentrun_pool_phase", []string{"phase", "Ready"}},
		{1, "agentrun_build_info", []string{"version", "v1.2.3", "engine", "fake"}},
		{1, "agentrun_image_pull_duration_seconds", []string{"result", "ok"}},
		{4096, "agentrun_image_pull_bytes_total", nil},
	} {
		if got := f.value(t, want.name, want.labels...); got != want.value {
			t.Errorf("%s%v is %v, not %v", want.name, want.labels, got, want.value)
		}
	}
	for _, some := range []string{
		"agentrun_active_sandboxes", "agentrun_journal_write_duration_seconds", "agentrun_admission_refusals_total",
		"agentrun_reserved_bytes", "agentrun_memory_shared_bytes", "agentrun_memory_unique_bytes", "go_goroutines",
		"process_resident_memory_bytes",
	} {
		if f.value(t, some) == 0 {
			t.Errorf("%s is 0", some)
		}
	}
	// The host of these tests has 3 MiB of each machine's own, and 5 of others.
	machines := f.value(t, "agentrun_machines")
	if unique := f.value(t, "agentrun_memory_unique_bytes"); unique != machines*3*mib {
		t.Errorf("%v bytes are unique to %v machines", unique, machines)
	}
	if shared := f.value(t, "agentrun_memory_shared_bytes"); shared != machines*5*mib {
		t.Errorf("%v bytes are shared by %v machines", shared, machines)
	}
}

// TestLabels: however many sandboxes there are, the series are as many as before,
// and none of their labels has the name or the id of one.
func TestLabels(t *testing.T) {
	n := newNode(t)
	n.pool("agents", 2)
	round := func(i int) {
		name := fmt.Sprintf("sandbox-%d", i)
		s, _, err := n.manager.Claim(t.Context(), sandbox.ClaimRequest{Key: key(name), Spec: sandbox.ClaimSpec{Pool: "agents"}})
		if err != nil {
			t.Fatal(err)
		}
		if _, _, err := n.manager.Fork(t.Context(), sandbox.ForkRequest{Key: key("fork-" + name), Spec: sandbox.ForkSpec{Source: s.Name, Replicas: 1}}); err != nil {
			t.Fatal(err)
		}
		for _, k := range []sandbox.Key{s.Key, key("fork-" + name + "-1")} {
			if _, err := n.manager.Kill(t.Context(), k); err != nil {
				t.Fatal(err)
			}
		}
		// A pool that does not exist has no series.
		if _, _, err := n.manager.Claim(t.Context(), sandbox.ClaimRequest{Key: key(name), Spec: sandbox.ClaimSpec{Pool: sandbox.Name("pool-" + name)}}); err == nil {
			t.Fatal("claimed of a pool that does not exist")
		}
	}
	series := func(f families) (all []string) {
		for name, family := range f {
			if !strings.HasPrefix(name, namespace+"_") {
				continue
			}
			for _, m := range family.GetMetric() {
				var labels []string
				for _, l := range m.GetLabel() {
					if !slices.Contains(allowedLabels, l.GetName()) {
						t.Errorf("%s has the label %s", name, l.GetName())
					}
					if strings.Contains(l.GetValue(), "sandbox-") {
						t.Errorf("%s has a label %s=%s", name, l.GetName(), l.GetValue())
					}
					labels = append(labels, l.GetName()+"="+l.GetValue())
				}
				all = append(all, name+"{"+strings.Join(labels, ",")+"}")
			}
		}
		return all
	}
	// Whether a claim finds one that waits is chance: each way has its series.
	for i := range 50 {
		round(i)
	}
	before := series(n.scrape())
	for i := 50; i < 250; i++ {
		round(i)
	}
	after := series(n.scrape())
	for _, s := range after {
		if !slices.Contains(before, s) && !strings.Contains(s, "claim_duration") {
			t.Errorf("%s is new", s)
		}
	}
	if len(after) > len(before)+1 {
		t.Errorf("%d series, %d before", len(after), len(before))
	}
}

// allowedLabels are all that there may be.
var allowedLabels = []string{
	"namespace", "pool", "engine", "kind", "result", "source", "operation", "reason", "state", "phase",
	"stage", "route", "method", "code", "version", "goversion", "work",
}

// TestForget: pools that come and go leave nothing, and are seen before they do.
func TestForget(t *testing.T) {
	n := newNode(t)
	for i := range 20 {
		name := fmt.Sprintf("pool-%d", i)
		n.pool(name, 1)
		s, _, err := n.manager.Claim(t.Context(), sandbox.ClaimRequest{Key: key("s"), Spec: sandbox.ClaimSpec{Pool: sandbox.Name(name)}})
		if err != nil {
			t.Fatal(err)
		}
		if err := n.manager.DeletePool(t.Context(), key(name)); err != nil {
			t.Fatal(err)
		}
		if _, err := n.manager.Kill(t.Context(), s.Key); err != nil {
			t.Fatal(err)
		}
		if got := n.scrape().value(t, "agentrun_sandbox_ends_total", "pool", name); got != 1 {
			t.Errorf("%v ends of %s", got, name)
		}
	}
	for range goneFor + 1 {
		n.scrape()
	}
	for name, family := range n.scrape() {
		for _, m := range family.GetMetric() {
			for _, l := range m.GetLabel() {
				if l.GetName() == labelPool {
					t.Errorf("%s still has pool %s", name, l.GetValue())
				}
			}
		}
	}
}

// TestRequests: requests are counted by route, class and code, whatever paths
// and methods clients make up.
func TestRequests(t *testing.T) {
	n := newNode(t)
	cfg, key := managertest.Config(t, n.manager)
	cfg.Work = n.metrics
	h := restserver.New(restserver.Config{Config: cfg, Observer: n.metrics, Metrics: n.metrics.Handler()})
	good := "Bearer " + key
	get := func(method, path, token string) *httptest.ResponseRecorder {
		r := httptest.NewRequestWithContext(t.Context(), method, path, nil)
		if token != "" {
			r.Header.Set("Authorization", token)
		}
		w := httptest.NewRecorder()
		h.ServeHTTP(w, r)
		return w
	}
	if w := get("GET", "/metrics", ""); w.Code != http.StatusUnauthorized || strings.Contains(w.Body.String(), "agentrun_") {
		t.Errorf("metrics for anybody: %d", w.Code)
	}
	if w := get("GET", "/metrics", good); w.Code != http.StatusOK || !strings.Contains(w.Body.String(), "agentrun_capacity_bytes") {
		t.Errorf("metrics: %d %s", w.Code, w.Body)
	}
	get("GET", "/v1/version", good)
	for i := range 30 {
		get(fmt.Sprintf("METHOD%d", i), fmt.Sprintf("/nothing/%d", i), good)
		get("GET", fmt.Sprintf("/v1/namespaces/default/sandboxes/s%d", i), good)
	}
	f := n.scrape()
	for _, want := range []struct {
		value  float64
		name   string
		labels []string
	}{
		{1, "agentrun_http_request_duration_seconds", []string{"route", "/v1/version", "method", "GET", "code", "2xx"}},
		{30, "agentrun_http_request_duration_seconds", []string{"route", "/v1/namespaces/{namespace}/sandboxes/{name}", "code", "4xx"}},
		{30, "agentrun_http_request_duration_seconds", []string{"route", "", "method", "other"}},
		{30, "agentrun_http_request_errors_total", []string{"route", "", "code", "not_found"}},
		{30, "agentrun_http_request_errors_total", []string{"route", "/v1/namespaces/{namespace}/sandboxes/{name}", "code", "not_found"}},
		{0, "agentrun_http_requests_in_flight", nil},
	} {
		if got := f.value(t, want.name, want.labels...); got != want.value {
			t.Errorf("%s%v is %v, not %v", want.name, want.labels, got, want.value)
		}
	}
}
