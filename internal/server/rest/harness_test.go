package rest

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"io"
	"net"
	"net/http"
	"net/url"
	"path/filepath"
	"strings"
	"testing"

	"github.com/getkin/kin-openapi/openapi3"
	"github.com/getkin/kin-openapi/openapi3filter"
	"github.com/getkin/kin-openapi/routers"
	"github.com/getkin/kin-openapi/routers/gorillamux"

	"agentrun.dev/api/rest"
	"agentrun.dev/internal/node/managertest"
)

// testNode is a daemon with its API on a Unix socket.
type testNode struct {
	*managertest.Node
	t      testing.TB
	socket string
	client *http.Client
	router routers.Router
	spec   *openapi3.T
}

func newNode(t testing.TB, change ...func(*Config)) *testNode {
	t.Helper()
	n := &testNode{Node: managertest.New(t), t: t, socket: filepath.Join(t.TempDir(), "s")}
	cfg := Config{Config: n.Config()}
	for _, c := range change {
		c(&cfg)
	}
	l, err := net.Listen("unix", n.socket)
	if err != nil {
		t.Fatal(err)
	}
	srv := HTTP(New(cfg), n.Log)
	served := make(chan error, 1)
	go func() { served <- srv.Serve(l) }()
	n.client = &http.Client{Transport: &http.Transport{DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
		return (&net.Dialer{}).DialContext(ctx, "unix", n.socket)
	}}}
	t.Cleanup(func() {
		n.client.CloseIdleConnections()
		if err := srv.Close(); err != nil {
			t.Error(err)
		}
		if err := <-served; !errors.Is(err, http.ErrServerClosed) {
			t.Error(err)
		}
	})
	n.spec, n.router = loadSpec(t)
	return n
}

// loadSpec reads the description of the API.
func loadSpec(t testing.TB) (*openapi3.T, routers.Router) {
	t.Helper()
	spec, err := openapi3.NewLoader().LoadFromFile(filepath.Join("..", "..", "..", "api", "openapi.yaml"))
	if err != nil {
		t.Fatal(err)
	}
	if err := spec.Validate(context.Background()); err != nil {
		t.Fatal(err)
	}
	router, err := gorillamux.NewRouter(spec)
	if err != nil {
		t.Fatal(err)
	}
	return spec, router
}

// response is an answer that conforms to the description.
type response struct {
	t      testing.TB
	status int
	header http.Header
	body   []byte
}

const v1 = "/v1/namespaces/default"

// request makes a request. A body that is neither nil, a string nor bytes is
// sent as JSON.
func (n *testNode) request(method, path string, body any, headers ...string) *http.Request {
	n.t.Helper()
	var reader io.Reader
	kind := "application/json"
	switch b := body.(type) {
	case nil:
	case string:
		reader = strings.NewReader(b)
	case []byte:
		reader, kind = bytes.NewReader(b), "application/octet-stream"
	default:
		data, err := json.Marshal(b)
		if err != nil {
			n.t.Fatal(err)
		}
		reader = bytes.NewReader(data)
	}
	r, err := http.NewRequestWithContext(n.t.Context(), method, "http://node"+path, reader)
	if err != nil {
		n.t.Fatal(err)
	}
	if reader != nil {
		r.Header.Set("Content-Type", kind)
	}
	for i := 0; i < len(headers); i += 2 {
		r.Header.Set(headers[i], headers[i+1])
	}
	return r
}

// do sends a request and checks the answer against the description.
func (n *testNode) do(method, path string, body any, headers ...string) *response {
	n.t.Helper()
	return n.send(n.request(method, path, body, headers...))
}

func (n *testNode) send(r *http.Request) *response {
	n.t.Helper()
	res, err := n.client.Do(r)
	if err != nil {
		n.t.Fatal(err)
	}
	defer res.Body.Close()
	out := &response{t: n.t, status: res.StatusCode, header: res.Header}
	if out.body, err = io.ReadAll(res.Body); err != nil {
		n.t.Fatalf("%s %s: %v", r.Method, r.URL, err)
	}
	n.conforms(r, out)
	return out
}

