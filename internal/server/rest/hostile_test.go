package rest

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"log/slog"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/getkin/kin-openapi/openapi3"

	"agentrun.dev/api/rest"
	"agentrun.dev/internal/node/managertest"
	"agentrun.dev/internal/sandbox"
	"agentrun.dev/internal/server"
)

// TestHostileBodies: each gets the right refusal, with the reason.
func TestHostileBodies(t *testing.T) {
	n := newNode(t)
	n.setUp()
	n.claim("a")
	const pool = v1 + "/pools/x"
	for name, c := range map[string]struct {
		method, path string
		body         any
		headers      []string
		status       int
		code, says   string
	}{
		"no body":              {"PUT", pool, nil, nil, 415, "unsupported_media_type", ""},
		"a form":               {"PUT", pool, "{}", []string{"Content-Type", "application/x-www-form-urlencoded"}, 415, "unsupported_media_type", "curl"},
		"empty":                {"PUT", pool, "", nil, 400, "invalid", "JSON"},
		"not JSON":             {"PUT", pool, "template: x", nil, 400, "invalid", "JSON"},
		"half":                 {"PUT", pool, `{"template":`, nil, 400, "invalid", "JSON"},
		"a list":               {"PUT", pool, `[]`, nil, 400, "invalid", "JSON"},
		"two":                  {"PUT", pool, `{"template":"python","replicas":1}{}`, nil, 400, "invalid", "after"},
		"an unknown field":     {"PUT", pool, `{"template":"python","replicsa":1}`, nil, 400, "invalid", "replicsa"},
		"a field inside":       {"PUT", v1 + "/templates/x", `{"image":"x","ready":{"prot":1}}`, nil, 400, "invalid", "prot"},
		"a wrong type":         {"PUT", pool, `{"template":"python","replicas":"1"}`, nil, 400, "invalid", "replicas"},
		"a wrong type inside":  {"PUT", v1 + "/templates/x", `{"image":"x","ready":{"port":"http"}}`, nil, 400, "invalid", "ready.port"},
		"a number too large":   {"PUT", v1 + "/templates/x", `{"image":"x","memory":1e30}`, nil, 400, "invalid", "memory"},
		"a negative size":      {"PUT", v1 + "/templates/x", `{"image":"x","memory":-5}`, nil, 400, "invalid", "memory"},
		"a negative disk":      {"PUT", v1 + "/templates/x", `{"image":"x","disk":-5}`, nil, 400, "invalid", "disk"},
		"a tiny disk":          {"PUT", v1 + "/templates/x", `{"image":"x","disk":5}`, nil, 400, "invalid", "resources.disk"},
		"too little memory":    {"PUT", v1 + "/templates/x", `{"image":"x","memory":5}`, nil, 400, "invalid", "memory"},
		"no image":             {"PUT", v1 + "/templates/x", `{}`, nil, 400, "invalid", "image"},
		"a port too large":     {"PUT", v1 + "/templates/x", `{"image":"x","ready":{"port":65536}}`, nil, 400, "invalid", "ready.port"},
		"two ready checks":     {"PUT", v1 + "/templates/x", `{"image":"x","ready":{"port":1,"command":"x"}}`, nil, 400, "invalid", "ready"},
		"NUL":                  {"PUT", v1 + "/templates/x", `{"image":"a\u0000b"}`, nil, 400, "invalid", "NUL"},
		"an escaped backslash": {"PUT", v1 + "/templates/y", `{"image":"a\\u0000b"}`, nil, 200, "", ""},
		"a raw NUL":            {"PUT", v1 + "/templates/x", "{\"image\":\"a\x00b\"}", nil, 400, "invalid", "JSON"},
		"invalid UTF-8":        {"PUT", v1 + "/templates/x", "{\"image\":\"a\xffb\"}", nil, 400, "invalid", "UTF-8"},
		"nested without end":   {"PUT", pool, strings.Repeat("[", 1<<19), nil, 400, "invalid", "JSON"},
		"huge":                 {"PUT", pool, `{"template":"` + strings.Repeat("x", 2<<20) + `"}`, nil, 413, "too_large", "bytes"},
		"a huge exec":          {"POST", v1 + "/sandboxes/a/execs", `{"shell":"` + strings.Repeat("x", maxExecBody) + `"}`, nil, 413, "too_large", "bytes"},
		"a huge terminal":      {"POST", v1 + "/sandboxes/a/terminal", `{"argv":["` + strings.Repeat("x", maxTerminalBody) + `"]}`, nil, 413, "too_large", "bytes"},
		"huge code":            {"POST", v1 + "/sandboxes/a/code", `{"code":"` + strings.Repeat("x", 17<<20) + `"}`, nil, 413, "too_large", "file"},
		"a name that climbs":   {"PUT", pool, `{"template":"../x","replicas":1}`, nil, 400, "invalid", "name"},
		"a pool that climbs":   {"POST", v1 + "/sandboxes", `{"pool":"../x"}`, nil, 400, "invalid", "name"},
		"a sandbox that does":  {"POST", v1 + "/sandboxes", `{"pool":"pool","name":"a/b"}`, nil, 400, "invalid", "name"},
		"a fork that does":     {"POST", v1 + "/sandboxes/a/forks", `{"name":"..","replicas":1}`, nil, 400, "invalid", "name"},
		"a checkpoint too":     {"POST", v1 + "/sandboxes/a/checkpoints", `{"name":"../x"}`, nil, 400, "invalid", "name"},
		"a restored one":       {"POST", v1 + "/checkpoints/c/restore", `{"name":"A"}`, nil, 400, "invalid", "name"},
		"a restore's field":    {"POST", v1 + "/checkpoints/c/restore", `{"pool":"pool"}`, nil, 400, "invalid", "pool"},
		"a restore's timeout":  {"POST", v1 + "/checkpoints/c/restore", `{"timeout":"never"}`, nil, 400, "invalid", "timeout"},
		"a restore's variable": {"POST", v1 + "/checkpoints/c/restore", `{"env":{"A B":"c"}}`, nil, 400, "invalid", "A B"},
		"too many forks":       {"POST", v1 + "/sandboxes/a/forks", `{"replicas":100000}`, nil, 400, "invalid", "replicas"},
		"a negative timeout":   {"POST", v1 + "/sandboxes", `{"pool":"pool","timeout":"-1s"}`, nil, 400, "invalid", "timeout"},
		"a number as timeout":  {"POST", v1 + "/sandboxes", `{"pool":"pool","timeout":60}`, nil, 400, "invalid", "timeout"},
		"an unknown action":    {"POST", v1 + "/sandboxes", `{"pool":"pool","onTimeout":"explode"}`, nil, 400, "invalid", "onTimeout"},
		"too much metadata":    {"POST", v1 + "/sandboxes", `{"pool":"pool","metadata":{"k":"` + strings.Repeat("x", 5000) + `"}}`, nil, 400, "invalid", "metadata"},
		"a bad variable":       {"POST", v1 + "/sandboxes", `{"pool":"pool","env":{"A B":"c"}}`, nil, 400, "invalid", "A B"},
		"two query values":     {"GET", v1 + "/pools?limit=1&limit=2", nil, nil, 400, "invalid", "limit"},
		"no number":            {"GET", v1 + "/pools?limit=many", nil, nil, 400, "invalid", "limit"},
		"limit 0":              {"GET", v1 + "/pools?limit=0", nil, nil, 400, "invalid", "limit"},
		"limit 1001":           {"GET", v1 + "/pools?limit=1001", nil, nil, 400, "invalid", "limit"},
		"a query with NUL":     {"GET", v1 + "/pools?after=%00", nil, nil, 400, "invalid", "NUL"},
		"a broken query":       {"GET", v1 + "/pools?after=%zz", nil, nil, 400, "invalid", "query"},
		"another method":       {"PATCH", pool, `{}`, nil, 405, "method_not_allowed", "PATCH"},
		"nothing there":        {"GET", "/v2/pools", nil, nil, 404, "not_found", "/v2/pools"},
		"the root":             {"GET", "/", nil, nil, 404, "not_found", ""},
	} {
		t.Run(name, func(t *testing.T) {
			n := *n
			n.t = t
			res := n.do(c.method, c.path, c.body, c.headers...)
			if c.code == "" {
				res.ok(c.status)
				return
			}
			e := res.refused(c.status, c.code)
			if all := e.Message + e.Cause + e.Remediation; !strings.Contains(all, c.says) || len(all) > 600 {
				t.Errorf("%s", all)
			}
		})
	}
}

