package server

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"mime"
	"net/http"
	"net/url"
	"os"
	"regexp"
	"slices"
	"strings"
	"time"
	"unicode/utf8"

	"agentrun.dev/internal/sandbox"
)

// Limits of JSON bodies.
const (
	maxBody     = 1 << 20
	maxExecBody = 24 << 20
	maxCodeBody = 40 << 20 // 16 MiB of code, escaped
)

func invalid(field, format string, args ...any) *sandbox.Error {
	return sandbox.Errorf(sandbox.CodeInvalid, "%s: %s", field, fmt.Sprintf(format, args...))
}

// readJSON reads a body strictly: of bounded size and time, one object, with
// known fields only, and text without NUL.
func (a *api) readJSON(w http.ResponseWriter, r *http.Request, limit int64, into any) ([]byte, error) {
	kind, _, err := mime.ParseMediaType(r.Header.Get("Content-Type"))
	if err != nil || kind != "application/json" {
		return nil, sandbox.Errorf(codeMedia, "the body is not JSON, to judge by its Content-Type").
			Try("Send `Content-Type: application/json` (curl has --json)")
	}
	c := http.NewResponseController(w)
	_ = c.SetReadDeadline(time.Now().Add(a.BodyTimeout)) // see send
	body, err := io.ReadAll(http.MaxBytesReader(w, r.Body, limit))
	if err != nil {
		return nil, bodyError(err, limit)
	}
	// Otherwise the deadline would end the request while it is served.
	_ = c.SetReadDeadline(time.Time{})
	return body, decode(body, into)
}

func bodyError(err error, limit int64) error {
	var tooLarge *http.MaxBytesError
	switch {
	case errors.As(err, &tooLarge):
		return sandbox.Errorf(codeTooLarge, "the body has more than %d bytes", limit)
	case errors.Is(err, os.ErrDeadlineExceeded):
		return sandbox.Errorf(codeTimeout, "the body did not come in time")
	}
	return sandbox.Errorf(sandbox.CodeInvalid, "the body could not be read").Because("%v", err)
}

// decode is the part of readJSON that meets the bytes.
func decode(body []byte, into any) error {
	if !utf8.Valid(body) {
		return sandbox.Errorf(sandbox.CodeInvalid, "the body is not valid UTF-8")
	}
	dec := json.NewDecoder(bytes.NewReader(body))
	dec.DisallowUnknownFields()
	if err := dec.Decode(into); err != nil {
		return jsonError(err)
	}
	if _, err := dec.Token(); !errors.Is(err, io.EOF) {
		return sandbox.Errorf(sandbox.CodeInvalid, "the body has something after its JSON object")
	}
	if bytes.Contains(body, []byte(`\u0000`)) && hasNUL(body) {
		return sandbox.Errorf(sandbox.CodeInvalid, "the body has text with a NUL").Try("Send bytes as base64 where the API offers it")
	}
	return nil
}

func jsonError(err error) error {
	var wrong *json.UnmarshalTypeError
	if errors.As(err, &wrong) && wrong.Field != "" {
		return invalid(wrong.Field, "a JSON %s is not what belongs there", wrong.Value)
	}
	if field, ok := strings.CutPrefix(err.Error(), "json: unknown field "); ok {
		return sandbox.Errorf(sandbox.CodeInvalid, "there is no field %s", trimmed(field)).Try("api/openapi.yaml has all fields")
	}
	return sandbox.Errorf(sandbox.CodeInvalid, "the body is not a JSON object as it should be").Because("%s", trimmed(err.Error()))
}

// hasNUL looks for a NUL in the strings of valid JSON.
func hasNUL(body []byte) bool {
	dec := json.NewDecoder(bytes.NewReader(body))
	for {
		token, err := dec.Token()
		if err != nil {
			return false
		}
		if s, ok := token.(string); ok && strings.IndexByte(s, 0) >= 0 {
			return true
		}
	}
}

// key parses what the path names.
func key(namespace, name string) (sandbox.Key, error) {
	n, err := sandbox.ParseNamespace(namespace)
	if err != nil {
		return sandbox.Key{}, err
	}
	label, err := sandbox.ParseName(name)
	return sandbox.Key{Namespace: n, Name: label}, err
}

var idSyntax = regexp.MustCompile(`^[A-Za-z0-9_.-]{1,128}$`)