// conforms checks an answer against api/openapi.yaml.
func (n *testNode) conforms(r *http.Request, res *response) {
	n.t.Helper()
	if res.header.Get("X-Request-Id") == "" {
		n.t.Errorf("%s %s: no request id", r.Method, r.URL)
	}
	kind, _, _ := strings.Cut(res.header.Get("Content-Type"), ";")
	if res.status >= 400 {
		var e rest.Error
		if kind != "application/json" || json.Unmarshal(res.body, &e) != nil || e.Message == "" {
			n.t.Errorf("%s %s: %d without an error object: %s", r.Method, r.URL, res.status, res.body)
		}
	}
	route, params, err := n.router.FindRoute(r)
	if err != nil {
		if res.status < 400 {
			n.t.Errorf("%s %s: answered %d, but it is not described: %v", r.Method, r.URL, res.status, err)
		}
		return
	}
	if kind == formNDJSON || kind == formSSE {
		schema := route.Operation.Responses.Status(res.status).Value.Content[kind].Schema.Value
		for _, event := range lines(kind, res.body) {
			var value any
			if err := json.Unmarshal(event, &value); err != nil {
				n.t.Errorf("event %s: %v", event, err)
			} else if err := schema.VisitJSON(value); err != nil {
				n.t.Errorf("event %s: %v", event, err)
			}
		}
		return
	}
	err = openapi3filter.ValidateResponse(n.t.Context(), &openapi3filter.ResponseValidationInput{
		RequestValidationInput: &openapi3filter.RequestValidationInput{Request: r, Route: route, PathParams: params},
		Status:                 res.status, Header: res.header, Body: io.NopCloser(bytes.NewReader(res.body)),
		Options: &openapi3filter.Options{IncludeResponseStatus: true, AuthenticationFunc: openapi3filter.NoopAuthenticationFunc},
	})
	if err != nil {
		n.t.Errorf("%s %s: %d %s: %v", r.Method, r.URL, res.status, res.body, err)
	}
}

// lines are the JSON objects of a stream.
func lines(kind string, body []byte) (out [][]byte) {
	for line := range bytes.Lines(body) {
		if kind == formSSE {
			var ok bool
			if line, ok = bytes.CutPrefix(line, []byte("data: ")); !ok {
				continue
			}
		}
		out = append(out, bytes.TrimSpace(line))
	}
	return out
}

// ok requires a status.
func (r *response) ok(status int) *response {
	r.t.Helper()
	if r.status != status {
		r.t.Fatalf("answered %d, not %d: %s", r.status, status, r.body)
	}
	return r
}

// refused requires an error.
func (r *response) refused(status int, code string) rest.Error {
	r.t.Helper()
	var e rest.Error
	if err := json.Unmarshal(r.body, &e); err != nil || r.status != status || string(e.Code) != code {
		r.t.Errorf("answered %d, not %d %s: %s", r.status, status, code, r.body)
	}
	return e
}

// as reads an answer.
func as[T any](r *response) (v T) {
	r.t.Helper()
	if err := json.Unmarshal(r.body, &v); err != nil {
		r.t.Fatalf("%s: %v", r.body, err)
	}
	return v
}

// stream reads the events of an answer.
func stream[T any](r *response) (out []T) {
	r.t.Helper()
	kind, _, _ := strings.Cut(r.header.Get("Content-Type"), ";")
	for _, line := range lines(kind, r.body) {
		var v T
		if err := json.Unmarshal(line, &v); err != nil {
			r.t.Fatalf("%s: %v", line, err)
		}
		out = append(out, v)
	}
	return out
}

// setUp makes a template and a pool that is ready.
func (n *testNode) setUp() {
	n.t.Helper()
	n.do("PUT", v1+"/templates/python", rest.TemplateSpec{Image: "python"}).ok(200)
	n.do("PUT", v1+"/pools/pool", rest.PoolSpec{Template: "python", Replicas: 1}).ok(200)
	n.do("GET", v1+"/templates/python/log", nil).ok(200) // until it is built
	n.Eventually(func() bool {
		return as[rest.Pool](n.do("GET", v1+"/pools/pool", nil).ok(200)).Ready == 1
	})
}

// claim makes a sandbox and returns its path.
func (n *testNode) claim(name string) string {
	n.t.Helper()
	n.do("POST", v1+"/sandboxes", rest.SandboxCreate{Name: name, Pool: "pool"}).ok(201)
	return v1 + "/sandboxes/" + name
}

func query(pairs ...string) string {
	v := url.Values{}
	for i := 0; i < len(pairs); i += 2 {
		v.Set(pairs[i], pairs[i+1])
	}
	return "?" + v.Encode()
}

func ptr[T any](v T) *T { return &v }

// streamText returns the text of one output in a stream, checked for gaps.
func streamText(t *testing.T, events []rest.ExecEvent, kind rest.ExecEventType, from int64) string {
	t.Helper()
	var all []byte
	for _, e := range events {
		if e.Type != kind {
			continue
		}
		if *e.Offset != from+int64(len(all)) {
			t.Errorf("%s goes on at %d, not at %d", kind, *e.Offset, from+int64(len(all)))
		}
		data, err := decoded("data", e.Data, e.Encoding)
		if err != nil {
			t.Fatal(err)
		}
		all = append(all, data...)
	}
	return string(all)
}

func last[T any](t *testing.T, events []T) T {
	t.Helper()
	if len(events) == 0 {
		t.Fatal("there is no event")
	}
	return events[len(events)-1]
}
