package rest

import (
	"strings"
	"testing"

	"agentrun.dev/api/rest"
)

// TestCheckpoints: made, listed in pages, restored any number of times, deleted.
func TestCheckpoints(t *testing.T) {
	n := newNode(t)
	n.setUp()
	path := n.claim("a")
	source := as[rest.Sandbox](n.do("GET", path, nil).ok(200))
	c := as[rest.Checkpoint](n.do("POST", path+"/checkpoints", rest.CheckpointCreate{Name: "c"}).ok(201))
	if c.Name != "c" || c.Source != "a" || c.SourceID != source.Id || c.Template != "python" || c.Size == 0 || c.Memory != source.Memory {
		t.Errorf("%+v", c)
	}
	made := as[rest.Checkpoint](n.do("POST", path+"/checkpoints", `{}`).ok(201))
	if !strings.HasPrefix(made.Name, "a-") {
		t.Errorf("made up %q", made.Name)
	}
	n.do("POST", path+"/checkpoints", rest.CheckpointCreate{Name: "c"}).refused(409, "already_exists")
	n.do("POST", v1+"/sandboxes/nobody/checkpoints", `{}`).refused(404, "not_found")
	page := as[rest.CheckpointList](n.do("GET", v1+"/checkpoints?limit=1", nil).ok(200))
	if len(page.Items) != 1 || page.Items[0].Name != made.Name || page.Next != made.Name {
		t.Errorf("%+v", page)
	}
	page = as[rest.CheckpointList](n.do("GET", v1+"/checkpoints"+query("limit", "1", "after", page.Next), nil).ok(200))
	if len(page.Items) != 1 || page.Items[0].Id != c.Id || page.Next != "" {
		t.Errorf("%+v", page)
	}
	if l := as[rest.CheckpointList](n.do("GET", "/v1/namespaces/other/checkpoints", nil).ok(200)); len(l.Items) != 0 {
		t.Errorf("another namespace has %+v", l)
	}
	n.do("DELETE", path, nil).ok(200)
	s := as[rest.Sandbox](n.do("POST", v1+"/checkpoints/c/restore", rest.CheckpointRestore{
		Name: "r", Env: rest.Env{"A": "b"}, Metadata: rest.Metadata{"k": "v"}, Timeout: "1h", OnTimeout: rest.OnTimeoutPause,
	}).ok(201))
	if s.Name != "r" || s.Parent != source.Id || s.Checkpoint != "c" || s.Metadata["k"] != "v" || s.Timeout != "1h0m0s" || s.State != rest.SandboxStateRunning {
		t.Errorf("%+v", s)
	}
	if r := as[rest.ExecResult](n.do("POST", v1+"/sandboxes/r/execs", rest.ExecRequest{Shell: "echo $A"}).ok(200)); r.Stdout != "b\n" {
		t.Errorf("%+v", r)
	}
	n.with(s.Token).do("POST", v1+"/sandboxes/r/execs", rest.ExecRequest{Shell: "true"}).ok(200)
	if s := as[rest.Sandbox](n.do("POST", v1+"/checkpoints/c/restore", `{}`).ok(201)); !strings.HasPrefix(s.Name, "c-") {
		t.Errorf("made up %q", s.Name)
	}
	n.do("POST", v1+"/checkpoints/c/restore", rest.CheckpointRestore{Name: "r"}).refused(409, "already_exists")
	n.do("POST", v1+"/checkpoints/nothing/restore", `{}`).refused(404, "not_found")
	if got := as[rest.Checkpoint](n.do("GET", v1+"/checkpoints/c", nil).ok(200)); got.Id != c.Id {
		t.Errorf("%+v", got)
	}
	n.do("DELETE", v1+"/checkpoints/c", nil).ok(204)
	n.do("DELETE", v1+"/checkpoints/c", nil).refused(404, "not_found")
	n.do("GET", v1+"/checkpoints/c", nil).refused(404, "not_found")
	n.do("GET", v1+"/sandboxes/r", nil).ok(200)
}

// TestCheckpointIdempotency: a retry gets the first answer, and makes nothing.
func TestCheckpointIdempotency(t *testing.T) {
	n := newNode(t)
	n.setUp()
	path := n.claim("a")
	post := func(path string, body any) *response { return n.do("POST", path, body, "Idempotency-Key", "k") }
	c := post(path+"/checkpoints", `{}`).ok(201)
	if again := post(path+"/checkpoints", `{}`).ok(201); string(again.body) != string(c.body) || again.header.Get("Idempotency-Replayed") != "true" {
		t.Errorf("%s and %s", c.body, again.body)
	}
	post(path+"/checkpoints", `{"name":"other"}`).refused(409, "conflict")
	restore := v1 + "/checkpoints/" + as[rest.Checkpoint](c).Name + "/restore"
	s := post(restore, `{}`).ok(201)
	if again := post(restore, `{}`).ok(201); string(again.body) != string(s.body) {
		t.Errorf("%s and %s", s.body, again.body)
	}
	post(restore, `{"name":"other"}`).refused(409, "conflict")
	node := as[rest.Node](n.do("GET", "/v1/node", nil).ok(200))
	if node.Sandboxes != 2 || node.Checkpoints != 1 || node.CheckpointBytes == 0 {
		t.Errorf("%+v", node)
	}
}

// TestStats: the cost of sandboxes is shown without waking those on disk.
func TestStats(t *testing.T) {
	n := newNode(t)
	n.setUp()
	path := n.claim("a")
	n.claim("b")
	n.do("POST", v1+"/sandboxes/b/hibernate", nil).ok(200)
	s := as[rest.SandboxStats](n.do("GET", path+"/stats", nil).ok(200))
	if s.Name != "a" || s.Own == 0 || s.Shared != 1<<19 || s.Cpu != 3e9 || s.Generation != 2 || s.Disk != 5<<20 || s.Reserved == 0 || s.Time.IsZero() || s.State != rest.SandboxStateRunning {
		t.Errorf("%+v", s)
	}
	l := as[rest.SandboxStatsList](n.do("GET", v1+"/stats?limit=1", nil).ok(200))
	if len(l.Items) != 1 || l.Items[0].Name != "a" || l.Next == "" {
		t.Fatalf("%+v", l)
	}
	l = as[rest.SandboxStatsList](n.do("GET", v1+"/stats"+query("after", l.Next), nil).ok(200))
	if len(l.Items) != 1 || l.Items[0].Name != "b" || l.Items[0].Own != 0 || l.Items[0].Reserved != 0 || l.Items[0].State != rest.SandboxStateHibernated {
		t.Errorf("%+v", l)
	}
	n.do("GET", v1+"/sandboxes/nobody/stats", nil).refused(404, "not_found")
	node := as[rest.Node](n.do("GET", "/v1/node", nil).ok(200))
	if node.Engine != "fake" || node.Capacity != 1<<40 || node.Reserved == 0 || node.Sandboxes != 2 || node.Hibernated != 1 {
		t.Errorf("%+v", node)
	}
}
