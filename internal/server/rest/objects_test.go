package rest

import (
	"bufio"
	"strings"
	"testing"

	"agentrun.dev/api/rest"
)

func TestVersion(t *testing.T) {
	n := newNode(t)
	if v := as[rest.Version](n.do("GET", "/v1/version", nil).ok(200)); v.Version != "test" || v.Api != "v1" {
		t.Errorf("%+v", v)
	}
}

// TestTemplates: made, changed, listed in pages, built, and deleted when no pool
// uses them.
func TestTemplates(t *testing.T) {
	n := newNode(t)
	spec := rest.TemplateSpec{
		Image: "python", Env: rest.Env{"A": "b"}, Workdir: "/w", User: "me", MilliCPUs: 500, Memory: 64 << 20, Disk: 32 << 20,
		Ready: &rest.ReadyCheck{Port: 80, Timeout: "1m30s"}, Warmup: &rest.Program{Language: "python", Text: "import os"},
	}
	made := as[rest.Template](n.do("PUT", v1+"/templates/a", spec).ok(200))
	if made.Name != "a" || made.Namespace != "default" || made.Revision == "" || made.Spec.Ready.Timeout != "1m30s" || *made.Spec.Warmup != *spec.Warmup {
		t.Errorf("%+v", made)
	}
	if log := string(n.do("GET", v1+"/templates/a/log", nil).ok(200).body); log != "building\n" {
		t.Errorf("log %q", log)
	}
	got := as[rest.Template](n.do("GET", v1+"/templates/a", nil).ok(200))
	if got.Phase != rest.PhaseReady || len(got.Builds) != 1 || got.Builds[0].Finished == nil || got.Spec.Memory != 64<<20 || got.Spec.Disk != 32<<20 {
		t.Errorf("%+v", got)
	}
	if d := as[rest.Template](n.do("PUT", v1+"/templates/b", rest.TemplateSpec{Image: "x"}).ok(200)); d.Spec.MilliCPUs != 1000 || d.Spec.Memory != 512<<20 || d.Spec.Disk != 0 {
		t.Errorf("defaults: %+v", d.Spec)
	}
	changed := as[rest.Template](n.do("PUT", v1+"/templates/a", rest.TemplateSpec{Image: "other"}).ok(200))
	if changed.Revision == made.Revision || !changed.Created.Equal(made.Created) {
		t.Errorf("%+v after %+v", changed, made)
	}
	page := as[rest.TemplateList](n.do("GET", v1+"/templates?limit=1", nil).ok(200))
	if len(page.Items) != 1 || page.Next != "a" {
		t.Fatalf("%+v", page)
	}
	page = as[rest.TemplateList](n.do("GET", v1+"/templates?limit=1&after="+page.Next, nil).ok(200))
	if len(page.Items) != 1 || page.Items[0].Name != "b" || page.Next != "" {
		t.Errorf("%+v", page)
	}
	n.do("PUT", v1+"/templates/broken", rest.TemplateSpec{Image: "broken"}).ok(200)
	if log := string(n.do("GET", v1+"/templates/broken/log", nil).ok(200).body); !strings.Contains(log, "no such image") {
		t.Errorf("log %q", log)
	}
	if b := as[rest.Template](n.do("GET", v1+"/templates/broken", nil).ok(200)); b.Phase != rest.PhaseFailed || !strings.Contains(b.Problem, "no such image") {
		t.Errorf("%+v", b)
	}
	n.do("GET", v1+"/templates/b/log?stage=Init", nil).refused(503, "not_ready")
	n.do("GET", v1+"/templates/b/log?stage=Other", nil).refused(400, "invalid")
	n.do("PUT", v1+"/pools/p", rest.PoolSpec{Template: "b"}).ok(200)
	n.do("DELETE", v1+"/templates/b", nil).refused(409, "conflict")
	n.do("DELETE", v1+"/pools/p", nil).ok(204)
	n.do("DELETE", v1+"/templates/b", nil).ok(204)
	n.do("DELETE", v1+"/templates/b", nil).refused(404, "not_found")
	n.do("GET", v1+"/templates/b", nil).refused(404, "not_found")
}