// checkID checks an id that a client names; those of agents are such ids.
func checkID(field, id string) error {
	if !idSyntax.MatchString(id) {
		return invalid(field, "%q is not 1 to 128 letters, digits, dots, dashes and underscores", trimmed(id))
	}
	return nil
}

// checkText refuses what no C string can hold, and what is not text.
func checkText(field, s string) error {
	if !utf8.ValidString(s) || strings.IndexByte(s, 0) >= 0 {
		return invalid(field, "it has a NUL or is not valid UTF-8")
	}
	return nil
}

// Bounds of a page.
const (
	defaultPage = 100
	maxPage     = 1000
)

// page reads the parameters of a list. It asks for one object more than it
// shows, to know whether there is a next page.
func page(limit *int, after string) (sandbox.Page, error) {
	n := defaultPage
	if limit != nil {
		n = *limit
	}
	if n < 1 || n > maxPage {
		return sandbox.Page{}, invalid("limit", "%d is not between 1 and %d", n, maxPage)
	}
	if err := checkText("after", after); err != nil {
		return sandbox.Page{}, err
	}
	return sandbox.Page{After: after, Limit: n + 1}, nil
}

// cut makes a page of what was found.
func cut[T any](found []T, p sandbox.Page, position func(T) string) (items []T, next string) {
	if len(found) < p.Limit {
		return found, ""
	}
	found = found[:p.Limit-1]
	return found, position(found[len(found)-1])
}

// queries are the query parameters of the routes that have any.
var queries = map[string][]string{
	"GET /v1/namespaces/{namespace}/templates":                          {"limit", "after"},
	"GET /v1/namespaces/{namespace}/templates/{name}/log":               {"stage", "follow"},
	"GET /v1/namespaces/{namespace}/pools":                              {"limit", "after"},
	"GET /v1/namespaces/{namespace}/sandboxes":                          {"limit", "after", "ended"},
	"GET /v1/namespaces/{namespace}/forks":                              {"limit", "after"},
	"GET /v1/namespaces/{namespace}/secrets":                            {"limit", "after"},
	"GET /v1/namespaces/{namespace}/checkpoints":                        {"limit", "after"},
	"GET /v1/namespaces/{namespace}/stats":                              {"limit", "after"},
	"GET /v1/namespaces/{namespace}/sandboxes/{name}/execs/{id}/output": {"stdout", "stderr"},
	"GET /v1/namespaces/{namespace}/sandboxes/{name}/execs/{id}/socket": {"stdout", "stderr"},
	terminalRoute: {"token"},
	"POST /v1/namespaces/{namespace}/sandboxes/{name}/execs/{id}/stdin":           {"close"},
	"GET /v1/namespaces/{namespace}/sandboxes/{name}/files":                       {"path", "offset", "length"},
	"PUT /v1/namespaces/{namespace}/sandboxes/{name}/files":                       {"path", "mode", "append", "exclusive"},
	"DELETE /v1/namespaces/{namespace}/sandboxes/{name}/files":                    {"path", "recursive"},
	"GET /v1/namespaces/{namespace}/sandboxes/{name}/files/stat":                  {"path", "follow"},
	"GET /v1/namespaces/{namespace}/sandboxes/{name}/files/list":                  {"path", "depth", "limit", "after"},
	"GET /v1/namespaces/{namespace}/sandboxes/{name}/files/watch":                 {"path", "recursive"},
	"GET /v1/namespaces/{namespace}/sandboxes/{name}/code/executions/{id}/output": {"stdout", "stderr", "event"},
}

// checkQuery refuses parameters that a route does not have: they would be
// ignored.
func checkQuery(pattern, raw string) error {
	if raw == "" {
		return nil
	}
	values, err := url.ParseQuery(raw)
	if err != nil {
		return sandbox.Errorf(sandbox.CodeInvalid, "the query of the URL is not valid").Because("%s", trimmed(err.Error()))
	}
	for name, given := range values {
		if !slices.Contains(queries[pattern], name) {
			return sandbox.Errorf(sandbox.CodeInvalid, "there is no query parameter %q", trimmed(name))
		}
		if len(given) != 1 {
			return invalid(name, "it is given %d times", len(given))
		}
		if err := checkText(name, given[0]); err != nil {
			return err
		}
	}
	return nil
}