// TestHostileEverywhere: every route with a body or a query refuses invalid
// ones, routes that come later included.
func TestHostileEverywhere(t *testing.T) {
	n := newNode(t)
	n.setUp()
	n.claim("a")
	bodies := map[string]struct {
		text, kind string
		status     int
		code       string
	}{
		"no JSON":        {"key: value", "application/json", 400, "invalid"},
		"half":           {`{"a":`, "application/json", 400, "invalid"},
		"a list":         {`[]`, "application/json", 400, "invalid"},
		"a number":       {`7`, "application/json", 400, "invalid"},
		"unknown field":  {`{"nope":1}`, "application/json", 400, "invalid"},
		"nested":         {strings.Repeat(`{"a":`, 1<<16), "application/json", 400, "invalid"},
		"a raw NUL":      {"{\"a\x00\":1}", "application/json", 400, "invalid"},
		"not UTF-8":      {"{\"\xff\":1}", "application/json", 400, "invalid"},
		"a form":         {"a=b", "application/x-www-form-urlencoded", 415, "unsupported_media_type"},
		"no type":        {"{}", "", 415, "unsupported_media_type"},
		"a broken type":  {"{}", "application/json; charset", 415, "unsupported_media_type"},
		"larger than is": {`{"` + strings.Repeat("x", maxCodeBody) + `":1}`, "application/json", 413, "too_large"},
	}
	good := strings.NewReplacer("{namespace}", "default", "{name}", "a", "{id}", "x", "{port}", "80")
	takesBody, takesQuery := 0, 0
	operations(n.spec, func(method, path string, op *openapi3.Operation, item *openapi3.PathItem) {
		if op.RequestBody != nil && op.RequestBody.Value.Content["application/json"] != nil {
			takesBody++
			for name, c := range bodies {
				r := n.request(method, good.Replace(path), c.text)
				r.Header.Set("Content-Type", c.kind)
				res := n.send(r)
				if e := as[rest.Error](res); res.status != c.status || string(e.Code) != c.code || len(e.Message+e.Cause) > 400 {
					t.Errorf("%s, %s: %d %s", op.OperationID, name, res.status, res.body)
				}
			}
		}
		for _, p := range append(slices.Clone(item.Parameters), op.Parameters...) {
			if p.Value.In != "query" {
				continue
			}
			takesQuery++
			for name, value := range map[string]string{"NUL": "%00", "not UTF-8": "%ff", "an escape": "%zz", "twice": "1&" + p.Value.Name + "=1"} {
				r := n.request(method, good.Replace(path)+"?"+p.Value.Name+"="+value, nil)
				if e := as[rest.Error](n.send(r)); e.Code != rest.ErrorCodeInvalid {
					t.Errorf("%s, %s with %s: %+v", op.OperationID, p.Value.Name, name, e)
				}
			}
		}
	})
	if takesBody < 13 || takesQuery < 30 {
		t.Errorf("%d routes with bodies, %d parameters", takesBody, takesQuery)
	}
	n.do("GET", v1+"/sandboxes/a", nil).ok(200)
}