// TestBuildLogFollows: the log comes while the template is built.
func TestBuildLogFollows(t *testing.T) {
	n := newNode(t)
	n.do("PUT", v1+"/templates/a", rest.TemplateSpec{Image: "x", Init: []string{"make"}}).ok(200)
	if log := string(n.do("GET", v1+"/templates/a/log?follow=false", nil).ok(200).body); strings.Contains(log, "make") {
		t.Errorf("not followed: %q", log)
	}
	res, err := n.client.Do(n.request("GET", v1+"/templates/a/log", nil))
	if err != nil {
		t.Fatal(err)
	}
	defer res.Body.Close()
	lines := bufio.NewScanner(res.Body)
	if !lines.Scan() || lines.Text() != "building" {
		t.Fatalf("%q", lines.Text())
	}
	close(n.Builder.Gate)
	if !lines.Scan() || lines.Text() != "$ make" || lines.Scan() {
		t.Errorf("%q", lines.Text())
	}
}

// TestPartOfBuildLog: a log is read from an offset, or from its last lines, and the answer
// says where the next one begins.
func TestPartOfBuildLog(t *testing.T) {
	n := newNode(t)
	close(n.Builder.Gate)
	n.do("PUT", v1+"/templates/a", rest.TemplateSpec{Image: "x", Init: []string{"make"}}).ok(200)
	n.do("GET", v1+"/templates/a/log", nil).ok(200) // until it has ended
	const log = "building\n$ make\n"
	for query, want := range map[string]string{"": log, "?offset=9": "$ make\n", "?offset=16": "", "?offset=1000": "", "?tail=1": "$ make\n", "?tail=0": "", "?tail=9": log} {
		res := n.do("GET", v1+"/templates/a/log"+query, nil).ok(200)
		if string(res.body) != want || res.header.Get("Log-Size") != "16" {
			t.Errorf("%q: %q, of %s bytes", query, res.body, res.header.Get("Log-Size"))
		}
	}
	for _, query := range []string{"offset=-1", "tail=-1", "tail=1&offset=1"} {
		n.do("GET", v1+"/templates/a/log?"+query, nil).refused(400, "invalid")
	}
	n.do("GET", v1+"/templates/a/log?tail=x", nil).refused(400, "invalid")
}

// TestDeleteWhileBuilding: the build of a deleted template ends.
func TestDeleteWhileBuilding(t *testing.T) {
	n := newNode(t)
	n.do("PUT", v1+"/templates/a", rest.TemplateSpec{Image: "x", Init: []string{"make"}}).ok(200)
	n.do("DELETE", v1+"/templates/a", nil).ok(204)
	n.do("GET", v1+"/templates/a/log", nil).refused(404, "not_found")
}

func TestPools(t *testing.T) {
	n := newNode(t)
	n.do("PUT", v1+"/pools/p", rest.PoolSpec{Template: "nobody"}).refused(404, "not_found")
	n.setUp()
	p := as[rest.Pool](n.do("GET", v1+"/pools/pool", nil).ok(200))
	if p.Phase != rest.PhaseReady || p.Snapshots != 1 || p.Spec.SnapshotAfter != rest.StageReady || p.Spec.Template != "python" {
		t.Errorf("%+v", p)
	}
	if l := as[rest.PoolList](n.do("GET", v1+"/pools", nil).ok(200)); len(l.Items) != 1 || l.Next != "" {
		t.Errorf("%+v", l)
	}
	if l := as[rest.PoolList](n.do("GET", "/v1/namespaces/other/pools", nil).ok(200)); len(l.Items) != 0 {
		t.Errorf("another namespace has %+v", l)
	}
	n.do("PUT", v1+"/pools/pool", rest.PoolSpec{Template: "python", Replicas: -1}).refused(400, "invalid")
	n.do("PUT", v1+"/pools/pool", rest.PoolSpec{Template: "python", SnapshotAfter: "Never"}).refused(400, "invalid")
	n.do("DELETE", v1+"/pools/pool", nil).ok(204)
	n.do("GET", v1+"/pools/pool", nil).refused(404, "not_found")
	n.do("DELETE", v1+"/pools/pool", nil).refused(404, "not_found")
}

