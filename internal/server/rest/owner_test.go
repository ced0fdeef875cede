package rest

import (
	"bytes"
	"net/http"
	"strings"
	"testing"
	"time"

	"agentrun.dev/api/rest"
	"agentrun.dev/internal/access"
	"agentrun.dev/internal/client"
	"agentrun.dev/internal/sandbox"
)

// ownedNode is a node with a sandbox, its pool and its template that have an owner, and a token
// that the controller has made.
func ownedNode(t *testing.T, token string) (*testNode, sandbox.Sandbox) {
	t.Helper()
	n := newNode(t)
	n.setUp()
	ctx := sandbox.WithOwning(t.Context())
	k := func(name sandbox.Name) sandbox.Key { return sandbox.Key{Namespace: "default", Name: name} }
	template, err := n.Manager.Template(ctx, k("python"))
	if err != nil {
		t.Fatal(err)
	}
	pool, _, err := n.Manager.Pool(ctx, k("pool"))
	if err != nil {
		t.Fatal(err)
	}
	if _, err := n.Manager.ApplyTemplate(ctx, template.Key, template.Spec, "owner-t"); err != nil {
		t.Fatal(err)
	}
	if _, err := n.Manager.ApplyPool(ctx, pool.Key, pool.Spec, "owner-p"); err != nil {
		t.Fatal(err)
	}
	s, _, err := n.Manager.Claim(ctx, sandbox.ClaimRequest{Key: k("owned"), Owner: "owner-s", Token: sandbox.HashToken(token), Spec: sandbox.ClaimSpec{Pool: "pool"}})
	if err != nil {
		t.Fatal(err)
	}
	return n, s
}

// TestOwned: keys, those of admins too, use owned objects, and neither change nor delete them;
// the error names the owner. Root may do both.
func TestOwned(t *testing.T) {
	n, s := ownedNode(t, "ars_given")
	const owned = v1 + "/sandboxes/owned"
	for _, role := range []access.Role{access.RoleAdmin, access.RoleUser} {
		u := n.with(n.key(role, map[access.Role][]sandbox.Namespace{access.RoleUser: {"default"}}[role]...))
		if got := as[rest.Sandbox](u.do("GET", owned, nil).ok(200)); got.Owner != "owner-s" {
			t.Errorf("%+v", got)
		}
		for _, c := range []struct {
			method, path string
			body         any
			owner        string
		}{
			{"DELETE", owned, nil, "owner-s"},
			{"POST", owned + "/pause", nil, "owner-s"},
			{"POST", owned + "/resume", nil, "owner-s"},
			{"POST", owned + "/hibernate", nil, "owner-s"},
			{"POST", owned + "/extend", rest.Extend{Timeout: "1h"}, "owner-s"},
			{"POST", owned + "/extend", rest.Extend{Expires: new(time.Now().Add(time.Hour))}, "owner-s"},
			{"DELETE", owned + "/network/policy", nil, "owner-s"},
			{"DELETE", v1 + "/pools/pool", nil, "owner-p"},
			{"PUT", v1 + "/pools/pool", rest.PoolSpec{Template: "python"}, "owner-p"},
			{"PUT", v1 + "/templates/python", rest.TemplateSpec{Image: "python"}, "owner-t"},
		} {
			if e := u.do(c.method, c.path, c.body).refused(403, "permission_denied"); !strings.Contains(e.Cause, c.owner) {
				t.Errorf("%s %s: %+v", c.method, c.path, e)
			}
		}
		if r := as[rest.ExecResult](u.do("POST", owned+"/execs", rest.ExecRequest{Shell: "echo in"}).ok(200)); r.Stdout != "in\n" {
			t.Errorf("%+v", r)
		}
		name := string(role)
		f := as[rest.Fork](u.do("POST", owned+"/forks", rest.ForkCreate{Name: name, Replicas: 1}).ok(201))
		u.do("DELETE", v1+"/sandboxes/"+f.Children[0].Name, nil).ok(200)
		u.do("POST", v1+"/sandboxes", rest.SandboxCreate{Name: "of-" + name, Pool: "pool"}).ok(201)
	}
	if p := as[rest.Pool](n.do("GET", v1+"/pools/pool", nil).ok(200)); p.Owner != "owner-p" {
		t.Errorf("%+v", p)
	}
	if p := as[rest.Template](n.do("PUT", v1+"/templates/python", rest.TemplateSpec{Image: "python"}).ok(200)); p.Owner != "owner-t" {
		t.Errorf("%+v", p)
	}
	n.do("DELETE", owned+"?id="+string(s.ID), nil).ok(200) // by root
}

