// Package tracing sends spans of a node's work to an OpenTelemetry collector:
// one for each request, and below it those of claims, forks and the work in
// sandboxes. The environment configures it, as the OpenTelemetry specification
// describes. Without such a configuration there is no tracer and no cost.
package tracing

import (
	"context"
	"fmt"
	"log/slog"
	"net/http"
	"os"
	"strings"
	"time"

	"go.opentelemetry.io/otel"
	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/codes"
	"go.opentelemetry.io/otel/exporters/otlp/otlptrace/otlptracehttp"
	"go.opentelemetry.io/otel/propagation"
	"go.opentelemetry.io/otel/sdk/resource"
	sdktrace "go.opentelemetry.io/otel/sdk/trace"
	"go.opentelemetry.io/otel/trace"

	"agentrun.dev/internal/sandbox"
	restserver "agentrun.dev/internal/server/rest"
)

// Configured reports whether the environment names a collector.
func Configured() bool {
	if strings.EqualFold(os.Getenv("OTEL_SDK_DISABLED"), "true") {
		return false
	}
	return os.Getenv("OTEL_EXPORTER_OTLP_ENDPOINT") != "" || os.Getenv("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT") != ""
}

// Tracer makes spans. It implements sandbox.Observer and restserver.Observer.
type Tracer struct {
	provider *sdktrace.TracerProvider
	tracer   trace.Tracer
	engine   attribute.KeyValue
}

var (
	_ sandbox.Observer    = (*Tracer)(nil)
	_ restserver.Observer = (*Tracer)(nil)
)

// Open makes a tracer that sends to the collector of the environment. If the
// collector cannot be reached, the tracer logs that, and delays no request.
func Open(ctx context.Context, version, engine string, log *slog.Logger) (*Tracer, error) {
	exporter, err := otlptracehttp.New(ctx)
	if err != nil {
		return nil, fmt.Errorf("open the exporter of traces: %w", err)
	}
	// The environment overrides our attributes.
	about, err := resource.New(ctx,
		resource.WithAttributes(attribute.String("service.name", "agentrun"), attribute.String("service.version", version)),
		resource.WithTelemetrySDK(), resource.WithFromEnv())
	if err != nil {
		return nil, fmt.Errorf("describe this daemon in traces: %w", err)
	}
	// Batches are sent in the background, and the library reports their errors
	// only here.
	otel.SetErrorHandler(otel.ErrorHandlerFunc(func(err error) { log.Warn("send traces", "error", err) }))
	p := sdktrace.NewTracerProvider(sdktrace.WithBatcher(exporter), sdktrace.WithResource(about))
	return &Tracer{provider: p, tracer: p.Tracer("agentrun.dev"), engine: attribute.String("agentrun.engine", engine)}, nil
}

// Close sends the remaining spans.
func (t *Tracer) Close(ctx context.Context) error {
	if err := t.provider.Shutdown(ctx); err != nil {
		return fmt.Errorf("send the last traces: %w", err)
	}
	return nil
}

// Request implements restserver.Observer. If the client sends a traceparent, the
// span of its request belongs to that trace.
func (t *Tracer) Request(r *http.Request) (context.Context, func(restserver.Answer)) {
	ctx := propagation.TraceContext{}.Extract(r.Context(), propagation.HeaderCarrier(r.Header))
	// The route is known only later.
	ctx, span := t.tracer.Start(ctx, "request", trace.WithSpanKind(trace.SpanKindServer))
	return ctx, func(a restserver.Answer) {
		name := a.Method
		if a.Route != "" {
			name += " " + a.Route
		}
		span.SetName(name)
		span.SetAttributes(
			attribute.String("http.request.method", a.Method), attribute.String("http.route", a.Route),
			attribute.Int("http.response.status_code", a.Status), attribute.Int64("http.response.body.size", a.Bytes))
		if a.Code != "" {
			span.SetAttributes(attribute.String("error.type", string(a.Code)))
		}
		if a.Status >= http.StatusInternalServerError {
			span.SetStatus(codes.Error, string(a.Code))
		}
		span.End()
	}
}

// Begin implements sandbox.Observer.
func (t *Tracer) Begin(ctx context.Context, w sandbox.Work) (context.Context, func(sandbox.Outcome)) {
	about := []attribute.KeyValue{t.engine}
	add := func(name, value string) {
		if value != "" {
			about = append(about, attribute.String("agentrun."+name, value))
		}
	}
	add("namespace", string(w.Pool.Namespace)+string(w.Template.Namespace)) // one of them is set
	add("pool", string(w.Pool.Name))
	add("template", string(w.Template.Name))
	add("stage", string(w.Stage))
	add("sandbox", string(w.Sandbox))
	ctx, span := t.tracer.Start(ctx, string(w.Op), trace.WithAttributes(about...))
	return ctx, func(out sandbox.Outcome) {
		switch w.Op {
		case sandbox.OpClaim:
			span.SetAttributes(attribute.Bool("agentrun.waited", out.Waited))
		case sandbox.OpLiveFork:
			span.SetAttributes(
				attribute.Int("agentrun.children", out.Children), attribute.Int("agentrun.failed", out.Failed),
				attribute.Int64("agentrun.pause_ns", out.Live.Pause.Nanoseconds()),
				attribute.Int64("agentrun.write_stall_ns", out.Live.LongestWait.Nanoseconds()))
		}
		if out.Err != nil {
			span.SetAttributes(attribute.String("error.type", out.Result()))
			span.SetStatus(codes.Error, out.Result())
		}
		span.End()
	}
}

// Ended implements sandbox.Observer. Ends, refusals and the journal are counted,
// and belong to no span.
func (*Tracer) Ended(sandbox.Key, sandbox.Reason) {}

// Refused implements sandbox.Observer.
func (*Tracer) Refused() {}

// Journaled implements sandbox.Observer.
func (*Tracer) Journaled(time.Duration) {}