// operations calls f with every route that is described.
func operations(spec *openapi3.T, f func(method, path string, op *openapi3.Operation, item *openapi3.PathItem)) {
	for path, item := range spec.Paths.Map() {
		for method, op := range item.Operations() {
			f(method, path, op, item)
		}
	}
}

// TestHostilePaths: in no route can a name or an id be anything else, and no
// route has a query parameter that it ignores.
func TestHostilePaths(t *testing.T) {
	n := newNode(t)
	good := map[string]string{"{namespace}": "default", "{name}": "a", "{id}": "x", "{port}": "80"}
	evil := []string{
		"..", ".", "../..", "..%2f..", "%2e%2e", "%2e%2e%2f", "a%00", "a%2fb", "%41", "a%20b", "%ff", "a//b", "",
		"A", "-a", "a-", "a_b", strings.Repeat("a", 64), "a%0ab", "a;b",
	}
	tried := 0
	operations(n.spec, func(method, path string, _ *openapi3.Operation, _ *openapi3.PathItem) {
		body := any(nil)
		if method == "POST" || method == "PUT" {
			body = `{}`
		}
		for part := range good {
			if !strings.Contains(path, part) {
				continue
			}
			for _, bad := range evil {
				if part == "{id}" && !strings.ContainsAny(bad, "%/;") && bad != "" && bad != "." && bad != ".." {
					continue // ids may have these
				}
				url := strings.Replace(path, part, bad, 1)
				for p, v := range good {
					url = strings.Replace(url, p, v, 1)
				}
				r := n.request(method, "/", body)
				r.URL.Opaque = "//node" + url // as it is, without escapes by the client
				res, err := n.client.Do(r)
				if err != nil {
					t.Fatal(err)
				}
				data, _ := io.ReadAll(res.Body)
				res.Body.Close()
				var e rest.Error
				if json.Unmarshal(data, &e) != nil || !slices.Contains([]int{http.StatusBadRequest, http.StatusNotFound, http.StatusMethodNotAllowed}, res.StatusCode) || e.Code == "" {
					t.Errorf("%s %s: %d %s", method, url, res.StatusCode, data)
				}
				if res.StatusCode == http.StatusNotFound && bad != "" && !strings.Contains(e.Message, "nothing at") {
					t.Errorf("%s %s was looked for: %s", method, url, data)
				}
				tried++
			}
		}
		url := path
		for p, v := range good {
			url = strings.Replace(url, p, v, 1)
		}
		e := n.do(method, url+"?nope=1", body).refused(400, "invalid")
		if !strings.Contains(e.Message, "nope") {
			t.Errorf("%s %s: %s", method, url, e.Message)
		}
	})
	if tried < 1000 {
		t.Errorf("only %d were tried", tried)
	}
}

