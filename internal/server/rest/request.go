package rest

import (
	"bytes"
	"encoding/json"
	"errors"
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
	"agentrun.dev/internal/server"
)

// Limits of JSON bodies.
const (
	maxExecBody = 24 << 20
	// maxTerminalBody is small because a command and its environment are kept until the
	// terminal is opened.
	maxTerminalBody = 1 << 20
	maxCodeBody     = 40 << 20 // 16 MiB of code, escaped
)

// readJSON reads a body strictly: of bounded size and time, one object, with
// known fields only, and text without NUL.
func (a *api) readJSON(w http.ResponseWriter, r *http.Request, limit int64, into any) ([]byte, error) {
	kind, _, err := mime.ParseMediaType(r.Header.Get("Content-Type"))
	if err != nil || kind != "application/json" {
		return nil, sandbox.Errorf(server.CodeMedia, "the body is not JSON, to judge by its Content-Type").
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
		return sandbox.Errorf(server.CodeTooLarge, "the body has more than %d bytes", limit)
	case errors.Is(err, os.ErrDeadlineExceeded):
		return sandbox.Errorf(server.CodeTimeout, "the body did not come in time")
	}
	return sandbox.Errorf(sandbox.CodeInvalid, "the body could not be read").Because("%v", err)
}

// decode is the part of readJSON that parses the bytes.
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
		return sandbox.Invalid(wrong.Field, "a JSON %s is not what belongs there", wrong.Value)
	}
	if field, ok := strings.CutPrefix(err.Error(), "json: unknown field "); ok {
		return sandbox.Errorf(sandbox.CodeInvalid, "there is no field %s", server.Trimmed(field)).Try("api/openapi.yaml has all fields")
	}
	return sandbox.Errorf(sandbox.CodeInvalid, "the body is not a JSON object as it should be").Because("%s", server.Trimmed(err.Error()))
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

var idSyntax = regexp.MustCompile(`^[A-Za-z0-9_.-]{1,128}$`)

// checkID checks an id from a client. The ids of agents have this form.
func checkID(field, id string) error {
	if !idSyntax.MatchString(id) {
		return sandbox.Invalid(field, "%q is not 1 to 128 letters, digits, dots, dashes and underscores", server.Trimmed(id))
	}
	return nil
}

// queries are the query parameters of the routes that have any.
var queries = map[string][]string{
	"GET /v1/node": {"watch", "resourceVersion"},
	"GET /v1/namespaces/{namespace}/templates":                          {"limit", "after", "watch", "resourceVersion"},
	"GET /v1/namespaces/{namespace}/templates/{name}/log":               {"stage", "follow", "offset", "tail"},
	"GET /v1/namespaces/{namespace}/pools":                              {"limit", "after", "watch", "resourceVersion"},
	"GET /v1/namespaces/{namespace}/sandboxes":                          {"limit", "after", "ended", "watch", "resourceVersion"},
	"GET /v1/namespaces/{namespace}/forks":                              {"limit", "after"},
	"GET /v1/namespaces/{namespace}/secrets":                            {"limit", "after"},
	"GET /v1/namespaces/{namespace}/images":                             {"limit", "after"},
	"GET /v1/namespaces/{namespace}/registries":                         {"limit", "after"},
	"DELETE /v1/namespaces/{namespace}/registries":                      {"registry"},
	"GET /v1/namespaces/{namespace}/checkpoints":                        {"limit", "after"},
	"DELETE /v1/namespaces/{namespace}/sandboxes/{name}":                {"id"},
	"POST /v1/namespaces/{namespace}/sandboxes/{name}/pause":            {"id"},
	"POST /v1/namespaces/{namespace}/sandboxes/{name}/resume":           {"id"},
	"POST /v1/namespaces/{namespace}/sandboxes/{name}/hibernate":        {"id"},
	"POST /v1/namespaces/{namespace}/sandboxes/{name}/extend":           {"id"},
	"POST /v1/namespaces/{namespace}/sandboxes/{name}/forks":            {"id"},
	"POST /v1/namespaces/{namespace}/sandboxes/{name}/checkpoints":      {"id"},
	"PUT /v1/namespaces/{namespace}/sandboxes/{name}/network/policy":    {"id"},
	"DELETE /v1/namespaces/{namespace}/sandboxes/{name}/network/policy": {"id"},
	"DELETE /v1/namespaces/{namespace}/checkpoints/{name}":              {"id"},
	"GET /v1/namespaces/{namespace}/stats":                              {"limit", "after"},
	"GET /v1/namespaces/{namespace}/sandboxes/{name}/execs/{id}/output": {"stdout", "stderr"},
	"GET /v1/namespaces/{namespace}/sandboxes/{name}/execs/{id}/socket": {"stdout", "stderr"},
	"GET /v1/namespaces/{namespace}/sandboxes/{name}/network/log":       {"from", "limit", "wait", "open"},
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
		return sandbox.Errorf(sandbox.CodeInvalid, "the query of the URL is not valid").Because("%s", server.Trimmed(err.Error()))
	}
	for name, given := range values {
		if !slices.Contains(queries[pattern], name) {
			return sandbox.Errorf(sandbox.CodeInvalid, "there is no query parameter %q", server.Trimmed(name))
		}
		if len(given) != 1 {
			return sandbox.Invalid(name, "it is given %d times", len(given))
		}
		if err := server.CheckText(name, given[0]); err != nil {
			return err
		}
	}
	return nil
}
