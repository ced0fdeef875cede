package rest

import (
	"bufio"
	"encoding/json"
	"net/http"
	"strings"
	"testing"

	"agentrun.dev/api/rest"
	"agentrun.dev/internal/convert/restconv"
	"agentrun.dev/internal/sandbox"
)

// watched reads server-sent events.
type watched struct {
	t     testing.TB
	lines *bufio.Reader
	id    string // of the last event that had one
}

// next reads an event, and checks that its id and type agree with its content.
func (s *watched) next() (e rest.ObjectEvent) {
	s.t.Helper()
	fields := map[string]string{}
	for {
		line, err := s.lines.ReadString('\n')
		if err != nil {
			s.t.Fatal(err)
		}
		if line = strings.TrimSuffix(line, "\n"); line == "" {
			break
		}
		name, value, _ := strings.Cut(line, ": ")
		fields[name] = value
	}
	if err := json.Unmarshal([]byte(fields["data"]), &e); err != nil {
		s.t.Fatalf("%q: %v", fields, err)
	}
	if fields["event"] != string(e.Type) || fields["id"] != e.Id {
		s.t.Errorf("%q", fields)
	}
	if e.Id != "" {
		s.id = e.Id
	}
	return e
}

// watch begins a watch of a path, which is answered.
func (n *testNode) watch(path string, headers ...string) *watched {
	n.t.Helper()
	res, err := n.client.Do(n.request(http.MethodGet, path, nil, headers...))
	if err != nil {
		n.t.Fatal(err)
	}
	n.t.Cleanup(func() { _ = res.Body.Close() })
	if kind := res.Header.Get("Content-Type"); res.StatusCode != http.StatusOK || kind != formSSE {
		n.t.Fatalf("%s: %s, %s", path, res.Status, kind)
	}
	return &watched{t: n.t, lines: bufio.NewReader(res.Body)}
}

// TestWatchObjects: the existing objects, then changes. A client that returns with the id of an
// event goes on after that.
func TestWatchObjects(t *testing.T) {
	n := newNode(t)
	n.setUp()
	sandboxes := n.watch(v1 + "/sandboxes?watch=true")
	if e := sandboxes.next(); e.Type != rest.ObjectEventTypeSynced || e.Id == "" {
		t.Errorf("%+v", e)
	}
	page := as[rest.SandboxList](n.do("GET", v1+"/sandboxes", nil).ok(200))
	made := as[rest.Sandbox](n.do("POST", v1+"/sandboxes", rest.SandboxCreate{Pool: "pool", Name: "a"}).ok(201))
	e := sandboxes.next()
	if e.Type != rest.ObjectEventTypeObject || e.Sandbox.Id != made.Id || e.Sandbox.ResourceVersion != made.ResourceVersion || e.Sandbox.Token != "" {
		t.Errorf("%+v, made was %+v", e, made)
	}
	n.do("DELETE", v1+"/sandboxes/a", nil).ok(200)
	if e := sandboxes.next(); e.Type != rest.ObjectEventTypeDeleted || e.Sandbox.Reason != "killed" {
		t.Errorf("%+v", e)
	}
	for what, again := range map[string]*watched{
		"Last-Event-ID":                      n.watch(v1+"/sandboxes?watch=true", "Last-Event-ID", e.Id),
		"resourceVersion":                    n.watch(v1 + "/sandboxes?watch=true&resourceVersion=" + e.Id),
		"both, of which the first one holds": n.watch(v1+"/sandboxes?watch=true&resourceVersion=1", "Last-Event-ID", e.Id),
	} {
		if e := again.next(); e.Type != rest.ObjectEventTypeBookmark {
			t.Errorf("%s: %+v", what, e)
		}
		if e := again.next(); e.Type != rest.ObjectEventTypeDeleted || e.Sandbox.Id != made.Id {
			t.Errorf("%s: %+v", what, e)
		}
	}
	listed := n.watch(v1 + "/sandboxes?watch=true&resourceVersion=" + page.ResourceVersion)
	listed.next()
	if e := listed.next(); e.Type != rest.ObjectEventTypeObject || e.Sandbox.Id != made.Id {
		t.Errorf("from a list: %+v", e)
	}
	for kind, path := range map[string]string{"template": v1 + "/templates", "pool": v1 + "/pools", "node": "/v1/node"} {
		e := n.watch(path + "?watch=true").next()
		if e.Type != rest.ObjectEventTypeObject || (e.Template != nil) != (kind == "template") || (e.Pool != nil) != (kind == "pool") || (e.Node != nil) != (kind == "node") {
			t.Errorf("%s: %+v", kind, e)
		}
		if e.Id != "" {
			t.Errorf("%s: nobody can go on from %s", kind, e.Id)
		}
	}
}

// TestWatchObjectsRefused: a watch that cannot begin is refused, with a next
// step.
func TestWatchObjectsRefused(t *testing.T) {
	n := newNode(t)
	for query, want := range map[string]struct {
		status int
		code   string
	}{
		"watch=true&limit=1":                              {400, "invalid"},
		"watch=true&ended=true":                           {400, "invalid"},
		"watch=true&resourceVersion=x":                    {400, "invalid"},
		"watch=true&resourceVersion=0":                    {400, "invalid"},
		"watch=true&resourceVersion=-1":                   {400, "invalid"},
		"watch=true&resourceVersion=999999999":            {409, "other_state"},
		"watch=true&resourceVersion=OTHER-1":              {409, "other_state"},
		"watch=true&resourceVersion=1&watch=true":         {400, "invalid"},
		"watch=maybe":                                     {400, "invalid"},
		"resourceVersion=1":                               {400, "invalid"},
		"watch=true&resourceVersion=18446744073709551616": {400, "invalid"},
	} {
		n.do("GET", v1+"/sandboxes?"+query, nil).refused(want.status, want.code)
	}
	n.do("GET", v1+"/sandboxes?watch=true", nil, "Accept", "text/html").refused(406, "not_acceptable")
	n.do("GET", v1+"/sandboxes?watch=true", nil, "Last-Event-ID", "nonsense").refused(400, "invalid")
}

// FuzzPosition: a position from a client is read or refused. A position that was read
// stays the same when it is written and read again.
func FuzzPosition(f *testing.F) {
	for _, s := range []string{"", "1", "ABC-1", "-1", "a-b-2", "x", "ABC-18446744073709551615", "ABC-18446744073709551616", "\x00-1"} {
		f.Add(s)
	}
	f.Fuzz(func(t *testing.T, s string) {
		v, err := restconv.ToPosition("resourceVersion", s)
		if err != nil {
			if !sandbox.HasCode(err, sandbox.CodeInvalid) {
				t.Errorf("%q: %v", s, err)
			}
			return
		}
		again, err := restconv.ToPosition("resourceVersion", restconv.FromPosition(v))
		if s != "" && v.ID != "" && (err != nil || again != v) {
			t.Errorf("%q is %+v, and then %+v, %v", s, v, again, err)
		}
	})
}