// TestDescribed: query parameters and codes of the server are those that are
// described.
func TestDescribed(t *testing.T) {
	spec, _ := loadSpec(t)
	described := map[string][]string{}
	operations(spec, func(method, path string, op *openapi3.Operation, item *openapi3.PathItem) {
		for _, p := range append(slices.Clone(item.Parameters), op.Parameters...) {
			if p.Value.In == "query" {
				k := method + " " + path
				described[k] = append(described[k], p.Value.Name)
			}
		}
	})
	for pattern, names := range described {
		if got := slices.Sorted(slices.Values(queries[pattern])); !slices.Equal(got, slices.Sorted(slices.Values(names))) {
			t.Errorf("%s takes %v, described are %v", pattern, got, names)
		}
	}
	if len(described) != len(queries) {
		t.Errorf("%d routes have queries, described are %d", len(queries), len(described))
	}
	var codes, have []string
	for _, c := range spec.Components.Schemas["Error"].Value.Properties["code"].Value.Enum {
		codes = append(codes, c.(string))
	}
	for _, c := range server.Codes() {
		have = append(have, string(c))
	}
	slices.Sort(codes)
	slices.Sort(have)
	if !slices.Equal(codes, have) {
		t.Errorf("codes are %v, described are %v", have, codes)
	}
}

// TestSlowSender: a client that does not send its body in time gets an error,
// and its connection ends.
func TestSlowSender(t *testing.T) {
	n := newNode(t, func(c *Config) { c.BodyTimeout, c.StallTimeout = 300*time.Millisecond, 500*time.Millisecond })
	n.setUp()
	n.claim("a")
	for _, request := range []string{
		"PUT " + v1 + "/pools/p HTTP/1.1\r\nHost: n\r\nContent-Type: application/json\r\nContent-Length: 100\r\n\r\n{",
		"PUT " + v1 + "/sandboxes/a/files?path=f HTTP/1.1\r\nHost: n\r\nContent-Length: 100\r\n\r\n{",
	} {
		conn := n.dial()
		if _, err := io.WriteString(conn, request); err != nil {
			t.Fatal(err)
		}
		r := bufio.NewReader(conn)
		res, err := http.ReadResponse(r, nil)
		if err != nil {
			t.Fatal(err)
		}
		body, _ := io.ReadAll(res.Body)
		if res.StatusCode != http.StatusRequestTimeout || !bytes.Contains(body, []byte(`"timeout"`)) {
			t.Errorf("%d %s", res.StatusCode, body)
		}
		if _, err := r.ReadByte(); err != io.EOF {
			t.Errorf("the connection was not closed: %v", err)
		}
	}
	// A client that is refused before its body is read is disconnected as well.
	conn := n.dial()
	fmt.Fprintf(conn, "PUT %s/sandboxes/nobody/files?path=f HTTP/1.1\r\nHost: n\r\nContent-Length: 100\r\n\r\n{", v1)
	if answer, err := io.ReadAll(conn); err != nil || !bytes.Contains(answer, []byte("404 Not Found")) {
		t.Errorf("%s, %v", answer, err)
	}
	if _, err := os.Stat(filepath.Join(n.Workdir, "f")); err == nil {
		t.Error("half a file was written")
	}
	// A request that takes longer than any of these to serve is served.
	if r := as[rest.ExecResult](n.do("POST", v1+"/sandboxes/a/execs", rest.ExecRequest{Shell: "sleep 0.8; echo done"}).ok(200)); r.Stdout != "done\n" {
		t.Errorf("%+v", r)
	}
}