// TestSandboxes: a claim, the operations on a sandbox, and its end.
func TestSandboxes(t *testing.T) {
	n := newNode(t)
	n.do("POST", v1+"/sandboxes", rest.SandboxCreate{Pool: "pool"}).refused(404, "not_found")
	n.setUp()
	s := as[rest.Sandbox](n.do("POST", v1+"/sandboxes", rest.SandboxCreate{
		Name: "a", Pool: "pool", Env: rest.Env{"SECRETLY": "x"}, Metadata: rest.Metadata{"k": "v"}, Timeout: "1h", IdleTimeout: "30m", OnTimeout: rest.OnTimeoutPause,
	}).ok(201))
	if s.Name != "a" || s.State != rest.SandboxStateRunning || s.Metadata["k"] != "v" || s.Timeout != "1h0m0s" || s.OnTimeout != "pause" || s.Workdir != n.Workdir {
		t.Errorf("%+v", s)
	}
	made := as[rest.Sandbox](n.do("POST", v1+"/sandboxes", rest.SandboxCreate{Pool: "pool"}).ok(201))
	if !strings.HasPrefix(made.Name, "pool-") || made.Name == "pool-" {
		t.Errorf("made up %q", made.Name)
	}
	n.do("POST", v1+"/sandboxes", rest.SandboxCreate{Name: "a", Pool: "pool"}).refused(409, "already_exists")
	path := v1 + "/sandboxes/a"
	if body := string(n.do("GET", path, nil).ok(200).body); strings.Contains(body, "SECRETLY") {
		t.Errorf("the environment is shown: %s", body)
	}
	for _, step := range []struct {
		verb string
		want rest.SandboxState
	}{{"pause", rest.SandboxStatePaused}, {"resume", rest.SandboxStateRunning}, {"hibernate", rest.SandboxStateHibernated}} {
		if s := as[rest.Sandbox](n.do("POST", path+"/"+step.verb, nil).ok(200)); s.State != step.want {
			t.Errorf("%s: %s", step.verb, s.State)
		}
	}
	// Looking does not wake it, using does.
	if s := as[rest.Sandbox](n.do("GET", path, nil).ok(200)); s.State != rest.SandboxStateHibernated {
		t.Errorf("looking has woken it: %s", s.State)
	}
	n.do("POST", path+"/execs", rest.ExecRequest{Argv: []string{"true"}}).ok(200)
	if s := as[rest.Sandbox](n.do("POST", path+"/extend", rest.Extend{Timeout: "2h"}).ok(200)); s.State != rest.SandboxStateRunning || !strings.HasPrefix(s.Timeout, "2h") {
		t.Errorf("%s, %s", s.State, s.Timeout)
	}
	n.do("POST", path+"/extend", `{}`).refused(400, "invalid")
	n.do("POST", path+"/extend", rest.Extend{Timeout: "soon"}).refused(400, "invalid")

	all := as[rest.SandboxList](n.do("GET", v1+"/sandboxes?limit=1", nil).ok(200))
	if len(all.Items) != 1 || all.Items[0].Name != "a" || all.Next == "" {
		t.Fatalf("%+v", all)
	}
	all = as[rest.SandboxList](n.do("GET", v1+"/sandboxes"+query("limit", "1", "after", all.Next), nil).ok(200))
	if len(all.Items) != 1 || all.Items[0].Name != made.Name || all.Next != "" {
		t.Errorf("%+v", all)
	}
	if s := as[rest.Sandbox](n.do("DELETE", path, nil).ok(200)); s.State != rest.SandboxStateEnded || s.Reason != rest.SandboxReasonKilled || s.Ended == nil {
		t.Errorf("%+v", s)
	}
	n.do("GET", path, nil).refused(410, "ended")
	n.do("DELETE", path, nil).refused(410, "ended")
	n.do("POST", path+"/pause", nil).refused(410, "ended")
	n.do("GET", v1+"/sandboxes/never", nil).refused(404, "not_found")
	if all := as[rest.SandboxList](n.do("GET", v1+"/sandboxes", nil).ok(200)); len(all.Items) != 1 {
		t.Errorf("%+v", all)
	}
	if all := as[rest.SandboxList](n.do("GET", v1+"/sandboxes?ended=true", nil).ok(200)); len(all.Items) != 2 {
		t.Errorf("%+v", all)
	}
}

