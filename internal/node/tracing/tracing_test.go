package tracing

import (
	"compress/gzip"
	"encoding/hex"
	"io"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync"
	"testing"

	collector "go.opentelemetry.io/proto/otlp/collector/trace/v1"
	tracepb "go.opentelemetry.io/proto/otlp/trace/v1"
	"google.golang.org/protobuf/proto"

	"agentrun.dev/internal/node"
	"agentrun.dev/internal/node/managertest"
	"agentrun.dev/internal/node/nodetest"
	"agentrun.dev/internal/sandbox"
	restserver "agentrun.dev/internal/server/rest"
)

// receiver is a collector: OTLP over HTTP.
type receiver struct {
	t *testing.T

	mu      sync.Mutex // protects all following fields
	spans   []*tracepb.Span
	service string
}

func (c *receiver) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	in := io.Reader(r.Body)
	if r.Header.Get("Content-Encoding") == "gzip" {
		z, err := gzip.NewReader(r.Body)
		if err != nil {
			c.t.Error(err)
			return
		}
		in = z
	}
	body, err := io.ReadAll(in)
	var got collector.ExportTraceServiceRequest
	if err != nil || r.URL.Path != "/v1/traces" || proto.Unmarshal(body, &got) != nil {
		c.t.Errorf("%s: %d bytes, %v", r.URL.Path, len(body), err)
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	for _, resource := range got.ResourceSpans {
		for _, a := range resource.Resource.Attributes {
			if a.Key == "service.name" {
				c.service = a.Value.GetStringValue()
			}
		}
		for _, scope := range resource.ScopeSpans {
			c.spans = append(c.spans, scope.Spans...)
		}
	}
	w.Header().Set("Content-Type", "application/x-protobuf")
}

// span is the one with a name.
func (c *receiver) span(name string) *tracepb.Span {
	c.t.Helper()
	c.mu.Lock()
	defer c.mu.Unlock()
	var found []*tracepb.Span
	var names []string
	for _, s := range c.spans {
		names = append(names, s.Name)
		if s.Name == name {
			found = append(found, s)
		}
	}
	if len(found) != 1 {
		c.t.Fatalf("%d spans are %q, of %q", len(found), name, names)
	}
	return found[0]
}

func text(s *tracepb.Span, key string) string {
	for _, a := range s.Attributes {
		if a.Key == key {
			return a.Value.GetStringValue()
		}
	}
	return ""
}

// TestSpans: a request with a traceparent is a span of the client's trace, its
// work is below it, and a collector gets all of it.
func TestSpans(t *testing.T) {
	got := &receiver{t: t}
	front := httptest.NewServer(got)
	t.Cleanup(front.Close)
	t.Setenv("OTEL_EXPORTER_OTLP_ENDPOINT", front.URL)
	if !Configured() {
		t.Fatal("it is not configured")
	}
	quiet := slog.New(slog.DiscardHandler)
	tracer, err := Open(t.Context(), "v1.2.3", "fake", quiet)
	if err != nil {
		t.Fatal(err)
	}
	host := nodetest.NewHost(t)
	host.Execs = true
	m, err := node.Open(t.Context(), node.Config{
		Dir: t.TempDir(), Engine: host, Builder: &managertest.Builder{Workdir: "/"}, Capacity: 1 << 40, Boot: "this", Log: quiet, Observer: tracer,
	})
	if err != nil {
		t.Fatal(err)
	}
	cfg, key := managertest.Config(t, m)
	cfg.Work = tracer
	h := restserver.New(restserver.Config{Config: cfg, Observer: tracer})
	const traceID, parentID = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
	request := func(method, path, body, parent string, status int) {
		t.Helper()
		r := httptest.NewRequestWithContext(t.Context(), method, path, strings.NewReader(body))
		r.Header.Set("Content-Type", "application/json")
		r.Header.Set("Authorization", "Bearer "+key)
		if parent != "" {
			r.Header.Set("traceparent", parent)
		}
		w := httptest.NewRecorder()
		h.ServeHTTP(w, r)
		if w.Code != status {
			t.Fatalf("%s %s: %d %s", method, path, w.Code, w.Body)
		}
	}
	const v1 = "/v1/namespaces/default"
	request("PUT", v1+"/templates/t", `{"image": "x"}`, "", 200)
	request("PUT", v1+"/pools/p", `{"template": "t", "replicas": 0}`, "", 200)
	if err := m.WaitPool(t.Context(), sandbox.Key{Namespace: "default", Name: "p"}); err != nil {
		t.Fatal(err)
	}
	request("POST", v1+"/sandboxes", `{"name": "s", "pool": "p"}`, "00-"+traceID+"-"+parentID+"-01", 201)
	request("POST", v1+"/sandboxes/s/execs", `{"argv": ["true"]}`, "", 200)
	request("POST", v1+"/sandboxes/s/forks", `{"name": "f", "replicas": 2}`, "garbage", 201)
	request("GET", v1+"/sandboxes/nobody", "", "", 404)
	if err := m.Close(); err != nil {
		t.Fatal(err)
	}
	if err := tracer.Close(t.Context()); err != nil {
		t.Fatal(err)
	}

	if got.service != "agentrun" {
		t.Errorf("the service is %q", got.service)
	}
	create, claim, fork := got.span("POST "+v1Route+"/sandboxes"), got.span("claim"), got.span("fork")
	if hex.EncodeToString(create.TraceId) != traceID || hex.EncodeToString(create.ParentSpanId) != parentID || create.Kind != tracepb.Span_SPAN_KIND_SERVER {
		t.Errorf("the request is %v", create)
	}
	if string(claim.ParentSpanId) != string(create.SpanId) || string(fork.ParentSpanId) != string(claim.SpanId) || string(fork.TraceId) != string(create.TraceId) {
		t.Errorf("the claim is %v, its fork %v", claim, fork)
	}
	if text(claim, "agentrun.pool") != "p" || text(claim, "agentrun.namespace") != "default" || text(claim, "agentrun.engine") != "fake" {
		t.Errorf("the claim is %v", claim)
	}
	for below, above := range map[string]string{
		"exec": "POST " + v1Route + "/sandboxes/{name}/execs", "live_fork": "POST " + v1Route + "/sandboxes/{name}/forks",
	} {
		if string(got.span(below).ParentSpanId) != string(got.span(above).SpanId) {
			t.Errorf("%s is not below %s", below, above)
		}
	}
	if s := got.span("POST " + v1Route + "/sandboxes/{name}/forks"); len(s.ParentSpanId) != 0 {
		t.Errorf("a traceparent that is none was taken: %v", s)
	}
	if s := got.span("GET " + v1Route + "/sandboxes/{name}"); text(s, "error.type") != "not_found" {
		t.Errorf("%v", s)
	}
	if s := got.span("build"); text(s, "agentrun.template") != "t" || len(s.ParentSpanId) != 0 {
		t.Errorf("%v", s)
	}
}

const v1Route = "/v1/namespaces/{namespace}"

// TestConfigured: without a collector, or when told not to, there is no tracer.
func TestConfigured(t *testing.T) {
	for _, name := range []string{"OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_SDK_DISABLED"} {
		t.Setenv(name, "")
	}
	if Configured() {
		t.Error("configured by nothing")
	}
	t.Setenv("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "http://127.0.0.1:1/v1/traces")
	if !Configured() {
		t.Error("not configured")
	}
	t.Setenv("OTEL_SDK_DISABLED", "true")
	if Configured() {
		t.Error("configured though it is disabled")
	}
}