// TestGivenToken: a token that its caller has made is good for its sandbox alone, and the
// derived one is refused. When the token is replaced, the requests made with it end.
func TestGivenToken(t *testing.T) {
	n, s := ownedNode(t, "ars_given")
	n.claim("other")
	mine := n.with("ars_given")
	mine.do("GET", v1+"/sandboxes/owned", nil).ok(200)
	mine.do("GET", v1+"/sandboxes/other", nil).refused(404, "not_found")
	mine.do("DELETE", v1+"/sandboxes/owned", nil).refused(403, "permission_denied")
	for _, text := range []string{n.Access.Token(s.ID), "ars_", "ars_given2", "given", string(s.Token), "ars_" + string(s.ID) + "_given"} {
		n.with(text).do("GET", v1+"/sandboxes/owned", nil).refused(401, "unauthenticated")
	}
	if body := n.do("GET", v1+"/sandboxes/owned", nil).ok(200).body; bytes.Contains(body, []byte(s.Token)) || bytes.Contains(body, []byte("ars_")) {
		t.Errorf("it is shown: %s", body)
	}
	user, err := client.New(client.Config{Socket: n.socket, Key: "ars_given"})
	if err != nil {
		t.Fatal(err)
	}
	defer user.Close()
	began := false
	_, err = user.Stream(t.Context(), "owned", rest.ExecRequest{Shell: "echo; exec sleep 1000"}, client.Output{Stdout: writeFunc(func() error {
		began = true
		_, err := n.Manager.SetToken(sandbox.WithOwning(t.Context()), s.Key, sandbox.HashToken("ars_next"))
		return err
	})})
	if !began || err == nil {
		t.Errorf("a stream with the token before: %v, %v", began, err)
	}
	mine.do("GET", v1+"/sandboxes/owned", nil).refused(401, "unauthenticated")
	n.with("ars_next").do("GET", v1+"/sandboxes/owned", nil).ok(200)
	other := n.with(n.token("other"))
	other.do("GET", v1+"/sandboxes/other", nil).ok(200)
}

// TestIDs: a request with an id is for the sandbox or the checkpoint that has it, and for no other
// under its name.
func TestIDs(t *testing.T) {
	n := newNode(t)
	n.setUp()
	n.claim("a")
	before := n.idOf("a")
	n.do("DELETE", v1+"/sandboxes/a?id="+before, nil).ok(200)
	n.claim("a")
	id := n.idOf("a")
	a := v1 + "/sandboxes/a"
	calls := []struct {
		method, path string
		body         any
		status       int
	}{
		{"POST", a + "/pause", nil, 200},
		{"POST", a + "/resume", nil, 200},
		{"POST", a + "/hibernate", nil, 200},
		{"POST", a + "/extend", rest.Extend{Timeout: "1h"}, 200},
		{"POST", a + "/forks", rest.ForkCreate{Name: "f", Replicas: 1}, 201},
		{"POST", a + "/checkpoints", rest.CheckpointCreate{Name: "c"}, 201},
		{"DELETE", a + "/network/policy", nil, 200},
		{"PUT", a + "/network/policy", rest.NetworkPolicy{}, 200},
		{"DELETE", a, nil, 200},
	}
	for _, c := range calls {
		n.do(c.method, c.path+"?id="+before, c.body).refused(410, "ended")
		n.do(c.method, c.path+"?id="+string(sandbox.NewID()), c.body).refused(409, "conflict")
		for _, bad := range []string{"", "x", "..%2f", strings.Repeat("a", 51)} {
			n.do(c.method, c.path+"?id="+bad, c.body).refused(400, "invalid")
		}
		n.do(c.method, c.path+"?id="+id+"&id="+id, c.body).refused(400, "invalid")
	}
	for _, c := range calls {
		n.do(c.method, c.path+"?id="+id, c.body).ok(c.status)
	}
	n.do("DELETE", v1+"/checkpoints/c?id="+id, nil).refused(409, "conflict")
	made := as[rest.Checkpoint](n.do("GET", v1+"/checkpoints/c", nil).ok(200))
	n.do("DELETE", v1+"/checkpoints/c?id="+made.Id, nil).ok(204)
	n.do("DELETE", v1+"/pools/pool?id="+id, nil).refused(400, "invalid") // pools have no ids
}