func TestForks(t *testing.T) {
	n := newNode(t)
	n.setUp()
	path := n.claim("a")
	f := as[rest.Fork](n.do("POST", path+"/forks", rest.ForkCreate{Name: "f", Replicas: 2}).ok(201))
	if f.Phase != rest.PhaseReady || len(f.Children) != 2 || f.Children[1].Name != "f-2" || f.Children[1].Id == "" || f.Source != "a" {
		t.Errorf("%+v", f)
	}
	if c := as[rest.Sandbox](n.do("GET", v1+"/sandboxes/f-2", nil).ok(200)); c.Parent != f.SourceID || c.Fork != "f" {
		t.Errorf("%+v", c)
	}
	made := as[rest.Fork](n.do("POST", path+"/forks", rest.ForkCreate{Replicas: 1}).ok(201))
	if !strings.HasPrefix(made.Name, "a-") {
		t.Errorf("made up %q", made.Name)
	}
	n.do("POST", path+"/forks", rest.ForkCreate{Name: "f", Replicas: 1}).refused(409, "already_exists")
	n.do("POST", path+"/forks", rest.ForkCreate{Replicas: 0}).refused(400, "invalid")
	n.do("POST", v1+"/sandboxes/nobody/forks", rest.ForkCreate{Replicas: 1}).refused(404, "not_found")
	if l := as[rest.ForkList](n.do("GET", v1+"/forks", nil).ok(200)); len(l.Items) != 2 {
		t.Errorf("%+v", l)
	}
	n.do("DELETE", v1+"/sandboxes/f-1", nil).ok(200)
	if got := as[rest.Fork](n.do("GET", v1+"/forks/f", nil).ok(200)); len(got.Children) != 2 {
		t.Errorf("%+v", got)
	}
	n.do("DELETE", v1+"/forks/f", nil).ok(204)
	n.do("GET", v1+"/sandboxes/f-2", nil).refused(410, "ended")
	n.do("GET", path, nil).ok(200)
	n.do("GET", v1+"/forks/f", nil).refused(404, "not_found")
	n.do("DELETE", v1+"/forks/f", nil).refused(404, "not_found")
}

// TestIdempotency: a retry with the same key gets the first answer, another body
// is refused, and keys are of one route.
func TestIdempotency(t *testing.T) {
	n := newNode(t)
	n.setUp()
	post := func(path string, body any, key string) *response {
		return n.do("POST", path, body, "Idempotency-Key", key)
	}
	first := post(v1+"/sandboxes", rest.SandboxCreate{Pool: "pool"}, "k").ok(201)
	again := post(v1+"/sandboxes", rest.SandboxCreate{Pool: "pool"}, "k").ok(201)
	if string(first.body) != string(again.body) || again.header.Get("Idempotency-Replayed") != "true" || first.header.Get("Idempotency-Replayed") != "" {
		t.Errorf("%s and %s", first.body, again.body)
	}
	post(v1+"/sandboxes", rest.SandboxCreate{Pool: "pool", Timeout: "1h"}, "k").refused(409, "conflict")
	post(v1+"/sandboxes", rest.SandboxCreate{Pool: "pool"}, strings.Repeat("k", 256)).refused(400, "invalid")
	source := v1 + "/sandboxes/" + as[rest.Sandbox](first).Name
	fork := post(source+"/forks", rest.ForkCreate{Replicas: 2}, "k").ok(201)
	if again := post(source+"/forks", rest.ForkCreate{Replicas: 2}, "k").ok(201); string(again.body) != string(fork.body) {
		t.Errorf("%s and %s", fork.body, again.body)
	}
	post(source+"/forks", rest.ForkCreate{Replicas: 3}, "k").refused(409, "conflict")
	// One that failed is tried again.
	post(v1+"/sandboxes", rest.SandboxCreate{Pool: "later"}, "l").refused(404, "not_found")
	n.do("PUT", v1+"/pools/later", rest.PoolSpec{Template: "python"}).ok(200)
	n.Eventually(func() bool {
		return post(v1+"/sandboxes", rest.SandboxCreate{Pool: "later"}, "l").status == 201
	})
	if l := as[rest.SandboxList](n.do("GET", v1+"/sandboxes", nil).ok(200)); len(l.Items) != 4 {
		t.Errorf("%d sandboxes", len(l.Items))
	}
}