// TestSlowReader: the connection of a client that does not receive its answer
// ends; the process is not held up by it.
func TestSlowReader(t *testing.T) {
	left := make(chan struct{}, 16)
	n := newNode(t, func(c *Config) {
		c.StallTimeout = 300 * time.Millisecond
		c.Log = slog.New(slog.NewTextHandler(noticer{"execs", left}, nil))
	})
	n.setUp()
	path := n.claim("a") + "/execs"
	conn := n.dial()
	body := `{"id":"x","shell":"head -c 50000000 /dev/zero; echo done >done"}`
	fmt.Fprintf(conn, "POST %s HTTP/1.1\r\nHost: n\r\nAccept: application/x-ndjson\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n%s", path, len(body), body)
	<-left
	n.Eventually(func() bool { _, err := os.Stat(filepath.Join(n.Workdir, "done")); return err == nil })
}

// noticer tells when a line with a word is logged.
type noticer struct {
	word string
	seen chan struct{}
}

func (w noticer) Write(p []byte) (int, error) {
	if bytes.Contains(p, []byte(w.word)) {
		w.seen <- struct{}{}
	}
	return len(p), nil
}

// TestBigHeader: headers have a limit.
func TestBigHeader(t *testing.T) {
	n := newNode(t)
	r := n.request("GET", "/v1/version", nil, "X-Big", strings.Repeat("x", 2*server.MaxHeader))
	res, err := n.client.Do(r)
	if err != nil {
		t.Fatal(err)
	}
	res.Body.Close()
	if res.StatusCode != http.StatusRequestHeaderFieldsTooLarge {
		t.Errorf("answered %d", res.StatusCode)
	}
}

// panics is a service with a defect.
type panics struct{ server.Service }

func (panics) Pools(context.Context, sandbox.Namespace, sandbox.Page) ([]sandbox.Pool, error) {
	panic("a secret")
}

// TestPanic: the client gets an error, the panic is logged, and the daemon goes
// on.
func TestPanic(t *testing.T) {
	var logged managertest.Log
	n := newNode(t, func(c *Config) {
		c.Service = panics{c.Service}
		c.Log = slog.New(slog.NewTextHandler(&logged, nil))
	})
	if e := n.do("GET", v1+"/pools", nil).refused(500, "internal"); strings.Contains(e.Message+e.Cause, "secret") {
		t.Errorf("%+v", e)
	}
	n.do("GET", "/v1/version", nil).ok(200)
	if !strings.Contains(logged.String(), "a secret") || !strings.Contains(logged.String(), "hostile_test.go") {
		t.Errorf("%s", logged.String())
	}
}

// FuzzDecode: for any body, decode neither panics nor lets a NUL through.
func FuzzDecode(f *testing.F) {
	for _, s := range []string{`{}`, `{"image":"x","init":["a"]}`, `{"image":"\u0000"}`, `{"x":1}`, "\xff", `{"image":"\\u0000"}`, `[[[[`} {
		f.Add([]byte(s))
	}
	f.Fuzz(func(t *testing.T, body []byte) {
		var spec rest.TemplateSpec
		if err := decode(body, &spec); err != nil {
			if e := server.ToError(err); e.Code != sandbox.CodeInvalid {
				t.Errorf("%v", err)
			}
			return
		}
		if strings.Contains(spec.Image+strings.Join(spec.Init, "")+spec.Workdir, "\x00") {
			t.Errorf("%q", body)
		}
	})
}

// TestOutputIsWhole: for any chunks, the text sent is the text written.
func TestOutputIsWhole(t *testing.T) {
	const text = "a\u00e9\u20ac\U0001F600z"
	for _, all := range []string{text, text + "\xff\xe2\x82", "\x80\x80\x80\x80" + text} {
		for size := 1; size <= len(all); size++ {
			var got []byte
			o := &output{send: func(offset int64, data string, encoding rest.Encoding) error {
				b, err := decoded("data", data, encoding)
				if offset != int64(len(got)) {
					t.Errorf("at %d, not %d", offset, len(got))
				}
				if all == text && encoding != rest.EncodingUtf8 {
					t.Errorf("%q is not text", b)
				}
				got = append(got, b...)
				return err
			}}
			for chunk := range slices.Chunk([]byte(all), size) {
				if _, err := o.Write(chunk); err != nil {
					t.Fatal(err)
				}
			}
			if err := o.flush(); err != nil || string(got) != all {
				t.Errorf("%q in chunks of %d became %q, %v", all, size, got, err)
			}
		}
	}
}