// TestExpires: an end time over REST.
func TestExpires(t *testing.T) {
	n := newNode(t)
	n.setUp()
	at := time.Now().Add(time.Hour).UTC()
	made := as[rest.Sandbox](n.do("POST", v1+"/sandboxes", rest.SandboxCreate{Name: "a", Pool: "pool", Expires: &at}).ok(201))
	if made.Expires == nil || !made.Expires.Equal(at) {
		t.Errorf("%+v", made)
	}
	later := at.Add(time.Hour)
	if s := as[rest.Sandbox](n.do("POST", v1+"/sandboxes/a/extend", rest.Extend{Expires: &later}).ok(200)); !s.Expires.Equal(later) {
		t.Errorf("%+v", s)
	}
	past := time.Now().Add(-time.Hour)
	for _, body := range []any{`{}`, rest.Extend{Timeout: "1h", Expires: &later}, rest.Extend{Expires: &past}, `{"expires":"0001-01-01T00:00:00Z"}`, `{"expires":"soon"}`} {
		n.do(http.MethodPost, v1+"/sandboxes/a/extend", body).refused(400, "invalid")
	}
	n.do("POST", v1+"/sandboxes", rest.SandboxCreate{Name: "b", Pool: "pool", Expires: &past}).refused(400, "invalid")
	n.do("POST", v1+"/sandboxes", `{"name":"b","pool":"pool","expires":"0001-01-01T00:00:00Z"}`).refused(400, "invalid")
}

// TestExpiresInNoYear: a time that is of the year 10000 in UTC is refused, and not a defect.
func TestExpiresInNoYear(t *testing.T) {
	n := newNode(t)
	n.setUp()
	at := n.claim("a")
	const late = "9999-12-31T23:59:59-12:00"
	n.do("POST", v1+"/sandboxes", map[string]string{"name": "b", "pool": "pool", "expires": late}).refused(400, "invalid")
	n.do("POST", at+"/extend", map[string]string{"expires": late}).refused(400, "invalid")
}

// TestForkOfMany: names for the children, all or none, and a checkpoint of the same instant.
func TestForkOfMany(t *testing.T) {
	n := newNode(t)
	n.setUp()
	n.claim("a")
	at := v1 + "/sandboxes/a/forks"
	f := as[rest.Fork](n.do("POST", at, rest.ForkCreate{Name: "f", Replicas: 2, Names: []string{"x", "y"}, Atomic: true, Checkpoint: "c"}).ok(201))
	if f.Children[0].Name != "x" || f.Children[1].Token != n.token("y") || f.Checkpoint != "c" {
		t.Errorf("%+v", f)
	}
	n.do("GET", v1+"/checkpoints/c", nil).ok(200)
	n.do("POST", at, rest.ForkCreate{Name: "g", Replicas: 2, Names: []string{"z", "x"}, Atomic: true}).refused(409, "already_exists")
	n.do("GET", v1+"/sandboxes/z", nil).refused(404, "not_found")
	partly := as[rest.Fork](n.do("POST", at, rest.ForkCreate{Name: "g", Replicas: 2, Names: []string{"z", "x"}}).ok(201))
	if partly.Children[0].Id == "" || partly.Children[1].Problem == "" {
		t.Errorf("%+v", partly)
	}
	for _, body := range []any{
		rest.ForkCreate{Replicas: 1, Names: []string{"b", "c"}}, rest.ForkCreate{Replicas: 2, Names: []string{"b", "b"}},
		rest.ForkCreate{Replicas: 1, Names: []string{"../b"}}, `{"replicas":1,"checkpoint":"../c"}`, `{"replicas":1,"children":[{"owner":"me"}]}`,
	} {
		n.do("POST", at, body).refused(400, "invalid")
	}
}

// TestTerminalOfAReplacedToken: a token of a terminal is no better than the token, or the key,
// that it was asked for with.
func TestTerminalOfAReplacedToken(t *testing.T) {
	n, s := ownedNode(t, "ars_given")
	const owned = v1 + "/sandboxes/owned"
	var tickets []string
	for range 16 {
		r := n.with("ars_given").do("POST", owned+"/terminal", rest.TerminalRequest{Argv: []string{"/bin/cat"}}).ok(201)
		tickets = append(tickets, as[rest.Terminal](r).Token)
	}
	if _, err := n.Manager.SetToken(sandbox.WithOwning(t.Context()), s.Key, sandbox.HashToken("ars_next")); err != nil {
		t.Fatal(err)
	}
	for _, ticket := range tickets {
		conn, res, err := n.dialTerminal(owned+"/terminal", ticket, "")
		if err == nil {
			_ = conn.CloseNow()
			t.Error("it opened")
		} else if res == nil || res.StatusCode != http.StatusUnauthorized {
			t.Errorf("%v, %v", res, err)
		}
	}
}
